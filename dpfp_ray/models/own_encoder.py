"""An encoder that the caller holds in memory: any module from token ids to one vector a token.

Its own weights are never trained: every run gets a copy, so that the same call starts from the same
weights again.
"""

import copy
import hashlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dpfp_ray.data.batches import PART_COST, split_rows
from dpfp_ray.data.tokens import PairTable, TokenTable
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.representations import Floats, RepresentationTable
from dpfp_ray.models.row_independence import set_dropout
from dpfp_ray.models.row_store import INFERENCE_ROWS
from dpfp_ray.models.scopes import Lora, restrict
from dpfp_ray.system.errors import UserError

CUSTOM = "custom:"  # how a plan's `model` says that the encoder was given to the call
_NEEDED = ("model_max_length", "num_special_tokens_to_add", "pad_token_id", "special_tokens_map")


class Adapter(Module):
    """A hand-written module behind the interface of a transformers encoder."""

    def __init__(self, inner: Module, tokenizer: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = SimpleNamespace(pad_token_id=tokenizer.pad_token_id)
        self.vocabulary = len(tokenizer)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        return SimpleNamespace(last_hidden_state=output) if isinstance(output, Tensor) else output

    def get_input_embeddings(self) -> Any:
        """Which ids there are; wherever `inner` keeps its embedding, if it has one."""
        return SimpleNamespace(num_embeddings=self.vocabulary)


@dataclass(frozen=True)
class OwnEncoder:
    """`module(input_ids=…, attention_mask=…)` gives hidden states of shape (rows, length, width),
    by themselves or as `.last_hidden_state`; `tokenizer` is one of transformers' or tokenizers'.
    """

    module: Module
    tokenizer: Any

    def __post_init__(self) -> None:
        if not isinstance(self.module, Module):
            raise UserError(
                f"encoder is a {type(self.module).__name__}; give a torch.nn.Module, or name a "
                f"folder in the plan's model"
            )
        if type(self.tokenizer).__module__.split(".")[0] == "tokenizers":
            wrapped = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer)
            object.__setattr__(self, "tokenizer", wrapped)
        if not all(hasattr(self.tokenizer, name) for name in _NEEDED):
            raise UserError(
                f"tokenizer is a {type(self.tokenizer).__name__}; give one of transformers or "
                f"tokenizers beside encoder"
            )

    @property
    def name(self) -> str:
        return f"{CUSTOM}{type(self.module).__name__}"

    def resolve_representation(self, wanted: str) -> str:
        """`mean` unless the plan says otherwise: nobody but the caller knows what it was trained
        for."""
        if wanted.startswith("layers") and not isinstance(self.module, PreTrainedModel):
            raise UserError(f"representation {wanted}: {self.name} gives one layer; use mean")
        if wanted == "pooler" and not hasattr(self.module, "pooler"):
            raise UserError(f"representation pooler: {self.name} has none; use cls or mean")
        return "mean" if wanted == "auto" else wanted

    def classifier(
        self,
        representation: str,
        classes: int,
        *,
        dropout: float,
        head_seed: int,
        scope: str,
        lora: Lora | None = None,
    ) -> Classifier:
        """A copy of the encoder in fp32 with a new head."""
        encoder = copy.deepcopy(self.module).float().cpu()
        encoder.requires_grad_(True)
        set_dropout(encoder, dropout)
        if not isinstance(encoder, PreTrainedModel):
            encoder = Adapter(encoder, self.tokenizer)
        try:
            model = Classifier(
                encoder,
                representation,
                classes,
                frozen=scope == "head",
                head_seed=head_seed,
                dropout=dropout,
            )
        except UserError:
            raise
        except Exception as error:  # whatever the caller's own code raises
            raise UserError(
                f"encoder {self.name} gives no hidden states for input_ids and attention_mask "
                f"({type(error).__name__}: {error})"
            ) from error
        restrict(model, scope, lora, head_seed)
        return model

    @torch.inference_mode()
    def represent(
        self,
        table: TokenTable | PairTable,
        representation: str,
        precision: str,
        centre: Floats | None = None,
    ) -> RepresentationTable:
        """h of every row, as `representations.represent` makes it, but kept nowhere."""
        model = self.classifier(representation, 2, dropout=0.0, head_seed=0, scope="head")
        model.centre = None if centre is None else torch.from_numpy(centre)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.to(device).eval()
        h = np.empty((len(table), model.width), np.float32)
        for part in split_rows(table.lengths, INFERENCE_ROWS, PART_COST[device.type]):
            batch = {key: tensor.to(device) for key, tensor in table.collate(part).items()}
            with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
                h[part] = model.represent(batch).float().cpu().numpy()
        key = hashlib.blake2b(h.data, digest_size=16).hexdigest()
        return RepresentationTable(h, np.asarray(table.labels), key, centre)
