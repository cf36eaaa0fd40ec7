"""The page in a real browser: it loads in silence, tables sort and filter, figures are there."""

from pathlib import Path

import pytest

from tests.support.browser import Browser

COLUMN = """Array.from(document.querySelectorAll('#runs tbody tr:not([hidden])'),
    row => row.cells[{at}].textContent.trim())"""


@pytest.fixture
def page(browser: Browser, folder: Path) -> Browser:
    browser.open(folder / "index.html")
    browser.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    return browser


def test_it_loads_without_a_word_on_the_console_and_without_a_network(page: Browser) -> None:
    assert page.errors == []
    loaded = [url for url in page.requests if not url.startswith("data:")]
    assert len(loaded) == 1
    assert loaded[0].startswith("file:")


def test_a_column_sorts_by_number_and_missing_values_stay_last(page: Browser) -> None:
    button = "document.querySelectorAll('#runs thead th button')[4]"
    before = page.run(COLUMN.format(at=4))
    assert page.run(f"{button}.textContent") == "Accuracy (%)"
    page.run(f"{button}.click()")
    assert page.run(f"{button}.parentElement.getAttribute('aria-sort')") == "ascending"
    rising = page.run(COLUMN.format(at=4))
    numbers = [float(cell) for cell in rising if cell != "—"]
    assert numbers == sorted(numbers)
    assert rising[-2:] == ["—", "—"]
    page.run(f"{button}.click()")
    falling = page.run(COLUMN.format(at=4))
    assert [float(cell) for cell in falling if cell != "—"] == numbers[::-1]
    assert falling[-2:] == ["—", "—"]
    page.run(f"{button}.click()")
    assert page.run(f"{button}.parentElement.getAttribute('aria-sort')") is None
    assert page.run(COLUMN.format(at=4)) == before


def test_the_keyboard_is_enough(page: Browser) -> None:
    page.run("document.querySelector('#runs thead th button').focus()")
    page.press("Tab")
    assert page.run("document.activeElement.textContent") == "Task"
    page.press("Enter")
    assert page.run("document.activeElement.parentElement.getAttribute('aria-sort')") == "ascending"


def test_a_filter_hides_rows_and_counts_them(page: Browser) -> None:
    total = len(page.run(COLUMN.format(at=2)))
    page.run("document.querySelector('#runs input').focus()")
    page.type("rgp demo")
    assert set(page.run(COLUMN.format(at=2))) == {"RGP"}
    shown = len(page.run(COLUMN.format(at=2)))
    assert 0 < shown < total
    assert page.run("document.querySelector('#runs [role=status]').textContent") == (
        f"{shown} of {total} rows"
    )


def test_figures_are_visible(page: Browser) -> None:
    widths = page.run(
        "Promise.all(Array.from(document.images, i => i.decode().then(() =>"
        " Math.min(i.naturalWidth, i.getBoundingClientRect().width))))"
    )
    assert len(widths) >= 7
    assert min(widths) > 200


@pytest.mark.parametrize(("width", "phone"), [(390, True), (1280, False)])
def test_the_page_never_scrolls_sideways(
    browser: Browser, folder: Path, hostile: Path, width: int, phone: bool
) -> None:
    for place in (folder, hostile):
        browser.open(place / "index.html", width=width, height=844, phone=phone)
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_the_answer_is_on_the_first_screen_of_a_phone(browser: Browser, folder: Path) -> None:
    browser.open(folder / "index.html", width=390, height=844, phone=True)
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    assert browser.run(bottom.format("h1")) < 300
    assert browser.run(bottom.format("#overview tbody tr")) < 844


def test_hostile_names_run_nothing(browser: Browser, hostile: Path) -> None:
    browser.open(hostile / "index.html")
    assert browser.errors == []
    assert browser.run("document.scripts.length") == 1
    assert browser.run("document.querySelectorAll('#runs tbody tr').length") == 7


@pytest.mark.slow
def test_it_prints(page: Browser, tmp_path: Path) -> None:
    page.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
