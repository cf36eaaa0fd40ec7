"""`dpfp-results` on a real Ray Serve, over HTTP and in a real browser."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dpfp_ray.cli.main import main
from dpfp_ray.plan.errors import UserError
from dpfp_ray.results.store import Store
from dpfp_ray.serve import SERVICE, deploy
from dpfp_ray.serve.app import build_app
from tests.serve.conftest import serving
from tests.support.browser import Browser, find_chromium
from tests.support.ports import free_port
from tests.support.ray_runs import wait_for
from tests.support.samples import comparison, sample, with_statement

CHROMIUM = find_chromium()
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; Debian: apt-get install chromium"
)
COUNT = "document.querySelectorAll('#runs tbody tr').length"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few records: replicas are the lowest of processes, and CI machines are busy."""
    folder = tmp_path_factory.mktemp("served")
    store = Store(folder)
    for record in comparison(seeds=1):
        store.put(with_statement(record))
    return folder


@pytest.fixture(scope="module")
def url(ray_session: None, storage: Path) -> Iterator[str]:
    from ray import serve

    place = deploy.deploy(str(storage), deploy.Place(port=free_port()), None)
    yield place.url
    serve.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as started:
        yield started


def visit(browser: Browser, url: str, width: int = 1280, phone: bool = False) -> None:
    browser.events.clear()
    scale = 2 if phone else 1
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=844,
        deviceScaleFactor=scale,
        mobile=phone,
    )
    browser.call("Page.navigate", url=url)
    until(browser, f"document.readyState == 'complete' && location.href == '{url}'")


def until(browser: Browser, condition: str) -> None:
    wait_for(lambda: browser.run(condition), condition)


def test_it_is_listed_under_its_name_and_takes_no_cpu(url: str) -> None:
    from ray import serve

    status = serve.status().applications[SERVICE]
    assert status.status == "RUNNING"
    assert requests.get(f"{url}/-/routes", timeout=120).json() == {"/": SERVICE}
    import ray

    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


def test_api_and_pages_answer_through_serve(url: str, storage: Path) -> None:
    question = {"where": "method == 'dpsgd'", "sort": "accuracy", "limit": 2}
    found = requests.get(f"{url}/api/results", params=question, timeout=900).json()
    assert [row["method"] for row in found["rows"]] == ["dpsgd"] * 2
    assert requests.get(f"{url}/tables/nothing.csv", timeout=120).status_code == 404
    bad = requests.get(f"{url}/api/results", params={"where": "exec('1')"}, timeout=120)
    assert bad.status_code == 400
    assert "a function call" in bad.json()["error"]
    assert "/api/results" in requests.get(f"{url}/openapi.json", timeout=120).json()["paths"]
    assert requests.get(f"{url}/", timeout=120).headers["X-Frame-Options"] == "DENY"


def test_it_listens_on_this_machine_only(url: str) -> None:
    import ray

    elsewhere = url.replace("127.0.0.1", ray.util.get_node_ip_address())
    assert elsewhere != url
    with pytest.raises(requests.ConnectionError):
        requests.get(elsewhere, timeout=120)


def test_a_service_of_all_may_not_lose_its_loopback(url: str, storage: Path) -> None:
    with pytest.raises(UserError, match="set a token first"):
        deploy.deploy(str(storage), deploy.Place("0.0.0.0", free_port()), None)


def test_dpfp_results_asks_it(url: str, storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--where", "epsilon == 3 and method != 'rgp'", "--sort", "accuracy", "--limit", "7"]
    for form in ([], ["--csv"], ["--json"], ["--columns", "id,epsilon,accuracy"]):
        assert main(["results", str(storage), *flags, *form]) == 0
        local = capsys.readouterr()
        assert main(["results", "--address", url, *flags, *form]) == 0
        assert capsys.readouterr() == local


def test_dpfp_results_shows_the_services_reason(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["results", "--address", url, "--where", "evil()"]) == 2
    assert "is a function call, which is not allowed" in capsys.readouterr().err


@in_browser
def test_the_page_loads_in_silence_and_only_from_here(browser: Browser, url: str) -> None:
    visit(browser, f"{url}/")
    until(browser, "document.querySelector('.connection.on') !== null")
    assert browser.errors == []
    assert {request.startswith((url, "data:")) for request in browser.requests} == {True}
    assert browser.run(COUNT) == 7


@in_browser
def test_a_press_on_a_head_sorts_and_a_question_filters(browser: Browser, url: str) -> None:
    visit(browser, f"{url}/")
    browser.run("document.querySelectorAll('#runs th button')[4].click()")
    assert browser.run("document.querySelector('th[aria-sort=ascending]').textContent") == (
        "Accuracy (%)"
    )
    browser.run("document.querySelector('input[name=where]').focus()")
    browser.type("method == 'rgp'")
    browser.press("Enter")
    until(browser, f"location.search.includes('rgp') && {COUNT} == 2")


@in_browser
def test_figures_come_without_a_press(browser: Browser, url: str) -> None:
    visit(browser, f"{url}/")
    until(browser, "document.images.length >= 3")
    widths = browser.run(
        "Promise.all(Array.from(document.images, i => i.decode().then(() => i.naturalWidth)))"
    )
    assert min(widths) > 200


@in_browser
def test_new_records_appear_and_what_the_reader_did_stays(
    browser: Browser, url: str, storage: Path
) -> None:
    visit(browser, f"{url}/?where=sweep+%3D%3D+%27fresh%27")
    assert browser.run(COUNT) == 0
    browser.run("document.querySelector('input[name=where]').focus()")
    store = Store(storage)
    record: dict[str, Any] = sample("newcomer", sweep="fresh", status="running")
    store.put(record)
    until(browser, f"{COUNT} == 1 && document.querySelector('#runs tr.running') !== null")
    until(browser, "document.querySelector('.connection').textContent.includes('1 running')")
    assert browser.run("document.activeElement.name") == "where"
    browser.run("document.querySelectorAll('#runs th button')[4].click()")
    browser.run("document.querySelector('[data-part=epochs] details').open = true")
    store.put({**record, "trial": {**record["trial"], "status": "finished"}, "finished": True})
    until(browser, "document.querySelector('#runs tr.running') === null")
    assert browser.run("document.querySelector('#runs th[aria-sort=ascending]') !== null")
    assert browser.run("document.querySelector('[data-part=epochs] details').open")
    assert browser.errors == []


@in_browser
@pytest.mark.parametrize(("width", "phone"), [(390, True), (1280, False)])
def test_no_page_scrolls_sideways(browser: Browser, url: str, width: int, phone: bool) -> None:
    for path in ("/", "/?where=id%20==%20%27demo-dpfp-3.0--0%27"):
        visit(browser, f"{url}{path}", width, phone)
        time.sleep(0.2)
        assert browser.run("document.documentElement.scrollWidth") <= width


@in_browser
def test_hostile_names_run_nothing(browser: Browser, hostile_storage: Path) -> None:
    with serving(build_app(str(hostile_storage))) as place:
        visit(browser, f"{place}/")
        assert browser.run(COUNT) == 7
        link = browser.run("document.querySelector('#runs td a').href")
        for page in (f"{place}/", link):
            visit(browser, page)
            assert browser.run("document.scripts.length") == 2
            assert browser.run("document.querySelector('h1').textContent.length") > 5
            assert browser.errors == []
