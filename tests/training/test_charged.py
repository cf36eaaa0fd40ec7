"""Every run is in the ledger before its first step, whatever becomes of it."""

import json
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dpfp_ray.auditing.audit import audit
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_entries import Spent
from dpfp_ray.privacy.sampling import PoissonSampler
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.signals import Interrupted
from dpfp_ray.system.whole_files import without_checksum
from dpfp_ray.training import train as train_module
from dpfp_ray.training.charged import Charge, use_for
from dpfp_ray.training.console import Silent
from dpfp_ray.training.loop import Drawing, Step
from dpfp_ray.training.prepare import prepare
from dpfp_ray.training.run_folder import SEED
from dpfp_ray.training.train import train
from tests.support.tiny_runs import write_csv

Values = dict[str, Any]


def go(task: Values, ledger: Path, output: Path | None = None, **options: Any) -> Any:
    changes = {k: options.pop(k) for k in list(options) if k in PLAN}
    values = {**task, "epochs": 1} if "epochs" in task else task
    plan = make_plan({**values, **changes})
    return train(plan, output=output, ledger=ledger, reporter="silent", weights=False, **options)


PLAN = ("method", "mode", "epsilon", "train_file", "max_train", "scope", "micro_batches", "ridge")
HEAD = {"method": "dpsgd", "scope": "head", "micro_batches": None}
STEPS = ("micro_batches", "batch_size", "epochs", "learning_rate")
ONCE: Values = {"method": "dpfp", "mode": "moments", **dict.fromkeys(STEPS)}


def drop(values: Values, **changes: Any) -> Values:
    return {k: v for k, v in {**values, **changes}.items() if v is not None}


@pytest.fixture(scope="module")
def head(tiny_task: Values) -> Values:
    """DP-SGD of the head: proved, and fast."""
    return drop({**tiny_task, "epsilon": 2.0}, **HEAD)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def only(ledger: Path) -> Spent:
    (group,) = Ledger(ledger).groups()
    return group


@pytest.mark.slow
def test_a_finished_run_is_charged_for_all_its_steps(head: Values, ledger: Path) -> None:
    made = go(head, ledger)
    (entry,) = only(ledger).entries
    assert (entry.status, entry.done, entry.id) == (
        "finished",
        made.record["privacy"]["steps"],
        made.record["ledger_entry"],
    )


@pytest.mark.slow
def test_records_that_were_dev_rows_are_named(head: Values, ledger: Path) -> None:
    go(head, ledger)
    assert "dev rows" not in only(ledger).sentence()
    go({**head, "train_file": head["dev_file"], "dev_file": head["train_file"]}, ledger)
    assert all("dev rows, too" in group.sentence() for group in Ledger(ledger).groups())


def test_a_training_loss_that_was_shown_is_named(head: Values, ledger: Path) -> None:
    go(head, ledger, show_training_loss=True)
    assert "not covered: the training loss of dpsgd" in only(ledger).sentence()


@pytest.mark.slow
def test_two_seeds_cost_more_than_one(head: Values, ledger: Path, tmp_path: Path) -> None:
    go(head, ledger, tmp_path / "run", seed=1)
    alone = only(ledger).epsilon
    go(head, ledger, tmp_path / "run", seed=2, overwrite=True)
    assert only(ledger).epsilon > 1.2 * alone


@pytest.mark.slow
def test_the_same_seed_and_folder_again_costs_nothing_more(
    head: Values, ledger: Path, tmp_path: Path
) -> None:
    go(head, ledger, tmp_path / "run", seed=1)
    alone = only(ledger).epsilon
    go(head, ledger, tmp_path / "run", seed=1, overwrite=True)
    assert only(ledger).epsilon == pytest.approx(alone)


def test_the_same_seed_on_other_labels_is_charged_again(
    head: Values, ledger: Path, tmp_path: Path
) -> None:
    own = {**head, "train_file": write_csv(tmp_path / "own.csv", 120)}
    go(own, ledger, tmp_path / "run", seed=1)
    alone = only(ledger).epsilon
    text = Path(own["train_file"]).read_text()
    first = text.splitlines()[1]
    flipped = {"negative": "positive", "positive": "negative"}[first.split(",")[1]]
    Path(own["train_file"]).write_text(text.replace(first, f"{first.split(',')[0]},{flipped}", 1))
    go(own, ledger, tmp_path / "run", seed=1, overwrite=True)
    assert only(ledger).epsilon > 1.2 * alone


def test_another_encoder_in_the_same_folder_is_another_run(
    tiny_task: Values, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_task["model"], tmp_path / "model"))
    prepared = prepare(make_plan({**tiny_task, "model": str(folder)}))

    def run_id() -> str:
        use = use_for(prepared, people="them", run="same", seed=1, purpose="train")
        return use.run_id

    first = run_id()
    assert run_id() == first
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, folder / "model.safetensors")
    assert run_id() != first


def test_a_release_that_is_read_again_costs_nothing_more(tiny_task: Values, ledger: Path) -> None:
    once = drop(tiny_task, **ONCE)
    go(once, ledger, seed=1, ridge=0.1)
    alone = only(ledger).epsilon
    go(once, ledger, seed=1, ridge=0.2)
    assert len(only(ledger).used) == 2
    assert only(ledger).epsilon == pytest.approx(alone)


def after(step: int, what: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """`what` happens when `step` steps are done."""

    def show(self: Any, event: Any) -> None:
        if isinstance(event, Step) and event.done == step:
            what()

    patch.setattr(Silent, "show", show)


def out_of_memory() -> None:
    raise RuntimeError("out of memory")


def die() -> None:
    """As a kill does: nothing is saved, and the ledger hears nothing."""
    raise SystemExit


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_failed_run_is_charged_for_the_steps_it_drew(
    head: Values, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after(3, out_of_memory, monkeypatch)
    with pytest.raises(RuntimeError, match="memory"):
        go(head, ledger)
    (entry,) = only(ledger).entries
    assert (entry.status, entry.done) == ("failed", 4)


def test_workers_that_start_again_are_charged_for_the_furthest_step_and_what_may_follow() -> None:
    charge = Charge("an entry", 0)
    for event in (Drawing(ahead=2), told(1), told(2), told(3), Drawing(ahead=2), told(2)):
        charge.count(event)
    assert charge.done + charge.drawing == 5


def told(done: int) -> Step:
    return Step(done, lambda: None, dict)


def fail(*_: Any, **__: Any) -> None:
    out_of_memory()


@pytest.mark.parametrize(
    "where",
    [
        "dpfp_ray.training.loop.make_method",
        "dpfp_ray.training.loop.check_all_learn",
        "dpfp_ray.training.train.with_activations",
    ],
)
def test_a_run_that_fails_before_its_first_draw_is_charged_for_nothing(
    head: Values, ledger: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(where, fail)
    with pytest.raises(RuntimeError, match="memory"):
        go(head, ledger)
    assert [(entry.status, entry.done) for entry in Ledger(ledger).entries()] == [("failed", 0)]
    assert only(ledger).epsilon == 0


@pytest.mark.parametrize("number", [0, 4])
def test_a_step_that_fails_after_its_draw_is_charged(
    head: Values, ledger: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    draw = PoissonSampler.draw
    drawn = []

    def draw_and_fail(self: PoissonSampler, step: int) -> Any:
        drawn.append(draw(self, step))
        if step == number:
            out_of_memory()
        return drawn[-1]

    monkeypatch.setattr(PoissonSampler, "draw", draw_and_fail)
    with pytest.raises(RuntimeError, match="memory"):
        go(head, ledger)
    (entry,) = only(ledger).entries
    assert (entry.status, entry.done) == ("failed", len(drawn)) == ("failed", number + 1)


@pytest.mark.parametrize(("where", "done"), [("evaluate", 1), ("release_id", 1), (None, 0)])
def test_one_release_is_charged_as_soon_as_it_may_have_been_made(
    tiny_task: Values, ledger: Path, monkeypatch: pytest.MonkeyPatch, where: str | None, done: int
) -> None:
    place = f"loop.{where}" if where else "train.with_activations"
    monkeypatch.setattr(f"dpfp_ray.training.{place}", fail)
    with pytest.raises(RuntimeError, match="memory"):
        go(drop(tiny_task, **ONCE, ridge="auto"), ledger)
    (entry,) = Ledger(ledger).entries()
    assert (entry.status, entry.done) == ("failed", done)


def test_a_continuation_that_fails_does_not_hide_what_a_killed_run_drew(
    head: Values, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        after(3, die, patch)
        with pytest.raises(SystemExit):
            go(head, ledger, tmp_path / "run")
    monkeypatch.setattr("dpfp_ray.training.loop.make_method", fail)
    with pytest.raises(RuntimeError, match="memory"):
        go(head, ledger, tmp_path / "run")
    assert all(entry.charged >= 3 for entry in only(ledger).entries)


def test_an_audit_that_fails_before_its_first_draw_is_charged_for_nothing(
    head: Values, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpfp_ray.auditing.audit.build_model", fail)
    plan = make_plan({**head, "epochs": 1})
    with pytest.raises(RuntimeError, match="memory"):
        audit(plan, output=tmp_path / "audit", ledger=ledger, reporter="silent", canaries=20)
    assert [(entry.status, entry.done) for entry in Ledger(ledger).entries()] == [("failed", 0)]


@pytest.mark.slow
def test_a_stopped_run_costs_what_it_planned(
    head: Values, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after(3, ctrl_c, monkeypatch)
    with pytest.raises(Interrupted):
        go(head, ledger, tmp_path / "run")
    (entry,) = only(ledger).entries
    assert entry.status == "open"
    assert entry.charged == entry.use.steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["steps", "one release"])
def test_a_run_killed_before_its_first_save_is_paid_once(
    tiny_task: Values,
    head: Values,
    ledger: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it drew before, it draws again: the seed is in the folder from the start."""
    values = head if kind == "steps" else drop(tiny_task, **ONCE)
    with monkeypatch.context() as patch:
        if kind == "steps":
            after(3, die, patch)
        else:
            patch.setattr(train_module, "release_id", lambda *_: die())
        with pytest.raises(SystemExit):
            go(values, ledger, tmp_path / "run")
    seed = kept_seed(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run" / SEED).stat().st_mode) == 0o600
    made = go(values, ledger, tmp_path / "run")
    spent = only(ledger)
    assert [entry.status for entry in spent.entries] == ["finished", "finished"]
    same = go(values, tmp_path / "unbroken", seed=seed)
    assert spent.epsilon == pytest.approx(only(tmp_path / "unbroken").epsilon)
    scores = [one.record["history"][-1]["dev"]["dev"] for one in (made, same)]
    assert scores[0] == scores[1]
    known = [one.record["statement"]["assumptions"] for one in (made, same)]
    assert len(known[0]) == len(known[1]) - 1  # nobody gave this one's seed
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result.json"]


def kept_seed(folder: Path) -> int:
    return int(json.loads(without_checksum((folder / SEED).read_bytes()))["seed"])


def test_a_damaged_seed_is_not_believed(
    head: Values, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        after(3, die, patch)
        with pytest.raises(SystemExit):
            go(head, ledger, tmp_path / "run")
    file = tmp_path / "run" / SEED
    seed = str(kept_seed(tmp_path / "run")).encode()
    other = seed[:-1] + (b"1" if seed[-1:] != b"1" else b"2")
    file.write_bytes(file.read_bytes().replace(seed, other))
    with pytest.raises(UserError, match=r"resume.seed is damaged .*; delete it"):
        go(head, ledger, tmp_path / "run")


@pytest.mark.slow
def test_another_plan_in_the_folder_of_a_killed_run_has_a_seed_of_its_own(
    head: Values, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []
    after(3, die, monkeypatch)
    for epsilon in (2.0, 3.0, 3.0):
        with pytest.raises(SystemExit):
            go(head, ledger, tmp_path / "run", epsilon=epsilon)
        seeds.append(kept_seed(tmp_path / "run"))
    assert seeds[0] != seeds[1] == seeds[2]
    with pytest.raises(UserError, match="another seed; drop --seed"):
        go(head, ledger, tmp_path / "run", epsilon=3.0, seed=5)


@pytest.mark.slow
def test_a_result_that_is_found_is_not_charged_again(
    head: Values, ledger: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        go(head, ledger, tmp_path / "run")
    assert len(only(ledger).entries) == 1


@pytest.mark.slow
def test_a_result_that_another_ledger_paid_for_is_entered_once(
    head: Values, ledger: Path, tmp_path: Path
) -> None:
    go(head, tmp_path / "first ledger", tmp_path / "run")
    for _ in range(2):
        go(head, ledger, tmp_path / "run")
    assert len(only(ledger).entries) == 1
    assert only(ledger).epsilon == pytest.approx(only(tmp_path / "first ledger").epsilon)


@pytest.mark.slow
def test_a_run_that_would_pass_the_total_is_refused_before_its_first_step(
    head: Values, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(head, ledger, total_epsilon=10, total_delta=1e-5)
    monkeypatch.setattr(train_module, "train_steps", lambda *a, **k: pytest.fail("a step was made"))
    with pytest.raises(UserError, match=r"above the total of 10 .*fit"):
        go(head, ledger, tmp_path / "run")
    assert [entry.status for entry in only(ledger).entries] == ["finished", "refused"]


@pytest.mark.slow
def test_an_audit_adds_to_the_run_that_it_audits(
    head: Values, ledger: Path, tmp_path: Path
) -> None:
    go(head, ledger)
    alone = only(ledger).epsilon
    plan = make_plan({**head, "epochs": 1})
    options: Values = {"ledger": ledger, "reporter": "silent", "canaries": 20}
    made = audit(plan, output=tmp_path / "audit", **options)
    again = audit(plan, output=tmp_path / "audit", **options)
    spent = only(ledger)
    assert [entry.use.purpose for entry in spent.used] == ["train", "audit"]
    assert spent.epsilon > 1.2 * alone
    assert made.record["ledger_entry"] == again.record["ledger_entry"] == spent.entries[1].id
