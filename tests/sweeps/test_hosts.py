"""Sweeps on a cluster of three machines (`tests/support/hosts.py`) whose network, clocks, disks and
power fail. Every sweep ends with the records and the ledger of one that nothing disturbed.

Run by `pytest -m nightly`. Records hold every loss to its last bit, so weights that differ show in
them. Clocks that are off are those of drivers and of trials, not of Ray's own programs.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.privacy.ledger import Ledger
from dpfp_ray.system.lease import PREFIX
from tests.support.hosts import SHARED, Host, Hosts, an_hour_ahead, missing
from tests.support.ray_runs import SEED, measured, records, wait_for, write_space

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts are possible"),
]
RATES = [1e-4, 1e-3, 3e-3, 1e-2]
PORT = 6379
# A node that does not answer for ten seconds is dead.
HEALTH = (
    '{"health_check_period_ms":1000,"health_check_timeout_ms":2000,'
    '"health_check_failure_threshold":8}'
)


class Cluster:
    """Ray on three hosts, the first of them its head."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self.hosts = Hosts(shared, 3)
        self.nodes: dict[Host, subprocess.Popen[str]] = {}
        for host in self.hosts:
            self.join(host)

    def join(self, host: Host, **environment: str) -> None:
        to = ["--head", f"--port={PORT}", f"--system-config={HEALTH}", "--include-dashboard=false"]
        if host is not self.hosts[0]:
            wait_for(self.listens, "Ray's head")
            to = [f"--address={self.address}"]
        to += ["--num-cpus=1", f"--node-ip-address={host.address}", "--block"]
        to += ["--object-store-memory=100000000", "--disable-usage-stats"]
        command = ("-m", "ray.scripts.scripts", "start", *to)
        self.nodes[host] = host.python(*command, **environment)

    def join_again(self, host: Host, **environment: str) -> None:
        host.end(self.nodes[host])
        self.wait_for_nodes(2)
        self.join(host, **environment)
        self.wait_for_nodes(3)

    @property
    def address(self) -> str:
        return f"{self.hosts[0].address}:{PORT}"

    def listens(self) -> bool:
        script = f"import socket; socket.create_connection(('{self.hosts[0].address}', {PORT}), 2)"
        return self.hosts[0].python("-c", script).wait() == 0

    def wait_for_nodes(self, count: int) -> None:
        script = (
            f"import ray; ray.init('{self.address}', logging_level='ERROR', log_to_driver=False);"
            "print('alive', sum(n['Alive'] for n in ray.nodes()))"
        )
        wait_for(
            lambda: f"alive {count}" in self.hosts[0].run(sys.executable, "-c", script)[1],
            f"{count} nodes",
        )

    def sweep(self, host: Host, name: str, *flags: str, **environment: str) -> Any:
        """The sweep's command on `host`; its results are in the shared folder `name`."""
        return host.python(
            *("-m", "dpfp_ray.cli", "sweep", str(SHARED / "space.yaml")),
            *("--storage", str(SHARED / name / "runs"), "--ledger", str(SHARED / name / "ledger")),
            *("--address", self.address, "--seed", str(SEED), "--cpus-per-worker", "1", *flags),
            DPFP_SAVE_SECONDS="0.2",
            **environment,
        )

    def whole_sweep(self, name: str, *flags: str) -> Any:
        """The results of a sweep on the first host that ends well."""
        ends_well(self.sweep(self.hosts[0], name, *flags))
        return self.results(name)

    def results(self, name: str) -> tuple[dict[str, Any], list[tuple[str, int]]]:
        """What must not depend on what happened: records by id, and what was paid."""
        (group,) = Ledger(self.shared / name / "ledger").groups()
        paid = [f"{group.epsilon:.6g}", str(len({e.run_id for e in group.entries}))]
        return {k: measured(r) for k, r in records(self.shared / name / "runs").items()}, paid

    def running(self, name: str, host: Host | None = None) -> list[str]:
        """Trials that run (there) and have saved their state."""
        folder = self.shared / name / "runs"
        saved = {p.stem for p in folder.glob("states/*.pt") if p.name[0] != "."}
        return [
            identity
            for identity, record in records(folder).items()
            if record["trial"]["status"] == "running"
            and identity in saved
            and (host is None or record["trial"]["node"].startswith(f"{host.address}/"))
        ]


def ended(process: Any, patience: float = 600) -> tuple[int, str]:
    said, _ = process.communicate(timeout=patience)
    return process.returncode, said


def ends_well(process: Any) -> str:
    code, said = ended(process)
    assert code == 0, said[-3000:]
    return said


@pytest.fixture(scope="module")
def cluster(
    ray_turn: None, tiny_task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    shared = tmp_path_factory.mktemp("shared")
    task = dict(tiny_task)
    for name in ("train_file", "dev_file", "model"):
        source = Path(task[name])
        copy: Callable[..., Any] = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, shared / source.name)
        task[name] = str(SHARED / source.name)
    write_space(
        shared / "space.yaml",
        task,
        method="grid",
        parameters={"learning_rate": {"values": RATES}},
        plan={"epochs": 6, "batch_size": 4},
    )
    cluster = Cluster(shared)
    try:
        cluster.wait_for_nodes(3)
        yield cluster
    finally:
        cluster.hosts.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Any:
    results = cluster.whole_sweep("undisturbed")
    facts = records(cluster.shared / "undisturbed" / "runs").values()
    assert len({record["trial"]["node"] for record in facts}) > 1
    return results


@pytest.fixture(scope="module")
def in_pairs(cluster: Cluster) -> Any:
    """The same sweep with two workers a trial."""
    return cluster.whole_sweep("pairs", "--workers", "2")


def test_two_workers_a_trial_on_two_hosts(undisturbed: Any, in_pairs: Any) -> None:
    pairs, paid = in_pairs
    assert paid == undisturbed[1]
    assert pairs.keys() == undisturbed[0].keys()
    for identity, record in undisturbed[0].items():  # sums in another order differ in last bits
        assert pairs[identity]["privacy"] == record["privacy"]
        expected = pytest.approx(record["metrics"]["accuracy"], abs=0.026)
        assert pairs[identity]["metrics"]["accuracy"] == expected


def test_storage_that_only_the_driver_s_host_sees_is_refused(
    cluster: Cluster, undisturbed: Any
) -> None:
    """/home is each host's own."""
    words = ["--storage", "/home/runs", "--ledger", "/home/ledger", "--address", cluster.address]
    command = ["-m", "dpfp_ray.cli", "sweep", str(SHARED / "space.yaml"), *words]
    code, said = ended(cluster.hosts[0].python(*command))
    assert code == 2, said[-3000:]
    line = said.splitlines()[-1]
    assert "--storage /home/runs is not the same folder on host" in line
    assert "NFS" in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_slow_network_that_loses_frames(
    cluster: Cluster, undisturbed: Any, in_pairs: Any, workers: str
) -> None:
    switch = cluster.hosts.switch
    switch.delay, switch.loss, before = 0.005, 0.01, switch.lost
    try:
        results = cluster.whole_sweep(f"slow-{workers}", "--workers", workers)
    finally:
        switch.delay = switch.loss = 0.0
    assert switch.lost > before
    assert results == (undisturbed if workers == "1" else in_pairs)


def test_a_partition_that_heals(cluster: Cluster, undisturbed: Any) -> None:
    process = cluster.sweep(cluster.hosts[0], "parted")
    wait_for(lambda: cluster.running("parted", cluster.hosts[1]), "a trial on host2")
    cluster.hosts.switch.cut.add(cluster.hosts[1])
    time.sleep(4)
    cluster.hosts.switch.cut.clear()
    ends_well(process)
    assert cluster.results("parted") == undisturbed


def test_a_driver_whose_clock_is_an_hour_ahead_takes_no_lease_from_a_living_one(
    cluster: Cluster, undisturbed: Any
) -> None:
    # One trial after the other: the first driver must not end before the second asks.
    first = cluster.sweep(cluster.hosts[0], "clocks", "--concurrency", "1")
    wait_for(lambda: list((cluster.shared / "clocks" / "runs").glob(f"{PREFIX}*")), "a lease")
    late = an_hour_ahead(cluster.shared)
    code, said = ended(cluster.sweep(cluster.hosts[2], "clocks", **late))
    assert code == 2, said[-3000:]
    assert "is in use by" in said.splitlines()[-1]
    assert "host1" in said.splitlines()[-1]
    ends_well(first)
    assert cluster.results("clocks") == undisturbed


def test_trials_on_a_host_whose_clock_is_an_hour_ahead(cluster: Cluster, undisturbed: Any) -> None:
    head, _, late = cluster.hosts
    cluster.join_again(late, **an_hour_ahead(cluster.shared))
    try:
        assert cluster.whole_sweep("late") == undisturbed
    finally:
        cluster.join_again(late)
    facts = [record["trial"] for record in records(cluster.shared / "late" / "runs").values()]
    began = {fact["node"].partition("/")[0]: fact["started_at"] for fact in facts}
    assert began[late.address] - began[head.address] > 1800, began


def test_a_full_disk_on_one_host(cluster: Cluster, undisturbed: Any) -> None:
    host = cluster.hosts[1]
    process = cluster.sweep(cluster.hosts[0], "full")
    wait_for(lambda: cluster.running("full", host), "a trial on host2")
    host.run("sh", "-c", "cat /dev/zero > /tmp/filling; df /tmp")
    try:
        code, said = ended(process)
    finally:
        host.run("rm", "/tmp/filling")
    if code != 0:  # a clear failure, and the same command gives the rest
        assert code == 2, said[-3000:]
        ends_well(cluster.sweep(cluster.hosts[0], "full"))
    assert cluster.results("full") == undisturbed


def test_a_host_that_vanishes(cluster: Cluster, undisturbed: Any) -> None:
    host, process = cluster.hosts[2], cluster.sweep(cluster.hosts[0], "vanished")
    (lost, *_) = wait_for(lambda: cluster.running("vanished", host), "one on host3")
    host.vanish()
    ends_well(process)
    assert cluster.results("vanished") == undisturbed
    facts = records(cluster.shared / "vanished" / "runs")[lost]["trial"]
    assert not facts["node"].startswith(f"{host.address}/")
    assert facts["resumed_at_step"] > 0


def test_a_driver_s_host_that_vanishes(cluster: Cluster, undisturbed: Any) -> None:
    cluster.sweep(cluster.hosts[1], "driverless")
    wait_for(lambda: cluster.running("driverless"), "a trial")
    cluster.hosts[1].vanish()
    said = ends_well(cluster.sweep(cluster.hosts[0], "driverless"))
    assert "looking for up to" in said  # whether the lost driver still lives
    assert cluster.results("driverless") == undisturbed
