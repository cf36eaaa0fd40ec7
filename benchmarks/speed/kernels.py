"""Bars below a step: FLOP/s, padding, noise, calibration."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from dpfp_ray.data.batches import ROW, arrange
from dpfp_ray.methods.parts.base import Rows
from dpfp_ray.plan.values import make_plan
from dpfp_ray.privacy import calibration, pld
from dpfp_ray.privacy.sampling import add_noise
from dpfp_ray.training.prepare import load_inputs
from dpfp_ray.training.step import take
from speed.bars import Bar, number_bar, ratio_bar
from speed.contestants import Ours, Where
from speed.race import Limits, race, ratio_of

MATMUL = 2048  # rows and columns
IN_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "non-private": ("non_private", {}),
    "DP-FP": ("dpfp", {}),
    "DP-SGD": ("dpsgd", {}),
    "RGP": ("rgp", {}),
    "DP-SGD by hooks": ("dpsgd", {"clipping": "hooks"}),
}
MATMULS = 8  # a turn, as one takes a tenth of a second
TURN_ROWS = 256  # of forward and backward


class ForwardBackward(Ours):
    """Forward and backward of some steps, without optimizer, on the same rows in every round: so
    their useful FLOPs are counted once, and a turn is long enough to be timed well."""

    def __init__(self, where: Where, batch_size: int) -> None:
        super().__init__("non_private", where, batch_size)
        self.batches = [self.draw(number) for number in range(max(1, TURN_ROWS // batch_size))]
        self.flops = sum(self.useful_flops(rows) for rows in self.batches)

    def __call__(self, number: int) -> None:
        for rows in self.batches:
            self.pass_over(rows)

    def useful_flops(self, batches: list[Rows]) -> float:
        with FlopCounterMode(display=False) as counter:
            self.pass_over(batches)
        # Of layers only: attention among packed rows looks at more than it needs.
        counts = counter.get_flop_counts()["Global"]
        layers = sum(done for op, done in counts.items() if "attention" not in str(op))
        rows = [rows.inputs[ROW] for rows in batches]
        useful = sum(int((row >= 0).sum()) for row in rows) / sum(row.numel() for row in rows)
        return layers * useful

    def draw(self, number: int) -> list[Rows]:
        records = self.steps.sampler.draw(number)
        every = np.arange(len(records))
        return [
            take(self.table, records, part, self.method.device, packs=True)
            for part in self.steps.parts(records, None, every, packs=True)
        ]

    def pass_over(self, batches: list[Rows]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for rows in batches:
            self.method.backward(rows)


def flops(where: Where) -> list[Bar]:
    one = torch.randn(MATMUL, MATMUL)
    other, out = torch.randn(MATMUL, MATMUL), torch.empty(MATMUL, MATMUL)

    def matmul(number: int) -> None:
        for _ in range(MATMULS):
            torch.mm(one, other, out=out)

    bars = []
    for batch_size in (32, 256):
        ours = ForwardBackward(where, batch_size)
        limits = Limits(6, 15) if where.quick else Limits(40, 45)
        seconds = race({"ours": ours, "matmul": matmul}, [("matmul", "ours")], limits)
        rate = [ours.flops / spent for spent in seconds["ours"]]
        plain = [MATMULS * 2 * MATMUL**3 / spent for spent in seconds["matmul"]]
        how = (
            f"MiniLM, {where.rows}, B = {batch_size}, padding not counted: "
            f"{np.median(rate) / 1e9:.0f} of {np.median(plain) / 1e9:.0f} GFLOP/s "
            f"(fp32, {MATMUL} × {MATMUL}); where the time goes: {time_by_kind(ours)}"
        )
        bars.append(
            ratio_bar(
                f"FLOP/s of forward + backward / plain matmul, B = {batch_size}",
                "≥ 50%",
                ratio_of(rate, plain),
                how,
            )
        )
    return bars


KINDS = {
    "matmul": ("addmm", "::mm", "bmm"),
    "attention": ("scaled_dot", "flash"),
    "gelu": ("gelu",),
    "LayerNorm": ("layer_norm",),
    "copies and fills": ("copy_", "fill_", "zero_", "clone", "cat", "index", "embedding"),
    "sums and elementwise": ("add", "mul", "sum", "div", "sub"),
}


def time_by_kind(ours: ForwardBackward) -> str:
    """Shares of the time in operators, by torch's profiler."""
    batches = ours.batches[0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours.pass_over(batches)
    found = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profile.key_averages():
        kind = next(
            (kind for kind, names in KINDS.items() if any(name in event.key for name in names)),
            "the rest",
        )
        found[kind] += event.self_cpu_time_total
    total = sum(found.values())
    shares = sorted(((spent / total, kind) for kind, spent in found.items()), reverse=True)
    return ", ".join(f"{kind} {share:.0%}" for share, kind in shares if share >= 0.02)


def padding(where: Where) -> list[Bar]:
    """Pure counting, over 200 draws of B records."""
    values = where.values(32, 10**9)
    del values["max_train"], values["max_dev"]
    lengths = load_inputs(make_plan(values)).data.train.lengths
    at_once = most_rows(where)
    bars = []
    for batch_size in (32, 1024):
        for most, names in at_once.items():
            rng = np.random.default_rng(1)
            draws = [lengths[rng.integers(0, len(lengths), batch_size)] for _ in range(200)]
            packed = sum(packed_sizes(drawn, most) for drawn in draws)
            share = 1 - sum(int(drawn.sum()) for drawn in draws) / packed
            bars.append(
                number_bar(
                    f"tokens that are padding, B = {batch_size:,}, {', '.join(names)}",
                    "≤ 5%",
                    share,
                    f"{share:.1%}",
                    f"{where.rows}, all {len(lengths):,} rows, 200 draws, {most} rows at once",
                )
            )
    return bars


def most_rows(where: Where) -> dict[int, list[str]]:
    """The methods that pack, by how many rows go through the model at once: memory decides."""
    found: dict[int, list[str]] = {}
    for name, (method, more) in IN_STEPS.items():
        ours = Ours(method, where, 32, **more)
        assert ours.steps.packs, f"{name} does not pack"
        found.setdefault(ours.method.max_rows, []).append(name)
    return found


def packed_sizes(lengths: Any, most: int) -> int:
    """Tokens with padding."""
    parts = [lengths[start : start + most] for start in range(0, len(lengths), most)]
    return sum(count * longest for _, _, count, longest in map(arrange, parts))


def noise(where: Where) -> list[Bar]:
    ours = Ours("dpsgd", where, 32)
    ours(0)  # fills gradients and the optimizer's state
    gradients = ours.method.gradients()
    seconds = race(
        {
            "noise": lambda number: add_noise(gradients, 1e-9, 1, number),
            "optimizer": lambda number: ours.optimizer.step() and None,
        },
        [("noise", "optimizer")],
        Limits(20, 10) if where.quick else Limits(100, 30),
    )
    weights = sum(gradient.numel() for gradient in gradients)
    took = {name: f"{np.median(spent) * 1e3:.0f} ms" for name, spent in seconds.items()}
    return [
        ratio_bar(
            f"noise on {weights / 1e6:.1f} million weights / optimizer step",
            "≤ 1",
            ratio_of(seconds["noise"], seconds["optimizer"]),
            f"keyed noise {took['noise']}, fused AdamW {took['optimizer']}",
        )
    ]


# SST-2 at the paper's B = M = 32, three epochs, ε = 3 at δ = 1/(2D).
D, B, M, EPSILON = 67_349, 32, 32, 3.0
P, N, DELTA = B / (M * D), 3 * D // B * M, 1 / (2 * D)
OURS_A_TURN = 15


def calibrations(where: Where) -> list[Bar]:
    rough = EPSILON  # what the accuracy of both is relative to
    interval = 1e-4 * rough

    def ours(number: int) -> float:
        """The mean of some: one alone is too short to be timed well."""
        spent = 0.0
        for _ in range(OURS_A_TURN):
            with empty_cache():
                started = time.perf_counter()
                calibration.smallest_noise(P, N, "add_remove", EPSILON, DELTA, "pld")
                spent += time.perf_counter() - started
        return spent / OURS_A_TURN

    def google(number: int) -> None:
        dp_accounting_sigma(interval)

    def prv(number: int) -> None:
        from opacus.accountants.utils import get_noise_multiplier

        get_noise_multiplier(
            target_epsilon=EPSILON, target_delta=DELTA, sample_rate=P, steps=N, accountant="prv"
        )

    sigma = calibration.smallest_noise(P, N, "add_remove", EPSILON, DELTA, "pld")
    near = pld.epsilon(P, N, sigma, DELTA, scale=EPSILON)
    theirs = dp_accounting_sigma(interval)
    facts = f"B = M = 32, D = {D:,}, ε = 3, no cache: σ {sigma:.4f} (ε {near:.4f})"
    bars = []
    if not where.quick:
        seconds = race({"ours": ours, "prv": prv}, [("prv", "ours")], Limits(8, 200, warm_up=False))
        took = f"{np.median(seconds['ours']):.2f} s and {np.median(seconds['prv']):.0f} s"
        ratio = ratio_of(seconds["prv"], seconds["ours"])
        bars.append(ratio_bar("σ calibration / Opacus PRV", "≥ 100×", ratio, f"{facts}; {took}"))
    limits = Limits(2, 20) if where.quick else Limits(12, 60)
    seconds = race({"ours": ours, "google": google}, [("google", "ours")], limits)
    took = f"{np.median(seconds['ours']):.2f} s and {np.median(seconds['google']):.2f} s"
    bars.append(
        ratio_bar(
            "σ calibration / dp-accounting's PLD at equal accuracy",
            "≥ 1×",
            ratio_of(seconds["google"], seconds["ours"]),
            f"{facts}; theirs {theirs:.4f} on losses rounded to {interval:.0e}; {took}",
        )
    )
    return bars


def dp_accounting_sigma(interval: float) -> float:
    """Their search to the same share of σ."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    def event(sigma: float) -> Any:
        one = dp_accounting.PoissonSampledDpEvent(P, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(one, N)

    return float(
        dp_accounting.calibrate_dp_mechanism(
            lambda: PLDAccountant(value_discretization_interval=interval),
            event,
            EPSILON,
            DELTA,
            dp_accounting.LowerEndpointAndGuess(0.3, 0.5),
            tol=calibration.SIGMA_TOLERANCE * 0.4,
        )
    )


@contextmanager
def empty_cache() -> Iterator[None]:
    """Neither on disk nor in memory is anything known of an earlier calibration."""
    pld.Release.top.cache_clear()
    kept = os.environ.get("DPFP_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DPFP_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("DPFP_CACHE")
            if kept is not None:
                os.environ["DPFP_CACHE"] = kept
