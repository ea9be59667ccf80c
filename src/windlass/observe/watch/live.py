"""`windlass watch`: a run folder in the terminal, from its files alone, while they grow or after."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from windlass.errors import UserError
from windlass.observe import steps
from windlass.observe.steps import clock
from windlass.observe.watch import heartbeat
from windlass.observe.watch.follow import Joined, Tail
from windlass.observe.watch.patrol import meter

BARS: Final = "▁▂▃▄▅▆▇█"
WIDTH: Final = 48  # characters of a curve
SILENT_SECONDS: Final = 30.0  # without a sign of life
# What a state is shown in; all others in yellow.
STATES: Final = {"finished": "green", "running": "cyan", "failed": "bold red"}
HEADS: Final = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "communication": "wait"}
SHOWN: Final = 8  # alarms, the newest
RANKS: Final = 16  # rows; the slowest of more ranks
NARROW: Final = 100  # columns that a page in a pipe gets at least
STYLES: Final = {"stop": "bold red", "error": "bold red", "checkpoint": "yellow", "warn": "yellow"}


class View:
    """What is known of one run folder so far; `round` reads what is new."""

    def __init__(self, folder: Path) -> None:
        found = steps.files(folder) if folder.is_dir() else {}
        if not found and not (folder / steps.MANIFEST).is_file():
            what = "holds no run" if folder.is_dir() else "is not a folder" if folder.exists() else "is not there"
            raise UserError(what, str(folder), "give a run folder: the output_dir of a run")
        self.folder = folder
        self.ranks = self._count() or len(found) or 1
        self.joined = Joined(folder, self.ranks)
        self.alarm_lines, self.event_lines = Tail(folder / steps.ALARMS), Tail(folder / steps.EVENTS)
        self.alarms: deque[dict[str, Any]] = deque(maxlen=SHOWN)
        self.alarm_count = 0
        self.evaluation: dict[str, Any] = {}
        self.curves: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self.seconds: deque[float] = deque(maxlen=20)
        self.beats: dict[int, dict[str, Any]] = {}
        self.state = ""

    def _count(self) -> int:
        """Ranks, as the meter of the first one says; nobody has more than a machine room."""
        said = meter(self.folder, 0).get("ranks")
        return said if isinstance(said, int) and 0 < said <= 1 << 20 else 0

    def round(self) -> None:
        if not self.joined.latest and (ranks := self._count() or self.ranks) != self.ranks:
            self.ranks, self.joined = ranks, Joined(self.folder, ranks)
        for _, records in self.joined.new():
            for name, curve in self.curves.items():
                if (value := numbers(records[0]).get(name)) is not None:
                    curve.append(value)
            self.seconds.append(max(numbers(record).get("step_seconds", 0.0) for record in records.values()))
        for curve in self.curves.values():
            while len(curve) > 64 * WIDTH:
                curve[:] = curve[1::2]
        for alarm in self.alarm_lines.objects():
            self.alarms.append(alarm)
            self.alarm_count += 1
        for event in self.event_lines.objects():
            if event.get("kind") == "eval":
                self.evaluation = numbers(event)
        self.beats = heartbeat.read(self.folder)
        self.state = str(steps.read(self.folder / steps.MANIFEST).get("state") or "unknown")

    @property
    def over(self) -> bool:
        return self.state != "running"

    def draw(self, now: float) -> Group:
        first = numbers(self.joined.latest.get(0, {}))
        return Group(*self._head(first, now), *self._curves(first), self._table(now), *self._alarms())

    def _head(self, first: dict[str, Any], now: float) -> list[Text]:
        batch = steps.read(self.folder / steps.PLAN).get("batch")
        planned = int(numbers(batch if isinstance(batch, dict) else {}).get("steps", 0))
        step = int(first.get("step", 0))
        style = STATES.get(self.state, "yellow")
        line = Text(f"{self.folder}  ", style="bold") + Text(self.state, style=style)
        line += Text(f"  step {step:,}" + (f" of {planned:,}" if planned else ""))
        if planned and self.seconds and not self.over:
            left = max(planned - step, 0) * sum(self.seconds) / len(self.seconds)
            line += Text(f"  {clock(left)} left")
        lines = [line]
        newest = max((float(beat["time"]) for beat in self.beats.values()), default=0.0)
        if not self.over and newest and now - newest > SILENT_SECONDS:
            lines.append(Text(f"no sign of life from any rank for {clock(now - newest)}: killed?", style="bold red"))
        return lines

    def _curves(self, first: dict[str, Any]) -> list[Text]:
        lines = []
        for name, curve in self.curves.items():
            if curve:
                lines.append(Text(f"{name.replace('_', ' '):10} {curve[-1]:>10.4g}  {curve_of(curve)}"))
        if "learning_rate" in first:
            unit, rate = steps.counted(steps.unit(first))
            total = sum(numbers(each).get(rate, 0.0) for each in self.joined.latest.values())
            said = f"{'rate':10} {first['learning_rate']:>10.3g}  {total:,.0f} {unit}/s"
            if "eval_loss" in self.evaluation:
                said += f"  evaluation {self.evaluation['eval_loss']:.4f} at step {self.evaluation.get('step', 0):.0f}"
            lines.append(Text(said))
        return lines

    def _table(self, now: float) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in (
            "rank",
            "step",
            "in",
            "s/step",
            *(HEADS.get(phase, phase) for phase in steps.PHASES),
            "GiB",
            "GPU",
            "alive",
        ):
            table.add_column(name, justify="left" if name == "in" else "right", no_wrap=True)
        slowest = sorted(self.joined.latest, key=lambda r: -numbers(self.joined.latest[r]).get("step_seconds", 0.0))
        for rank in sorted(slowest[:RANKS]):
            table.add_row(*(Text(cell) for cell in self._row(rank, now)))
        return table

    def _row(self, rank: int, now: float) -> list[str]:
        record, beat = numbers(self.joined.latest[rank]), self.beats.get(rank)
        seconds = record.get("step_seconds", 0.0)
        shares = [f"{record.get(f'{phase}_seconds', 0.0) / seconds:.0%}" if seconds else "" for phase in steps.PHASES]
        held = record.get("gpu_peak_gib", record.get("rss_gib"))
        used = record.get("gpu_utilization")
        return [
            str(rank),
            f"{record.get('step', 0):.0f}",
            str(beat.get("phase", "")) if beat and not self.over else "",
            f"{seconds:.3g}",
            *shares,
            "" if held is None else f"{held:.1f}",
            "" if used is None else f"{used:.0%}",
            f"{clock(max(now - beat['time'], 0))} ago" if beat and not self.over else "",
        ]

    def _alarms(self) -> list[Text]:
        if not self.alarm_count:
            return [Text("no alarm", style="green")]
        lines = [Text(f"{self.alarm_count} alarm{'s' if self.alarm_count > 1 else ''}", style="bold")]
        for alarm in self.alarms:
            rank = "" if alarm.get("rank") is None else f" rank {alarm['rank']}"
            head = f"  step {alarm.get('step', '?')}{rank} {str(alarm.get('kind', '?')).replace('_', ' ')}: "
            text = "".join(letter for letter in str(alarm.get("message", "")) if letter.isprintable())
            lines.append(Text(head, style=STYLES.get(str(alarm.get("level")), "yellow")) + Text(text))
        return lines


def watch(folder: Path, *, once: bool, console: Console, every_seconds: float = 1.0) -> None:
    """Until the run is over, or once. Ctrl-C ends the looking, not the run."""
    view = View(folder)
    view.round()
    if once or view.over or not console.is_terminal:
        if not console.is_terminal:
            console.width = max(console.width, NARROW)
        console.print(view.draw(time.time()))
        return
    with Live(view.draw(time.time()), console=console, auto_refresh=False) as live:
        try:
            follow(view, lambda: live.update(view.draw(time.time()), refresh=True), every_seconds)
        except KeyboardInterrupt:
            return


def follow(view: View, shown: Callable[[], None], every_seconds: float) -> None:
    while not view.over:
        time.sleep(every_seconds)
        view.round()
        shown()


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """What of a line can be reckoned with, whoever wrote it."""
    plain = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in plain.items() if abs(value) < 1e300}  # a NaN is not below either


def curve_of(values: Sequence[float]) -> str:
    """A curve in one line: each character is the mean of its part."""
    parts = min(WIDTH, len(values))
    means = []
    for i in range(parts):
        part = values[i * len(values) // parts : (i + 1) * len(values) // parts]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    return "".join(BARS[round((mean - low) / (high - low or 1.0) * (len(BARS) - 1))] for mean in means)
