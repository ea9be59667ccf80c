"""The page in a real headless Chromium: opened, read with mouse, keyboard and finger, printed."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import PROGRAM, Chromium
from report_runs import write

from windlass.observe import report

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (apt-get install chromium)"),
    pytest.mark.xdist_group("chromium"),
]

# Share of a figure's canvas that is drawn on.
INK = """(figure) => {
  const canvas = figure.querySelector('canvas'), paper = canvas.getContext('2d');
  const pixels = paper.getImageData(0, 0, canvas.width, canvas.height).data;
  let drawn = 0;
  for (let i = 3; i < pixels.length; i += 4) if (pixels[i]) drawn++;
  return drawn / (pixels.length / 4);
}"""
SHIFT = """new Promise(done => {
  let sum = 0;
  new PerformanceObserver(list => list.getEntries().forEach(entry => sum += entry.value))
    .observe({type: 'layout-shift', buffered: true});
  setTimeout(() => done(sum), 250);
})"""
FIGURE = "document.querySelector('figure[data-chart=\"r0-loss\"]')"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    folders = {
        "usual": write(root / "usual"),
        "short": write(root / "short", ranks=1, count=3, gpu=False, stages=False),
        "one": write(root / "one", ranks=1, count=1, gpu=False, stages=False),
        "wide": write(root / "wide", ranks=64, count=30),
        "evil": write(root / "<img src=x onerror=window.pwned=1>", ranks=2, count=30),
    }
    made = {name: report.make([folder]).html for name, folder in folders.items()}
    made["two"] = report.make([folders["usual"], folders["short"]], root / "two").html
    return made


@pytest.fixture
def opened(chromium: Any, pages: dict[str, Path]) -> Any:
    chromium.size(1200, 900)
    chromium.open(pages["usual"])
    return chromium


def test_everything_is_drawn_and_nothing_complains(chromium: Any, pages: dict[str, Path]) -> None:
    chromium.size(1200, 900)
    for name, page in pages.items():
        chromium.open(page)
        assert chromium.errors == [], name
        fetched = [url for url in chromium.requests if not url.startswith("data:")]
        assert fetched == [page.resolve().as_uri()], "nothing but the page itself"
        chromium.run("document.querySelectorAll('details.one').forEach(each => each.open = true)")
        chromium.run("new Promise(done => setTimeout(done, 150))")
        drawn = chromium.run(f"[...document.querySelectorAll('figure[data-chart]')].map({INK})")
        assert len(drawn) >= 6, name
        assert min(drawn) > 0.002, name
        assert chromium.run("document.documentElement.scrollWidth") == 1200, name
    assert chromium.run("window.pwned === undefined")


@pytest.mark.parametrize("name", ["usual", "short", "wide", "two"])
@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_moves_after_it_was_painted(name: str, width: int, chromium: Any, pages: dict[str, Path]) -> None:
    chromium.size(width, 900, phone=width < 600)
    chromium.open(pages[name])
    assert chromium.run(SHIFT) < 0.001
    assert chromium.run("document.documentElement.scrollWidth") == width


def test_a_series_is_switched_off_and_on(opened: Any) -> None:
    key = f"{FIGURE}.querySelectorAll('.keys button')[1]"
    frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    before = opened.run(f"({INK})({FIGURE})")
    opened.run(f"{key}.click()")
    opened.run(frame)
    assert opened.run(f"{key}.getAttribute('aria-pressed')") == "false"
    assert opened.run(f"({INK})({FIGURE})") < before
    opened.run(f"{key}.click()")
    opened.run(frame)
    assert opened.run(f"{key}.getAttribute('aria-pressed')") == "true"
    assert opened.run(f"({INK})({FIGURE})") == before


def test_a_stacked_phase_is_taken_out_of_the_stack(opened: Any) -> None:
    figure = "document.querySelector('figure[data-chart=\"r0-time\"]')"
    before = opened.run(f"({INK})({figure})")
    opened.run(f"{figure}.querySelectorAll('.keys button')[2].click()")
    opened.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert opened.run(f"({INK})({figure})") < before


def test_values_under_the_mouse(opened: Any) -> None:
    box = opened.run(f"{FIGURE}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    opened.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + 20)
    opened.run("new Promise(done => setTimeout(done, 100))")
    assert re.fullmatch(r"step (199|200|201|202)", opened.run(f"{FIGURE}.querySelector('.at').textContent"))
    values = opened.run(f"[...{FIGURE}.querySelectorAll('.keys output')].map(each => each.textContent)")
    assert all(re.fullmatch(r"\d\.\d+|–", value) for value in values)
    # The other charts show the same step.
    other = "document.querySelector('figure[data-chart=\"r0-rate\"] .at').textContent"
    assert opened.run(other).startswith("step ")


def test_zoom_by_dragging_and_back(opened: Any) -> None:
    reset = "document.getElementById('reset').disabled"
    before = opened.run(f"({INK})({FIGURE})")
    assert opened.run(reset) is True
    box = opened.run(f"{FIGURE}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    middle = box["y"] + 60
    opened.mouse("mousePressed", box["x"] + 0.3 * box["width"], middle)
    for share in (0.35, 0.45, 0.5):
        opened.mouse("mouseMoved", box["x"] + share * box["width"], middle)
    opened.mouse("mouseReleased", box["x"] + 0.5 * box["width"], middle)
    opened.run("new Promise(done => setTimeout(done, 100))")
    assert opened.run(reset) is False
    assert opened.run(f"({INK})({FIGURE})") != before
    opened.run("document.getElementById('reset').click()")
    opened.run("new Promise(done => setTimeout(done, 100))")
    assert opened.run(reset) is True
    assert opened.run(f"({INK})({FIGURE})") == before


def test_keyboard_alone(opened: Any) -> None:
    """Every curve and every key can be reached; arrows read, + zooms, 0 resets."""
    reachable = opened.run("[...document.querySelectorAll('.plot')].every(each => each.tabIndex === 0)")
    assert reachable
    opened.run(f"{FIGURE}.querySelector('.plot').focus()")
    opened.press("ArrowLeft")
    opened.press("ArrowLeft")
    assert opened.run(f"{FIGURE}.querySelector('.at').textContent") == "step 398"
    opened.press("+")
    opened.run("new Promise(done => setTimeout(done, 50))")
    assert opened.run("document.getElementById('reset').disabled") is False
    opened.press("0")
    opened.run("new Promise(done => setTimeout(done, 50))")
    assert opened.run("document.getElementById('reset').disabled") is True


def test_dark_and_light(chromium: Any, pages: dict[str, Path]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    chromium.size(1200, 900, dark=True)
    chromium.open(pages["usual"])
    dark = chromium.run(background)
    chromium.run("document.getElementById('scheme').click()")
    light = chromium.run(background)
    assert sum(map(int, re.findall(r"\d+", dark))) < 120
    assert sum(map(int, re.findall(r"\d+", light))) > 700
    assert chromium.errors == []


def test_it_prints(opened: Any) -> None:
    printed = base64.b64decode(opened.send("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000


def test_without_scripts_the_figures_are_there(chromium: Any, pages: dict[str, Path]) -> None:
    chromium.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.send("Page.navigate", url=pages["usual"].resolve().as_uri())
    finally:
        chromium.send("Emulation.setScriptExecutionDisabled", value=False)
    chromium.run("new Promise(done => setTimeout(done, 100))")
    shown = chromium.run("document.body.innerText")
    for wanted in ("Planned and measured", "waiting for ranks", "gradient-norm spike", "node-2"):
        assert wanted in shown
