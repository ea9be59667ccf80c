"""Each detector on made-up step files: it reports its fault and nothing else. And the files around them."""

import io
import json
import math
import os
import random
import re
import textwrap
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from rich.console import Console

from windlass import run_folder, runfile, start, tiny
from windlass.errors import UserError
from windlass.files import Table, WriteGuard, append_json_line, read_json_lines
from windlass.launch.check.inputs import check_trackers
from windlass.launch.check.results import FAIL
from windlass.observe.reader import Tail
from windlass.observe.watch import live, monitor
from windlass.observe.watch.detectors import HINTS, SAMPLES, Alarm, make_hint
from windlass.observe.watch.heartbeat import Heartbeat, Position, find_absent_ranks
from windlass.observe.watch.monitor import Monitor, ScriptWatch, make_environment, report_alarm
from windlass.observe.watch.prometheus import format_prometheus, serve_metrics
from windlass.plan import make_plan
from windlass.runfile import Watch, names

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]
VOCABULARY = 300
UNIGRAM_LOSS = 4.6  # of their labels: healthy runs fall from 5 to 2
Fault = Callable[[int, int, Record], None]


def record(step: int, chance: random.Random) -> Record:
    """Return one rank's step of a healthy run: a noisy falling loss, varying times, now and then a slow one."""
    slow = 3.0 if chance.random() < 0.03 else 1.0
    means = {"data": 0.02, "forward": 0.3, "backward": 0.5, "optimizer": 0.01, "communication": 0.15, "other": 0.02}
    seconds = {f"{phase}_seconds": mean * chance.lognormvariate(0, 0.15) * slow for phase, mean in means.items()}
    unused = [1 if chance.random() < 0.01 else 0 for _ in range(3)]  # in a single sample an expert may go without
    return {
        "step": step,
        "time": 1e9 + step,
        **seconds,
        "step_seconds": sum(seconds.values()),
        "tokens": 4096,
        "gpu_peak_gib": 60 * (1 - 0.3 * 0.9**step) + chance.gauss(0, 0.5),
        "gpu_throttle": ["software power cap"] if chance.random() < 0.7 else [],
        "experts": {"experts": 16, "busiest": [2.0] * 3, "idlest": [0.0] * 3, "unused": unused},
        "rows": [8 * step + i for i in range(2)],
    }


def write(folder: Path, seed: int = 1, count: int = 300, ranks: int = 4, fault: Fault | None = None) -> Path:
    chance = random.Random(seed)
    files = [(folder / run_folder.STEPS.format(rank=rank)).open("w") for rank in range(ranks)]
    for rank in range(ranks):
        hardware = {"host": "node", "gpu": "H200", "gpus": [{"name": "H200", "memory_gib": 141.0}] * ranks}
        (folder / run_folder.METER.format(rank=rank)).write_text(json.dumps({"ranks": ranks, "hardware": hardware}))
    for step in range(1, count + 1):
        shared = {
            "loss": 2 + 3 * 0.98**step + chance.gauss(0, 0.15),
            "grad_norm": (1 + 3 * 0.97**step) * chance.lognormvariate(0, 0.3),
            "learning_rate": 1e-4,
        }
        for rank in range(ranks):
            line = record(step, chance) | shared
            if fault is not None:
                fault(step, rank, line)
            files[rank].write(json.dumps(line) + "\n")
    for file in files:
        file.close()
    write_evaluations(folder, [2 + 3 * 0.8**i + chance.gauss(0, 0.02) for i in range(1, 7)])
    return folder


def write_evaluations(folder: Path, losses: list[float]) -> None:
    lines = [{"time": 0, "step": 50 * i, "kind": "eval", "eval_loss": loss} for i, loss in enumerate(losses, 1)]
    (folder / run_folder.EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def found(folder: Path, max_steps: int = 2000, ranks: int = 4, **settings: Any) -> list[Alarm]:
    raised: list[Alarm] = []
    monitor = Monitor(folder, Watch(**settings), ranks, network="infiniband-400", raised=raised.append)
    monitor.history.max_steps, monitor.history.vocabulary = max_steps, VOCABULARY
    monitor.history.unigram_loss = UNIGRAM_LOSS
    monitor.check_new_records()
    return raised


def test_no_alarm_in_healthy_runs(tmp_path: Path) -> None:
    for seed in range(3):
        assert found(write(tmp_path, seed)) == []


def change(after: int = 0, until: int = 10**9, of: int | None = None, **values: Any) -> Fault:
    """Change values of the steps between two, on one rank or on all; functions get the step and its line."""

    def plant(step: int, rank: int, line: Record) -> None:
        if after < step <= until and of in (None, rank):
            line |= {name: value(step, line) if callable(value) else value for name, value in values.items()}

    return plant


def late(after: int, name: str, seconds: float, of: int | None = None) -> Fault:
    later: Any = {each: lambda _, line, each=each: line[each] + seconds for each in (name, "step_seconds")}
    return change(after, of=of, **later)


def slow_data(step: int, rank: int, line: Record) -> None:
    """Rank 1 reads slowly; the others wait for it in their backward."""
    late(0, "data_seconds" if rank == 1 else "backward_seconds", 0.5)(step, rank, line)


def rounded_away(step: int, _rank: int, line: Record) -> None:
    if step % 50 == 1 and step > 200:
        line["unchanged"] = "4 of the adapter's 8 tensors: a, b"


POISONED = change(76, 77, grad_norm=None, non_finite=["grad_norm"], skipped=True)
BROKEN = change(76, 77, loss=None, non_finite=["loss"])
DIVERGING = change(200, loss=lambda step, line: line["loss"] + (step - 200) * 0.03)
FORGETTING = change(loss=lambda _, line: UNIGRAM_LOSS + line["loss"] / 100)  # all but how often tokens occur
LEAKING = change(of=3, gpu_peak_gib=lambda step, line: line["gpu_peak_gib"] + 0.06 * step)
UNEVEN = change(of=0, gpu_peak_gib=lambda _, line: line["gpu_peak_gib"] + 40)
HOT = change(200, of=1, gpu_throttle=["hardware thermal slowdown"])
DYING = change(100, experts=lambda _, line: {**line["experts"], "unused": [0, 3, 0]})
SATURATED = change(
    loss=lambda step, _: 5.0 + step / 1e4, grad_norm=lambda step, line: line["grad_norm"] / (5000 if step > 3 else 1)
)
GUESSING = change(150, loss=lambda step, _: math.log(VOCABULARY) * (1.005 if step % 2 else 0.995))
UNCHANGING = change(290, loss=lambda step, _: 2.1 + step / 1e9)
FAULTS: dict[str, tuple[Fault, str, int | None, str]] = {
    "backward": (late(150, "backward_seconds", 0.6, of=2), "straggler", 2, "slow in backward"),
    "data": (slow_data, "straggler", 1, "slow in data"),
    "diverging": (DIVERGING, "loss_divergence", None, "the limit is"),
    "forgetting": (FORGETTING, "loss_divergence", None, "the frequencies of the tokens alone give 4.6"),
    "leak": (LEAKING, "memory_growth", 3, "would be used at step"),
    "uneven": (UNEVEN, "memory_imbalance", 0, "the others"),
    "crawling": (late(250, "data_seconds", 1.5), "throughput", None, "most of it goes into data"),
    "hot": (HOT, "throttling", 1, "hardware thermal slowdown"),
    "dead experts": (DYING, "dead_experts", None, "layers 1: up to 3 experts"),
    "spike": (change(119, 120, grad_norm=40.0), "gradient_spike", None, "rank 0, rows 960, 961; rank 1, rows 960, 961"),
    "no gradient": (change(150, grad_norm=0.0), "dead_adapter", None, "exactly zero in 5 steps in a row"),
    "saturated": (SATURATED, "dead_adapter", None, "in the first, and the loss has not fallen"),
    "guessing": (GUESSING, "dead_adapter", None, "of the last 10 steps is 5.704, ln(vocabulary): the model guesses"),
    "unchanging": (UNCHANGING, "dead_adapter", None, "the loss is 2.1 in 10 steps in a row"),
    "rounded away": (rounded_away, "dead_adapter", None, "changed nothing in 4 of the adapter's 8 tensors: a, b; they"),
    "broken": (BROKEN, "non_finite", None, "loss; rank 0, rows 616, 617"),
    "non-finite": (POISONED, "non_finite", None, "grad_norm, update skipped; rank 0, rows 616, 617"),
}
TOLERANT: dict[str, dict[str, Any]] = {
    "backward": {"straggler_share": 0.9},
    "crawling": {"throughput_fraction": 0.1},
    "uneven": {"memory_ratio": 3},
    "diverging": {"deviations": 200},
    "spike": {"gradient_factor": 100},
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_raises_its_alarm_and_no_other(tmp_path: Path, name: str) -> None:
    fault, kind, rank, message = FAULTS[name]
    settings: dict[str, Any] = {"loss_divergence": "off"} if name == "guessing" else {}
    raised = found(write(tmp_path, fault=fault), **settings)
    if name in TOLERANT:
        assert found(tmp_path, **TOLERANT[name]) == [], "thresholds decide"
    assert {(alarm.kind, alarm.rank) for alarm in raised} == {(kind, rank)}
    assert message in raised[0].message
    assert len(raised) <= 3, "once in a while, not at every step"
    (tmp_path / "run.yaml").touch()
    hint = make_hint(kind, tmp_path)
    assert hint
    assert "RUN" not in hint, "its commands name this run"
    if name == "leak":
        assert {alarm.kind for alarm in found(tmp_path, 900, memory_fraction=0.6)} == {"memory_growth"}
        assert found(tmp_path, 900, memory_fraction=1.0) == [], "the run ends before"
        assert found(tmp_path, memory_growth="off") == []
        assert {alarm.level for alarm in found(tmp_path, memory_growth="stop")} == {"stop"}


def test_a_script_is_stopped_by_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """The script itself can skip a gradient that is not finite."""
    for name, fault in (("grad_norm", POISONED), ("loss", BROKEN)):
        folder, stops = tmp_path / name, [0]
        folder.mkdir()
        cluster = SimpleNamespace(network="ethernet")
        job: Any = SimpleNamespace(folder=str(folder), watch=Watch(), name="", cluster=cluster)

        def stop(stops: list[int] = stops) -> None:
            stops[0] += 1

        watch = ScriptWatch(job, 2, stop, lambda _: None)
        write(folder, count=80, ranks=2, fault=fault)
        watch.monitor.check_new_records()
        assert (stops[0], watch.why != "") == ((1, True) if name == "loss" else (0, False))


BETA = 0.1


def write_pairs(folder: Path, seed: int, *, falls: float, count: int = 1500, turned: bool = False) -> Path:
    """Write a run of DPO, one pair a step. An adapter learns nine pairs of ten, and forgets `falls` nats of both
    answers by the end; `turned`: in its last third it prefers the others."""
    chance = random.Random(seed)
    lines = []
    for step in range(1, count + 1):
        gone = min(1.0, 2 * step / count)
        margin = 60 * gone * (1 if chance.random() < 0.9 else -0.5) + chance.gauss(0, 0.01 + 10 * gone)
        margin *= -1 if turned and step > 2 * count / 3 else 1
        length = chance.uniform(40, 400)
        chosen, rejected = -falls * gone + 0.4 * margin, -falls * gone - 0.6 * margin
        weight = 1 / (1 + math.exp(BETA * margin))
        line = record(step, chance) | {
            "loss": math.log1p(math.exp(-BETA * margin)),
            "grad_norm": 4 * weight * chance.lognormvariate(0, 0.3),
            "learning_rate": 1e-5,
            "preference": {
                "rewards/chosen": BETA * chosen,
                "rewards/rejected": BETA * rejected,
                "rewards/margins": BETA * margin,
                "rewards/accuracies": float(margin > 0),
                "logps/chosen": -length + chosen,
                "logps/rejected": -1.1 * length + rejected,
            },
        }
        lines.append(json.dumps(line))
    (folder / run_folder.STEPS.format(rank=0)).write_text("\n".join(lines) + "\n")
    return folder


def found_in_pairs(folder: Path, **settings: Any) -> list[Alarm]:
    raised: list[Alarm] = []
    monitor = Monitor(folder, Watch(**settings), 1, raised=raised.append)
    monitor.history.vocabulary = VOCABULARY
    monitor.history.pairs, monitor.history.beta = True, BETA
    monitor.check_new_records()
    return raised


@pytest.mark.takes("replays runs of many steps")
def test_no_alarm_in_healthy_runs_on_pairs(tmp_path: Path) -> None:
    for seed in range(3):
        assert found_in_pairs(write_pairs(tmp_path, seed, falls=5.0)) == []
    # By the rules for tokens they would not be healthy: a pair in the wrong order looks like a spike.
    assert {alarm.kind for alarm in found(tmp_path, ranks=1)} >= {"loss_divergence", "gradient_spike"}


@pytest.mark.fault("both answers of the pairs become unlikely", "`windlass train`", "the answers' log-probability fell")
def test_answers_that_become_unlikely_together(tmp_path: Path) -> None:
    raised = found_in_pairs(write_pairs(tmp_path, 1, falls=90.0))
    assert {alarm.kind for alarm in raised} == {"falling_likelihood"}
    assert "the answers' log-probability fell" in raised[-1].message
    began, ended = map(float, re.findall(r"-\d+(?:\.\d+)?", raised[-1].message)[:2])
    assert -260 < began < -150
    assert ended < began - 50
    for way in ("dpo.sft_weight", "dpo.beta", "train.learning_rate"):
        assert way in make_hint("falling_likelihood", tmp_path)
    assert found_in_pairs(tmp_path, falling_likelihood="off") == []
    assert {alarm.level for alarm in found_in_pairs(tmp_path, falling_likelihood="stop")} == {"stop"}


def test_a_diverging_loss_of_pairs(tmp_path: Path) -> None:
    raised = found_in_pairs(write_pairs(tmp_path, 1, falls=5.0, turned=True))
    assert {alarm.kind for alarm in raised} == {"loss_divergence"}


def test_watch_shows_margin_and_accuracy(tmp_path: Path) -> None:
    write_pairs(tmp_path, 1, falls=5.0, count=60)
    evaluation = {"kind": "eval", "step": 60, "eval_loss": 0.4, "eval_rewards/accuracies": 0.81}
    append_json_line(tmp_path / run_folder.EVENTS, evaluation)
    console = Console(file=io.StringIO(), width=100)
    live.watch(tmp_path, once=True, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = list(read_json_lines(tmp_path / run_folder.STEPS.format(rank=0)))[-1]["preference"]
    assert re.search(rf"margin +{last['rewards/margins']:.4g} ", text)
    assert re.search(rf"accuracy +{last['rewards/accuracies']:.4g} ", text)
    assert "evaluation 0.4000 at step 60" in text
    assert re.search("evaluated +81%  chosen answers preferred", text)


@pytest.mark.parametrize("rises", [False, True])
def test_a_loss_at_the_level_of_the_frequencies(tmp_path: Path, rises: bool) -> None:
    """On its way down it is no alarm, even if single steps are far below already; back up there, it is."""

    def passing(step: int, _rank: int, line: Record) -> None:
        share = step / 60 if not rises else 0.9 - step / 600
        line["loss"] = UNIGRAM_LOSS * (1.5 - share if step % 10 else 0.5)

    write(tmp_path, count=60 if not rises else 300, fault=passing)
    settings = {"deviations": 1000}
    messages = [alarm.message for alarm in found(tmp_path, **settings) if alarm.kind == "loss_divergence"]
    assert any("frequencies of the tokens alone" in message for message in messages) == rises


def test_a_kept_set_that_gets_worse(tmp_path: Path) -> None:
    write(tmp_path)
    for step, worse in ((100, 0.02), (200, 0.03)):
        figures = {"eval_keep/old/worse": worse, "eval_keep/old/kl": 0.5, "eval_keep/new/worse": -1.0}
        line = {"time": 0, "step": step, "kind": "eval", "eval_loss": 1.0, **figures}
        append_json_line(tmp_path / run_folder.EVENTS, line)
    (alarm,) = found(tmp_path, keep_tolerance=0.02)
    assert (alarm.kind, alarm.step) == ("kept_worse", 200)
    assert "old by 0.0300" in alarm.message
    assert "new" not in alarm.message
    assert found(tmp_path) == []  # only reported


def test_a_rising_evaluation_loss(tmp_path: Path) -> None:
    write(tmp_path)
    write_evaluations(tmp_path, [3.0, 2.5, 2.4, 2.45, 2.5, 2.6])
    (alarm,) = found(tmp_path)
    assert (alarm.kind, alarm.step) == ("eval_loss", 300)
    assert "the best was 2.4 at step 150" in alarm.message
    assert found(tmp_path, eval_patience=4) == []


NCCL_LOG = """node:1:2 [0] NCCL INFO NET/IB : No device found.
node:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[0] [send] via NET/{net}/0
node:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
"""


def test_sockets_are_found_in_nccls_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run or of the sweep that it is a trial of, and in submitted jobs."""
    monkeypatch.setattr(monitor, "EARLIER", {})
    run_folder.begin_manifest(tmp_path, {run_folder.TRIALS: {"one": run_folder.RUNNING}})
    trial = tmp_path / run_folder.TRIALS / "one"
    trial.mkdir(parents=True)
    write(trial, count=30)
    log = tmp_path / "nccl-node-17.log"
    log.write_text(NCCL_LOG.format(net="IB"))
    assert found(trial) == []
    log.write_text(NCCL_LOG.format(net="Socket"))
    (alarm,) = found(trial)
    assert alarm.kind == "sockets"
    assert "1 of 1 channels between nodes over sockets, and there is infiniband-400" in alarm.message

    def debug(environ: dict[str, str], nodes: int = 2, **env: str) -> str | None:
        job: Any = SimpleNamespace(watch=Watch(), cluster=SimpleNamespace(size=(nodes, 8), env=env))
        return make_environment(environ, job, tmp_path).get("NCCL_DEBUG_FILE")

    assert debug({}) == debug({"NCCL_DEBUG": "WARN"}) == f"{tmp_path}/nccl-%h-%p.log", "WARN is our own default"
    assert debug({"NCCL_DEBUG": "WARN"}, NCCL_DEBUG="WARN") is None, "set in the run file"
    assert debug({"NCCL_DEBUG": "INFO"}) is debug({"NCCL_DEBUG_FILE": "x"}) is debug({}, nodes=1) is None
    assert found(trial) == [], "of an earlier try: the network has been mended since"
    log.write_text(NCCL_LOG.format(net="Socket") * 2)  # by a process of the same number
    assert [alarm.kind for alarm in found(trial)] == ["sockets"]


def test_a_long_run_is_watched_in_constant_space(tmp_path: Path) -> None:
    raised: list[Alarm] = []
    monitor = Monitor(write(tmp_path, 3, count=1000, ranks=1), Watch(), 1, raised=raised.append)
    monitor.check_new_records()
    assert raised == []
    assert len(monitor.history.memory[0].whole_run) <= SAMPLES
    assert monitor.history.memory[0].whole_run[0][0] == 1
    assert len(monitor.history.joined) < 100
    assert not monitor.joined.waiting


def test_every_detector_is_a_setting_and_documented() -> None:
    text = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    for kind in HINTS:
        assert f"`{kind}`" in text, kind
        assert kind in ("disk", "failed") or kind in Watch.model_fields
    assert all(f"`{field}`" in text for field in Watch.model_fields if field != "min_supervised_fraction")


# --- stalls ---


def test_ranks_missing_from_collectives_are_named() -> None:
    def calls(last: int) -> dict[str, Any]:
        recent = {str(number): f"nccl:all_reduce of {number}" for number in range(5, last + 1)}
        return {"0 default_pg": {"last": last, "recent": recent}}

    assert find_absent_ranks({0: calls(7), 1: calls(7)}) == []
    assert find_absent_ranks({0: calls(7), 1: calls(6), 2: {}}) == [
        "ranks 1, 2 absent from nccl:all_reduce of 7 (number 7 of group 0 default_pg), rank 0 in it"
    ]
    shard = {"1 shard": {"last": 3, "recent": {"3": "nccl:all_gather"}}}
    assert find_absent_ranks({0: shard, 1: calls(6)}) == [], "different groups wait for different calls"


def test_a_stall_names_no_rank_of_an_earlier_try(tmp_path: Path) -> None:
    """That had more of them: their last heartbeats are in the folder."""
    stale = {"rank": 1, "host": "node", "pid": 5, "time": time.time(), "step": 9, "phase": "backward", "stalled": True}
    (tmp_path / "heartbeat-rank1.json").write_text(json.dumps(stale))
    raised: list[Alarm] = []
    position = Position(3, "forward", 0)
    guard = WriteGuard(pytest.fail)
    heartbeat = Heartbeat(tmp_path, 0, 1, 60.0, lambda: position, raised.append, None, dict, guard)
    heartbeat._beat(position, 60.0, {})
    heartbeat._report(position, 60.0)
    heartbeat.close()
    (alarm,) = raised
    assert "rank 0 in forward of step 3" in alarm.message
    assert "rank 1" not in alarm.message


# --- files and pages ---


def test_a_line_is_read_once_and_only_when_complete(tmp_path: Path) -> None:
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


def test_rows_below_a_header_are_read_as_objects(tmp_path: Path) -> None:
    """After lines of older versions, from several writers, past a kill in the middle of a header."""
    path = tmp_path / "lines.jsonl"
    records: list[Record] = [
        {"step": 1, "data_seconds": 0.5, "forward_seconds": 1.5, "images": 8},
        {"step": 2, "data_seconds": 1, "forward_seconds": 1, "images": 8, "gpu_throttle": ["heat"]},
        {"step": 3, "data_seconds": 0.5, "forward_seconds": 1.5, "images": None, "non_finite": ["loss"]},
    ]
    derived = {"step_seconds": ("+", "data_seconds", "forward_seconds"), "rate": ("/", "images", "step_seconds")}
    path.write_text('{"step": 0, "step_seconds": 9}\n')
    for killed in (True, False):
        table = Table(derived)
        with WriteGuard(pytest.fail).open(path, "a") as file:
            for record in [*records, *records]:
                file.write(table.encode({**record, "step_seconds": 7}))
            if killed:
                file.write('{"form": 7, "columns": ["st')
    with path.open("a") as file:
        file.write("[1, 2]\n[]\n")
    wanted = [{**record, "step_seconds": 2, "rate": 4} for record in records]
    del wanted[2]["rate"]  # of which a part is not known
    wanted = [{"step": 0, "step_seconds": 9}, *wanted * 4]
    tail = Tail(path)
    assert (list(tail.objects()), list(read_json_lines(path))) == (wanted, wanted)
    assert tail.damaged == [11, 21, 22]
    assert path.read_text().count("columns") == 3 * 2 + 1, "one header for each form and writer"


def test_the_page_for_prometheus() -> None:
    of_pairs = {"rewards/margins": 0.5, "rewards/accuracies": 0.75, "logps/chosen": None}
    latest: dict[int, Record] = {
        0: {"step": 3, "loss": 2.5, "rss_gib": 1.0, "gpu_throttle": [], "preference": of_pairs},
        1: {"step": 3, "rss_gib": 2},
    }
    text = format_prometheus('a "b"\n', latest, {"straggler": 2})
    lines = text.splitlines()
    assert 'windlass_loss{run="a \\"b\\"\\n"} 2.5' in lines
    assert 'windlass_rss_gib{run="a \\"b\\"\\n",rank="1"} 2.0' in lines
    assert 'windlass_alarms_total{run="a \\"b\\"\\n",kind="straggler"} 2' in lines
    assert 'windlass_rewards_accuracies{run="a \\"b\\"\\n"} 0.75' in lines
    assert 'windlass_rewards_margins{run="a \\"b\\"\\n"} 0.5' in lines
    assert not any("throttle" in line or "logps" in line for line in lines)
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_trials_that_train_together_share_the_page_for_prometheus() -> None:
    port = free_port()
    runs = [serve_metrics("127.0.0.1", port, partial(format_prometheus, name, {0: {"step": 3}}, {})) for name in "ab"]

    def scrape() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
            return page.read().decode().splitlines()  # type: ignore[no-any-return]

    lines = scrape()
    place = lines.index("# TYPE windlass_step gauge")
    assert lines[place + 1 : place + 3] == ['windlass_step{run="a"} 3.0', 'windlass_step{run="b"} 3.0']
    assert len([line for line in lines if line.startswith("# TYPE windlass_step ")]) == 1
    runs[0]()
    assert not [line for line in scrape() if '"a"' in line]
    runs[1]()
    serve_metrics("127.0.0.1", port, str)()  # the port is free again


def draw(view: live.View) -> str:
    view.read_new()
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(view.draw(time.time()))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_live_view_shows_and_follows_a_run(tmp_path: Path) -> None:
    write(tmp_path, count=40)
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"state": "running"}')
    (tmp_path / "plan.json").write_text('{"batch": {"steps": 30}}')
    # The plan may have estimated another number than the run counted when it started.
    earlier = time.time() - 700
    append_json_line(tmp_path / "events.jsonl", {"time": earlier, "step": 0, "kind": "start", "steps": 60})
    assert "running  step 40 of 60  " in draw(live.View(tmp_path))
    append_json_line(tmp_path / "events.jsonl", {"time": earlier, "step": 9, "kind": "start", "steps": 80})
    report_alarm(tmp_path, Alarm("straggler", 33, "slow in \x1b[31mforward [red]", 2, "stop"), lambda _: None)
    view = live.View(tmp_path)
    text = draw(view)
    assert "running  step 40 of 80" in text
    assert "1 alarm\n  step 33 rank 2 straggler: slow in [31mforward [red]\n  hint: " in text
    first_cells = [line.split()[0] for line in text.splitlines() if line.startswith("   ")]
    assert [cell for cell in first_cells if cell.isdigit()] == ["0", "1", "2", "3"]
    old = {"rank": 0, "time": time.time() - 500, "phase": "forward", "step": 40}
    (tmp_path / "heartbeat-rank0.json").write_text(json.dumps(old))
    text = draw(view)  # a resumed run that loads: its manifest is newer
    assert "no sign of life" not in text
    assert re.search(r"no heartbeat since it was started at \d\d:\d\d: it prepares or loads, or has died", text)
    os.utime(manifest, (time.time() - 600,) * 2)
    text = draw(view)
    assert "no sign of life from any rank for 8:2" in text
    assert "forward" in text
    assert "note: " not in text
    manifest.write_text('{"state": "running", "run": {"train": {"max_grad_norm": 0.01}}}')
    (tmp_path / "plan.json").write_text('{"estimate": {"step_seconds": 0.1}, "memory": {"gpu_gib": 40}}')

    def drifting(step: int, _rank: int, line: Record) -> None:
        line["experts"] = {"experts": 8, "busiest": [1.5, 1.2 if step < 30 else 4.0], "idlest": [], "unused": []}

    write(tmp_path, count=40, fault=drifting)
    notes = [line for line in draw(live.View(tmp_path)).splitlines() if line.startswith("note: ")]
    assert [note.split(" ", 3)[2] for note in notes] == ["of", "busiest", "step", "peak"]
    assert "layer 1 takes 4.0 times an even share of the tokens, 1.2 times at the start" in notes[1]
    states: list[str] = []

    def show() -> None:
        states.append(view.state)
        manifest.write_text('{"state": "finished"}')

    live.follow(view, show, 0.01)
    assert states == ["running", "finished"]
    (tmp_path / "none").mkdir()
    for name, problem in (("none", "holds no run"), ("nowhere", "is not there"), ("plan.json", "is not a folder")):
        with pytest.raises(UserError, match=f"{name}: {problem}"):
            live.View(tmp_path / name)


def test_the_live_view_of_a_script_without_a_learning_rate(tmp_path: Path) -> None:
    write(tmp_path, count=20, fault=lambda _step, _rank, line: line.pop("learning_rate"))
    assert re.search(r"\nrate +[\d,]+ tokens/s  evaluation \d", draw(live.View(tmp_path)))


def test_between_two_trials_the_earlier_one_stays_in_view(tmp_path: Path) -> None:
    """A sweep records that a trial runs before that has written anything."""
    trials = [tmp_path / run_folder.TRIALS / name for name in ("one", "two")]
    run_folder.begin_manifest(tmp_path, {run_folder.TRIALS: {"one": run_folder.RUNNING}})
    view = live.View(tmp_path)
    assert "running" in draw(view)
    trials[0].mkdir(parents=True)
    run_folder.begin_manifest(write(trials[0], count=3), {})
    assert f"{trials[0]}  running  step 3" in draw(view)
    states = {"one": run_folder.FINISHED, "two": run_folder.RUNNING}
    run_folder.update_manifest(tmp_path, **{run_folder.TRIALS: states})
    assert f"{trials[0]}  running  step 3" in draw(view)
    trials[1].mkdir()
    run_folder.begin_manifest(trials[1], {})
    assert f"{trials[1]}  running  step 0" in draw(view)


ODD: list[Any] = [None, -1, 1e308, math.nan, "text", [], [None], {}, {"a": "b"}, True]
SOUND: dict[str, Record] = {
    "steps-rank0.jsonl": record(1, random.Random(0)) | {"loss": 2.0, "learning_rate": 0.1},
    "meter-rank0.json": {"ranks": 1, "hardware": {"gpu": None}},
    "manifest.json": {"state": "running"},
    "plan.json": {"batch": {"steps": 80}},
    "alarms.jsonl": {"kind": "stall", "step": 3, "rank": 0, "level": "stop", "message": "m"},
    "events.jsonl": {"kind": "eval", "step": 3, "eval_loss": 1.5},
    "heartbeat-rank0.json": {"rank": 0, "time": time.time(), "phase": "forward", "step": 4},
}


def test_the_live_view_survives_odd_values_anywhere(tmp_path: Path) -> None:
    """Files of another version, or damaged ones."""
    for each, value in SOUND.items():
        (tmp_path / each).write_text(json.dumps(value) + "\n")
    assert "1 " in draw(live.View(tmp_path))
    for name, sound in SOUND.items():
        odd_lines = [{**sound, key: odd} for key in sound for odd in ODD]
        for text in (*map(json.dumps, odd_lines), "", "[]", "no JSON", '{"a": '):
            (tmp_path / name).write_text(text + "\n")
            try:
                draw(live.View(tmp_path))
            except Exception as error:
                raise AssertionError(f"{name}: {text}") from error
        (tmp_path / name).write_text(json.dumps(sound) + "\n")


LACKING = sorted(name for name in names.TRACKERS if names.find_absent_trackers(name))[:2]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    assert len(LACKING) == 2, "nobody has all of them"
    (tmp_path / "rows.txt").write_text("a row\n")
    tiny.write_model(tmp_path / "model", tokenizer=False)
    text = f"""
        model: {{model_name_or_path: {tmp_path}/model}}
        lora: {{target_modules: [o_proj]}}
        data: {{dataset_name_or_path: {tmp_path}/rows.txt, dataset_config_name: null, val_fraction: 0.5}}
        train: {{output_dir: {tmp_path}/out, report_to: [{", ".join(LACKING)}], bf16: false, max_steps: 1}}
        cluster: {{nodes: 1, gpus_per_node: 1, gpu: cpu}}
    """
    (tmp_path / "run.yaml").write_text(textwrap.dedent(text))
    with pytest.raises(UserError) as caught:
        start.train(
            lambda: make_plan(runfile.read_run_file(tmp_path / "run.yaml")),
            start.RankCommand([], {}, print_error=lambda error: pytest.fail(str(error))),
            resume=False,
        )
    problems = [(each.problem, each.hint.partition(" ")[0]) for each in caught.value.problems]
    assert problems == [(f"{name} is not installed", "pip") for name in LACKING]
    assert all("run.yaml:5: train.report_to" in problem.where for problem in caught.value.problems)
    assert not (tmp_path / "out").exists()
    results = check_trackers(runfile.read_run_file(tmp_path / "run.yaml"))
    assert [(result.name, result.verdict) for result in results] == [(f"tracker {name}", FAIL) for name in LACKING]
