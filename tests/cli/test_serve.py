"""`dpfp serve`: mistakes are one line, before or instead of a service."""

import socket
from pathlib import Path

import pytest

from dpfp_ray.cli.main import main


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "give --storage"),
        (["--storage", "x", "--detach"], "--detach needs a cluster"),
        (["--stop"], "--stop needs a cluster"),
        (["--storage", "x", "--port", "70000"], "port is 70000"),
        (["--storage", "x", "--route-prefix", "results"], "route-prefix is 'results'"),
        (["--storage", "x", "--host", "0.0.0.0"], "set a token first"),
        (["--storage", "x", "--token-file", "nowhere"], "cannot read the token file nowhere"),
        (["--storage", "ftp://x/y"], "no usable URI"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DPFP_TOKEN", raising=False)
    assert main(["serve", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_a_port_that_is_taken_is_named(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--storage", str(tmp_path), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
