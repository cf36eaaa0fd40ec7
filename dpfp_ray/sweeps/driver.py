"""The driver of a store: it runs trials on Ray Tune, and charges a ledger for each of them.

A fixed list of trials (grid, random search, compare) and a searcher's trials (TPE) go through the
same Tuner. Stopped or killed, the same call continues: finished trials are not repeated, running
ones go on from what they saved (`trial.py`).

A list that is known beforehand (grid, random search, comparison with its audits) is entered in the
ledger as a whole before its first trial starts; what a searcher proposes is entered when it is
proposed. An entry is ended from the trial's record in the store: here, or by the next call if this
one is killed. A scheduler that stops trials early does not undo a list: its mechanisms were fixed,
and its sum counts all that was planned.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from dpfp_ray.plan.plan import DATA_FIELDS, Plan
from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.privacy.ledger_entries import Spent, Use
from dpfp_ray.privacy.sampling import derived_seed
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.cluster import (
    RayOptions,
    Resources,
    connected,
    living_nodes,
    plan_resources,
    results_page,
    settings,
)
from dpfp_ray.sweeps.trial import (
    RETRIES,
    SECRET,
    SETTLED,
    SweepState,
    Trial,
    input_key,
    mark_interrupted,
    unfinished,
)
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.lease import held_unless
from dpfp_ray.system.signals import Interrupted, ignoring_signals, signal_of, stopped_by_signals
from dpfp_ray.system.storage import below, open_files
from dpfp_ray.system.terminal import stderr, waiting
from dpfp_ray.training.charged import enter_past, register, steps_done, use_for
from dpfp_ray.training.prepare import Inputs, Prepared
from dpfp_ray.training.record import entry_of, plan_of, status_of
from dpfp_ray.training.run_folder import data_mark

if TYPE_CHECKING:
    from dpfp_ray.sweeps.experiment import Shared, Sweep
    from dpfp_ray.sweeps.search import OptunaSearch

T = TypeVar("T")
AUDIT = "audit"  # the group of trials that are audits
STOPPING = "stopping; what is finished is kept, what runs goes on from its last save"
ANSWER_SECONDS = 120.0  # a node that does not answer by then is not asked again


class Charges:
    """What the trials of one store cost, in one ledger."""

    def __init__(
        self,
        ledger: Ledger,
        storage: str,
        inputs_of: Callable[[Plan], Inputs],
        loss_shown: bool = False,
    ) -> None:
        self.ledger, self.loss_shown = ledger, loss_shown
        self.storage, self.inputs_of = storage, inputs_of
        self.begun: dict[str, str] = {}  # trial or audit → its entry
        self.shown: Spent | None = None  # of the people who have paid most, for the gauge
        self._people: dict[tuple[object, ...], str] = {}
        self._marks: dict[int, str] = {}

    def people(self, plan: Plan) -> str:
        """The data set of a plan, registered when it is first met."""
        key = data_key(plan)
        if key not in self._people:
            self._people[key] = register(self.ledger, self.inputs_of(plan))
        return self._people[key]

    def begin(
        self, trials: Sequence[Trial], seed: int, fixed_list: str | None = None
    ) -> list[Trial]:
        """Enter `trials`, or none if they would pass the total; each with the name of its entry.

        `seed` is the sweep's. A trial in the group `audit` is an audit of its plan.
        """
        uses = [self._use(trial, seed, fixed_list) for trial in trials]
        # A new driver resumes the entries that an earlier driver left open.
        entries = self.ledger.begin_all(uses, resumed=True)
        self.begun |= {trial.id: entry.id for trial, entry in zip(trials, entries, strict=True)}
        self._look()
        return [replace(trial, entry=self.begun[trial.id]) for trial in trials]

    def name_list(self, trials: Iterable[Trial], seed: int) -> str:
        """The same for the same list of the same sweep, so that a killed one stays one list."""
        text = " ".join([self.ledger.mark(seed), *(trial.id for trial in trials)])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def settle(self) -> None:
        """End the entries of all trials whose last record is in the store.

        Those on our people's records that this ledger does not know are entered, too: without them
        its sum would say less than was done.
        """
        entries = {entry.id: entry for entry in self.ledger.entries()}
        for record in Store(self.storage).records():
            trial = record["trial"]
            if trial.get("status") not in SETTLED or trial["status"] == "refused":
                continue
            # A record speaks for the run that made it, which may be another driver's.
            entry = entries.get(entry_of(record) or self.begun.get(trial["id"], ""))
            if entry is not None:
                done = steps_done(record, entry.use.steps)
                # Another driver may have closed this entry while we continued the trial.
                if entry.done is None or done > entry.done:
                    self.ledger.end(entry.id, done, status_of(record))
            elif people := self._people.get(data_key(plan_of(record))):
                enter_past(self.ledger, record, people, set(entries))
        self._look()

    def spent(self) -> list[Spent]:
        """What each group of people whose records were met here has paid for everything."""
        sums: list[Spent] = []
        for people in self._people.values():
            if all(people not in spent.data_sets for spent in sums):
                sums.append(self.ledger.spent(people))
        return sums

    def _look(self) -> None:
        if self.ledger.total() is not None:  # without one a sum may take seconds; the end has it
            self.shown = max(self.spent(), key=lambda spent: spent.private_epsilon, default=None)

    def _use(self, trial: Trial, seed: int, fixed_list: str | None) -> Use:
        audit = trial.group == AUDIT
        inputs = self.inputs_of(trial.plan)
        if id(inputs) not in self._marks:
            self._marks[id(inputs)] = data_mark(inputs.data, None, seed)
        return use_for(
            Prepared(trial.plan, inputs, trial.noise_multiplier),
            people=self.people(trial.plan),
            run=f"{self.storage} {trial.id} {self.ledger.mark(seed)} {self._marks[id(inputs)]}",
            seed=audit_seeds(trial.id, seed)["seed"] if audit else trial.seed(seed),
            purpose="audit" if audit else "trial",
            fixed_list=fixed_list,
            loss_shown=self.loss_shown and not audit,
        )


def audit_seeds(name: str, sweep_seed: int) -> Mapping[str, int]:
    """Seeds for an audit's noise and for its canaries' coin flips."""
    return {
        "seed": derived_seed(sweep_seed, f"audit {name}"),
        "membership_seed": derived_seed(sweep_seed, f"coins of audit {name}"),
    }


def data_key(plan: Plan) -> tuple[object, ...]:
    values = (getattr(plan, name) for name in DATA_FIELDS)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


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
        self.name, self.storage, self.options = name, storage, options
        self.inputs_of, self.sealed = inputs_of, sealed
        loss_shown = options.show_training_loss
        self.charges = Charges(ledger or Ledger(), storage, inputs_of, loss_shown)
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
            from dpfp_ray.sweeps.progress import make_tracker

            self._trackers = [make_tracker(self.options.tracker, self.name, self.storage)]
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lease:
            with ignoring_signals():
                # Before and after Ray ends: a job that is stopped has seconds until it is killed,
                # and a trial may still write that it runs.
                if kind is None:
                    self._say_page()
                interrupted = self._sweep is not None and isinstance(error, KeyboardInterrupt)
                if interrupted:
                    mark_interrupted(self.storage)
                self._stack.close()
                if interrupted:
                    mark_interrupted(self.storage)
            if kind is None and (self._sweep is not None or self.charges.begun):
                SweepState(self.storage).forget()
        if isinstance(error, KeyboardInterrupt):
            secret = f" Until the selection ends, {self.storage} is secret." if self.sealed else ""
            text = f"stopped; what is finished is in {self.storage}. The same command continues."
            raise Interrupted(text + secret, signal_of(error)) from None

    def _say_page(self) -> None:
        """Where a browser shows this sweep, on a cluster that goes on without us."""
        joined = self.options.address != "local" and not self.sealed
        if joined and (line := results_page(self.name, self.storage)):
            stderr.print(line, markup=False)

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
        from ray.tune import TuneConfig, grid_search

        for batch in until_none(lambda: unfinished(left, self.storage)):
            self._share(trial.plan for trial in batch)
            space = {"trial": grid_search(Uncopied(trial.to_config() for trial in batch))}
            self._fit(TuneConfig(scheduler=scheduler), space, len(trials), len(batch), varied)

    def search(
        self,
        searcher: "OptunaSearch",
        plans: Iterable[Plan],
        *,
        varied: list[str],
        scheduler: Any = None,
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
                "this method proposes trials as others end, which Ray Client does not allow; "
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
        with busy("starting Ray"):
            self._stack.enter_context(connected(self.options.address))

        from dpfp_ray.sweeps.experiment import Sweep

        self.check_storage()
        options = self.options
        self.resources = plan_resources(
            living_nodes(),
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
            options.save_every,
            seed_known=options.seed is not None,
            show_training_loss=options.show_training_loss,
            sealed=self.sealed,
        )
        self._say_page()  # to watch it, and again at the end

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
        space: dict[str, Any] | None,
        total: int,
        left: int,
        varied: list[str],
    ) -> None:
        """One Tune experiment, new each time: what came before is in the records."""
        import ray.tune

        from dpfp_ray.sweeps.experiment import LastRecords, no_room, run_trial
        from dpfp_ray.sweeps.progress import LiveTable, TrialCounts

        sweep, name = self._sweep, uuid4().hex[:12]
        assert sweep is not None
        if not self.sealed:
            sweep = replace(sweep, batch=name, planned=left)
        alone = sweep.workers == 1
        check_deadlock(tune_config.scheduler, sweep.workers)
        resources = {"CPU": float(sweep.cpus_per_worker), "GPU": sweep.gpus_per_worker}
        trainable = ray.tune.with_resources(
            # Through the object store: Tune writes a trial's config to disk, this it does not.
            ray.tune.with_parameters(run_trial, sweep=sweep, shared=self._shared),
            # Ray Train reserves what workers need; the trial itself must ask for something, too.
            resources if alone else {"memory": 1.0},
        )
        tune_config.max_concurrent_trials = self.resources.slots
        tune_config.reuse_actors = alone
        # Without a name of ours Tune makes a folder's name of the whole config.
        tune_config.trial_dirname_creator = lambda trial: str(trial.trial_id)
        callbacks: list[Any] = [LastRecords(self.storage)]
        display: Any = busy("selection in progress")
        if not self.sealed:
            before = Store(self.storage).records()
            counts = TrialCounts(self.name, total, before, spent=lambda: self.charges.shown)
            taken = [
                record["trial"].get("seconds") or 0.0
                for record in before
                if record["trial"].get("status") == "finished"
            ]
            display = LiveTable(self.name, total, total - left, varied, filter(None, taken))
            callbacks += [display, counts, *self._trackers]
        tuner = ray.tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune_config,
            run_config=ray.tune.RunConfig(
                name=name,
                storage_path=below(self.storage, "tune"),
                verbose=0,
                callbacks=callbacks,
                failure_config=ray.tune.FailureConfig(max_failures=RETRIES),
            ),
        )
        try:
            with display:
                ended = tuner.fit()
            for reason in filter(None, (no_room(str(error)) for error in ended.errors)):
                raise UserError(reason)
        finally:
            if not self.sealed:
                self.charges.settle()
            elif not self.options.address.startswith("ray://"):  # Ray Client has them elsewhere
                forget_artifacts(name)


class Uncopied(list[Any]):
    """A list that nobody changes. Tune copies its search space for each trial, with the list of all
    trials in it: of 400 closed-form trials a sixth of the driver's time."""

    def __deepcopy__(self, memo: Any) -> "Uncopied":
        return self


@contextmanager
def busy(label: str) -> Iterator[None]:
    """What is waited for: a spinner on a terminal, else a line a minute."""
    with stderr.status(f"{label} …"), waiting(label):
        yield


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


def check_deadlock(scheduler: Any, workers: int) -> None:
    """A scheduler that stops trials with workers of their own hangs Ray 2.60 without a dashboard:
    the stopped trial's placement group is never freed."""
    from ray._private.worker import get_dashboard_url

    if scheduler is not None and workers > 1 and not get_dashboard_url():
        raise UserError(
            "a scheduler with several workers needs Ray's dashboard (Ray would hang without "
            "it); install ray[default] or use scheduler: none"
        )


def forget_artifacts(experiment: str) -> None:
    """Delete Tune's copies of an experiment's results from Ray's session on this machine."""
    from ray.train.constants import _get_ray_train_session_dir

    for folder in Path(_get_ray_train_session_dir()).glob(f"*/{experiment}"):
        shutil.rmtree(folder, ignore_errors=True)


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


def refuse_encoder(encoder: Any) -> None:
    if encoder is not None:
        raise UserError(
            f"encoder is a {type(encoder).__name__} in memory, which other machines do not have; "
            f"save it to a folder with save_pretrained and give that as model"
        )
