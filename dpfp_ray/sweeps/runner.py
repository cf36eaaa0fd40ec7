"""Running trials on Ray Tune: whatever the cluster's size, whatever gets killed.

A fixed list of trials (grid, random search, compare) and a searcher's trials (TPE) go through the
same Tuner. Interrupted or killed, the same call continues: finished trials are not repeated,
running ones go on from what they saved (`state.py`).
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dpfp_ray.data.lease import held
from dpfp_ray.data.progress import waiting
from dpfp_ray.data.storage import open_files
from dpfp_ray.data.terminal import stderr
from dpfp_ray.plan.errors import UserError
from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.charges import Charges
from dpfp_ray.sweeps.cluster import (
    Resources,
    connected,
    node_resources,
    plan_resources,
    settings,
)
from dpfp_ray.sweeps.ray_options import RayOptions
from dpfp_ray.sweeps.shared_storage import check_seen_everywhere
from dpfp_ray.sweeps.signals import ignoring_ctrl_c, stopped_by_sigterm
from dpfp_ray.sweeps.state import SECRET, SweepState
from dpfp_ray.sweeps.trial import SETTLED, Trial, mark_interrupted
from dpfp_ray.training.prepare import Inputs

if TYPE_CHECKING:
    from dpfp_ray.sweeps.tpe import Tpe
    from dpfp_ray.sweeps.trial_process import Shared, Sweep


class Runner:
    """Runs a sweep's trials. Ray is started, or joined, only when there is something to run.

        with Runner("my-sweep", "/runs/my-sweep", RayOptions(), inputs_of) as runner:
            runner.run(trials, varied=["learning_rate"])

    Leaving it without an error ends the sweep: the secret seed is deleted. All trials are entered
    in `ledger` (default: the user's). A `sealed` sweep shows nothing of its trials, not even how
    many there are: no table, no gauges, no trackers, no entries; its caller has entered the whole.
    """

    def __init__(
        self,
        name: str,
        storage: str,
        options: RayOptions,
        inputs_of: Callable[[Plan], Inputs],
        ledger: Ledger | None = None,
        *,
        sealed: bool = False,
    ) -> None:
        self.name = name
        self.storage = storage
        self.options = options
        self.inputs_of = inputs_of
        self.sealed = sealed
        self.charges = Charges(
            ledger or Ledger(), storage, inputs_of, loss_shown=options.show_training_loss
        )
        self._stack = ExitStack()
        self._lease = ExitStack()  # outlives the other: the seed goes before the store is free
        self._held = False
        self._sweep: Sweep | None = None
        self._shared: Shared = {}
        self._trackers: list[Any] = []
        self.resources: Resources

    def __enter__(self) -> "Runner":
        self._stack.enter_context(settings())
        if self.options.tracker:
            from dpfp_ray.sweeps.trackers import make_tracker

            self._trackers = [make_tracker(self.options.tracker, self.name, self.storage)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lease:
            with ignoring_ctrl_c():
                # Before and after Ray ends: a job that is stopped has seconds until it is killed,
                # and a trial may still write that it runs.
                interrupted = self._sweep is not None and isinstance(error, KeyboardInterrupt)
                if interrupted:
                    mark_interrupted(self.storage)
                self._stack.close()
                if interrupted:
                    mark_interrupted(self.storage)
            if kind is None and (self._sweep is not None or self.charges.begun):
                SweepState(self.storage).forget()

    def _hold(self) -> None:
        """Be the only driver of this store; one that finds nothing to run need not be."""
        if not self._held:
            self._held = True
            self._lease.enter_context(held(open_files(self.storage), "use another --storage"))

    @property
    def seed(self) -> int:
        """The sweep's secret seed; made when it is first asked for."""
        return SweepState(self.storage).seed(self.options.seed)

    def run(
        self,
        trials: list[Trial],
        *,
        varied: list[str],
        scheduler: Any = None,
        audits: Sequence[Trial] = (),
    ) -> None:
        """Run those of `trials` that have no final record yet.

        `audits` are not run here, but belong to the same list: they are entered in the ledger now,
        before anything is known of any result.
        """
        if audits or unfinished(trials, self.storage):
            self._hold()
        self._recognise_people(trial.plan for trial in trials)
        left = unfinished(trials, self.storage)
        if (left or audits) and not self.sealed:
            whole = self.charges.name_list([*trials, *audits], self.seed)
            left = self.charges.begin([*left, *audits], self.seed, whole)[: len(left)]
        if not left:
            return
        self._connect()
        from ray.tune import TuneConfig, grid_search

        self._fit(
            [trial.plan for trial in left],
            TuneConfig(scheduler=scheduler),
            {"trial": grid_search([trial.to_config() for trial in left])},
            total=len(trials),
            done=len(trials) - len(left),
            varied=varied,
        )

    def search(
        self, searcher: "Tpe", plans: Iterable[Plan], *, varied: list[str], scheduler: Any = None
    ) -> None:
        """Run what `searcher` proposes; `plans` have all inputs that it may ask for."""
        plans = list(plans)
        if searcher.left:
            self._hold()
            searcher.read()  # another driver may have ended since it was read
        self._recognise_people(plans)
        left = searcher.left
        if not left:
            return
        if self.options.address.startswith("ray://"):
            raise UserError(
                "method tpe proposes trials as others end, which does not work through Ray Client; "
                "run this on the cluster with --address auto, or use method: random"
            )
        searcher.admit = lambda trial: self.charges.begin([trial], self.seed)[0]
        self._connect()
        from ray.tune import TuneConfig

        samples = searcher.space.samples
        self._fit(
            plans,
            TuneConfig(search_alg=searcher, num_samples=left, scheduler=scheduler),
            None,
            total=samples,
            done=samples - left,
            varied=varied,
        )
        if searcher.refused is not None:
            raise searcher.refused

    def _recognise_people(self, plans: Iterable[Plan]) -> None:
        """Recognise the people, and end what an earlier call could not."""
        if self.sealed:
            return
        for plan in plans:
            self.charges.people(plan)
        self.charges.settle()

    def _connect(self) -> None:
        if self._sweep is not None:
            return
        with stderr.status("starting Ray …"), waiting("starting Ray"):  # status: on a terminal
            self._stack.enter_context(connected(self.options.address))
        self._stack.enter_context(stopped_by_sigterm())
        import ray

        from dpfp_ray.sweeps.trial_process import Sweep

        living = [node for node in ray.nodes() if node["Alive"]]
        if len(living) > 1 or self.options.address.startswith("ray://"):
            self.seed  # noqa: B018  (it is in the store from now on)
            check_seen_everywhere(self.storage, SECRET, living)
        options = self.options
        self.resources = plan_resources(
            node_resources(),
            options.workers,
            options.cpus_per_worker,
            options.gpus_per_worker,
            options.concurrency,
            may_grow=options.address != "local",
        )
        self._sweep = Sweep(
            self.name,
            self.storage,
            self.seed,
            self.resources.cpus_per_worker,
            self.resources.gpus_per_worker,
            self.resources.workers,
            options.save_every_seconds,
            seed_known=options.seed is not None,
            show_training_loss=options.show_training_loss,
            sealed=self.sealed,
        )

    def _fit(
        self,
        plans: Iterable[Plan],
        tune_config: Any,
        param_space: dict[str, Any] | None,
        *,
        total: int,
        done: int,
        varied: list[str],
    ) -> None:
        """One Tune experiment, new each time: what came before is in the records."""
        import ray.tune

        from dpfp_ray.sweeps.last_records import LastRecords, no_room
        from dpfp_ray.sweeps.live import LiveTable, SealedTable
        from dpfp_ray.sweeps.telemetry import TrialCounts
        from dpfp_ray.sweeps.trial_process import RETRIES, run_trial

        sweep = self._sweep
        assert sweep is not None
        self._share(plans)
        alone = sweep.workers == 1
        check_deadlock(tune_config.scheduler, sweep.workers)
        resources = {"CPU": float(sweep.cpus_per_worker), "GPU": sweep.gpus_per_worker}
        trainable = ray.tune.with_resources(
            # Through the object store: Tune writes a trial's config to disk, this it does not.
            ray.tune.with_parameters(run_trial, sweep=sweep, shared=self._shared),
            # Ray Train reserves what workers need; the trial itself must ask for something, too.
            resources if alone else {"memory": 1.0},
        )
        shown = SealedTable if self.sealed else LiveTable
        table = shown(self.name, total, done, varied)
        callbacks: list[Any] = [LastRecords(self.storage), table]
        if not self.sealed:
            before = Store(self.storage).records()
            counts = TrialCounts(self.name, total, before, spent=lambda: self.charges.shown)
            callbacks += [counts, *self._trackers]
        tune_config.max_concurrent_trials = self.resources.slots
        tune_config.reuse_actors = alone
        tune_config.trial_dirname_creator = short_name
        name = uuid4().hex[:12]
        tuner = ray.tune.Tuner(
            trainable,
            param_space=param_space,
            tune_config=tune_config,
            run_config=ray.tune.RunConfig(
                name=name,
                storage_path=f"{self.storage.rstrip('/')}/tune",
                verbose=0,
                callbacks=callbacks,
                failure_config=ray.tune.FailureConfig(max_failures=RETRIES),
            ),
        )
        try:
            with table:
                ended = tuner.fit()
            for said in filter(None, (no_room(str(error)) for error in ended.errors)):
                raise UserError(said)
        finally:
            if self.sealed and not self.options.address.startswith("ray://"):
                forget_artifacts(name)
            if not self.sealed:
                self.charges.settle()

    def _share(self, plans: Iterable[Plan]) -> None:
        from dpfp_ray.sweeps.shared import input_key, share_inputs

        for plan in plans:
            if input_key(plan) not in self._shared:
                self._shared[input_key(plan)] = share_inputs(plan, self.inputs_of(plan))


def unfinished(trials: list[Trial], storage: str) -> list[Trial]:
    """Those of `trials` that have no final record yet."""
    settled = {
        record["trial"]["id"]
        for record in Store(storage).records()
        if record.get("trial", {}).get("status") in SETTLED
    }
    return [trial for trial in trials if trial.id not in settled]


def check_deadlock(scheduler: Any, workers: int) -> None:
    """A scheduler that stops trials with workers of their own hangs Ray 2.60 without a dashboard:
    the stopped trial's placement group is never freed."""
    from ray._private.worker import get_dashboard_url

    if scheduler is not None and workers > 1 and not get_dashboard_url():
        raise UserError(
            "scheduler asha with several workers needs Ray's dashboard (Ray would hang without "
            "it); install ray[default] or use scheduler: none"
        )


def forget_artifacts(experiment: str) -> None:
    """Delete Tune's copies of an experiment's results from Ray's session on this machine."""
    from ray.train.constants import _get_ray_train_session_dir

    for folder in Path(_get_ray_train_session_dir()).glob(f"*/{experiment}"):
        shutil.rmtree(folder, ignore_errors=True)


def short_name(trial: Any) -> str:
    """Tune's folder for a trial: without a name of ours it makes one of the whole config."""
    return str(trial.trial_id)
