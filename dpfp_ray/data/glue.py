"""The GLUE tasks: their folders, labels, dev sets, and what their files are known to look like."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Glue:
    """One line of the registry. The label order is the hub's, so that numbers mean the same."""

    folder: str
    labels: tuple[str, ...]
    paired: bool = False
    dev: tuple[str, ...] = ("dev",)
    synonyms: Mapping[str, int] = field(default_factory=dict)
    # Columns of the original file where that has no header.
    headerless: tuple[str, ...] = ()


_YES_NO = {"false": 0, "true": 1}
_COLA = ("source", "label", "star", "sentence")
_ENTAILMENT = ("entailment", "not_entailment")
GLUE = {
    "sst2": Glue("SST-2", ("negative", "positive"), synonyms={"neg": 0, "pos": 1, **_YES_NO}),
    "qnli": Glue("QNLI", _ENTAILMENT, paired=True),
    "qqp": Glue("QQP", ("not_duplicate", "duplicate"), paired=True, synonyms=_YES_NO),
    "mnli": Glue(
        "MNLI",
        ("entailment", "neutral", "contradiction"),
        paired=True,
        dev=("matched", "mismatched"),
    ),
    "cola": Glue("CoLA", ("unacceptable", "acceptable"), synonyms=_YES_NO, headerless=_COLA),
    "mrpc": Glue("MRPC", ("not_equivalent", "equivalent"), paired=True, synonyms=_YES_NO),
    "rte": Glue("RTE", _ENTAILMENT, paired=True),
    "wnli": Glue("WNLI", _ENTAILMENT[::-1], paired=True),
}
