"""What Ray itself wrote down, for the report of a test that failed."""

from collections.abc import Iterator
from pathlib import Path

TELLING = (
    "head.log",
    "gcs_server.out",
    "raylet.out",
    "raylet.err",
    "dashboard.log",
    "dashboard_agent.log",
    "monitor.log",
)
LINES = 15
SESSIONS = 2  # the newest ones


def ray_logs(folder: Path) -> list[tuple[str, str]]:
    """Titles and last lines of the telling logs of the newest Rays below `folder`."""
    return [(f"Ray: {path}", text) for path in newest(folder) if (text := last_lines(path))]


def newest(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("ray-*/head.log"))[-SESSIONS:]
    sessions = [path for path in folder.rglob("session_2*") if not path.is_symlink()]
    for session in sorted(sessions, key=lambda path: path.name)[-SESSIONS:]:
        yield from (session / "logs" / name for name in TELLING)


def last_lines(path: Path) -> str:
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-LINES:])
