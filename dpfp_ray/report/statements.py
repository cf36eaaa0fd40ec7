"""What a report takes from a run's privacy statement; records of failed or older runs have none."""

from collections.abc import Mapping

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.results.rows import scalar, section
from dpfp_ray.results.runs import Run


def statement_text(run: Run) -> str | None:
    """The statement as its own module words it; its bare facts if that fails."""
    facts = run.record.get("statement")
    if not isinstance(facts, Mapping):
        return None
    try:
        from dpfp_ray.privacy.statement_text import render

        return render(facts)
    except Exception:  # a statement of another version must not cost the whole report
        return to_json(dict(facts), indent=2)


def unamplified_epsilon(run: Run) -> float | None:
    """ε if nobody counts on the draws being hidden."""
    return _number(run, "amplification", "without_amplification")


def proved_epsilon(run: Run) -> float | None:
    """The smallest ε that is a theorem for this run."""
    return _number(run, "proved", "epsilon")


def tuning_epsilon(run: Run) -> float | None:
    """ε of all trials together, if the best one is released."""
    return _number(run, "tuning", "epsilon")


def _number(run: Run, part: str, name: str) -> float | None:
    found: float | None = scalar(section(run.part("statement"), part).get(name), float)
    return found
