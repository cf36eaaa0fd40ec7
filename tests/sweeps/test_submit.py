"""A command as a job: what goes with it, what it is called. Real jobs: test_submit_on_ray.py."""

import shlex
from pathlib import Path

import pytest

from dpfp_ray.sweeps import cluster, submit
from dpfp_ray.sweeps.cluster import results_page
from dpfp_ray.sweeps.submit import entrypoint, page_of, service_url, stage, submission_id
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.terminal import JOB


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


@pytest.mark.parametrize(
    ("host", "prefix", "url"),
    [
        ("127.0.0.1", "/", "http://127.0.0.1:9000"),
        ("0.0.0.0", "/results", "http://head:9000/results"),
        ("::1", "/", "http://[::1]:9000"),
    ],
)
def test_the_service_is_named_with_host_and_port(host: str, prefix: str, url: str) -> None:
    options = {"http_options": {"host": host, "port": 9000}}
    running = {"dpfp-results": {"status": "RUNNING", "route_prefix": prefix}}
    assert service_url({**options, "applications": running}, "head") == url
    assert page_of(url, None) == f"{url}/"
    assert page_of(url, "a b") == f"{url}/?where=sweep+%3D%3D+%27a+b%27"
    failed = {"dpfp-results": {"status": "DEPLOY_FAILED", "route_prefix": prefix}}
    assert service_url({**options, "applications": failed}, "head") is None
    assert service_url({}, "head") is None


def test_a_job_that_has_nothing_to_run_knows_its_page_from_its_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(JOB, raising=False)
    assert results_page("mine", "/runs") == ""
    monkeypatch.setenv(JOB, '{"metadata": {"results_page": "http://head:8000/"}}')
    assert results_page("mine", "/runs") == "results page: http://head:8000/"
    monkeypatch.setenv(JOB, '{"runtime_env": null, "metadata": null}')
    line = results_page("mine", "s3://bucket/runs?secret_key=abc")
    assert "dpfp serve --storage s3://bucket/runs" in line
    assert line.endswith("--address auto --detach")
    assert "abc" not in line


def test_a_sweep_on_a_joined_cluster_names_its_page_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB, raising=False)
    monkeypatch.setattr(cluster, "running_service", lambda: "http://head:9000")
    page = "http://head:9000/?where=sweep+%3D%3D+%27mine%27"
    assert results_page("mine", "/runs") == f"results page: {page}"
