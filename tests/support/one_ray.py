"""How tests are shared out: a file's tests stay together, and all files that use Ray are one group.

A group is one process's work, so one test at a time uses Ray. (xdist's own `loadgroup` marks tests
by an attribute that pytest 9 no longer has: every test would be a group of its own.)
"""

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# Fixtures of tests/conftest.py; whatever starts or uses Ray asks for one of them.
USES_RAY = re.compile(r"\bray_(turn|session)\b")
ROOT = Path(__file__).parents[2]


class OneRay(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if uses_ray(file) else file


@functools.cache
def uses_ray(file: str) -> bool:
    return USES_RAY.search((ROOT / file).read_text(encoding="utf-8")) is not None
