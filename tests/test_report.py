"""The report's numbers against the files they come from, and every way in which those files can be odd."""

import html.parser
import io
import json
import math
import os
import random
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import PHASES, SPIKE, one_step, write, write_lines
from rich.console import Console

from windlass.errors import UserError
from windlass.files import read_json_lines
from windlass.observe import reader, report, steps
from windlass.observe.report import print_report, read
from windlass.observe.report.charts import make_comparison_charts
from windlass.observe.report.trials import SweepResult, TrialResult, list_effects

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs") / "m4")


@pytest.fixture(scope="module")
def made(folder: Path) -> dict[str, Any]:
    report.make_report([folder])
    return json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)["runs"][0]  # type: ignore[no-any-return]


def only(folder: Path) -> dict[str, Any]:
    return report.make_report([folder]).runs[0]


def shown(made: report.Report) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(made, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_total_is_what_the_run_counted_not_what_was_planned(tmp_path: Path) -> None:
    """`finished step 222 of 186`: the plan had estimated the rows."""
    folder = write(tmp_path / "run", ranks=1, count=40)
    append(folder / "events.jsonl", {"time": 1.7e9, "step": 0, "kind": "start", "steps": 55})
    run = only(folder)
    assert run["headline"]["steps_planned"] == 55
    assert [row["planned"] for row in run["planned"] if row["what"] == "steps"] == [40]


def test_a_run_on_pairs_is_told_in_their_terms(tmp_path: Path) -> None:
    run = only(write(tmp_path / "pairs", pairs=True))
    head, learned = run["headline"], 1 - math.exp(-3)
    assert head["preferred"] == pytest.approx(0.5 + 0.35 * learned)
    assert head["margin"] == pytest.approx(1.8 * learned)
    before = 0.5 + 0.35 * (1 - math.exp(-0.3))
    preferred = f"{head['preferred']:.0%}"
    told = f"the chosen answer is preferred in {preferred} of 200 evaluation pairs, {before:.0%} at step 40."
    assert run["verdict"]["text"].endswith(told)
    charts = {chart["id"]: chart for chart in run["charts"]}
    labels = {name: [curve["label"] for curve in charts[name]["series"]] for name in ("margin", "accuracy", "rewards")}
    assert labels["margin"] == ["margin", "evaluation margin"]
    assert labels["rewards"] == ["chosen", "evaluation chosen", "rejected", "evaluation rejected"]
    last = {name: [curve["values"][-1] for curve in charts[name]["series"]] for name in ("accuracy", "logps")}
    assert last["accuracy"][1] == pytest.approx(100 * head["preferred"], rel=1e-4)
    assert last["logps"][1] == pytest.approx(-220 + 4 * learned, rel=1e-4)
    step = list(read_json_lines(tmp_path / "pairs" / "steps-rank0.jsonl"))[-1]["preference"]
    assert last["logps"][0] == pytest.approx(step["logps/chosen"], rel=1e-4)
    printed = shown(report.make_report([tmp_path / "pairs"]))
    assert re.search(rf"chosen answer preferred +{100 * head['preferred']:.1f}.%", printed)


def test_right_answers_are_counted_from_the_first_evaluation_to_the_last(tmp_path: Path) -> None:
    """A text that was cut off is no right answer, one that a resumed run continued again counts once."""
    folder = write(tmp_path / "run", ranks=1, count=40)
    assert only(folder)["answers"] == []

    def answer(step: int, prompt: str, text: str, **more: Any) -> dict[str, Any]:
        return {"step": step, "prompt": prompt, "reference": " six", "text": text, "ended": True, **more}

    append(
        folder / "samples.jsonl",
        *(answer(0, "a", "six cats"), answer(0, "b", " six", ended=False), answer(0, "c", "a poem", reference="")),
        *(answer(40, "a", "six"), answer(40, "b", "two"), answer(40, "b", " six")),
    )
    run = only(folder)
    assert run["answers"] == [{"step": 0, "right": 0, "of": 2}, {"step": 40, "right": 2, "of": 2}]
    assert run["verdict"]["text"].endswith("; answers as in the data: 0 of 2 at step 0, 2 of 2 at step 40.")
    assert "<p>As in the data: 0 of 2 at step 0, 2 of 2 at step 40.</p>" in (folder / "report.html").read_text()
    page = (folder / "report.html").read_text()
    assert '<th scope="col">the data</th>' not in page, "not all prompts are continued at both steps"
    append(folder / "samples.jsonl", answer(40, "c", "a short poem", reference=""))
    only(folder)
    page = re.sub(r"\s+", " ", (folder / "report.html").read_text())
    assert '<th scope="col">step 40</th><th scope="col">the data</th>' in page


def test_without_an_evaluation_a_run_on_pairs_is_told_of_its_last_steps(tmp_path: Path) -> None:
    folder = write(tmp_path / "pairs", pairs=True)
    (folder / "events.jsonl").write_text("")
    run = only(folder)
    last = [row["preference"]["rewards/accuracies"] for row in read_json_lines(folder / "steps-rank0.jsonl")][-20:]
    assert run["headline"]["preferred"] == pytest.approx(statistics.mean(last))
    assert f"is preferred in {statistics.mean(last):.0%} of the training pairs." in run["verdict"]["text"]
    assert "preferred" not in only(write(tmp_path / "sft"))["verdict"]["text"]


def test_figures_are_computed_from_the_steps(folder: Path, made: dict[str, Any]) -> None:
    lines = [list(read_json_lines(folder / f"steps-rank{rank}.jsonl")) for rank in range(3)]
    first, head = lines[0], made["headline"]
    assert (head["steps"], head["steps_planned"], head["ranks"]) == (400, 400, 3)
    assert head["first_loss"] == pytest.approx(statistics.mean(r["loss"] for r in first[:20]))
    assert head["final_loss"] == pytest.approx(statistics.mean(r["loss"] for r in first[-20:]))
    rate = statistics.median(42000 / r["step_seconds"] for r in first)
    assert head["tokens_per_second"] == pytest.approx(rate, rel=1e-3)
    assert head["mfu"] == pytest.approx(statistics.mean(r["mfu"] for rank in lines for r in rank))
    assert head["seconds"] == pytest.approx(sum(r["step_seconds"] for r in first), abs=0.01)
    assert head["gpu_hours"] == pytest.approx(head["seconds"] * 3 / 3600)
    assert head["least_eval_loss"] == pytest.approx(1 + 1.2 * math.exp(-5))
    assert head["clipped_share"] == pytest.approx(sum(r["grad_norm"] > 0.5 for r in first) / 400)
    assert sum(made["step_time"]["shares"].values()) == pytest.approx(1)
    assert made["step_time"]["seconds"]["forward"] == pytest.approx(PHASES["forward"], rel=0.01)
    peaks = [max(r["gpu_peak_gib"] for r in rank) for rank in lines]
    assert [row["peak_gib"] for row in made["memory"]["per_rank"]] == pytest.approx(peaks)
    assert (made["memory"]["planned_gib"], made["memory"]["capacity_gib"]) == (104.2, 140.4)
    counts = {"useful": 14000 * 1200, "padded": 1000 * 1200, "supervised": 9000 * 1200, "masked": 5000 * 1200}
    shares = {"useful_share": pytest.approx(14 / 15), "supervised_share": pytest.approx(9 / 14)}
    assert made["tokens"] == counts | shares
    planned = next(chart for chart in made["charts"] if chart["id"] == "rate")["series"][1]
    assert (planned["label"], planned["least"][5], planned["most"][5]) == ("planned", 11000, 16000)
    busy = next(chart for chart in made["charts"] if chart["id"] == "utilization")["series"][0]
    at_7 = [100 * rank[6]["gpu_utilization"] for rank in lines]
    figures = (busy["least"][6], busy["values"][6], busy["most"][6])
    assert figures == pytest.approx((min(at_7), sum(at_7) / 3, max(at_7)), rel=1e-4)


def test_hours_that_a_run_was_down_are_not_counted(tmp_path: Path) -> None:
    """Killed after step 20, again before its next save, and stopped after step 25."""
    folder = write(tmp_path / "run", ranks=1, count=30)
    path, events = folder / "steps-rank0.jsonl", folder / "events.jsonl"
    lines = list(read_json_lines(path))
    began = next(line["time"] for line in read_json_lines(events))
    after_20, after_25 = lines[19]["time"], lines[24]["time"] + 7200
    for line in lines:
        line["time"] += 7200 * (line["step"] > 20) + 1000 * (line["step"] > 25)
    write_lines(path, lines)
    marks = [("start", 0, began), ("start", 20, after_20 + 3000), ("start", 20, after_20 + 7200)]
    marks += [("end", 25, after_25), ("start", 25, after_25 + 1000), ("end", 30, lines[-1]["time"])]
    write_lines(events, [{"kind": k, "step": s, "time": at} for k, s, at in marks])
    head = only(folder)["headline"]
    assert head["seconds"] == pytest.approx(sum(line["step_seconds"] for line in lines), abs=0.1)
    assert head["gpu_hours"] == pytest.approx(head["seconds"] / 3600)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_run_that_was_resumed_on_fewer_ranks_has_those(manifest: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=4, count=30)
    for rank in range(4):
        path = folder / f"steps-rank{rank}.jsonl"
        lines = list(read_json_lines(path))[: 30 if rank < 2 else 20]
        write_lines(path, [{**line, "step_seconds": line["step_seconds"] + 9 * (rank > 1)} for line in lines])
        about = json.loads((folder / f"meter-rank{rank}.json").read_text())
        (folder / f"meter-rank{rank}.json").write_text(json.dumps(about | {"ranks": 2 if rank < 2 else 4}))
    (folder / "manifest.json").write_text(json.dumps({"state": "finished"} | ({"ranks": 2} if manifest else {})))
    made = only(folder)
    head = made["headline"]
    assert (head["ranks"], head["gpu_hours"]) == (2, pytest.approx(head["seconds"] * 2 / 3600))
    seconds = [line["step_seconds"] for line in read_json_lines(folder / "steps-rank0.jsonl")]
    assert head["per_second"] == pytest.approx(statistics.median_high(28000 / step for step in seconds))
    assert made["step_time"]["slowest_rank"] in (0, 1)
    assert not any("left no step file" in reason for reason in made["verdict"]["against"])


def test_report_shows_the_records_of_other_stages(folder: Path, made: dict[str, Any], tmp_path: Path) -> None:
    rows = {row["what"]: row for row in made["planned"]}
    assert rows["seconds per step"]["planned"] == 3.1
    assert rows["seconds per step"]["ratio"] == pytest.approx(made["headline"]["step_seconds"] / 3.1)
    assert rows["peak memory, GiB"]["measured"] == max(row["peak_gib"] for row in made["memory"]["per_rank"])
    assert rows["steps"]["ratio"] == 1
    assert made["adapter"]["trainable"] == 27463680
    assert (made["certificate"]["loaded"], made["certificate"]["unread"]) == (759, 412)
    assert len(made["experts"]["busiest"]) == 36
    assert made["verdict"]["level"] == "warn"
    assert made["verdict"]["against"] == ["2 alarms: gradient-norm spike, straggler"]
    written = report.make_report([folder], tmp_path)
    page, text = written.html.read_text(), shown(written)
    about = "Mistral-Small-4-119B-2603 · wikitext-2 · 2026-11"
    layout = "expert-parallel · LoRA of rank 16, 27.5\xa0M parameters · 3 ranks"
    for wanted in (about, layout, "10 saved; 2.5\xa0s each", "1.13 ×", "<mark>A windlass.&lt;/s&gt;</mark>"):
        assert wanted in page
    for wanted in ("Finished after 400 of 400 steps", "waiting for ranks", "x the planned 3.1", "report.html"):
        assert wanted in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"], "nothing half written"


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=30)
    files = ("plan.json", "load.json", "data.json", "manifest.json", "events.jsonl", "alarms.jsonl", "meter-rank0.json")
    for absent in files:
        (folder / absent).rename(tmp_path / absent)
        assert f"{absent} is absent" in only(folder)["absent"]
        assert absent in (folder / "report.html").read_text()
        (tmp_path / absent).rename(folder / absent)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "steps-rank0.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    assert only(bare)["headline"]["final_loss"] == 2.5
    assert len(only(bare)["absent"]) == 7
    (bare / "steps-rank0.jsonl").write_text("")
    assert only(bare)["verdict"]["text"] == "No step has been made yet."
    for name, problem in (("", "holds no steps-rank"), ("plan.json", "is not a folder"), ("run", "is not there")):
        with pytest.raises(UserError, match=problem):
            report.make_report([(folder if name == "plan.json" else tmp_path if not name else bare) / name])


def test_lines_that_are_cut_damaged_or_trained_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=3, count=30)
    (folder / "steps-rank2.jsonl").unlink()
    path, other = folder / "steps-rank0.jsonl", folder / "steps-rank1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[10] = b"\xff\x00{]\n"
    path.write_bytes(b"".join(lines)[:-40])
    other.write_text("".join(other.read_text().splitlines(keepends=True)[:10]))
    made = only(folder)
    assert made["headline"]["steps"] == 29
    assert [row["steps"] for row in made["ranks"]] == [28, 10]
    assert "a line of steps-rank0.jsonl can't be read, the first is line 11" in made["absent"]
    assert "1 of 3 ranks left no step file" in made["verdict"]["against"]
    # A resumed run goes back to its checkpoint and appends: twice here.
    path.write_bytes(b"".join(lines[:10] + lines[11:]))
    draw = random.Random(1)
    again = [{**one_step(step, 30, 0, draw, gpu=True), "loss": 7.0, "time": 2e9 + step} for step in (25, 26, 21, 22)]
    append(path, *again)
    assert (only(folder)["headline"]["steps"], only(folder)["headline"]["final_loss"]) == (22, 7.0)
    assert only(folder)["ranks"][0]["steps"] == 21


@pytest.mark.fault(
    "every gradient clipped", "`windlass report`", "100% of the gradients were clipped to max_grad_norm 0.5"
)
@pytest.mark.fault("steps slower than planned", "`windlass report`", "a step takes 4.7 s, 1.5 times the planned 3.1 s")
def test_report_verdict_reflects_failures(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=30)
    (folder / "alarms.jsonl").unlink()
    assert only(folder)["verdict"]["level"] == "good"
    path = folder / "steps-rank0.jsonl"
    sound = path.read_text()
    experts = {"experts": 8, "idlest": [0.1] * 2, "unused": [0] * 2}

    def uneven(most: float) -> Any:
        return lambda step: {**experts, "busiest": [1.5, 1.4 if step < 20 else most]}

    busiest = "the busiest expert of layer 1 takes 3.1 times an even share of the tokens, 1.4 times at the"
    changes: list[tuple[slice, dict[str, Any], str, str]] = [
        (slice(24, 25), {"loss": None, "non_finite": ["loss"]}, "bad", "not a finite number at step 25"),
        (slice(24, 25), {"skipped": True}, "warn", "1 step was skipped"),
        (slice(24, 25), {"gpu_throttle": ["hardware thermal slowdown"]}, "warn", "hardware thermal slowdown"),
        (slice(28, 30), {"loss": 3.0}, "warn", "the loss is higher at the end than at the start"),
        (slice(0, 30), {"data_seconds": 3.0}, "warn", "of the step time is waiting for data: loading is the bottle"),
        (slice(0, 30), {"data_seconds": 1.0}, "good", ""),
        (slice(0, 30), {"grad_norm": 0.7}, "warn", "100% of the gradients were clipped to max_grad_norm 0.5"),
        (slice(0, 30), {"step_seconds": 4.7}, "warn", "a step takes 4.7 s, 1.5 times the planned 3.1 s"),
        (slice(0, 30), {"step_seconds": 4.5}, "good", ""),
        (slice(29, 30), {"gpu_peak_gib": 120.0}, "warn", "the peak memory is 120.0 GiB, the plan has 104.2 GiB"),
        (slice(29, 30), {"gpu_peak_gib": 112.0}, "good", ""),
        (slice(0, 30), {"experts": uneven(3.1)}, "warn", busiest),
        (slice(0, 30), {"experts": uneven(2.7)}, "good", ""),
    ]
    for where, change, level, message in changes:
        lines = [json.loads(line) for line in sound.splitlines()]
        for line in lines[where]:
            line |= {name: value(line["step"]) if callable(value) else value for name, value in change.items()}
        write_lines(path, lines)
        verdict = only(folder)["verdict"]
        assert verdict["level"] == level, message
        assert message in " ".join(verdict["against"])
    path.write_text(sound)
    failed = {"step": 30, "kind": "save", "seconds": 9.0, "ok": False, "error": "disk full"}
    append(folder / "events.jsonl", failed, {"step": 30, "kind": "eval", "eval_loss": 2.0})
    made = only(folder)
    saves = {"count": 11, "failed": 1, "error": "disk full", "seconds": 2.5, "most_seconds": 2.5, "bytes": 330_000_000}
    assert made["saves"] == saves
    assert "1 of 11 saves failed: disk full" in made["verdict"]["against"]
    assert "the evaluation loss has risen from 1.008 to 2.000: overfitting" in made["verdict"]["against"]
    # That of DPO with label smoothing may be negative.
    falling = [{"kind": "eval", "step": 10 * i, "eval_loss": loss} for i, loss in enumerate((-0.2, -0.6, -0.61), 1)]
    write_lines(folder / "events.jsonl", falling)
    assert only(folder)["verdict"]["level"] == "good"


def test_a_trial_that_trained_with_others_is_not_compared_with_its_plan_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=30)
    (folder / "alarms.jsonl").unlink()
    lines = [{**line, "step_seconds": 4.7} for line in read_json_lines(folder / "steps-rank0.jsonl")]
    write_lines(folder / "steps-rank0.jsonl", lines)
    assert only(folder)["verdict"]["level"] == "warn"
    plan = json.loads((folder / "plan.json").read_text())
    for names, level in (["one"], "warn"), (["one", "other"], "good"):
        (folder / "plan.json").write_text(json.dumps(plan | {"groups": [{"names": names}]}))
        made = only(folder)
        assert made["verdict"]["level"] == level
        assert bool(made["planned"]) == (level == "warn")
        assert bool(made["memory"]["planned_gib"]) == (level == "warn")
        (rate,) = [chart for chart in made["charts"] if chart["id"] == "rate"]
        assert len(rate["series"]) == 1 + (level == "warn")


def test_killed_run_is_not_shown_as_running(tmp_path: Path) -> None:
    """Its manifest still says running; its heartbeats have stopped."""
    folder = write(tmp_path / "run", ranks=1, count=30)
    alarms, beat = folder / "alarms.jsonl", folder / "heartbeat-rank0.json"
    alarms.unlink()
    assert "This run was not watched" in report.make_report([folder]).html.read_text()
    (folder / "manifest.json").write_text(json.dumps({"state": "running"}))
    os.utime(folder / "manifest.json", (20, 20))
    (folder / "events.jsonl").write_text(json.dumps({"kind": "start", "step": 0, "time": 10.0}) + "\n")
    for seconds, state in ((5, "running"), (4000, "killed")):
        beat.write_text(json.dumps({"rank": 0, "time": time.time() - seconds}))
        made = report.make_report([folder])
        assert made.runs[0]["state"] == state
        assert "was not watched" not in made.html.read_text()
        assert "alarms.jsonl is absent" not in made.runs[0]["absent"]
    verdict = only(folder)["verdict"]
    assert verdict["level"] == "bad"
    assert "no sign of life from any rank for 67\xa0min" in verdict["against"][0]
    for at, state in ((time.time(), "stopped by an alarm"), (5.0, "killed")):  # that one stopped an earlier try
        alarms.write_text(json.dumps({"kind": "stall", "step": 30, "level": "stop", "message": "", "time": at}) + "\n")
        assert only(folder)["state"] == state


@pytest.mark.parametrize("last", ["start", "end"])
def test_a_resumed_run_that_loads_is_not_shown_as_ended(last: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=20)
    earlier = time.time() - 4000
    (folder / "heartbeat-rank0.json").write_text(json.dumps({"rank": 0, "time": earlier}))
    (folder / "events.jsonl").write_text(json.dumps({"kind": last, "step": 10, "time": earlier}) + "\n")
    (folder / "alarms.jsonl").unlink()
    (folder / "manifest.json").write_text(json.dumps({"state": "running"}))
    made = only(folder)
    assert (made["state"], made["verdict"]["level"]) == ("running", "warn")
    assert "it prepares or loads" in made["verdict"]["against"][0]
    append(folder / "events.jsonl", {"kind": "start", "step": 10, "time": time.time() + 1})
    (folder / "heartbeat-rank0.json").write_text(json.dumps({"rank": 0, "time": time.time() + 1}))
    assert only(folder)["verdict"]["level"] == "good"


@pytest.mark.parametrize("count", [3, 3000])
def test_the_page_stays_small_and_keeps_the_spike(count: int, tmp_path: Path) -> None:
    made = report.make_report([write(tmp_path / "run", ranks=1, count=count)])
    assert made.html.stat().st_size < 1_000_000
    curve = next(chart for chart in made.runs[0]["charts"] if chart["id"] == "grad_norm")["series"][0]
    assert len(curve["values"]) <= 480
    assert max(value for value in curve.get("most", curve["values"]) if value is not None) > SPIKE


def test_long_files_of_other_ranks_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are within a percent of a full reading; the page says so; the first rank's file is read in full."""
    folder = write(tmp_path / "run", ranks=3, count=1500, stages=False)
    whole = only(folder)
    monkeypatch.setattr(read, "LONG", 100_000)  # files of many gigabytes, scaled down
    monkeypatch.setattr(reader, "SAMPLE_BYTES", 2500)
    sampled = report.make_report([folder]).runs[0]
    assert any("2 ranks' step files" in line for line in sampled["absent"])
    assert not any("ranks' step files" in line for line in whole["absent"])
    assert sampled["ranks"][0] == whole["ranks"][0]
    assert sampled["ranks"][2]["step_seconds"] != whole["ranks"][2]["step_seconds"], "not all lines were read"
    assert sampled["ranks"][2]["step_seconds"] == pytest.approx(whole["ranks"][2]["step_seconds"], rel=0.01)
    assert sampled["ranks"][2]["steps"] == 1500
    assert sampled["tokens"]["useful"] == pytest.approx(whole["tokens"]["useful"], rel=0.01)
    assert sampled["headline"]["final_loss"] == whole["headline"]["final_loss"]


def test_several_runs_are_compared(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "m4", ranks=2, count=60, seed=2)
    made = report.make_report([folder, other], tmp_path / "out")
    assert [run["name"] for run in made.runs] == ["m4 (1)", "m4 (2)"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "train.max_grad_norm" not in page, "only what differs is listed"
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["run"]["train"]["max_grad_norm"] = 2
    (other / "manifest.json").write_text(json.dumps(manifest))
    page = report.make_report([folder, other], tmp_path / "out").html.read_text()
    assert re.search(r"train.max_grad_norm</td>\s*<td[^>]*>0.5</td>\s*<td[^>]*>2</td>", page)
    island = json.loads(page.split('id="data">')[1].split("</script>")[0])
    evaluation = island["charts"]["all-loss-0"]
    assert evaluation["title"] == "Loss, evaluation"
    assert [any(value is not None for value in each["values"]) for each in evaluation["series"]] == [True, True]
    loss = island["charts"]["all-loss"]
    assert [curve["label"] for curve in loss["series"]] == ["m4 (1)", "m4 (2)"]
    assert loss["x"] == sorted(set(loss["x"]))
    assert all(len(curve["values"]) == len(loss["x"]) for curve in loss["series"])
    assert not (Path.cwd() / "report.html").exists()


def test_each_kept_set_is_compared_with_itself(tmp_path: Path) -> None:
    for name, kept in ("a", {"old": 0.1, "new": 0.2}), ("b", {"new": 0.3}):
        figures = {f"eval_keep/{each}/worse": worse for each, worse in kept.items()}
        append(write(tmp_path / name, ranks=1, count=20) / "events.jsonl", {"kind": "eval", "step": 20, **figures})
    made = report.make_report([tmp_path / "a", tmp_path / "b"], tmp_path)
    charts = {chart["title"]: chart["series"] for chart in make_comparison_charts(made.runs)}
    values = [
        {curve["label"]: curve["values"][-1] for curve in charts[f"Kept sets: loss above the base's, {name}"]}
        for name in ("old", "new")
    ]
    assert values == [{"a": 0.1}, {"a": 0.2, "b": 0.3}]


def test_long_values_are_compared_in_full_and_shown_by_their_ends(tmp_path: Path) -> None:
    paths = [f"/data/{'a-long-name/' * 9}{end}" for end in ("one", "two")]
    for name, path in zip("ab", paths, strict=True):
        manifest = write(tmp_path / name, ranks=1, count=3) / "manifest.json"
        manifest.write_text(json.dumps({"state": "finished", "run": {"model": {"model_name_or_path": path}}}))
    page = report.make_report([tmp_path / "a", tmp_path / "b"], tmp_path).html.read_text()
    assert re.search(r"model\.model_name_or_path</td>\s*<td[^>]*>…[^<]*/one</td>\s*<td[^>]*>…[^<]*/two</td>", page)
    settings = [{"model.model_name_or_path": path} for path in paths]
    trials = [
        TrialResult(str(i), "finished", setting, 1.0 + i, 1.0, None, None, 3, 1.0, "")
        for i, setting in enumerate(settings)
    ]
    effects = list_effects(trials, {trial.name: trial.eval_loss for trial in trials})
    assert [value for _, value, *_ in effects] == paths
    sweep = SweepResult(tmp_path, tuple(trials), tuple(effects))
    shown = [row[1] for row in sweep.effect_rows()[1:]]
    assert [(len(value), value[-4:]) for value in shown] == [(40, "/one"), (40, "/two")]


EVIL = "</script><script>window.pwned=1</script><img src=x onerror=pwned()>\"'&<!--\u202e\u2028"


class Tags(html.parser.HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def planted(value: Any) -> Any:
    """Return the value with every text, and every key from a user, replaced by the worst."""
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
        values = [json.loads(line) for line in path.read_text().splitlines()]
        events = ("start", "eval", "save", "end")
        changed = [{**planted(v), **({"kind": v["kind"]} if v.get("kind") in events else {})} for v in values]
        path.write_text("".join(json.dumps(value) + "\n" for value in changed))
    pages = [report.make_report([run]).html.read_text() for run in (plain, evil)]
    seen = [Tags(page).seen for page in pages]
    dangerous = ("script", "img", "iframe", "base", "style", "link", "meta")
    assert [tag for tag, _ in seen[0] if tag in dangerous] == [tag for tag, _ in seen[1] if tag in dangerous]
    assert not [attributes for _, attributes in seen[1] if any(name.startswith("on") for name in attributes)]
    assert "window.pwned" in pages[1], "it is shown, as text"
    assert "\u202e" not in pages[0] + pages[1]
    island = pages[1].split('id="data">')[1].split("</script>")[0]
    assert "<" not in island
    json.loads(island)


ODD: list[Any] = [None, -1, 1e300, 10**400, math.inf, "text\ud800", [], [None], {}, {"a": "b"}, True]


def replacements(value: Any, odd: Any) -> Iterator[Any]:
    """Yield the value with each of its parts in turn replaced by `odd`; of long lists the first two."""
    yield odd
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: changed} for changed in replacements(inner, odd))
    elif isinstance(value, list):
        for i, inner in enumerate(value[:2]):
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in replacements(inner, odd))


@pytest.mark.takes("writes a report for each odd value")
def test_report_survives_any_odd_value(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ranks=1, count=3)
    for path in (*folder.glob("*.json"), *folder.glob("*.jsonl")):
        sound = path.read_text()
        first, newline, rest = sound.partition("\n")
        for number, odd in enumerate(ODD):
            for place, changed in enumerate(replacements(json.loads(first), odd)):
                if place % len(ODD) == number:
                    path.write_text(json.dumps(changed) + newline + rest)
                    try:
                        made = report.make_report([folder])
                        json.loads(made.json.read_text(), parse_constant=pytest.fail)
                        shown(made)
                    except Exception as error:
                        raise AssertionError(f"{path.name}: {json.dumps(changed)[:2000]}") from error
        path.write_text(sound)


def test_every_key_and_field_is_documented(made: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "report.md").read_text()
    parts = ("headline", "saves", "step_time", "tokens", "memory", "certificate")
    for key in (*made, *(key for part in parts for key in made[part])):
        assert f"`{key}`" in page, key
    for name, (unit, meaning) in steps.FIELDS.items():
        assert f"| `{name}` | {unit} | {meaning} |" in page, name
