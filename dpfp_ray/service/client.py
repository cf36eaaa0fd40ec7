"""Rows from a running `dpfp serve`, given its own address or that of the Ray dashboard."""

import re
import time
from typing import Any
from urllib.parse import urlsplit

import requests

from dpfp_ray.results.rows import COLUMNS, SPLIT, Row
from dpfp_ray.results.store import FoundRows
from dpfp_ray.service import SERVICE
from dpfp_ray.sweeps.submit import (
    LOOPBACK,
    SERVE_DETAILS,
    check_http,
    header,
    host_of,
    ray_token,
    read_token,
    service_url,
)
from dpfp_ray.system.errors import UserError

TIMEOUT = 30.0
PAGE = 1000  # rows; what the service gives at most
RESTARTS = 2
LOAD_SECONDS = 120.0


def ask_service(
    address: str,
    *,
    where: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
    token_file: str | None = None,
) -> FoundRows:
    """What `find_results` gives, from the service at `address` (http://HEAD:8265).

    token_file   holds the service's token (default: $DPFP_TOKEN, if it is set)
    """
    token = read_token(token_file)
    address = check_http(address)
    service = address if _is_service(address) else _from_dashboard(address)
    end = time.monotonic() + LOAD_SECONDS
    rows: list[Row] = []
    version, restarts = "", 0
    while True:
        size = PAGE if limit is None else min(PAGE, limit - len(rows))
        question = {"where": where, "sort": sort, "limit": size, "offset": len(rows)}
        page = _answer(get(f"{service}/api/results", token, question), service)
        if page.get("status") == "loading":  # the service has just started
            if time.monotonic() > end:
                raise UserError(f"{service} is still reading its records; ask again in a minute")
            time.sleep(1.0)
            continue
        changed, version = page["version"] != version, page["version"]
        if rows and changed and restarts < RESTARTS:  # a record came in between two pages
            rows, restarts = [], restarts + 1
            continue
        rows += [_typed(row) for row in page["rows"]]
        if not page["rows"] or len(rows) >= min(page["total"], limit or page["total"]):
            return FoundRows(rows, [str(name) for name in page["columns"]], int(page["total"]))


def get(url: str, token: str | None, question: dict[str, Any] | None = None) -> Any:
    def sign(request: Any) -> Any:
        """As `auth`, because `requests` would let ~/.netrc win over a plain header."""
        request.headers.update(header(token) if token else {})
        return request

    try:
        # A redirect could lead the token elsewhere.
        return requests.get(url, params=question, auth=sign, timeout=TIMEOUT, allow_redirects=False)
    except requests.RequestException as error:
        # The operating system's own words, without those that requests and urllib3 put around them.
        root = re.search(r"\[Errno -?\d+\] ([^\"')]+)", str(error))
        reason = root.group(1) if root else type(error).__name__
        raise UserError(f"cannot reach {url.partition('/api/')[0]}: {reason[:200]}") from None


def _is_service(address: str) -> bool:
    answer = get(f"{address}/api/about", None)
    try:
        return bool(answer.status_code == 200 and answer.json().get("service") == SERVICE)
    except (ValueError, AttributeError):
        return False


def _from_dashboard(address: str) -> str:
    """Where the Serve REST API of a dashboard says that the service listens."""
    answer = get(f"{address}{SERVE_DETAILS}", ray_token(address, None))
    if answer.status_code in (401, 403):
        raise UserError(f"Ray at {address} wants its token; set RAY_AUTH_TOKEN")
    try:
        details = answer.json()
        details["applications"].get(SERVICE)
        service = service_url(details, host_of(address))
    except (ValueError, KeyError, AttributeError):
        raise UserError(f"{address} is neither dpfp serve nor a Ray dashboard") from None
    if service is None:
        raise UserError(
            f"{SERVICE} does not run on the cluster of {address}; start it there with: "
            "dpfp serve --address auto --storage PATH_OR_URI --detach"
        )
    head, parts = host_of(address), urlsplit(service)
    if parts.hostname in LOOPBACK and head not in LOOPBACK:
        raise UserError(
            f"{SERVICE} listens on the loopback of {head} only; forward it with: "
            f"ssh -L {parts.port}:127.0.0.1:{parts.port} {head}, then --address "
            f"http://127.0.0.1:{parts.port}{parts.path}"
        )
    if not _is_service(service):
        raise UserError(f"{address} says that {SERVICE} is at {service}, which does not answer")
    return service


def _answer(answer: Any, service: str) -> dict[str, Any]:
    if answer.status_code == 401:
        raise UserError(f"{service} wants a token; give --token-file FILE or set DPFP_TOKEN")
    try:
        facts = answer.json()
        if answer.status_code != 200:
            raise UserError(str(facts["error"]))
        facts["rows"], facts["columns"], facts["total"], facts["version"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{service} gave no sensible answer ({answer.status_code})") from None
    return dict(facts)


def _typed(row: Row) -> Row:
    """JSON has no infinite number: it is the text "inf" there."""
    numeric = {name for name in row if name.startswith(SPLIT) or COLUMNS.get(name) is float}
    infinite = {name for name in numeric if row[name] in ("inf", "-inf")}
    return row | {name: float(row[name]) for name in infinite}
