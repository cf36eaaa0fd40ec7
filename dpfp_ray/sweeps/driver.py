"""The driver of a store: it runs trials on Ray Tune, whatever the cluster's size.

A fixed list of trials (grid, random search, compare) and a searcher's trials (TPE) go through the
same Tuner. Stopped or killed, the same call continues: finished trials are not repeated, running
ones go on from what they saved (`trial.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dpfp_ray.plan.plan import Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.charges import Charges
from dpfp_ray.sweeps.cluster import RayOptions, Resources, connected, plan_resources, settings
from dpfp_ray.sweeps.trial import (
    RETRIES,
    SECRET,
    SweepState,
    Trial,
    input_key,
    mark_interrupted,
    unfinished,
)
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.lease import held_unless
from dpfp_ray.system.signals import Interrupted, ignoring_signals, signal_of, stopped_by_signals
from dpfp_ray.system.storage import open_files
from dpfp_ray.system.terminal import stderr, waiting
from dpfp_ray.training.prepare import Inputs
from dpfp_ray.training.record import Record

if TYPE_CHECKING:
    from dpfp_ray.sweeps.experiment import Shared, Sweep
    from dpfp_ray.sweeps.search import Tpe

T = TypeVar("T")
STOPPING = "stopping; what is finished is kept, what runs goes on from its last save"
ANSWER_SECONDS = 120.0  # a node that does not answer by then is not asked again


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
        self._lease.enter_context(stopped_by_signals(STOPPING))
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
            with ignoring_signals():
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
        self._hold(nothing_to_run=not (audits or unfinished(trials, self.storage)))
        self._recognise_people(trial.plan for trial in trials)
        left = unfinished(trials, self.storage)
        if (left or audits) and not self.sealed:
            whole = self.charges.name_list([*trials, *audits], self.seed)
            left = self.charges.begin([*left, *audits], self.seed, whole)[: len(left)]
        if not left:
            return
        self._connect()
        from ray.tune import TuneConfig

        from dpfp_ray.sweeps.experiment import each_of

        for batch in until_none(lambda: unfinished(left, self.storage)):
            self._share(trial.plan for trial in batch)
            config = TuneConfig(scheduler=scheduler)
            self._fit(config, each_of(batch), len(trials), len(batch), varied)

    def search(
        self, searcher: "Tpe", plans: Iterable[Plan], *, varied: list[str], scheduler: Any = None
    ) -> None:
        """Run what `searcher` proposes; `plans` have all inputs that it may ask for."""
        plans = list(plans)
        self._hold(nothing_to_run=not searcher.left)
        if searcher.left:
            searcher.read()  # another driver may have ended since it was read
        self._recognise_people(plans)
        if not searcher.left:
            return
        if self.options.address.startswith("ray://"):
            raise UserError(
                "method tpe proposes trials as others end, which does not work through Ray Client; "
                "run this on the cluster with --address auto, or use method: random"
            )
        searcher.admit = lambda trial: self.charges.begin([trial], self.seed)[0]
        self._connect()
        self._share(plans)
        from ray.tune import TuneConfig

        def left() -> range:
            searcher.read()
            return range(searcher.left)

        for batch in until_none(left):
            config = TuneConfig(search_alg=searcher, num_samples=len(batch), scheduler=scheduler)
            self._fit(config, None, searcher.space.samples, len(batch), varied)
            if searcher.refused is not None:
                raise searcher.refused

    def _hold(self, nothing_to_run: bool) -> None:
        """Be the only driver of this store; a driver that has nothing to run need not be."""
        if not self._held:
            self._held = not nothing_to_run
            files = open_files(self.storage)
            self._lease.enter_context(held_unless(nothing_to_run, files, "use another --storage"))

    def _recognise_people(self, plans: Iterable[Plan]) -> None:
        """Recognise the people, and end the entries that an earlier driver could not end."""
        if not self.sealed:
            for plan in plans:
                self.charges.people(plan)
            self.charges.settle()

    def _connect(self) -> None:
        if self._sweep is not None:
            return
        with stderr.status("starting Ray …"), waiting("starting Ray"):  # status: on a terminal
            self._stack.enter_context(connected(self.options.address))
        import ray

        from dpfp_ray.sweeps.experiment import Sweep

        self.check_storage()
        options = self.options
        self.resources = plan_resources(
            [node["Resources"] for node in ray.nodes() if node["Alive"]],
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

    def check_storage(self) -> None:
        """A UserError if a machine of the connected cluster does not see the store."""
        import ray

        living = [node for node in ray.nodes() if node["Alive"]]
        if len(living) > 1 or self.options.address.startswith("ray://"):
            self.seed  # noqa: B018  (it is in the store from now on)
            check_seen_everywhere(self.storage, SECRET, living)

    def _share(self, plans: Iterable[Plan]) -> None:
        from dpfp_ray.sweeps.shared import share_inputs

        for plan in plans:
            if input_key(plan) not in self._shared:
                self._shared[input_key(plan)] = share_inputs(plan, self.inputs_of(plan))

    def _fit(
        self,
        tune_config: Any,
        param_space: dict[str, Any] | None,
        total: int,
        left: int,
        varied: list[str],
    ) -> None:
        """One Tune experiment, new each time: what came before is in the records."""
        from dpfp_ray.sweeps.experiment import run_experiment
        from dpfp_ray.sweeps.progress import LiveTable, SealedTable, TrialCounts

        assert self._sweep is not None
        kind = SealedTable if self.sealed else LiveTable
        table = kind(self.name, total, total - left, varied)
        listeners: list[Any] = []
        if not self.sealed:
            before = Store(self.storage).records()
            counts = TrialCounts(self.name, total, before, spent=lambda: self.charges.shown)
            listeners = [counts, *self._trackers]
        tune_config.max_concurrent_trials = self.resources.slots
        # Tune's copies on this machine; Ray Client has them on another.
        forget = self.sealed and not self.options.address.startswith("ray://")
        try:
            run_experiment(
                self._sweep, self._shared, tune_config, param_space, table, listeners, forget=forget
            )
        finally:
            if not self.sealed:
                self.charges.settle()


def until_none(left: Callable[[], Sequence[T]]) -> Iterator[Sequence[T]]:
    """What is left to run, again and again until nothing is: an experiment leaves only those trials
    that Tune ends without need (`has_restarts_left`)."""
    for _ in range(1 + RETRIES):
        batch = left()
        if not batch:
            return
        yield batch
    if batch := left():
        raise UserError(
            f"the processes of {len(batch)} trials died {1 + RETRIES} times before they began (too "
            "little memory? Ray's logs say more); the same command continues"
        )


def check_seen_everywhere(storage: str, marker: str, nodes: list[dict[str, Any]]) -> None:
    """A UserError if a node does not see the file `marker` that the driver has put into the store:
    a folder of one machine would lose trials.

    `nodes` are as `ray.nodes()` tells them. What is behind a URI is the same for all.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    files = open_files(storage)
    if not files.local:
        return
    path = Path(files.name) / marker
    node_of = {}
    for node in nodes:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        look: Any = ray.remote(Path.exists).options(num_cpus=0, scheduling_strategy=here)
        node_of[look.remote(path)] = node
    answers, _ = ray.wait(list(node_of), num_returns=len(node_of), timeout=ANSWER_SECONDS)
    for answer in answers:
        try:
            seen = ray.get(answer)
        except ray.exceptions.RayError:  # that node has left the cluster: no trial will run there
            continue
        if not seen:
            name = node_of[answer].get("NodeManagerHostname") or node_of[answer]["NodeID"]
            raise UserError(
                f"--storage {storage} is not the same folder on {name}; use one that all machines "
                f"share (NFS), or a URI such as s3://bucket/folder"
            )


def close(storage: str) -> list[Record]:
    """Write the table beside the records."""
    store = Store(storage)
    store.export()
    return store.records()


def stopped(storage: str, stop: KeyboardInterrupt) -> Interrupted:
    text = f"stopped; what is finished is in {storage}. The same command continues."
    return Interrupted(text, signal_of(stop))


def refuse_encoder(encoder: Any) -> None:
    if encoder is not None:
        raise UserError(
            f"encoder is a {type(encoder).__name__} in memory, which other machines do not have; "
            f"save it to a folder with save_pretrained and give that as model"
        )
