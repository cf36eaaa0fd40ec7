"""What a sweep or a comparison will take, before it starts: trials, time, memory, disk, and ε.

Times come from a few steps on this machine (`training/forecast.py`). What a searcher will propose
is not known: its price is that of random draws of its space, as a range.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpfp_ray.data import Task
from dpfp_ray.data.public_text import public_texts
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_entries import Spent, use_of
from dpfp_ray.sweeps.cluster import RayOptions, Resources, plan_resources
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.forecast import rates
from dpfp_ray.training.machine import available_cores
from dpfp_ray.training.prepare import TaskFacts, choose_representation
from dpfp_ray.training.train import UNPROVED

RAY_SECONDS = 9.0  # until the first trial begins: Ray's start and a process that imports torch
TRIAL_SECONDS = 0.35  # of each trial, on top of its training: building, recording, handing over
RECORD_BYTES = 30_000
MOST_CALIBRATED = 40  # plans; more are drawn from, as calibration takes a moment each


@dataclass(frozen=True)
class Price:
    """`seconds` is from a likely low to a likely high; equal where the trials are known."""

    trials: int
    slots: int
    impossible: Counter[str]  # reasons, and how many of the trials that were looked at
    looked_at: int
    seconds: tuple[float, float]
    encoding: float  # seconds of the one pass of a frozen encoder, if no cache has it
    memory: float  # bytes of one trial
    disk: float  # bytes while it runs
    before: Spent | None
    after: Spent | None
    task: str = ""

    @property
    def lines(self) -> list[str]:
        low, high = self.seconds
        about = minutes(high) if high < 1.15 * low else f"{minutes(low)} to {minutes(high)}"
        many = f"{self.trials:,} trial{'s' * (self.trials != 1)}, {self.slots} at a time"
        first = f"{many}: about {about} on this machine"
        if self.encoding > 1:
            first += f"; before it {minutes(self.encoding)} of encoding, unless a cache has it"
        disk = self.disk / 2**20
        lines = [first, f"memory: {self.memory / 2**30:.1f} GiB a trial; disk: {disk:,.0f} MiB"]
        for reason, count in self.impossible.most_common(3):
            lines.append(f"{count} of {self.looked_at} settings cannot run: {reason}")
        if self.after is not None:
            now = "nothing" if self.before is None else f"ε = {self.before.shown}"
            line = (
                f"privacy: the ledger says {now} for these records now, and ε = "
                f"{self.after.shown} after it (δ = {self.after.delta:.3g})"
            )
            bare = self.after.guarantee == "none"
            lines.append(line + "; runs without privacy promise nothing" * bare)
            lines += [text for text in UNPROVED.values() if text[0] in self.after.shown]
        return lines


def local_resources(options: RayOptions) -> Resources:
    """What this machine gives; a cluster may give more."""
    node = {"CPU": available_cores(), "GPU": torch.cuda.device_count()}
    asked = (options.workers, options.cpus_per_worker, options.gpus_per_worker)
    return plan_resources([node], *asked, options.concurrency, may_grow=True)


def minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds)):d} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def price(
    plans: Iterable[Plan],
    task: Task,
    resources: Resources,
    ledger: Ledger,
    *,
    trials: int | None = None,
    seeds: int = 1,
) -> Price:
    """The price of these plans, `seeds` times each; or of `trials` that are drawn like them."""
    settings = list(plans)
    if trials is not None or len(settings) > MOST_CALIBRATED:
        trials = trials or len(settings) * seeds
        every = -(-len(settings) // MOST_CALIBRATED)
        settings = settings[::every]  # evenly, as the first ones of a grid are alike
    facts = TaskFacts(task.train.units, len(task.label_names), task.train.pairs is not None)
    dev_rows = sum(len(split) for split in task.dev.values())
    impossible: Counter[str] = Counter()
    seconds, memory, state, encoding = [], 0.0, 0.0, 0.0
    possible: list[tuple[Plan, float]] = []
    public: dict[Any, int | None] = {}
    for plan in settings:
        try:
            representation = choose_representation(plan, facts)
            text = (plan.teacher is None, plan.public_file, plan.max_public)
            if text not in public:
                public[text] = len(public_texts(plan, task)) if plan.teacher else None
            bound = plan.bind(
                records=facts.records,
                representation=representation,
                classes=facts.classes,
                public_records=public[text],
            )
            possible.append((bound, noise_multiplier(bound)))
        except UserError as error:
            impossible[str(error)] += 1
            continue
        trained = replace(plan, representation=representation).trained_part
        speed = rates(trained, task, resources.cpus_per_worker)
        needed, rows = speed.seconds(bound, dev_rows) + TRIAL_SECONDS, len(task.train)
        memory, state = max(memory, speed.memory), max(state, speed.state)
        if plan.teacher:
            speed = rates(plan.private_part, task, resources.cpus_per_worker)
            needed += speed.seconds(bound.private_part, 0)
            memory, rows = max(memory, speed.memory), rows + (bound.public_records or 0)
        seconds.append(needed)
        encoding = max(encoding, speed.encoding(rows, dev_rows))
    share = len(possible) / max(1, len(settings))
    count = round(trials * share) if trials is not None else len(possible) * seeds
    slots = max(1, min(resources.slots, count))
    total = wall_seconds(seconds, slots, count, searched=trials is not None)
    before, after = ledger_before_and_after(
        ledger, task, possible, count, fixed_list=trials is None, seeds=seeds
    )
    return Price(
        trials if trials is not None else len(settings) * seeds,
        resources.slots,
        impossible,
        len(settings),
        total,
        encoding / max(1, resources.slots * resources.cpus_per_worker),
        memory,
        slots * state + count * RECORD_BYTES,
        before,
        after,
        task.name,
    )


def wall_seconds(
    seconds: Sequence[float], slots: int, count: int, *, searched: bool
) -> tuple[float, float]:
    """When the last of `count` such trials ends, `slots` of them side by side."""
    if not seconds:
        return 0.0, 0.0
    if searched:
        low, high = np.quantile(seconds, (0.25, 0.75))
        return (
            float(RAY_SECONDS + max(low, low * count / slots)),
            float(RAY_SECONDS + max(high, high * count / slots)),
        )
    free = [0.0] * slots  # when each slot is free again
    for each in np.resize(seconds, count):
        heapq.heappush(free, heapq.heappop(free) + float(each))
    return RAY_SECONDS + max(free), RAY_SECONDS + max(free)


def ledger_before_and_after(
    ledger: Ledger,
    task: Task,
    possible: Sequence[tuple[Plan, float]],
    count: int,
    *,
    fixed_list: bool,
    seeds: int,
) -> tuple[Spent | None, Spent | None]:
    """What the ledger says of these records now, and will say; nothing is written."""
    people = ledger.find(task.train.all_texts()) if ledger.exists() else None
    before = None if people is None else ledger.spent(people)
    if not possible:
        return before, before
    uses = [
        use_of(
            plan,
            noise,
            people=people or "these records",
            run=f"trial {number}",
            purpose="trial",
            release=f"release {number // len(possible)}" if plan.private_part.one_release else None,
            fixed_list="one" if fixed_list else None,
        )
        for number, (plan, noise) in zip(range(count), [*possible] * count, strict=False)
    ]
    return before, ledger.preview(uses)
