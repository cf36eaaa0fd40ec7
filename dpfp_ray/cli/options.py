"""What several verbs share: flags, one of them for each field of a plan, and what they print."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpfp_ray.plan.method_spec import users_of
from dpfp_ray.plan.plan import FIELDS, TYPES, Plan, kinds_of
from dpfp_ray.plan.values import ALIASES, by_method, field_name, make_plan, read_plan_file
from dpfp_ray.system.errors import UserError, unknown

if TYPE_CHECKING:
    from dpfp_ray.privacy.ledger_entries import Spent
    from dpfp_ray.sweeps.selection import SelectionCost

GROUPS = {
    "data": ("task", "header"),
    "model": ("model", "dropout"),
    "method": ("method", "epochs"),
    "budget": ("epsilon", "adjacency"),
    "execution": ("precision", "cache_gb"),
}

# The plan fields that most people need; `--help` shows these, `--help-all` shows all.
COMMON_FIELDS = (
    *("task", "train_file", "text_column", "label_column", "user_column", "model"),
    *("method", "mode", "scope", "batch_size", "micro_batches", "clip", "learning_rate", "epochs"),
    *("epsilon", "delta"),
)
# Other flags that few people need.
RARE_FLAGS = ("threads", "save_every", "show_training_loss", "total_delta", "seed")
MANY = 10  # rare flags; where there are fewer, all are shown


def rare_flags(actions: Sequence[argparse.Action]) -> list[argparse.Action]:
    """Those that `--help` leaves to `--help-all`."""
    rare = {*RARE_FLAGS, *FIELDS} - set(COMMON_FIELDS)
    few = [action for action in actions if action.dest in rare]
    return few if len(few) > MANY else []


def add_plan_flags(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """`--batch-size 32` for the plan's `batch_size`, and so on, grouped as in the plan."""
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="YAML file of plan fields, or the result.json of a run; flags win over it",
    )
    names = list(FIELDS)
    for title, (first, last) in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names[names.index(first) : names.index(last) + 1]:
            if name not in skip:
                add_flag(group, name)
            if name == "header" and name not in skip:
                add_no_header(group)


def add_flag(group: Any, name: str) -> None:
    spec = FIELDS[name]
    flags = [f"--{name.replace('_', '-')}"]
    flags += ["--lr"] if name == "learning_rate" else []
    users = ", ".join(users_of(name))
    help_text = (f"{users}: " if users else "") + spec.metadata["help"]
    if known := by_method(name):
        help_text += f" (default: {known})"
    elif spec.default is not None:
        help_text += f" (default: {spec.default})"
    choices = spec.metadata["choices"]
    symbol = next((short for short, long in ALIASES.items() if long == name), None)
    group.add_argument(
        *flags,
        dest=name,
        default=argparse.SUPPRESS,
        metavar="|".join(choices) if choices else (symbol or metavar_of(name)).upper(),
        help=help_text.replace("%", "%%"),
    )


def metavar_of(name: str) -> str:
    """What a field takes: N or X for a number, else the last word of its name."""
    kinds = kinds_of(TYPES[name])
    return "n" if int in kinds else "x" if float in kinds else name.split("_")[-1]


def add_no_header(group: Any) -> None:
    group.add_argument(
        "--no-header",
        dest="header",
        action="store_const",
        const="none",
        default=argparse.SUPPRESS,
        help="the same as --header none: --text-column 1 --label-column 2",
    )


def plan_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan fields that the user gave, in a file or as flags."""
    values = read_plan_file(arguments.plan) if getattr(arguments, "plan", None) else {}
    for key in values:
        if field_name(key) not in FIELDS:
            raise UserError(unknown("key", str(key), tuple(FIELDS)))
    given = {name: value for name, value in vars(arguments).items() if name in FIELDS}
    return {key: value for key, value in values.items() if field_name(key) not in given} | given


def plan_from(arguments: argparse.Namespace) -> Plan:
    return make_plan(plan_values(arguments))


def add_seed_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("randomness")
    group.add_argument(
        "--seed",
        type=int,
        help="fix the secret seed (a known seed makes the noise known: for tests, not for release)",
    )
    group.add_argument(
        "--threads", type=int, default=None, metavar="N", help="CPU threads (default: all cores)"
    )


def add_select_flag(parser: Any) -> None:
    """The one rule for which epoch is quoted: the same words for every verb."""
    parser.add_argument(
        "--select",
        choices=["last", "best"],
        default="last",
        help="the epoch that every run quotes, and whose weights train saves (default: last; best "
        "on dev flatters)",
    )


def add_loss_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--show-training-loss",
        action="store_true",
        help="show and keep the training loss of private runs too: it is computed from private "
        "records without noise, and ε does not cover it",
    )


def add_save_flag(group: Any) -> None:
    group.add_argument(
        "--save-every",
        type=float,
        metavar="SECONDS",
        help="how often unfinished work is saved (default: $DPFP_SAVE_SECONDS, else 30; less often "
        "where a save takes long)",
    )


def add_ray_flags(parser: argparse.ArgumentParser, default_storage: str | None = None) -> None:
    """Flags of every verb that runs trials on Ray."""
    group = parser.add_argument_group("Ray")
    if default_storage:
        group.add_argument(
            "--storage",
            metavar="PATH_OR_URI",
            help=f"where results go (default: {default_storage})",
        )
    group.add_argument(
        "--address",
        metavar="local|auto|ray://HOST:PORT",
        help="start Ray here (default), join this machine's cluster (default inside a Ray job), "
        "or a remote one",
    )
    group.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help="trials at a time; a cluster that can grow is asked for so many",
    )
    group.add_argument("--workers", type=positive, default=1, metavar="N", help="workers a trial")
    group.add_argument("--cpus-per-worker", type=positive, metavar="N", help="CPU threads a worker")
    group.add_argument(
        "--gpus-per-worker",
        type=float,
        default=0.0,
        metavar="X",
        help="GPUs a worker, also fractions (default: 0)",
    )
    group.add_argument("--seed", type=int, help="fix the secret seed, for tests only")
    group.add_argument(
        "--tracker",
        choices=["mlflow", "wandb", "tensorboard"],
        help="also show the trials there: MLflow (MLFLOW_TRACKING_URI, or a folder beside the "
        "results), Weights & Biases (WANDB_API_KEY), TensorBoard (a folder beside the results)",
    )
    add_save_flag(group)
    add_loss_flag(parser)


def add_ledger_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every verb that uses private records."""
    group = parser.add_argument_group("ledger")
    add_ledger_flag(group)
    group.add_argument(
        "--total-epsilon",
        type=float,
        metavar="E",
        help="what they may ever pay, set once; what would pass it is refused",
    )
    group.add_argument("--total-delta", type=float, metavar="D", help="its δ (default: 1e-6)")


def add_ledger_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--ledger",
        metavar="PATH_OR_URI",
        help="privacy ledger of the people in the data (default: $DPFP_LEDGER, else the user's "
        "data folder); see dpfp ledger",
    )


def ledger_choices(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the ledger flags say, as keywords of the front functions."""
    return {name: getattr(arguments, name) for name in ("ledger", "total_epsilon", "total_delta")}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def ray_choices(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the Ray flags say, as keywords of `sweep` and `compare`."""
    names = ("address", "workers", "cpus_per_worker", "gpus_per_worker")
    more = ("concurrency", "seed", "tracker", "show_training_loss", "save_every")
    return {name: getattr(arguments, name) for name in (*names, *more)}


def split_change(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text}: give KEY=VALUE")
    return key.strip(), value.strip()


def show_costs(costs: "Sequence[SelectionCost | Spent]", as_json: bool) -> None:
    """What the whole costs, beyond one trial's ε."""
    from dpfp_ray.system.terminal import stderr, stdout

    for cost in costs:
        for line in cost.lines():
            (stderr if as_json else stdout).print(line, markup=False)


def show_failures(records: Sequence[Mapping[str, Any]]) -> int:
    """The exit code: 1 where trials failed, so that a script does not take a part for the whole."""
    from dpfp_ray.system.terminal import stderr

    failed = sum(record.get("trial", {}).get("status") == "failed" for record in records)
    if failed:
        stderr.print(
            f"{failed} of {len(records)} trials failed, for the reasons above; they stay on record "
            "and are not tried again here: give another folder to run them once more"
        )
    return 1 if failed else 0
