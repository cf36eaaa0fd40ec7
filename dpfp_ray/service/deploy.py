"""The results service on Ray Serve, for as long as it is wanted: one small replica that takes no
trial's CPU.

with dpfp_ray.serve("runs") as place:
    print(place.url)
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfp_ray.privacy.people import default_place
from dpfp_ray.results.store import Store
from dpfp_ray.service import SERVICE, digest_of
from dpfp_ray.sweeps.cluster import cluster_address, connected, default_address, settings
from dpfp_ray.sweeps.submit import LOOPBACK, read_token
from dpfp_ray.sweeps.trial import resolve_storage
from dpfp_ray.system.errors import UserError, require
from dpfp_ray.system.signals import handling, ignoring_signals
from dpfp_ray.system.terminal import stderr

START_SECONDS = 120.0
# At Ray's own niceness of 15, pages would wait for all else that the machine does.
PROMPT = {"RAY_worker_niceness": "0"}


@dataclass(frozen=True)
class Place:
    """Where the service listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    prefix: str = "/"

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}{self.prefix.rstrip('/')}"

    @property
    def from_elsewhere(self) -> str | None:
        """The URL for other machines of a service that listens on all of this one's addresses."""
        import ray

        if self.host not in ("0.0.0.0", "::"):
            return None
        return Place(ray.util.get_node_ip_address(), self.port, self.prefix).url

    @property
    def dashboard(self) -> str | None:
        """The Serve page of the connected Ray's dashboard, if it has one."""
        from ray._private.worker import get_dashboard_url

        address = get_dashboard_url()
        return f"http://{address}/#/serve" if address else None

    def wait(self) -> None:
        """For Ctrl-C or SIGTERM."""
        ended = threading.Event()

        def end(*_: object) -> None:
            ended.set()

        with handling(signal.SIGINT, end), handling(signal.SIGTERM, end):
            stderr.print("Ctrl-C ends it")
            while not ended.wait(1.0):
                pass


def check_exposure(host: str, digest: str | None) -> None:
    if digest is None and host not in LOOPBACK:
        way = "--token-file FILE or DPFP_TOKEN"
        raise UserError(f"--host {host} lets others on the network in; set a token first ({way})")


def deploy(storage: str, place: Place, digest: str | None, ledger: str | None = None) -> Place:
    """Start or replace `dpfp-results` on the connected Ray; where it really listens."""
    from ray import serve
    from ray.serve.context import _get_global_client

    check_exposure(place.host, digest)
    quiet()
    start(place)
    # A Serve that ran already keeps its own address, and says so only in a log.
    client: Any = _get_global_client()
    http = client.http_config
    real = Place(str(http.host or place.host), int(http.port), place.prefix)
    check_exposure(real.host, digest)
    if (real.host, real.port) != (place.host, place.port):
        stderr.print(
            f"Ray Serve on this cluster listens at {real.host}:{real.port} already and "
            f"keeps to it; for {place.host}:{place.port} run: serve shutdown -y (it ends all that "
            "Serve serves)",
            markup=False,
        )
    try:
        serve.run(
            application(storage, digest, ledger),
            name=SERVICE,
            route_prefix=real.prefix,
            logging_config={"enable_access_log": False},  # what is asked for stays private
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"Ray Serve refused {SERVICE}: {reason}") from None
    end = time.monotonic() + START_SECONDS
    while not any(status == "HEALTHY" for status in serve.status().proxies.values()):
        if time.monotonic() > end:
            raise UserError(f"{SERVICE} runs, but nothing listens at {real.url}; see Serve's logs")
        time.sleep(0.5)
    return real


def start(place: Place) -> None:
    """Start Serve; it gives up on a proxy that a busy machine starts slowly, a second try helps."""
    from ray import serve
    from ray.exceptions import RayError

    if not serve.status().proxies:  # it does not listen yet
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        try:  # Serve itself would try for minutes to listen where somebody else does
            socket.create_server((place.host, place.port), family=family).close()
        except OSError as error:
            reason = f"{place.host}:{place.port}: {os.strerror(error.errno or 0)}"
            raise UserError(f"cannot listen on {reason}; use another --port") from None
    for left in (2, 1, 0):
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": place.host, "port": place.port},
                logging_config={"enable_access_log": False},
            )
            return
        except (RayError, TimeoutError) as error:
            if not left:
                reason = " ".join(str(error).split())[-300:]
                raise UserError(f"Ray Serve does not start: {reason}") from None


def application(storage: str, digest: str | None, ledger: str | None = None) -> Any:
    import ray
    from ray import serve

    def build() -> Any:
        from dpfp_ray.service.app import build_app

        return build_app(storage, digest, ledger)

    # The node that was asked to serve is the one that is known to see a local path.
    options = {"num_cpus": 0, "resources": {f"node:{ray.util.get_node_ip_address()}": 0.001}}
    decorate: Any = serve.deployment(
        name="results", num_replicas=1, max_ongoing_requests=32, ray_actor_options=options
    )
    return decorate(serve.ingress(build)()).bind()


def remove() -> bool:
    """Take the application away; the other ones of the cluster stay. False if it was not there."""
    from ray import serve

    quiet()
    if SERVICE not in serve.status().applications:
        return False
    serve.delete(SERVICE)
    return True


def quiet() -> None:
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    for name in ("ray.serve", "ray._private.worker"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def serve(
    storage: str | Path,
    *,
    ledger: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    route_prefix: str = "/",
    address: str | None = None,
    token_file: str | None = None,
    detach: bool = False,
) -> Iterator[Place]:
    """Show the results below `storage` while the block runs: a page and a JSON API.

    ledger      what the people in the data have paid (default: the user's own)
    host        others than this machine need a token, in `token_file` or DPFP_TOKEN
    address     local starts Ray here (default), auto joins this machine's cluster
    detach      leave it running on the cluster after the block; `stop_serving` ends it
    """
    require("fastapi", "serve", "the results service")
    where = address or default_address()
    if detach:
        check_cluster("--detach", where)
    if not 0 < port < 65536:
        raise UserError(f"port is {port}; give a number from 1 to 65535")
    if not route_prefix.startswith("/"):
        raise UserError(f"route-prefix is {route_prefix!r}; give one such as /results")
    token = read_token(token_file)
    digest = None if token is None else digest_of(token)
    check_exposure(host, digest)
    # Absolute, and chosen here: the replica is another process, with another environment.
    store_place = resolve_storage(str(storage))
    book = resolve_storage(str(ledger or default_place()))
    if not (store := Store(store_place)).exists():
        print(f"dpfp: there is nothing at {store.name} yet", file=sys.stderr)
    with settings(**PROMPT), connected(where):
        with stderr.status("starting Ray Serve …"):  # on a terminal only
            place = deploy(store_place, Place(host, port, route_prefix), digest, book)
        try:
            yield place
        finally:
            if not detach and where != "local":  # a Ray that was started here ends with all in it
                with ignoring_signals():
                    remove()


def stop_serving(address: str | None = None) -> bool:
    """End the service on the cluster, and say on which; False if it was not running."""
    where = address or default_address()
    check_cluster("--stop", where)
    with settings(), connected(where):
        found, cluster = remove(), f"the Ray cluster at {cluster_address()}"
        said = f"stopped on {cluster}" if found else f"was not running on {cluster}"
        stderr.print(f"{SERVICE} {said}", markup=False)
        return found


def check_cluster(flag: str, address: str) -> None:
    if address == "local":
        raise UserError(f"{flag} needs a cluster that goes on without us; give --address auto")
