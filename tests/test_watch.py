"""The detectors on records made here: each fires on its fault, none on noise. And the files around them."""

from __future__ import annotations

import io
import json
import math
import random
import socket
import sys
import textwrap
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from windlass import plan as planning
from windlass import runfile, tiny, train
from windlass.errors import UserError
from windlass.launch.check.inputs import check_trackers
from windlass.launch.check.results import FAIL
from windlass.observe import steps
from windlass.observe.watch import collectives, heartbeat, live, nccl, prometheus
from windlass.observe.watch.alarm import KINDS, Alarm, append
from windlass.observe.watch.detect import OF_EVALUATIONS, OF_STEPS, SAMPLES
from windlass.observe.watch.follow import Tail
from windlass.observe.watch.heartbeat import Heartbeat, Position
from windlass.observe.watch.patrol import Patrol
from windlass.runfile import Watch, names

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]
Change = Callable[[int, int, Record], None]


def record(step: int, chance: random.Random) -> Record:
    """One rank's step in a run that is well: a falling loss with noise, times that scatter, now and then a slow one."""
    slow = 3.0 if chance.random() < 0.03 else 1.0
    spans = {"data": 0.02, "forward": 0.3, "backward": 0.5, "optimizer": 0.01, "communication": 0.15, "other": 0.02}
    seconds = {f"{phase}_seconds": mean * chance.lognormvariate(0, 0.15) * slow for phase, mean in spans.items()}
    return {
        "step": step,
        "time": 1e9 + step,
        **seconds,
        "step_seconds": sum(seconds.values()),
        "tokens": 4096,
        "gpu_peak_gib": 60 * (1 - 0.3 * 0.9**step) + chance.gauss(0, 0.5),
        "gpu_throttle": ["software power cap"] if chance.random() < 0.7 else [],
        "experts": {"experts": 16, "busiest": [2.0] * 3, "idlest": [0.0] * 3, "unused": dead(chance)},
        "rows": [8 * step + i for i in range(2)],
    }


def dead(chance: random.Random) -> list[int]:
    """In a single look an expert may go without."""
    return [1 if chance.random() < 0.01 else 0 for _ in range(3)]


def write(folder: Path, seed: int, number: int = 300, ranks: int = 4, change: Change | None = None) -> Path:
    chance = random.Random(seed)
    files = [(folder / steps.STEPS.format(rank=rank)).open("w") for rank in range(ranks)]
    for rank in range(ranks):
        hardware = {"host": "node", "gpu": "H200", "gpus": [{"name": "H200", "memory_gib": 141.0}] * ranks}
        (folder / steps.METER.format(rank=rank)).write_text(json.dumps({"ranks": ranks, "hardware": hardware}))
    for step in range(1, number + 1):
        shared = {
            "loss": 2 + 3 * 0.98**step + chance.gauss(0, 0.15),
            "grad_norm": (1 + 3 * 0.97**step) * chance.lognormvariate(0, 0.3),
            "learning_rate": 1e-4,
        }
        for rank in range(ranks):
            line = record(step, chance) | shared
            if change is not None:
                change(step, rank, line)
            files[rank].write(json.dumps(line) + "\n")
    for file in files:
        file.close()
    with (folder / steps.EVENTS).open("w") as events:
        for i in range(1, 7):
            loss = 2 + 3 * 0.8**i + chance.gauss(0, 0.02)
            events.write(json.dumps({"time": 0, "step": 50 * i, "kind": "eval", "eval_loss": loss}) + "\n")
    return folder


def found(folder: Path, max_steps: int = 2000, **settings: Any) -> list[Alarm]:
    raised: list[Alarm] = []
    patrol = Patrol(folder, Watch(**settings), 4, network="infiniband-400", raised=raised.append)
    patrol.past.max_steps = max_steps
    patrol.round()
    return raised


@pytest.mark.parametrize("seed", range(10))
def test_no_alarm_on_a_clean_run(tmp_path: Path, seed: int) -> None:
    assert found(write(tmp_path, seed)) == []


def slow_backward(step: int, rank: int, line: Record) -> None:
    if step > 150 and rank == 2:
        line["backward_seconds"] += 0.6
        line["step_seconds"] += 0.6


def waiting(step: int, rank: int, line: Record) -> None:
    """Rank 1 reads slowly; the others wait for it in their backward, where autograd's own waits are counted."""
    line["data_seconds" if rank == 1 else "backward_seconds"] += 0.5
    line["step_seconds"] += 0.5


def diverging(step: int, _rank: int, line: Record) -> None:
    line["loss"] += max(0, step - 200) * 0.03


def leaking(step: int, rank: int, line: Record) -> None:
    line["gpu_peak_gib"] += 0.06 * step if rank == 3 else 0


def uneven(_step: int, rank: int, line: Record) -> None:
    line["gpu_peak_gib"] += 40 if rank == 0 else 0


def crawling(step: int, _rank: int, line: Record) -> None:
    if step > 250:
        line["data_seconds"] += 1.5
        line["step_seconds"] += 1.5


def hot(step: int, rank: int, line: Record) -> None:
    if step > 200 and rank == 1:
        line["gpu_throttle"] = ["hardware thermal slowdown"]


def died(step: int, _rank: int, line: Record) -> None:
    if step > 100:
        line["experts"] = {**line["experts"], "unused": [0, 3, 0]}


def spiked(step: int, _rank: int, line: Record) -> None:
    if step == 120:
        line["grad_norm"] = 40.0


def poisoned(step: int, _rank: int, line: Record) -> None:
    if step == 77:
        line |= {"grad_norm": None, "non_finite": ["grad_norm"], "skipped": True}


FAULTS: dict[str, tuple[Change, str, int | None, str]] = {
    "backward": (slow_backward, "straggler", 2, "slow in backward"),
    "data": (waiting, "straggler", 1, "slow in data"),
    "diverging": (diverging, "loss_divergence", None, "the limit is"),
    "leak": (leaking, "memory_growth", 3, "would be held at step"),
    "uneven": (uneven, "memory_imbalance", 0, "the others"),
    "crawling": (crawling, "throughput", None, "most of it goes into data"),
    "hot": (hot, "throttling", 1, "hardware thermal slowdown"),
    "dead experts": (died, "dead_experts", None, "layers 1: up to 3 experts"),
    "spike": (spiked, "gradient_spike", None, "rank 0, rows 960, 961; rank 1, rows 960, 961"),
    "non-finite": (poisoned, "non_finite", None, "grad_norm, step left out; rank 0, rows 616, 617"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_raises_its_alarm_and_no_other(tmp_path: Path, name: str) -> None:
    change, kind, rank, message = FAULTS[name]
    raised = found(write(tmp_path, 1, change=change))
    assert raised, "nothing was noticed"
    assert {(alarm.kind, alarm.rank) for alarm in raised} == {(kind, rank)}
    assert message in raised[0].message
    assert len(raised) <= 3, "told once in a while, not at every step"
    if kind != "non_finite":
        off: Any = {kind: "off"}
        assert found(tmp_path, **off) == [], "off looks away"
        stop: Any = {kind: "stop"}
        assert {alarm.level for alarm in found(tmp_path, **stop)} == {"stop"}


@pytest.mark.parametrize(("name", "broken"), [("loss", True), ("grad_norm", False)])
def test_a_loss_that_is_no_number_is_told_from_a_gradient(tmp_path: Path, name: str, broken: bool) -> None:
    def change(step: int, _rank: int, line: Record) -> None:
        if step == 77:
            line |= {name: None, "non_finite": [name]}

    alarm = found(write(tmp_path, 1, change=change))[0]
    assert alarm.broken is broken
    append(tmp_path, alarm)
    assert "broken" not in json.loads((tmp_path / "alarms.jsonl").read_text())


def test_thresholds_decide(tmp_path: Path) -> None:

    def all_of_them(step: int, rank: int, line: Record) -> None:
        for fault in (slow_backward, crawling, uneven):
            fault(step, rank, line)

    write(tmp_path, 1, change=all_of_them)
    tolerant: Any = {"straggler_share": 0.9, "throughput_fraction": 0.1, "memory_ratio": 3}
    assert {alarm.kind for alarm in found(tmp_path)} == {"straggler", "throughput", "memory_imbalance"}
    assert found(tmp_path, **tolerant) == []
    settings: Any = (
        (diverging, "loss_divergence", {"deviations": 200}),
        (spiked, "gradient_spike", {"gradient_factor": 100}),
    )
    for change, kind, setting in settings:
        write(tmp_path, 1, change=change)
        assert {alarm.kind for alarm in found(tmp_path)} == {kind}
        assert found(tmp_path, **setting) == []
    write(tmp_path, 1, change=leaking)
    assert {alarm.kind for alarm in found(tmp_path, 900, memory_fraction=0.6)} == {"memory_growth"}
    assert found(tmp_path, 900, memory_fraction=1.0) == [], "the run ends before"


def test_an_evaluation_that_rises(tmp_path: Path) -> None:
    write(tmp_path, 1)
    losses = [3.0, 2.5, 2.4, 2.45, 2.5, 2.6]
    lines = [{"step": 50 * i, "kind": "eval", "eval_loss": loss} for i, loss in enumerate(losses, 1)]
    (tmp_path / steps.EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (alarm,) = found(tmp_path)
    assert (alarm.kind, alarm.step) == ("eval_loss", 300)
    assert "the best was 2.4 at step 150" in alarm.message
    assert found(tmp_path, eval_patience=4) == []


NCCL_LOG = """node:1:2 [0] NCCL INFO NET/IB : No device found.
node:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[0] [send] via NET/{net}/0
node:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
"""


def test_nccl_over_sockets_is_read_from_its_log(tmp_path: Path) -> None:
    write(tmp_path, 1)
    log = tmp_path / "nccl-node-17.log"
    log.write_text(NCCL_LOG.format(net="IB"))
    assert found(tmp_path) == []
    log.write_text(NCCL_LOG.format(net="Socket"))
    (alarm,) = found(tmp_path)
    assert alarm.kind == "sockets"
    assert "1 of 1 channels between nodes over sockets, and there is infiniband-400" in alarm.message
    assert nccl.environment({}, tmp_path)["NCCL_DEBUG_FILE"] == f"{tmp_path}/nccl-%h-%p.log"
    assert nccl.environment({"NCCL_DEBUG": "WARN"}, tmp_path) == {}, "the user's own directions stand"


def test_a_trace_of_a_whole_run_stays_small(tmp_path: Path) -> None:
    raised: list[Alarm] = []
    patrol = Patrol(write(tmp_path, 3, number=2000, ranks=1), Watch(), 1, raised=raised.append)
    patrol.round()
    assert raised == []
    assert len(patrol.past.memory[0].whole.points) <= SAMPLES
    assert patrol.past.memory[0].whole.points[0][0] == 1
    assert len(patrol.past.joined) < 100
    assert not patrol.joined.open


def test_every_kind_is_a_setting_and_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "watch.md").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"`{kind}`" in text, kind
        assert kind == "failed" or kind in Watch.model_fields
    assert {*OF_STEPS, *OF_EVALUATIONS, "sockets", "stall", "failed"} == set(KINDS)
    assert all(f"`{field}`" in text for field in Watch.model_fields if field != "min_supervised_fraction")


def test_a_stall_has_to_end_before_the_collectives_do(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("watch: {stall_seconds: 400}\ntrain: {ddp_timeout: 600}\n")
    with pytest.raises(UserError, match=r"watch\.stall_seconds.*400"):
        runfile.read(path)


def test_ranks_absent_from_collectives() -> None:
    def calls(last: int) -> dict[str, Any]:
        return {
            "0 default_pg": {"last": last, "recent": {str(n): f"nccl:all_reduce of {n}" for n in range(5, last + 1)}}
        }

    assert collectives.absent({0: calls(7), 1: calls(7)}) == []
    assert collectives.absent({0: calls(7), 1: calls(6), 2: {}}) == [
        "ranks 1, 2 absent from nccl:all_reduce of 7 (number 7 of group 0 default_pg), rank 0 in it"
    ]
    shard = {"1 shard": {"last": 3, "recent": {"3": "nccl:all_gather"}}}
    assert collectives.absent({0: shard, 1: calls(6)}) == [], "different groups wait for different calls"


def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    """One that is stopped or dead writes nothing; the message is the lowest living rank's."""
    told: list[Alarm] = []
    dead = {"rank": 0, "host": "node-a", "pid": 4711, "time": time.time() - 1000, "step": 8, "phase": "forward"}
    (tmp_path / "heartbeat-rank0.json").write_text(json.dumps({**dead, "stalled": False, "collectives": {}}))
    heart = Heartbeat(tmp_path, 1, 2, 0.4, lambda: Position(9, "backward", 0), told.append, None)
    heart.start()
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    heart.close()
    (alarm,) = told
    assert "no sign of life from rank 0 (pid 4711 on node-a)" in alarm.message
    assert "rank 1 in backward of step 9" in alarm.message
    assert "test_a_silent_rank_is_named" in (tmp_path / "stacks-rank1.txt").read_text()


def test_progress_is_no_stall(tmp_path: Path) -> None:
    told: list[Alarm] = []
    heart = Heartbeat(tmp_path, 0, 1, 0.8, lambda: Position(1, "forward", time.monotonic()), told.append, None)
    heart.start()
    time.sleep(1.6)
    heart.close()
    assert told == []
    assert not (tmp_path / "stacks-rank0.txt").exists()
    assert heartbeat.read(tmp_path)[0]["phase"] == "forward"


def test_a_line_is_read_once_and_only_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert list(tail.objects()) == []
    path.write_text('{"a": 1}\n{"a": ')
    assert list(tail.objects()) == [{"a": 1}]
    with path.open("a") as handle:
        handle.write('2}\nnot json\n[3]\n{"a": 4}\n')
    assert list(tail.objects()) == [{"a": 2}, {"a": 4}]
    path.write_text('{"a": 5}\n')
    assert list(tail.objects()) == [{"a": 5}], "a file that was cut back is read anew"


def test_the_page_for_prometheus() -> None:
    latest: dict[int, Record] = {
        0: {"step": 3, "loss": 2.5, "rss_gib": 1.0, "gpu_throttle": []},
        1: {"step": 3, "rss_gib": 2},
    }
    lines = prometheus.exposition('a "b"\n', latest, {"straggler": 2}).splitlines()
    assert 'windlass_loss{run="a \\"b\\"\\n"} 2.5' in lines
    assert 'windlass_rss_gib{run="a \\"b\\"\\n",rank="1"} 2.0' in lines
    assert 'windlass_alarms_total{run="a \\"b\\"\\n",kind="straggler"} 2' in lines
    assert not any("throttle" in line for line in lines)
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_the_page_is_served_on_loopback_and_a_taken_port_is_said() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    page = prometheus.Page("127.0.0.1", port, lambda: "windlass_step 1\n")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert answer.read() == b"windlass_step 1\n"
        with pytest.raises(UserError, match="can't be served"):
            prometheus.Page("127.0.0.1", port, str)
    finally:
        page.close()


def drawn(view: live.View) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(view.draw(time.time()))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_live_view_from_files_alone(tmp_path: Path) -> None:
    write(tmp_path, 1, number=40)
    (tmp_path / "manifest.json").write_text('{"state": "running"}')
    (tmp_path / "plan.json").write_text('{"batch": {"steps": 80}}')
    append(tmp_path, Alarm("straggler", 33, "slow in \x1b[31mforward [red]", 2, "stop"))
    view = live.View(tmp_path)
    view.round()
    text = drawn(view)
    assert "running  step 40 of 80" in text
    assert "1 alarm\n  step 33 rank 2 straggler: slow in [31mforward [red]" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith("   ") and line.split()[0].isdigit()] == [
        "0",
        "1",
        "2",
        "3",
    ]
    old = {"rank": 0, "time": time.time() - 500, "phase": "forward", "step": 40}
    (tmp_path / "heartbeat-rank0.json").write_text(json.dumps(old))
    view.round()
    assert "no sign of life from any rank for 8:2" in drawn(view)
    assert "forward" in drawn(view)


def test_the_live_view_follows_until_the_run_is_over(tmp_path: Path) -> None:
    write(tmp_path, 1, number=3)
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"state": "running"}')
    view, seen = live.View(tmp_path), list[str]()
    view.round()
    threading.Timer(0.3, manifest.write_text, ['{"state": "finished"}']).start()
    live.follow(view, lambda: seen.append(view.state), 0.05)
    assert seen[0] == "running"
    assert seen[-1] == "finished"


def test_a_folder_without_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        live.View(tmp_path)
    with pytest.raises(UserError, match=r"nowhere: is not there"):
        live.View(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file: is not a folder"):
        live.View(tmp_path / "file")


ODD: list[Any] = [None, -1, 1e308, math.nan, "text", [], [None], {}, {"a": "b"}, True]
READ = ("steps-rank0.jsonl", "meter-rank0.json", "manifest.json", "plan.json", "alarms.jsonl", "events.jsonl")


@pytest.mark.parametrize("name", [*READ, "heartbeat-rank0.json"])
def test_odd_values_anywhere_are_survived(name: str, tmp_path: Path) -> None:
    """Another version's files, or damaged ones."""
    sound: dict[str, dict[str, Any]] = {
        "steps-rank0.jsonl": record(1, random.Random(0)) | {"loss": 2.0, "learning_rate": 0.1},
        "meter-rank0.json": {"ranks": 1, "hardware": {"gpu": None}},
        "manifest.json": {"state": "running"},
        "plan.json": {"batch": {"steps": 80}},
        "alarms.jsonl": {"kind": "stall", "step": 3, "rank": 0, "level": "stop", "message": "m"},
        "events.jsonl": {"kind": "eval", "step": 3, "eval_loss": 1.5},
        "heartbeat-rank0.json": {"rank": 0, "time": time.time(), "phase": "forward", "step": 4},
    }
    for each, value in sound.items():
        (tmp_path / each).write_text(json.dumps(value) + "\n")
    view = live.View(tmp_path)
    view.round()
    assert "2.0" in drawn(view) or "2 " in drawn(view)
    for key in sound[name]:
        for odd in ODD:
            (tmp_path / name).write_text(json.dumps({**sound[name], key: odd}) + "\n")
            try:
                view = live.View(tmp_path)
                view.round()
                drawn(view)
            except Exception as error:
                raise AssertionError(f"{name}: {key} = {odd!r}") from error
    for text in ("", "[]", "no JSON", '{"a": '):
        (tmp_path / name).write_text(text)
        view = live.View(tmp_path)
        view.round()
        drawn(view)


def test_watching_needs_no_torch(tmp_path: Path) -> None:
    import subprocess

    write(tmp_path, 1, number=3)
    command = [sys.executable, "-X", "importtime", "-m", "windlass", "watch", str(tmp_path), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "step 3" in done.stdout
    names = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "rich" in names
    assert not names & {"torch", "transformers", "numpy"}


LACKING = sorted(name for name in names.TRACKERS if names.absent_trackers(name))[:2]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    assert len(LACKING) == 2, "nobody has all of them"
    tiny.write(tmp_path / "model", tokenizer=False)
    text = f"""
        model: {{model_name_or_path: {tmp_path}/model}}
        lora: {{target_modules: [o_proj]}}
        data: {{dataset_name_or_path: {tmp_path}/none, text_field: text}}
        train: {{output_dir: {tmp_path}/out, report_to: [{", ".join(LACKING)}], bf16: false, max_steps: 1}}
        cluster: {{nodes: 1, gpus_per_node: 1, gpu: cpu}}
    """
    (tmp_path / "run.yaml").write_text(textwrap.dedent(text))
    with pytest.raises(UserError) as caught:
        train.train(
            lambda: planning.make(runfile.read(tmp_path / "run.yaml")),
            arguments=[],
            environ={},
            resume=False,
            say=lambda error: pytest.fail(str(error)),
        )
    problems = caught.value.problems
    assert [problem.problem for problem in problems] == [f"{name} is not installed" for name in LACKING]
    assert all("run.yaml:5: train.report_to" in problem.where for problem in problems)
    assert all(problem.hint.startswith("pip install ") for problem in problems)
    assert not (tmp_path / "out").exists()
    results = check_trackers(runfile.read(tmp_path / "run.yaml"))
    assert [(result.name, result.verdict) for result in results] == [(f"tracker {name}", FAIL) for name in LACKING]


def test_the_hint_names_the_extra_of_each_tracker_that_is_proven() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*names.TRACKER_EXTRAS} <= {*extras} & {*names.TRACKERS}
    for name in set(names.TRACKER_EXTRAS) & {*names.absent_trackers([*names.TRACKER_EXTRAS])}:
        assert names.absent_trackers(name) == {name: f"pip install 'windlass[{name}]'"}
