"""The report's numbers against the files they come from, and every way in which those files can be odd."""

from __future__ import annotations

import html.parser
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import PHASES, SPIKE, one_step, write
from rich.console import Console

from windlass.errors import UserError
from windlass.observe import report, steps
from windlass.observe.report.charts import smooth
from windlass.observe.report.read import edges, thin
from windlass.observe.report.show import show

ROOT = Path(__file__).parent.parent
OPTIONAL = ("plan.json", "load.json", "data.json", "manifest.json", "events.jsonl", "alarms.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs") / "m4")


@pytest.fixture(scope="module")
def made(folder: Path) -> dict[str, Any]:
    report.make([folder])
    return json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)["runs"][0]  # type: ignore[no-any-return]


def records(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"steps-rank{rank}.jsonl").read_text().splitlines()]


def only(folder: Path) -> dict[str, Any]:
    return report.make([folder]).runs[0]


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (text for inner in value.values() for text in texts(inner))
    elif isinstance(value, list):
        yield from (text for inner in value for text in texts(inner))
    elif isinstance(value, str):
        yield value


def test_headline_is_computed_from_the_steps(folder: Path, made: dict[str, Any]) -> None:
    first, head = records(folder, 0), made["headline"]
    assert (head["steps"], head["steps_planned"], head["ranks"]) == (400, 400, 3)
    assert head["first_loss"] == pytest.approx(statistics.mean(r["loss"] for r in first[:20]))
    assert head["final_loss"] == pytest.approx(statistics.mean(r["loss"] for r in first[-20:]))
    rate = statistics.median(42000 / r["step_seconds"] for r in first)
    assert head["tokens_per_second"] == pytest.approx(rate, rel=1e-3)
    assert head["mfu"] == pytest.approx(statistics.mean(r["mfu"] for n in range(3) for r in records(folder, n)))
    assert head["seconds"] == pytest.approx(sum(r["step_seconds"] for r in first), abs=0.01)
    assert head["gpu_hours"] == pytest.approx(head["seconds"] * 3 / 3600)
    assert head["least_eval_loss"] == pytest.approx(1 + 1.2 * math.exp(-5))


def test_phases_memory_and_tokens(folder: Path, made: dict[str, Any]) -> None:
    assert sum(made["step_time"]["shares"].values()) == pytest.approx(1)
    assert made["step_time"]["seconds"]["forward"] == pytest.approx(PHASES["forward"], rel=0.01)
    peaks = [max(r["gpu_peak_gib"] for r in records(folder, rank)) for rank in range(3)]
    assert [row["peak_gib"] for row in made["memory"]["per_rank"]] == pytest.approx(peaks)
    assert (made["memory"]["planned_gib"], made["memory"]["capacity_gib"]) == (104.2, 140.4)
    assert made["tokens"] == {
        "useful": 14000 * 1200,
        "padded": 1000 * 1200,
        "supervised": 9000 * 1200,
        "masked": 5000 * 1200,
        "useful_share": pytest.approx(14 / 15),
        "supervised_share": pytest.approx(9 / 14),
    }


def test_planned_against_measured(made: dict[str, Any]) -> None:
    rows = {row["what"]: row for row in made["planned"]}
    assert rows["seconds per step"]["planned"] == 3.1
    assert rows["seconds per step"]["ratio"] == pytest.approx(made["headline"]["step_seconds"] / 3.1)
    assert rows["peak memory, GiB"]["measured"] == max(row["peak_gib"] for row in made["memory"]["per_rank"])
    assert rows["steps"]["ratio"] == 1


def test_what_other_stages_wrote(made: dict[str, Any]) -> None:
    assert made["adapter"]["trainable"] == 27463680
    assert (made["certificate"]["loaded"], made["certificate"]["unread"]) == (759, 412)
    assert [alarm["kind"] for alarm in made["alarms"]] == ["gradient-norm spike", "straggler"]
    assert len(made["experts"]["busiest"]) == 36
    assert made["verdict"]["level"] == "warn"
    assert made["verdict"]["against"] == ["2 alarms: gradient-norm spike, straggler"]


@pytest.mark.parametrize("absent", [*OPTIONAL, "meter-rank*.json"])
def test_each_file_may_be_absent_and_is_named(absent: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=2, count=30)
    for path in folder.glob(absent):
        path.unlink()
    made = only(folder)
    assert any(line.startswith(absent.replace("*", "0")) for line in made["absent"])
    assert absent.replace("*", "0") in (folder / "report.html").read_text()


def test_one_steps_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "steps-rank0.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    made = only(tmp_path)
    assert made["headline"]["final_loss"] == 2.5
    assert len(made["absent"]) == 7


def test_a_run_that_has_not_made_a_step(tmp_path: Path) -> None:
    (tmp_path / "steps-rank0.jsonl").write_text("")
    assert only(tmp_path)["verdict"]["text"] == "No step has been made yet."


@pytest.mark.parametrize("there", ["nothing", "empty folder", "file"])
def test_no_run_is_a_users_error(there: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if there == "file":
        path.write_text("")
    elif there == "empty folder":
        path.mkdir()
    with pytest.raises(UserError, match=r"holds no steps-rank|is not a folder|is not there"):
        report.make([path])


def test_a_line_cut_by_a_kill_and_a_damaged_one_are_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=30)
    path = folder / "steps-rank0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[10] = b"\xff\x00{]\n"
    path.write_bytes(b"".join(lines)[:-40])
    made = only(folder)
    assert made["headline"]["steps"] == 29
    assert made["ranks"][0]["steps"] == 28
    assert "a line of steps-rank0.jsonl can't be read, the first is line 11" in made["absent"], (
        "the cut one is no damage"
    )


def test_steps_that_were_trained_again_count_once(tmp_path: Path) -> None:
    """A resumed run goes back to its checkpoint and appends."""
    folder = write(tmp_path / "run", ranks=1, count=30)
    draw = random.Random(1)
    again = [{**one_step(step, 30, 0, draw, gpu=True), "loss": 7.0, "time": 2e9 + step} for step in (21, 22)]
    with (folder / "steps-rank0.jsonl").open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in again)
    made = only(folder)
    assert made["headline"]["steps"] == 22
    assert made["headline"]["final_loss"] == 7.0


def test_a_rank_that_stopped_early_and_one_that_left_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=3, count=30)
    (folder / "steps-rank2.jsonl").unlink()
    path = folder / "steps-rank1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    made = only(folder)
    assert [row["steps"] for row in made["ranks"]] == [30, 10]
    assert "1 of 3 ranks left no step file" in made["verdict"]["against"]


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        ({"loss": math.nan}, "bad", "not a finite number at step 25"),
        ({"loss": None, "non_finite": ["loss"]}, "bad", "not a finite number at step 25"),
        ({"skipped": True}, "warn", "1 step was skipped"),
        ({"gpu_throttle": ["hardware thermal slowdown"]}, "warn", "hardware thermal slowdown"),
    ],
)
def test_verdict_sees_what_went_wrong(change: dict[str, Any], level: str, said: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=30)
    (folder / "alarms.jsonl").unlink()
    assert only(folder)["verdict"]["level"] == "good"
    path = folder / "steps-rank0.jsonl"
    lines = path.read_text().splitlines()
    lines[24] = json.dumps({**json.loads(lines[24]), **change})
    path.write_text("\n".join(lines) + "\n")
    verdict = only(folder)["verdict"]
    assert verdict["level"] == level
    assert said in " ".join(verdict["against"])


def test_saves_that_failed_are_told_with_their_reason(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=30)
    good = {"count": 10, "failed": 0, "error": "", "seconds": 2.5, "most_seconds": 2.5, "bytes": 330_000_000}
    assert only(folder)["saves"] == good
    assert "10 saved; 2.5\xa0s each, the longest 2.5\xa0s; 330\xa0MB the last." in (folder / "report.html").read_text()
    lost = {"step": 30, "kind": "save", "seconds": 9.0, "bytes": 5, "ok": False, "error": "No space left on device"}
    with (folder / "events.jsonl").open("a") as lines:
        lines.write(json.dumps(lost) + "\n")
    made = only(folder)
    assert made["saves"] == {**good, "count": 11, "failed": 1, "error": "No space left on device"}
    assert "1 of 11 saves failed: No space left on device" in made["verdict"]["against"]


def test_a_run_that_was_killed_is_not_called_running(tmp_path: Path) -> None:
    """Its manifest says running for ever; its heartbeats have stopped."""
    folder = write(tmp_path / "run", ranks=1, count=30)
    (folder / "manifest.json").write_text(json.dumps({"state": "running"}))
    events = [
        json.dumps({"kind": "start", "step": 0, "time": 10.0}),
        json.dumps({"kind": "save", "step": 20, "ok": True}),
    ]
    (folder / "events.jsonl").write_text("\n".join(events) + "\n")
    for seconds, state in ((5, "running"), (4000, "killed")):
        (folder / "heartbeat-rank0.json").write_text(json.dumps({"rank": 0, "time": time.time() - seconds}))
        assert only(folder)["state"] == state
    stop = {"kind": "stall", "step": 30, "level": "stop", "message": "", "time": time.time()}
    (folder / "alarms.jsonl").write_text(json.dumps(stop) + "\n")
    assert only(folder)["state"] == "stopped by an alarm"
    (folder / "alarms.jsonl").write_text(json.dumps({**stop, "time": 5.0}) + "\n")
    assert only(folder)["state"] == "killed", "that one stopped an earlier try"
    (folder / "alarms.jsonl").unlink()
    verdict = only(folder)["verdict"]
    assert verdict["level"] == "bad"
    assert "no sign of life from any rank for 67\xa0min" in verdict["against"][0]


def test_no_alarm_is_good_news_only_where_somebody_watched(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=30)
    (folder / "alarms.jsonl").unlink()
    assert "This run was not watched" in (report.make([folder]).html).read_text()
    (folder / "heartbeat-rank0.json").write_text(json.dumps({"rank": 0, "time": time.time()}))
    made = report.make([folder])
    assert "was not watched" not in made.html.read_text()
    assert "alarms.jsonl is absent" not in made.runs[0]["absent"]


def test_thinning_keeps_spikes_and_means() -> None:
    values = [1.0] * 10_000
    values[7777] = 50.0
    means, least, most = thin(values, edges(len(values), 100))
    assert len(means) == 100
    assert max(m for m in most if m) == 50
    assert min(v for v in least if v) == 1
    assert sum(m for m in means if m) / 100 == pytest.approx(sum(values) / 10_000)
    assert thin([math.nan, 2.0], edges(2, 10))[0] == [None, 2]
    assert edges(0, 10) == [0]
    assert smooth([math.nan, 4.0, 4.0], 0.9)[1:] == pytest.approx([4, 4])


@pytest.mark.parametrize(
    ("ranks", "count"), [(1, 3), (64, 600), pytest.param(1, 300_000, marks=pytest.mark.prove), (2, 8000)]
)
def test_the_page_stays_small_and_keeps_the_spike(ranks: int, count: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=ranks, count=count)
    made = report.make([folder])
    assert made.html.stat().st_size < 1_000_000
    chart = next(chart for chart in made.runs[0]["charts"] if chart["id"] == "grad_norm")
    curve = chart["series"][0]
    assert len(curve["values"]) <= 480
    assert max(value for value in curve.get("most", curve["values"]) if value is not None) > SPIKE


def test_several_runs_are_compared(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "m4", ranks=2, count=60, seed=2)
    made = report.make([folder, other], tmp_path / "out")
    assert [run["name"] for run in made.runs] == ["m4 (1)", "m4 (2)"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert len(page) < 1_000_000
    island = json.loads(page.split('id="data">')[1].split("</script>")[0])
    overlaid = island["charts"]["all-loss"]
    assert [curve["label"] for curve in overlaid["series"]] == ["m4 (1)", "m4 (2)"]
    assert overlaid["x"] == sorted(set(overlaid["x"]))
    assert all(len(curve["values"]) == len(overlaid["x"]) for curve in overlaid["series"])
    assert not (Path.cwd() / "report.html").exists()


EVIL = "</script><script>window.pwned=1</script><img src=x onerror=pwned()>\"'&<!--\u202e\u2028"


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def planted(value: Any) -> Any:
    """The same value with every text, and every key that is a user's, replaced by the worst."""
    if isinstance(value, dict):
        return {key: planted(inner) for key, inner in value.items()} | {EVIL: EVIL}
    if isinstance(value, list):
        return [planted(inner) for inner in value]
    return EVIL if isinstance(value, str) else value


def test_text_from_users_is_text(tmp_path: Path) -> None:
    """Script tags planted in every string of every file, in keys, and in the folder's name."""
    plain = write(tmp_path / "plain", ranks=2, count=30)
    evil = write(tmp_path / "<script>alert(1)<", ranks=2, count=30)
    for path in [*evil.glob("*.json"), evil / "alarms.jsonl", evil / "events.jsonl"]:
        kinds = {"start", "eval", "save", "end"}
        values = [json.loads(line) for line in path.read_text().splitlines()]
        changed = [{**planted(v), **({"kind": v["kind"]} if v.get("kind") in kinds else {})} for v in values]
        path.write_text("".join(json.dumps(value) + "\n" for value in changed))
    report.make([plain])
    report.make([evil])
    pages = [(folder / "report.html").read_text() for folder in (plain, evil)]
    seen = []
    for page in pages:
        tags = Tags()
        tags.feed(page)
        seen.append(tags.seen)
        assert "\u202e" not in page
    names = [
        [tag for tag, _ in tags if tag in ("script", "img", "iframe", "base", "style", "link", "meta")] for tags in seen
    ]
    assert names[0] == names[1]
    assert not [attributes for _, attributes in seen[1] if any(name.startswith("on") for name in attributes)]
    assert "window.pwned" in pages[1], "it is shown, as text"
    island = pages[1].split('id="data">')[1].split("</script>")[0]
    assert "<" not in island
    json.loads(island)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = (
    "kind message level hardware gpus memory adapter targets estimate missing splits samples parts notes run versions "
    "ranks infiniband layout batching unmeasured eval_loss busiest idlest unused parameters checked loaded state batch"
)
KEYS = st.sampled_from([*steps.FIELDS, *NAMES.split()])
OBJECT = st.dictionaries(KEYS, JSON | st.dictionaries(KEYS, JSON, max_size=4), max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(OBJECT, min_size=1, max_size=5), odd=OBJECT, bare=JSON)
def test_no_content_of_a_file_ends_in_a_traceback(lines: list[Any], odd: Any, bare: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    numbered = [{"step": i, **line} if i % 2 else {**line, "step": i} for i, line in enumerate(lines)]
    for name in ("steps-rank0.jsonl", "steps-rank1.jsonl", "events.jsonl", "alarms.jsonl"):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in [*numbered, bare]))
    for name in ("plan.json", "load.json", "data.json", "manifest.json", "meter-rank0.json"):
        (folder / name).write_text(json.dumps(odd))
    made = report.make([folder])
    json.loads(made.json.read_text(), parse_constant=pytest.fail)
    with (tmp_path / "shown").open("w") as file:
        show(made, Console(file=file))


ODD: list[Any] = [None, -1, 1e300, "text", [], [None], {}, {"a": "b"}, True]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every node of a JSON value; of long lists the first two."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], to)
    return copy


@pytest.mark.parametrize("each", [1, pytest.param(len(ODD), marks=pytest.mark.prove)])
@pytest.mark.parametrize("name", ["plan.json", "load.json", "data.json", "manifest.json", "meter-rank0.json", "steps"])
def test_one_odd_value_anywhere_is_survived(name: str, each: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=3)
    path = folder / ("steps-rank0.jsonl" if name == "steps" else name)
    whole = path.read_text()
    value = json.loads(whole.splitlines()[0] if name == "steps" else whole)
    rest = whole.partition("\n")[2] if name == "steps" else ""
    for i, place in enumerate(places(value)):
        for odd in (ODD[i:] + ODD[:i] if each > 1 else [ODD[i % len(ODD)]])[:each]:
            path.write_text(json.dumps(changed(value, place, odd)) + "\n" + rest)
            try:
                made = report.make([folder])
            except Exception as error:
                raise AssertionError(f"{name}: {place} = {odd!r}") from error
            with (tmp_path / "shown").open("w") as file:
                show(made, Console(file=file))


def test_terminal_summary(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w") as file:
        show(report.make([folder]), Console(file=file, width=100))
    shown = (tmp_path / "shown").read_text()
    for wanted in ("Finished after 400 of 400 steps", "waiting for ranks", "x the planned 3.1", "report.html"):
        assert wanted in shown


def test_the_report_imports_no_torch(folder: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "windlass.observe.report", str(folder), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    names = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "windlass" in names
    assert not names & {"torch", "transformers", "numpy", "pandas", "pydantic"}


def test_every_key_and_field_is_documented(made: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "report.md").read_text()
    for key in [
        *made,
        *made["headline"],
        *made["saves"],
        *made["step_time"],
        *made["tokens"],
        *made["memory"],
        *made["certificate"],
    ]:
        assert f"`{key}`" in page, key
    for name, (unit, meaning) in steps.FIELDS.items():
        assert f"| `{name}` | {unit} | {meaning} |" in page, name


def test_nothing_half_written_is_left(folder: Path, made: dict[str, Any]) -> None:
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
