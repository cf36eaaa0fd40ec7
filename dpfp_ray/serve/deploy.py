"""The service on Ray Serve: one small replica that takes no trial's CPU."""

import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from dpfp_ray.plan.errors import UserError
from dpfp_ray.serve import SERVICE
from dpfp_ray.sweeps.access_tokens import LOOPBACK

START_SECONDS = 120.0
TRIES = 3
QUIET_LOGGERS = ("ray.serve", "ray._private.worker")


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


def check_exposure(host: str, digest: str | None) -> None:
    if digest is None and host not in LOOPBACK:
        raise UserError(
            f"--host {host} lets others on the network in; set a token first (--token-file FILE or "
            "DPFP_TOKEN)"
        )


def deploy(storage: str, place: Place, digest: str | None, ledger: str | None = None) -> Place:
    """Start or replace `dpfp-results` on the connected Ray; where it really listens."""
    from ray import serve

    check_exposure(place.host, digest)
    quiet()
    check_port(place)
    start(place)
    real = listening(place)
    check_exposure(real.host, digest)
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
    """Serve gives up on a proxy that a busy machine starts slowly; a second try helps."""
    from ray import serve
    from ray.exceptions import RayError

    for left in reversed(range(TRIES)):
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


def check_port(place: Place) -> None:
    """Serve itself would try for minutes to listen where somebody else does."""
    from ray import serve

    if serve.status().proxies:  # it listens already
        return
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((place.host, place.port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {place.host}:{place.port}: {error.strerror}; use another --port"
            ) from None


def application(storage: str, digest: str | None, ledger: str | None = None) -> Any:
    from ray import serve

    def build() -> Any:
        from dpfp_ray.serve.app import build_app

        return build_app(storage, digest, ledger)

    # The node that was asked to serve is the one that is known to see a local path.
    import ray

    options = {"num_cpus": 0, "resources": {f"node:{ray.util.get_node_ip_address()}": 0.001}}
    decorate: Any = serve.deployment(
        name="results", num_replicas=1, max_ongoing_requests=32, ray_actor_options=options
    )
    return decorate(serve.ingress(build)()).bind()


def listening(asked: Place) -> Place:
    """A Serve that ran already keeps its own address, and says so only in a log."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    found = client.http_config
    return Place(str(found.host or asked.host), int(found.port), asked.prefix)


def remove() -> bool:
    """Take the application away; the other ones of the cluster stay. False if it was not there."""
    from ray import serve

    quiet()
    present = SERVICE in serve.status().applications
    if present:
        serve.delete(SERVICE)
    return present


def quiet() -> None:
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
