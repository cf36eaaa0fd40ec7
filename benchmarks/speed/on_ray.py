"""Bars of many processes: sweeps, workers that share a step, Ray Train, `make demo`."""

import os
import subprocess
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from speed.bars import Bar, number_bar, ratio_bar
from speed.contestants import CPU, Ours, Where
from speed.race import Limits, Turn, race, ratio_of

ROOT = Path(__file__).parent.parent.parent
SLOTS = 2


def sweeps(where: Where) -> list[Bar]:
    """ "Pure" is what the loop itself measures (training and evaluation), so the ratio holds all
    that Ray and we add: workers' start and imports, models, reports, records, Tune's loop."""
    count, rows = (6, 60) if where.quick else (16, 300)
    size = {"task": "demo", "model": "minilm", "max_dev": 200, "max_train": rows}
    trials = [
        {**size, "method": "dpfp", "epochs": 1, "accountant": "gdp", "lr": 1e-5 * 1.2**n}
        for n in range(count)
    ]
    found = sweep(trials)
    share = found["pure"] / SLOTS
    how = (
        f"MiniLM, {count} trials of {rows} rows, {found['wall']:.0f} s against {share:.0f} s from "
        f"the first trial's start; before it Ray's start {found['ray']:.1f} s, inputs and "
        f"workers {found['until_first']:.1f} s; one sweep, as three would take five minutes"
    )
    value = found["wall"] / share
    name = f"sweep wall time / (pure training ÷ {SLOTS} slots), {count} trials"
    return [number_bar(name, "≤ 1.10", value, f"{value:.3f}", how)]


def closed_form(where: Where) -> list[Bar]:
    size = {"task": "demo", "model": "minilm", "max_dev": 200, "max_train": 2000}
    count = 60 if where.quick else 200
    trials = [{**size, "mode": "moments", "ridge": 0.05 * 1.02**n} for n in range(count)]
    found = sweep(trials)
    rate = found["trials"] / found["wall"] * 60
    took = f"{found['wall']:.1f} s"
    how = f"{count} trials of `moments` on one cached release, {SLOTS} at a time, {took}"
    return [number_bar("closed-form trials a minute", "≥ 1,000", rate, f"{rate:,.0f}", how)]


def sweep(values: list[dict[str, Any]]) -> dict[str, float]:
    """Run the trials and say where the time went."""
    from dpfp_ray.privacy.ledger import Ledger
    from dpfp_ray.results.store import Store
    from dpfp_ray.sweeps.cluster import RayOptions
    from dpfp_ray.sweeps.driver import Runner
    from dpfp_ray.sweeps.trial import InputsOnce, bind_trial

    inputs_of = InputsOnce()
    trials = [bind_trial(value, inputs_of) for value in values]
    options = RayOptions(concurrency=SLOTS, cpus_per_worker=1)
    with tempfile.TemporaryDirectory() as folder:
        storage, ledger = f"{folder}/runs", Ledger(f"{folder}/ledger")
        with Runner("bench", storage, options, inputs_of, ledger) as runner:
            started = time.time()
            runner._connect()
            connected = time.time()
            runner.run(trials, varied=["learning_rate"])
            ended = time.time()
        records = Store(storage).records()
    assert all(record["finished"] for record in records), "a trial failed"
    first = min(record["trial"]["started_at"] for record in records)
    return {
        "trials": len(records),
        "ray": connected - started,
        "until_first": first - connected,
        "wall": ended - first,
        "pure": sum(r["cost"]["train_seconds"] + r["cost"]["eval_seconds"] for r in records),
    }


def workers(where: Where) -> list[Bar]:
    """Two processes with a thread each that share every step, against one with two threads."""
    bars = []
    # Time for six rounds or more, which the interval of a median needs.
    for batch_size, most in ((256, 30.0),) if where.quick else ((256, 120.0), (1000, 220.0)):
        limits = Limits(2 if where.quick else 40, most)
        with Pair(where, batch_size) as pair:
            turns: dict[str, Turn] = {"two": pair, "one": Ours("dpsgd", where, batch_size, 4000)}
            seconds = race(turns, [("one", "two")], limits)
        bars.append(
            ratio_bar(
                f"2 workers (gloo) / 1 worker with 2 threads, B = {batch_size:,}",
                "≥ 0.95",
                ratio_of(seconds["one"], seconds["two"]),
                f"DP-SGD ghost, MiniLM, {where.rows}",
            )
        )
    return bars


class Pair:
    """Two processes, told by pipes which step to take."""

    def __init__(self, where: Where, batch_size: int) -> None:
        self.where, self.batch_size = where, batch_size

    def __enter__(self) -> "Pair":
        context = get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(2)]
        self.ends = [here for here, _ in pipes]
        self.processes = [
            context.Process(
                target=half, args=(rank, there, self.folder.name, self.where, self.batch_size)
            )
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for end in self.ends:
            end.recv()
        return self

    def __call__(self, number: int) -> None:
        for end in self.ends:
            end.send(number)
        for end in self.ends:
            end.recv()

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.send(None)
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def half(rank: int, pipe: Connection, folder: str, where: Where, batch_size: int) -> None:
    from dpfp_ray.training.machine import TorchComm

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    ours = Ours("dpsgd", where, batch_size, 4000, TorchComm())
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        ours(number)
        pipe.send(number)
    torch.distributed.destroy_process_group()


def ray_train(where: Where) -> list[Bar]:
    """In one Ray Train worker: the loop as a trial runs it there, and the plain loop, in turns."""
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    from dpfp_ray.sweeps.cluster import connected, settings

    limits = Limits(2, 30) if where.quick else Limits(40, 150)
    # Ray's processes inherit it, and find this folder.
    os.environ["PYTHONPATH"] = f"{ROOT}/benchmarks{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory() as folder, settings(), connected("local"):
        trainer = TorchTrainer(
            loops_in_turn,
            train_loop_config={"where": where, "limits": limits, "result": f"{folder}/seconds.pt"},
            scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 2}),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        trainer.fit()
        seconds = torch.load(f"{folder}/seconds.pt")
    how = (
        f"one worker, non_private, MiniLM, {where.rows}, B = 32, an epoch of 12 steps and a report"
    )
    ratio = ratio_of(seconds["plain"], seconds["ray"])
    return [ratio_bar("Ray Train loop / plain loop", "≥ 0.97", ratio, how)]


def loops_in_turn(config: dict[str, Any]) -> None:
    import ray.train

    from dpfp_ray.plan.values import make_plan
    from dpfp_ray.sweeps.workers import GroupComm
    from dpfp_ray.training.loop import Epoch, train_steps
    from dpfp_ray.training.machine import Comm, SoloComm, use_threads
    from dpfp_ray.training.prepare import Run, build_model, prepare

    use_threads(2)
    values = config["where"].values(32, 12 * 32, method="non_private")
    prepared = prepare(make_plan({**values, "epochs": 1}))
    model = build_model(prepared, 0, CPU)

    def loop(comm: Comm, report: Any) -> Any:
        def turn(number: int) -> None:
            for event in train_steps(Run(prepared, number), model, prepared.data, comm):
                if isinstance(event, Epoch):
                    record = event.record
                    report({"epoch": record["epoch"], "loss": record["train_loss"]})

        return turn

    turns = {"plain": loop(SoloComm(), dict), "ray": loop(GroupComm(), ray.train.report)}
    torch.save(race(turns, [("plain", "ray")], config["limits"]), config["result"])


def demo(where: Where) -> list[Bar]:
    """From an empty cache, but for the downloads; what `make` prints goes to a file."""
    from dpfp_ray.system.cache import cache_dir

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        for name in ("demo", "models"):
            if (cache_dir() / name).is_dir():
                (cache / name).symlink_to(cache_dir() / name)
        environment = {**os.environ, "DPFP_CACHE": str(cache)}
        environment.pop("OMP_NUM_THREADS", None)
        started = time.perf_counter()
        with (Path(folder) / "output").open("w") as output:
            subprocess.run(
                ["make", "-C", str(ROOT), "demo", f"DEMO={folder}/demo"],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=True,
            )
        minutes = (time.perf_counter() - started) / 60
    how = "sweep, comparison with audits, report; empty cache but for downloads; one run"
    return [
        number_bar("`make demo` after installation, minutes", "≤ 3", minutes, f"{minutes:.1f}", how)
    ]
