"""Jobs on a real Ray head with token authentication: submitted, followed, cut off, stopped."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dpfp_ray.cli.main import main
from dpfp_ray.results.store import Store
from dpfp_ray.sweeps.submit import Cluster, header
from tests.support.flaky_link import Link
from tests.support.ports import free_ports
from tests.support.ray_head import Head, ray_head
from tests.support.ray_runs import wait_for, write_space
from tests.support.samples import comparison

TOKEN = "a-token-of-rays-own-0123456789"
COUNTING = "for i in 1 2 3 4 5 6 7 8; do echo line $i; sleep 0.7; done"


@pytest.fixture(scope="module")
def head(ray_turn: None, session_cache: Path) -> Iterator[Head]:
    with ray_head(TOKEN) as started:
        yield started


@pytest.fixture
def cluster(head: Head) -> Cluster:
    return Cluster(head.dashboard, TOKEN)


def submit(head: Head, *arguments: str) -> int:
    return main(
        ["submit", "--address", head.dashboard, "--token-file", head.token_file, *arguments]
    )


def ask(head: Head, path: str) -> Any:
    """What the dashboard's API says."""
    return requests.get(f"{head.dashboard}/api/{path}", headers=header(TOKEN), timeout=120).json()


def known_jobs(head: Head) -> dict[str, Any]:
    return {job["submission_id"]: job for job in ask(head, "jobs/") if job["submission_id"]}


def test_a_sweep_runs_as_a_job_and_its_table_is_in_the_jobs_log(
    head: Head,
    tiny_task: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spaces").mkdir()
    varied = {"learning_rate": {"values": [1e-3, 2e-3]}}
    write_space(tmp_path / "spaces" / "my.yaml", tiny_task, method="grid", parameters=varied)
    storage = tmp_path / "runs"
    before = set(known_jobs(head))
    # OMP_NUM_THREADS is one that a sweep sets too: the job's word must stand, without a conflict.
    code = submit(
        *(head, "--name", "My sweep!", "--env", "OMP_NUM_THREADS=1", "--"),
        *("sweep", "spaces/my.yaml", "--storage", str(storage), "--concurrency", "1"),
    )
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert "spaces/my.yaml" in err
    rows = Store(storage).rows()
    assert [row["status"] for row in rows] == ["finished"] * 2

    (identity,) = set(known_jobs(head)) - before
    assert identity.startswith("my-sweep-")
    job = known_jobs(head)[identity]
    assert job["status"] == "SUCCEEDED"
    facts = {"verb": "sweep", "sweep": "tiny", "task": "custom", "methods": "dpfp"}
    assert job["metadata"] == {"job_name": "My sweep!", "epsilon": "8"} | facts
    log = ask(head, f"jobs/{identity}/logs")["logs"]
    assert log.replace("\u00a0", " ") == out
    for row in rows:
        assert f"{row['accuracy']:.4f}" in log
    assert "8†" in log
    assert "† nominal ε" in log
    said = "no results page: dpfp serve does not run on this cluster; start it there with:"
    (line,) = [line for line in out.splitlines() if line.startswith(said)][-1:]
    words = line.removeprefix(said).split()
    assert words[:5] == ["dpfp", "serve", "--storage", str(storage), "--address"]
    assert words[5].rpartition(":")[2] == head.address.rpartition(":")[2]
    assert words[6:] == ["--detach"]
    assert TOKEN not in out + err


def run_serve(head: Head, *flags: str) -> "subprocess.CompletedProcess[str]":
    serve = [sys.executable, "-m", "dpfp_ray.cli", "serve", "--address", head.address]
    environment = {**head.environment, "DPFP_TOKEN": ""}
    command = [*serve, *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def test_a_job_says_in_log_and_metadata_which_page_shows_its_sweep_and_that_page_opens(
    head: Head, tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    varied = {"learning_rate": {"values": [1e-3]}}
    space = write_space(tmp_path / "s.yaml", tiny_task, method="grid", parameters=varied)
    storage = tmp_path / "runs"
    (port,) = free_ports(1)
    served = run_serve(head, "--storage", str(storage), "--port", str(port), "--detach")
    assert served.stdout == f"http://127.0.0.1:{port}/\n", served.stderr[-2000:]
    assert f"lists dpfp-results at http://127.0.0.1:{port}/" in served.stderr
    before = set(known_jobs(head))
    command = ("sweep", str(space), "--storage", str(storage), "--cpus-per-worker", "1")
    assert submit(head, "--", *command) == 0
    out, err = capsys.readouterr()
    (identity,) = set(known_jobs(head)) - before
    page = known_jobs(head)[identity]["metadata"]["results_page"]
    assert page == f"http://127.0.0.1:{port}/?where=sweep+%3D%3D+%27tiny%27"
    assert f"results page: {page}" in err
    assert f"results page: {page}" in out
    shown = requests.get(page, timeout=120)
    assert shown.status_code == 200
    (row, *_) = Store(storage).rows()
    assert row["id"] in shown.text
    for words in ("stopped on", "was not running on"):
        stopped = run_serve(head, "--stop")
        assert f"dpfp-results {words} the Ray cluster at " in stopped.stderr
        assert stopped.stderr.endswith(f":{head.address.rpartition(':')[2]}\n")


def test_the_jobs_own_exit_code_is_ours(
    head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(head, "--", "results", str(tmp_path / "nothing")) == 2
    out, err = capsys.readouterr()
    assert "there is no folder" in out
    assert "failed" in err


@pytest.mark.parametrize("token", [None, "not-the-token-0123456789"])
def test_without_the_token_nothing_is_submitted(
    head: Head, tmp_path: Path, token: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(known_jobs(head))
    arguments = ["submit", "--address", head.dashboard]
    if token:
        (tmp_path / "token").write_text(token)
        arguments += ["--token-file", str(tmp_path / "token")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # nor is the one of this machine's user
        assert main([*arguments, "--", "results", "/nothing"]) == 2
    assert "a token is" in capsys.readouterr().err
    assert set(known_jobs(head)) == before


@pytest.mark.nightly
def test_after_a_lost_connection_the_log_goes_on_where_it_was(head: Head, cluster: Cluster) -> None:
    for _ in range(2):  # whoever has lost the answer asks again, and no second job is made
        cluster.submit("cut-off", COUNTING)
    said: list[str] = []
    shown: list[str] = []
    with Link(head.dashboard) as link:

        def disturb() -> None:
            wait_for(lambda: "line 2" in "".join(shown), "two lines")
            link.break_off()
            wait_for(lambda: link.refused > 0, "an attempt to come back")
            link.mend()

        disturber = threading.Thread(target=disturb)
        disturber.start()
        info = Cluster(link.url, TOKEN, said.append).follow("cut-off", shown.append)
        disturber.join()
    lines = [line for line in "".join(shown).splitlines() if line.startswith("line")]
    assert lines == [f"line {number}" for number in range(1, 9)]
    assert info.status == "SUCCEEDED"
    assert len(said) == 2
    assert "lost" in said[0]
    assert said[1] == "connected again"


def test_ctrl_c_detaches_says_how_to_come_back_and_stop_stops(head: Head, cluster: Cluster) -> None:
    import signal

    cluster.submit("long", "echo started; sleep 300")
    command = [sys.executable, "-m", "dpfp_ray.cli", "submit", "--address", head.dashboard]
    with subprocess.Popen(
        [*command, "--attach", "long"],
        env=head.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        wait_for(lambda: "started" in (process.stdout.readline() or "started"), "its log")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=900)
    assert process.returncode == 130
    assert "goes on without us" in errors
    assert f"dpfp submit --address {head.dashboard} --attach long" in errors
    assert f"dpfp submit --address {head.dashboard} --stop long" in errors
    assert "Traceback" not in errors
    assert cluster.info("long").status == "RUNNING"
    assert submit(head, "--stop", "long") == 0
    assert submit(head, "--attach", "long") == 130
    assert known_jobs(head)["long"]["status"] == "STOPPED"


@pytest.mark.nightly
def test_after_a_stop_no_trial_stays_running_and_the_same_command_goes_on(
    head: Head, tiny_task: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped between its first epoch, of which there is a record, and its second."""
    varied = {"learning_rate": {"values": [1e-3, 2e-3]}}
    long = {"epochs": 30, "batch_size": 2, "micro_batches": 1}
    space = write_space(tmp_path / "s.yaml", tiny_task, method="grid", parameters=varied, plan=long)
    storage = tmp_path / "runs"
    command = ("--no-follow", "--", "sweep", str(space), "--storage", str(storage))
    command = (*command, "--concurrency", "2", "--cpus-per-worker", "1")
    assert submit(head, *command) == 0
    identity = capsys.readouterr().out.strip()

    def statuses() -> list[str]:
        return [row["status"] for row in Store(storage).rows()] if storage.exists() else []

    wait_for(lambda: statuses() == ["running"] * 2, "a first epoch of both trials")
    assert submit(head, "--stop", identity) == 0
    wait_for(lambda: known_jobs(head)[identity]["status"] == "STOPPED", "the job's end")
    assert statuses() == ["interrupted"] * 2
    time.sleep(2)  # nor does a worker that outlives its driver say otherwise
    assert statuses() == ["interrupted"] * 2


def test_nobody_at_the_address_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    arguments = ["submit", "--address", f"http://127.0.0.1:{port}", "--", "results", "/nothing"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot reach a Ray dashboard" in line


@pytest.mark.nightly
def test_results_finds_the_service_through_the_dashboard(
    head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two gets its own token, and not the other's."""
    store = Store(tmp_path / "runs")
    for record in comparison(seeds=1):
        store.put(record)
    (port,) = free_ports(1)
    ours = "the-token-of-the-service-0123456789"
    serve = [sys.executable, "-m", "dpfp_ray.cli", "serve", "--address", head.address]
    done = subprocess.run(
        [*serve, "--storage", str(store.name), "--port", str(port), "--detach"],
        env={**head.environment, "DPFP_TOKEN": ours},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"http://127.0.0.1:{port}/"
    assert ours not in done.stdout + done.stderr
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    arguments = ["results", "--address", head.dashboard, "--sort", "id", "--json"]
    assert main(arguments) == 2
    assert "wants a token" in capsys.readouterr().err
    monkeypatch.setenv("DPFP_TOKEN", ours)
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == sorted(row["id"] for row in store.rows())
    applications = str(ask(head, "serve/applications/"))
    assert "dpfp-results" in applications
    assert ours not in applications
    stopped = subprocess.run([*serve, "--stop"], env=head.environment, timeout=900)
    assert stopped.returncode == 0
    assert main(arguments) == 2
    assert "does not run on the cluster" in capsys.readouterr().err
