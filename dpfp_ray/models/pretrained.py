"""Pretrained encoders: found, checked, loaded, and given the pooling that suits them."""

import inspect
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import Module
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto as auto
from transformers.utils import logging as log

from dpfp_ray.models import download
from dpfp_ray.models.classifier import Classifier, set_dropout
from dpfp_ray.models.scopes import Lora, restrict
from dpfp_ray.plan.checks import check_representation, is_joined, layer_numbers
from dpfp_ray.plan.method_spec import SCOPES, scope_kind
from dpfp_ray.system.errors import UserError, unknown

_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
# Have a causal-LM class and no masked-LM class, yet AutoModel runs them in both directions.
_BOTH_WAYS = ("xlnet", "bert-generation")
# Numbers of a config that are dimensions of some weight.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def build_classifier(
    model: str,
    representation: str,
    classes: int,
    *,
    dropout: float = 0.0,
    head_seed: int = 0,
    scope: str = "all",
    lora: Lora | None = None,
) -> Classifier:
    """Load an encoder in fp32 and put a new head on it; the same arguments give the same weights.

    Dropout is off unless asked for, whatever the folder's config says: its masks would depend on
    how rows are split over workers.
    `scope` says what trains (`scopes.py`). The global random state is neither read nor changed.
    """
    if scope_kind(scope) not in SCOPES:
        raise UserError(unknown("scope", scope, SCOPES))
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
    folder = download.local_folder(model)
    if not download.weight_files(folder):
        raise UserError(f"model {model!r}: no weights (model.safetensors) in {folder}")
    with torch.random.fork_rng(devices=[]):
        # transformers draws the weights that a checkpoint lacks from this generator.
        torch.default_generator.manual_seed(head_seed)
        with quiet(), _one_line(f"model {model!r}: cannot load the weights in {folder}"):
            encoder, report = AutoModel.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True, **options
            )
        _check_missing(model, encoder, set(report["missing_keys"]), head_seed)
        set_dropout(encoder, dropout)
        silent = f"model {model!r}: {config.model_type} gives no hidden states for tokens"
        with quiet(), _one_line(silent):
            classifier = Classifier(
                encoder,
                representation,
                classes,
                frozen=scope == "head",
                head_seed=head_seed,
                dropout=dropout,
            )
        restrict(classifier, scope, lora, head_seed)
    return classifier


def resolve_representation(model: str, representation: str) -> str:
    """As the encoder was trained for it where it is "auto"; what it cannot give is refused.

    "auto" takes what the weights were trained for: the known models' own choice, the pooling that a
    sentence-transformers folder declares, `mean` for left-to-right models, `pooler` (the paper's
    choice) where the checkpoint really holds one, else `cls`.
    """
    check_representation(representation)
    config, kind = _load_config(model)
    if is_joined(representation):
        highest = max(layer_numbers(representation), default=0)
        if highest > (count := _count_layers(config)):
            raise UserError(
                f"representation {representation} with {model!r}: its layers are 1 to {count}, and "
                f"0 is the embeddings"
            )
        return representation
    causal = getattr(config, "is_decoder", False) or (
        config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and config.model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and config.model_type not in _BOTH_WAYS
    )
    refused = f"representation {representation!r} with {model!r}: {config.model_type}"
    if representation == "cls" and causal:
        raise UserError(
            f"{refused} reads left to right, so its first position sees only the first token; "
            "use mean or last"
        )
    if representation == "pooler" and not _builds_pooler(config, kind):
        raise UserError(
            f"{refused} has no pooler; use {'mean or last' if causal else 'cls or mean'}"
        )
    if representation != "auto":
        return representation
    if model in download.KNOWN_MODELS:
        return "mean"
    if trained_for := _declared_pooling(model):
        return trained_for
    if causal:
        return "mean"
    # Some checkpoints (roberta-base, for one) have no trained pooler.
    holds = _builds_pooler(config, kind) and any(
        "pooler." in name for name in _weight_shapes(model)
    )
    return "pooler" if holds else "cls"


def width_of_layers(model: str) -> int:
    """Of all layers' means joined, the embeddings' among them."""
    config, _ = _load_config(model)
    return (_count_layers(config) + 1) * int(config.hidden_size)


def _count_layers(config: Any) -> int:
    """Configs have their own names for it, which transformers maps to this one."""
    return int(config.num_hidden_layers)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    folder = download.local_folder(model)
    # transformers makes an empty tokenizer of a folder that has none: every word would be unknown.
    if not any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern)):
        raise UserError(f"model {model!r}: no tokenizer (tokenizer.json, vocab.txt) in {folder}")
    with quiet(), _one_line(f"model {model!r}: cannot load the tokenizer in {folder}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"model {model!r}: its tokenizer has no pad_token; add one")
        # Padding is masked out everywhere, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_config(model: str) -> tuple[Any, type[Any]]:
    """The encoder's config and the class that AutoModel makes of it."""
    folder = download.local_folder(model)
    if not (folder / "config.json").is_file():
        raise UserError(f"model {model!r}: no config.json in {folder}")
    with quiet(), _one_line(f"model {model!r}: cannot read {folder / 'config.json'}"):
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
    _check_sizes(model, config)
    return config, kind


def _check_sizes(model: str, config: Any) -> None:
    """Refuse sizes that the weights cannot have, before anything of these sizes is built."""
    shapes = _weight_shapes(model)
    widest = max((size for shape in shapes.values() for size in shape), default=2**31)
    limits = dict.fromkeys(_SIZES, widest) | {"num_hidden_layers": len(shapes) or 1000}
    for name, most in limits.items():
        value = getattr(config, name, 1)
        if isinstance(value, int) and not 1 <= value <= most:
            raise UserError(
                f"model {model!r}: {name} is {value} in its config.json, and its weights allow 1 "
                f"to {most:,}; get the folder again"
            )


def _builds_pooler(config: Any, kind: type[Any]) -> bool:
    if "add_pooling_layer" in inspect.signature(kind.__init__).parameters:
        return True
    with torch.device("meta"), quiet():
        return getattr(kind(config), "pooler", None) is not None


def _weight_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the checkpoint's weights by name; the weights themselves are not read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in download.weight_files(download.local_folder(model)):
        with _one_line(f"model {model!r}: cannot load the weights in {file}"):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as weights:
                    for name in weights.keys():  # noqa: SIM118
                        shapes[name] = tuple(weights.get_slice(name).get_shape())
            else:
                pickled = torch.load(file, map_location="meta", mmap=True, weights_only=True)
                shapes |= {name: tuple(tensor.shape) for name, tensor in pickled.items()}
    return shapes


def _declared_pooling(model: str) -> str | None:
    """The pooling that a sentence-transformers folder was trained with, if it is one of ours."""
    file = download.local_folder(model) / "1_Pooling" / "config.json"
    with _one_line(f"model {model!r}: cannot read {file}"):
        declared = dict(json.loads(file.read_text())) if file.is_file() else {}
    keys = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    return next((name for name, key in keys.items() if declared.get(f"pooling_mode_{key}")), None)


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
def quiet() -> Iterator[None]:
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
