"""A cluster that can grow is asked for what a sweep could use, and gets its machines back."""

import json
from typing import Any

import pytest

from tests.support.ray_runs import measured, run_plainly, run_script, trial


@pytest.mark.nightly
def test_a_sweep_brings_nodes_up_to_its_concurrency_and_gives_them_back(
    ray_turn: None, tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("growing")
    rates = (1e-3, 2e-3, 3e-3, 4e-3)
    trials = [trial(tiny_task, learning_rate=rate, batch_size=4, epochs=6) for rate in rates]
    (folder / "trials.json").write_text(json.dumps([one.to_config() for one in trials]))
    outcome = run_script("ray_growing", str(folder))
    assert outcome["most"] == 3, "the head and one node for each trial at a time"
    assert outcome["left"] == 1
    alone = run_plainly(trials)
    assert outcome["records"].keys() == alone.keys()
    for identity, record in alone.items():
        assert json.dumps(measured(outcome["records"][identity])) == json.dumps(measured(record))
