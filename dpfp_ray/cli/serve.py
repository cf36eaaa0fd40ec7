"""Show results while they come in: a page and a JSON API, as the Ray Serve app `dpfp-results`.

Examples:

  dpfp serve --storage runs
  dpfp serve --storage s3://bucket/sweeps --address auto --detach
  DPFP_TOKEN=$(cat token) dpfp serve --storage runs --address auto --host 0.0.0.0
  dpfp serve --stop --address auto

The page is at http://HOST:PORT/, the API below it: /api/results?where=…&sort=…&limit=…,
/api/trials/ID, /api/statement/ID, described by /openapi.json. `dpfp results --address` asks it.
Nothing can be changed through it. The Ray dashboard lists it on its Serve page.

It listens on this machine only, unless --host says otherwise; then a token is needed, from
--token-file or DPFP_TOKEN: programs send it as Authorization: Bearer, a browser is asked for it.
On a cluster, run this where --storage can be read (--detach leaves it running there).
"""

import argparse
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from dpfp_ray.plan.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.serve.deploy import Place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--storage", metavar="PATH_OR_URI", help="what to show, such as runs")
    parser.add_argument(
        "--ledger",
        metavar="PATH_OR_URI",
        help="show what the people in the data have paid (default: $DPFP_LEDGER, else the user's)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    parser.add_argument(
        "--route-prefix", default="/", metavar="/PATH", help="where on that port (default: /)"
    )
    parser.add_argument(
        "--address",
        metavar="local|auto|HOST:PORT",
        help="start Ray here (default), or join this machine's cluster or another",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="who reads must know what is in it; or set DPFP_TOKEN"
    )
    parser.add_argument("--detach", action="store_true", help="leave it running on the cluster")
    parser.add_argument("--stop", action="store_true", help="end it on the cluster")


def command(arguments: argparse.Namespace) -> int:
    from dpfp_ray.data.terminal import stderr
    from dpfp_ray.serve import deploy
    from dpfp_ray.sweeps import access_tokens
    from dpfp_ray.sweeps.cluster import connected, default_address, settings

    address = arguments.address or default_address()
    check(arguments, address)
    with settings():
        if arguments.stop:
            with connected(address):
                found = deploy.remove()
            stderr.print("stopped" if found else "dpfp-results was not running")
            return 0
        token = access_tokens.read_token(arguments.token_file)
        digest = None if token is None else access_tokens.digest(token)
        deploy.check_exposure(arguments.host, digest)
        storage = find_storage(arguments.storage)
        place = deploy.Place(arguments.host, arguments.port, arguments.route_prefix)
        with connected(address):
            with stderr.status("starting Ray Serve …"):  # on a terminal only
                real = deploy.deploy(storage, place, digest, find_ledger(arguments.ledger))
            show(real, digest is not None)
            if not arguments.detach:
                wait(address)
    return 0


def check(arguments: argparse.Namespace, address: str) -> None:
    if (arguments.detach or arguments.stop) and address == "local":
        which = "--detach" if arguments.detach else "--stop"
        raise UserError(f"{which} needs a cluster that goes on without us; give --address auto")
    if not arguments.stop and not arguments.storage:
        raise UserError("give --storage, the folder or URI whose results to show, such as runs")
    if not 0 < arguments.port < 65536:
        raise UserError(f"port is {arguments.port}; give a number from 1 to 65535")
    if not arguments.route_prefix.startswith("/"):
        raise UserError(f"route-prefix is {arguments.route_prefix!r}; give one such as /results")


def find_ledger(location: str | None) -> str:
    """Absolute, and chosen here: the replica has another environment."""
    from dpfp_ray.privacy.ledger import default_place
    from dpfp_ray.sweeps.state import resolve_storage

    return resolve_storage(location or default_place())


def find_storage(location: str) -> str:
    """Absolute, so that it means the same to another process; it may be empty yet."""
    from dpfp_ray.results.store import Store
    from dpfp_ray.sweeps.state import resolve_storage

    storage = resolve_storage(location)
    store = Store(storage)
    if not store.exists():
        print(f"dpfp: there is nothing at {store.name} yet", file=sys.stderr)
    return storage


def show(place: "Place", token: bool) -> None:
    from ray._private.worker import get_dashboard_url

    from dpfp_ray.data.terminal import stderr, stdout

    stdout.print(f"{place.url}/", markup=False)
    sys.stdout.flush()  # whoever started us in the background waits for this line
    dashboard = get_dashboard_url()
    lines = [f"API: {place.url}/openapi.json" + (" (with the token)" if token else "")]
    lines += [f"Ray dashboard: http://{dashboard}/#/serve"] if dashboard else []
    for line in lines:
        stderr.print(line, markup=False)


def wait(address: str) -> None:
    """Wait for Ctrl-C or SIGTERM, then stop the application, and Ray if it was started here."""
    from dpfp_ray.data.terminal import stderr
    from dpfp_ray.serve import deploy
    from dpfp_ray.sweeps.signals import handling, ignoring_ctrl_c

    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    with handling(signal.SIGINT, end), handling(signal.SIGTERM, end):
        stderr.print("Ctrl-C ends it")
        while not ended.wait(1.0):
            pass
    if address != "local":
        with ignoring_ctrl_c():
            deploy.remove()
