"""A long program in pieces: what was done so far lies in a file, and the next piece goes on.

On a machine that others share, `--minutes 4 --kept FILE`, again and again until the exit code is
not `MORE`, is the same run as one without a pause.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

MORE = 3  # exit code: nothing was wrong, and not all is done
ROOT = Path(__file__).resolve().parent.parent


class Kept:
    """What earlier pieces did; `facts` are the program's own."""

    def __init__(self, path: str | None, **settings: Any) -> None:
        self.path = Path(path) if path else None
        self.began = time.monotonic()
        self.before, self.pieces = 0.0, 0
        self.commits: list[str] = []
        self.facts: dict[str, Any] = {}
        self.settings = settings
        if self.path is not None and self.path.exists():
            found = json.loads(self.path.read_text())
            if found["settings"] != settings:
                raise SystemExit(f"{path} is of another run: {found['settings']}")
            self.before, self.pieces = found["seconds"], found["pieces"]
            self.commits, self.facts = found["commits"], found["facts"]
        self.pieces += 1
        if (now := commit()) not in self.commits:
            self.commits.append(now)

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def write(self, **facts: Any) -> None:
        self.facts = facts
        if self.path is not None:
            content = {
                "settings": self.settings,
                "seconds": self.seconds,
                "pieces": self.pieces,
                "commits": self.commits,
                "facts": facts,
            }
            self.path.write_text(json.dumps(content))

    @property
    def words(self) -> str:
        """For a report: how long, in how many pieces, of which code."""
        pieces = f" in {self.pieces} pieces" if self.pieces > 1 else ""
        return f"{self.seconds / 60:.0f} minutes{pieces}, commit {', '.join(self.commits)}"


def commit() -> str:
    """The commit that is checked out; what of the package differs from it is said."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "dpfp_ray", "benchmarks/*.py", "benchmarks/*/*.py")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
