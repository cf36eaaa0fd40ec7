"""A Ray session with metrics, a small sweep on it, and `dashboards/check.py` watching.

`python -m tests.support.metrics_session FOLDER SPACE` prints the check's answers, its exit code,
and the tags that Prometheus got, as JSON. A process of its own: the tests' own session has no
dashboard, whose process it is that tells Prometheus where to look.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

REPORT, NICENESS = "RAY_metrics_report_interval_ms", "RAY_worker_niceness"


def main(folder: Path, space: Path) -> None:
    os.environ[REPORT] = "2000"  # Ray forgets a gauge after twice that: the check asks every 2 s
    os.environ[NICENESS] = "0"  # Ray's 15 starves on a machine that runs other tests beside this
    from dpfp_ray.sweeps.cluster import settings

    # Not in `folder`: paths of Ray's sockets must be short. On a busy machine Ray's agents still
    # write logs there while it is removed; what they leave goes at the end of all tests.
    scratch = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
    with settings(), scratch as session:
        import ray

        from tests.support.ports import free_port
        from tests.support.ray_start import start_here

        start_here(
            num_cpus=2,
            include_dashboard=True,
            dashboard_port=free_port(),
            object_store_memory=100 * 2**20,
            _temp_dir=session,
        )
        try:
            print(json.dumps(observe(folder, space, Path(session))))
        finally:
            ray.shutdown()


def observe(folder: Path, space: Path, session: Path) -> dict[str, object]:
    import ray

    from dpfp_ray.privacy.ledger import Ledger
    from tests.support.ray_runs import PATIENCE, sweep_here, wait_for

    # A ledger of its own, with a total: what is spent of it is shown only where there is one.
    os.environ["DPFP_LEDGER"] = str(folder / "ledger")
    Ledger().set_total(20.0, 1e-3)
    discovery = session / "prom_metrics_service_discovery.json"
    wait_for(discovery.exists, "Ray to list its nodes")
    command = [sys.executable, "-m", "dashboards.check", "--json"]
    options = ["--discovery", str(discovery), "--wait", str(2 * PATIENCE)]
    node = ray.nodes()[0]
    page = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    over = threading.Event()
    with (
        subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as check,
        ThreadPoolExecutor(1) as watcher,
    ):
        exported = watcher.submit(watch, page, over)
        try:
            sweep_here(space, folder / "sweep", show_training_loss=True)
            output, _ = check.communicate()
        finally:
            check.terminate()
            over.set()
    answers = json.loads(output)
    return {"code": check.returncode, "answers": answers, "exported": exported.result()}


def watch(page: str, over: threading.Event) -> list[str]:
    """All that Ray's metrics page says of us until it is over: a gauge is there for seconds."""
    seen: set[str] = set()
    while not over.wait(0.5):
        with suppress(OSError), urlopen(page) as response:
            lines = response.read().decode().splitlines()
            seen |= {line for line in lines if line.startswith("ray_dpfp_")}
    return sorted(seen)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
