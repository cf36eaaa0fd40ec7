"""The ledger: what was done to one record is never more than what it says."""

import json
import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy import accounting
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_cost import (
    Gaussian,
    Pure,
    composed_epsilon,
    filter_epsilon,
    filters_from,
)
from dpfp_ray.privacy.ledger_entries import Entry, Use, entry_from_json, rounded_up, use_of
from dpfp_ray.privacy.people import default_place
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.storage import RemoteFiles

TEXTS = [f"record number {i}" for i in range(1000)]
D, DELTA = len(TEXTS), 1 / (2 * len(TEXTS))
RELEASE = Gaussian(1.0, 4.0)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def use(ledger: Ledger, texts: list[str] = TEXTS, **changes: Any) -> Use:
    facts: dict[str, Any] = {
        "purpose": "train",
        "plan_hash": "0123456789abcdef",
        "method": "dpsgd",
        "people": ledger.register(texts).id,
        "records": len(texts),
        "steps": 100,
        "parts": (Gaussian(0.05, 1.0),),
        "adjacency": "add_remove",
        "labels_protected": True,
        "guarantee": "proved",
        "delta": DELTA,
        "run": "seed 1, folder a",
    }
    return Use(**facts | changes)


def released(ledger: Ledger, run: str = "a", **changes: Any) -> Use:
    return use(ledger, parts=(RELEASE,), steps=1, run=run, **changes)


def least(counts: dict[Any, int]) -> float:
    """No statement about these releases may be below this."""
    return composed_epsilon(counts, DELTA)


def run_through(ledger: Ledger, planned: Use) -> None:
    ledger.end(ledger.begin(planned).id, planned.steps)


def spent(ledger: Ledger) -> float:
    groups = ledger.groups()
    assert len(groups) == 1
    return groups[0].epsilon


def test_a_sum_without_a_total_holds_at_the_smallest_delta_of_its_uses(ledger: Ledger) -> None:
    for run, delta in (("a", 1e-5), ("b", 1e-7), ("c", 1e-6)):
        run_through(ledger, use(ledger, run=run, delta=delta))
    assert ledger.groups()[0].delta == 1e-7


# --- hunting for a sum that is too small --------------------------------------------------------


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param([f" {text} " for text in TEXTS], id="other spelling"),
        pytest.param(list(TEXTS), id="copy"),
        pytest.param(TEXTS[:10], id="subset"),
        pytest.param(TEXTS[::-1], id="reordered"),
        pytest.param([*TEXTS[999:], "somebody new"], id="one record in common"),
    ],
)
def test_the_same_people_pay_twice(ledger: Ledger, texts: list[str]) -> None:
    run_through(ledger, use(ledger))
    run_through(ledger, use(ledger, texts, run="b"))
    assert spent(ledger) >= least({Gaussian(0.05, 1.0): 200})


def test_marks_tell_seeds_apart_without_showing_them(ledger: Ledger) -> None:
    assert ledger.mark(1) == ledger.mark(1) != ledger.mark(2)
    run_through(ledger, use(ledger, run="the folder's name"))
    stored = "".join(p.read_text() for p in Path(ledger.files.name).glob("entries/*"))
    assert "folder" not in stored


@pytest.mark.parametrize("done", [0, 30])
def test_a_failed_run_costs_the_steps_it_drew(ledger: Ledger, done: int) -> None:
    ledger.set_total(8.0, DELTA)
    entry = ledger.begin(use(ledger))
    planned = spent(ledger)
    ledger.end(entry.id, done, "failed")
    assert least({Gaussian(0.05, 1.0): done}) <= spent(ledger) < planned
    assert done > 0 or spent(ledger) == 0.0


def _killed(place: Path) -> None:
    ledger = Ledger(place)
    ledger.begin(use(ledger))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_costs_its_plan(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path / "l",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert spent(Ledger(tmp_path / "l")) == least({Gaussian(0.05, 1.0): 100})


def test_a_resumed_run_counts_once_and_its_end_speaks_for_all(ledger: Ledger) -> None:
    ledger.begin(use(ledger))
    again = ledger.begin(use(ledger), resumed=True)
    assert spent(ledger) == least({Gaussian(0.05, 1.0): 100})
    ledger.end(again.id, 60, "stopped")
    assert [entry.done for entry in ledger.entries()] == [60, 60]


def test_a_twin_that_may_still_run_is_not_ended_by_another(ledger: Ledger) -> None:
    ledger.begin(use(ledger))
    ledger.end(ledger.begin(use(ledger)).id, 10, "stopped")
    assert spent(ledger) == least({Gaussian(0.05, 1.0): 100})


def test_a_run_taken_for_dead_that_ends_after_all_is_charged(ledger: Ledger) -> None:
    first = ledger.begin(use(ledger))
    ledger.end(ledger.begin(use(ledger), resumed=True).id, 10, "stopped")
    ledger.end(first.id, 90, "stopped")
    assert spent(ledger) >= least({Gaussian(0.05, 1.0): 90})


@pytest.mark.parametrize(
    "change",
    [
        {"plan_hash": "f" * 16},
        {"parts": (Gaussian(0.05, 0.9),)},
        {"steps": 101},
        {"purpose": "audit"},
        {"run": "seed 1, folder b"},
    ],
)
def test_whatever_makes_another_run_is_charged_as_one(
    ledger: Ledger, change: dict[str, Any]
) -> None:
    run_through(ledger, use(ledger))
    run_through(ledger, use(ledger, **change))
    assert spent(ledger) >= least({Gaussian(0.05, 1.0): 200}) * 0.999


def test_the_same_release_twice_costs_once_and_another_costs_again(ledger: Ledger) -> None:
    for run in ("a", "b", "c"):
        run_through(ledger, released(ledger, run, release="r1"))
    assert spent(ledger) == least({RELEASE: 1})
    run_through(ledger, released(ledger, "a", release="r2"))
    assert spent(ledger) >= least({RELEASE: 2})


def test_a_release_id_on_other_noise_or_other_data_does_not_hide_it(ledger: Ledger) -> None:
    run_through(ledger, released(ledger, release="r"))
    louder = use(ledger, parts=(Gaussian(1.0, 2.0),), steps=1, release="r")
    run_through(ledger, louder)
    run_through(ledger, released(ledger, texts=TEXTS[:50], release="r"))
    assert spent(ledger) >= least({RELEASE: 2, Gaussian(1.0, 2.0): 1})


def test_mixed_modes_are_one_sum(ledger: Ledger) -> None:
    run_through(ledger, use(ledger))
    run_through(ledger, released(ledger, release="r"))
    run_through(ledger, use(ledger, parts=(RELEASE, Pure(0.5)), steps=1, adjacency="replace_one"))
    found = spent(ledger)
    assert found >= least({Gaussian(0.05, 1.0): 100, RELEASE: 2, Pure(0.5): 1})
    assert ledger.groups()[0].guarantee == "proved"


@pytest.mark.parametrize(
    ("changes", "meaning"),
    [
        ({}, "the odds that a record was in the data rise at most"),
        ({"unit": "person"}, "the odds that a person was in the data rise at most"),
        ({"guarantee": "nominal"}, "only nominal (†), so nothing is promised"),
        ({"guarantee": "claimed"}, "holds only if another library does what it says (§)"),
        ({"guarantee": "none", "parts": ()}, "no privacy at all, so nothing is promised"),
        ({"parts": (Gaussian(1.0, 0.1),)}, "so large that it protects nobody"),
        ({"labels_protected": False}, "the odds that a record's text was in the data"),
    ],
)
def test_the_headline_promises_no_more_than_was_proved(
    ledger: Ledger, changes: dict[str, Any], meaning: str
) -> None:
    run_through(ledger, use(ledger, run="first"))
    run_through(ledger, use(ledger, **changes))
    (group,) = ledger.groups()
    assert meaning in group.headline()
    assert group.guarantee == changes.get("guarantee", "proved")
    assert group.labels_protected == changes.get("labels_protected", True)


def test_without_a_total_a_filters_sum_is_no_promise(ledger: Ledger) -> None:
    for run in "ab":
        run_through(ledger, released(ledger, run))
    assert ": had this been a total set beforehand, the odds" in ledger.groups()[0].headline()
    ledger.set_total(8.0, DELTA)
    assert ": the odds that a record" in Ledger(ledger.files.name).groups()[0].headline()


def test_the_first_list_decides_which_filter_gets_most_of_delta(ledger: Ledger) -> None:
    plain, sampled = Gaussian(1.0, 4.0), Gaussian(0.05, 1.0)
    ledger.begin_all(
        [
            use(ledger, run="a", parts=(plain,), steps=1, fixed_list="first"),
            use(ledger, run="b", parts=(sampled,), fixed_list="first"),
        ]
    )
    run_through(ledger, use(ledger, run="c"))
    expected = filter_epsilon({plain: 1, sampled: 200}, DELTA, filters_from([plain, sampled]))
    assert (spent(ledger), ledger.groups()[0].how) == expected


def test_a_use_without_privacy_makes_the_sum_infinite_and_shows_the_private_part(
    ledger: Ledger,
) -> None:
    run_through(ledger, use(ledger))
    run_through(ledger, use(ledger, run="b", parts=(), guarantee="none", delta=None))
    group = ledger.groups()[0]
    assert (group.epsilon, group.guarantee) == (math.inf, "none")
    assert group.private_epsilon == least({Gaussian(0.05, 1.0): 100})


def test_a_data_set_that_was_never_registered_cannot_be_used(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="not registered"):
        ledger.begin(use(ledger, people="/data/train.csv"))


@pytest.mark.parametrize("damage", ["", "{}", '{"schema": 2}', "[1]"])
def test_a_damaged_entry_is_an_error_not_a_gift(ledger: Ledger, damage: str) -> None:
    entry = ledger.begin(use(ledger))
    (Path(ledger.files.name) / "entries" / f"{entry.id}.json").write_text(damage)
    with pytest.raises(UserError, match=entry.id):
        Ledger(ledger.files.name).groups()


@pytest.mark.parametrize(
    ("name", "value"), [("delta", "//x"), ("delta", 0), ("records", 0), ("steps", "9"), ("who", 1)]
)
def test_an_entry_with_an_impossible_value_is_an_error(
    ledger: Ledger, name: str, value: Any
) -> None:
    entry = ledger.begin(use(ledger))
    path = Path(ledger.files.name) / "entries" / f"{entry.id}.json"
    facts = json.loads(path.read_text())
    (facts if name in facts else facts["use"])[name] = value
    path.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=entry.id):
        Ledger(ledger.files.name).groups()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"done": 100', '"done": 0'),
        ('"noise_multiplier": 1.0', '"noise_multiplier": 4.0'),
        ('"epsilon": 30.0', '"epsilon": 300.0'),
    ],
)
def test_a_number_that_was_changed_is_noticed(ledger: Ledger, before: str, after: str) -> None:
    ledger.set_total(30.0)
    run_through(ledger, use(ledger))
    changed = 0
    for path in Path(ledger.files.name).rglob("[et]*/*.json"):
        text = path.read_text()
        changed += before in text
        path.write_text(text.replace(before, after))
    assert changed == 1
    with pytest.raises(UserError, match=r"is damaged \(its checksum does not match\); restore"):
        Ledger(ledger.files.name).groups()


def test_a_copy_of_another_runs_end_is_noticed(ledger: Ledger) -> None:
    run_through(ledger, use(ledger))
    short = ledger.begin(use(ledger, run="b"))
    ledger.end(short.id, 0, "failed")
    folder = Path(ledger.files.name) / "entries"
    zero = next(folder.glob(f"{short.id}.end.*"))
    end = next(path for path in folder.glob("*.end.*") if path != zero)
    end.write_bytes(zero.read_bytes())
    with pytest.raises(UserError, match="is damaged"):
        Ledger(ledger.files.name).groups()


@pytest.mark.parametrize(
    ("lost", "says"), [("*", "1 or more entries are gone"), (".json", "no beginning")]
)
def test_an_entry_that_is_gone_is_noticed(ledger: Ledger, lost: str, says: str) -> None:
    first = ledger.begin(use(ledger))
    ledger.end(first.id, 100)
    run_through(ledger, use(ledger, run="b"))
    for path in (Path(ledger.files.name) / "entries").glob(f"{first.id}{lost}"):
        path.unlink()
    with pytest.raises(UserError, match=says):
        Ledger(ledger.files.name).groups()


# --- lists and choices --------------------------------------------------------------------------


def test_a_list_begun_as_a_whole_is_composed(ledger: Ledger) -> None:
    trials = [ledger.begin(use(ledger, run=str(i), fixed_list="l")) for i in range(4)]
    for trial in trials:
        ledger.end(trial.id, 100)
    assert spent(ledger) == least({Gaussian(0.05, 1.0): 400})
    assert ledger.groups()[0].how == "composition of a fixed list"


@pytest.mark.parametrize("lists", ["llll", "lm"], ids=["one after another", "two lists"])
def test_uses_that_were_not_fixed_together_need_the_filter(ledger: Ledger, lists: str) -> None:
    for i, name in enumerate(lists):
        run_through(ledger, use(ledger, run=str(i), fixed_list=name))
    assert spent(ledger) > least({Gaussian(0.05, 1.0): 100 * len(lists)})
    assert "filter" in ledger.groups()[0].how


def test_a_list_cut_short_is_composed_in_full_or_filtered(ledger: Ledger) -> None:
    trials = [ledger.begin(use(ledger, run=str(i), fixed_list="l")) for i in range(4)]
    for trial, done in zip(trials, (100, 100, 100, 90), strict=True):
        ledger.end(trial.id, done)
    assert spent(ledger) == least({Gaussian(0.05, 1.0): 400})


# --- the total ----------------------------------------------------------------------------------


def test_a_use_that_would_pass_the_total_is_refused_and_costs_nothing(ledger: Ledger) -> None:
    ledger.set_total(1.2, DELTA)
    run_through(ledger, released(ledger, "a"))
    run_through(ledger, released(ledger, "b"))
    before = spent(ledger)
    with pytest.raises(UserError, match=r"from ε = .* above the total of 1\.2 .* fits"):
        ledger.begin(released(ledger, "c"))
    assert spent(ledger) == before <= 1.2
    assert ledger.entries()[-1].status == "refused"


def test_what_the_refusal_says_would_fit_does_fit(ledger: Ledger) -> None:
    ledger.set_total(2.0, DELTA)
    with pytest.raises(UserError) as refusal:
        ledger.begin(use(ledger, parts=(Gaussian(1.0, 0.5),), steps=1))
    epsilon = float(str(refusal.value).split("≤ ")[1].split()[0])
    mu = accounting.gdp_mu_of_budget(epsilon, DELTA)
    ledger.begin(use(ledger, parts=(Gaussian(1.0, 1 / mu),), steps=1))


def test_a_refusal_compares_what_fits_with_the_run_at_one_delta(ledger: Ledger) -> None:
    """At the total's far smaller δ the same mechanisms have a larger ε."""
    ledger.set_total(6.0, 1e-12)
    mu = accounting.gdp_mu_of_budget(3.0, 1e-3)
    with pytest.raises(UserError) as refusal:
        ledger.begin(use(ledger, parts=(Gaussian(1.0, 1 / mu),), steps=1, delta=1e-3))
    said = str(refusal.value)
    assert "at its own δ = 0.001 it has ε = 3," in said
    assert float(said.split("≤ ")[1].split()[0]) < 3


def test_after_a_refusal_the_same_run_may_try_again(ledger: Ledger) -> None:
    ledger.set_total(0.5, DELTA)
    with pytest.raises(UserError):
        ledger.begin(released(ledger))
    ledger.set_total(5.0, DELTA, force=True)
    ledger.begin(released(ledger))
    assert spent(ledger) >= least({RELEASE: 1})


def test_a_refused_resume_does_not_erase_what_was_done(ledger: Ledger) -> None:
    ledger.begin(use(ledger))
    ledger.set_total(0.1, DELTA)
    with pytest.raises(UserError):
        ledger.begin(use(ledger), resumed=True)
    assert spent(ledger) >= least({Gaussian(0.05, 1.0): 100})


def test_each_group_of_people_has_the_total_to_itself(ledger: Ledger) -> None:
    ledger.set_total(1.0, DELTA)
    ledger.begin(released(ledger, texts=TEXTS[:500]))
    ledger.begin(released(ledger, texts=TEXTS[500:]))
    with pytest.raises(UserError):
        ledger.begin(released(ledger, "b", texts=TEXTS[:5]))


def test_a_total_refuses_uses_without_privacy(ledger: Ledger) -> None:
    ledger.set_total(8.0, DELTA)
    with pytest.raises(UserError, match="gives no privacy"):
        ledger.begin(use(ledger, method="non_private", parts=(), guarantee="none"))
    assert spent(ledger) == 0.0


def test_a_total_is_set_once(ledger: Ledger) -> None:
    ledger.set_total(8.0, DELTA)
    ledger.set_total(8.0, DELTA)
    with pytest.raises(UserError, match="needs force"):
        ledger.set_total(9.0, DELTA)
    ledger.set_total(9.0, DELTA, force=True)
    total = Ledger(ledger.files.name).total()
    assert total is not None
    assert total.epsilon == 9.0
    assert len(list((Path(ledger.files.name) / "totals").iterdir())) == 2


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (math.inf, 1e-5), (1, 0), (1, 1)]
)
def test_totals_that_mean_nothing_are_refused(ledger: Ledger, epsilon: float, delta: float) -> None:
    with pytest.raises(UserError, match="total"):
        ledger.set_total(epsilon, delta)


# --- two drivers at once ------------------------------------------------------------------------


def _remote(place: Path) -> Ledger:
    """The same folder as an object store: no lock, only the order of writing and reading."""
    return Ledger(RemoteFiles(LocalStore(str(place / "ledger"), mkdir=True), "test://ledger"))


def _race(place: Path, locks: bool, number: int, start: Any, results: Any) -> None:
    ledger = Ledger(place / "ledger") if locks else _remote(place)
    # Overlapping subsets, registered at the same moment: the links race as well.
    texts = TEXTS[number * 100 : number * 100 + 300]
    start.wait()
    try:
        ledger.begin(released(ledger, str(number), texts=texts))
        results.put("admitted")
    except UserError as error:
        results.put(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False])
def test_drivers_that_race_for_the_last_epsilon_never_pass_the_total(
    tmp_path: Path, locks: bool
) -> None:
    """20 races of three; the total has room for one of them, were they all the same people."""
    context = multiprocessing.get_context("fork")
    for race in range(20):
        place = tmp_path / str(race)
        place.mkdir()
        ledger = Ledger(place / "ledger")
        total = ledger.set_total(1.0, DELTA)
        start, results = context.Barrier(3), context.Queue()
        drivers = [
            context.Process(target=_race, args=(place, locks, number, start, results))
            for number in range(3)
        ]
        for driver in drivers:
            driver.start()
        told = [results.get(timeout=900) for _ in drivers]
        for driver in drivers:
            driver.join()
        assert {text for text in told if "above the total" not in text} <= {"admitted"}
        assert told.count("admitted") <= 1
        assert told.count("admitted") == 1 or not locks
        assert ledger.groups()[0].epsilon <= total.epsilon


# --- plans, places, JSON ------------------------------------------------------------------------


def plan(**fields: Any) -> Plan:
    return Plan(**fields).bind(records=D)


ONCE = {"method": "dpfp", "mode": "release_once"}


@pytest.mark.parametrize(
    ("fields", "guarantee", "labels", "method", "pure"),
    [
        ({"method": "dpsgd"}, "proved", True, "dpsgd", ()),
        ({"method": "rgp"}, "proved", True, "rgp", ()),
        ({"method": "dpfp"}, "nominal", False, "dpfp paper", ()),
        (ONCE, "proved", False, "dpfp release_once", ()),
        # It keeps its noise, and has half the sensitivity under zero-out.
        ({**ONCE, "adjacency": "replace_one"}, "proved", False, "dpfp release_once", ()),
        ({**ONCE, "label_epsilon": 1.0}, "proved", True, "dpfp release_once", (Pure(1.0),)),
        ({"method": "dpfp", "mode": "moments"}, "proved", True, "dpfp moments", ()),
        ({"method": "non_private"}, "none", False, "non_private", None),
    ],
)
def test_a_plan_becomes_its_mechanism(
    fields: dict[str, Any], guarantee: str, labels: bool, method: str, pure: Any
) -> None:
    bound = plan(**fields)
    made = use_of(bound, 1.5, people="p", run="r")
    assert (made.guarantee, made.labels_protected, made.method) == (guarantee, labels, method)
    assert made.parts == (() if pure is None else (Gaussian(bound.p, 1.5, bound.M), *pure))
    assert made.steps * bound.M == bound.draws


def test_a_plans_cost_in_the_ledger_is_its_own_epsilon(ledger: Ledger) -> None:
    bound = plan(method="dpsgd")
    run_through(ledger, use_of(bound, 1.0, people=ledger.register(TEXTS).id, run="r"))
    own = accounting.epsilon(accounting.mechanism(bound, 1.0), DELTA, "pld")
    assert spent(ledger) == pytest.approx(own, rel=1e-3)


def test_the_environment_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFP_LEDGER", "/somewhere/else")
    assert default_place() == "/somewhere/else"
    monkeypatch.delenv("DPFP_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", "/home/me/data")
    assert default_place() == "/home/me/data/dpfp-ray/ledger"


def test_an_end_reads_no_other_entry(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ending all trials of a sweep would read the ledger as often as there are trials."""
    entries = ledger.begin_all([use(ledger, run=f"seed {n}") for n in range(5)])
    parsed: list[str] = []

    def counted(opening: Any, ends: Any) -> Entry:
        parsed.append(opening["id"])
        return entry_from_json(opening, ends)

    monkeypatch.setattr("dpfp_ray.privacy.ledger.entry_from_json", counted)
    ledger.end(entries[3].id, 1)
    assert parsed == [entries[3].id]


@pytest.mark.parametrize(("done", "status"), [(-1, "finished"), (0, "refused"), (0, "gone")])
def test_ends_that_mean_nothing_are_refused(ledger: Ledger, done: int, status: str) -> None:
    entry = ledger.begin(use(ledger))
    with pytest.raises(ValueError, match=r"done|status"):
        ledger.end(entry.id, done, status)
    with pytest.raises(UserError, match="no entry 'x'"):
        ledger.end("x", 1)


@pytest.mark.parametrize("classes", [2, 3])  # of more than two, high orders have no bound
def test_a_mechanism_with_a_theorem_of_its_own_is_charged_by_it(
    classes: int, tmp_path: Path
) -> None:
    """Objective perturbation costs more than a plain Gaussian with its σ would."""
    plan = Plan(method="objpert", epsilon=3.0).bind(records=1_000, classes=classes)
    book = Ledger(tmp_path)
    people = book.register([f"text {i}" for i in range(1_000)]).id
    entry = book.begin(use_of(plan, noise_multiplier(plan), people=people, run="one"))
    book.end(entry.id, 1, "finished")
    assert plan.delta is not None
    found = Ledger(tmp_path, delta=plan.delta).spent(people)
    assert 3.0 <= found.epsilon < 3.6
    assert found.guarantee == "proved"


@pytest.mark.parametrize(
    ("epsilon", "text"), [(3.0, "3"), (3.0049, "3.01"), (12.301, "12.4"), (0.0, "0")]
)
def test_what_is_published_is_never_less_than_the_sum(epsilon: float, text: str) -> None:
    assert float(rounded_up(epsilon)) == float(text)


def test_json_has_one_object_for_each_group(ledger: Ledger) -> None:
    ledger.set_total(8.0, DELTA)
    run_through(ledger, use(ledger))
    (group,) = json.loads(json.dumps(ledger.to_json()))
    assert {"epsilon", "delta", "guarantee", "total", "entries"} <= group.keys()
    assert (group["total"], group["adjacency"]) == (8.0, "zero_out")
    (entry,) = group["entries"]
    assert (entry["status"], entry["mechanism"][0]["planned"]) == ("finished", 100)
