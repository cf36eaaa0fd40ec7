"""What the user can fix, and what the user should know."""

import difflib
from collections.abc import Sequence
from importlib.util import find_spec


class UserError(Exception):
    """Bad input, said in one line that names the value and the fix.

    The command line prints the message and exits with 2; no traceback is shown.
    """

    at_once = False  # leave without Python's own clean-up, which would wait for something dead


class Guess(UserWarning):
    """What was decided for the user, who may want to know; nothing is wrong."""


def unknown(kind: str, value: str, valid: Sequence[str]) -> str:
    longer = [name for name in valid if str(value) and name.startswith(str(value))]
    nearest = longer or difflib.get_close_matches(str(value), valid, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"use one of {', '.join(valid)}"
    return f"unknown {kind} {value!r}; {hint}"


def require(module: str, extra: str, purpose: str) -> None:
    """Refuse what an optional dependency is needed for, with the command that installs it."""
    if find_spec(module) is None:
        raise UserError(f"{purpose} needs packages: pip install 'dpfp-ray[{extra}]'")
