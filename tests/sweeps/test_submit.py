"""A command as a job: what goes with it, what it is called. Real jobs: test_submit_on_ray.py."""

import shlex
from pathlib import Path

import pytest

from dpfp_ray.sweeps import submit
from dpfp_ray.sweeps.submit import entrypoint, stage, submission_id
from dpfp_ray.system.errors import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    (folder / "spaces").mkdir(parents=True)
    (folder / "spaces" / "mine.yaml").write_text("space")
    (folder / "train.csv").write_text("text,label\n")
    (folder / "secret.txt").write_text("not named")
    (tmp_path / "above.yaml").write_text("above")
    monkeypatch.chdir(folder)
    return folder


def sent(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_relative_files_keep_their_places(here: Path, tmp_path: Path) -> None:
    words = ["sweep", "spaces/mine.yaml", "--set=train_file=train.csv", "--plan=train.csv"]
    command, named = stage(words, [], tmp_path / "job")
    assert command == words
    assert named == ["spaces/mine.yaml", "train.csv"]
    assert sent(tmp_path / "job") == {"spaces/mine.yaml": "space", "train.csv": "text,label\n"}


def test_files_that_a_plan_names_travel_too(here: Path, tmp_path: Path) -> None:
    _, named = stage(["sweep", "spaces/mine.yaml"], ["train.csv"], tmp_path / "job")
    assert named == ["spaces/mine.yaml", "train.csv"]


def test_a_file_above_is_sent_under_a_name_inside(here: Path, tmp_path: Path) -> None:
    command, _ = stage(["sweep", "../above.yaml"], [], tmp_path / "job")
    assert sent(tmp_path / "job") == {command[1]: "above"}
    assert ".." not in command[1]


def test_absolute_paths_uris_and_words_mean_the_cluster(here: Path, tmp_path: Path) -> None:
    words = ["train", "--train-file", str(here / "train.csv"), "--model", "s3://b/m", "x" * 5000]
    assert stage(words, [], tmp_path / "job") == (words, [])
    assert not (tmp_path / "job").exists()


def test_a_folder_must_be_sent_on_purpose(here: Path, tmp_path: Path) -> None:
    (here / "glue" / "SST-2").mkdir(parents=True)
    with pytest.raises(UserError, match="--working-dir"):
        stage(["train", "--data-dir", "glue/SST-2"], [], tmp_path / "job")


def test_too_much_is_refused(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "LARGEST", 3)
    with pytest.raises(UserError, match="too much to send"):
        stage(["sweep", "spaces/mine.yaml"], [], tmp_path / "job")


def test_no_word_of_a_command_is_read_by_the_jobs_shell() -> None:
    words = ["results", "/runs", "--where", "id == '$(rm -rf ~)'; `x` && \"y\"\n* | z"]
    assert shlex.split(entrypoint(words)) == ["dpfp", *words]


@pytest.mark.parametrize("name", ["sweep my-space", "Nächtlicher Lauf /../ <x>", "", "x" * 500])
def test_a_submission_id_is_safe_and_never_the_same(name: str) -> None:
    first, second = submission_id(name), submission_id(name)
    assert first != second
    assert set(first) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(first) < 80
