"""Tokens: where they come from, what they open, where they never go."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from dpfp_ray.service import digest_of
from dpfp_ray.service.app import is_authorised, session, session_holds
from dpfp_ray.sweeps.cluster import check_listening, not_connected
from dpfp_ray.sweeps.submit import check_http, ray_token, read_token
from dpfp_ray.system.errors import UserError

TOKEN = "0123456789abcdef0123"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DPFP_TOKEN", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_token(None) is None
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("DPFP_TOKEN", "another-token-of-20-letters")
    assert read_token(str(tmp_path / "token")) == TOKEN
    assert read_token(None) == "another-token-of-20-letters"


@pytest.mark.parametrize("content", ["short", "", "with spaces in the middle", "ünïcödé-ünïcödé-x"])
def test_a_bad_token_is_refused_without_being_shown(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(UserError) as caught:
        read_token(str(tmp_path / "token"))
    assert not content or content not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "good"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer {TOKEN}", True),
        (f"Basic {TOKEN}", False),
        (f"Bearer {TOKEN}x", False),
        (f"Bearer {TOKEN[:-1]}", False),
        ("Bearer \udcff", False),
        (None, False),
    ],
)
def test_only_the_right_header_opens(header: str | None, good: bool) -> None:
    assert is_authorised(header, digest_of(TOKEN)) is good


def test_a_session_ends_and_cannot_be_lengthened() -> None:
    key = digest_of(TOKEN)
    cookie = session(key, 1000)
    assert session_holds(cookie, key, 999)
    assert not session_holds(cookie, key, 1000)
    assert not session_holds(cookie.replace("1000", "9000"), key, 999)
    assert not session_holds(cookie, digest_of("another-token"), 999)
    assert TOKEN not in cookie


@pytest.mark.parametrize("cookie", [None, "", ".", "x.y", "٣.x", "1" * 50 + ".x", "9999999999."])
def test_nonsense_is_no_session(cookie: str | None) -> None:
    assert not session_holds(cookie, digest_of(TOKEN), 1.0)


def test_rays_token_from_home_stays_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets its holder run code: it is not sent to whatever address is given."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    assert ray_token("http://127.0.0.1:8265", None) == TOKEN
    assert ray_token("http://head:8265", None) is None
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert ray_token("http://head:8265", None) == TOKEN
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert ray_token("http://127.0.0.1:8265", None) is None


def test_rays_token_may_be_given_as_ray_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert ray_token("http://head:8265", None) == TOKEN
    monkeypatch.setenv("RAY_AUTH_TOKEN", "from-the-environment")
    assert ray_token("http://head:8265", None) == "from-the-environment"


@pytest.mark.parametrize("address", ["head:8265", "ftp://head", "http://", "", "http://["])
def test_an_address_must_be_http(address: str) -> None:
    with pytest.raises(UserError, match="such as http://head:8265"):
        check_http(address)


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(UserError) as caught:
        check_http("http://me:secret@head:8265")
    assert "secret" not in str(caught.value)


@pytest.fixture
def guarded() -> Iterator[str]:
    """What answers as Ray's control service does where tokens are asked for."""

    class Guard(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            given = dict(details.invocation_metadata).get("authorization")

            def answer(request: bytes, context: Any) -> bytes:
                if given != f"Bearer {TOKEN}":
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Guard()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(60)


def test_a_ray_that_asks_for_its_token_is_told_from_one_that_is_not_there(
    guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray itself says only this, after half a minute.
    error = ConnectionError(f"Failed to connect to Ray cluster at {guarded}")
    assert "a token is needed for Ray at auto" in not_connected("auto", error)
    assert not_connected("auto", OSError("no route")) == "cannot reach Ray at auto: no route"
    with pytest.raises(UserError, match=rf"a token is needed for Ray at {guarded}: set RAY_AUTH_"):
        check_listening(guarded)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 32)
    with pytest.raises(UserError, match="a token is not the right one for Ray"):
        check_listening(guarded)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    check_listening(guarded)
