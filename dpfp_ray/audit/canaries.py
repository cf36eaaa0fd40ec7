"""Canaries: records of which the auditor knows all but one thing, a fair coin that says in or out.

They take the places of m of the task's own records, chosen by a fixed public order. So D, and with
it p, T, δ and σ, are those of the very plan that is audited, and they do not depend on the coins.
Where the unit is a person, a canary is a person with as many rows as the one it displaces.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dpfp_ray.data import Split, Table, Task, public_order
from dpfp_ray.data.pair_tokens import tokenise_sides
from dpfp_ray.data.persons import count_units, number_persons
from dpfp_ray.data.tokens import TokenTable, tokenise
from dpfp_ray.plan.errors import UserError
from dpfp_ray.privacy.sampling import keyed_generator

FAMILIES = ("mislabelled", "unused_token")
NEUTRAL = "this is a sentence about something"
# What canaries are made of is public; only the coins are secret until the scores are in.
PUBLIC_SEED = 0

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Canaries:
    """Row i of `table` stands at `places[i]` of the training set, and is canary i; or, where
    canaries are persons, a row of canary `table.persons[i]`.

    `table` is tokens, or representations where the training set is. `tokens[i]` is the vocabulary
    entry that occurs in canary i and nowhere else, if it has one.
    """

    family: str
    table: Table
    places: Ints
    tokens: Ints | None

    def __len__(self) -> int:
        return count_units(self.table)

    def rows_of(self, canary: int) -> Ints:
        persons = self.table.persons
        return np.array([canary]) if persons is None else np.flatnonzero(persons == canary)


def flip_coins(count: int, seed: int) -> Bools:
    """Who is in: one fair coin each, a function of this secret seed and nothing else."""
    return keyed_generator(seed, "canary coins", 0).random(count) < 0.5


def make_canaries(
    family: str,
    count: int,
    task: Task,
    tokenizer: Any,
    max_length: int,
    *,
    text_by_text: bool = False,
) -> Canaries:
    """`count` canaries for the training set of `task`, as tokens; those of pairs jointly, or text
    by text.

    mislabelled   the displaced record itself, under a class that it does not have
    unused_token  a neutral sentence with one token of its own: an `[unusedN]` where the vocabulary
                  has one left, else a token that no record contains; the class is random
    """
    split, classes = task.train, len(task.label_names)
    units, unit = split.units, "records" if split.users is None else "persons"
    if not 1 <= count <= units // 2:
        raise UserError(
            f"canaries is {count}; with {units:,} training {unit} it can be 1 to {units // 2:,}"
        )
    places, owners = np.sort(public_order(units, "canaries")[:count]), None
    if split.users is not None:
        persons = number_persons(split.users)
        chosen, places = places, np.flatnonzero(np.isin(persons, places))
        owners = np.searchsorted(chosen, persons[places])
    rng = keyed_generator(PUBLIC_SEED, f"canary labels {family}", 0)
    displaced = split.take(places)
    if family == "mislabelled":
        labels = (displaced.labels + rng.integers(1, classes, len(places))) % classes
        tokens_of = tokenise_sides if text_by_text else tokenise
        mislabelled = tokens_of(replace(displaced, labels=labels), tokenizer, max_length)
        return Canaries(family, replace(mislabelled, persons=owners), places, None)
    pairs = None if split.pairs is None else [NEUTRAL] * len(places)
    neutral = Split([NEUTRAL] * len(places), pairs, rng.integers(0, classes, len(places)))
    tables = [tokenise(part, tokenizer, max_length) for part in (split, *task.dev.values())]
    tokens = unused_tokens(tables, tokenizer, count)
    own = tokens if owners is None else tokens[owners]
    if not text_by_text:
        table = mark(tokenise(neutral, tokenizer, max_length), own, tokenizer)
        return Canaries(family, replace(table, persons=owners), places, tokens)
    sides = tokenise_sides(neutral, tokenizer, max_length)
    marked = replace(sides, first=mark(sides.first, own, tokenizer), persons=owners)
    return Canaries(family, marked, places, tokens)


def unused_tokens(tables: Iterable[TokenTable], tokenizer: Any, count: int) -> Ints:
    """Vocabulary entries that no row of `tables` contains; those that no text can give come first.

    `[unusedN]` cannot be written: a tokenizer splits it at its brackets. So canaries are marked
    after tokenisation, and any entry that happens to be absent serves as well.
    """
    taken = set(tokenizer.all_special_ids)
    for table in tables:
        taken.update(np.unique(table.columns["input_ids"]).tolist())
    free = [
        (not name.startswith("[unused"), number)
        for name, number in tokenizer.get_vocab().items()
        if number not in taken
    ]
    if len(free) < count:
        raise UserError(
            f"canaries is {count}, but only {len(free)} tokens of the vocabulary occur in no "
            f"record; use fewer, or --family mislabelled"
        )
    return np.array([number for _, number in sorted(free)[:count]], dtype=np.int64)


def mark(table: TokenTable, tokens: Ints, tokenizer: Any) -> TokenTable:
    """Row i with `tokens[i]` in place of the middle token of its first text."""
    ids = np.array(table.columns["input_ids"])
    frame = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    words = ~np.isin(ids, [number for number in frame if number is not None])
    for row, start in enumerate(table.offsets[:-1]):
        body = start + np.flatnonzero(words[start : table.offsets[row + 1]])
        first_text = body[np.cumsum(np.diff(body, prepend=body[:1] - 1) > 1) == 0]
        ids[first_text[len(first_text) // 2]] = tokens[row]
    return replace(table, columns={**table.columns, "input_ids": ids})
