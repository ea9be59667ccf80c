"""Run all detectors over one run folder, from its files alone, once or in a thread of the run."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

from windlass import run_folder
from windlass.errors import UserError
from windlass.files import append_json_line, read_json
from windlass.observe import steps
from windlass.observe.reader import JoinedSteps, Tail
from windlass.observe.watch.detectors import BY_KIND, DETECTORS, EVALUATIONS, STEPS, Alarm, History, Memory, make_hint
from windlass.runfile import RunFile, ScriptRun, Watch

# Fields of the whole job: all ranks have the first rank's value.
OF_THE_JOB: Final = ("step", "epoch", "loss", "grad_norm", "learning_rate", "job_tokens")
ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def format_prometheus(run: str, latest: Mapping[int, Mapping[str, Any]], alarms: Mapping[str, int]) -> str:
    """Format `windlass_FIELD{run,rank}` for every numeric field of the step files, and `windlass_alarms_total`."""
    counted = {name for record in latest.values() for name in steps.unit_fields(steps.read_unit(record))}
    own = {name: ["", "as the script's meter counts"] for name in sorted(counted - steps.FIELDS.keys())}
    named = f'run="{run.translate(ESCAPES)}"'
    lines = []
    for field, (unit, meaning) in (steps.FIELDS | own).items():
        found = {rank: record[field] for rank, record in latest.items() if type(record.get(field)) in (int, float)}
        if found:
            lines.append(f"# HELP windlass_{field} {meaning}{f' ({unit})' if unit else ''}")
            lines.append(f"# TYPE windlass_{field} gauge")
        if found and field in OF_THE_JOB:
            lines.append(f"windlass_{field}{{{named}}} {float(next(iter(found.values())))!r}")
        else:
            lines += [f'windlass_{field}{{{named},rank="{rank}"}} {float(value)!r}' for rank, value in found.items()]
    lines.append("# HELP windlass_alarms_total alarms of the watch since this run was started or resumed")
    lines.append("# TYPE windlass_alarms_total counter")
    lines += [f'windlass_alarms_total{{{named},kind="{kind}"}} {count}' for kind, count in sorted(alarms.items())]
    return "".join(f"{line}\n" for line in lines)


class MetricsServer:
    """Serves `/metrics` from its own thread."""

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == "/metrics"
                body = text().encode() if found else b"see /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Log nothing for scrapes."""

        try:
            self.server = ThreadingHTTPServer((address, port), Handler)
        except OSError as error:
            problem = f"can't listen on {address}:{port}: {error.strerror}"
            raise UserError(problem, "watch.prometheus_port", "choose a free port") from None
        self.thread = threading.Thread(target=self.server.serve_forever, name="windlass prometheus", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)


EVERY_SECONDS: Final = 1.0
QUIET_STEPS: Final = 100  # after which the same alarm of the same rank is raised again
OFF, WARN, CHECKPOINT, STOP = "off", "warn", "checkpoint", "stop"

NCCL_LOG: Final = "nccl-%h-%p.log"  # NCCL fills in the host and the process
# `… NCCL INFO Channel 00/0 : 1[0] -> 2[0] [send] via NET/Socket/0`; over InfiniBand `via NET/IB/0/GDRDMA`.
CHANNEL: Final = re.compile(rb"via NET/([A-Za-z]+)/\d+")


def make_environment(environ: Mapping[str, str], job: RunFile | ScriptRun, folder: Path) -> dict[str, str]:
    """Return variables that make torch and NCCL record for the watch, unless set by the user; read at connection."""
    wanted = {}
    if job.watch.stall != OFF and not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & environ.keys():
        wanted["TORCH_FR_BUFFER_SIZE"] = "2000"
    # Submitted jobs get NCCL_DEBUG=WARN from windlass; any other value, or one in the run file, is the user's own.
    own_debug = "NCCL_DEBUG" in job.cluster.env or environ.get("NCCL_DEBUG", "WARN") != "WARN"
    if job.watch.sockets != OFF and job.cluster.nodes > 1 and not own_debug and "NCCL_DEBUG_FILE" not in environ:
        log = str(folder / NCCL_LOG)
        wanted |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log}
    return wanted


class Patrol:
    """Runs the detectors: `round` reads new records and passes each alarm to `raised`, once until it was quiet a while.

    Rank 0 also has it as a thread, from `start` to `close`, with the page for Prometheus.
    """

    def __init__(
        self, folder: Path, limits: Watch, ranks: int, *, network: str = "", raised: Callable[[Alarm], None]
    ) -> None:
        self.folder, self.limits, self.raised = folder, limits, raised
        self.network = network if network.startswith("infiniband") else ""
        self.history = History(limits)
        self.joined = JoinedSteps(folder, ranks)
        self.events = Tail(folder / run_folder.EVENTS)
        self.nccl_logs: dict[Path, Tail] = {}
        self.channels: Counter[str] = Counter()  # between nodes, by transport: IB, Socket, or a plugin's name
        self.last: dict[tuple[str, int | None], int] = {}  # the step at which an alarm was raised
        self.from_step = 0  # steps up to here were checked before the run was resumed
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="windlass watch", daemon=True)
        self.page: MetricsServer | None = None

    def serve(self, name: str) -> None:
        """Serve the page for Prometheus if one is configured."""

        def metrics() -> str:
            with self.lock:
                return format_prometheus(name, self.joined.latest, self.counts)

        if self.limits.prometheus_port is not None:
            self.page = MetricsServer(self.limits.prometheus_address, self.limits.prometheus_port, metrics)

    def start(self) -> None:
        self.thread.start()

    def _run(self) -> None:
        while not self.over.wait(EVERY_SECONDS):
            self.check_new_records()

    def close(self) -> None:
        """Stop after a last round over what has been written since."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join(10)
        self.check_new_records()
        if self.page is not None:
            self.page.close()
            self.page = None

    def check_new_records(self) -> None:
        with self.lock:
            for step, records in self.joined.read_new():
                if step > self.from_step:
                    if not self.history.memory:
                        self.history.memory = read_memory_limits(self.folder, list(records))
                    self.history.add(step, records)
                    self._run_detectors(STEPS, step)
            for event in self.events.objects():
                at, loss = event.get("step"), event.get("eval_loss")
                if event.get("kind") == "eval" and isinstance(loss, int | float) and isinstance(at, int):
                    self.history.evaluations.append((at, float(loss)))
                    if at > self.from_step:
                        self._run_detectors(EVALUATIONS, at)
            if self.network and self.limits.sockets != OFF:
                self._read_nccl_logs()

    def raise_alarm(self, alarm: Alarm) -> None:
        """Raise an alarm with the action of its kind, unless that is off or it was raised a short while ago."""
        action = alarm.level if alarm.kind in ("non_finite", "failed") else getattr(self.limits, alarm.kind)
        before = self.last.get((alarm.kind, alarm.rank))
        repeated = before is not None and alarm.step < before + QUIET_STEPS and not BY_KIND[alarm.kind].every_time
        if action == OFF or repeated:
            return
        self.last[alarm.kind, alarm.rank] = alarm.step
        self.counts[alarm.kind] += 1
        self.raised(dataclasses.replace(alarm, level=action))

    def _run_detectors(self, reads: str, step: int) -> None:
        for detector in DETECTORS:
            if detector.reads == reads and detector.rule and getattr(self.limits, detector.kind) != OFF:
                for message, rank in detector.rule(self.history):
                    self.raise_alarm(Alarm(detector.kind, step, message, rank))

    def _read_nccl_logs(self) -> None:
        for path in self.folder.glob("nccl-*.log"):
            for lines in self.nccl_logs.setdefault(path, Tail(path)).lines():
                self.channels.update(match[1].decode() for line in lines if (match := CHANNEL.search(line)))
        if (sockets := self.channels["Socket"]) and ("sockets", None) not in self.last:
            count = f"{sockets} of {self.channels.total()}"
            message = f"NCCL sends {count} channels between nodes over sockets, and there is {self.network}"
            self.raise_alarm(
                Alarm("sockets", max((r["step"] for r in self.joined.latest.values()), default=0), message)
            )


def read_memory_limits(folder: Path, ranks: list[int]) -> dict[int, Memory]:
    """Return the memory that each rank may use: its GPU's, or its share of its host's."""
    about = {rank: read_json(folder / run_folder.METER.format(rank=rank)).get("hardware", {}) for rank in ranks}
    hosts = [facts.get("host") for facts in about.values()]
    found = {}
    for rank, facts in about.items():
        gpus = [gpu.get("memory_gib") for gpu in facts.get("gpus") or () if gpu.get("name") == facts.get("gpu")]
        gib = gpus[0] if gpus else (facts.get("memory_gib") or 0) / hosts.count(facts.get("host"))
        if gib and (gpus or not facts.get("gpu")):
            found[rank] = Memory(gib)
    return found


def report_alarm(folder: Path, alarm: Alarm, say: Callable[[str], None]) -> None:
    """Log and print an alarm."""
    hint, unwritten = make_hint(alarm.kind, folder), ""
    try:
        append_json_line(folder / run_folder.ALARMS, dataclasses.asdict(alarm))
    except OSError as error:
        unwritten = f"; not in {run_folder.ALARMS}: {error.strerror}"
    say(f"alarm: {alarm}{unwritten}" + (f"\nhint: {hint}" if hint else ""))


class ScriptWatch:
    """Watches a script's ranks from the process that started them: `with ScriptWatch(...)`.

    Create it before the ranks start: what is in the folder then is left from an interrupted run, and was judged then.
    stop: ends the ranks. `why`: the alarm that caused it, if one did.
    """

    def __init__(self, run: ScriptRun, ranks: int, stop: Callable[[], None], say: Callable[[str], None]) -> None:
        self.folder, self.limits, self.stop, self.say = Path(run.folder), run.watch, stop, say
        self.name, self.why = run.name or self.folder.resolve().name, ""
        self.patrol = Patrol(self.folder, run.watch, ranks, network=str(run.cluster.network), raised=self._on_alarm)
        for tail in (*self.patrol.joined.tails.values(), self.patrol.events):
            tail.skip()

    def __enter__(self) -> Self:
        self.patrol.serve(self.name)
        self.patrol.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.patrol.close()

    def _on_alarm(self, alarm: Alarm) -> None:
        report_alarm(self.folder, alarm, self.say)
        # A language model's own loop stops itself at a loss that is not finite; a script's ranks are stopped from here.
        lines = self.patrol.history.joined[-1].values() if alarm.kind == "non_finite" else ()
        broken = self.limits.non_finite == STOP and any("loss" in (line.get("non_finite") or ()) for line in lines)
        if (alarm.level == STOP or broken) and not self.why and not self.patrol.over.is_set():
            self.why = str(alarm)
            self.stop()
