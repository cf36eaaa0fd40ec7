"""What a theorem gives for the code behind a published ε.

A published number usually rests on Poisson sampling: each record is drawn by its own coin in each
step, and the accountant may count on that. Here σ is solved as the source says that it was, and
charged for the sampler that the code has:

    poisson                  privacy loss distributions of the sampled Gaussian: `pld`
    shuffled, blocks, order  no amplification: a record is in at most one noisy sum an epoch, and E
                             Gaussian releases of noise σ are √E/σ-GDP (Dong et al. 2022, corollary
                             2), whatever is in the other batches

One code carries the rest of an epoch, which fills no batch, into the first sum of the next epoch;
there a record can be twice in one sum (`carried_epsilon`).

The second is an upper bound and no more: a shuffle may hide something, but no theorem for shuffled
batches of fixed size is implemented in this package. Neighbours
differ by one record, which one of them has in no sum.
"""

import dataclasses
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from scipy.optimize import brentq

from dpfp_ray import Plan, calibrate
from dpfp_ray.privacy.accounting import Mechanism, epsilon, gdp_delta

RESULTS = Path(__file__).parent / "results.yaml"
SAMPLERS = ("poisson", "shuffled", "blocks", "order")


@dataclass(frozen=True)
class Code:
    """A public repository, and the line that says which batches it takes."""

    repository: str
    commit: str
    line: str
    has: str
    sampler: str
    shows: str
    also: list[dict[str, str]]
    carries_rest: bool = False  # the rest of an epoch is in the next epoch's first sum

    @property
    def link(self) -> str:
        return self.at(self.line)

    def at(self, place: str) -> str:
        """The address of a path, or of a line of it, at the commit."""
        return f"https://github.com/{self.repository}/blob/{self.commit}/{place}"


@dataclass(frozen=True)
class Result:
    """One published ε, and the settings that it was stated for."""

    name: str
    paper: str
    method: str
    model: str
    code: Code | None
    sources: list[str]
    stated: dict[str, float] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)
    no_bound: str | None = None

    @property
    def sampled(self) -> bool:
        return self.code is not None and self.code.sampler == "poisson"

    @property
    def visits(self) -> int:
        """In how many noisy sums one record is at most, if the draws are not random."""
        return self.settings.get("visits", self.settings["epochs"])

    @property
    def claim(self) -> Plan:
        """The plan whose σ is the published one, where an accountant has to find it."""
        return Plan(
            method="dpsgd",
            batch_size=self.settings["batch"],
            epochs=self.settings["epochs"],
            epsilon=self.noise.get("epsilon", self.stated["epsilon"]),
            delta=self.stated["delta"],
            accountant=self.noise["accountant"],
        )


@dataclass(frozen=True)
class Account:
    """σ of a result, its ε under Poisson sampling, and the ε that its sampler has a theorem for."""

    result: Result
    sigma: float
    poisson: float
    bound: float  # without what a carried rest adds
    supported: float

    @property
    def ratio(self) -> float:
        return self.supported / self.result.stated["epsilon"]

    def commands(self) -> list[str]:
        """Two `dpfp calibrate` that give the same σ: as stated, and with the supported ε.

        A stated σ needs only the second one. n Gaussian sums without sampling are n epochs with a
        batch of all records.
        """
        settings, claimed = self.result.settings, self.result.stated
        common = ["dpfp", "calibrate", "--method", "dpsgd", "--records", settings["records"]]
        common += ["--delta", claimed["delta"]]
        sampled = ["--batch-size", settings["batch"], "--epochs", settings["epochs"]]
        whole = ["--batch-size", settings["records"], "--epochs", self.result.visits]
        bound = ["--epsilon", upwards(self.bound), "--json"]
        lines = [[*common, *(sampled if self.result.sampled else whole), *bound]]
        if "accountant" in self.result.noise:
            plan = self.result.claim
            budget = ["--epsilon", plan.epsilon, "--accountant", plan.accountant, "--json"]
            lines.insert(0, [*common, *sampled, *budget])
        return [shlex.join(map(str, words)) for words in lines]


def upwards(value: float) -> float:
    """ε to two digits, rounded upwards."""
    return math.ceil(100 * value) / 100


def carried_delta(eps: float, visits: int, sigma: float, twice: float) -> float:
    """δ(ε) of `visits` passes where two visits in a row share a sum with chance `twice`.

    A shared sum counts 2² = 4 in μ²σ² in place of 1 + 1, so k of them give √(E + 2k)/σ-GDP. Where a
    record stands does not depend on the data, so δ(ε) is a mean over the positions. Given k of the
    E − 1 neighbouring pairs share with a chance of at most twice^k; more than E/2 cannot share,
    because a visit is in one sum.
    """
    return sum(
        math.comb(visits - 1, k) * twice**k * gdp_delta(eps, math.sqrt(visits + 2 * k) / sigma)
        for k in range(visits // 2 + 1)
    )


def carried_epsilon(result: Result, sigma: float) -> float:
    """ε where the rest of an epoch stays in the sum that the next epoch begins with."""
    records, batch = result.settings["records"], result.settings["batch"]
    twice = (records % batch) / records * batch / records
    delta = result.stated["delta"]
    return float(
        brentq(lambda eps: carried_delta(eps, result.visits, sigma, twice) - delta, 0.0, 1e4)
    )


def shown_place(place: str) -> str:
    """`trainer.py:222` of `src/trainer.py#L222`."""
    return place.rpartition("/")[2].replace("#L", ":")


def read_results(path: Path = RESULTS) -> list[Result]:
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    codes = {name: Code(**facts) for name, facts in read["codes"].items()}
    return [Result(**{**facts, "code": codes.get(facts["code"])}) for facts in read["results"]]


def account(result: Result) -> Account:
    """Solve σ as the source did, and charge it for the sampler of the code."""
    settings, delta = result.settings, result.stated["delta"]
    rate = settings["batch"] / settings["records"]
    if "sigma" in result.noise:
        sigma, steps = float(result.noise["sigma"]), round(settings["epochs"] / rate)
    else:
        found = calibrate(result.claim, records=settings["records"])
        sigma, steps = found.noise_multiplier, found.steps
    sigma *= result.noise.get("times", 1)
    drawn = Mechanism(rate, steps, sigma, "add_remove")
    known = dataclasses.replace(drawn, p=1.0, n=result.visits)
    poisson = epsilon(drawn, delta, "pld")
    bound = epsilon(drawn if result.sampled else known, delta, "pld")
    assert poisson is not None
    assert bound is not None
    carried = result.code is not None and result.code.carries_rest
    supported = carried_epsilon(result, sigma) if carried else bound
    return Account(result, sigma, poisson, bound, supported)


def accounts(results: list[Result]) -> list[Account]:
    """Of all results that have a bound, the largest ratio first."""
    bounded = [account(result) for result in results if result.no_bound is None]
    return sorted(bounded, key=lambda one: (-round(one.ratio, 3), one.result.name))
