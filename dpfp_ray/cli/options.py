"""What several verbs share: flags, one of them for each field of a plan, and what they print."""

import argparse
from collections.abc import Callable, Mapping, Sequence
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


def adder(group: argparse._ActionsContainer) -> Callable[..., None]:
    """`add("--seeds N", "repetitions", type=int)`: flag and metavar, help, argparse's options. What
    takes no value is a switch."""

    def add(flag: str, text: str, **options: Any) -> None:
        name, _, metavar = flag.partition(" ")
        if metavar:
            options["metavar"] = metavar
        elif name.startswith("-") and not {"action", "choices", "type", "default"} & set(options):
            options["action"] = "store_true"
        group.add_argument(name, help=text, **options)

    return add


def add_plan_flags(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """`--batch-size 32` for the plan's `batch_size`, and so on, grouped as in the plan."""
    text = "YAML file of plan fields, or the result.json of a run; flags win over it"
    parser.add_argument("--plan", metavar="FILE", help=text)
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for name in fields_of(title):
            if name not in skip:
                add_flag(group, name)
                if name == "header":
                    group.add_argument(
                        "--no-header",
                        dest="header",
                        action="store_const",
                        const="none",
                        default=argparse.SUPPRESS,
                        help="the same as --header none: --text-column 1 --label-column 2",
                    )


def fields_of(title: str) -> list[str]:
    """The plan fields of a group."""
    names, (first, last) = list(FIELDS), GROUPS[title]
    return names[names.index(first) : names.index(last) + 1]


def add_flag(group: Any, name: str) -> None:
    spec, kinds = FIELDS[name], kinds_of(TYPES[name])
    flags = [f"--{name.replace('_', '-')}"]
    flags += ["--lr"] if name == "learning_rate" else []
    users = ", ".join(users_of(name))
    help_text = (f"{users}: " if users else "") + spec.metadata["help"]
    default = by_method(name) or spec.default
    if default is not None:
        help_text += f" (default: {default})"
    choices = spec.metadata["choices"]
    # What it takes: its symbol, N or X for a number, else the last word of its name.
    word = "n" if int in kinds else "x" if float in kinds else name.split("_")[-1]
    symbol = next((short for short, long in ALIASES.items() if long == name), word)
    group.add_argument(
        *flags,
        dest=name,
        default=argparse.SUPPRESS,
        metavar="|".join(choices) if choices else symbol.upper(),
        help=help_text.replace("%", "%%"),
    )


def plan_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan fields that the user gave, in a file or as flags."""
    values = read_plan_file(arguments.plan) if getattr(arguments, "plan", None) else {}
    if getattr(arguments, "best", None):
        from dpfp_ray import best_plan

        if values:
            raise UserError("--best and --plan are both given; drop one")
        values = {n: v for n, v in best_plan(arguments.best).to_dict().items() if v is not None}
    for key in values:
        if field_name(key) not in FIELDS:
            raise UserError(unknown("key", str(key), tuple(FIELDS)))
    given = {name: value for name, value in vars(arguments).items() if name in FIELDS}
    return {key: value for key, value in values.items() if field_name(key) not in given} | given


def plan_from(arguments: argparse.Namespace) -> Plan:
    return make_plan(plan_values(arguments))


def add_seed_flags(parser: argparse.ArgumentParser) -> None:
    add = adder(parser.add_argument_group("randomness"))
    known = "fix the secret seed (a known seed makes the noise known: for tests, not for release)"
    add("--seed", known, type=int)
    add("--threads N", "CPU threads (default: all cores)", type=int)


def add_select_flag(parser: Any) -> None:
    """The one rule for which epoch is quoted: the same words for every verb."""
    text = "the epoch that every run quotes, and whose weights train saves (default: last; best "
    text += "on dev flatters)"
    parser.add_argument("--select", choices=["last", "best"], default="last", help=text)


def add_loss_flag(parser: argparse.ArgumentParser) -> None:
    adder(parser)(
        "--show-training-loss",
        "show and keep the training loss of private runs too: it is computed from private records "
        "without noise, and ε does not cover it",
    )


def add_save_flag(group: Any) -> None:
    adder(group)(
        "--save-every SECONDS",
        "how often unfinished work is saved (default: $DPFP_SAVE_SECONDS, else 30; less often "
        "where a save takes long)",
        type=float,
    )


def add_worker_flags(group: argparse._ActionsContainer) -> None:
    """Flags of every verb whose work can be done by Ray workers."""
    add = adder(group)
    add(
        "--address local|auto|ray://HOST:PORT",
        "start Ray here (default), join this machine's cluster (default inside a Ray job), or a "
        "remote one",
        default="",
    )
    add("--workers N", "workers that share the rows of a step", type=positive, default=1)
    add("--cpus-per-worker N", "CPU threads a worker", type=positive)
    add(
        "--gpus-per-worker X",
        "GPUs a worker, also a part of one; 0: the CPU (default: 1 where there are GPUs)",
        type=float,
    )


def add_ray_flags(parser: argparse.ArgumentParser, default_storage: str | None = None) -> None:
    """Flags of every verb that runs trials on Ray."""
    group = parser.add_argument_group("Ray")
    add = adder(group)
    if default_storage:
        add("--storage PATH_OR_URI", f"where results go (default: {default_storage})")
    add_worker_flags(group)
    add(
        "--concurrency N",
        "trials at a time; a cluster that can grow is asked for so many",
        type=positive,
    )
    add("--seed", "fix the secret seed, for tests only", type=int)
    add(
        "--tracker",
        "also show the trials there: MLflow (MLFLOW_TRACKING_URI, or a folder beside the results), "
        "Weights & Biases (WANDB_API_KEY), TensorBoard (a folder beside the results)",
        choices=["mlflow", "wandb", "tensorboard"],
    )
    add_save_flag(group)
    add_loss_flag(parser)


def add_ledger_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every verb that uses private records."""
    group = parser.add_argument_group("ledger")
    add_ledger_flag(group)
    add = adder(group)
    total = "what they may ever pay, set once; what would pass it is refused"
    add("--total-epsilon E", total, type=float)
    add("--total-delta D", "its δ (default: 1e-6)", type=float)


def add_ledger_flag(parser: argparse._ActionsContainer) -> None:
    adder(parser)(
        "--ledger PATH_OR_URI",
        "privacy ledger of the people in the data (default: $DPFP_LEDGER, else the user's data "
        "folder); see dpfp ledger",
    )


LEDGER_CHOICES = ("ledger", "total_epsilon", "total_delta")
WORKER_CHOICES = ("address", "workers", "cpus_per_worker", "gpus_per_worker")
RAY_CHOICES = (
    *WORKER_CHOICES,
    *("concurrency", "seed", "tracker", "show_training_loss", "save_every"),
)


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What the flags of these names say, as keywords of a front function."""
    return {name: getattr(arguments, name) for name in names}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


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
