"""One report for all tests that only look at it: figures take time."""

from pathlib import Path

import pytest

from dpfp_ray.reports.page import Report, make_report, write_report
from tests.support import samples

COMMAND = "dpfp report runs/compare --output report"


@pytest.fixture(scope="session")
def report() -> Report:
    return make_report(samples.everything_small(), COMMAND)


@pytest.fixture(scope="session")
def folder(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_report(report, out)
    return out


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on records in which every name is an attack."""
    out = tmp_path_factory.mktemp("hostile")
    write_report(make_report(samples.hostile(), samples.HOSTILE, samples.HOSTILE), out)
    return out
