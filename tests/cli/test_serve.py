"""`dpfp serve`: mistakes are one line, before or instead of a service."""

import socket
from pathlib import Path

import pytest

from dpfp_ray.cli.main import main


def test_a_port_that_is_taken_is_named(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--storage", str(tmp_path), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
