"""An exported folder answers as `dpfp predict` does, in a process that has no dpfp-ray."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfp_ray import UserError, load_model
from dpfp_ray.models.export import Change, Predictor, export_adapter, export_model
from dpfp_ray.plan.method_spec import all_specs, scope_kind
from dpfp_ray.plan.values import make_plan
from dpfp_ray.training.load_model import read_run, weights_of
from dpfp_ray.training.record import plan_of
from tests.support.finished_runs import KINDS, finished
from tests.support.stranger import Stranger, own_cache
from tests.support.tiny_runs import tiny_split

TEXTS = [*tiny_split(8, seed=4).texts, "great " * 100, "?"]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    with Stranger(tmp_path_factory.mktemp("stranger")) as found:
        yield found


def same(model: Predictor, theirs: list[dict[str, float]], texts: list[Any]) -> None:
    shares = [[row[label] for label in model.labels] for row in theirs]
    np.testing.assert_allclose(shares, model.probabilities(texts), atol=1e-5)


def export(model: Predictor, folder: Path, **options: Any) -> None:
    export_model(model, folder, lambda _: None, **options)


def test_kinds_are_every_method_with_every_scope() -> None:
    """Of which the next test exports one each."""
    plans = [make_plan({"method": "dpfp", "epsilon": 8.0} | kind) for kind in KINDS.values()]
    tried = {(plan.method, plan.mode, scope_kind(plan.scope)) for plan in plans}
    ours = [spec for spec in all_specs().values() if not spec.by_library]  # others train the same
    there = {(s.method, s.mode, scope_kind(n)) for s in ours for n in s.scopes}
    assert tried == there


@pytest.mark.slow
def test_every_method_answers_elsewhere_as_it_does_here(
    tiny_task: dict[str, Any], stranger: Stranger, tmp_path: Path
) -> None:
    models = {}
    for number, kind in enumerate(KINDS):
        # A kind that names its own keeps it. Centred, this random encoder's pooler would not do:
        # all its vectors agree in two digits, and what is left (0.0013 of 0.51), scaled to
        # norm 1, has the rounding of fp32 in its fifth digit. In float64 both agree to 1e-16.
        representation = KINDS[kind].get("representation") or ("mean", "cls", "pooler")[number % 3]
        finished(tiny_task, kind, tmp_path / f"run{number}", representation=representation)
        models[kind] = load_model(tmp_path / f"run{number}")
        export(models[kind], tmp_path / f"model{number}")
    folders = [tmp_path / f"model{number}" for number in range(len(KINDS))]
    answers = stranger.ask(TEXTS, *folders)
    for folder, model in zip(folders, models.values(), strict=True):
        same(model, answers[str(folder)], TEXTS)


@pytest.mark.slow
def test_every_family_answers_elsewhere_as_it_does_here(
    tiny_task: dict[str, Any], zoo: Path, stranger: Stranger, tmp_path: Path
) -> None:
    models = {}
    for family in ("roberta", "mpnet", "distilbert", "electra", "albert", "deberta-v2", "gpt2"):
        for kind in ("non_private", "moments"):
            name = f"{family} {kind}"
            changes = {"model": str(zoo / family), "representation": "auto", "max_length": 16}
            finished(tiny_task, kind, tmp_path / f"run {name}", **changes)
            models[name] = load_model(tmp_path / f"run {name}")
            export(models[name], tmp_path / name)
    answers = stranger.ask(TEXTS, *(tmp_path / name for name in models))
    for name, model in models.items():
        same(model, answers[str(tmp_path / name)], TEXTS)


# Joins the adapter with its encoder, by peft alone and by the folder's own file.
ADAPTER_STRANGER = """
import json, sys
sys.modules["dpfp_ray"] = None
texts, folder, base = json.load(sys.stdin), *sys.argv[1:]
sys.path.insert(0, folder)
import transformers, peft
transformers.utils.logging.disable_progress_bar()
from modeling_dpfp import pipeline_from_adapter
ask = pipeline_from_adapter(folder, base)
answers = [ask(text, top_k=None) for text in texts]
answers = [one[0] if isinstance(one[0], list) else one for one in answers]
rows = [{each["label"]: each["score"] for each in row} for row in answers]
alone = peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(base), folder)
changed = sum(p.abs().sum().item() for name, p in alone.named_parameters() if "lora_B" in name)
print(json.dumps({"rows": rows, "changed": changed}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_an_adapter_answers_elsewhere_as_the_merged_model_does(
    tiny_task: dict[str, Any], zoo: Path, tmp_path: Path, family: str
) -> None:
    own = {"model": str(zoo / family), "representation": "auto", "max_length": 16}
    finished(tiny_task, "dpsgd lora", tmp_path / "run", **own)
    record = read_run(tmp_path / "run")
    change = Change.of(plan_of(record), weights_of(tmp_path / "run", record), "base")
    model = load_model(tmp_path / "run")
    export_adapter(model, change, tmp_path / "adapter", lambda _: None)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    done = subprocess.run(
        [sys.executable, "-c", ADAPTER_STRANGER, str(tmp_path / "adapter"), str(zoo / family)],
        input=json.dumps(TEXTS),
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,
        env=own_cache(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    same(model, found["rows"], TEXTS)
    assert found["changed"] > 0


@pytest.mark.slow
def test_pairs_are_asked_as_pairs(
    tiny_task: dict[str, Any], stranger: Stranger, tmp_path: Path
) -> None:
    pairs = [["great " * 30, "dull"], ["dull", "great " * 30], ["a", "b"]]
    finished(tiny_task, "moments", tmp_path / "run", max_length=20)
    model = load_model(tmp_path / "run")
    export(model, tmp_path / "model")
    answers = stranger.ask(pairs, tmp_path / "model")
    same(model, answers[str(tmp_path / "model")], [tuple(pair) for pair in pairs])


@pytest.mark.slow
def test_minilm_answers_elsewhere_as_it_does_here(
    tiny_task: dict[str, Any], stranger: Stranger, tmp_path: Path
) -> None:
    finished(tiny_task, "release_once", tmp_path / "run", model="minilm", max_length=128)
    model = load_model(tmp_path / "run")
    export(model, tmp_path / "model")
    same(model, stranger.ask(TEXTS, tmp_path / "model")[str(tmp_path / "model")], TEXTS)


@pytest.fixture(scope="module")
def model(tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    folder = tmp_path_factory.mktemp("run")
    finished(tiny_task, "moments", folder)
    return load_model(folder)


def test_without_trust_there_is_an_error_and_no_random_head(
    model: Predictor, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    export(model, tmp_path / "model")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "model", trust_remote_code=False
        )


def test_an_export_is_not_replaced_unasked(model: Predictor, tmp_path: Path) -> None:
    export(model, tmp_path / "model")
    with pytest.raises(UserError, match="already holds an export"):
        export(model, tmp_path / "model")
    (tmp_path / "model" / "old.txt").touch()
    export(model, tmp_path / "model", overwrite=True)
    assert not (tmp_path / "model" / "old.txt").exists()


def test_other_files_are_never_replaced(model: Predictor, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds other files"):
        export(model, tmp_path, overwrite=True)
