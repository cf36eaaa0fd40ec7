"""Which tests notice noise that is half of what is stated? Halves σ at every place on its way from
the budget to the release, one place at a time, in a copy of the tree, and runs tests there.

    .venv/bin/python benchmarks/halved_noise.py                # all places: about ten minutes
    .venv/bin/python benchmarks/halved_noise.py "ledger entry" # those whose name has these words

Prints a table (docs/privacy.md, section 10). Exit code 1 if no test notices one of them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("dpfp_ray", "tests", "search_spaces", "pyproject.toml")
MEASURED = "tests/training/test_measured_noise.py"
PREPARED = f"{MEASURED}::test_trials_and_audits_are_prepared_with_the_planned_noise"
STEPS = f"{MEASURED}::test_empty_steps_of_a_run_are_the_planned_noise"
ON_GPU = "tests/training/test_cuda.py::test_noise_of_a_run_is_the_planned_one"


@dataclass(frozen=True)
class Place:
    """`line` of `file` with `old` replaced by `new`; `tests` are those that might notice."""

    name: str
    file: str
    line: str
    old: str
    new: str
    tests: tuple[str, ...]


PLACES = (
    Place(
        "where the method is made",
        "training/loop.py",
        "method = make_method(plan, model, noise_multiplier * plan.C, seed)",
        "noise_multiplier * plan.C",
        "noise_multiplier * plan.C / 2",
        (STEPS,),
    ),
    Place(
        "where the release is made",
        "training/loop.py",
        "release = method.release(plan, noise_multiplier, table, model.classes, run.seed)",
        "noise_multiplier",
        "noise_multiplier / 2",
        (f"{MEASURED}::test_rows_of_release_once_get_the_planned_noise",),
    ),
    Place(
        "noise on gradients",
        "privacy/sampling.py",
        "radius *= np.float32(self.std)",
        "self.std",
        "self.std / 2",
        (STEPS,),
    ),
    Place(
        "DP-SGD and RGP on a GPU",
        "methods/parts/base.py",
        "add_noise(self.gradients(), self.sigma, self.seed, step, worker, workers)",
        "self.sigma",
        "self.sigma / 2",
        (ON_GPU,),
    ),
    Place(
        "noise made on a GPU",
        "privacy/device_noise.py",
        "noise = normal_numbers(key, block, size, flats[0].device).mul_(std)",
        "mul_(std)",
        "mul_(std / 2)",
        (ON_GPU,),
    ),
    Place(
        "DP-SGD, ghost and hooks",
        "methods/dpsgd.py",
        "add_noise(gradients, self.sigma, self.seed, step)",
        "self.sigma",
        "self.sigma / 2",
        (STEPS,),
    ),
    Place(
        "RGP",
        "methods/rgp.py",
        "add_noise([self.sums], self.sigma, self.seed, step)",
        "self.sigma",
        "self.sigma / 2",
        (f"{STEPS}[1.0-rgp]",),
    ),
    Place(
        "DP-FP, mode paper",
        "methods/dpfp.py",
        "torch.from_numpy(noise).mul_(self.sigma)",
        "self.sigma",
        "self.sigma / 2",
        (f"{MEASURED}::test_rows_of_a_dpfp_run_get_the_planned_noise",),
    ),
    Place(
        "release_once",
        "methods/release_once.py",
        "z = (u + std * noise).astype(np.float32)",
        "std * noise",
        "std / 2 * noise",
        (f"{MEASURED}::test_rows_of_release_once_get_the_planned_noise",),
    ),
    Place(
        "moments",
        "methods/moments.py",
        "noisy = exact + noise_multiplier * rng.standard_normal(len(exact))",
        "noise_multiplier *",
        "noise_multiplier / 2 *",
        (f"{MEASURED}::test_moments_get_the_planned_noise",),
    ),
    Place(
        "objpert, the random linear term",
        "methods/parts/perturbed_minimum.py",
        "b = mechanism.sigma * rng.standard_normal(shape)",
        "mechanism.sigma",
        "mechanism.sigma / 2",
        (f"{MEASURED}::test_objective_perturbation_gets_the_planned_noise",),
    ),
    Place(
        "objpert, the last step",
        "methods/parts/perturbed_minimum.py",
        "return theta + mechanism.output_sigma * rng.standard_normal(shape)",
        "mechanism.output_sigma",
        "mechanism.output_sigma / 2",
        ("tests/methods/test_perturbed_minimum.py", "tests/methods/test_objpert.py"),
    ),
    Place(
        "where a run is prepared",
        "training/prepare.py",
        "noise = noise_multiplier(bound)",
        "noise_multiplier(bound)",
        "noise_multiplier(bound) / 2",
        (f"{MEASURED}::test_moments_get_the_planned_noise",),
    ),
    Place(
        "where a trial is bound",
        "sweeps/trial.py",
        "return Trial(prepared.plan, prepared.noise_multiplier, seed_index, group)",
        "prepared.noise_multiplier",
        "prepared.noise_multiplier / 2",
        (PREPARED,),
    ),
    Place(
        "where a trial's process starts",
        "sweeps/experiment.py",
        "prepared = Prepared(trial.plan, inputs, trial.noise_multiplier)",
        "trial.noise_multiplier",
        "trial.noise_multiplier / 2",
        (PREPARED,),
    ),
    Place(
        "where a run is resumed",
        "training/prepare.py",
        'noise = self.state["noise_multiplier"]',
        'self.state["noise_multiplier"]',
        'self.state["noise_multiplier"] / 2',
        ("tests/training/test_run.py::test_a_resumed_run_keeps_the_noise_it_began_with",),
    ),
    Place(
        "the ledger entry (states twice the noise)",
        "privacy/ledger_entries.py",
        "parts.append(Gaussian(whole.p, whole.noise_multiplier, plan.M))",
        "whole.noise_multiplier",
        "whole.noise_multiplier * 2",
        ("tests/privacy/test_ledger.py",),
    ),
)


def failure(place: Place, folder: Path) -> str | None:
    """The first test that fails in a copy of the tree with `place` halved."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    halve(folder / "dpfp_ray" / place.file, place)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-n0", "-p", "no:cacheprovider", *place.tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^FAILED (\S+?)(?:\[| - |$)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(found):
        raise SystemExit(f"pytest did not run:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return found[1] if found else None


def halve(file: Path, place: Place) -> None:
    text = file.read_text()
    if text.count(place.line) != 1:
        raise SystemExit(f"{place.file} has {text.count(place.line)} lines {place.line!r}, not one")
    file.write_text(text.replace(place.line, place.line.replace(place.old, place.new, 1)))


def main(words: str = "") -> int:
    chosen = [place for place in PLACES if words in place.name]
    unnoticed = []
    print("| σ halved | in | the first test that fails |\n| --- | --- | --- |", flush=True)
    for place in chosen:
        with tempfile.TemporaryDirectory(prefix="halved-") as folder:
            found = failure(place, Path(folder))
        test = f"`{found.removeprefix('tests/')}`" if found else "none"
        print(f"| {place.name} | `{place.file}` | {test} |", flush=True)
        if not found:
            unnoticed.append(place.name)
    for name in unnoticed:
        print(f"nobody notices: {name}", file=sys.stderr)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
