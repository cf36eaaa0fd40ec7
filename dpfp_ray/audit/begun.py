"""What an audit has begun with, and at its end what it found: DIR/audit.json.

It holds the two seeds that repeat the audit to the bit, so it is its owner's only, and a checksum:
a seed of which one digit has changed would be another audit's.
"""

import hashlib
from pathlib import Path
from typing import Any

from dpfp_ray.data.disk import explained
from dpfp_ray.data.whole_files import PRIVATE, read_json, to_json, write_json
from dpfp_ray.plan.errors import UserError

AUDIT = "audit.json"
SCHEMA = 2  # the first with a checksum
SEEDS = ("seed", "membership_seed")
Record = dict[str, Any]


def keep(folder: Path, facts: Record) -> None:
    """Owner-only from the first byte: with the seeds one could take the noise off again."""
    facts = {"schema": SCHEMA, **facts}
    with explained(folder / AUDIT):
        write_json(folder / AUDIT, {**facts, "checksum": checksum(facts)}, PRIVATE)


def read_begun(folder: Path) -> Record:
    """What `keep` has kept; empty if nothing was begun here."""
    if not (folder / AUDIT).exists():
        return {}
    found = read_json(folder / AUDIT)
    if isinstance(found, dict) and all(isinstance(found.get(name), int) for name in SEEDS):
        older = not found.keys() & {"schema", "checksum"}
        if older or found.pop("checksum", None) == checksum(found):
            return found
    raise UserError(
        f"{folder / AUDIT} is damaged; restore it from a backup, or start again with --overwrite "
        f"(the ledger keeps what was spent)"
    )


def checksum(facts: Record) -> str:
    return hashlib.blake2b(to_json(facts).encode(), digest_size=16).hexdigest()
