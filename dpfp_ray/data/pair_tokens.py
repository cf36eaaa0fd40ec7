"""Tokens of sentence pairs whose two texts are encoded one by one, not as one joint text."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dpfp_ray.data import Split, content_hash
from dpfp_ray.data.tokens import Tokenise, TokenTable, tokenise, tokenise_here, tokenise_once
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class PairTable:
    """Row i is the pair of row i of `first` and of `second`, which hold the same labels."""

    first: TokenTable
    second: TokenTable
    persons: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.first)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        return self.first.labels

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.maximum(self.first.lengths, self.second.lengths)

    def collate(self, rows: npt.NDArray[Any]) -> "dict[str, torch.Tensor]":
        second = {f"pair_{name}": value for name, value in self.second.collate(rows).items()}
        return self.first.collate(rows) | second

    def content(self) -> str:
        both = f"{self.first.content()} {self.second.content()}"
        if self.persons is not None:
            both += f" {content_hash({'persons': self.persons})}"
        return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()


def tokenise_sides(
    split: Split,
    tokenizer: Any,
    max_length: int,
    name: str = "",
    work: Tokenise = tokenise_here,
    *,
    keep: bool = True,
) -> PairTable:
    """Each text of each pair by itself, at most `max_length`; without `keep` nothing is cached."""
    if split.pairs is None:
        raise UserError("representation pair needs two texts a record; give pair_column, or mean")
    first, second = (Split(texts, None, split.labels) for texts in (split.texts, split.pairs))
    if not keep:
        one, other = (tokenise_once(side, tokenizer, max_length) for side in (first, second))
    else:
        one, other = (tokenise(side, tokenizer, max_length, name, work) for side in (first, second))
    return PairTable(one, other)
