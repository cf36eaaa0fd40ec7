"""The fields of a plan, in the order of the flow, with the help that the command line shows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dpfp_ray.plan.method_spec import DEFAULT_METHOD, FIRST_MODE, METHODS, MODES

CLIPPINGS = ("ghost", "hooks")
CLIP_STYLES = ("abadi", "automatic")
CARRIERS = ("weight", "history")
ACCOUNTANTS = ("gdp", "rdp", "pld")
LORA_RANK, LORA_ALPHA = 8, 16.0  # where Hu et al. 2022 and peft start
# Records of a person where nobody says: a person always fits into one pass, and few have more.
MAX_PER_USER = 64


def option(
    default: Any, help: str, choices: Sequence[str] | None = None, *, decides: str = "training"
) -> Any:
    """A plan field with the help text and choices that the command line shows for it.

    decides   what follows from the field first: the records that are read ("data"), the tokens and
              the model that trials may share ("inputs"), or only how they are trained
    """
    return field(default=default, metadata={"help": help, "choices": choices, "decides": decides})


DATA: Any = {"decides": "data"}
INPUTS: Any = {"decides": "inputs"}


@dataclass(frozen=True, kw_only=True)
class PlanFields:
    """What a user may say; `Plan` fills in the rest."""

    task: str = option("demo", "demo, a GLUE task (sst2, qnli, qqp, mnli, …), or custom", **DATA)
    data_dir: str | None = option(None, "folder of GLUE-layout TSV files; default: the hub", **DATA)
    train_file: str | None = option(
        None,
        "your own CSV, TSV, Parquet or JSONL training file, or a pattern: 'part-*.parquet'",
        **DATA,
    )
    dev_file: str | None = option(None, "your own dev file; default: a tenth is held out", **DATA)
    text_column: str | None = option(None, "column of the text in your own files", **DATA)
    pair_column: str | None = option(None, "column of the second text, for sentence pairs", **DATA)
    label_column: str | None = option(None, "column of the label in your own files", **DATA)
    labels: tuple[str, ...] | None = option(None, "class names in order, comma-separated", **DATA)
    user_column: str | None = option(
        None, "column that says whose a record is; the unit of privacy is then the person", **DATA
    )
    max_per_user: int | None = option(
        None, f"with user_column: at most K records of a person (default: {MAX_PER_USER})", **DATA
    )
    max_train: int | None = option(
        None, "use a fixed subset of N training records, or persons (D = N)", **DATA
    )
    max_dev: int | None = option(None, "use a fixed subset of N dev records", **DATA)
    bad_rows: str = option("error", "what to do with malformed rows", ("error", "skip"), **DATA)
    header: str = option(
        "first_line",
        "none: your own TSV and CSV files have no names in line 1; columns are then 1, 2, …",
        ("first_line", "none"),
        **DATA,
    )

    model: str = option("minilm", "minilm, mpnet, a local folder or a hub id", **INPUTS)
    representation: str = option(
        "auto",
        "the vector of a text: pooler, cls, mean; with scope head also layers (means of all layers "
        "joined), layers:3,4,5,6 (of some), pair (of two texts: u, v, |u-v|, u*v); auto: pair for "
        "pairs on a frozen encoder, else by the encoder, D and the noise",
        **INPUTS,
    )
    centring: str = option(
        "none",
        "scope head: dev takes the mean of the dev texts, which must then be public, off every "
        "representation",
        ("none", "dev"),
        **INPUTS,
    )
    max_length: int = option(128, "tokens of a record; what is longer is truncated", **INPUTS)
    dropout: float = option(
        0.0, "non_private only: its masks depend on how rows are split", **INPUTS
    )

    method: str = option(DEFAULT_METHOD, "how to train", METHODS)
    mode: str = option(FIRST_MODE, "which variant of the method", MODES)
    scope: str = option(
        "auto",
        "what is trained: all weights, or the head and nothing else (head), all biases and "
        "LayerNorms (bias), low-rank changes of attention (lora), the last K layers (top:K, as in "
        "top:2); auto: what the mode needs, else all",
        **INPUTS,
    )
    lora_rank: int | None = option(
        None, f"scope lora: rank of the change (default: {LORA_RANK})", **INPUTS
    )
    lora_alpha: float | None = option(
        None, f"scope lora: the change is scaled by alpha/rank (default: {LORA_ALPHA:g})", **INPUTS
    )
    lora_targets: tuple[str, ...] | None = option(
        None,
        "scope lora: linear layers to change, by the ends of their names; default: attention's "
        "query and value",
        **INPUTS,
    )
    lora_freeze_a: bool | None = option(
        None, "scope lora: yes trains B only, on a fixed random A (default: no)", **INPUTS
    )
    scaling: str = option(
        "auto",
        "how a representation is bounded: clipped to C, or scaled to norm 1",
        ("auto", "clip", "unit"),
    )
    ridge: float | str | None = option(
        None,
        "ridge, in units of the noise's known size; auto chooses it from the release, at no "
        "further cost",
    )
    shrinkage: float | None = option(None, "ridge, in units of the mean variance")
    prior: str = option(
        "none",
        "dev lets the unlabelled dev texts, which must then be public, "
        "say in which directions classes are likely to differ",
        ("none", "dev"),
    )
    clipping: str = option("ghost", "how per-example gradients are clipped", CLIPPINGS)
    clip_style: str = option(
        "abadi",
        "what a row's gradient g is multiplied by: min(1, C/‖g‖), or C/(‖g‖ + 0.01)",
        CLIP_STYLES,
    )
    rank: int = option(1, "rank r of the gradient carriers")
    power_iterations: int = option(1, "power iterations K that find the carriers")
    carriers: str = option("weight", "what the carriers decompose", CARRIERS)
    batch_size: int | None = option(None, "B: expected records (or persons) a step")
    micro_batches: int | None = option(None, "M: independent draws that make up a step")
    clip: float | None = option(None, "C: norm to which each record (or person) is clipped")
    learning_rate: float | None = option(None, "AdamW's peak learning rate")
    schedule: str | None = option(None, "learning rate over time", ("linear", "constant"))
    weight_decay: float | None = option(None, "AdamW's weight decay")
    epochs: float | None = option(None, "E: expected passes over the data")

    epsilon: float | None = option(None, "privacy budget; default 3 for private methods")
    delta: float | None = option(None, "default 1/(2D)")
    label_epsilon: float | None = option(
        None, "share of epsilon spent on randomising labels; default: labels public"
    )
    accountant: str = option("pld", "which accountant the noise is calibrated by", ACCOUNTANTS)
    adjacency: str | None = option(
        None,
        "what neighbouring data sets differ in; default: the method's",
        ("zero_out", "add_remove", "replace_one"),
    )

    precision: str = option("fp32", "bf16 autocasts the encoder", ("fp32", "bf16"), **INPUTS)
    max_physical_batch: int = option(256, "rows in memory at once; does not change the result")
    cache_gb: float = option(
        8.0,
        "scope top:K: disk space for what its frozen layers give, computed once; 0, or too little "
        "of it, computes it at every step; does not change the result",
    )
    records: int | None = option(None, "D; taken from the data, given only for calibrate")
    classes: int | None = option(None, "K; taken from the data, given only for calibrate")
