"""The same people are recognised whatever is done to the file; others are not."""

import os
import random
import stat
from pathlib import Path

import numpy as np
import pytest
from obstore.store import LocalStore

from dpfp_ray.privacy.people import OnceWritten, People, fingerprints
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import RemoteFiles

TEXTS = [f"record number {i}, a film that pleased viewer {i * i}" for i in range(200)]


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(OnceWritten(tmp_path / "ledger"))


def same_group(people: People, *names: str) -> bool:
    groups = people.groups()
    return len({groups[name] for name in names}) == 1


def test_the_same_records_are_the_same_set_in_any_order(people: People) -> None:
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    assert people.register(TEXTS).id == people.register(shuffled).id
    assert people.register(TEXTS).id == people.register(TEXTS + TEXTS[:5]).id


@pytest.mark.parametrize(
    "spelling",
    [
        lambda text: f"  {text}\n",
        lambda text: text.replace(" ", "\t "),
        lambda text: text.replace(" ", "\u00a0"),
        str.upper,
        lambda text: text.replace("film", "ﬁlm"),
    ],
)
def test_another_spelling_of_the_texts_is_the_same_set(people: People, spelling) -> None:  # type: ignore[no-untyped-def]
    assert people.register(TEXTS).id == people.register([spelling(text) for text in TEXTS]).id


@pytest.mark.parametrize(
    "invisible", list("\u200b\u00ad\ufeff\u2060\u200d\u034f\ufe0f\u3164\x00\x7f")
)
def test_characters_that_nobody_sees_make_no_other_people(people: People, invisible: str) -> None:
    hidden = [text[:9] + invisible + text[9:] for text in TEXTS]
    assert people.register(TEXTS).id == people.register(hidden).id


def test_a_subset_belongs_to_the_whole_and_says_how_much(people: People) -> None:
    whole = people.register(TEXTS)
    part = people.register(TEXTS[:37])
    assert part.overlaps == {whole.id: 37}
    assert same_group(people, whole.id, part.id)


def test_strangers_stay_apart(people: People) -> None:
    one, other = people.register(TEXTS[:100]), people.register(TEXTS[100:])
    assert not same_group(people, one.id, other.id)


def test_a_set_that_bridges_two_groups_joins_them(people: People) -> None:
    one, other = people.register(TEXTS[:50]), people.register(TEXTS[100:])
    people.register(TEXTS[40:110])
    assert same_group(people, one.id, other.id)


def test_a_chain_of_overlaps_is_one_group(people: People) -> None:
    names = [people.register(TEXTS[start : start + 30]).id for start in range(0, 180, 20)]
    assert same_group(people, *names)


def test_a_dropped_or_swapped_column_is_still_the_same_people(people: People) -> None:
    second = [f"answer {i}" for i in range(200)]
    pairs = people.register([*TEXTS, *second])
    assert same_group(people, pairs.id, people.register([*second, *TEXTS]).id)
    assert same_group(people, pairs.id, people.register(TEXTS).id)
    assert same_group(people, pairs.id, people.register(second).id)


def test_empty_texts_join_nobody(people: People) -> None:
    one, other = people.register(["", *TEXTS[:10]]), people.register([" ", *TEXTS[10:20]])
    assert not same_group(people, one.id, other.id)


def test_texts_that_are_no_valid_unicode_can_be_registered(people: People) -> None:
    assert people.register(["\ud800 broken"]).texts == 1


def test_no_records_are_refused(people: People) -> None:
    with pytest.raises(UserError, match="without records"):
        people.register([])


def test_fingerprints_need_the_key() -> None:
    ours, theirs = (fingerprints(TEXTS, key) for key in (b"a" * 32, b"b" * 32))
    assert not len(np.intersect1d(ours, theirs))
    assert len(ours) == len(TEXTS)


def test_large_sets_keep_a_share_and_still_find_their_subsets(tmp_path: Path) -> None:
    people = People(OnceWritten(tmp_path), most=60)
    whole, part = people.register(TEXTS), people.register(TEXTS[:150])
    assert same_group(people, whole.id, part.id)
    assert 75 <= part.overlaps[whole.id] <= 300  # an estimate of 150 from about a quarter
    stored = np.load(tmp_path / "people" / f"{whole.id}.npy")
    assert len(stored) - 1 <= 60


@pytest.mark.parametrize("folder", ["keys", "people"])
def test_a_flipped_bit_in_a_key_or_a_fingerprint_is_noticed(
    people: People, tmp_path: Path, folder: str
) -> None:
    people.register(TEXTS)
    path = max((tmp_path / "ledger" / folder).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{folder}/.* is damaged"):
        people.register([*TEXTS[:5], "somebody else"])


@pytest.mark.parametrize(
    "content", ["false", "{}", '{"overlaps": [{}]}', '{"overlaps": {"x": []}}']
)
def test_damaged_links_are_one_line(people: People, tmp_path: Path, content: str) -> None:
    people.register(["a film"])
    (links,) = tmp_path.rglob("people/*.json")
    links.write_text(content)
    with pytest.raises(UserError, match=r"is damaged \(.*\); restore it"):
        people.links()


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (("keys/*",), "no key"),
        (("keys/*", "people/*"), r"entries but no key .* restore its folders"),
        (("people/*.npy",), "are gone"),
    ],
)
def test_lost_keys_or_fingerprints_are_an_error_not_a_new_beginning(
    people: People, tmp_path: Path, lost: tuple[str, ...], says: str
) -> None:
    people.register(TEXTS)
    people.files.write_json("entries/one.json", {})
    for pattern in lost:
        for file in (tmp_path / "ledger").glob(pattern):
            file.unlink()
    with pytest.raises(UserError, match=says):
        people.register(TEXTS[:3])


def test_a_key_that_is_made_while_it_is_looked_for_is_not_lost(
    people: People, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another first writer makes its key and stores its set just after no key was found."""
    plain, other = people.files.names, People(OnceWritten(tmp_path / "ledger"))

    def then_another_writes(folder: str) -> list[str]:
        found = plain(folder)
        if folder == "keys" and not found:
            monkeypatch.setattr(people.files, "names", plain)
            other.register(TEXTS[:50])
        return found

    monkeypatch.setattr(people.files, "names", then_another_writes)
    name = people.register(TEXTS).id
    assert people.key() == other.key()
    assert same_group(people, name, *people.links())


def test_a_set_stored_by_a_killed_driver_is_compared_and_linked(people: People) -> None:
    whole = people.register(TEXTS)
    for file in (Path(people.files.name) / "people").glob("*.json"):
        file.unlink()  # killed between the fingerprints and the links
    part = people.register(TEXTS[:10])
    assert part.overlaps == {whole.id: 10}
    assert same_group(people, whole.id, part.id)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_everything_is_for_the_owner_only_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        files = OnceWritten(tmp_path / "ledger")
        with files.locked():
            People(files).register(TEXTS)
    finally:
        os.umask(before)
    found = [tmp_path / "ledger", *(tmp_path / "ledger").rglob("*")]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()}
    assert modes == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}


def test_behind_a_uri_people_are_recognised_too(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    remote = RemoteFiles(LocalStore(str(tmp_path / "bucket")), "test://ledger")
    people = People(OnceWritten(remote))
    whole = people.register(TEXTS)
    assert people.register(TEXTS[:5]).overlaps == {whole.id: 5}


@pytest.mark.parametrize("first", ["train", "dev"])
def test_records_that_were_dev_rows_are_known_whoever_came_first(
    people: People, first: str
) -> None:
    if first == "dev":
        people.register_dev(TEXTS[:30])
    mine = people.register(TEXTS).id
    if first == "train":
        people.register_dev(TEXTS[:30])
        people.register_dev(TEXTS[:30])  # once more changes nothing
    strangers = people.register(["nobody was a dev row here"]).id
    assert people.dev_rows([mine]) == 30
    assert people.dev_rows([strangers]) == 0
    assert not same_group(people, mine, strangers)
