"""The page of a sweep in a real browser: from disk, off line, by keyboard, on a phone, on paper."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest

OVERLAPS = """
[...document.querySelectorAll("svg")].flatMap(svg => {
    const texts = [...svg.querySelectorAll("text")]
    const boxes = texts.map(text => [text, text.getBoundingClientRect()])
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
      Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 &&
      Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3
    ).map(([b, q]) => svg.querySelector("title").textContent + ": " + a.textContent + " / "
      + b.textContent))
  })
"""


@pytest.fixture(scope="module")
def browser(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[chromium.Browser]:
    """A browser, or a skip; with --require chromium a failure."""
    program = chromium.find()
    if program is None:
        missing = f"none of {', '.join(chromium.NAMES)} is installed"
        if "chromium" in request.config.getoption("--require"):
            pytest.fail(missing)
        pytest.skip(missing)
    opened = chromium.Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def _width(browser: chromium.Browser, width: int, mobile: bool) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1,
        mobile=mobile,
    )  # fmt: skip


def test_it_opens_from_disk_without_a_word(browser: chromium.Browser, report: Path) -> None:
    browser.open(report)
    assert browser.said == []
    assert [url for url in browser.asked if url != "data:,"] == [report.as_uri()]
    assert "ficco sweep" in browser.evaluate("document.title")


def test_a_page_that_is_not_sound_would_be_caught(
    browser: chromium.Browser, tmp_path: Path
) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.log("heard")</script>')
    browser.open(page)
    assert any("heard" in text for text in browser.said)
    assert any("127.0.0.1" in url for url in browser.asked)
    assert any("ERR_" in text for text in browser.said)


def test_it_is_used_by_keyboard(browser: chromium.Browser, report: Path) -> None:
    browser.open(report)
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    browser.press("Enter")
    assert browser.evaluate("location.hash") == "#summary"
    for _ in range(60):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    outline = "parseFloat(getComputedStyle(document.activeElement).outlineWidth)"
    assert browser.evaluate(outline) >= 2
    assert browser.evaluate("document.activeElement.parentElement.open") is False
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.parentElement.open") is True


def test_labels_that_overlap_would_be_caught(browser: chromium.Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    texts = '<text x="0" y="20">one</text><text x="8" y="22">two</text><text x="90" y="20">3</text>'
    page.write_text(f"<svg width=200 height=50><title>plot</title>{texts}</svg>")
    browser.open(page)
    assert browser.evaluate(OVERLAPS) == ["plot: one / two"]


@pytest.mark.parametrize(("width", "mobile"), [(1280, False), (390, True)])
def test_it_fits_the_window(
    browser: chromium.Browser, report: Path, width: int, mobile: bool
) -> None:
    _width(browser, width, mobile)
    browser.open(report)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERLAPS) == []
    smallest = "Math.min(...[...document.querySelectorAll('svg text')].map(t => "
    smallest += "t.getBoundingClientRect().height))"
    assert browser.evaluate(smallest) >= 8


def test_it_is_read_out(browser: chromium.Browser, report: Path) -> None:
    browser.open(report)
    nodes = [n for n in browser.call("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        name = node.get("name", {}).get("value", "")
        roles.setdefault(node["role"]["value"], []).append(name)
    assert len(roles["image"]) > 5
    assert all(roles["image"])
    assert all(roles["region"])
    assert len(roles["main"]) == len(roles["navigation"]) == len(roles["banner"]) == 1


def test_it_prints(browser: chromium.Browser, report: Path) -> None:
    browser.open(report)
    browser.call("Emulation.setEmulatedMedia", media="print")
    shown = "[...document.querySelectorAll('details.printed table')].map(t => t.offsetHeight)"
    assert min(browser.evaluate(shown)) > 0
    assert browser.evaluate("document.querySelector('nav').offsetHeight") == 0
    browser.call("Emulation.setEmulatedMedia", media="")
    pdf = base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") >= 3
