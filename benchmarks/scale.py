"""Memory and CPU time while D grows: made-up rows through the ordinary `train`, in one process.

    python benchmarks/scale.py                      # D = 50,000, 500,000 and 5,000,000
    python benchmarks/scale.py --rows 50000 200000

For each D: Parquet shards of a few words a row are written, then one process (the measured one)
calibrates, reads, tokenises, encodes with a tiny BERT made on the spot, runs `moments`, and then
one epoch of DP-SGD on the head, both entered in a ledger. D = 10⁸ is for the accountant and the
sampler alone. Writes docs/scale.json, docs/images/scale.png and the table to stdout.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).resolve().parent.parent / "docs"
WORDS, ROWS_OF_A_SHARD, DEV_ROWS = 1_000, 250_000, 2_000
WIDTH = 16
PHASES = ("calibrate", "read", "tokenise", "encode", "ledger", "moments", "dpsgd")


def write_rows(folder: Path, rows: int, seed: int, name: str = "part") -> None:
    """Shards of three to six words a row; half of the words tell the class with 60 : 40."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    words = np.array([f"w{i}" for i in range(WORDS)], dtype=object)
    for shard, start in enumerate(range(0, rows, ROWS_OF_A_SHARD)):
        count = min(ROWS_OF_A_SHARD, rows - start)
        labels = rng.integers(0, 2, count)
        own = rng.integers(0, WORDS // 2, (count, 6)) * 2
        own += np.where(rng.random((count, 6)) < 0.6, labels[:, None], 1 - labels[:, None])
        lengths = rng.integers(3, 7, count)
        texts = [" ".join(row[:n]) for row, n in zip(words[own].tolist(), lengths, strict=True)]
        table = pa.table({"text": texts, "label": labels})
        pq.write_table(table, folder / f"{name}-{shard}.parquet")


def write_encoder(folder: Path) -> str:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(WORDS))]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder)
    known = {word: number for number, word in enumerate(vocabulary)}
    BertTokenizer(vocab=known, model_max_length=16).save_pretrained(folder)
    return str(folder)


class Meter:
    """CPU seconds by phase; a phase inside another is not counted twice."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.stack: list[str] = []
        self.last = time.process_time()

    def _count(self) -> None:
        now = time.process_time()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.last
        self.last = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._count()
        self.stack.append(name)
        try:
            yield
        finally:
            self._count()
            self.stack.pop()

    def wrap(self, module: Any, function: str, name: str) -> None:
        plain: Callable[..., Any] = getattr(module, function)

        def counted(*arguments: Any, **more: Any) -> Any:
            with self.phase(name):
                return plain(*arguments, **more)

        setattr(module, function, counted)


class AnonymousMemory(threading.Thread):
    """The most memory that no file stands behind, seen every half second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
            self.most = max(self.most, int(line.split()[1]) * 1024)
            time.sleep(0.5)


def measure(folder: Path, rows: int) -> dict[str, Any]:
    """In a process of its own."""
    memory = AnonymousMemory()
    memory.start()
    began = time.perf_counter()
    from dpfp_ray import Plan, calibrate, train
    from dpfp_ray.training import charged, prepare

    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    meter = Meter()
    for place, function, name in (
        (prepare, "load_task", "read"),
        (prepare, "tokens_for", "tokenise"),
        (prepare, "represent", "encode"),
        (charged, "register", "ledger"),
        (prepare, "noise_multiplier", "calibrate"),
    ):
        meter.wrap(place, function, name)
    data: dict[str, Any] = {
        "train_file": str(folder / "part-*.parquet"),
        "dev_file": str(folder / "dev-*.parquet"),
        "model": str(folder / "encoder"),
        "representation": "mean",
    }
    accuracies = {}
    for name, plan in {
        "moments": Plan(method="dpfp", mode="moments", **data),
        "dpsgd": Plan(method="dpsgd", scope="head", epochs=1, **data),
    }.items():
        with meter.phase("calibrate"):
            calibrate(plan, records=rows)
        with meter.phase(name):
            run = train(plan, seed=1, threads=1, reporter="silent")
        accuracies[name] = run.accuracy
    return {
        "rows": rows,
        "cpu_seconds": meter.seconds,
        "wall_seconds": time.perf_counter() - began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_anonymous_bytes": memory.most,
        "bytes_after_imports": start,
        "accuracy": accuracies,
    }


def accountant_and_sampler(records: int = 10**8) -> dict[str, float]:
    from dpfp_ray import Plan, calibrate
    from dpfp_ray.privacy.sampling import PoissonSampler

    plan = Plan(method="dpsgd", scope="head", batch_size=4096, epochs=1)
    began = time.process_time()
    sigma = calibrate(plan, records=records).sigma
    calibrated = time.process_time()
    sampler = PoissonSampler(records, 1, 4096 / records, seed=1)
    drawn = [len(sampler.draw(step)) for step in range(100)]
    return {
        "records": records,
        "sigma": sigma,
        "calibrate_seconds": calibrated - began,
        "draw_seconds": (time.process_time() - calibrated) / len(drawn),
        "mean_drawn": float(np.mean(drawn)),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_a_process(folder: Path, *arguments: str) -> Any:
    environment = {
        **os.environ,
        "DPFP_CACHE": str(folder / "cache"),
        "DPFP_LEDGER": str(folder / "ledger"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [one["rows"] for one in found]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    totals = [sum(one["cpu_seconds"].values()) for one in found]
    left.loglog(rows, totals, "o-", label="measured")
    left.loglog(rows, [totals[-1] * n / rows[-1] for n in rows], "k:", label="linear")
    left.set(xlabel="D", ylabel="CPU seconds")
    left.legend()
    right.semilogx(rows, [one["peak_bytes"] / 1e9 for one in found], "o-", label="all")
    anonymous = [one["peak_anonymous_bytes"] / 1e9 for one in found]
    right.semilogx(rows, anonymous, "s--", label="without mapped files")
    right.axhline(2, color="k", linestyle=":", label="bar")
    right.set(xlabel="D", ylabel="driver's peak memory, GB", ylim=(0, 2.2))
    right.legend()
    figure.savefig(path, dpi=120)


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| D | " + " | ".join(PHASES) + " | all | µs a row | peak GB (anonymous) |"]
    lines.append("| ---: " * (len(PHASES) + 4) + "|")
    for one in found:
        seconds = one["cpu_seconds"]
        total = sum(seconds.values())
        shown = " | ".join(f"{seconds[phase]:.1f}" for phase in PHASES)
        peak = f"{one['peak_bytes'] / 1e9:.2f} ({one['peak_anonymous_bytes'] / 1e9:.2f})"
        each = 1e6 * total / one["rows"]
        lines.append(f"| {one['rows']:,} | {shown} | {total:.0f} | {each:.0f} | {peak} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 500_000, 5_000_000])
    parser.add_argument("--output", type=Path, default=DOCS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--largest", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        folder, rows = arguments.measure
        print(json.dumps(measure(Path(folder), int(rows))))
        return
    if arguments.largest:
        print(json.dumps(accountant_and_sampler()))
        return
    with tempfile.TemporaryDirectory(prefix="dpfp-scale-") as scratch:
        largest = in_a_process(Path(scratch), "--largest")
    found: list[dict[str, Any]] = []
    (arguments.output / "images").mkdir(parents=True, exist_ok=True)
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory(prefix="dpfp-scale-") as scratch:
            folder = Path(scratch)
            write_encoder(folder / "encoder")
            write_rows(folder, rows, seed=1)
            write_rows(folder, DEV_ROWS, seed=2, name="dev")
            found.append(in_a_process(folder, "--measure", scratch, str(rows)))
        # After each size: what is killed later leaves the figure of the smaller ones.
        facts = {"load": os.getloadavg()[0], "sizes": found, "largest": largest}
        (arguments.output / "scale.json").write_text(json.dumps(facts, indent=1) + "\n")
        draw(found, arguments.output / "images" / "scale.png")
        print(table(found[-1:]), flush=True)
    print(table(found))
    print(json.dumps(largest))


if __name__ == "__main__":
    main()
