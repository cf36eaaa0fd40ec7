"""A tiny task, tiny plans and listeners, for tests of the loop and of the methods."""

import io
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfp_ray.auditing.audit import Audit, Audited, audit_events
from dpfp_ray.data import Split
from dpfp_ray.data.tokens import tokenise
from dpfp_ray.models.classifier import Classifier
from dpfp_ray.models.pretrained import build_classifier, load_tokenizer
from dpfp_ray.plan.plan import Plan
from dpfp_ray.training.loop import (
    Epoch,
    Event,
    Finished,
    Progress,
    Released,
    State,
    Step,
    train_steps,
)
from dpfp_ray.training.machine import Comm, SoloComm
from dpfp_ray.training.prepare import Data, Inputs, Prepared, Run, build_model
from dpfp_ray.training.record import Record
from dpfp_ray.training.train import run_events
from tests.support.tiny_models import build_tiny

GOOD, BAD = ("great", "superb", "clever"), ("dull", "boring", "tedious")
FILLERS = ("the", "film", "and", "story", "of", "a", "family", "plot", "acting", "is")


def tiny_split(rows: int, seed: int = 1) -> Split:
    """Two classes told apart by one word each; texts of 2 to 9 words."""
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for row in range(rows):
        words = list(rng.choice(FILLERS, int(rng.integers(1, 9))))
        words.insert(int(rng.integers(0, len(words) + 1)), str(rng.choice((BAD, GOOD)[row % 2])))
        texts.append(" ".join(words))
        labels.append(row % 2)
    return Split(texts, None, np.array(labels, dtype=np.int64))


def write_csv(path: Path, rows: int, seed: int = 1) -> str:
    split = tiny_split(rows, seed)
    names = ("negative", "positive")
    lines = [f"{t},{names[y]}" for t, y in zip(split.texts, split.labels, strict=True)]
    path.write_text("\n".join(["text,label", *lines, ""]))
    return str(path)


@contextmanager
def tiny_world(folder: Path) -> Iterator[str]:
    """A tiny BERT's folder, and one thread: then equal runs are equal to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build_tiny(folder / "model", "bert", layers=1, texts=tiny_split(60).texts)
    torch.set_num_threads(threads)


@contextmanager
def steady_world(folder: Path) -> Iterator[str]:
    """`tiny_world` for tests that measure: equal seeds give equal draws in every session.

    Draws follow from the plan, and a plan has the path of its model: here a path relative to the
    working directory, which never changes.
    """
    with tiny_world(folder), chdir(folder):
        yield "./model"


def tiny_data(model: str, train_rows: int = 24, dev_rows: int = 10) -> Data:
    tokenizer = load_tokenizer(model)
    return Data(
        tokenise(tiny_split(train_rows), tokenizer, 32),
        {"dev": tokenise(tiny_split(dev_rows, seed=2), tokenizer, 32)},
    )


def tiny_plan(method: str = "dpfp", **changes: Any) -> Plan:
    """T = 18 steps; epochs end after 6, 12 and 18 of them."""
    settings: dict[str, Any] = {
        "batch_size": 4,
        "epochs": 3,
        "learning_rate": 1e-3,
        "records": 24,
        "representation": "mean",
    }
    if method == "dpfp":
        settings["micro_batches"] = 2
    return Plan(method=method, **{**settings, **changes})


def tiny_classifier(model: str, plan: Plan) -> Classifier:
    return build_classifier(
        model, plan.representation, 2, dropout=plan.dropout, head_seed=3, scope=plan.scope
    )


class Killed(Exception):
    """What a test raises where a machine would die."""


class Listener:
    """Keeps what it hears; dies after step `kill_after`, with the checkpoint in `saved`.

    The checkpoint goes through `torch.save`, as in a real run: a state that only works because it
    shares memory with the run would not do.
    """

    def __init__(
        self, kill_after: int | None = None, at_epoch: bool = False, rates: bool = False
    ) -> None:
        self.kill_after, self.at_epoch, self.ask_rates = kill_after, at_epoch, rates
        self.steps: list[int] = []
        self.losses: list[float | None] = []
        self.rates: list[float] = []
        self.records: list[dict[str, Any]] = []
        self.releases: list[Any] = []
        self.saved = b""

    def hear(self, event: Event) -> None:
        if isinstance(event, Step):
            self.steps.append(event.done)
            self.losses.append(event.loss())
            if self.ask_rates:
                self.rates.append(event.checkpoint()["optimizer"]["param_groups"][0]["lr"])
            if event.done == self.kill_after:
                self._die(event.checkpoint)
        if isinstance(event, Epoch):
            self.records.append(event.record)
            if self.at_epoch and event.record["step"] == self.kill_after:
                self._die(event.checkpoint)
        if isinstance(event, Released):
            self.releases.append(event.release)

    def _die(self, checkpoint: Callable[[], State]) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint(), buffer)
        self.saved = buffer.getvalue()
        raise Killed

    def state(self) -> State:
        state: State = torch.load(io.BytesIO(self.saved), weights_only=True)
        return state


def train_with(
    plan: Plan,
    noise: float,
    model: Classifier,
    data: Data,
    listener: Listener | None = None,
    *,
    seed: int,
    comm: Comm | None = None,
    **options: Any,
) -> Progress:
    """The loop alone, to its end; `listener` hears all events."""
    inputs = Inputs(data, ("no", "yes"), plan.representation)
    run = Run(Prepared(plan, inputs, noise), seed, **options)
    events = train_steps(run, model, data, comm or SoloComm())
    ended: list[Progress] = []

    def follow() -> Generator[Event, None, None]:
        ended.append((yield from events))

    for event in follow():
        (listener or Listener()).hear(event)
    return ended[0]


def run_with(
    prepared: Prepared,
    listener: Listener | None = None,
    *,
    seed: int,
    model: Classifier | None = None,
    **options: Any,
) -> tuple[Record, Classifier]:
    """A run to its end: the result's record, and the model; `listener` hears all events."""
    run = Run(prepared, seed, **options)
    model = model or build_model(run.prepared, seed)
    for event in run_events(run, model):
        (listener or Listener()).hear(event)
    assert isinstance(event, Finished)
    return event.record, model


def audit_with(audit: Audit, listener: Listener | None = None, *, seed: int) -> tuple[Record, Any]:
    """An audit to its end: the record, and the canaries' scores."""
    for event in audit_events(audit, Run(audit.prepared, seed, seed_known=True)):
        (listener or Listener()).hear(event)
    assert isinstance(event, Audited)
    return event.record, event.scores


class ThreadComm:
    """Workers as threads of one process: the naive twin of `TorchComm`."""

    def __init__(self, rank: int, meeting: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size = rank, meeting.parties
        self._meeting, self._slots = meeting, slots

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._slots[self.rank] = [tensor.clone() for tensor in tensors]
        self._meeting.wait(timeout=120)
        for number, tensor in enumerate(tensors):
            tensor.copy_(sum(slot[number] for slot in self._slots))
        self._meeting.wait(timeout=120)


def in_threads(world_size: int, work: Callable[[ThreadComm], Any]) -> list[Any]:
    """What `work(comm)` gives on each of `world_size` workers; a worker's error is raised here."""
    meeting, slots = threading.Barrier(world_size), [None] * world_size
    results: list[Any] = [None] * world_size

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(rank, meeting, slots))
        except BaseException as error:
            results[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive(), "a worker hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
