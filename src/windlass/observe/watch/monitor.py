"""Run all detectors over one run folder, from its files alone: once, in a thread of the run, or beside a script."""

import dataclasses
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from windlass import run_folder
from windlass.files import append_json_line, read_json
from windlass.observe.reader import JoinedSteps, Tail, read_kept
from windlass.observe.watch.detectors import (
    EVALUATION_RULES,
    EVERY_TIME,
    STEP_RULES,
    Alarm,
    Findings,
    History,
    Memory,
    make_hint,
)
from windlass.observe.watch.prometheus import format_prometheus, serve_metrics
from windlass.runfile import RunFile, ScriptRun, Watch

EVERY_SECONDS: Final = 1.0  # between two readings of the files
QUIET_STEPS: Final = 100  # after which the same alarm of the same rank is raised again
# Actions on an alarm.
OFF: Final = "off"
CHECKPOINT: Final = "checkpoint"
STOP: Final = "stop"

NCCL_LOG: Final = "nccl-%h-%p.log"  # NCCL fills in the host and the process
# `… NCCL INFO Channel 00/0 : 1[0] -> 2[0] [send] via NET/Socket/0`; over InfiniBand `via NET/IB/0/GDRDMA`.
CHANNEL: Final = re.compile(rb"via NET/([A-Za-z]+)/\d+")


EARLIER: Final = dict[Path, tuple[int, int]]()  # NCCL's logs of this run's tries before this one


def identify(path: Path) -> tuple[int, int]:
    """Return what tells a log from one that a restarted pod's process of the same number writes over it."""
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def make_environment(environ: Mapping[str, str], job: RunFile | ScriptRun, folder: Path) -> dict[str, str]:
    """Return variables that make torch and NCCL record for the watch, unless set by the user; read at connection."""
    variables = {}
    if job.watch.stall != OFF and not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & environ.keys():
        variables["TORCH_FR_BUFFER_SIZE"] = "2000"
    # Submitted jobs get NCCL_DEBUG=WARN from windlass; any other value, or one in the run file, is the user's own.
    is_debug_set = "NCCL_DEBUG" in job.cluster.env or environ.get("NCCL_DEBUG", "WARN") != "WARN"
    if job.watch.sockets != OFF and job.cluster.size[0] > 1 and not is_debug_set and "NCCL_DEBUG_FILE" not in environ:
        EARLIER.update((path, identify(path)) for path in folder.glob("nccl-*.log"))
        log = str(folder / NCCL_LOG)
        variables |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log}
    return variables


class Monitor:
    """Runs the detectors on new records and passes each alarm to `raised`; a repeated one again after QUIET_STEPS.

    Rank 0 also starts its `thread`, which `close` ends, with the page for Prometheus.
    """

    def __init__(
        self, folder: Path, limits: Watch, ranks: int, *, network: str = "", raised: Callable[[Alarm], None]
    ) -> None:
        self.folder = folder
        self.limits = limits
        self.raised = raised
        self.network = network if network.startswith("infiniband") else ""
        self.history = History(limits)
        self.joined = JoinedSteps(folder, ranks)
        self.events = Tail(folder / run_folder.EVENTS)
        self.log_folders = [folder, *filter(None, [run_folder.find_sweep(folder)])]  # NCCL writes one for all trials
        self.nccl_logs: dict[Path, Tail] = {}
        self.channels: Counter[str] = Counter()  # between nodes, by transport: IB, Socket, or a plugin's name
        self.last: dict[tuple[str, int | None], int] = {}  # the step at which an alarm was raised
        self.from_step = 0  # steps up to here were checked before the run was resumed
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="windlass watch", daemon=True)
        self.close_page: Callable[[], None] | None = None

    def serve(self, name: str) -> None:
        """Serve the page for Prometheus if one is configured."""

        def metrics() -> str:
            with self.lock:
                return format_prometheus(name, self.joined.latest, self.counts)

        if self.limits.prometheus_port is not None:
            self.close_page = serve_metrics(self.limits.prometheus_address, self.limits.prometheus_port, metrics)

    def _run(self) -> None:
        while not self.over.wait(EVERY_SECONDS):
            self.check_new_records()

    def close(self) -> None:
        """Stop after a last round over what has been written since."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join(10)
        self.check_new_records()
        if self.close_page is not None:
            self.close_page()
            self.close_page = None

    def check_new_records(self) -> None:
        with self.lock:
            for step, records in self.joined.read_new():
                if step <= self.from_step:
                    continue
                if not self.history.memory:
                    self.history.memory = read_memory_limits(self.folder, list(records))
                self.history.add(step, records)
                self._run_rules(STEP_RULES, step)
            for event in self.events.objects():
                if event.get("kind") == "eval":
                    self._check_evaluation(event)
            if self.network and self.limits.sockets != OFF:
                self._read_nccl_logs()

    def _check_evaluation(self, event: Mapping[str, Any]) -> None:
        step = event.get("step")
        loss = event.get("eval_loss")
        if not isinstance(step, int) or not isinstance(loss, int | float):
            return
        self.history.evaluations.append((step, float(loss)))
        self.history.kept = read_kept(event, "worse")
        if step > self.from_step:
            self._run_rules(EVALUATION_RULES, step)

    def raise_alarm(self, alarm: Alarm) -> None:
        """Raise an alarm with the action of its kind, unless that is off or it was raised a short while ago."""
        acted_on = alarm.kind in ("non_finite", "failed")  # by the loop itself, or by the failure
        action = alarm.level if acted_on else getattr(self.limits, alarm.kind)
        last = self.last.get((alarm.kind, alarm.rank))
        is_repeated = last is not None and alarm.step < last + QUIET_STEPS and alarm.kind not in EVERY_TIME
        if action == OFF or is_repeated:
            return
        self.last[alarm.kind, alarm.rank] = alarm.step
        self.counts[alarm.kind] += 1
        self.raised(dataclasses.replace(alarm, level=action))

    def _run_rules(self, rules: Iterable[Callable[[History], Findings]], step: int) -> None:
        for rule in rules:
            if getattr(self.limits, rule.__name__) != OFF:
                for message, rank in rule(self.history):
                    self.raise_alarm(Alarm(rule.__name__, step, message, rank))

    def _read_nccl_logs(self) -> None:
        found = {path for folder in self.log_folders for path in folder.glob("nccl-*.log")}
        for path in found:
            if EARLIER.get(path) == identify(path):
                continue
            for lines in self.nccl_logs.setdefault(path, Tail(path)).lines():
                matches = map(CHANNEL.search, lines)
                self.channels.update(match[1].decode() for match in matches if match)
        sockets = self.channels["Socket"]
        if sockets and ("sockets", None) not in self.last:
            count = f"{sockets} of {self.channels.total()}"
            message = f"NCCL sends {count} channels between nodes over sockets, and there is {self.network}"
            step = max((record["step"] for record in self.joined.latest.values()), default=0)
            self.raise_alarm(Alarm("sockets", step, message))


class ScriptWatch:
    """Watches a script's ranks from the process that started them: `with ScriptWatch(...)`.

    Create it before the ranks start: what is in the folder then is left from an interrupted run, and was judged then.
    stop: ends the ranks. `why`: the alarm that caused it, if one did.
    """

    def __init__(self, run: ScriptRun, ranks: int, stop: Callable[[], None], say: Callable[[str], None]) -> None:
        self.folder = Path(run.folder)
        self.limits = run.watch
        self.stop = stop
        self.say = say
        self.name = run.name or self.folder.resolve().name
        self.why = ""
        self.monitor = Monitor(self.folder, run.watch, ranks, network=str(run.cluster.network), raised=self._on_alarm)
        for tail in (*self.monitor.joined.tails.values(), self.monitor.events):
            tail.skip()

    def __enter__(self) -> Self:
        self.monitor.serve(self.name)
        self.monitor.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.monitor.close()

    def _on_alarm(self, alarm: Alarm) -> None:
        report_alarm(self.folder, alarm, self.say)
        is_stop = alarm.level == STOP
        if alarm.kind == "non_finite" and self.limits.non_finite == STOP:  # a language model's own loop stops itself
            records = self.monitor.history.joined[-1].values()
            is_stop = is_stop or any("loss" in (record.get("non_finite") or ()) for record in records)
        if is_stop and not self.why and not self.monitor.over.is_set():
            self.why = str(alarm)
            self.stop()


def read_memory_limits(folder: Path, ranks: list[int]) -> dict[int, Memory]:
    """Return the memory that each rank may use: its GPU's, or its share of its host's."""
    hardware = {rank: read_json(folder / run_folder.METER.format(rank=rank)).get("hardware", {}) for rank in ranks}
    hosts = [facts.get("host") for facts in hardware.values()]
    memory = {}
    for rank, facts in hardware.items():
        gpus = [gpu.get("memory_gib") for gpu in facts.get("gpus") or () if gpu.get("name") == facts.get("gpu")]
        gib = gpus[0] if gpus else (facts.get("memory_gib") or 0) / hosts.count(facts.get("host"))
        if gib and (gpus or not facts.get("gpu")):
            memory[rank] = Memory(gib)
    return memory


def report_alarm(folder: Path, alarm: Alarm, say: Callable[[str], None]) -> None:
    """Log and print an alarm."""
    text = f"alarm: {alarm}"
    try:
        append_json_line(folder / run_folder.ALARMS, dataclasses.asdict(alarm))
    except OSError as error:
        text += f"; not in {run_folder.ALARMS}: {error.strerror}"
    hint = make_hint(alarm.kind, folder)
    say(f"{text}\nhint: {hint}" if hint else text)
