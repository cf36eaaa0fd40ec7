"""Records to serve, and the application on a plain server: fast, and over real HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dpfp_ray.results.store import Store
from dpfp_ray.service.app import build_app
from tests.support.ports import free_port
from tests.support.samples import HOSTILE, everything_small, hostile


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bit of all that a report may meet."""
    store = Store(folder := tmp_path_factory.mktemp("served"))
    for record in everything_small():
        store.put(record)
    return folder


@pytest.fixture(scope="session")
def hostile_storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names that try to break out of where they stand; the ids too."""
    store = Store(folder := tmp_path_factory.mktemp("hostile"))
    for number, record in enumerate(hostile()):
        record["trial"]["id"] = f"{HOSTILE}/../{number}"
        store.put(record)
    return folder


@pytest.fixture(scope="session")
def url(storage: Path) -> Iterator[str]:
    """The service without a token."""
    with serving(build_app(str(storage))) as address:
        yield address


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """`app` on a server of this process; its address."""
    import uvicorn

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.02)
            assert thread.is_alive(), "the server did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
