"""`dpfp export` and `dpfp statement`: what they write and print, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.training.run_folder import RESULT
from tests.cli.test_main import fails
from tests.support.finished_runs import finished


@pytest.fixture(scope="module")
def run(tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    finished(tiny_task, "moments", folder)
    return str(folder)


def audit_of(run: str, folder: Path, **plan: Any) -> str:
    """What `dpfp audit` of the same plan leaves, as far as these verbs read it."""
    record = json.loads((Path(run) / RESULT).read_text())
    record["plan"] |= plan
    record["audit"] = {"verdict": "refuted", "epsilon": 12.5, "confidence": 0.95}
    folder.mkdir()
    (folder / RESULT).write_text(json.dumps(record))
    return str(folder)


def test_the_folder_has_a_model_and_its_card_with_the_audit(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, audit = tmp_path / "model", audit_of(run, tmp_path / "audit")
    assert main(["export", run, str(folder), "--name", "Ours", "--audit", audit]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(folder)
    names = {"README.md", "config.json", "model.safetensors", "modeling_dpfp.py"}
    assert names <= {path.name for path in folder.iterdir()}
    card = (folder / "README.md").read_text()
    assert "# Ours" in card
    assert "ε ≥ 12.5" in card


def test_an_audit_of_another_plan_is_refused(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = audit_of(run, tmp_path / "audit", epsilon=1.0)
    said = fails(["export", run, str(tmp_path / "model"), "--audit", audit], capsys)
    assert "audits another plan: its epsilon is 1.0" in said


def test_a_push_without_a_token_is_one_line_and_keeps_the_folder(
    run: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    folder = tmp_path / "model"
    assert main(["export", run, str(folder), "--push-to-hub", "me/ours"]) == 2
    assert "cannot upload to me/ours: no token; set HF_TOKEN" in capsys.readouterr().err
    assert (folder / "README.md").exists()


def test_a_push_creates_a_private_repository_and_uploads_the_folder(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub's own client, with the three calls that need the network recorded."""
    import huggingface_hub
    from huggingface_hub import RepoUrl

    calls: list[Any] = []

    def create(self: Any, name: str, **options: Any) -> RepoUrl:
        calls.append((name, options["private"]))
        return RepoUrl(f"https://huggingface.co/{name}")

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda self: {"name": "me"})
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda self, **o: calls.append(o))
    assert main(["export", run, str(tmp_path / "model"), "--push-to-hub", "me/ours"]) == 0
    assert calls[0] == ("me/ours", True)
    assert calls[1]["repo_id"] == "me/ours"
    assert (calls[1]["folder_path"] / "README.md").exists()
    assert "huggingface.co/me/ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("text", "proved, ε = 8"),
        ("registry", "name: Ours"),
        ("json", '"guarantee"'),
        ("nist", "[trust model]"),
    ],
)
def test_a_statement_has_the_forms_that_others_ask_for(
    run: str, form: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["statement", run, "--format", form, "--name", "Ours"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(words) if form == "text" else words in text
