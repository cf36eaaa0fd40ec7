"""`train` with what a notebook holds in memory: data, an encoder, a tokenizer."""

import io
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModel

from dpfp_ray.models.pretrained import load_tokenizer
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.signals import Interrupted
from dpfp_ray.system.whole_files import ChecksumWriter, check_file
from dpfp_ray.training import console
from dpfp_ray.training.console import Bar, Keeper, Lines, Silent
from dpfp_ray.training.load_model import load_model
from dpfp_ray.training.loop import Epoch, Event, Step
from dpfp_ray.training.prepare import Inputs, Prepared, Run, load_inputs, prepare
from dpfp_ray.training.train import train
from tests.support.tiny_runs import Killed, Listener, run_with, tiny_split


class Words(nn.Module):
    """A hand-written encoder: one vector a token, and one layer on it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.mix = nn.Linear(16, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embed(input_ids)))


@pytest.fixture
def own(tiny_task: dict[str, Any]) -> dict[str, Any]:
    tokenizer = load_tokenizer(tiny_task["model"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {"encoder": Words(len(tokenizer)), "tokenizer": tokenizer}


def rows(count: int = 120, seed: int = 1) -> tuple[list[str], list[str]]:
    split = tiny_split(count, seed)
    return split.texts, [("negative", "positive")[label] for label in split.labels]


QUICK = {"threads": 1, "reporter": "silent", "seed": 5}


def quick_plan(method: str = "dpfp", **changes: Any) -> Plan:
    private = {} if method == "non_private" else {"accountant": "gdp", "epsilon": 8.0}
    usual = {"batch_size": 8, "epochs": 2, "learning_rate": 1e-2}
    return Plan(method=method, **{**usual, **private, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["non_private", "dpfp", "dpsgd"])
def test_an_encoder_of_ones_own_is_trained(method: str, own: dict[str, Any]) -> None:
    before = {name: value.clone() for name, value in own["encoder"].state_dict().items()}
    run = train(quick_plan(method), data=rows(), **own, **QUICK)
    assert run.plan["model"] == "custom:Words"
    assert run.plan["representation"] == "mean"
    assert run.model is not None
    trained = run.model.classifier.encoder.inner.state_dict()
    assert all(not torch.equal(trained[name], before[name]) for name in before)
    assert all(torch.equal(own["encoder"].state_dict()[name], before[name]) for name in before)


def test_an_encoder_needs_its_tokenizer(own: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="give tokenizer= too"):
        train(quick_plan(), data=rows(), encoder=own["encoder"])


def test_a_module_that_is_no_encoder_is_refused(own: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="custom:Linear gives no hidden states"):
        train(quick_plan(), data=rows(), encoder=nn.Linear(2, 2), tokenizer=own["tokenizer"])


def test_a_custom_model_is_not_looked_for_on_disk() -> None:
    with pytest.raises(UserError, match="save it to a folder"):
        train(quick_plan(model="custom:Words"), data=rows())


class Stopping(Silent):
    """Gets a Ctrl-C after the first epoch."""

    def show(self, event: Event) -> None:
        if isinstance(event, Epoch):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def unfinished(own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setitem(console.DISPLAYS, "silent", Stopping)
        with pytest.raises(Interrupted):
            train(quick_plan(), data=rows(), output=tmp_path, **own, **QUICK)
    return tmp_path


@pytest.mark.slow
def test_a_run_on_data_in_memory_is_continued(unfinished: Path, own: dict[str, Any]) -> None:
    run = train(quick_plan(), data=rows(), output=unfinished, **own, **QUICK)
    whole = train(quick_plan(), data=rows(), **own, **QUICK)
    assert run.model is not None
    assert whole.model is not None
    theirs = whole.model.classifier.state_dict()
    ours = run.model.classifier.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_run_is_not_continued_on_other_data_of_the_same_size(
    unfinished: Path, own: dict[str, Any]
) -> None:
    texts, labels = rows()
    # The same texts under other labels: the same rows are held out, and D is the same.
    with pytest.raises(UserError, match="on other data"):
        train(quick_plan(), data=(texts, labels[::-1]), output=unfinished, **own, **QUICK)


def test_a_run_is_not_continued_from_another_encoder(unfinished: Path, own: dict[str, Any]) -> None:
    other = {**own, "encoder": Words(len(own["tokenizer"]))}
    with pytest.raises(UserError, match="another encoder"):
        train(quick_plan(), data=rows(), output=unfinished, **other, **QUICK)


@pytest.mark.slow
def test_an_encoder_of_transformers_is_taken_from_memory_as_from_its_folder(
    tiny_task: dict[str, Any], own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same draws and noise, which otherwise depend on the plan and so on its model."""
    monkeypatch.setattr("dpfp_ray.training.loop.run_seed", lambda seed, *_: seed)
    plan = quick_plan(representation="mean", model=tiny_task["model"])
    folder = train(plan, data=rows(), **QUICK)
    encoder = AutoModel.from_pretrained(tiny_task["model"], add_pooling_layer=False)
    memory = train(plan, data=rows(), encoder=encoder, tokenizer=own["tokenizer"], **QUICK)
    assert memory.plan["model"] == "custom:BertModel"
    assert memory.record["history"][-1]["dev"]["dev"]["loss"] == pytest.approx(
        folder.record["history"][-1]["dev"]["dev"]["loss"], rel=1e-5
    )


def four_epochs(task: dict[str, Any]) -> Plan:
    steps = {"batch_size": 8, "epochs": 4, "learning_rate": 1e-2}
    names = ("train_file", "dev_file", "model", "representation")
    return Plan(**{n: task[n] for n in names}, method="non_private", scope="all", **steps)


def cross_entropy(folder: Path, task: dict[str, Any]) -> float:
    """Of a saved model, on the task's dev file."""
    import csv

    model = load_model(folder)
    with open(task["dev_file"], newline="") as file:
        rows = list(csv.DictReader(file))
    shares = model.probabilities([row["text"] for row in rows])
    truth = [model.labels.index(row["label"]) for row in rows]
    return float(-np.log(shares[np.arange(len(rows)), truth]).mean())


@pytest.mark.slow
def test_the_weights_saved_are_the_weights_quoted(
    tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    plan = four_epochs(tiny_task)
    options: dict[str, Any] = {"seed": 0, "threads": 1, "reporter": "silent"}
    last = train(plan, output=tmp_path / "last", **options).record
    best = train(plan, output=tmp_path / "best", select="best", **options).record
    assert best["metrics"]["rule"] == "best epoch on dev"
    assert best["metrics"]["epoch"] < last["metrics"]["epoch"] == 4
    for folder, record in (("last", last), ("best", best)):
        quoted = record["history"][record["metrics"]["epoch"] - 1]
        assert cross_entropy(tmp_path / folder, tiny_task) == pytest.approx(
            quoted["dev"]["dev"]["loss"], rel=1e-5
        )
    with pytest.raises(UserError, match="holds a run with --select best, this is last"):
        train(plan, output=tmp_path / "best", **options)


@pytest.mark.slow
def test_the_best_epoch_survives_a_stop(tiny_task: dict[str, Any]) -> None:
    """The state of the last step has the best epoch's weights, not its own, to end with."""
    plan = four_epochs(tiny_task)
    prepared = prepare(plan, load_inputs(plan))
    _, whole = run_with(prepared, seed=0, select="best")
    listener = Listener(kill_after=prepared.plan.steps - 3)
    with pytest.raises(Killed):
        run_with(prepared, listener, seed=0, select="best")
    _, resumed = run_with(prepared, seed=0, select="best", state=listener.state())
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def lost(weights: Path) -> None:
    weights.unlink()


def changed(weights: Path) -> None:
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "says"), [(lost, "has no weights"), (changed, "checksum does not match")]
)
def test_a_finished_run_without_whole_weights_is_not_called_finished(
    harm: Any, says: str, own: dict[str, Any], tmp_path: Path
) -> None:
    plan = Plan(mode="moments", accountant="gdp", epsilon=8.0)
    train(plan, data=rows(), output=tmp_path, **own, **QUICK)
    harm(tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match=f"{says}.*run again with --overwrite"):
        train(plan, data=rows(), output=tmp_path, **own, **QUICK)


def test_a_finished_run_without_weights_is_finished_if_none_are_asked_for(
    own: dict[str, Any], tmp_path: Path
) -> None:
    plan = Plan(mode="moments", accountant="gdp", epsilon=8.0)
    for _ in range(2):
        run = train(plan, data=rows(), output=tmp_path, weights=False, **own, **QUICK)
    assert run.model is None


def keeper(display: type[Silent], folder: Path) -> Keeper:
    plan = quick_plan().bind(records=120, representation="mean")
    inputs: Inputs = None  # type: ignore[assignment]
    return Keeper(Run(Prepared(plan, inputs, 1.0), 1), display, folder)


def test_the_first_ctrl_c_is_answered_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with keeper(Lines, tmp_path).on_signals():
        signal.raise_signal(signal.SIGINT)
        assert "stopping: this step ends, then the run is saved" in capsys.readouterr().err


def shown_steps(display: type[Lines], seconds: float, done: int) -> Any:
    """A display that has seen steps 1 and `done` of a run, `seconds` apart."""
    plan = quick_plan().bind(records=800, representation="mean")  # 200 steps
    inputs: Inputs = None  # type: ignore[assignment]
    shown = display(Run(Prepared(plan, inputs, 1.0), 1), "dpfp ε 8, a label")
    shown.dev_scores = {"dev loss": 0.5, "acc": 0.75}
    shown.every_seconds = 0.0
    with shown:
        for number in (1, done):
            shown.show(Step(number, lambda: 0.4, dict))
            assert shown.first is not None
            shown.first = (1, shown.first[1] - seconds / 2)
        return shown


def test_a_log_has_the_time_left_from_the_second_step_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = shown_steps(Lines, 20.0, 21)
    first, second = capsys.readouterr().err.splitlines()
    assert "time left" not in first
    assert "step 21 of 200  time left 1:29  loss 0.400" in second  # 10 s for 20 steps, 179 to go
    assert shown.time_left(200) == ""


@pytest.mark.parametrize(("width", "last"), [(80, "loss 0.400"), (120, "nominal ε ≤ 0.05")])
def test_a_bar_shows_the_facts_that_fit_the_first_of_them_the_time_left(
    width: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stderr", terminal)
    shown = shown_steps(Bar, 20.0, 21)
    (task,) = shown.bar.tasks
    facts = task.fields["facts"]
    assert facts.startswith("21/200  time left 1:29  loss 0.400")
    assert last in facts
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= width
    assert "…" not in stream.getvalue()


def test_ctrl_c_while_a_run_is_saved_waits_for_the_save(
    own: dict[str, Any],
    unfinished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = (unfinished / "resume.pt").read_bytes()
    write = ChecksumWriter.write

    def interrupted_write(self: ChecksumWriter, content: bytes) -> int:
        signal.raise_signal(signal.SIGINT)
        return write(self, content)

    monkeypatch.setattr(ChecksumWriter, "write", interrupted_write)
    with pytest.raises(Interrupted, match="stopped; saved in") as stop:
        train(quick_plan(), data=rows(), output=unfinished, save_every=0, **own, **QUICK)
    assert stop.value.number == signal.SIGINT
    assert (unfinished / "resume.pt").read_bytes() != before
    check_file(unfinished / "resume.pt")
    assert not list(unfinished.glob(".resume.pt.*"))
    assert "enforce fail" not in capfd.readouterr().err


def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path: Path) -> None:
    with keeper(Silent, tmp_path).on_signals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="stopped at once"):
            signal.raise_signal(signal.SIGINT)
