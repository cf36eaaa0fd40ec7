"""Ray's Jobs API over a connection that may break: submit once, follow to the end, repeat nothing.

A job runs on the cluster whether or not anyone listens. Its log is followed over a WebSocket, which
always starts at the log's beginning, so after a break as many characters are skipped as were shown.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dpfp_ray.plan.errors import UserError
from dpfp_ray.sweeps import access_tokens

TIMEOUT = 30.0  # seconds for one answer
QUIET = 60.0  # seconds without a line after which we connect again: the connection may be dead
PATIENCE = 15 * 60.0  # seconds without a connection after which following ends; the job goes on
LONGEST_PAUSE = 30.0
OVERRIDES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
NOISY_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
EXIT_CODES = {"SUCCEEDED": 0, "STOPPED": 130}


class Unreachable(Exception):
    """Worth another try later."""


class Cluster:
    """The Jobs API of one cluster. `say` is told about breaks."""

    def __init__(
        self, address: str, token: str | None = None, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.address = access_tokens.check_http(address)
        self.say = say
        self.patience = PATIENCE
        headers = access_tokens.header(token) if token else None
        try:
            with translated(self.address):
                self.client = make_client(self.address, headers)
        except Unreachable as error:
            raise UserError(f"cannot reach a Ray dashboard at {self.address}: {error}") from None

    def submit(
        self, identity: str, entrypoint: str, metadata: dict[str, str], runtime_env: dict[str, Any]
    ) -> None:
        """Start a job under an id of ours: if the answer is lost, we still know whether it runs."""

        def once() -> None:
            try:
                self.client.submit_job(
                    entrypoint=entrypoint,
                    submission_id=identity,
                    metadata=metadata,
                    runtime_env=runtime_env,
                )
            except RuntimeError as error:
                if "already exists" not in str(error):
                    raise

        self.retry(once, patience=60.0)

    def info(self, identity: str) -> Any:
        return self.retry(lambda: self.client.get_job_info(identity))

    def stop(self, identity: str) -> bool:
        return bool(self.retry(lambda: self.client.stop_job(identity), patience=60.0))

    def follow(self, identity: str, write: Callable[[str], None]) -> Any:
        """Show the log to its end; the job's last state."""
        shown = 0

        def show(text: str, start: int) -> None:
            """`text` stands at `start` of the log; what of it is new is written."""
            nonlocal shown
            fresh = text[max(0, shown - start) :]
            if fresh:
                write(fresh)
                shown += len(fresh)

        def listen() -> None:
            asyncio.run(tail(self.client, identity, show))

        while True:
            self.retry(listen)
            info = self.info(identity)
            if info.status.is_terminal():
                show(self.retry(lambda: self.client.get_job_logs(identity)), 0)
                return info

    def retry(self, act: Callable[[], Any], patience: float | None = None) -> Any:
        """The answer of `act`, tried again with growing pauses while the cluster is unreachable."""
        pause, lost_at = 1.0, None
        while True:
            try:
                with translated(self.address):
                    answer = act()
            except Unreachable as error:
                now = time.monotonic()
                if lost_at is None:
                    lost_at = now
                    self.say(f"connection to {self.address} lost ({error}); trying again …")
                if now - lost_at + pause > (patience or self.patience):
                    raise UserError(f"{self.address} cannot be reached: {error}") from None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if lost_at is not None:
                self.say("connected again")
            return answer


async def tail(client: Any, identity: str, show: Callable[[str, int], None]) -> None:
    """The log from its beginning until the job ends or nothing comes for a while."""
    lines, at = client.tail_job_logs(identity), 0
    try:
        while True:
            try:
                piece = await asyncio.wait_for(anext(lines), QUIET)
            except (StopAsyncIteration, TimeoutError):
                return
            show(piece, at)
            at += len(piece)
    finally:
        await lines.aclose()


def make_client(address: str, headers: dict[str, str] | None) -> Any:
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            """Ray itself would wait for an answer without end."""
            return super()._do_request(method, endpoint, **{"timeout": TIMEOUT, **options})

    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # Ray prefers these to the address that it is given.
    kept = {name: os.environ.pop(name) for name in OVERRIDES if name in os.environ}
    try:
        return Client(address, headers=headers)
    finally:
        os.environ.update(kept)


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Ray's many errors as two: Unreachable is worth another try, UserError is not."""
    import aiohttp
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        wrong = "is not the right one" if "failed" in str(error) else "is needed"
        raise UserError(
            f"a token {wrong} for Ray at {address}; give --token-file, or set RAY_AUTH_TOKEN"
        ) from None
    except aiohttp.WSServerHandshakeError as error:
        if error.status in (401, 403, 404):
            raise UserError(f"{address} refuses the job's log: {error.status}") from None
        raise Unreachable(f"status {error.status}") from None
    except (requests.exceptions.InvalidURL, requests.exceptions.SSLError) as error:
        raise UserError(f"cannot use {address}: {_short(error)}") from None
    except (requests.RequestException, aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unreachable(_short(error)) from None
    except RuntimeError as error:
        text = _short(error)
        if "status code 404" in text:
            raise UserError(f"{address}: {text.partition('404: ')[2] or text}") from None
        if "status code 5" in text or "WebSocket" in text:
            raise Unreachable(text) from None
        raise UserError(f"Ray at {address} refuses: {text}") from None


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def exit_code(info: Any) -> int:
    """0 if it succeeded, else what the job's own command ended with."""
    status = str(getattr(info.status, "value", info.status))
    return EXIT_CODES.get(status, info.driver_exit_code or 1)
