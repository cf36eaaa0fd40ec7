"""The six kinds of cases: plans, search spaces, data files, records, states and HTTP requests.

A case is a payload (the spoilt file, command line or request) and a way to run it, so that a
smaller payload can be tried in the same way.
"""

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import yaml

from fuzzing.judge import command
from fuzzing.values import PATHS, TEXTS, deep, odd, odd_text, spoil, spoil_bytes

Payload = bytes | tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """`shown` says what is run; `run(payload, folder)` says what is wrong, or nothing."""

    area: str
    shown: str
    payload: Payload
    run: Callable[[Any, Path], str | None]


class Inputs:
    """Good inputs to spoil: a task, a finished run, a store, a saved state; made once."""

    def __init__(self, world: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from dpfp_ray.results.store import Store
        from tests.support.samples import everything_small
        from tests.support.tiny_models import build_tiny
        from tests.support.tiny_runs import tiny_split, write_csv

        self.world = world
        self.model = build_tiny(world / "model", "bert", layers=1, texts=tiny_split(60).texts)
        self.train = write_csv(world / "train.csv", 30)
        self.dev = write_csv(world / "dev.csv", 10, seed=2)
        self.plan: dict[str, Any] = {
            "train_file": self.train,
            "dev_file": self.dev,
            "model": self.model,
            "representation": "mean",
            "method": "dpfp",
            "epsilon": 8.0,
            "accountant": "gdp",
            "batch_size": 8,
            "micro_batches": 2,
            "learning_rate": 1e-3,
            "epochs": 1,
            "clip": 1.0,
        }
        split = tiny_split(30)
        names = ["positive" if label else "negative" for label in split.labels]
        rows = [{"text": t, "label": n} for t, n in zip(split.texts, names, strict=True)]
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), buffer)
        csv = Path(self.train).read_bytes()
        self.files = {
            "x.csv": csv,
            "x.tsv": csv.replace(b",", b"\t"),
            "x.jsonl": "\n".join(json.dumps(row) for row in rows).encode(),
            "x.parquet": buffer.getvalue(),
        }
        self.records = everything_small()[::6]
        self.served = world / "served"
        for record in everything_small():
            Store(self.served).put(record)
        self.ledger = world / "ledger"
        make_ledger(self.ledger, split.texts)
        self.app: Any = None

    @cached_property
    def run(self) -> Path:
        """The folder of a finished run."""
        words = [w for k, v in self.plan.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        fixed = ("--threads", "1", "--seed", "1")
        wrong = command(["train", *words, "--output", str(self.world / "run"), *fixed])
        assert wrong is None, wrong
        return self.world / "run"

    @cached_property
    def result(self) -> Any:
        return json.loads((self.run / "result.json").read_bytes())


def make_ledger(place: Path, texts: Sequence[str]) -> None:
    """A ledger with one finished use and one that is open."""
    from dpfp_ray.plan.plan import Plan
    from dpfp_ray.privacy.ledger import Ledger
    from dpfp_ray.privacy.ledger_entries import use_of

    ledger = Ledger(place)
    people = ledger.register(texts, ["a dev row"]).id
    plan = Plan(method="dpsgd", task="sst2", epsilon=3.0, batch_size=8, epochs=1.0)
    bound = plan.bind(records=len(texts), representation="mean")
    for run in ("one", "two"):
        entry = ledger.begin(use_of(bound, 2.0, people=people, run=run))
        if run == "one":
            ledger.end(entry.id, bound.steps)


def plans(inputs: Inputs, rng: Random) -> Case:
    """`dpfp compare --dry-run` with a file, `dpfp calibrate` with flags."""
    plan = inputs.plan
    kind = rng.randrange(6)
    if kind < 3:
        payload = yaml.safe_dump(spoil(plan, rng), allow_unicode=True).encode("utf-8", "replace")
    elif kind == 3:
        payload = spoil_bytes(yaml.safe_dump(plan).encode(), rng)
    elif kind == 4:
        payload = yaml_tricks(rng)
    else:
        from dpfp_ray.plan.plan import FIELDS

        names = [name for name in FIELDS if name not in ("records", "classes")]
        given = {rng.choice(names): odd_text(rng) for _ in range(rng.randint(1, 3))}
        words = ["calibrate"]
        for name, value in {"records": "1000", "epsilon": "3", "accountant": "gdp"}.items():
            words += [] if name in given else [f"--{name}", value]
        if rng.random() < 0.3:
            words += ["--records", odd_text(rng)]
        for name, value in given.items():
            words += [f"--{name.replace('_', '-')}={value}"]
        return Case("plans", "dpfp ARGUMENTS", tuple(words), lambda p, _: command(list(p)))
    # Other data than the plan's, if it still has any: without them it would load the demo's.
    words = ["compare", "--plan", "plan.yaml", "--methods", "dpfp,dpsgd", "--dry-run"]
    words += ["--train-file", inputs.train, "--dev-file", inputs.dev]
    return Case("plans", f"dpfp {' '.join(words)}", payload, by_file("plan.yaml", words))


def yaml_tricks(rng: Random) -> bytes:
    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12)
    )
    return rng.choice(
        (
            deep(rng),
            f"epsilon: {deep(rng)}",
            deep(rng, "{a: ", "}"),
            "a: &x [*x]",
            "epsilon: &x [*x]",
            f"{laughs}epsilon: *a12",
            f"{laughs}labels: *a12",
            "? [a, b]\n: 1",
            "? {a: 1}\n: 1",
            "---\na: 1\n---\nb: 2",
            "epsilon: 2024-01-01",
            "epsilon: 1:30:00",
            "epsilon: !!binary aGk=",
            "epsilon: !!set {a, b}",
            "epsilon: !!python/name:os.system",
            "1: 2",
            "null: 3",
            "[]: 1",
            "epsilon: " + "9" * 6_000,
            "epsilon: 0b" + "1" * 60_000,
            "%YAML 9.9\n---\na: 1",
        )
    ).encode("utf-8", "surrogatepass")


def spaces(inputs: Inputs, rng: Random) -> Case:
    """`dpfp sweep`, up to where Ray would be started."""
    varied = {
        "learning_rate": {"values": [1e-3, 1e-2]},
        "clip": {"distribution": "uniform", "min": 0.5, "max": 2.0},
    }
    plan = {k: v for k, v in inputs.plan.items() if k not in (*varied, "epsilon", "accountant")}
    space = {
        "name": "fuzzed",
        "method": rng.choice(("random", "grid", "tpe")),
        "metric": {"name": "accuracy", "goal": "maximize"},
        "samples": 2,
        "seeds": 1,
        "scheduler": "none",
        "budget": {"epsilon": 8.0, "accountant": "gdp"},
        "plan": plan,
        "parameters": varied,
    }
    if space["method"] == "grid":
        space["parameters"] = {"learning_rate": varied["learning_rate"]}
    words = ["sweep", "space.yaml", "--storage", "store", "--ledger", "ledger"]
    kind = rng.randrange(5)
    if kind == 4:
        key = rng.choice(("samples", "seeds", "scheduler", "search", "epsilon", "lr", "name", "x"))
        changed = (
            f"--set={key}={odd_text(rng)}",
            *rng.choice(((), (f"--samples={odd_text(rng)}",))),
        )
        (inputs.world / "good.yaml").write_text(yaml.safe_dump(space))
        place = str(inputs.world / "good.yaml")
        return Case(
            "spaces",
            "dpfp sweep GOOD.yaml ARGUMENTS",
            changed,
            lambda p, _: without_ray(["sweep", place, *words[2:], *p]),
        )
    text = yaml.safe_dump(space, allow_unicode=True).encode()
    if kind < 3:
        spoilt = yaml.safe_dump(spoil(space, rng), allow_unicode=True)
        text = spoilt.encode("utf-8", "replace")
    else:
        text = spoil_bytes(text, rng)
    return Case(
        "spaces", f"dpfp {' '.join(words)}", text, by_file("space.yaml", words, without_ray)
    )


def without_ray(words: list[str]) -> str | None:
    """A good space ends where Ray would start: that is refused, with a reason."""
    from dpfp_ray.sweeps.driver import Runner
    from dpfp_ray.system.errors import UserError

    def stop(self: Any) -> None:
        raise UserError("here Ray would start")

    kept = Runner._connect
    Runner._connect = stop  # type: ignore[method-assign]
    try:
        return command(words)
    finally:
        Runner._connect = kept  # type: ignore[method-assign]


def data(inputs: Inputs, rng: Random) -> Case:
    """Files that are read for `dpfp ledger show` (as for training) and for `dpfp predict`."""
    name = rng.choice(sorted(inputs.files))
    kind = rng.randrange(4)
    if kind < 2:
        payload = spoil_bytes(inputs.files[name], rng)
    elif kind == 2 and name == "x.parquet":
        payload = odd_parquet(rng)
    elif kind == 2:
        payload = odd_rows(name, rng)
    else:
        path = rng.choice((*PATHS, *TEXTS))
        words = ["ledger", "show", f"--train-file={path}", "--ledger", str(inputs.ledger)]
        words += rng.choice(([], [f"--text-column={odd_text(rng)}"], [f"--labels={odd_text(rng)}"]))
        return Case("data", "dpfp ARGUMENTS", tuple(words), lambda p, _: command(list(p)))
    if rng.random() < 0.2:
        words = ["predict", str(inputs.run), name, "--threads", "1"]
    else:
        words = ["ledger", "show", "--train-file", name, "--ledger", str(inputs.ledger), "--json"]
        words += rng.choice(
            ([], ["--bad-rows", "skip"], ["--no-header"], ["--user-column", "text"])
        )
    return Case("data", f"dpfp {' '.join(words)}", payload, by_file(name, words))


def odd_rows(name: str, rng: Random) -> bytes:
    rows = [{"text": "a film", "label": "good"}, {"text": "no film", "label": "bad"}] * 6
    spoilt = [spoil(row, rng) if rng.random() < 0.3 else row for row in rows]
    if name.endswith("jsonl"):
        lines = [json.dumps(row) for row in spoilt]
        if rng.random() < 0.2:
            lines.insert(rng.randrange(len(lines)), deep(rng))
    else:
        mark = "," if name.endswith("csv") else "\t"
        values = [row.values() if isinstance(row, dict) else [row] for row in spoilt]
        lines = ["text" + mark + "label", *(mark.join(map(str, row)) for row in values)]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def odd_parquet(rng: Random) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "text": rng.choice(
            (
                pa.array(["a", None, "b"]),
                pa.array([1, 2, 3]),
                pa.array([b"\xff", b"a", None]),
                pa.array([["a"], [], None]),
                pa.array([{"a": 1}, None, {"a": 2}]),
                pa.array(["a", "b", "a"]).dictionary_encode(),
                pa.array(["x" * 10**6, "b", "c"]),
                pa.array([math.nan, 1.0, None]),
                pa.nulls(3),
            )
        ),
        "label": rng.choice(
            (
                pa.array(["x", "y", "x"]),
                pa.array([True, False, None]),
                pa.array([0.5, 1.0, 2.0]),
                pa.array([2**62, 1, 0]),
                pa.array([0, 1, 0], pa.timestamp("ns")),
                pa.array([[0], [1], [0]]),
                pa.array([None, None, None], pa.string()),
            )
        ),
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    found = buffer.getvalue()
    return spoil_bytes(found, rng) if rng.random() < 0.3 else found


def records(inputs: Inputs, rng: Random) -> Case:
    """`dpfp results`, `statement`, `predict` and, as it is slow, sometimes `report`."""
    kind = rng.randrange(10)
    if kind < 3:
        text = json.dumps(spoil(inputs.result, rng), ensure_ascii=rng.random() < 0.5)
        payload = text.encode("utf-8", "surrogatepass")
        words = rng.choice((["statement", "run"], ["statement", "run", "--format", "nist"]))
        if rng.random() < 0.4:
            words = ["predict", "run", "--text", "a film", "--threads", "1"]
        return Case("records", f"dpfp {' '.join(words)}", payload, as_run(inputs, words))
    if kind == 3:
        words = ["predict", "run", "--text", "a film", "--threads", "1"]
        weights = spoil_bytes((inputs.run / "weights.safetensors").read_bytes(), rng)
        return Case("records", "spoilt weights: dpfp predict", weights, as_run(inputs, words, True))
    record = rng.choice(inputs.records)
    payload = json.dumps(spoil(record, rng)).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        payload = spoil_bytes(json.dumps(record).encode(), rng)
    elif rng.random() < 0.02:
        payload = deep(rng, '{"a":', "}").encode()
    if kind == 4:
        where = rng.choice(
            (odd_text(rng), f"method == {odd(rng)!r}", f"accuracy < {odd_text(rng)}")
        )
        words = ["results", "store", f"--where={where}"]
    elif kind == 5:
        words = ["results", "store", f"--sort={odd_text(rng)}", f"--columns={odd_text(rng)}"]
    elif kind == 9 and rng.random() < 0.03:
        words = ["report", "store", "--output", "out", "--ledger", str(inputs.ledger)]
    else:
        words = ["results", "store", rng.choice(("--json", "--csv", "--wide"))]

    def run(spoilt: bytes, folder: Path) -> str | None:
        (folder / "store" / "records").mkdir(parents=True)
        good = json.dumps(inputs.records[0]).encode("utf-8", "backslashreplace")
        (folder / "store" / "records" / "good.json").write_bytes(good)
        (folder / "store" / "records" / "spoilt.json").write_bytes(spoilt)
        return command(words)

    return Case("records", f"dpfp {' '.join(words)}", payload, run)


def as_run(
    inputs: Inputs, words: list[str], weights: bool = False
) -> Callable[[bytes, Path], str | None]:
    """The payload is the result, or the weights, of a finished run."""

    def run(spoilt: bytes, folder: Path) -> str | None:
        (folder / "run").mkdir()
        for name in ("result.json", "weights.safetensors"):
            spoil_it = weights == (name != "result.json")
            whole = (inputs.run / name).read_bytes()
            (folder / "run" / name).write_bytes(spoilt if spoil_it else whole)
        return command(words)

    return run


def by_file(
    name: str, words: list[str], run: Callable[[list[str]], str | None] = command
) -> Callable[[bytes, Path], str | None]:
    def run_with(payload: bytes, folder: Path) -> str | None:
        (folder / name).write_bytes(payload)
        return run(words)

    return run_with
