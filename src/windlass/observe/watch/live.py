"""`windlass watch`: show a run folder in the terminal, during the run or afterwards, from its files alone."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from windlass import run_folder
from windlass.errors import UserError
from windlass.files import read_json
from windlass.observe import steps
from windlass.observe.format import describe_gain, describe_kept, format_plural
from windlass.observe.reader import (
    NAN,
    JoinedSteps,
    Tail,
    as_list,
    as_number,
    drop_nan,
    find_total_steps,
    get_path,
    median,
)
from windlass.observe.symptoms import find_symptoms
from windlass.observe.watch.detectors import make_hint
from windlass.observe.watch.heartbeat import describe_start, read_beats

BARS: Final = "▁▂▃▄▅▆▇█"
WIDTH: Final = 48  # characters of a curve
SILENT_SECONDS: Final = 30.0  # without a sign of life
STATES: Final = {run_folder.FINISHED: "green", run_folder.RUNNING: "cyan", run_folder.FAILED: "bold red"}  # else yellow
LEVELS: Final = {"stop": "bold red", "error": "bold red"}  # else yellow
CURVES: Final = {  # label: field of the step files
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "margin": ("preference", "rewards/margins"),
    "accuracy": ("preference", "rewards/accuracies"),
}
HEADS: Final = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "communication": "wait"}
MAX_ALARMS: Final = 8  # the newest
MAX_RANKS: Final = 16  # the slowest
MAX_BALANCES: Final = 256
MAX_POINTS: Final = 64 * WIDTH
HUGE: Final = 1e300  # sums and differences of smaller numbers stay finite
PIPE_WIDTH: Final = 80  # minimum width of output to a pipe


class View:
    """The state of one run folder as read so far."""

    def __init__(self, folder: Path) -> None:
        self.sweep = folder if run_folder.list_trials(folder) else None
        self._open(folder)

    def _open(self, folder: Path) -> None:
        step_files = run_folder.find_step_files(folder) if folder.is_dir() else {}
        if not step_files and not (folder / run_folder.MANIFEST).is_file():
            problem = "is not a folder" if folder.exists() else "is not there"
            if folder.is_dir():
                problem = "holds no run"
            raise UserError(problem, str(folder), "give a run folder: the output_dir of a run", "not-a-run")
        self.folder = folder
        self.joined = JoinedSteps(folder, 0)
        self.alarm_lines = Tail(folder / run_folder.ALARMS)
        self.event_lines = Tail(folder / run_folder.EVENTS)
        self.alarms: deque[dict[str, Any]] = deque(maxlen=MAX_ALARMS)
        self.alarm_count = 0
        self.evaluation = ""
        self.evaluated: list[str] = []  # further lines about it
        self.total = NAN  # steps, as the run counted them
        self.curves: dict[str, list[float]] = {name: [] for name in CURVES}
        self.seconds: deque[float] = deque(maxlen=20)
        self.norms = 0  # gradients
        self.clipped = 0
        self.busiest: list[list[float]] = []  # experts, by sampled step and layer
        self.peak_gib = NAN  # of a GPU
        self.beats: dict[int, dict[str, Any]] = {}
        self.last_event = NAN  # its time
        self.state = ""
        self.failure = ""

    def read_new(self) -> None:
        current = run_folder.find_current_trial(self.sweep or self.folder)
        if current != self.folder and run_folder.read_manifest(current):  # a trial's state is written before that
            self._open(current)
        if not self.joined.latest:  # the first rank logs the number of ranks; no job has more than a machine room
            ranks = read_json(self.folder / run_folder.METER.format(rank=0)).get("ranks")
            if not isinstance(ranks, int) or not 0 < ranks <= 1 << 20:
                ranks = len(run_folder.find_step_files(self.folder))
            self.joined = JoinedSteps(self.folder, ranks)
        manifest = run_folder.read_manifest(self.folder)
        self.state = str(manifest.get("state") or "unknown")
        self.failure = str(manifest.get("failure") or "")
        self.max_grad_norm = as_number(get_path(manifest, "run", "train", "max_grad_norm"))
        for _, records in self.joined.read_new():
            for name, curve in self.curves.items():
                value = as_number(get_path(records[0], *CURVES[name]))
                if abs(value) < HUGE:
                    curve.append(value)
                if len(curve) > MAX_POINTS:
                    curve[:] = curve[1::2]
            norm = as_number(records[0].get("grad_norm"))
            if norm == norm:
                self.norms += 1
            if norm > self.max_grad_norm > 0:
                self.clipped += 1
            shares = as_list(get_path(records[0].get("experts"), "busiest"))
            if shares:
                self.busiest.append(list(map(as_number, shares)))
                if len(self.busiest) > MAX_BALANCES:
                    self.busiest[:] = self.busiest[::2]
            peaks = [as_number(record.get("gpu_peak_gib")) for record in records.values()]
            self.peak_gib = max(drop_nan([self.peak_gib, *peaks]), default=NAN)
            self.seconds.append(max(get_number(record, "step_seconds") for record in records.values()))
        for alarm in self.alarm_lines.objects():
            self.alarms.append(alarm)
            self.alarm_count += 1
        events = list(self.event_lines.objects())
        counted = find_total_steps(events, None)
        if drop_nan([counted]):
            self.total = counted
        for event in events:
            self.last_event = as_number(event.get("time"))
            if event.get("kind") == "eval" and drop_nan([as_number(event.get("eval_loss"))]):
                self.evaluation = f"evaluation {event['eval_loss']:.4f} at step {get_number(event, 'step'):.0f}"
                gain = describe_gain(event.get("eval_gain"))
                share = as_number(event.get("eval_rewards/accuracies"))
                kept = describe_kept(event)
                self.evaluated = [f"{'evaluated':10} {gain}"] if gain else []
                if drop_nan([share]):
                    self.evaluated.append(f"{'evaluated':10} {share:>10.0%}  chosen answers preferred")
                if kept:
                    self.evaluated.append(f"{'kept':10} {kept.removeprefix('kept ')}")
        self.beats = read_beats(self.folder)

    @property
    def is_over(self) -> bool:
        state = run_folder.read_manifest(self.sweep).get("state") if self.sweep else self.state
        return state != run_folder.RUNNING

    def draw(self, now: float) -> Group:
        """Draw state and time left, curves, a row per rank, symptoms, alarms."""
        plan = read_json(self.folder / run_folder.PLAN)
        clipped = self.clipped / self.norms if self.norms else NAN
        speed = {"step_seconds": median(self.seconds), "gpu_peak_gib": self.peak_gib}
        symptoms = find_symptoms(self.step, clipped, self.max_grad_norm, self.busiest, plan=plan, **speed)
        head = [*self._draw_state(plan, now), *self._draw_curves()]
        notes = [Text(f"note: {symptom}", style="yellow") for symptom in symptoms]
        return Group(*head, self._draw_ranks(now), *notes, *self._draw_alarms())

    @property
    def step(self) -> int:
        return int(get_number(self.joined.latest.get(0, {}), "step"))

    def _draw_state(self, plan: Any, now: float) -> Iterator[Text]:
        if self.sweep is not None:
            state = str(run_folder.read_manifest(self.sweep).get("state"))
            yield Text(f"{self.sweep}  {state}: {run_folder.describe_progress(self.sweep)}", style="bold")
        total = self.total if drop_nan([self.total]) else find_total_steps((), plan)
        planned = int(total) if 0 < total < HUGE else 0
        line = Text(f"{self.folder}  ", style="bold") + Text(self.state, style=STATES.get(self.state, "yellow"))
        line += Text(f"  step {self.step:,} of {planned:,}" if planned else f"  step {self.step:,}")
        if planned and self.seconds and not self.is_over:
            seconds_left = max(planned - self.step, 0) * sum(self.seconds) / len(self.seconds)
            line += Text(f"  {steps.format_clock(seconds_left)} left")
        yield line
        if self.failure:
            yield Text(self.failure, style="bold red")
        if self.is_over:
            return
        beats = [float(beat["time"]) for beat in self.beats.values()]
        starting = describe_start(self.sweep or self.folder, [*beats, self.last_event])
        if starting:
            yield Text(starting, style="yellow")
        elif beats and now - max(beats) > SILENT_SECONDS:
            ago = steps.format_clock(now - max(beats))
            yield Text(f"no sign of life from any rank for {ago}: killed?", style="bold red")

    def _draw_curves(self) -> Iterator[Text]:
        for name, curve in self.curves.items():
            if curve:
                yield Text(f"{name.replace('_', ' '):10} {curve[-1]:>10.4g}  {draw_sparkline(curve)}")
        first = self.joined.latest.get(0)
        if first:
            unit, rate = steps.unit_fields(steps.read_unit(first))
            total = sum(get_number(record, rate) for record in self.joined.latest.values())
            learning_rate = as_number(first.get("learning_rate"))
            shown = f"{learning_rate:.3g}" if learning_rate == learning_rate else ""  # a script may log none
            yield Text(f"{'rate':10} {shown:>10}  {total:,.0f} {unit}/s  {self.evaluation}")
        yield from map(Text, self.evaluated)

    def _draw_ranks(self, now: float) -> Table:
        """Return a table with the slowest ranks."""
        latest = self.joined.latest
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        phases = [HEADS.get(phase, phase) for phase in steps.PHASES]
        for name in ("rank", "step", "in", "s/step", *phases, "GiB", "GPU", "alive"):
            table.add_column(name, justify="left" if name == "in" else "right", no_wrap=True)
        slowest = sorted(latest, key=lambda rank: -get_number(latest[rank], "step_seconds"))
        for rank in sorted(slowest[:MAX_RANKS]):
            table.add_row(*map(Text, self._list_cells(rank, now)))
        return table

    def _list_cells(self, rank: int, now: float) -> list[str]:
        record = self.joined.latest[rank]
        seconds = get_number(record, "step_seconds")
        shares = [""] * len(steps.PHASES)
        if seconds:
            shares = [f"{get_number(record, f'{phase}_seconds') / seconds:.0%}" for phase in steps.PHASES]
        memory = as_number(record.get("gpu_peak_gib", record.get("rss_gib")))
        busy = as_number(record.get("gpu_utilization"))
        phase = ""
        alive = ""
        if rank in self.beats and not self.is_over:
            beat = self.beats[rank]
            phase = str(beat.get("phase", ""))
            alive = f"{steps.format_clock(max(now - beat['time'], 0))} ago"
        place = [str(rank), f"{get_number(record, 'step'):.0f}", HEADS.get(phase, phase), f"{seconds:.3g}"]
        loads = [f"{memory:.1f}" if memory == memory else "", f"{busy:.0%}" if busy == busy else ""]
        return [*place, *shares, *loads, alive]

    def _draw_alarms(self) -> Iterator[Text]:
        if not self.alarm_count:
            yield Text("no alarm", style="green")
            return
        yield Text(format_plural(self.alarm_count, "alarm"), style="bold")
        for alarm in self.alarms:
            head = f"  step {alarm.get('step', '?')}"
            if alarm.get("rank") is not None:
                head += f" rank {alarm['rank']}"
            head += f" {str(alarm.get('kind', '?')).replace('_', ' ')}: "
            message = "".join(letter for letter in str(alarm.get("message", "")) if letter.isprintable())
            yield Text(head, style=LEVELS.get(str(alarm.get("level")), "yellow")) + Text(message)
        hint = make_hint(str(self.alarms[-1].get("kind")), self.folder)
        if hint:
            yield Text(f"  hint: {hint}", style="dim")


def watch(folder: Path, *, once: bool, console: Console, every_seconds: float = 1.0) -> None:
    """Show the run until it is over, or once. Ctrl-C stops watching, not the run."""
    view = View(folder)
    view.read_new()
    if once or view.is_over or not console.is_terminal:
        if not console.is_terminal:
            console.width = max(console.width, PIPE_WIDTH)
        console.print(view.draw(time.time()))
        return
    with Live(view.draw(time.time()), console=console, auto_refresh=False) as live:
        try:
            follow(view, lambda: live.update(view.draw(time.time()), refresh=True), every_seconds)
        except KeyboardInterrupt:
            return


def follow(view: View, show: Callable[[], None], every_seconds: float) -> None:
    while not view.is_over:
        time.sleep(every_seconds)
        view.read_new()
        show()


def get_number(record: Any, name: str) -> float:
    """Return a field as a number; 0 if it has none."""
    value = as_number(get_path(record, name))
    return value if abs(value) < HUGE else 0.0  # false for NaN


def draw_sparkline(values: Sequence[float]) -> str:
    """Draw a curve in one line: each character is the mean of its part."""
    parts = min(WIDTH, len(values))
    edges = [i * len(values) // parts for i in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(means)
    height = max(means) - low or 1.0
    return "".join(BARS[round((mean - low) / height * (len(BARS) - 1))] for mean in means)
