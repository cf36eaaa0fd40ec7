"""An encoder, the one vector it gives for each row, and a linear head on that vector.

Everything private happens at that vector, so this file is careful about one thing: a row's vector
comes from that row alone. Nothing in it is random by default and nothing is shared by a batch, so
padding, grouping and splitting rows over workers change it by rounding at most.
"""

import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto as auto
from transformers.utils import logging as log

from dpfp_ray import assets
from dpfp_ray.assets import encoder_identity as encoder_identity
from dpfp_ray.errors import UserError

REPRESENTATIONS = ("pooler", "cls", "mean")
HEAD_STD = 0.02  # BERT's own initializer_range
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
_POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
# Have a causal-LM class and no masked-LM class, yet AutoModel runs them in both directions.
_BOTH_WAYS = ("xlnet", "bert-generation")


class Classifier(Module):
    """`forward(batch)`: logits of shape (rows, classes); `represent(batch)`: (rows, width).

    A batch is what the tokenizer gives: `input_ids`, `attention_mask` and, where there are any,
    `token_type_ids`, each of shape (rows, length). Zero rows are a normal batch.
    """

    def __init__(
        self,
        encoder: Module,
        representation: str,
        classes: int,
        *,
        frozen: bool = False,
        head_seed: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.representation = representation
        self.classes = classes
        self.frozen = frozen
        self._accepted = frozenset(inspect.signature(encoder.forward).parameters)
        self._token_types: int | None = getattr(encoder.config, "type_vocab_size", None)
        self._position_padding, self._longest = _position_table(encoder)
        self._position_rule: str | None = None
        self.width = 0
        self._probe()
        self.head = torch.nn.utils.skip_init(Linear, self.width, classes)
        initialise_head(self, head_seed)
        if frozen:  # never the other way round: RoFormer's sine table, for one, must stay fixed
            encoder.requires_grad_(False)
        pooler = getattr(encoder, "pooler", None)
        if representation != "pooler" and isinstance(pooler, Module):
            pooler.requires_grad_(False)  # an architecture that always builds one: h ignores it

    # (scaling, C) where the head was made for bounded rows: inference then bounds them too.
    bounded: tuple[str, float] | None = None

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.classify(self.represent(batch))

    def classify(self, h: Tensor) -> Tensor:
        """Logits for representations, as inference computes them."""
        logits: Tensor = self.head(h if self.bounded is None else bound_rows(h, *self.bounded))
        return logits

    def represent(self, batch: Mapping[str, Tensor]) -> Tensor:
        """h(x): one fp32 vector for each row; without a graph if the encoder is frozen."""
        rows, length = batch["input_ids"].shape
        if rows == 0:
            # No row, no encoder; but backward still works, through an empty slice of a weight.
            weight = next(self.encoder.parameters())
            return weight.reshape(-1)[:0].reshape(0, self.width).float()
        if self._longest is not None and length > self._longest:
            raise UserError(f"rows of {length} tokens; this encoder reads at most {self._longest}")
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            output = self.encoder(**self._inputs(batch))
            if self.representation == "pooler":
                pooled: Tensor = output.pooler_output.float()
                return pooled
            hidden: Tensor = output.last_hidden_state.float()
            if self.representation == "cls":
                return hidden[:, 0]
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)

    def _inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the encoder's forward takes, with what it would fill in by itself spelt out.

        Left alone, encoders look up one row of positions (and of token types) for the whole batch.
        Opacus cannot split the gradient of such a row by example, and its ghost norms are wrong on
        an expanded one; so every row gets its own, contiguous in memory.
        """
        inputs = {key: value for key, value in batch.items() if key in self._accepted}
        ids = inputs["input_ids"]
        if "token_type_ids" in self._accepted and self._token_types is not None:
            if self._token_types == 0:
                inputs.pop("token_type_ids", None)
            elif self._token_types == 1 or "token_type_ids" not in inputs:
                inputs["token_type_ids"] = torch.zeros_like(ids)
        if self._position_rule == "count":
            positions = torch.arange(ids.shape[1], device=ids.device)
            inputs["position_ids"] = positions.repeat(ids.shape[0], 1)
        elif self._position_rule == "skip_padding":
            assert self._position_padding is not None
            real = ids.ne(self._position_padding).long()
            inputs["position_ids"] = real.cumsum(1) * real + self._position_padding
        return inputs

    @torch.no_grad()
    def _probe(self) -> None:
        """Ask the encoder itself how it numbers positions and how wide h is.

        Architectures count from 0, from after the padding id, or from elsewhere. No rule is trusted
        before it reproduces the encoder's own output; with none, the encoder fills in its own.
        """
        padding = getattr(self.encoder.config, "pad_token_id", None) or 0
        real = [number for number in range(3, 8) if number != padding][:4]
        ids = torch.tensor([real, [*real[:2], padding, padding]])
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        batch = {"input_ids": ids, "attention_mask": mask}
        plain = {key: value for key, value in batch.items() if key in self._accepted}
        default = self.encoder(**plain).last_hidden_state
        rules: list[str | None] = ["count", None] if "position_ids" in self._accepted else [None]
        if self._position_padding is not None:
            rules.insert(0, "skip_padding")
        for self._position_rule in rules:
            output = self.encoder(**self._inputs(batch)).last_hidden_state
            if torch.allclose(output[mask.bool()], default[mask.bool()], atol=1e-5):
                break
        self.width = self.represent(batch).shape[-1]


def bound_rows(h: Tensor, scaling: str, C: float) -> Tensor:
    """Rows of norm at most C ("clip": h min(1, C/‖h‖)) or of norm C ("unit"); 0 stays 0."""
    norms = torch.linalg.vector_norm(h, dim=1, keepdim=True)
    floor = C if scaling == "clip" else torch.finfo(h.dtype).tiny
    return h * (C / norms.clamp(min=floor))


def initialise_head(model: Classifier, head_seed: int) -> None:
    """New head weights from a generator of their own; the global one is not touched."""
    generator = torch.Generator().manual_seed(head_seed)
    torch.nn.init.normal_(model.head.weight, std=HEAD_STD, generator=generator)
    torch.nn.init.zeros_(model.head.bias)


def build_classifier(
    model: str,
    representation: str,
    classes: int,
    *,
    dropout: float = 0.0,
    head_seed: int = 0,
    scope: str = "all",
) -> Classifier:
    """Load an encoder in fp32 and put a new head on it; the same arguments give the same weights.

    Dropout is off unless asked for: its masks would depend on how rows are split over workers.
    `scope="head"` freezes the encoder. The global random state is neither read nor changed.
    """
    if scope not in ("all", "head"):
        raise UserError(f"scope must be all or head, not {scope!r}")
    representation = resolve_representation(model, representation)
    config, kind = _load_config(model)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, dropout)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values for generation: memory for nothing
    options: dict[str, Any] = {"attn_implementation": "eager"}
    if getattr(kind, "_supports_sdpa", False):
        options["attn_implementation"] = "sdpa"
    if "add_pooling_layer" in inspect.signature(kind.__init__).parameters:
        options["add_pooling_layer"] = representation == "pooler"
    folder = assets.local_folder(model)
    if not assets.weight_files(folder):
        raise UserError(f"model {model!r}: no weights (model.safetensors) in {folder}")
    with torch.random.fork_rng(devices=[]):
        # transformers draws the weights that a checkpoint lacks from this generator.
        torch.default_generator.manual_seed(head_seed)
        with _quiet(), _one_line(f"model {model!r}: cannot load the weights in {folder}"):
            encoder, report = AutoModel.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True, **options
            )
        _check_missing(model, encoder, set(report["missing_keys"]), head_seed)
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        silent = f"model {model!r}: {config.model_type} gives no hidden states for tokens"
        with _quiet(), _one_line(silent):
            return Classifier(
                encoder, representation, classes, frozen=scope == "head", head_seed=head_seed
            )


def resolve_representation(model: str, representation: str) -> str:
    """`pooler`, `cls` or `mean`: "auto" decided, and what the encoder cannot give refused.

    "auto" takes what the weights were trained for: the known models' own choice, the pooling that a
    sentence-transformers folder declares, `mean` for left-to-right models, `pooler` (the paper's
    choice) where the checkpoint really holds one, else `cls`.
    """
    if representation not in ("auto", *REPRESENTATIONS):
        choices = ", ".join(("auto", *REPRESENTATIONS))
        raise UserError(f"representation must be one of {choices}, not {representation!r}")
    config, kind = _load_config(model)
    causal = getattr(config, "is_decoder", False) or (
        config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and config.model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and config.model_type not in _BOTH_WAYS
    )
    refused = f"representation {representation!r} with {model!r}: {config.model_type}"
    if representation == "cls" and causal:
        raise UserError(
            f"{refused} reads left to right, so its first position sees only the first token; "
            "use mean"
        )
    if representation == "pooler" and not _builds_pooler(config, kind):
        raise UserError(f"{refused} has no pooler; use {'mean' if causal else 'cls or mean'}")
    if representation != "auto":
        return representation
    if trained_for := assets.default_representation(model) or _declared_pooling(model):
        return trained_for
    if causal:
        return "mean"
    return "pooler" if _builds_pooler(config, kind) and _holds_pooler(model) else "cls"


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer, which always has a padding token."""
    folder = assets.local_folder(model)
    # transformers makes an empty tokenizer of a folder that has none: every word would be unknown.
    if not any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern)):
        raise UserError(f"model {model!r}: no tokenizer (tokenizer.json, vocab.txt) in {folder}")
    with _quiet(), _one_line(f"model {model!r}: cannot load the tokenizer in {folder}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"model {model!r}: its tokenizer has no pad_token; add one")
        # Padding is masked out everywhere, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def trainable_parameters(classifier: Module) -> list[tuple[str, Parameter]]:
    """Names and weights that an optimizer should get, in a fixed order."""
    return [(name, p) for name, p in classifier.named_parameters() if p.requires_grad]


def count_parameters(classifier: Module, *, trainable_only: bool = False) -> int:
    """How many numbers the classifier holds, or how many of them training may change."""
    return sum(p.numel() for p in classifier.parameters() if p.requires_grad or not trainable_only)


def _load_config(model: str) -> tuple[Any, type[Any]]:
    """The encoder's config and the class that AutoModel makes of it."""
    folder = assets.local_folder(model)
    if not (folder / "config.json").is_file():
        raise UserError(f"model {model!r}: no config.json in {folder}")
    with _quiet(), _one_line(f"model {model!r}: cannot read {folder / 'config.json'}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise UserError(
            f"model {model!r}: {config.model_type} is an encoder-decoder; "
            "use an encoder (BERT, RoBERTa, MPNet, DistilBERT…)"
        )
    with _one_line(f"model {model!r}: transformers has no plain encoder for {config.model_type}"):
        found: Any = auto.MODEL_MAPPING[type(config)]
    kind = found[0] if isinstance(found, tuple) else found
    if "input_ids" not in inspect.signature(kind.forward).parameters:
        raise UserError(f"model {model!r}: {config.model_type} does not read text")
    return config, kind


def _builds_pooler(config: Any, kind: type[Any]) -> bool:
    if "add_pooling_layer" in inspect.signature(kind.__init__).parameters:
        return True
    with torch.device("meta"), _quiet():
        return getattr(kind(config), "pooler", None) is not None


def _holds_pooler(model: str) -> bool:
    """Whether the checkpoint has trained pooler weights (roberta-base, for one, has not)."""
    for file in assets.weight_files(assets.local_folder(model)):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as weights:
                names = list(weights.keys())
        else:
            names = list(torch.load(file, map_location="meta", mmap=True, weights_only=True))
        if any("pooler." in name for name in names):
            return True
    return False


def _declared_pooling(model: str) -> str | None:
    """The pooling that a sentence-transformers folder was trained with, if it is one of ours."""
    file = assets.local_folder(model) / "1_Pooling" / "config.json"
    declared = json.loads(file.read_text()) if file.is_file() else {}
    keys = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
    return next((name for name, key in keys.items() if declared.get(key)), None)


def _position_table(encoder: Module) -> tuple[int | None, int | None]:
    """The padding id that positions are offset by, and the longest row; None where unlimited."""
    for name, module in encoder.named_modules():
        if name.rpartition(".")[2] in _POSITION_TABLES and isinstance(module, Embedding):
            padding = module.padding_idx
            return padding, module.num_embeddings - (0 if padding is None else padding + 1)
    return None, None


def _check_missing(model: str, encoder: Module, missing: set[str], head_seed: int) -> None:
    """Say which weights are random; an encoder that is mostly random is an error."""
    pooler = {name for name in missing if "pooler" in name}
    if pooler:
        warnings.warn(
            f"{model}: the checkpoint has no pooler; it starts random (seed {head_seed})",
            stacklevel=3,
        )
    others = sorted(missing - pooler)
    if len(others) > len(encoder.state_dict()) / 2:
        raise UserError(f"model {model!r}: its weights file lacks {others[0]} and most others")
    if others:
        warnings.warn(f"{model}: random weights for {', '.join(others)}", stacklevel=3)


@contextmanager
def _quiet() -> Iterator[None]:
    """No loading bars, reports or advice from transformers."""
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn whatever a library raises into one line that says what was being done."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{what} ({type(error).__name__}: {reason})") from error
