"""Choices among rows follow from each row's own text: one record moves one record."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpfp_ray.data import Split, Task
from dpfp_ray.data.batches import split_rows
from dpfp_ray.data.split import Units, at_most, by_size, hold_out, places, subset
from dpfp_ray.data.tasks import in_memory, load_task
from dpfp_ray.data.tokens import TokenTable
from dpfp_ray.plan.plan import MAX_PER_USER, Plan
from dpfp_ray.system.errors import UserError


def numbered(count: int) -> Split:
    return Split([str(i) for i in range(count)], None, np.arange(count) % 2)


def without(split: Split, row: int) -> Split:
    return split.take(np.delete(np.arange(len(split)), row))


def test_places_are_fixed_for_ever() -> None:
    found = places(Split(["a", "b"], ["", "c"], np.array([0, 1])), "subset")
    assert found.tolist() == [9102423101519449619, 6228585569697440750]


def test_places_for_different_purposes_have_nothing_in_common() -> None:
    first, second = (places(numbered(10_000), purpose) / 2.0**64 for purpose in ("a", "b"))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_a_subset_keeps_the_order_and_contains_smaller_ones() -> None:
    small, large = (subset(numbered(1_000), n).texts for n in (10, 20))
    assert set(small) < set(large)
    assert large == sorted(large, key=int)


def test_a_subset_larger_than_the_data_is_all_of_it() -> None:
    assert len(subset(numbered(5), 6)) == 5


@pytest.mark.parametrize("row", [0, 17, 499])
def test_a_record_that_leaves_a_subset_is_replaced_by_one(row: int) -> None:
    whole = numbered(500)
    before, after = set(subset(whole, 100).texts), set(subset(without(whole, row), 100).texts)
    assert len(before - after) == len(after - before) == (str(row) in before)


@pytest.mark.parametrize("row", [0, 17, 4_999])
def test_a_removed_record_moves_no_other_between_train_and_dev(row: int) -> None:
    whole = numbered(5_000)
    train, dev = hold_out(whole, 0.1)
    smaller_train, smaller_dev = hold_out(without(whole, row), 0.1)
    assert set(train.texts) - set(smaller_train.texts) <= {str(row)}
    assert set(dev.texts) - set(smaller_dev.texts) <= {str(row)}
    assert len(smaller_train) + len(smaller_dev) == 4_999


def test_a_duplicate_does_not_change_who_is_chosen() -> None:
    whole = numbered(2_000)
    doubled = Split([*whole.texts, "7"], None, np.append(whole.labels, 1))
    assert set(hold_out(whole, 0.1)[1].texts) == set(hold_out(doubled, 0.1)[1].texts)


def test_about_the_share_is_held_out() -> None:
    _, dev = hold_out(numbered(5_000), 0.1)
    assert abs(len(dev) - 500) < 4 * np.sqrt(5_000 * 0.1 * 0.9)


def test_equal_records_are_on_one_side() -> None:
    split = Split(["same"] * 50 + [f"t{i}" for i in range(50)], None, np.arange(100) % 2)
    train, dev = hold_out(split, 0.2)
    assert not set(train.texts) & set(dev.texts)


def test_no_class_leaves_train() -> None:
    split = Split([str(i) for i in range(30)], None, np.array([1] + [0] * 29))
    train, _ = hold_out(split, 0.97)
    assert set(train.labels) == {0, 1}


def test_a_few_rows_still_give_a_dev_set() -> None:
    train, dev = hold_out(numbered(8), 0.01)
    assert len(train) == 7
    assert len(dev) == 1


NAMES = [f"author {i}" for i in range(30)]


def made_up(rows: int = 400, seed: int = 0) -> Split:
    """Persons with 1 to 50 records; the first has most."""
    rng = np.random.default_rng(seed)
    users = [NAMES[int(30 * x**3)] for x in rng.random(rows)]
    labels = rng.integers(0, 2, rows)
    return Split([f"text {i} of {seed}" for i in range(rows)], None, labels, users=users)


def without_person(split: Split, user: str) -> Split:
    return split.take(np.array([i for i, name in enumerate(split.users or ()) if name != user]))


def records(split: Split) -> set[tuple[str, str]]:
    return set(zip(split.users or (), split.texts, strict=True))


# --- choices among rows: one person changes nothing of the others --------------------------------


@pytest.mark.parametrize("user", NAMES[:6])
def test_one_person_less_is_one_person_less_in_what_is_trained_on(user: str) -> None:
    whole = made_up()

    def chosen(split: Split) -> tuple[Split, Split]:
        train, dev = hold_out(split, 0.2)
        return at_most(train, 5), dev

    for before, after in zip(chosen(whole), chosen(without_person(whole, user)), strict=True):
        assert records(before) - records(after) == {r for r in records(before) if r[0] == user}
        assert records(after) <= records(before)


def test_at_most_k_records_of_a_person_are_kept_by_that_persons_records_alone() -> None:
    split = made_up()
    counts = Counter(split.users)
    kept = at_most(split, 4)
    assert Counter(kept.users) == {user: min(4, n) for user, n in counts.items()}
    shuffled = split.take(np.random.default_rng(1).permutation(len(split)))
    assert records(at_most(shuffled, 4)) == records(kept)  # not by their order in the file
    assert records(at_most(split, 3)) <= records(kept)


def test_hold_out_and_subset_take_whole_persons() -> None:
    split = made_up()
    train, dev = hold_out(split, 0.2)
    assert set(train.users or ()).isdisjoint(dev.users or ())
    assert len(train) + len(dev) == len(split)
    some = subset(split, 7)
    assert some.units == 7
    assert all(Counter(some.users)[user] == Counter(split.users)[user] for user in some.users or ())
    assert set(subset(split, 5).users or ()) <= set(some.users or ())


# --- units ---------------------------------------------------------------------------------------


def test_a_drawn_person_brings_all_of_their_rows_each_time() -> None:
    persons = np.array([2, 0, 1, 0, 2, 2])
    table = TokenTable({}, np.arange(7), np.zeros(6, np.int64), 0, persons)
    rows, owners = Units(table).expand(np.array([2, 0, 2]))
    assert rows.tolist() == [0, 4, 5, 1, 3, 0, 4, 5]
    assert owners is not None
    assert owners.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    rows, owners = Units(table).expand(np.zeros(0, np.int64))
    assert len(rows) == 0
    assert owners is not None


def test_by_size_gives_every_row_once_and_as_many_turns_as_sizes() -> None:
    owners = np.random.default_rng(0).permutation(np.repeat(np.arange(50), np.arange(1, 51)))
    turns = list(by_size(owners))
    assert sorted(np.concatenate([rows.ravel() for _, rows in turns])) == list(range(len(owners)))
    assert len(turns) == 50
    for numbers, rows in turns:
        assert (owners[rows] == numbers[:, None]).all()


@pytest.mark.parametrize("max_rows", [1, 7, 40, 10_000])
def test_parts_hold_whole_persons_and_no_more_rows_than_allowed(max_rows: int) -> None:
    rng = np.random.default_rng(2)
    owners = np.repeat(np.arange(60), rng.integers(1, 12, 60))
    lengths = rng.integers(3, 90, len(owners))
    parts = split_rows(lengths, max_rows, 160, owners)
    assert sorted(np.concatenate(parts)) == list(range(len(owners)))
    for part in parts:
        inside = set(owners[part])
        assert len(part) == np.isin(owners, list(inside)).sum()
        assert len(part) <= max_rows or len(inside) == 1


# --- reading -------------------------------------------------------------------------------------


def write(path: Path, rows: list[str]) -> str:
    path.write_text("\n".join(["text,label,author", *rows, ""]))
    return str(path)


def some_rows(people: str = "abcdefghij", each: int = 3) -> list[str]:
    return [f"text {i} by {p},{['no', 'yes'][i % 2]},{p}" for p in people for i in range(each)]


def load(tmp_path: Path, rows: list[str], **changes: Any) -> Task:
    file = write(tmp_path / "train.csv", rows)
    return load_task(Plan(train_file=file, **{"user_column": "author", **changes}))


def test_a_file_says_whose_its_records_are(tmp_path: Path) -> None:
    task = load(tmp_path, some_rows())
    assert task.train.units + 1 >= 9
    assert all(split.users is None for split in task.dev.values())  # dev is public
    assert load(tmp_path, some_rows(), max_per_user=2).train.units == task.train.units
    assert len(load(tmp_path, some_rows(), max_per_user=2).train) == 2 * task.train.units
    assert load(tmp_path, some_rows(), max_train=4).train.units == 4


@pytest.mark.parametrize("name", ["", "  ", '""'])
def test_a_record_of_nobody_is_refused_or_skipped(tmp_path: Path, name: str) -> None:
    rows = [*some_rows(), f"whose is this,yes,{name}"]
    with pytest.raises(UserError, match=r"line 32: no 'author'.*--bad-rows skip"):
        load(tmp_path, rows)
    with pytest.warns(UserWarning, match="1 of 31 rows skipped"):
        assert "whose is this" not in load(tmp_path, rows, bad_rows="skip").train.texts


def test_a_person_in_training_and_dev_is_refused(tmp_path: Path) -> None:
    dev = write(tmp_path / "dev.csv", ["one more of c,no,c", "a stranger,yes,z"])
    with pytest.raises(UserError, match=r"'c' is in training and in dev .in both: 1.; take"):
        load(tmp_path, some_rows(), dev_file=dev)
    strangers = write(tmp_path / "others.csv", ["a stranger,yes,z", "another,no,y"])
    assert len(load(tmp_path, some_rows(), dev_file=strangers).dev["dev"]) == 2


def test_mistakes_in_the_plan_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no column 'writer'.*give another --user-column"):
        load(tmp_path, some_rows(), user_column="writer")
    with pytest.raises(UserError, match="'text' is the text or the label"):
        load(tmp_path, some_rows(), user_column="text")
    with pytest.raises(UserError, match="user_column is 'x', and so is text_column"):
        Plan(user_column="x", text_column="x")
    with pytest.raises(UserError, match="max_per_user is 0; give a whole number of 1 or more"):
        Plan(user_column="x", max_per_user=0)
    with pytest.raises(UserError, match="max_per_user is 3, but nothing says whose"):
        load_task(Plan(task="demo", max_per_user=3))
    with pytest.raises(UserError, match="'made_up' groups its rows"):
        load_task(Plan(task="demo", user_column="author"))


def test_a_method_that_bounds_rows_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(Plan(method="dpsgd").spec, bounds_persons=False)
    monkeypatch.setattr("dpfp_ray.plan.plan.find_spec", lambda *_: spec)
    with pytest.raises(UserError, match="dpsgd bounds each record by itself, not a person"):
        Plan(method="dpsgd", user_column="author")


def test_plans_without_persons_keep_their_hash() -> None:
    plan = Plan(task="sst2", method="dpsgd").bind(records=67_349)
    assert plan.hash == "41f55679c52a336b"
    assert plan.unit == "record"
    by_person = Plan(task="sst2", method="dpsgd", user_column="author").bind(records=67_349)
    assert by_person.hash != plan.hash
    assert by_person.max_per_user == MAX_PER_USER
    assert by_person.unit == "person"


# --- in memory -----------------------------------------------------------------------------------


def test_users_may_be_a_column_or_come_apart() -> None:
    rows = [row.split(",") for row in some_rows()]
    texts, labels, authors = (list(column) for column in zip(*rows, strict=True))
    frame = pd.DataFrame({"text": texts, "label": labels, "who": authors})
    numbers = [float(ord(name)) for name in authors]  # 97.0 and 97 are one person
    for data, users in [
        (frame, "who"),
        ((texts, labels), authors),
        ((texts, labels, authors), "user"),
        ({"text": texts, "label": labels, "who": numbers}, "who"),
        (frame[["text", "label"]], pd.Series(authors)),
    ]:
        plan, task = in_memory(Plan(method="dpsgd"), data, users=users)
        assert plan.user_column == (users if isinstance(users, str) else "user")
        assert task.train.units + len({*task.dev["dev"].texts}) / 3 == 10
    with pytest.raises(UserError, match="differ in length"):
        in_memory(Plan(), (texts, labels), users=authors[1:])
    with pytest.raises(UserError, match="row 3: no 'who'"):
        in_memory(Plan(), frame.assign(who=[*authors[:2], None, *authors[3:]]), users="who")
    with pytest.raises(UserError, match="give another users="):
        in_memory(Plan(), frame, users="writer")
