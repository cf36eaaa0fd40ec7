"""The JSON API and the pages over HTTP: what they answer, and what hostile questions get."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests

from dpfp_ray.results.store import Store
from dpfp_ray.serve import snapshot
from dpfp_ray.serve.app import build_app
from dpfp_ray.serve.client import ask_service
from dpfp_ray.serve.figures import Figures
from dpfp_ray.serve.snapshot import CachedStore, LiveRecords
from tests.serve.conftest import serving
from tests.support.samples import HOSTILE

HTML = {"Accept": "text/html"}


@pytest.fixture(scope="module")
def url(storage: Path) -> Iterator[str]:
    with serving(build_app(str(storage))) as address:
        yield address


@pytest.fixture(scope="module")
def hostile_url(hostile_storage: Path) -> Iterator[str]:
    with serving(build_app(str(hostile_storage))) as address:
        yield address


def get(url: str, **question: Any) -> Any:
    return requests.get(url, params=question, timeout=120)


def test_rows_are_those_of_dpfp_results(url: str, storage: Path) -> None:
    found = get(f"{url}/api/results", limit=1000).json()
    rows = Store(storage).rows()
    assert found["total"] == len(rows) == len(found["rows"])
    by_id = {row["id"]: row for row in rows}
    for row in found["rows"]:
        assert {k: v for k, v in row.items() if v is not None} == {
            k: v for k, v in by_id[row["id"]].items() if v is not None
        }


def test_where_sort_limit_and_offset_work_together(url: str) -> None:
    question = {"where": "method == 'dpfp' and accuracy is not None", "sort": "accuracy,id"}
    everything = get(f"{url}/api/results", limit=1000, **question).json()
    scores = [row["accuracy"] for row in everything["rows"]]
    assert scores == sorted(scores, reverse=True)
    part = get(f"{url}/api/results", limit=3, offset=2, **question).json()
    assert part["rows"] == everything["rows"][2:5]
    assert part["total"] == everything["total"] == len(scores)


def test_nominal_rows_are_told_apart_and_the_mark_is_explained(url: str) -> None:
    found = get(f"{url}/api/results", limit=1000).json()
    assert found["nominal"] == [row["guarantee"] == "nominal" for row in found["rows"]]
    assert any(found["nominal"])
    assert not all(found["nominal"])
    assert found["legend"].startswith("† nominal")


HOSTILE_WHERE = [
    "__import__('os').system('id')",
    "().__class__.__bases__[0].__subclasses__()",
    "open('/etc/passwd')",
    "method.__class__ == 1",
    "[x for x in method]",
    "(lambda: 1)() == 1",
    "id == 9**9**9",
    "'a' * 10**9 == id",
    "(" * 900 + "id" + ")" * 900,
    "not " * 400 + "id == 1",
    "-" * 1500 + "1 == id",
    "id == 1; import os",
    "id == '" + "a" * 2000 + "'",
    "f'{id}' == 1",
    "\x00",
    "id ==",
    "id",
    "nothing == 1",
    "id = 'x'",
]


@pytest.mark.parametrize("where", HOSTILE_WHERE)
def test_a_hostile_where_is_a_bad_request_with_a_reason(url: str, where: str) -> None:
    answer = get(f"{url}/api/results", where=where)
    assert answer.status_code == 400
    assert len(answer.json()["error"]) > 10


@pytest.mark.parametrize(
    "question",
    [
        {"limit": "0"},
        {"limit": "-1"},
        {"limit": "1001"},
        {"limit": "9" * 50},
        {"limit": "x"},
        {"limit": "1.5"},
        {"offset": "-1"},
        {"offset": "9" * 30},
        {"sort": "nothing"},
        {"sort": "id;"},
        {"sort": ",".join(["id"] * 50)},
        {"wher": "id == 1"},
        {"where": ["id == 'a'", "id == 'b'"]},
    ],
)
def test_a_bad_parameter_is_a_bad_request_with_a_reason(url: str, question: Any) -> None:
    answer = requests.get(f"{url}/api/results", params=question, timeout=120)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_trial_is_its_whole_record(url: str, storage: Path) -> None:
    record = next(r for r in Store(storage).records() if "statement" in r)
    found = get(f"{url}/api/trials/{record['trial']['id']}").json()
    assert found["record"] == record


def test_a_statement_comes_as_facts_and_as_text(url: str, storage: Path) -> None:
    record = next(
        r
        for r in Store(storage).records()
        if "statement" in r and r["privacy"]["guarantee"] == "nominal"
    )
    found = get(f"{url}/api/statement/{record['trial']['id']}").json()
    assert found["statement"] == record["statement"]
    assert found["nominal"] is True
    assert found["legend"].startswith("†")
    assert "one record's text" in found["text"]


@pytest.mark.parametrize("kind", ["trials", "statement"])
def test_an_unknown_trial_is_not_found(url: str, kind: str) -> None:
    for identity in ("nothing", "..%2F..%2Fetc%2Fpasswd", quote(HOSTILE, safe="")):
        answer = get(f"{url}/api/{kind}/{identity}")
        assert answer.status_code == 404
        assert "there is no trial" in answer.json()["error"]


def test_a_trial_without_a_statement_says_so(url: str) -> None:
    answer = get(f"{url}/api/statement/refused-1")
    assert answer.status_code == 404
    assert "no privacy statement" in answer.json()["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_can_be_changed(url: str, method: str) -> None:
    for path in ("/", "/api/results", "/api/trials/refused-1", "/trials/refused-1"):
        assert requests.request(method, f"{url}{path}", timeout=120).status_code == 405


def test_openapi_describes_what_is_there(url: str) -> None:
    described = get(f"{url}/openapi.json").json()
    paths = {"/api/results", "/api/trials/{trial_id}", "/api/statement/{trial_id}"}
    assert paths <= set(described["paths"])
    assert all(set(path) == {"get"} for path in described["paths"].values())
    results = described["paths"]["/api/results"]["get"]
    assert {p["name"] for p in results["parameters"]} == {"where", "sort", "limit", "offset"}
    assert "400" in results["responses"]


def test_who_has_this_version_is_not_sent_it_again(url: str) -> None:
    first = get(f"{url}/api/results", limit=1)
    again = requests.get(
        f"{url}/api/results?limit=1", headers={"If-None-Match": first.headers["ETag"]}, timeout=120
    )
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/", "/api/results", "/nothing", "/trials/refused-1"])
def test_a_browser_may_load_nothing_from_elsewhere(url: str, path: str) -> None:
    headers = requests.get(f"{url}{path}", headers=HTML, timeout=120).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_a_foreign_name_for_this_machine_gets_nothing(url: str) -> None:
    """DNS rebinding: a hostile page points its own name here."""
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "",
        "[",
        "localhost.evil.example:80",
        "evil.com@localhost",
        "localhost#evil",
        "localhost/evil",
    ):
        answer = requests.get(f"{url}/api/results", headers={"Host": host}, timeout=120)
        assert answer.status_code in (400, 403)
        assert b"rows" not in answer.content


def test_the_page_marks_every_nominal_epsilon(url: str) -> None:
    page = requests.get(f"{url}/", params={"where": "guarantee == 'nominal'"}, timeout=120).text
    body = page.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)
    assert len(rows) > 10
    for row in rows:
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        assert all("†" in cells[at] for at in (0, 1, 5) if "—" not in cells[at])
    assert "† nominal ε" in page


def test_a_bad_question_on_the_page_shows_the_reason_and_keeps_the_question(url: str) -> None:
    answer = requests.get(f"{url}/", params={"where": "evil() <script>"}, timeout=120)
    assert answer.status_code == 400
    assert "cannot be read at" in answer.text
    assert 'value="evil() &lt;script&gt;"' in answer.text
    assert "<script>" not in answer.text


def test_a_list_of_the_page_narrows_the_table(url: str) -> None:
    page = requests.get(f"{url}/", params={"method": "rgp", "where": "epsilon == 3"}, timeout=120)
    assert "RGP" in page.text
    assert page.text.count("<tr>") == 1 + 2  # the head, two seeds


def test_a_trials_page_has_plan_ledger_statement_and_curves(url: str, storage: Path) -> None:
    record = next(
        r
        for r in Store(storage).records()
        if "statement" in r and r["privacy"]["guarantee"] == "nominal"
    )
    place = f"{url}/trials/{record['trial']['id']}"
    page = requests.get(place, timeout=120).text
    assert "one record&#39;s text" in page
    assert "learning_rate" in page
    assert page.count("<tr>") == 1 + len(record["history"])
    assert f"{record['plan']['epsilon']:g}†" in page
    (picture,) = re.findall(r'src="([^"]+curves.svg[^"]*)"', page)
    drawn = requests.get(f"{url}{picture}", timeout=900)
    assert drawn.headers["Content-Type"] == "image/svg+xml"
    assert b"DP-FP" in drawn.content
    assert "default-src 'none'" in drawn.headers["Content-Security-Policy"]


def test_pages_of_long_tables_lead_on(url: str) -> None:
    first = requests.get(f"{url}/", params={"limit": 50, "sort": "id"}, timeout=120).text
    (link,) = re.findall(r'href="([^"]+)">next', first)
    second = requests.get(url + link.replace("&amp;", "&"), timeout=120).text
    assert "51–86 of 86" in second


def test_hostile_names_stay_text(hostile_url: str) -> None:
    page = requests.get(f"{hostile_url}/", timeout=120).text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    for link in re.findall(r'href="([^"]*/trials/[^"]+)"', page):
        answer = requests.get(hostile_url + link, headers=HTML, timeout=120)
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text


def test_a_hostile_id_can_be_asked_for(hostile_url: str) -> None:
    row = get(f"{hostile_url}/api/results", limit=1).json()["rows"][0]
    found = get(f"{hostile_url}/api/trials/{quote(row['id'], safe='')}")
    assert found.json()["id"] == row["id"]


def test_an_empty_folder_is_a_page_too(tmp_path: Path) -> None:
    with serving(build_app(str(tmp_path / "later"))) as address:
        page = requests.get(f"{address}/", timeout=120)
        assert page.status_code == 200
        assert "No records yet" in page.text
        assert get(f"{address}/api/results").json()["total"] == 0


def heading(page: str) -> str:
    found = re.search(r"<h1>(.*?)</h1>", page, re.S)
    assert found
    return found.group(1)


def test_headline_and_cards_follow_the_filter(url: str) -> None:
    everything = requests.get(url, headers=HTML, timeout=120).text
    assert "2 comparisons" in heading(everything)
    assert everything.count('<article class="card') == 2
    question = {"where": "epsilon == 3 or epsilon is None"}
    part = requests.get(url, params=question, headers=HTML, timeout=120).text
    assert "at ε = 3 (PLD) on demo" in heading(part)
    assert part.count('<article class="card') == 1
    assert "headline, cards and figures follow the filter" in part
    nobody = requests.get(url, params={"where": "epsilon == 77"}, headers=HTML, timeout=120).text
    assert heading(nobody) == "No finished trial yet"


@pytest.mark.slow
def test_figures_are_those_of_the_runs_that_are_shown(storage: Path) -> None:
    now = LiveRecords(str(storage)).now()
    part = now.only([run for run in now.runs if run.row["task"] == "demo"])
    figures = Figures("dpfp serve")
    assert figures.key(now) != figures.key(part)
    assert figures.now(part) == []
    for _ in range(600):
        if not figures.busy:
            break
        time.sleep(0.1)
    drawn = figures.now(part)
    assert {drawing.name for drawing in drawn} >= {"epsilon-1", "differences-1"}
    assert not any("SST-2" in drawing.title for drawing in drawn)
    assert figures.find("epsilon-1", figures.key(part)) in drawn
    assert figures.now(now, everything=True) == [], "a filter's figures are not those of all"


def test_a_service_that_has_read_nothing_yet_says_so(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, look = threading.Event(), CachedStore.look

    def slow(store: CachedStore) -> Any:
        assert may_read.wait(60)
        return look(store)

    monkeypatch.setattr(snapshot, "LARGE", 3)
    monkeypatch.setattr(snapshot, "FIRST", 0.01)
    monkeypatch.setattr(CachedStore, "look", slow)
    with serving(build_app(str(storage))) as address:
        assert get(f"{address}/api/results").json()["status"] == "loading"
        assert get(f"{address}/api/version").json()["status"] == "loading"
        assert "still being read" in get(f"{address}/api/trials/refused-1").json()["error"]
        assert "still being read" in get(address).text
        threading.Timer(0.5, may_read.set).start()
        assert ask_service(address).total > 0
        assert get(f"{address}/api/results").json()["status"] == "ready"
