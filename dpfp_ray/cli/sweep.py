"""Explore B, C, M, the learning rate or any other plan field under one privacy budget.

Examples:

  dpfp sweep search_spaces/demo.yaml --storage runs/demo-sweep
  dpfp sweep search_spaces/dpfp.yaml --set task=sst2 --set data_dir=glue/SST-2 --samples 32
  dpfp sweep search_spaces/figure_clip.yaml --address auto --gpus-per-worker 1

Every trial is calibrated to the same budget before it starts. Ctrl-C, or even a killed machine,
loses nothing: the same command continues.
"""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.sweeps.cost import Cost
    from dpfp_ray.sweeps.runner import RayOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("space", metavar="SPACE.yaml", help="search space; see search_spaces/")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="change a key of the space or fix a plan field; may be repeated",
    )
    parser.add_argument("--samples", metavar="N", help="how many trials (random, tpe)")
    parser.add_argument("--json", action="store_true", help="print the trials as a JSON list")
    parser.add_argument(
        "--selection",
        metavar="KIND[:N]",
        help="what releasing the best trial is charged as: composition (default) counts every "
        "trial; logarithmic:N, geometric:N or poisson:N draw the number of trials at random, N "
        "expected, which costs far less if only the best trial is ever shown (random search only)",
    )
    add_ray_flags(parser, default_storage="runs/NAME of the space")


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
    group.add_argument("--concurrency", type=positive, metavar="N", help="trials at a time")
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


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray.sweeps.spaces import read_search_space

    changes = dict(split_change(text) for text in arguments.changes)
    if arguments.samples is not None:
        changes["samples"] = arguments.samples
    space = read_search_space(arguments.space, changes)

    from dpfp_ray.data.terminal import stderr
    from dpfp_ray.privacy.selection import check_search, parse_selection
    from dpfp_ray.results.store import Store
    from dpfp_ray.sweeps import cost
    from dpfp_ray.sweeps.runner import Runner
    from dpfp_ray.sweeps.state import resolve_storage
    from dpfp_ray.sweeps.sweep import InputsOnce, bind_trial, run_sweep

    storage = resolve_storage(arguments.storage or f"runs/{space.name}")
    inputs_of = InputsOnce()
    costs = None
    if arguments.selection:
        selection = parse_selection(arguments.selection)
        check_search(selection, space.search, space.scheduler)
        if selection.repeats:
            costs = [
                cost.chosen_cost(
                    space, selection, lambda one: bind_trial(space.plan_values(one), inputs_of)
                )
            ]
            samples = cost.draw_count(storage, selection, arguments.seed)
            if samples == 0:
                stderr.print("the draw says no trial at all: nothing is run, nothing is released")
                return 0
            space = dataclasses.replace(space, samples=samples, seeds=1)
    try:
        with Runner(space.name, storage, ray_options(arguments), inputs_of) as runner:
            run_sweep(space, runner)
    except KeyboardInterrupt:
        return interrupted(storage)
    store = Store(storage)
    records = store.records()
    costs = costs or cost.composed_cost(records)
    cost.write_cost(storage, records, costs)
    store.export()
    show(store.records(), space.varied, storage, arguments.json)
    show_costs(costs, arguments.json)
    return 0


def ray_options(arguments: argparse.Namespace) -> "RayOptions":
    from dpfp_ray.sweeps.cluster import default_address
    from dpfp_ray.sweeps.runner import RayOptions, save_seconds

    return RayOptions(
        arguments.address or default_address(),
        arguments.workers,
        arguments.cpus_per_worker,
        arguments.gpus_per_worker,
        arguments.concurrency,
        arguments.seed,
        save_seconds(),
        arguments.tracker,
    )


def interrupted(storage: str) -> int:
    from dpfp_ray.data.terminal import stderr

    stderr.print(
        f"stopped; what is finished is in {storage}. The same command continues.", markup=False
    )
    return 130


def split_change(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text}: give KEY=VALUE")
    return key.strip(), value.strip()


def show_costs(costs: "list[Cost]", as_json: bool) -> None:
    """What choosing among the trials, or showing all of them, costs beyond one trial's ε."""
    from dpfp_ray.data.terminal import stderr, stdout

    for cost in costs:
        (stderr if as_json else stdout).print(cost.sentence(), markup=False)


def show(records: list[dict[str, Any]], varied: list[str], storage: str, as_json: bool) -> None:
    """The sweep's table, best trial first."""
    from dpfp_ray.cli import results
    from dpfp_ray.data.terminal import stderr, stdout
    from dpfp_ray.privacy.wording import brief
    from dpfp_ray.results.query import sort_rows
    from dpfp_ray.results.store import flatten

    rows = sort_rows([flatten(record) for record in records], "accuracy")
    if as_json:
        print(to_json(rows))
    else:
        results.show(rows, [*varied, "status", "accuracy", "epsilon", "sigma", "train_seconds"])
        best = next((r for r in records if rows and r["trial"]["id"] == rows[0].get("id")), {})
        if "statement" in best:
            stdout.print(f"the best trial's {brief(best['statement'])}", markup=False)
        stderr.print(f"records in {storage}; query them with: dpfp results {storage}")
