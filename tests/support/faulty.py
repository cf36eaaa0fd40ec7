"""A small honest contestant for a linear head, and copies of it with one fault each.

Each fault is one that has been found in published code, or that a reviewer would not see at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpfp_ray.methods.parts.contestant import Contestant, Drawn
from dpfp_ray.plan import method_spec
from dpfp_ray.plan.method_spec import ByLibrary, MethodSpec

Floats = npt.NDArray[np.float64]


class Honest(Contestant):
    """DP-SGD by hand: `h` are the rows with a 1 behind them, and so the bias is one more weight."""

    def train(self) -> Iterator[Drawn]:
        self.draws, self.noise = (
            np.random.default_rng(self.start.random_seed(name)) for name in ("draws", "noise")
        )
        table: Any = self.table
        h = np.where(np.isfinite(table.h) & (np.abs(table.h) < 1e15), table.h, 0.0)
        self.h = np.hstack([h, np.ones((len(h), 1))]).astype(float)
        self.labels = np.asarray(table.labels)
        weights = list(self.model.head.parameters())
        rate, decay = self.plan.learning_rate_at(0), self.plan.weight_decay or 0.0
        self.optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=decay)
        self.step = 0
        while True:
            yield from self.one_step()

    def one_step(self) -> Iterator[Drawn]:
        drawn = self.draw()
        total = self.total(drawn)
        self.update((total + self.noise_for(total, drawn)) / self.divisor(drawn))
        self.step += 1
        yield Drawn(len(drawn))

    def draw(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.draws.random(len(self.h)) < self.rate())

    def rate(self) -> float:
        return self.plan.p

    def total(self, drawn: npt.NDArray[np.int64]) -> Floats:
        """Σ clipped gradients of the drawn records, (classes, width + 1)."""
        gradients = self.gradients(drawn)
        return np.asarray((gradients * self.factors(gradients)).sum(0))

    def gradients(self, drawn: npt.NDArray[np.int64]) -> Floats:
        h = self.features(drawn)
        head = torch.cat([self.model.head.weight, self.model.head.bias[:, None]], 1)
        scores = h @ head.detach().double().numpy().T
        shares = np.exp(scores - scores.max(1, keepdims=True))
        error = shares / shares.sum(1, keepdims=True) - np.eye(2)[self.labels[drawn]]
        return np.asarray(error[:, :, None] * h[:, None])

    def features(self, drawn: npt.NDArray[np.int64]) -> Floats:
        return np.asarray(self.h[drawn])

    def factors(self, gradients: Floats) -> Floats:
        norms = np.sqrt((gradients**2).sum((1, 2), keepdims=True))
        return np.asarray(self.plan.C / np.maximum(norms, self.plan.C))

    def noise_for(self, total: Floats, drawn: npt.NDArray[np.int64]) -> Floats:
        deviation = self.start.noise_multiplier * self.plan.C
        return np.asarray(deviation * self.noise.standard_normal(total.shape))

    def divisor(self, drawn: npt.NDArray[np.int64]) -> float:
        return self.plan.B

    def update(self, gradient: Floats) -> None:
        both = torch.from_numpy(gradient).float()
        self.model.head.weight.grad = both[:, :-1].contiguous()
        self.model.head.bias.grad = both[:, -1].contiguous()
        self.optimizer.step()


class DoubleRate(Honest):
    def rate(self) -> float:
        return min(1.0, 2 * self.plan.p)


class FixedSize(Honest):
    def draw(self) -> Any:
        return self.draws.choice(len(self.h), self.plan.B, replace=False)


class Passes(Honest):
    """Shuffled passes over the data, accounted for as Poisson samples."""

    left: Any = ()

    def draw(self) -> Any:
        if len(self.left) < self.plan.B:
            self.left = self.draws.permutation(len(self.h))
        drawn, self.left = self.left[: self.plan.B], self.left[self.plan.B :]
        return np.sort(drawn)


class SameDraw(Honest):
    """Its generator is made anew in every step."""

    def draw(self) -> Any:
        self.draws = np.random.default_rng(self.start.random_seed("draws"))
        return super().draw()


class ConstantSeed(Honest):
    def draw(self) -> Any:
        if self.step == 0:
            self.draws = np.random.default_rng(0)
        return super().draw()


class Importance(Honest):
    """Longer rows are drawn more often, at the same rate on average."""

    def draw(self) -> Any:
        sizes = np.linalg.norm(self.h, axis=1) ** 0.3
        chances = np.minimum(1.0, self.plan.p * sizes / sizes.mean())
        return np.flatnonzero(self.draws.random(len(self.h)) < chances)


class FirstAlways(Honest):
    def draw(self) -> Any:
        return np.union1d(super().draw(), [0])


class EmptyAgain(Honest):
    """Empty draws are drawn again, so that no step is without records."""

    def draw(self) -> Any:
        drawn = super().draw()
        return drawn if len(drawn) else self.draw()


class RandomWhenEmpty(Honest):
    """An invented record in steps whose draw is empty (Opacus's `rand_on_empty`)."""

    def total(self, drawn: Any) -> Floats:
        total = super().total(drawn)
        if len(drawn) == 0:
            total[0, 0] += self.plan.C
        return total


class NoClipping(Honest):
    def factors(self, gradients: Floats) -> Floats:
        return np.ones((len(gradients), 1, 1))


class BatchClipping(Honest):
    """The norm of the sum is bounded, not that of each record."""

    def total(self, drawn: Any) -> Floats:
        total = self.gradients(drawn).sum(0)
        size = max(float(np.linalg.norm(total)), 1e-12)
        return np.asarray(total * min(1.0, self.plan.C / size))


class LayerClipping(Honest):
    """Weight and bias are bounded by C each."""

    def total(self, drawn: Any) -> Floats:
        gradients = self.gradients(drawn)
        for part in (slice(0, -1), slice(-1, None)):
            own = gradients[:, :, part]
            norms = np.sqrt((own**2).sum((1, 2), keepdims=True))
            gradients[:, :, part] = own * (self.plan.C / np.maximum(norms, self.plan.C))
        return np.asarray(gradients.sum(0))


class BiasForgotten(Honest):
    """The norm leaves out the bias."""

    def factors(self, gradients: Floats) -> Floats:
        return super().factors(gradients[:, :, :-1])


class ValueClipping(Honest):
    """Each number is bounded by C, not the norm."""

    def total(self, drawn: Any) -> Floats:
        return np.asarray(np.clip(self.gradients(drawn), -self.plan.C, self.plan.C).sum(0))


class MeanCentred(Honest):
    """Rows less the mean of those drawn with them, as in a batch norm."""

    def features(self, drawn: Any) -> Floats:
        h = self.h[drawn].copy()
        if len(drawn):
            h[:, :-1] -= h[:, :-1].mean(0)
        return h


class Standardised(Honest):
    """Rows over the largest norm in the data."""

    def features(self, drawn: Any) -> Floats:
        h = self.h[drawn].copy()
        h[:, :-1] /= np.linalg.norm(self.h[:, :-1], axis=1).max()
        return h


class RealisedSize(Honest):
    def divisor(self, drawn: Any) -> float:
        return max(1, len(drawn))


class NoNoise(Honest):
    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        return np.zeros_like(total)


class HalfNoise(Honest):
    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        return super().noise_for(total, drawn) / 2


class VarianceForDeviation(Honest):
    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        return super().noise_for(total, drawn) * min(1.0, self.start.noise_multiplier)


class SameNoise(Honest):
    """One vector of noise for all steps."""

    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        self.noise = np.random.default_rng(self.start.random_seed("noise"))
        return super().noise_for(total, drawn)


class OneNumber(Honest):
    """One number of noise for all weights."""

    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        return np.full_like(total, super().noise_for(total, drawn)[0, 0])


class QuietBias(Honest):
    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        noise = super().noise_for(total, drawn)
        noise[:, -1] = 0
        return noise


class UniformNoise(Honest):
    """Of the right deviation, and not normal."""

    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        deviation = self.start.noise_multiplier * self.plan.C
        return np.asarray(deviation * np.sqrt(12) * (self.noise.random(total.shape) - 0.5))


class NoiseOfData(Honest):
    """Seeded by the drawn rows: known to whoever knows them."""

    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        seed = abs(hash(total.tobytes()))
        self.noise = np.random.default_rng([seed, self.step])
        return super().noise_for(total, drawn)


class KnownNoise(Honest):
    def noise_for(self, total: Floats, drawn: Any) -> Floats:
        self.noise = np.random.default_rng(self.step)
        return super().noise_for(total, drawn)


class UnseenMove(Honest):
    """The bias is moved once more, by its gradient without noise."""

    def update(self, gradient: Floats) -> None:
        super().update(gradient)
        with torch.no_grad():
            self.model.head.bias -= 0.1 * torch.from_numpy(self.exact_bias()).float()

    def exact_bias(self) -> Floats:
        return np.asarray(self.gradients(np.arange(len(self.h)))[:, :, -1].mean(0))


class RateFromData(Honest):
    """The learning rate falls with the norm of the gradient without noise."""

    def update(self, gradient: Floats) -> None:
        exact = np.linalg.norm(self.gradients(np.arange(len(self.h))).mean(0))
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate_at(0) / (1 + exact)
        super().update(gradient)


class EarlyStop(Honest):
    """It ends when all records are right."""

    def train(self) -> Iterator[Drawn]:
        for drawn in super().train():
            norms = np.abs(self.gradients(np.arange(len(self.h)))[:, :, -1]).max(1)
            if norms.mean() < 0.2:
                return
            yield drawn


class TwoStepsAsOne(Honest):
    def one_step(self) -> Iterator[Drawn]:
        (first,) = super().one_step()
        (second,) = super().one_step()
        yield Drawn(first.rows + second.rows)


class TwoDrawsOneNoise(Honest):
    """Two sums are added up and get the noise of one."""

    def one_step(self) -> Iterator[Drawn]:
        first, second = self.draw(), self.draw()
        total = self.total(first) + self.total(second)
        self.update((total + self.noise_for(total, first)) / self.plan.B)
        yield Drawn(len(first) + len(second))


class OtherLedger(Honest):
    """Its accountant is told of twice the noise."""

    def ledger(self) -> list[tuple[float, float, int]]:
        return [(2 * self.start.noise_multiplier, self.plan.p, max(1, self.step))]


class UndefinedRows(Honest):
    """A row of undefined numbers makes the whole sum undefined."""

    def features(self, drawn: Any) -> Floats:
        table: Any = self.table
        return np.hstack([table.h[drawn], np.ones((len(drawn), 1))]).astype(float)


FAULTY = [
    DoubleRate, FixedSize, Passes, SameDraw, ConstantSeed, Importance, FirstAlways, EmptyAgain,
    RandomWhenEmpty, NoClipping, BatchClipping, LayerClipping, BiasForgotten, ValueClipping,
    MeanCentred, Standardised, RealisedSize, NoNoise, HalfNoise, VarianceForDeviation, SameNoise,
    OneNumber, QuietBias, UniformNoise, NoiseOfData, KnownNoise, UnseenMove, RateFromData,
    EarlyStop, TwoStepsAsOne, TwoDrawsOneNoise, OtherLedger, UndefinedRows,
]  # fmt: skip


def spec_of(contestant: Callable[..., Any]) -> MethodSpec:
    """A method `made_up` by this contestant."""
    known = method_spec.all_specs()["opacus"]
    by = ByLibrary(
        library="opacus",
        make=contestant,
        rate=lambda plan: plan.B / plan.D,
        claim="the honest one does as it says",
    )
    return replace(known, method="made_up", by_library=by, uses=(), scopes=("head",))
