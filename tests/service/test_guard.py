"""Who may read: this machine, or whoever has the token, by header or by cookie."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from dpfp_ray.service import digest_of
from dpfp_ray.service.app import build_app, session
from dpfp_ray.service.deploy import check_exposure
from dpfp_ray.sweeps.submit import header as bearer
from dpfp_ray.system.errors import UserError
from tests.service.conftest import serving

TOKEN = "a-token-for-tests-0123456789"
PATHS = ["/", "/api/results", "/api/version", "/tables/runs.csv", "/openapi.json"]
PATHS += ["/figures/epsilon-1.svg"]
FOREIGN = "evil.example 127.0.0.1.evil.example [ localhost.evil.example:80 evil.com@localhost"


@pytest.fixture(scope="module")
def closed(storage: Path) -> Iterator[str]:
    with serving(build_app(str(storage), digest_of(TOKEN))) as address:
        yield address


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("header", [None, "Bearer wrong-token-0123456789", f"Basic {TOKEN}"])
def test_without_the_token_there_is_nothing(closed: str, path: str, header: str | None) -> None:
    headers = {"Authorization": header} if header else {}
    answer = requests.get(f"{closed}{path}?token={TOKEN}", headers=headers, timeout=120)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert "refused-1" not in answer.text


def test_the_header_opens_and_the_services_name_is_no_secret(closed: str) -> None:
    headers = bearer(TOKEN)
    answer = requests.get(f"{closed}/api/results", headers=headers, timeout=120)
    assert answer.json()["total"] == 86
    assert requests.get(f"{closed}/api/about", timeout=120).json()["service"] == "dpfp-results"


def test_a_browser_is_asked_for_the_token_and_gets_a_cookie_that_is_not_it(closed: str) -> None:
    with requests.Session() as browser:
        browser.headers["Accept"] = "text/html"
        form = browser.get(f"{closed}/", timeout=120)
        assert form.url == f"{closed}/login"
        assert 'type="password"' in form.text
        wrong = browser.post(f"{closed}/login", {"token": "wrong"}, timeout=120)
        assert wrong.status_code == 401
        inside = browser.post(f"{closed}/login", {"token": TOKEN}, timeout=120)
        assert inside.url == f"{closed}/"
        assert "Every run" in inside.text
        (cookie,) = browser.cookies
        assert TOKEN not in str(cookie.value)
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert cookie.get_nonstandard_attr("SameSite") == "strict"


def test_a_forged_cookie_opens_nothing_and_a_long_form_is_refused(closed: str) -> None:
    other = session(digest_of("other"), 9_999_999_999)
    for value in ("9999999999.00", other, "x"):
        answer = requests.get(f"{closed}/api/results", cookies={"dpfp_session": value}, timeout=120)
        assert answer.status_code == 401
    answer = requests.post(f"{closed}/login", data={"token": "x" * 100_000}, timeout=120)
    assert answer.status_code == 400


@pytest.mark.parametrize("host", ["", "localhost#evil", "localhost/evil", *FOREIGN.split()])
def test_a_foreign_name_for_this_machine_gets_nothing(url: str, host: str) -> None:
    """DNS rebinding: a hostile page points its own name here."""
    for path in ("/", "/api/results"):
        answer = requests.get(url + path, headers={"Host": host}, timeout=120)
        assert answer.status_code in (400, 403)
        assert b"refused-1" not in answer.content


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "head"])
def test_others_are_let_in_only_with_a_token(host: str) -> None:
    with pytest.raises(UserError, match="set a token first"):
        check_exposure(host, None)
    check_exposure(host, digest_of(TOKEN))
