"""One cache for the test session, and no surprises from the machine: network, threads, leftovers.

Tests that use Ray are marked `ray`. They run one after the other in one process, beside the others
(`tests/support/one_ray.py`), and share one Ray where they can.
"""

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# Read by libraries when they are imported, hence before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Ray starts its workers at niceness 15: beside other tests they would starve.
os.environ.setdefault("RAY_worker_niceness", "0")
# Hundreds of worker processes import our modules: let them keep what they have compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts background work with Ctrl-C ignored, and all that tests start would inherit that.
with suppress(ValueError):  # not the main thread
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from tests.support import scratch
from tests.support.browser import Browser, find_chromium
from tests.support.one_ray import OneRay, uses_ray
from tests.support.ray_logs import ray_logs
from tests.support.ray_start import start_here

# Of a process whose tests do without Ray, where no other work would then be preferred to it.
NICENESS = "DPFP_TEST_NICENESS"
# Downloads are checked by hash on every use, so the machine's own copies may serve.
DOWNLOADS = ("demo", "models")


def is_controller(config: pytest.Config) -> bool:
    """Whether this process started the run, and is none of its xdist workers."""
    return not hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if is_controller(config):
        scratch.begin()
        idle = os.getloadavg()[0] < (os.cpu_count() or 1)
        os.environ.setdefault(NICENESS, "5" if idle else "0")


@pytest.hookimpl(trylast=True)  # after the temporary folders' own goodbye
def pytest_unconfigure(config: pytest.Config) -> None:
    if is_controller(config):
        scratch.end()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Markers by what a test asks for."""
    for fixture, marker in (("ray_turn", "ray"), ("browser", "browser")):
        if fixture in getattr(item, "fixturenames", ()):
            item.add_marker(marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that use Ray first, since they take longest."""
    items.sort(key=lambda item: not uses_ray(item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)  # without xdist, tests run in one process anyway
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return OneRay(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests with Ray, which are the longest path, are preferred to those that run beside them."""
    if not is_controller(item.config) and not uses_ray(item.nodeid.partition("::")[0]):
        os.nice(int(os.environ.pop(NICENESS, "0")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A Ray test that fails shows the ends of Ray's own logs."""
    report = yield
    if report.failed and item.get_closest_marker("ray"):
        report.sections += ray_logs(scratch.folder())
    return report


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache, so that no test sees a number that older code has computed."""
    from dpfp_ray.system.cache import cache_dir

    kept, cache = cache_dir(), tmp_path_factory.mktemp("cache")
    for name in DOWNLOADS:
        (kept / name).mkdir(exist_ok=True)
        (cache / name).symlink_to(kept / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFP_CACHE", str(cache))
        yield cache


@pytest.fixture(scope="session", autouse=True)
def session_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test writes to the ledger of whoever runs the tests."""
    ledger = tmp_path_factory.mktemp("ledger") / "ledger"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFP_LEDGER", str(ledger))
        yield ledger


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """No test inherits the threads that a command of another has set: sums depend on them."""
    yield
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that only this test uses."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("DPFP_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny folder of each architecture; tests only read them."""
    from tests.support.tiny_models import ENCODERS, build_tiny

    root = tmp_path_factory.mktemp("zoo")
    for architecture in (*ENCODERS, "gpt2", "t5", "bart"):
        build_tiny(root / architecture, architecture)
    return root


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plan values of a task that trains in a second: a tiny BERT on 120 rows of two classes."""
    from tests.support.tiny_models import build_tiny
    from tests.support.tiny_runs import tiny_split, write_csv

    folder = tmp_path_factory.mktemp("task")
    return {
        "train_file": write_csv(folder / "train.csv", 120),
        "dev_file": write_csv(folder / "dev.csv", 40, seed=2),
        "model": build_tiny(folder / "model", "bert", texts=tiny_split(60).texts),
        "representation": "mean",
        "method": "dpfp",
        "epsilon": 8.0,
        "accountant": "gdp",  # calibrates in no time
        "batch_size": 8,
        "micro_batches": 2,
        "learning_rate": 1e-3,
        "epochs": 2,
    }


@pytest.fixture(scope="session")
def ray_turn() -> None:
    """Asked for by whatever starts or uses Ray: no other test does at the same time."""


@pytest.fixture(scope="session")
def ray_session(ray_turn: None, session_cache: Path) -> Iterator[None]:
    """One Ray for all tests of this session; started by the first that asks for it."""
    from dpfp_ray.sweeps.cluster import settings

    with settings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        import ray

        start_here(num_cpus=3, include_dashboard=False, object_store_memory=150 * 2**20)
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here; Debian: apt-get install chromium")
    with Browser(program) as started:
        yield started


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny BERT's folder."""
    from tests.support.tiny_runs import tiny_world

    with tiny_world(tmp_path_factory.mktemp("world")) as folder:
        yield folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a tiny encoder, by its architecture."""
    from tests.support.tiny_models import build_tiny

    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda name: build_tiny(root / name, name))


@pytest.fixture(scope="module")
def steady_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same, for tests that measure (`steady_world`)."""
    from tests.support.tiny_runs import steady_world

    with steady_world(tmp_path_factory.mktemp("world")) as folder:
        yield folder
