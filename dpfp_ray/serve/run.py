"""The results service for as long as it is wanted.

with dpfp_ray.serve("runs") as place:
    print(place.url)
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpfp_ray.data.terminal import stderr
from dpfp_ray.plan.errors import UserError
from dpfp_ray.privacy.ledger_files import default_place
from dpfp_ray.results.store import Store
from dpfp_ray.serve import deploy
from dpfp_ray.serve.deploy import Place
from dpfp_ray.sweeps import access_tokens
from dpfp_ray.sweeps.cluster import connected, default_address, settings
from dpfp_ray.sweeps.signals import ignoring_ctrl_c
from dpfp_ray.sweeps.state import resolve_storage


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
    where = address or default_address()
    if detach:
        check_cluster("--detach", where)
    if not 0 < port < 65536:
        raise UserError(f"port is {port}; give a number from 1 to 65535")
    if not route_prefix.startswith("/"):
        raise UserError(f"route-prefix is {route_prefix!r}; give one such as /results")
    token = access_tokens.read_token(token_file)
    digest = None if token is None else access_tokens.digest(token)
    deploy.check_exposure(host, digest)
    # Absolute, and chosen here: the replica is another process, with another environment.
    shown = resolve_storage(str(storage))
    book = resolve_storage(str(ledger or default_place()))
    if not (store := Store(shown)).exists():
        print(f"dpfp: there is nothing at {store.name} yet", file=sys.stderr)
    with settings(), connected(where):
        with stderr.status("starting Ray Serve …"):  # on a terminal only
            place = deploy.deploy(shown, Place(host, port, route_prefix), digest, book)
        try:
            yield place
        finally:
            if not detach and where != "local":  # a Ray that was started here ends with all in it
                with ignoring_ctrl_c():
                    deploy.remove()


def stop_serving(address: str | None = None) -> bool:
    """End the service on the cluster; False if it was not running."""
    where = address or default_address()
    check_cluster("--stop", where)
    with settings(), connected(where):
        return deploy.remove()


def check_cluster(flag: str, address: str) -> None:
    if address == "local":
        raise UserError(f"{flag} needs a cluster that goes on without us; give --address auto")
