"""A text classifier: an encoder, one vector for each text, and a linear head on it.

This file goes with exported models and needs nothing but torch and transformers. Where the head
was made for vectors of bounded length, vectors are bounded here as they were in training.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.pipelines.text_classification import TextClassificationPipeline


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
        **others: Any,
    ) -> None:
        self.encoder = encoder or {}
        self.encoder_options = encoder_options or {}
        self.representation, self.width = representation, width
        self.bounded, self.precision = bounded, precision
        super().__init__(**others)


class DpfpForSequenceClassification(PreTrainedModel):
    """Logits of each class, as `dpfp predict` computes them."""

    config_class = DpfpConfig
    _supports_sdpa = True

    def __init__(self, config: DpfpConfig) -> None:
        super().__init__(config)
        inner = dict(config.encoder)
        encoder = AutoConfig.for_model(inner.pop("model_type"), **inner)
        self.encoder = AutoModel.from_config(encoder, **config.encoder_options)
        self.head = nn.Linear(config.width, len(config.id2label or {}))
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
        **_: Any,
    ) -> SequenceClassifierOutput:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        given = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": token_type_ids}
        inputs = {k: v for k, v in given.items() if v is not None and k in self.accepted}
        bf16 = self.config.precision == "bf16"
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=bf16):
            output = self.encoder(**inputs)
        logits = self.head(self.bound(self.pool(output, mask)).to(self.head.weight.dtype))
        loss: Any = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def pool(self, output: Any, mask: Tensor) -> Tensor:
        """One vector for each text."""
        if self.config.representation == "pooler":
            pooled: Tensor = output.pooler_output.float()
            return pooled
        hidden: Tensor = output.last_hidden_state.float()
        if self.config.representation == "cls":
            return hidden[:, 0]
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)

    def bound(self, h: Tensor) -> Tensor:
        """Vectors of length at most C ("clip") or exactly C ("unit"), if the head needs that."""
        if self.config.bounded is None:
            return h
        how, length = self.config.bounded
        norms = torch.linalg.vector_norm(h, dim=1, keepdim=True)
        return h * (length / norms.clamp(min=length if how == "clip" else 1e-38))


class DpfpPipeline(TextClassificationPipeline):
    """`pipeline("text-classification")` that truncates long texts where training did."""

    def check_model_type(self, supported_models: Any) -> None:
        """The model above is the one for this pipeline; there is nothing to look up."""

    def _sanitize_parameters(
        self, function_to_apply: Any = None, top_k: Any = "", **given: Any
    ) -> Any:
        before, during, after = super()._sanitize_parameters(function_to_apply, top_k, **given)
        return {"truncation": "longest_first", **before}, during, after
