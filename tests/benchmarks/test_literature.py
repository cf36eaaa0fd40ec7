"""Every row of docs/literature.md is computed once more, and its commands print what it says."""

import importlib
import itertools
import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.privacy.accounting import gdp_delta

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/literature.md"


@pytest.fixture(scope="module")
def module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks/literature"))
        yield importlib.import_module


@pytest.fixture(scope="module")
def found(module: Any) -> Any:
    accounts = module("accounts")
    return accounts.accounts(accounts.read_results())


def test_the_page_is_what_the_script_writes(module: Any, found: Any) -> None:
    write_table = module("write_table")
    page = PAGE.read_text(encoding="utf-8")
    made = write_table.blocks(module("accounts").read_results(), found)
    assert len(write_table.BLOCK.findall(page)) == len(made)
    assert write_table.filled(page, made) == page


def test_the_largest_ratio_comes_first(found: Any) -> None:
    ratios = [round(one.ratio, 3) for one in found]
    assert ratios == sorted(ratios, reverse=True)


def test_the_commands_of_a_result_print_the_same_noise(
    found: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for one in found:
        times = one.result.noise.get("times", 1)
        *stated, supported = one.commands()
        for command, sigma in [(line, one.sigma / times) for line in stated] + [
            (supported, one.sigma)
        ]:
            assert f"\n{command}\n" in page
            assert main(shlex.split(command)[1:]) == 0
            assert json.loads(capsys.readouterr().out)["sigma"] == pytest.approx(sigma, rel=2e-3)


def test_without_amplification_delta_is_that_of_gaussian_releases(found: Any) -> None:
    """δ(ε) of a Gaussian with √E times the mean, integrated on a grid."""
    checked = 0
    for one in found:
        if not one.result.sampled:
            mu = math.sqrt(one.result.visits) / one.sigma
            assert one.result.stated["delta"] == pytest.approx(grid_delta(one.bound, mu), rel=1e-3)
            checked += 1
    assert checked >= 15


def grid_delta(epsilon: float, mu: float) -> float:
    """∫ max(0, N(μ, 1) − e^ε N(0, 1)) by the trapezoid rule; the difference starts at ε/μ + μ/2."""
    step = 1e-4
    points = [epsilon / mu + mu / 2 + step * i for i in range(120_000)]
    excess = [
        (math.exp(-((x - mu) ** 2) / 2) - math.exp(epsilon - x * x / 2)) / math.sqrt(2 * math.pi)
        for x in points
    ]
    return step * (sum(excess) - (excess[0] + excess[-1]) / 2)


def test_a_carried_rest_costs_what_a_walk_through_all_positions_says(module: Any) -> None:
    """The mean of δ over the places of a record: first sum of an epoch, its rest, or between."""
    sigma, eps, first, rest, visits = 0.8, 6.0, 0.02, 0.01, 4
    chances = {"first": first, "rest": rest, "between": 1 - first - rest}
    exact = 0.0
    for places in itertools.product(chances, repeat=visits):
        shared = sum(pair == ("rest", "first") for pair in itertools.pairwise(places))
        chance = math.prod(chances[place] for place in places)
        exact += chance * gdp_delta(eps, math.sqrt(visits + 2 * shared) / sigma)
    bound = module("accounts").carried_delta(eps, visits, sigma, first * rest)
    assert exact <= bound <= 1.001 * exact
    assert bound > gdp_delta(eps, math.sqrt(visits) / sigma)


def test_only_a_code_that_carries_a_rest_is_charged_for_it(found: Any) -> None:
    carrying = [one for one in found if one.result.code.carries_rest]
    assert len(carrying) >= 3
    assert all(one.bound < one.supported < 1.01 * one.bound for one in carrying)
    assert all(one.supported == one.bound for one in found if one not in carrying)


def test_the_grid_knows_a_gaussian() -> None:
    assert grid_delta(1.0, 1.0) == pytest.approx(gdp_delta(1.0, 1.0), rel=1e-5)


def test_settings_give_the_second_epsilon_that_a_paper_prints(found: Any) -> None:
    printed = {
        one.result.name: (one.poisson, one.result.stated["tight"])
        for one in found
        if "tight" in one.result.stated
    }
    assert len(printed) >= 5
    for name, (computed, tight) in printed.items():
        assert computed == pytest.approx(tight, abs=0.02), name


def test_poisson_batches_are_worth_no_more_than_none(found: Any) -> None:
    for one in found:
        assert one.poisson <= one.supported


def test_every_result_has_a_source_and_a_number_or_a_reason(module: Any) -> None:
    results = module("accounts").read_results()
    assert len(results) >= 20
    assert len({result.name for result in results}) == len(results)
    for result in results:
        assert result.sources, result.name
        assert (result.no_bound is None) == bool(result.noise), result.name


def test_every_code_is_pinned_to_a_line_of_a_commit(module: Any) -> None:
    accounts, check_lines = module("accounts"), module("check_lines")
    codes = [result.code for result in accounts.read_results() if result.code]
    for code in codes:
        assert code.sampler in accounts.SAMPLERS
        assert re.fullmatch(r"[0-9a-f]{40}", code.commit)
        for link, word in check_lines.pinned_lines(code):
            assert check_lines.LINK.match(link), link
            assert word


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [(2, "shuffle", "right"), (2, "poisson", "WRONG"), (1, "shuffle", "WRONG")],
)
def test_a_pinned_line_must_have_its_word(
    module: Any, tmp_path: Path, line: int, word: str, expected: str
) -> None:
    clone = tmp_path / "someone/code"
    (clone / "src").mkdir(parents=True)
    (clone / "src/train.py").write_text("import torch\nshuffle = True\n")
    git(clone, "init")
    git(clone, "add", ".")
    git(clone, "commit", "-m", "first")
    commit = git(clone, "rev-parse", "HEAD")
    link = f"https://github.com/someone/code/blob/{commit}/src/train.py#L{line}"
    assert module("check_lines").verdict(link, word, tmp_path) == expected


def test_a_repository_without_a_clone_is_no_failure(module: Any, tmp_path: Path) -> None:
    link = f"https://github.com/someone/code/blob/{'0' * 40}/src/train.py#L1"
    assert module("check_lines").verdict(link, "shuffle", tmp_path) == "no clone"
