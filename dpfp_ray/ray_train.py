"""The same loop on several Ray Train workers, for a trial that needs more than one.

Each worker draws the whole step, computes its share of the rows, and the shares are summed (gloo on
CPU, NCCL on GPU); sampled rows and noise do not depend on how many workers there are. Ray Train
restarts a group in which a worker or a node has died, from the last checkpoint.
"""

from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from dpfp_ray.comm import TorchComm
from dpfp_ray.ray_trial import RETRIES, RayReporter, Sweep, load_checkpoint
from dpfp_ray.results import Store
from dpfp_ray.run import Prepared, build_model, result_record, run
from dpfp_ray.threads import use_threads
from dpfp_ray.train import Progress, State
from dpfp_ray.trial import Trial


def run_on_workers(
    trial: Trial, sweep: Sweep, shared: Any, facts: dict[str, Any], callbacks: list[Any]
) -> None:
    """Run one trial on `sweep.workers` workers; blocks until it is finished.

    The sweep, with its secret seed, goes through the object store: Ray shows a run's config.
    """
    name = f"train-{trial.id}"
    trainer = TorchTrainer(
        worker_loop,
        train_loop_config={
            "trial": trial.to_config(),
            "sweep": ray.put(sweep),
            "shared": shared,
            "facts": facts,
        },
        scaling_config=ScalingConfig(
            num_workers=sweep.workers,
            use_gpu=sweep.gpus_per_worker > 0,
            resources_per_worker={"CPU": sweep.cpus_per_worker}
            | ({"GPU": sweep.gpus_per_worker} if sweep.gpus_per_worker else {}),
        ),
        run_config=RunConfig(
            name=name,
            storage_path=f"{sweep.storage.rstrip('/')}/train",
            failure_config=FailureConfig(max_failures=RETRIES),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            callbacks=callbacks,
        ),
    )
    trainer.fit()


def worker_loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    trial = Trial.from_config(config["trial"])
    sweep: Sweep = ray.get(config["sweep"])
    inputs = ray.get(config["shared"]).inputs()
    use_threads(sweep.cpus_per_worker)
    prepared = Prepared(trial.plan, inputs, trial.noise_multiplier)
    device = ray.train.torch.get_device()
    seed = trial.seed(sweep.seed)
    model = build_model(prepared, seed, device)

    def describe(state: State) -> dict[str, Any]:
        return result_record(prepared, Progress(**state["progress"]), model, device)

    comm = TorchComm()
    store = Store(sweep.storage) if comm.rank == 0 else None
    reporter = TrainReporter(describe, store, config["facts"], sweep.save_every_seconds)
    state = load_checkpoint(ray.train.get_checkpoint())
    record, _ = run(
        prepared, reporter, seed=seed, state=state, comm=comm, device=device, model=model
    )
    reporter.finished(record)


class TrainReporter(RayReporter):
    """Reports from all workers at once, as Ray Train wants it; rank 0 brings the checkpoint."""

    ASK_EVERY = 20  # steps; asking is a collective operation

    def save_is_due(self, done: int) -> bool:
        """Rank 0's clock decides, and the others are told: all must report at the same step."""
        if done % self.ASK_EVERY:
            return False
        due = torch.zeros(1, device=ray.train.torch.get_device())
        if self.store is not None and super().save_is_due(done):
            due += 1
        torch.distributed.all_reduce(due)
        return bool(due.item())

    def send(self, metrics: dict[str, Any], folder: str | None) -> None:
        checkpoint = ray.train.Checkpoint.from_directory(folder) if folder else None
        ray.train.report(metrics, checkpoint=checkpoint)
