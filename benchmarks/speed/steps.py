"""Bars of a training step: DP-FP, DP-SGD and its scopes, plain Opacus; what a step is made of."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dpfp_ray.training import machine, step
from speed.bars import Bar, missing_bar, number_bar, ratio_bar, verdict
from speed.contestants import CPU, Ours, Where
from speed.race import Limits, Turn, race, ratio_of
from speed.rivals import plain_opacus

# Bu et al. 2023, abstract (PMLR 202:3192-3218): GPT-2 with book-keeping has 0.83 of the speed of
# training without privacy. The package (awslabs/fast-differential-privacy) is on no index.
FASTDP_SPEED = 0.83
DPSGD_ROWS = 256  # a step; its paper takes 1,000


def dpfp(where: Where) -> list[Bar]:
    turns = {name: Ours(name, where, 32) for name in ("non_private", "dpfp")}
    limits = Limits(rounds=12, seconds=20) if where.quick else Limits(rounds=120, seconds=90)
    seconds = race(turns, [("non_private", "dpfp")], limits)
    ratio = ratio_of(seconds["non_private"], seconds["dpfp"])
    how = f"MiniLM, {where.rows}, B = 32"
    return [
        ratio_bar("DP-FP step / non-private step, examples/s", "≥ 0.97", ratio, how),
        peak_memory_bar(where),
    ]


def peak_memory_bar(where: Where) -> Bar:
    """Each in a process of its own, so that the peak is its own."""
    peaks = {}
    for name in ("non_private", "dpfp"):
        command = [sys.executable, str(Path(__file__).parent.parent / "bench.py"), "--peak", name]
        command += ["--data-dir", where.data_dir] if where.data_dir else []
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        peaks[name] = json.loads(done.stdout)
    value = peaks["dpfp"] / peaks["non_private"]
    both = " and ".join(f"{peaks[name] / 2**20:,.0f} MiB" for name in ("dpfp", "non_private"))
    how = f"B = 32, eight steps in a process each: {both}, with what is imported"
    return number_bar("DP-FP / non-private, peak memory", "≤ 1.02", value, f"{value:.3f}", how)


def peak_memory(name: str, where: Where) -> int:
    contestant = Ours(name, where, 32)
    machine.reset_peak_memory(CPU)
    for number in range(8):
        contestant(number)
    return machine.peak_memory(CPU)


def opacus(where: Where) -> list[Bar]:
    limits = Limits(rounds=2, seconds=40) if where.quick else Limits(rounds=40, seconds=150)
    turns: dict[str, Turn] = {"dpfp": Ours("dpfp", where, 32)}
    for clipping in ("ghost", "hooks"):
        turns[clipping] = plain_opacus(where, clipping, 32)
    seconds = race(turns, [("ghost", "dpfp"), ("hooks", "dpfp")], limits)
    how = f"MiniLM, {where.rows}, B = 32; Opacus as its tutorials show it, one padded batch"
    return [
        ratio_bar(
            f"DP-FP / plain Opacus {kind}", goal, ratio_of(seconds[kind], seconds["dpfp"]), how
        )
        for kind, goal in (("hooks", "≥ 6"), ("ghost", "≥ 2"))
    ]


def dpsgd(where: Where) -> list[Bar]:
    names = ("non_private", "dpsgd", "dpsgd:bias", "dpsgd:top:2")
    turns = {name: Ours(name, where, DPSGD_ROWS, 4000) for name in names}
    pairs = [("non_private", "dpsgd"), ("dpsgd", "dpsgd:bias"), ("dpsgd", "dpsgd:top:2")]
    limits = Limits(rounds=2, seconds=40) if where.quick else Limits(rounds=30, seconds=180)
    seconds = race(turns, pairs, limits)
    found = [ratio_of(seconds[one], seconds[other]) for one, other in pairs]
    how = f"MiniLM, {where.rows}, B = {DPSGD_ROWS}"
    published = ratio_of([x / FASTDP_SPEED for x in seconds["non_private"]], seconds["dpsgd"])
    once = f"{how}; frozen layers' outputs made once, {turns['dpsgd:top:2'].once:.0f} s"
    return [
        ratio_bar("DP-SGD ghost / non-private, scope all", "≥ 0.8", found[0], how),
        ratio_bar("DP-SGD scope bias / scope all", "≥ 1.3", found[1], how),
        ratio_bar("DP-SGD scope top:2 / scope all", "≥ 2.5", found[2], once),
        ratio_bar(
            "DP-SGD ghost / fastDP's published speed",
            "≥ 1",
            published,
            f"{how}; fastDP is on no index, so the first bar over {FASTDP_SPEED}, what Bu et al. "
            "2023 publish for GPT-2 on a GPU: another model on another machine",
        ),
    ]


def shares(where: Where) -> list[Bar]:
    """What of a step is outside `backward` of the method and `step` of the optimizer."""
    limits = Limits(6, 15) if where.quick else Limits(40, 40, least=40)
    turns = {name: Split(name, where) for name in ("non_private", "dpfp")}
    race(turns, [], limits)  # as many rounds as there may be
    bars = []
    for name, split in turns.items():
        ratio = ratio_of(split.outside[1:], split.whole[1:])
        slowest = sorted(split.parts.items(), key=lambda item: -item[1])[:3]
        total = sum(split.whole)
        told = ", ".join(f"{part} {seconds / total:.1%}" for part, seconds in slowest)
        how = f"{name}, MiniLM, {where.rows}, B = 32; the largest: {told}"
        known = f"{ratio.rounds} rounds, 95% interval {ratio.low:.2%} to {ratio.high:.2%}"
        title = f"share of a step outside forward, backward, optimizer: {name}"
        outcome = verdict("≤ 2%", ratio.low, ratio.high)
        bars.append(Bar(title, "≤ 2%", f"**{ratio.value:.2%}**", outcome, f"{how}; {known}"))
    return bars


class Split(Ours):
    """A contestant whose steps are timed in parts."""

    def __init__(self, name: str, where: Where) -> None:
        super().__init__(name, where, 32)
        self.inside, self.parts = 0.0, {}  # type: float, dict[str, float]
        self.whole: list[float] = []
        self.outside: list[float] = []
        self._count(self.method, "backward", inside=True)
        self._count(self.optimizer, "step", inside=True)
        self._count(self.optimizer, "zero_grad", inside=True)
        self._count(self.method, "begin")
        self._count(self.method, "finish")
        self._count(self.steps.sampler, "draw")

    def _count(self, owner: Any, name: str, inside: bool = False) -> None:
        plain = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return plain(*arguments, **more)
            finally:
                spent = time.perf_counter() - started
                if inside:
                    self.inside += spent
                else:
                    self.parts[name] = self.parts.get(name, 0.0) + spent

        setattr(owner, name, counted)

    def __call__(self, number: int) -> float:
        plain = step.take
        self._count(step, "take")  # makes batches
        self.inside, started = 0.0, time.perf_counter()
        super().__call__(number)
        step.take = plain
        self.whole.append(time.perf_counter() - started)
        self.outside.append(self.whole[-1] - self.inside)
        return self.whole[-1]


def trainer(where: Where) -> list[Bar]:
    """Our loop against `transformers.Trainer`, on the same rows, epoch by epoch."""
    names = ("its defaults", "its best settings")
    goals = ("≥ 2.0", "≥ 1.1")
    try:
        import accelerate  # noqa: F401  (the Trainer needs it)
    except ImportError:
        reason = "transformers.Trainer needs accelerate, which is not installed"
        titles = [f"our non-private loop / transformers.Trainer, {name}" for name in names]
        return [missing_bar(title, goal, reason) for title, goal in zip(titles, goals, strict=True)]
    from speed.rivals import Epoch, Trainer

    bars = []
    for name, goal, steps in zip(names, goals, (4, 25), strict=True):
        best = name == names[1]
        limits = Limits(rounds=2, seconds=30) if where.quick else Limits(rounds=20, seconds=100)
        theirs = Trainer(where, steps, best)
        seconds = race(
            {"ours": Epoch(where, steps), "theirs": theirs}, [("theirs", "ours")], limits
        )
        ratio = ratio_of(seconds["theirs"], seconds["ours"])
        how = f"MiniLM, {where.rows}, B = 32, epochs of {steps} steps; theirs: {theirs.how}"
        bars.append(
            ratio_bar(f"our non-private loop / transformers.Trainer, {name}", goal, ratio, how)
        )
    return bars
