"""The referee: does a method's training do what its ε counts on?

A grey-box check in the spirit of Cebere et al. 2026 (arXiv 2602.17454). The data are made up so
that a release shows everything: record i is a row with one number that is not zero, at place i, so
the gradient of the head's weights at place i is record i's own. With noise of a thousandth of the
sensitivity, each release then says who was drawn, with how much, and with which noise. The weights
are the same before every step, so that all steps are the same mechanism.

    draws        each record by itself, with the declared chance, anew in each step, from the seed
    sensitivity  the same run (seed, hence draws and noise) with one record replaced by one without
                 a gradient: the releases differ by that record's part alone, by at most C
    noise        normal, independent in all places and steps, of the declared multiple of what was
                 measured as sensitivity, at two multiples
    releases     as many as declared, in their order, whatever the data; each new weight follows
                 from the release (AdamW), so nothing else was seen
    account      what a library's accountant has counted is what was declared

`referee_encoders.py` does the same for the weights of an encoder, `referee_releases.py` for methods
that release once. Tests accept what happens by chance once in 10^7 times. Numbers that make privacy
better than declared are no fault.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from dpfp_ray.data import Table
from dpfp_ray.models.classifier import Classifier, trainable_parameters
from dpfp_ray.models.representations import HeadClassifier, RepresentationTable
from dpfp_ray.plan.method_spec import one_a_step
from dpfp_ray.plan.plan import Plan
from dpfp_ray.plan.values import make_plan, variant
from dpfp_ray.system.errors import UserError
from dpfp_ray.training.loop import make_steps
from dpfp_ray.training.machine import SoloComm

CHANCE = 1e-7  # of a test to accuse a method that does as declared
DEVIATIONS = 5.5  # of a measured ratio, in which chance alone accuses as rarely
LENGTHS = (0.5, 1.0, 4.0, 20.0)  # of the made-up rows
CLIP = 0.05  # below the gradient of every made-up record
SMALL, LARGE = 1e-3, 1.0  # noise multipliers: one that shows who was drawn, one that is usual
# D and B. With the second, one draw in nine is empty, and steps are split for memory.
SIZES = ((64, 16), (12, 2))
STEPS = 240
NEIGHBOUR_STEPS = 60
MOVED_STEPS = 8
SEED, OTHER_SEED = 20_261, 20_262
LAGS = 6

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Finding:
    """One thing that was compared; `fault` says what is wrong, and is empty if nothing is."""

    what: str
    declared: str
    measured: str
    fault: str = ""


@dataclass(frozen=True)
class Seen:
    """The releases of some steps, one row each, and who was drawn.

    A place that nothing was released of is not a number: rows of records that were not drawn, of a
    method that releases rows.
    """

    releases: Floats  # (steps, numbers)
    drawn: Bools  # (steps, records)
    rows: Sequence[int]  # that the method says it drew
    order: Sequence[Any] = ()  # of methods that release rows: whose they are, step by step
    ended: str = ""  # why there are fewer steps than were asked for

    @property
    def steps(self) -> int:
        return len(self.releases)


def check(method: str, **fields: Any) -> list[Finding]:
    """What was compared of a method (or a mode: `dpfp:moments`), and what is wrong with it.

    `fields` are plan fields that change its steps: grad_sample_mode, clip_style, adjacency,
    sampling.
    """
    asked = make_plan({**variant(method), **fields}).private_part  # of a student its teacher's
    if not asked.private:
        raise UserError(f"{asked.method} spends no ε, so there is nothing to check")
    if asked.spec.by_library and asked.spec.by_library.releases is not one_a_step:
        raise UserError(
            f"{asked.method} correlates the noise of its steps on purpose; the referee knows only "
            "methods whose noise is independent"
        )
    if asked.one_release:
        from dpfp_ray.auditing.referee_releases import check_release

        return list(check_release(asked))
    from dpfp_ray.auditing.referee_encoders import check_encoder

    sizes = SIZES if "head" in asked.spec.scopes else ()
    found = [finding for size in sizes for finding in check_steps(asked, *size)]
    scopes = [scope for scope in asked.spec.scopes if scope in ("all", "bias", "lora")]
    for scope in scopes if asked.spec.draws_hidden else ():
        found += check_encoder(asked, scope)
    return found


def faults(findings: Sequence[Finding]) -> list[str]:
    return [f"{finding.what}: {finding.fault}" for finding in findings if finding.fault]


# --- made-up data and runs ----------------------------------------------------------------------


def made_up(records: int) -> RepresentationTable:
    places = np.arange(records)
    h = np.zeros((records, records), np.float32)
    h[places, places] = [LENGTHS[place % len(LENGTHS)] for place in places]
    return RepresentationTable(h, (places // len(LENGTHS)) % 2, "made up")


def with_row(
    table: RepresentationTable, record: int, value: float, label: int
) -> RepresentationTable:
    """`record` replaced by another one, whose only number still stands at its own place."""
    h, labels = table.h.copy(), np.array(table.labels)
    h[record, record], labels[record] = value, label
    return replace(table, h=h, labels=labels, key=f"{table.key} {record} {value!r} {label}")


def small_plan(
    asked: Plan, records: int, batch: int, steps: int = STEPS, scope: str = "head"
) -> Plan:
    """The method's own settings, but for the size of the data and what makes releases readable."""
    fields = {
        "method": asked.method,
        "mode": asked.mode,
        "scope": scope,
        "grad_sample_mode": asked.grad_sample_mode,
        "clip_style": asked.clip_style,
        "adjacency": asked.adjacency,
        "sampling": asked.sampling,
        "epsilon": 1.0,
        "delta": 1e-5,
        "batch_size": batch,
        "epochs": (steps + 0.5) * batch / records,
        "clip": CLIP,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "schedule": "constant",
        "micro_batches": 1,
        "max_physical_batch": 3 if batch == 2 else 256,
        "representation": "mean",
    }
    plan = make_plan({name: value for name, value in fields.items() if value is not None})
    return plan.bind(records=records, classes=2)


class Engine:
    """A method on made-up rows, step by step. `pinned`: every step begins with the same weights."""

    def __init__(
        self,
        plan: Plan,
        table: Table,
        seed: int,
        noise: float,
        pinned: bool = True,
        model: Classifier | None = None,
    ) -> None:
        self.plan, self.pinned = plan, pinned
        self.model = model or HeadClassifier(plan.D, 2, "mean", head_seed=1)
        self.released: list[torch.Tensor] = []
        if not plan.spec.draws_hidden:  # such a method releases the rows that its head reads
            self.model.head.register_forward_pre_hook(
                lambda _, inputs: self.released.append(inputs[0].detach().clone())
            )
        self.steps = make_steps(plan, noise, self.model, table, SoloComm(), seed)
        # After the method has been made: it may freeze some.
        self.trained = [weight for _, weight in trainable_parameters(self.model)]
        self.start = self.weights()
        self.model.train()
        self.number = 0

    def step(self) -> tuple[Floats, int]:
        if self.pinned:
            with torch.no_grad():
                for weight, start in zip(self.trained, self.start, strict=True):
                    weight.copy_(start)
        self.released.clear()
        taken = self.steps.take(self.number)
        self.number += 1
        return self.release(), taken.units

    def release(self) -> Floats:
        if self.plan.spec.draws_hidden:
            gradients = [weight.grad for weight in self.trained]
            if any(gradient is None for gradient in gradients):
                raise UserError("no gradient is left after a step; see docs/new_contestant.md")
            flat = torch.cat([g.detach().flatten() for g in gradients if g is not None])
            return np.asarray(flat.double().numpy())
        rows = torch.cat([*self.released, torch.zeros(0, self.plan.D)])
        return np.asarray(rows.double().numpy())

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.trained]

    def close(self) -> None:
        self.steps.close()


def observe(
    plan: Plan, table: Table, seed: int, noise: float, steps: int, order: Sequence[Any] = ()
) -> Seen:
    """`order`: whose rows are released, where so much noise hides it; as seen with little."""
    engine = Engine(plan, table, seed, noise)
    releases, rows, orders, ended = [], [], [], ""
    try:
        for step in range(steps):
            release, count = engine.step()
            if not plan.spec.draws_hidden:
                orders.append(order[step] if order else np.nan_to_num(np.abs(release)).argmax(1))
                release = at_places(release, orders[-1], plan.D)
            releases.append(release)
            rows.append(count)
    except (UserError, ValueError, RuntimeError, IndexError) as error:
        ended = str(error).split("\n")[0]
    finally:
        engine.close()
    found = np.array(releases).reshape(len(releases), -1) if releases else np.zeros((0, 1))
    return Seen(found, who_was_drawn(plan, found), rows, orders, ended)


def at_places(rows: Floats, records: Any, D: int) -> Floats:
    if len(rows) != len(records):
        raise UserError("how many rows are released depends on the noise")
    placed = np.full((D, D), np.nan)
    placed[records] = rows
    return placed.flatten()


def who_was_drawn(plan: Plan, releases: Floats) -> Bools:
    """With little noise, records whose own places stand out of those of all others."""
    D = plan.D
    if not len(releases):
        return np.zeros((0, D), bool)
    if not plan.spec.draws_hidden:
        return ~np.isnan(releases.reshape(-1, D, D)[:, :, 0])
    own = np.linalg.norm(releases[:, : 2 * D].reshape(-1, 2, D), axis=1)
    quiet = np.quantile(own, 0.25)  # three in four are not drawn
    return np.asarray(own > 20 * quiet + 1e-12)


# --- what is compared ---------------------------------------------------------------------------


def check_steps(asked: Plan, records: int, batch: int) -> Iterator[Finding]:
    plan, table = small_plan(asked, records, batch), made_up(records)
    about = f"D = {records}, B = {batch}"
    quiet, other = (observe(plan, table, seed, SMALL, STEPS) for seed in (SEED, OTHER_SEED))
    usual = observe(plan, table, SEED, LARGE, STEPS, quiet.order)
    other_usual = observe(plan, table, OTHER_SEED, LARGE, STEPS, other.order)
    for seen in (quiet, usual, other, other_usual):
        fault = "" if seen.steps == STEPS else seen.ended or "it ended early"
        yield Finding(f"steps, {about}", f"{plan.steps}", f"{seen.steps}", fault)
        if fault:
            return
    yield from check_draws(about, plan, quiet, other)
    noise = noise_of(quiet, usual)
    size = float(np.concatenate(noise).std()) / (LARGE - SMALL)  # what the noise takes C to be
    yield from check_noise(about, plan, noise, size)
    tolerance = 1e-3 + DEVIATIONS / math.sqrt(2 * sum(map(len, noise)))
    yield small_noise(about, plan, quiet, size, tolerance)
    yield seeds_differ(about, noise, noise_of(other, other_usual))
    size = size or plan.C / plan.B
    yield from check_neighbours(about, plan, table, quiet, size, tolerance)
    yield from check_odd_rows(about, plan, table)
    yield check_moves(about, plan, table)
    yield check_easy_data(about, plan)


def noise_of(quiet: Seen, usual: Seen) -> list[Floats]:
    """What remains of each step's release when what the records add is taken off."""
    both = zip(usual.releases, quiet.releases, strict=True)
    return [(a - b)[~np.isnan(a - b)] for a, b in both]


def judged(what: str, declared: str, measured: str, p: float, fault: str) -> Finding:
    return Finding(what, declared, measured, fault if p < CHANCE else "")


def check_allocation(about: str, plan: Plan, seen: Seen, other: Seen) -> Iterator[Finding]:
    """Each record in exactly one of t steps; which one, is told by no other record or pass."""
    t, D = plan.batches, seen.drawn.shape[1]
    passes = seen.drawn.reshape(-1, t, D)
    often = int((passes.sum(1) != 1).sum())
    said = "records are left out of a pass, or in it twice" if often else ""
    yield Finding(f"once in {t} steps, {about}", "always", f"{often} times not", said)
    sizes = seen.drawn.sum(1)
    said = "draws of records are not independent: a shuffle in equal parts, or pairs"
    yield dispersion(f"sizes of draws, {about}", sizes, D, 1 / t, said)
    again = {
        "again in the next pass": (passes[1:], passes[:-1], "a pass tells of the next one"),
        "under another seed too": (
            *(passes, other.drawn.reshape(-1, t, D)),
            "draws do not follow from the secret seed",
        ),
    }
    for what, (here, there, said) in again.items():
        both, all_ = int((here & there).sum()), len(here) * D
        chance = stats.binomtest(both, all_, 1 / t).pvalue
        yield judged(f"{what}, {about}", f"{1 / t:.4f}", f"{both / all_:.4f}", chance, said)


def check_draws(about: str, plan: Plan, seen: Seen, other: Seen) -> Iterator[Finding]:
    if plan.allocates:
        yield from check_allocation(about, plan, seen, other)
        return
    drawn, p, (T, D) = seen.drawn, plan.p, seen.drawn.shape
    total = int(drawn.sum())
    chance = stats.binomtest(total, T * D, p).pvalue
    yield judged(
        f"rate of draws, {about}",
        f"{p:.4f}",
        f"{total / (T * D):.4f}",
        chance,
        "records are drawn at another rate than ε counts",
    )
    wrong = sum(int(a != b) for a, b in zip(drawn.sum(1), seen.rows, strict=True))
    said = "the method's own count of its rows is another" if wrong > T // 20 else ""
    yield Finding(f"rows drawn, {about}", "as counted", f"{wrong} of {T} steps differ", said)
    sizes = drawn.sum(1)
    empty, chance = int((sizes == 0).sum()), (1 - p) ** D
    yield judged(
        f"empty draws, {about}",
        f"{chance * T:.3g}",
        f"{empty}",
        stats.binomtest(empty, T, chance).pvalue,
        "steps without a record are left out, or made",
    )
    yield dispersion(
        f"sizes of draws, {about}", sizes, D, p, "draws of records are not independent"
    )
    yield dispersion(
        f"draws of each record, {about}",
        drawn.sum(0),
        T,
        p,
        "some records are drawn more often, or all equally often",
    )
    window = max(2, round(1 / p))
    parts = drawn[: T - T % window].reshape(-1, window, D).sum(1).flatten()
    yield dispersion(
        f"draws within {window} steps, {about}",
        parts,
        window,
        p,
        "who was drawn is not drawn again soon: passes, not Poisson samples",
    )
    for lag in range(1, LAGS):
        both = int((drawn[lag:] & drawn[:-lag]).sum())
        chance = stats.binomtest(both, (T - lag) * D, p * p).pvalue
        yield judged(
            f"drawn again {lag} steps later, {about}",
            f"{p * p:.4f}",
            f"{both / ((T - lag) * D):.4f}",
            chance,
            "a step's draw tells of another step's",
        )
    if other.steps == seen.steps:
        both = int((drawn & other.drawn).sum())
        yield judged(
            f"drawn under another seed too, {about}",
            f"{p * p:.4f}",
            f"{both / (T * D):.4f}",
            stats.binomtest(both, T * D, p * p).pvalue,
            "draws do not follow from the secret seed",
        )


def dispersion(what: str, counts: Any, trials: int, p: float, fault: str) -> Finding:
    """Σ(x − np)² of binomial counts, against its mean and its own deviation."""
    variance = trials * p * (1 - p)
    fourth = variance * (1 + 3 * (trials - 2) * p * (1 - p)) if trials > 1 else variance
    spread = math.sqrt(max(fourth - variance**2, 1e-12) / len(counts))
    measured = float(np.mean((np.asarray(counts) - trials * p) ** 2))
    # The sum is skewed to the right: the chance of a chi-square is right there, and safe below.
    freedom = 2 * (variance / spread) ** 2
    scaled = measured / variance * freedom
    chance = 2 * min(stats.chi2.sf(scaled, freedom), stats.chi2.cdf(scaled, freedom))
    return judged(what, f"variance {variance:.3g}", f"{measured:.3g}", chance, fault)


def check_noise(about: str, plan: Plan, noise: Sequence[Floats], size: float) -> Iterator[Finding]:
    everything = np.concatenate(noise)
    if not size > 0 or not math.isfinite(size):
        yield Finding(f"noise, {about}", "normal", f"{size:.3g}", "there is none")
        return
    scaled = everything / everything.std()
    yield judged(
        f"mean of the noise, {about}",
        "0",
        f"{scaled.mean():.3g} deviations",
        float(2 * stats.norm.sf(abs(scaled.mean()) * math.sqrt(len(scaled)))),
        "it is not centred",
    )
    yield judged(
        f"law of the noise, {about}",
        "normal",
        f"kurtosis {float(np.mean(scaled**4)):.3f}",
        float(stats.kstest(scaled, "norm").pvalue),
        "it is not normal",
    )
    steps = np.array([float(np.sum((part / everything.std()) ** 2)) for part in noise])
    freedom = np.array([len(part) for part in noise])
    least = (2 * np.minimum(stats.chi2.cdf(steps, freedom), stats.chi2.sf(steps, freedom)))[
        freedom > 0
    ].min()
    shown = np.sqrt(steps[freedom > 0] / freedom[freedom > 0])
    yield judged(
        f"size of the noise, step by step, {about}",
        "1",
        f"{shown.min():.2f} to {shown.max():.2f}",
        float(least) * len(noise),
        "it differs between steps, as with a realised batch size",
    )
    yield related(f"noise of different steps, {about}", noise, "steps share their noise")
    if plan.spec.draws_hidden:
        places = np.array(noise).T
        deviations = places.std(1) / everything.std()
        freedom_left = places.shape[1] - 1
        chance = stats.chi2.cdf(deviations.min() ** 2 * freedom_left, freedom_left) * len(places)
        yield judged(
            f"size of the noise, place by place, {about}",
            "1",
            f"{deviations.min():.2f} to {deviations.max():.2f}",
            float(chance),
            "some weights get less noise",
        )
        yield related(f"noise of different places, {about}", list(places), "places share noise")


def related(what: str, noise: Sequence[Floats], fault: str) -> Finding:
    """The largest correlation between any two of these, each of as many numbers as they all have;
    short ones are left out."""
    length = max(20, int(np.quantile([len(part) for part in noise], 0.2)))
    kept = np.array([part[:length] for part in noise if len(part) >= length])
    if len(kept) < 2:
        return Finding(what, "0", "too few numbers")
    kept -= kept.mean(1, keepdims=True)
    kept /= np.linalg.norm(kept, axis=1, keepdims=True) + 1e-300
    products = np.abs(kept @ kept.T)
    np.fill_diagonal(products, 0.0)
    most = float(products.max())
    # Fisher: atanh r is about normal, of deviation 1/√(n − 3).
    pairs = len(kept) * (len(kept) - 1) / 2
    chance = 2 * stats.norm.sf(math.atanh(min(most, 1 - 1e-12)) * math.sqrt(length - 3)) * pairs
    return judged(what, "correlation 0", f"at most {most:.2f}", float(chance), fault)


def small_noise(about: str, plan: Plan, quiet: Seen, size: float, tolerance: float) -> Finding:
    """The noise at the small multiple, at places of records that were not drawn."""
    D = plan.D
    if plan.spec.draws_hidden:
        weights = quiet.releases[:, : 2 * D].reshape(-1, 2, D)
        silent = weights[np.broadcast_to(~quiet.drawn[:, None], weights.shape)]
    else:
        rows = quiet.releases.reshape(-1, D, D).copy()
        rows[:, np.arange(D), np.arange(D)] = np.nan  # the record's own number
        silent = rows[~np.isnan(rows)]
    ratio = float(silent.std()) / (SMALL * size) if size and len(silent) else 0.0
    fault = "noise does not follow its declared multiple" if ratio < 1 - tolerance else ""
    what = f"noise at {SMALL:g} against noise at {LARGE:g}, {about}"
    return Finding(what, f"{SMALL / LARGE:g}", f"{ratio * SMALL / LARGE:.3g}", fault)


def seeds_differ(about: str, noise: Sequence[Floats], others: Sequence[Floats]) -> Finding:
    first, second = (np.concatenate(list(parts)) for parts in (noise, others))
    length = min(len(first), len(second))
    if length < 10 or not first.std() or not second.std():
        return Finding(f"noise under another seed, {about}", "correlation 0", "none")
    found = float(np.corrcoef(first[:length], second[:length])[0, 1])
    chance = 2 * stats.norm.sf(math.atanh(min(abs(found), 1 - 1e-12)) * math.sqrt(length - 3))
    what = f"noise under another seed, {about}"
    fault = "noise does not follow from the secret seed"
    return judged(what, "correlation 0", f"{found:.3f}", float(chance), fault)


def check_neighbours(
    about: str,
    plan: Plan,
    table: RepresentationTable,
    quiet: Seen,
    size: float,
    tolerance: float,
) -> Iterator[Finding]:
    """Each of some records replaced by one that adds nothing, under the same randomness. `size` is
    C in a release, as the noise has it: what counts is noise over sensitivity."""
    for record in dict.fromkeys((0, 1, 2, 3, plan.D // 2, plan.D - 1)):
        what = f"record {record} of norm {LENGTHS[record % len(LENGTHS)]:g}, {about}"
        seen = observe(plan, nothing_at(plan, table, record), SEED, SMALL, NEIGHBOUR_STEPS)
        if seen.steps < NEIGHBOUR_STEPS:
            yield Finding(f"releases without {what}", "as many", f"{seen.steps}", seen.ended)
            continue
        before = np.nan_to_num(quiet.releases[:NEIGHBOUR_STEPS])
        difference = (np.nan_to_num(seen.releases) - before) / size
        moved, elsewhere = (
            np.linalg.norm(difference[:, places], axis=1)
            for places in (slice(None), ~own_places(plan, record))
        )
        out = ~quiet.drawn[:NEIGHBOUR_STEPS, record]
        fault = ""
        if not moved.max() <= 1 + tolerance:
            fault = f"the noise is {1 / moved.max():.2g} times what ε counts for this record"
        elif elsewhere.max() > 1e-3:
            fault = "it changes what other records add, or the noise"
        elif out.any() and moved[out].max() > 1e-3:
            fault = "it shows in steps that it was not drawn in"
        measured = f"{moved.max():.3g}; elsewhere {elsewhere.max():.1g}"
        yield Finding(f"sensitivity over noise, {what}", "1; elsewhere 0", measured, fault)


def nothing_at(plan: Plan, table: RepresentationTable, record: int) -> RepresentationTable:
    """A record without a gradient: so certain of its class that its loss is 0 to the last digit.
    Of methods that release rows: one of almost nothing, which little noise still lets through."""
    if not plan.spec.draws_hidden:
        return with_row(table, record, 30 * SMALL * plan.C, int(table.labels[record]))
    weight = HeadClassifier(plan.D, 2, "mean", head_seed=1).head.weight.detach()
    return with_row(table, record, 1e7, int(weight[:, record].argmax()))


def own_places(plan: Plan, record: int) -> Bools:
    """Where a release may tell of `record`: its own weights and the biases, or its own row."""
    D = plan.D
    if not plan.spec.draws_hidden:
        return np.arange(D * D) // D == record
    return np.asarray((np.arange(2 * D + 2) % D == record) | (np.arange(2 * D + 2) >= 2 * D))


def check_odd_rows(about: str, plan: Plan, table: RepresentationTable) -> Iterator[Finding]:
    """Rows without a finite gradient must not show: a release that is undefined names them."""
    for value in (math.nan, math.inf, 1e30):
        seen = observe(plan, with_row(table, 1, value, 0), SEED, SMALL, NEIGHBOUR_STEPS)
        missing = seen.releases.size - int(np.isfinite(seen.releases).sum())
        if not plan.spec.draws_hidden:  # rows that were not drawn
            missing -= int((~seen.drawn).sum()) * plan.D
        what = f"a record with the number {value:g}, {about}"
        if seen.steps < NEIGHBOUR_STEPS:
            yield Finding(what, "as many releases", f"{seen.steps}", seen.ended or "fewer")
            continue
        fault = "releases are undefined, which shows that it is there" if missing > 0 else ""
        yield Finding(what, "finite releases", f"{missing} numbers are not", fault)


def check_moves(about: str, plan: Plan, table: Table, model: Classifier | None = None) -> Finding:
    """AdamW on the releases alone must give the same weights: post-processing, and no more."""
    what = f"weights from releases, {about}"
    if not plan.spec.draws_hidden:
        return Finding(what, "—", "its releases are rows, not gradients")
    engine = Engine(plan, table, SEED, LARGE, pinned=False, model=model)
    twins = [torch.nn.Parameter(weight.clone()) for weight in engine.start]
    rate, decay = plan.learning_rate_at(0), plan.weight_decay or 0.0
    optimizer = torch.optim.AdamW(twins, lr=rate, weight_decay=decay)
    worst = 0.0
    for _ in range(MOVED_STEPS):
        release = torch.from_numpy(engine.step()[0]).float()
        parts = release.split([twin.numel() for twin in twins])
        for twin, part in zip(twins, parts, strict=True):
            twin.grad = part.view_as(twin)
        optimizer.step()
        pairs = zip(twins, engine.weights(), strict=True)
        worst = max(worst, *(float((twin.detach() - w).abs().max()) for twin, w in pairs))
    engine.close()
    fault = "the weights move by more than AdamW makes of the releases" if worst > 1e-4 else ""
    return Finding(what, "as AdamW", f"off by {worst:.1g}", fault)


def check_easy_data(about: str, plan: Plan) -> Finding:
    """Data on which the loss soon is 0: the number of releases must not depend on them."""
    table = made_up(plan.D)
    easy = replace(table, labels=np.zeros(plan.D, np.int64))
    engine, steps, ended = Engine(plan, easy, SEED, SMALL, pinned=False), 0, ""
    try:
        while steps < plan.steps:
            engine.step()
            steps += 1
    except UserError as error:
        ended = str(error)
    engine.close()
    return Finding(f"steps on easy data, {about}", f"{plan.steps}", f"{steps}", ended)
