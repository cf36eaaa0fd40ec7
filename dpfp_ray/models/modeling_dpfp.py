"""A text classifier: an encoder, one vector for each text, and a linear head on it.

This file goes with exported models and needs nothing but torch and transformers (and peft, for an
adapter). Where the head was made for vectors of bounded length, vectors are bounded here as they
were in training.
"""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.pipelines.text_classification import TextClassificationPipeline

# One vector for each text ------------------------------------------------------------------------

PAIR = "pair"  # how a pair is represented, and the start of its second text's inputs: `pair_…`


def reads_layers(representation: str) -> bool:
    return representation.partition(":")[0] == "layers"


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    hidden = hidden.float()
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def one_vector(output: Any, mask: Tensor, representation: str) -> Tensor:
    if representation == "pooler":
        pooled: Tensor = output.pooler_output.float()
        return pooled
    hidden: Tensor = output.last_hidden_state
    if representation == "last":  # the last real token, whichever side is padded
        place = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).amax(1)
        return hidden[torch.arange(len(hidden), device=mask.device), place].float()
    return hidden[:, 0].float() if representation == "cls" else mean_of_tokens(hidden, mask)


def layer_means(output: Any, mask: Tensor) -> Tensor:
    """(rows, layers + 1, width): the embeddings' mean, then every layer's.

    The last one is that of what the encoder gives in the end, after a last norm if it has one.
    """
    layers = [*output.hidden_states[:-1], output.last_hidden_state]
    return torch.stack([mean_of_tokens(hidden, mask) for hidden in layers], 1)


def unit(parts: Tensor) -> Tensor:
    """Vectors along the last axis scaled to norm 1; 0 stays 0."""
    norms = torch.linalg.vector_norm(parts, dim=-1, keepdim=True)
    return parts / norms.clamp(min=torch.finfo(parts.dtype).tiny)


def chosen_layers(means: Tensor, representation: str) -> Tensor:
    """Those that `layers:3,4` names; all for `layers`."""
    numbers = representation.partition(":")[2]
    return means[:, [int(number) for number in numbers.split(",")]] if numbers else means


def relation(u: Tensor, v: Tensor) -> Tensor:
    """(rows, 4, width): what two texts say together, each part to be scaled by itself."""
    u, v = unit(u), unit(v)
    return torch.stack([u, v, (u - v).abs(), u * v], 1)


def join(parts: Tensor, centre: Tensor | None = None) -> Tensor:
    """Parts of equal length, one after the other, in a vector of norm 1.

    `centre` is taken off before, and each part is scaled again: what is left of it, however short,
    is what tells rows apart.
    """
    count = parts.shape[1]
    parts = unit(parts)
    if centre is not None:
        parts = unit(parts - centre.reshape(parts.shape[1:]) * count**0.5)
    return (parts / count**0.5).flatten(1)


class DpfpConfig(PreTrainedConfig):
    """`encoder` is the encoder's own config; `bounded` is None or (how, length)."""

    model_type = "dpfp_classifier"

    def __init__(
        self,
        encoder: dict[str, Any] | None = None,
        encoder_options: dict[str, Any] | None = None,
        representation: str = "mean",
        width: int = 0,
        bounded: tuple[str, float] | None = None,
        precision: str = "fp32",
        centred: bool = False,
        **others: Any,
    ) -> None:
        self.encoder = encoder or {}
        self.encoder_options = encoder_options or {}
        self.representation, self.width = representation, width
        self.bounded, self.precision, self.centred = bounded, precision, centred
        super().__init__(**others)


class DpfpForSequenceClassification(PreTrainedModel):
    """Logits of each class, as `dpfp predict` computes them."""

    config_class = DpfpConfig
    _supports_sdpa = True
    centre: Tensor | None  # what is taken off each vector, if anything

    def __init__(self, config: DpfpConfig) -> None:
        super().__init__(config)
        inner = dict(config.encoder)
        encoder = AutoConfig.for_model(inner.pop("model_type"), **inner)
        self.encoder = AutoModel.from_config(encoder, **config.encoder_options)
        self.head = nn.Linear(config.width, len(config.id2label or {}))
        self.register_buffer("centre", torch.zeros(config.width) if config.centred else None)
        self.accepted = set(inspect.signature(self.encoder.forward).parameters)
        if getattr(encoder, "type_vocab_size", None) in (0, 1):
            self.accepted.discard("token_type_ids")  # tokenizers may number what has no place
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
        pair_token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        first = self.encode(input_ids, attention_mask, token_type_ids)
        if self.config.representation == PAIR:
            if pair_input_ids is None:
                raise ValueError(
                    "this model reads its two texts one by one: tokenize the second by itself and "
                    "give it as pair_input_ids and pair_attention_mask, or use the pipeline with "
                    '{"text": …, "text_pair": …}'
                )
            second = self.encode(pair_input_ids, pair_attention_mask, pair_token_type_ids)
            h = join(relation(first, second), self.centre)
        elif reads_layers(self.config.representation):
            h = join(chosen_layers(first, self.config.representation), self.centre)
        else:
            h = first if self.centre is None else first - self.centre
        logits = self.head(self.bound(h).to(self.head.weight.dtype))
        loss: Any = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def encode(self, ids: Tensor, mask: Tensor | None, types: Tensor | None) -> Tensor:
        """What the encoder says of each text: a vector, or one for each layer."""
        mask = torch.ones_like(ids) if mask is None else mask
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        inputs: dict[str, Any] = {
            name: value
            for name, value in given.items()
            if value is not None and name in self.accepted
        }
        if reads_layers(self.config.representation):
            inputs["output_hidden_states"] = True
        bf16 = self.config.precision == "bf16"
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            output = self.encoder(**inputs)
        if reads_layers(self.config.representation):
            return layer_means(output, mask)
        return one_vector(output, mask, self.config.representation)

    def bound(self, h: Tensor) -> Tensor:
        """Vectors of length at most C ("clip") or exactly C ("unit"), if the head needs that."""
        if self.config.bounded is None:
            return h
        how, length = self.config.bounded
        norms = torch.linalg.vector_norm(h, dim=1, keepdim=True)
        return h * (length / norms.clamp(min=length if how == "clip" else 1e-38))


def from_adapter(folder: str, base: str | None = None) -> DpfpForSequenceClassification:
    """The model of a folder with a PEFT adapter; `base` is the encoder, if not the one it names."""
    # By name: transformers would ask whoever loads a whole model for each `import` in this file.
    peft = import_module("peft")
    config = DpfpConfig.from_pretrained(folder)
    base = base or str(peft.PeftConfig.from_pretrained(folder).base_model_name_or_path)
    options = {"dtype": torch.float32, **config.encoder_options}
    model = DpfpForSequenceClassification(config)
    encoder = AutoModel.from_pretrained(base, **options)
    model.encoder = peft.PeftModel.from_pretrained(encoder, folder).merge_and_unload()
    model.load_state_dict(load_file(Path(folder) / "head.safetensors"), strict=False)
    model.eval()
    return model


class DpfpPipeline(TextClassificationPipeline):
    """`pipeline("text-classification")` that truncates long texts where training did."""

    def check_model_type(self, supported_models: Any) -> None:
        """The model above is the one for this pipeline; there is nothing to look up."""

    def _sanitize_parameters(
        self, function_to_apply: Any = None, top_k: Any = "", **given: Any
    ) -> Any:
        before, during, after = super()._sanitize_parameters(function_to_apply, top_k, **given)
        return {"truncation": "longest_first", **before}, during, after

    def preprocess(self, inputs: Any, **options: Any) -> Any:  # type: ignore[override]
        """Of a model that reads pairs text by text: each text tokenized by itself."""
        if self.model.config.representation != PAIR:
            return super().preprocess(inputs, **options)
        if not isinstance(inputs, dict) or set(inputs) != {"text", "text_pair"}:
            raise ValueError('this model reads pairs: give {"text": …, "text_pair": …}')
        found = super().preprocess(inputs["text"], **options)
        second = super().preprocess(inputs["text_pair"], **options)
        return {**found, **{f"{PAIR}_{name}": value for name, value in second.items()}}


def pipeline_from_adapter(folder: str, base: str | None = None) -> DpfpPipeline:
    model = from_adapter(folder, base)
    tokenizer = AutoTokenizer.from_pretrained(folder, config=model.config)
    return DpfpPipeline(model=model, tokenizer=tokenizer)
