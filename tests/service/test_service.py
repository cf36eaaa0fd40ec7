"""`dpfp-results` on a real Ray Serve, over HTTP and in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dpfp_ray.cli.main import main
from dpfp_ray.results.store import Store
from dpfp_ray.service import SERVICE, deploy
from dpfp_ray.system.errors import UserError
from tests.support.browser import Browser
from tests.support.ports import free_port
from tests.support.samples import comparison, sample, with_statement

COUNT = "document.querySelectorAll('#runs tbody tr').length"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few records: replicas are the lowest of processes, and CI machines are busy."""
    store = Store(folder := tmp_path_factory.mktemp("few"))
    for record in comparison(seeds=1):
        store.put(with_statement(record))
    return folder


@pytest.fixture(scope="module")
def url(ray_session: None, few: Path) -> Iterator[str]:
    from ray import serve

    yield deploy.deploy(str(few), deploy.Place(port=free_port()), None).url
    serve.shutdown()


def test_it_is_listed_under_its_name_and_takes_no_cpu(url: str) -> None:
    import ray
    from ray import serve

    assert serve.status().applications[SERVICE].status == "RUNNING"
    assert requests.get(f"{url}/-/routes", timeout=120).json() == {"/": SERVICE}
    assert requests.get(f"{url}/", timeout=900).headers["X-Frame-Options"] == "DENY"
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


def test_it_listens_on_this_machine_only(url: str, few: Path) -> None:
    import ray

    elsewhere = url.replace("127.0.0.1", ray.util.get_node_ip_address())
    assert elsewhere != url
    with pytest.raises(requests.ConnectionError):
        requests.get(elsewhere, timeout=120)
    with pytest.raises(UserError, match="set a token first"):
        deploy.deploy(str(few), deploy.Place("0.0.0.0", free_port()), None)
    assert deploy.Place().from_elsewhere is None
    assert deploy.Place("0.0.0.0").from_elsewhere == (
        f"http://{ray.util.get_node_ip_address()}:8000"
    )


def test_another_port_than_that_of_a_serve_that_runs_is_not_passed_over_in_silence(
    url: str, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = free_port()
    assert deploy.deploy(str(few), deploy.Place(port=other), None).url == url
    said = capsys.readouterr().err
    assert f"listens at {url.removeprefix('http://')} already" in said
    assert f"for 127.0.0.1:{other} run: serve shutdown -y" in said


def test_dpfp_results_asks_it(url: str, few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--where", "epsilon == 3 and method != 'rgp'", "--sort", "accuracy", "--limit", "7"]
    for form in ([], ["--csv"], ["--json"], ["--columns", "id,epsilon,accuracy"]):
        assert main(["results", str(few), *flags, *form]) == 0
        local = capsys.readouterr()
        assert main(["results", "--address", url, *flags, *form]) == 0
        assert capsys.readouterr() == local
    assert main(["results", "--address", url, "--where", "evil()"]) == 2
    assert "is not allowed; use columns" in capsys.readouterr().err


def test_the_page_loads_in_silence_and_its_figures_come(browser: Browser, url: str) -> None:
    browser.visit(f"{url}/")
    browser.until("document.querySelector('.connection.on') !== null")
    assert browser.run(COUNT) == 7
    browser.until("document.images.length >= 3")
    widths = "Promise.all(Array.from(document.images, i => i.decode().then(() => i.naturalWidth)))"
    assert min(browser.run(widths)) > 200
    assert browser.errors == []
    assert {request.startswith((url, "data:")) for request in browser.requests} == {True}


@pytest.mark.nightly
def test_new_records_appear_and_the_readers_choices_stay(
    browser: Browser, url: str, few: Path
) -> None:
    browser.visit(f"{url}/")
    browser.run("document.querySelector('input[name=where]').focus()")
    browser.type("sweep == 'fresh'")
    browser.press("Enter")
    browser.until(f"location.search.includes('fresh') && {COUNT} == 0")
    browser.run("document.querySelector('input[name=where]').focus()")
    record: dict[str, Any] = sample("newcomer", sweep="fresh", status="running")
    Store(few).put(record)
    browser.until(f"{COUNT} == 1 && document.querySelector('#runs tr.running') !== null")
    browser.until("document.querySelector('.connection').textContent.includes('1 running')")
    assert browser.run("document.activeElement.name") == "where"
    browser.run("document.querySelectorAll('#runs th button')[4].click()")
    browser.run("document.querySelector('[data-part=epochs] details').open = true")
    finished = {**record["trial"], "status": "finished"}
    Store(few).put({**record, "trial": finished, "finished": True})
    browser.until("document.querySelector('#runs tr.running') === null")
    assert browser.run("document.querySelector('#runs th[aria-sort=ascending]') !== null")
    assert browser.run("document.querySelector('[data-part=epochs] details').open")
    assert browser.errors == []
