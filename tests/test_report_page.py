"""The page in a real headless Chromium: opened, read with mouse, keyboard and touch, printed."""

import base64
import contextlib
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PROGRAM, Chromium
from report_runs import write, write_lines

from windlass import cli, tiny
from windlass.observe import report

pytestmark = [
    pytest.mark.long,
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
# Tables that reach beyond the right edge, or hide a part of themselves in a box that scrolls.
CUT = """[...document.querySelectorAll('table')].filter(table => {
  const box = table.parentElement;
  return table.getBoundingClientRect().right > innerWidth + 1 || box.scrollWidth > box.clientWidth;
}).map(table => table.innerText.slice(0, 80))"""
LOSS = "document.querySelector('figure[data-chart=\"r0-loss\"]')"
TIME = "document.querySelector('figure[data-chart=\"r0-time\"]')"
RESET = "document.getElementById('reset').disabled"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    folders = {
        "usual": write(root / "usual"),
        "one": write(root / "one", ranks=1, count=1, gpu=False, stages=False),
        "wide": write(root / "wide", ranks=64, count=30),
        "evil": write(root / "<img src=x onerror=window.pwned=1>", ranks=2, count=30),
    }
    made = {name: report.make_report([folder]).html for name, folder in folders.items()}
    made["two"] = report.make_report([folders["usual"], folders["one"]], root / "two").html
    return made


@pytest.fixture
def opened(chromium: Chromium, pages: dict[str, Path]) -> Chromium:
    chromium.size(1200, 900)
    chromium.open(pages["usual"])
    return chromium


def settle(page: Chromium) -> None:
    page.run("new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 50))")


def ink(page: Chromium, figure: str) -> float:
    settle(page)
    return float(page.run(f"({INK})({figure})"))


def test_everything_is_drawn_and_nothing_complains(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.size(1200, 900)
    for name, page in pages.items():
        chromium.open(page)
        assert chromium.errors == [], name
        fetched = [url for url in chromium.requests if not url.startswith("data:")]
        assert fetched == [page.resolve().as_uri()], "nothing but the page itself"
        chromium.run("document.querySelectorAll('details.one').forEach(each => each.open = true)")
        settle(chromium)
        drawn = chromium.run(f"[...document.querySelectorAll('figure[data-chart]')].map({INK})")
        assert len(drawn) >= 6, name
        assert min(drawn) > 0.002, name
    assert chromium.run("window.pwned === undefined")


@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_moves_or_is_cut(width: int, chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.size(width, 900, phone=width < 600)
    for name in ("usual", "wide", "two"):
        chromium.open(pages[name])
        assert chromium.run(SHIFT) < 0.001
        chromium.run("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert chromium.run("document.documentElement.scrollWidth") == width
        assert chromium.run(CUT) == [], name


def test_curves_can_be_toggled(opened: Chromium) -> None:
    key = f"{LOSS}.querySelectorAll('.keys button')[1]"
    before = ink(opened, LOSS)
    opened.run(f"{key}.click()")
    assert ink(opened, LOSS) < before
    assert opened.run(f"{key}.getAttribute('aria-pressed')") == "false"
    opened.run(f"{key}.click()")
    assert ink(opened, LOSS) == before
    assert opened.run(f"{key}.getAttribute('aria-pressed')") == "true"
    stacked = ink(opened, TIME)
    opened.run(f"{TIME}.querySelectorAll('.keys button')[2].click()")
    assert ink(opened, TIME) < stacked, "a phase is taken out of the stack"


def test_log_scale(opened: Chromium) -> None:
    """The curve and its axis change, values don't; a second press restores the first picture."""
    rate = "document.querySelector('figure[data-chart=\"r0-rate\"]')"
    before, other = ink(opened, LOSS), ink(opened, rate)
    opened.run("document.getElementById('log').click()")
    assert ink(opened, LOSS) != before
    assert ink(opened, rate) == other, "tokens per second keep their scale"
    opened.run(f"{LOSS}.querySelector('.plot').focus()")
    opened.press("ArrowLeft")
    assert float(opened.run(f"{LOSS}.querySelector('.keys output').textContent")) > 0.5
    opened.press("Escape")
    opened.run("document.getElementById('log').click()")
    settle(opened)
    assert opened.run("document.getElementById('log').getAttribute('aria-pressed')") == "false"


def test_smoothing_and_what_the_curves_are_drawn_over(chromium: Chromium, pages: dict[str, Path]) -> None:
    """By keyboard, in every colour scheme, for one run and for several."""
    at = "document.querySelector('figure[data-chart$=-loss] .at').textContent"
    drawn = "document.querySelector('figure[data-chart$=-loss]')"
    for name, dark in (("usual", False), ("two", True)):
        chromium.size(1200, 900, dark=dark)
        chromium.open(pages[name])
        before = ink(chromium, drawn)
        chromium.run("document.getElementById('smooth').focus()")
        chromium.press("Enter")
        assert ink(chromium, drawn) > before, "what was measured is drawn as the curve, no longer faint behind it"
        assert chromium.run("document.getElementById('smooth').getAttribute('aria-pressed')") == "false"
        chromium.press("Enter")
        assert ink(chromium, drawn) == before
        chromium.run("document.getElementById('axis').focus()")
        for over, last in (("tokens", "16.8 M tokens"), ("hours", "0.3889 hours"), ("step", "step 400")):
            chromium.press("Enter")
            assert chromium.run("document.activeElement.textContent") == f"over: {over}"
            chromium.run(f"{drawn}.querySelector('.plot').focus()")
            chromium.press("ArrowRight")
            assert chromium.run(at) == last
            chromium.run("document.getElementById('axis').focus()")
        assert [error for error in chromium.errors if "getImageData" not in error] == [], "but what this test asks for"


@pytest.mark.prove
def test_axe_finds_nothing(chromium: Chromium, pages: dict[str, Path], tmp_path: Path) -> None:
    """axe-core comes from npm, if there is one."""
    packed = subprocess.run(
        ["npm", "pack", "axe-core@4.14.1"], cwd=tmp_path, check=False, capture_output=True, timeout=90
    )
    if packed.returncode:
        pytest.skip("npm can't fetch axe-core")
    with tarfile.open(tmp_path / "axe-core-4.14.1.tgz") as archive:
        axe = archive.extractfile("package/axe.min.js").read().decode()  # type: ignore[union-attr]
    chromium.size(1200, 900)
    for name, page in pages.items():
        chromium.open(page)
        found = "axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 120)))"
        assert chromium.run(f"(() => {{ {axe}; return {found} }})()") == [], name


def test_mouse_reads_values_and_zooms(opened: Chromium) -> None:
    before, box = ink(opened, LOSS), opened.run(f"{LOSS}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    opened.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + 20)
    settle(opened)
    assert re.fullmatch(r"step (199|200|201|202)", opened.run(f"{LOSS}.querySelector('.at').textContent"))
    values = opened.run(f"[...{LOSS}.querySelectorAll('.keys output')].map(each => each.textContent)")
    assert all(re.fullmatch(r"\d\.\d+|–", value) for value in values)
    other = "document.querySelector('figure[data-chart=\"r0-rate\"] .at').textContent"
    assert opened.run(other).startswith("step "), "the other charts show the same step"
    assert opened.run(RESET) is True
    opened.mouse("mousePressed", box["x"] + 0.3 * box["width"], box["y"] + 60)
    for share in (0.35, 0.45, 0.5):
        opened.mouse("mouseMoved", box["x"] + share * box["width"], box["y"] + 60)
    opened.mouse("mouseReleased", box["x"] + 0.5 * box["width"], box["y"] + 60)
    assert ink(opened, LOSS) != before
    assert opened.run(RESET) is False
    opened.run("document.getElementById('reset').click()")
    assert ink(opened, LOSS) == before
    assert opened.run(RESET) is True


def test_keyboard_alone(opened: Chromium) -> None:
    """Every curve can be reached; arrows read values, + zooms, 0 resets."""
    assert opened.run("[...document.querySelectorAll('.plot')].every(each => each.tabIndex === 0)")
    opened.run(f"{LOSS}.querySelector('.plot').focus()")
    opened.press("ArrowLeft")
    opened.press("ArrowLeft")
    assert opened.run(f"{LOSS}.querySelector('.at').textContent") == "step 398"
    for key, disabled in (("+", False), ("0", True)):
        opened.press(key)
        settle(opened)
        assert opened.run(RESET) is disabled


def test_dark_light_and_paper(chromium: Chromium, pages: dict[str, Path]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    chromium.size(1200, 900, dark=True)
    chromium.open(pages["usual"])
    dark = chromium.run(background)
    chromium.run("document.getElementById('scheme').click()")
    light = chromium.run(background)
    assert sum(map(int, re.findall(r"\d+", dark))) < 120
    assert sum(map(int, re.findall(r"\d+", light))) > 700
    printed = base64.b64decode(chromium.send("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    assert chromium.errors == []


def test_without_scripts_the_figures_are_there(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.send("Page.navigate", url=pages["usual"].resolve().as_uri())
    finally:
        chromium.send("Emulation.setScriptExecutionDisabled", value=False)
    chromium.run("new Promise(done => setTimeout(done, 100))")
    shown = chromium.run("document.body.innerText")
    for wanted in ("Planned and measured", "waiting for ranks", "gradient-norm spike", "node-2"):
        assert wanted in shown


# --- the page of sampled rows ---


@pytest.fixture(scope="module")
def rows_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page of chats, one of which hopes to be run as a script or read as a tag."""
    folder = tmp_path_factory.mktemp("rows")
    model = tiny.write_model(folder / "model", "mistral4")
    hostile = "</div><script>window.pwned = 1</script><img src=http://x.invalid/y.png> \u202e\x1b[31m " + "hull" * 200
    answers = ["A windlass.\nIt lifts.", hostile, *(f"Answer {i}. " + "rope " * 300 for i in range(6))]
    asked = [{"role": "user", "content": f"Question {i}?"} for i in range(8)]
    chats = [[ask, {"role": "assistant", "content": answer}] for ask, answer in zip(asked, answers, strict=True)]
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    (folder / "run.yaml").write_text(
        f"model: {{model_name_or_path: {model}}}\n"
        f"data: {{dataset_name_or_path: {folder}/chats.jsonl, max_length: 512}}\n"
        f"train: {{output_dir: {folder}/run}}\n"
    )
    (folder / "run").mkdir()
    with contextlib.suppress(SystemExit):
        cli.main(["data", str(folder / "run.yaml"), "--html", str(folder / "run" / "data.html")])
    return folder / "run" / "data.html"


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_rows_are_readable_at_every_width_and_nothing_is_fetched(
    chromium: Chromium, rows_page: Path, width: int, dark: bool
) -> None:
    chromium.size(width, 900, phone=width < 600, dark=dark)
    chromium.open(rows_page)
    assert chromium.errors == []
    assert chromium.requests == [rows_page.resolve().as_uri()]
    assert chromium.run("window.pwned === undefined && !document.querySelector('main img, main script')")
    assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.run(f"({CUT}).length") == 0
    assert chromium.run("document.querySelectorAll('article.row').length") == 8
    # Text of the first row: the question is context, the answer and its end are trained on.
    first = "[...document.querySelectorAll('article.row')].find(row => row.innerText.includes('Question 0?'))"
    trained = chromium.run(f"[...({first}).querySelectorAll('mark.trained')].map(m => m.innerText).join('')")
    assert trained == "A windlass.↵\nIt lifts.</s>"
    special = chromium.run(f"[...({first}).querySelectorAll('.special')].map(m => m.innerText)")
    assert special == ["<s>", "[INST]", "[/INST]", "</s>"]
    # Marked text is seen by its background in both schemes, and tells itself from the paper.
    mark = chromium.run(f"getComputedStyle(({first}).querySelector('mark.trained')).backgroundColor")
    paper = chromium.run("getComputedStyle(document.body).backgroundColor")
    assert mark not in (paper, "rgba(0, 0, 0, 0)")
    light = sum(map(int, re.findall(r"\d+", paper)[:3])) > 3 * 128
    assert light != dark
    assert "cut at max_length" in chromium.run("document.querySelector('.notes').innerText")
    for scheme in ("light", "dark"):
        chromium.run("document.getElementById('scheme').click()")
        assert chromium.run("document.documentElement.dataset.scheme") == scheme


def test_the_report_links_to_the_rows_in_its_folder(chromium: Chromium, rows_page: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=20)
    link = "document.querySelector('a[href=\"data.html\"]')"
    chromium.open(report.make_report([folder]).html)
    assert chromium.run(f"{link} === null")
    (folder / "data.html").write_text(rows_page.read_text())
    chromium.open(report.make_report([folder]).html)
    assert chromium.run(f"{link}.href") == (folder / "data.html").resolve().as_uri()
    chromium.open(report.make_report([folder], tmp_path / "elsewhere").html)
    assert chromium.run(f"{link} === null")
