"""Texts in one place are the list that they were made from, wherever their letters are."""

import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpfp_ray.data import AllTexts, Split, texts
from dpfp_ray.data.texts import distinct, group, hashes, pack, take

WORDS = ["", "one", "zwei und mehr", "三", "half a pair \ud83d", "one", "end"]
MANY = [f"text {number} " + "é" * (number % 7) for number in range(10_000)]


@pytest.fixture(params=["in memory", "on disk"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "IN_MEMORY", 2**30 if request.param == "in memory" else 16)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "look",
    [
        list,
        len,
        lambda many: many[3],
        lambda many: many[-1],
        lambda many: many[2:5],
        lambda many: many[4:2],
        lambda many: "zwei und mehr" in many,
        lambda many: list(take(many, np.array([6, 0, 0, 2]))),
    ],
)
@pytest.mark.parametrize("words", [WORDS, MANY], ids=["words", "many"])
def test_they_are_the_list_that_they_were_made_from(words: list[str], look: Callable) -> None:  # type: ignore[type-arg]
    assert look(pack(words)) == look(words)
    assert pack(words) == words
    assert pack(words) != words[1:]


@pytest.mark.usefixtures("place")
def test_some_of_some_and_texts_far_apart() -> None:
    rows = np.array([9_999, 3, 5_000])
    chosen = pack(MANY).take(np.arange(len(MANY))[::-1]).take(len(MANY) - 1 - rows)
    assert chosen == [MANY[row] for row in rows]
    assert pickle.loads(pickle.dumps(chosen)) == chosen


def test_nothing_is_no_texts() -> None:
    assert pack([]) == []
    with pytest.raises(IndexError):
        pack(["one"])[1]


def test_letters_on_disk_have_no_name(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "IN_MEMORY", 16)
    many = pack(MANY)
    assert many[17] == MANY[17]
    assert not list(fresh_cache.iterdir())
    assert stat.S_IMODE(fresh_cache.stat().st_mode) == 0o700


def test_groups_are_those_of_a_dict() -> None:
    words = [str(n) for n in np.random.default_rng(1).integers(0, 300, 1_000)]
    numbers: dict[str, int] = {}
    expected = [numbers.setdefault(word, len(numbers)) for word in words]
    groups, firsts = distinct(words)
    assert groups.tolist() == expected
    assert [words[row] for row in firsts] == list(numbers)


def test_rows_that_differ_in_one_number_are_two_groups() -> None:
    keys = np.array([[2, 1], [1, 2], [2, 1], [2, 2]], np.uint64)
    groups, firsts = group(keys)
    assert (groups.tolist(), firsts.tolist()) == ([0, 1, 0, 2], [0, 1, 3])


def test_hashes_need_no_list_and_take_a_key() -> None:
    assert hashes([]).shape == (0, 1)
    one, other = hashes(iter(WORDS), 16, b"k"), hashes(WORDS, 16)
    assert one.shape == (len(WORDS), 2)
    assert one[1].tolist() == one[5].tolist() != other[1].tolist()


def test_what_people_are_known_by_is_counted_as_it_is_told() -> None:
    split = Split(
        pack(["a", "b", "c"]),
        ["d", "e", "f"],
        np.zeros(3, np.int64),
        beside=(["", "a long text", ""],),
        users=pack(["ann", "bob", "ann"]),
    )
    both = AllTexts([split, split.take(np.array([0, 2]))])
    told = ["a", "b", "c", "d", "e", "f", "a", "c", "d", "f", "a long text"]
    assert list(both) == [*told, "person: ann", "person: bob", "person: ann"]
    assert len(both) == len(list(both))


def test_people_are_known_by_both_texts_of_a_pair() -> None:
    split = Split(["one", "two"], ["first", "second"], np.zeros(2, np.int64))
    everything = split.all_texts()
    assert sorted(everything) == ["first", "one", "second", "two"]
    assert len(everything) == 4
