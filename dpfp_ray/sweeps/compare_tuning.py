"""The runs of a comparison: every cell with each seed, tuned beforehand if asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpfp_ray.data.terminal import stderr
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.method_spec import spec_file
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.sampling import keyed_generator
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.preview import sensitivity_line
from dpfp_ray.sweeps.runner import Runner
from dpfp_ray.sweeps.search_space import DERIVED
from dpfp_ray.sweeps.space_files import has_space, read_search_space, space_path
from dpfp_ray.sweeps.sweep_trials import PUBLIC_SEED, bind_trial
from dpfp_ray.sweeps.trial import Trial
from dpfp_ray.training.prepare import Inputs

Values = dict[str, Any]  # the plan's values for one (method, ε)
# A parameter of a search space that stands for another field.
MEANS = {DERIVED: "micro_batches"}


def bind_cells(cells: list[Values], seeds: int, inputs_of: Callable[[Plan], Inputs]) -> list[Trial]:
    """Every cell `seeds` times; repetition by repetition, so that a stopped comparison is fair."""
    return [
        bind_trial(values, inputs_of, seed_index) for seed_index in range(seeds) for values in cells
    ]


def differing(trials: list[Trial]) -> list[str]:
    """What tells these trials apart, for the live table."""
    configs = [{**trial.plan.to_dict(), "seed_index": trial.seed_index} for trial in trials]
    names = ("method", "mode", "scope", "epsilon", "seed_index")
    return [n for n in names if n == "method" or len({config[n] for config in configs}) > 1]


def tuned_cells(cells: list[Values], runner: Runner, samples: int) -> list[Values]:
    """Each cell with the best of `samples` settings: the same effort for every method.

    The method's paper's own settings are the first candidate, so tuning never loses to them by
    accident of the draw. What the user has fixed stays fixed.
    """
    candidates = [drawn(cell, samples, runner.inputs_of) for cell in cells]
    runner.run(
        [trial for tried in candidates for _, trial in tried],
        varied=["method", "epsilon", "batch_size", "learning_rate"],
    )
    store = Store(runner.storage)

    def score(trial: Trial) -> float:
        record = store.get(trial.id) or {}
        return float(record.get("metrics", {}).get("accuracy", -1.0))

    return [max(tried, key=lambda one: score(one[1]))[0] for tried in candidates]


def drawn(
    cell: Values, samples: int, inputs_of: Callable[[Plan], Inputs]
) -> list[tuple[Values, Trial]]:
    """The cell itself and random variants of it from the search space of its method; valid ones
    only (a batch may be larger than the data), each once."""
    space = replace(read_search_space(space_path(space_name(cell)), {}), fixed=cell)
    free = [p for p in space.parameters if MEANS.get(p.name, p.name) not in cell]
    rng = keyed_generator(PUBLIC_SEED, f"tune {space.name}", 0)
    found: dict[str, tuple[Values, Trial]] = {}
    for attempt in range(20 * samples):
        values = space.plan_values({p.name: p.draw(rng) for p in free if attempt})
        try:
            trial = bind_trial(values, inputs_of, group="tune")
        except UserError:
            if not attempt:
                raise
            continue
        found.setdefault(trial.id, (values, trial))
        if len(found) == samples:
            break
    return list(found.values())


def space_name(cell: Values) -> str:
    """The space of the method's file; one of the scope's own where there is one (`dpsgd_top`)."""
    name = spec_file(str(cell["method"]), cell.get("mode"))
    own = f"{name}_{str(cell.get('scope')).partition(':')[0]}"
    return own if has_space(own) else name


def announce(trials: list[Trial], seeds: int, inputs_of: Callable[[Plan], Inputs]) -> None:
    """Before anything runs: what the planned seeds and dev rows can show."""
    plans = list({trial.plan.hash: trial.plan for trial in trials}.values())
    table = next(iter(inputs_of(plans[0]).data.dev.values()))
    stderr.print(sensitivity_line(plans, seeds, len(table)), markup=False)
