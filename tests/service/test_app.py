"""The page and the JSON route over HTTP: what they answer, and what hostile questions get."""

import re
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import requests

from dpfp_ray.results.store import Store
from dpfp_ray.service.app import build_app
from tests.service.conftest import serving
from tests.support.samples import sample

RUN_LINK = re.compile(r'href="(/\?where=[^"]+)"')
# tests/results/test_query.py has more; these must not get past the service.
HOSTILE_WHERE = """__import__('os').system('id')
().__class__.__bases__[0].__subclasses__()
method.__class__ == 1
(lambda: 1)() == 1
id == 9**9**9
'a' * 10**9 == id
id == 1; import os
id ==
nothing == "><script>alert(1)</script>""".splitlines()
HOSTILE_WHERE += ["\x00", "(" * 900 + "id" + ")" * 900, "not " * 400 + "id == 1", "a" * 2001]
BAD = "limit=0 limit=-1 limit=1001 limit=x limit=1.5 limit=101&records=true offset=-1 sort=nothing"
BAD += f" sort=id; wher=id where=id==1&where=id==2 limit={'9' * 50} sort={'id,' * 50}id"


def get(url: str, **question: Any) -> Any:
    """The answer; of a page, that with the report."""
    while "report is being made" in (answer := requests.get(url, question, timeout=120)).text:
        time.sleep(0.1)
    return answer


def heading(page: str) -> str:
    return page.partition("<h1>")[2].partition("</h1>")[0]


def test_rows_are_those_of_dpfp_results_with_the_nominal_mark(url: str, storage: Path) -> None:
    answer = get(f"{url}/api/results", limit=1000).json()
    by_id = {row["id"]: row for row in Store(storage).rows()}
    assert answer["total"] == len(by_id) == len(answer["rows"])
    for row in answer["rows"]:
        expected = by_id[row["id"]]
        assert row == {name: expected.get(name) for name in answer["columns"]}
    assert answer["nominal"] == [row["guarantee"] == "nominal" for row in answer["rows"]]
    assert answer["legend"].startswith("† nominal")


def test_where_sort_limit_and_offset_work_together(url: str) -> None:
    question = {"where": "method == 'dpfp' and accuracy is not None", "sort": "accuracy,id"}
    everything = get(f"{url}/api/results", limit=1000, **question).json()
    scores = [row["accuracy"] for row in everything["rows"]]
    assert scores == sorted(scores, reverse=True)
    part = get(f"{url}/api/results", limit=3, offset=2, **question).json()
    assert part["rows"] == everything["rows"][2:5]
    assert part["total"] == everything["total"] == len(scores)


def test_whole_records_come_when_asked_for(url: str, storage: Path) -> None:
    record = next(r for r in Store(storage).records() if "statement" in r)
    question = {"where": f"id == {record['trial']['id']!r}", "records": "true"}
    assert get(f"{url}/api/results", **question).json()["records"] == [record]
    assert get(f"{url}/api/results").json()["records"] is None


@pytest.mark.parametrize("path", ["/api/results", "/api/version", "/tables/main.csv", "/"])
def test_a_hostile_where_is_a_bad_request_with_a_reason(url: str, path: str) -> None:
    for where in HOSTILE_WHERE:
        answer = get(url + path, where=where)
        assert answer.status_code == 400, where
        assert re.search('id="complaint">.{10}|"error": ".{10}', answer.text), where
        assert path != "/" or "<script>" not in answer.text


@pytest.mark.parametrize("question", BAD.split())
def test_a_bad_parameter_is_a_bad_request_with_a_reason(url: str, question: str) -> None:
    answer = get(f"{url}/api/results?{question}")
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_can_be_changed(url: str, method: str) -> None:
    for path in ("/", "/api/results", "/tables/runs.csv"):
        assert requests.request(method, f"{url}{path}", timeout=120).status_code == 405


def test_openapi_describes_what_is_there(url: str) -> None:
    paths = get(f"{url}/openapi.json").json()["paths"]
    assert set(paths) == {"/api/about", "/api/version", "/api/results"}
    assert all(set(path) == {"get"} for path in paths.values())
    names = {parameter["name"] for parameter in paths["/api/results"]["get"]["parameters"]}
    assert names == {"where", "sort", "limit", "offset", "records"}


@pytest.mark.parametrize("path", ["/", "/api/results", "/nothing", "/static/live.js"])
def test_a_browser_may_load_nothing_from_elsewhere(url: str, path: str) -> None:
    headers = get(f"{url}{path}").headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert not [word for word in ("unsafe", "http") if word in policy]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_the_page_marks_every_nominal_epsilon(url: str) -> None:
    page = get(url, where="guarantee == 'nominal'").text
    body = page.partition('id="runs"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)
    assert len(rows) > 10
    for row in rows:
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        assert all("†" in cells[at] for at in (2, 3, 6) if "—" not in cells[at])
    assert "† nominal ε" in page


def test_a_runs_own_page_has_its_epochs_plan_and_statement(url: str, storage: Path) -> None:
    records = [r for r in Store(storage).records() if r["statement"]]
    record = next(r for r in records if r["privacy"]["guarantee"] == "nominal")
    identity = record["trial"]["id"]
    both = get(url, where=f"id in [{identity!r}, 'refused-1']").text
    page = get(url + unescape(next(a for a in RUN_LINK.findall(both) if identity in a))).text
    epochs = page.partition('id="epochs"')[2].partition("</table>")[0]
    assert epochs.count("<tr>") == 1 + len(record["history"])
    assert f"<dt>epsilon</dt><dd>{record['plan']['epsilon']}†</dd>" in page
    assert "one record&#39;s text" in page


def test_pages_of_long_tables_lead_on(url: str) -> None:
    first = get(url, limit=50, sort="id").text
    (link,) = re.findall(r'href="([^"#]+)#runs">next', first)
    assert "51–86 of 86" in get(url + unescape(link)).text


def test_trials_that_run_come_first_unless_an_order_is_asked_for(tmp_path: Path) -> None:
    with serving(build_app(str(tmp_path / "later"))) as address:
        assert "No records yet" in get(address).text
    for name in ("a", "b", "c"):
        Store(tmp_path).put(sample(name, status="running" if name == "b" else "finished"))
    with serving(build_app(str(tmp_path))) as address:
        for order, first in (({}, "b-0"), ({"sort": "id"}, "a-0")):
            assert re.findall(r'">([abc]-0)</a>', get(address, **order).text)[0] == first
        assert "3 trials, 1 running" in get(address).text


def test_report_and_downloads_follow_the_filter(url: str) -> None:
    assert "Too few seeds" in heading(get(url).text)
    part = get(url, where="epsilon == 3 or epsilon is None").text
    assert "on demo at ε = 3 (PLD)" in heading(part)
    (link,) = re.findall(r'href="([^"]+runs\.csv[^"]*)"', part)
    rows = get(url + unescape(link)).text.splitlines()
    assert {row.split(",")[3] for row in rows[1:]} == {"3.0", ""}
    nobody = get(url, where="epsilon == 77").text
    assert heading(nobody) == "No private run has finished yet."
    assert "No trial matches" in nobody


@pytest.mark.slow
def test_figures_are_pictures_that_run_nothing(url: str) -> None:
    pictures: list[str] = []
    end = time.monotonic() + 120
    while not pictures and time.monotonic() < end:
        pictures = re.findall(r'<img src="([^"]+)"', get(url).text)
        time.sleep(0.1)
    drawn = get(url + unescape(pictures[0]))
    assert drawn.headers["Content-Type"] == "image/svg+xml"
    assert drawn.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src")


def test_hostile_names_stay_text(hostile_storage: Path) -> None:
    with serving(build_app(str(hostile_storage))) as address:
        page = get(address).text
        assert "&lt;script&gt;alert" in page
        links = set(RUN_LINK.findall(page))
        assert len(links) == 7
        for link in links:
            own_page = get(address + unescape(link)).text
            assert "; 1 match" in own_page
            assert "<script>alert" not in page + own_page
