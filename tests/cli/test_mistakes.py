"""What people get wrong on the command line: exit code 2, and one line that says what to do."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_main import fails

# DATA are flags that name the tiny task's files, OUT is a folder that is not there yet.
MISTAKES = {
    "fly": "invalid choice: 'fly'",
    "calibrate": "--records",
    "calibrate --records 9 --epsilom 3": "unrecognized arguments: --epsilom 3 (see dpfp calibrate",
    "calibrate --records 2000 --batch-size 32 --micro-batches 64": "M = 64 is more than batch_size",
    "calibrate --records 2000 --epsilon nan": "epsilon is nan",
    "calibrate --records 2000 --batch-size 2.5": "batch_size is '2.5'",
    f"calibrate --records {'9' * 20}": f"records is {'9' * 20}; give a whole number from 1 to",
    "calibrate --records 2000 --method non_private": "non_private",
    "calibrate --records 2000 --adjacency add_remove": "not one that dpfp paper can promise",
    "calibrate --records 2000 --accountant rdp --adjacency replace_one": "no bound for adjacency",
    "train": "--output",
    "train --output OUT --seed a": "--seed",
    "train --output OUT --micro-batches 64 --batch-size 32": "more than batch_size",
    "train --output OUT --epsilon 0": "epsilon is 0",
    "train --output OUT --method nonprivate": "did you mean 'non_private'?",
    "train --output OUT --method non_private --epsilon 3": "spends no budget",
    "train --output OUT --schedule cosine": "unknown schedule 'cosine'",
    "train --output OUT --task custom": "needs train_file",
    "train --output OUT --train-file gone.csv --model gone": "gone",
    "train --output OUT --threads 0": "threads is 0",
    "train --output OUT --plan gone.yaml": "cannot read plan gone.yaml",
    f"train --output {__file__}": "cannot write to",
    "train --output OUT --save-every -1": "save-every is -1.0; give seconds, 0 or more",
    "audit DATA --output OUT --canaries 61": "with 120 training records it can be 1 to 60",
    "audit DATA --output OUT --canaries 0": "canaries is 0",
    "audit DATA --output OUT --confidence 95": "confidence is 95",
    "audit DATA --output OUT --save-every -1": "save-every is -1.0; give seconds, 0 or more",
    "compare DATA --output OUT --epsilon inf": "use --methods non_private",
    "compare DATA --output OUT --epsilon 3,x": "'3,x' is not a list of numbers",
    "compare DATA --output OUT --epsilon 0": "above 0",
    "compare DATA --output OUT --methods dpfd": "did you mean 'dpfp'?",
    "compare DATA --output OUT --methods dpfp:momints": "did you mean 'moments'?",
    "compare DATA --output OUT --methods dpsgd:moments": "head",
    "compare DATA --output OUT --methods ,": "methods is empty",
    "compare DATA --output OUT --methods dpfp,dpsgd --batch-size 1000": "1000",
    "compare DATA --output OUT --methods dpsgd --adjacency zero_out": "add_remove",
    "compare DATA --output OUT --save-every -1": "save-every is -1.0; give seconds, 0 or more",
    "compare --task demo": "--output is missing",
    "sweep missing.yaml": "there is no file missing.yaml; unknown search space",
    "sweep demo --storage OUT --set epsilon": "--set epsilon: give KEY=VALUE",
    "sweep demo --storage OUT --set epsilom=3": "did you mean 'epsilon'?",
    "sweep demo --storage OUT --set epsilon=-3": "epsilon is -3",
    "sweep demo --storage OUT --samples 0": "samples is '0'",
    "sweep demo --storage OUT --save-every -1": "save-every is -1.0; give seconds, 0 or more",
    "serve": "give --storage",
    "serve --storage x --detach": "--detach needs a cluster",
    "serve --stop": "--stop needs a cluster",
    "serve --storage x --port 70000": "port is 70000",
    "serve --storage x --route-prefix results": "route-prefix is 'results'",
    "serve --storage x --host 0.0.0.0": "set a token first",
    "serve --storage x --token-file nowhere": "cannot read the token file nowhere",
    "serve --storage ftp://x/y": "no usable URI",
    "submit": "no command",
    "submit -- submit": "cannot be a job",
    "submit --attach x -- results /r": "take no command",
    "submit --env 1=2 -- results /r": "--env 1",
    "submit --address head:8265 -- results /r": "such as http://head:8265",
    "submit --address http://a:b@c -- results /r": "holds a password",
    "submit -- train --output here": "a job's own folder goes with it",
    "predict RUN": "give one of",
    "predict RUN - --dev": "give one of",
    "predict RUN x.csv --text great": "give one of",
}


@pytest.mark.parametrize("command", MISTAKES, ids=lambda command: command[:40])
def test_a_mistake_is_one_line(
    command: str,
    tiny_task: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DPFP_TOKEN", raising=False)
    names = ("train_file", "dev_file", "model", "representation", "accountant")
    data = " ".join(f"--{name.replace('_', '-')}={tiny_task[name]}" for name in names)
    out = tmp_path / "out"
    line = fails(command.replace("DATA", data).replace("OUT", str(out)).split(), capsys)
    assert MISTAKES[command] in line
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize(
    ("verb", "plan", "words"),
    [
        ("train", "batchsize: 8\n", "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("train", "- 1\n- 2\n", "must hold `key: value` lines"),
        ("train", "epsilon: -1\n", "epsilon is -1"),
        ("train", "[" * 5_000, "is nested too deeply"),
        ("train", "epsilon: " + "9" * 6_000, "a number of more than 300 digits"),
        ("train", "epsilon: &x [*x]\n", "has an alias"),
        ("compare", "epsilon: [[[]]]", "epsilon [[[]]] is not a list of numbers; give 3 or 3,8"),
        ("compare", "epsilon: [1, x]", "epsilon [1, 'x'] is not a list of numbers"),
        ("compare", "epsilon: []", "epsilon is empty"),
        ("compare", "null:", "unknown key 'None'"),
        ("compare", "difference: 3", "unknown key 'difference'"),
        ("compare", "train_file: ''", "train_file is empty; give one word or path"),
    ],
    ids=lambda text: str(text)[:30],
)
def test_a_mistake_in_a_plan_file_is_one_line(
    verb: str, plan: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(plan)
    out = tmp_path / "out"
    argv = [verb, "--plan", str(tmp_path / "plan.yaml"), "--output", str(out)]
    assert words in fails(argv, capsys)
    assert not out.exists()
