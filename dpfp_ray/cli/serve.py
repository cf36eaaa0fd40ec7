"""Show results while they come in: a page and a JSON API, as the Ray Serve app `dpfp-results`.

Examples:

  dpfp serve --storage runs
  dpfp serve --storage s3://bucket/sweeps --address auto --detach
  DPFP_TOKEN=$(cat token) dpfp serve --storage runs --address auto --host 0.0.0.0
  dpfp serve --stop --address auto

The page at http://HOST:PORT/ is that of `dpfp report`, live, with every trial above it. The API is
/api/results?where=…&sort=…&limit=…&offset=…, described by /openapi.json; `dpfp results --address`
asks it. Nothing can be changed through it. The Ray dashboard lists it on its Serve page.

It listens on this machine only, unless --host says otherwise; then a token is needed, from
--token-file or DPFP_TOKEN: programs send it as Authorization: Bearer, a browser is asked for it.
On a cluster, run this where --storage can be read (--detach leaves it running there).
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from dpfp_ray.cli.options import adder, given
from dpfp_ray.system.errors import UserError

if TYPE_CHECKING:
    from dpfp_ray.service.deploy import Place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--storage PATH_OR_URI", "what to show, such as runs")
    add(
        "--ledger PATH_OR_URI",
        "show what the people in the data have paid (default: $DPFP_LEDGER, else the user's)",
    )
    add("--host", "where to listen (default: 127.0.0.1)", default="127.0.0.1")
    add("--port N", "default: 8000", type=int, default=8000)
    add("--route-prefix /PATH", "where on that port (default: /)", default="/")
    where = "start Ray here (default), or join this machine's cluster or another"
    add("--address local|auto|HOST:PORT", where)
    token = "file with the token that clients must send; or set DPFP_TOKEN"
    add("--token-file FILE", token)
    add("--detach", "leave it running on the cluster")
    add("--stop", "end it on the cluster")


def command(arguments: argparse.Namespace) -> int:
    if not arguments.stop and not arguments.storage:
        raise UserError("give --storage, the folder or URI whose results to show, such as runs")

    from dpfp_ray import serve, stop_serving

    if arguments.stop:
        stop_serving(arguments.address)
        return 0
    names = ("ledger", "host", "port", "route_prefix", "address", "token_file", "detach")
    with serve(arguments.storage, **given(arguments, *names)) as place:
        show(place, token=bool(arguments.token_file or os.environ.get("DPFP_TOKEN")))
        if not arguments.detach:
            place.wait()
    return 0


def show(place: "Place", *, token: bool) -> None:
    from dpfp_ray.system.terminal import stderr, stdout

    stdout.print(f"{place.url}/", markup=False)
    sys.stdout.flush()  # whoever started us in the background waits for this line
    lines = [f"API: {place.url}/openapi.json" + (" (with the token)" if token else "")]
    if place.from_elsewhere:
        lines.insert(0, f"From other machines: {place.from_elsewhere}/")
    if place.dashboard:  # its Serve page has the route alone, without host and port
        lines += [f"Ray dashboard: {place.dashboard} lists dpfp-results at {place.url}/"]
    for line in lines:
        stderr.print(line, markup=False)
