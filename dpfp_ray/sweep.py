"""From a search space to trials on one budget, run on Ray, and a record of every one of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dpfp_ray.errors import UserError
from dpfp_ray.plan import Plan, make_plan
from dpfp_ray.privacy.calibration import noise_multiplier
from dpfp_ray.ray_shared import input_key
from dpfp_ray.results import Store
from dpfp_ray.run import Inputs, load_inputs
from dpfp_ray.sampling import keyed_generator
from dpfp_ray.search_space import SearchSpace
from dpfp_ray.terminal import stderr
from dpfp_ray.trial import Trial
from dpfp_ray.tuning import Search, digest

# Random search must draw the same trials when it is resumed; what it draws is public.
PUBLIC_SEED = 0


class InputsOnce:
    """Loads each distinct task and model once, for binding plans on the driver."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Inputs] = {}

    def __call__(self, plan: Plan) -> Inputs:
        key = input_key(plan)
        if key not in self._known:
            self._known[key] = load_inputs(plan)
        return self._known[key]


def bind_trial(
    values: dict[str, Any],
    inputs_of: Callable[[Plan], Inputs],
    seed_index: int = 0,
    group: str = "",
) -> Trial:
    """A trial that meets its budget, or a UserError that says why it cannot."""
    plan = make_plan(values)
    inputs = inputs_of(plan)
    bound = plan.bind(records=len(inputs.data.train), representation=inputs.representation)
    return Trial(bound, noise_multiplier(bound), seed_index, group)


def plan_trials(space: SearchSpace, storage: str) -> list[Trial]:
    """All trials of a grid or a random search, calibrated; what cannot meet the budget is refused.

    Needs no Ray: a sweep that is finished, or wrong, is told so at once.
    """
    inputs_of = InputsOnce()
    trials: dict[str, Trial] = {}
    store = Store(storage)
    rng = keyed_generator(PUBLIC_SEED, f"search {space.name}", 0)
    for chosen in space.choices(rng):
        values = space.plan_values(chosen)
        try:
            for index in range(space.seeds):
                trial = bind_trial(values, inputs_of, index)
                trials[trial.id] = trial
        except UserError as error:
            stderr.print(f"refused: {shown(chosen)}: {error}", markup=False)
            store.put(refused_record(space.name, values, error))
    if not trials:
        raise UserError("every trial of this space was refused; see the reasons above")
    return list(trials.values())


def make_search(space: SearchSpace) -> Search:
    """TPE by Optuna. B and B/M are sampled and M is derived, so every proposal is a valid plan."""
    from ray.tune.search.optuna import OptunaSearch

    def define(trial: Any) -> dict[str, Any]:
        # Optuna keeps indices and exponents; what the trial needs is the values themselves.
        return {"chosen": {p.name: p.suggest(trial) for p in space.parameters}}

    def make_trial(config: dict[str, Any], shared_inputs: Callable[[Plan], Inputs]) -> Trial:
        return bind_trial(space.plan_values(config["chosen"]), shared_inputs)

    rng = np.random.default_rng(PUBLIC_SEED)
    first = space.plan_values({p.name: p.draw(rng) for p in space.parameters})
    bind_trial(first, InputsOnce())  # a space that cannot meet its budget fails now, not later
    names, modes = zip(*space.metrics, strict=True)
    single = len(names) == 1
    algorithm = OptunaSearch(
        space=define,
        metric=names[0] if single else list(names),
        mode=modes[0] if single else list(modes),
        seed=PUBLIC_SEED,
    )
    key = digest([repr(dataclasses.astuple(space))])
    return Search(algorithm, space.samples, make_trial, space.varied, [make_plan(first)], key)


def make_scheduler(space: SearchSpace) -> Any:
    if space.scheduler == "none":
        return None
    from ray.tune.schedulers import ASHAScheduler

    metric, mode = space.metrics[0]
    epochs = make_plan(space.plan_values({})).epochs
    return ASHAScheduler(
        time_attr="epoch", metric=metric, mode=mode, max_t=int(epochs or 100), grace_period=1
    )


def refused_record(sweep: str, values: dict[str, Any], error: Exception) -> dict[str, Any]:
    identity = f"refused-{digest([sweep, repr(sorted(values.items()))])}"
    trial = {"id": identity, "sweep": sweep, "status": "refused", "error": str(error)}
    return {"plan": values, "plan_hash": "", "finished": False, "trial": trial}


def shown(chosen: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in chosen.items())
