"""One run: one method, one budget, one task.

Examples:

  dpfp train --task demo --method dpfp --epsilon 3 --output runs/demo-dpfp
  dpfp train --task sst2 --data-dir glue/SST-2 --method non_private --output runs/sst2
  dpfp train --train-file my.csv --text-column review --label-column stars --output runs/mine

Stop it with Ctrl-C at any time: the same command continues where it was, and ends with the same
weights and the same ε as a run that was never stopped.
"""

import argparse
from typing import Any

from dpfp_ray.cli.options import add_plan_flags, add_seed_flags, plan_from
from dpfp_ray.data.whole_files import to_json
from dpfp_ray.plan.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    add_seed_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--output", metavar="DIR", required=True, help="folder for the result")
    group.add_argument("--overwrite", action="store_true", help="discard what is in DIR")
    group.add_argument("--no-weights", action="store_true", help="do not save the trained weights")
    group.add_argument("--json", action="store_true", help="print the result as one JSON object")


def command(arguments: argparse.Namespace) -> int:
    plan = plan_from(arguments)

    from dpfp_ray.data.terminal import stderr
    from dpfp_ray.privacy.sampling import fresh_seed
    from dpfp_ray.training import run
    from dpfp_ray.training.console import ConsoleReporter, Interrupted
    from dpfp_ray.training.threads import use_threads

    use_threads(arguments.threads)
    folder = run.make_folder(arguments.output)
    prepared = run.prepare(plan)
    if arguments.overwrite:
        run.discard(folder)
    known = run.finished_result(folder, prepared.plan)
    if known is not None:
        stderr.print(
            f"{folder} already holds this plan's result; --overwrite runs it again", markup=False
        )
        show(known, arguments.json)
        return 0

    state = run.load_state(folder, prepared.plan)
    seed, seed_known = arguments.seed, arguments.seed is not None
    if state is not None:
        if seed not in (None, state["seed"]):
            raise UserError(
                f"{folder} holds an unfinished run with another seed; drop --seed to continue it, "
                f"or use --overwrite"
            )
        seed, seed_known = state["seed"], seed_known or state["seed_known"]
        stderr.print(
            f"continuing after step {state['progress']['step']:,} of {prepared.plan.steps:,}"
        )
    elif seed is None:
        seed = fresh_seed()
    reporter = ConsoleReporter(
        prepared.plan, prepared.noise_multiplier, prepared.plan.method, folder, seed, seed_known
    )
    try:
        with reporter:
            record, model = run.run(
                prepared,
                reporter,
                seed=seed,
                state=state,
                seed_known=seed_known,
            )
    except Interrupted:
        stderr.print(
            f"stopped; saved in {folder}. The same command continues the run.", markup=False
        )
        return 130
    run.write_result(folder, record, None if arguments.no_weights else model, prepared.plan)
    show(record, arguments.json)
    return 0


def show(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(to_json(record))
        return
    from dpfp_ray.data.terminal import stdout

    plan, privacy, cost = record["plan"], record["privacy"], record["cost"]
    stdout.print(
        f"\n[bold]{plan['method']} on {plan['task']}[/bold]: "
        f"accuracy {record['metrics']['accuracy']:.4f} ({record['metrics']['rule']})"
    )
    if privacy["epsilon"]:
        shown = ", ".join(
            f"{name} {'—' if value is None else format(float(value), '.3f')}"
            for name, value in privacy["epsilon"].items()
        )
        mark = "nominal ε" if privacy["guarantee"] == "nominal" else "ε"
        stdout.print(f"{mark} (δ = {privacy['delta']:.3g}): {shown};  σ = {privacy['sigma']:.4f}")
    stdout.print(
        f"{cost['examples_per_second']:.0f} examples/s, {cost['train_seconds']:.1f} s of training, "
        f"peak memory {cost['peak_memory_bytes'] / 2**20:,.0f} MiB"
    )
    if "statement" in record:
        from dpfp_ray.privacy.wording import brief

        stdout.print(brief(record["statement"]), markup=False)
