"""The watch over a script, from outside: the patrol of its run folder beside the processes that run it. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from windlass.observe.watch import alarm as alarms
from windlass.observe.watch import prometheus
from windlass.observe.watch.alarm import Alarm
from windlass.observe.watch.patrol import STOP, Patrol
from windlass.runfile import ScriptRun

EVERY_SECONDS: Final = 1.0


class Guard:
    """Around the script's ranks: `with guard:`. Alarms are written and said; one of `stop` ends the run.

    Made before the ranks begin: what lies in the folder by then is left from an interrupted run, and was judged then.
    stop: what ends the ranks. `why`: the alarm that asked for it, if one did.
    """

    def __init__(self, run: ScriptRun, ranks: int, stop: Callable[[], None], say: Callable[[str], None]) -> None:
        self.folder, self.watch, self.stop, self.say = Path(run.folder), run.watch, stop, say
        self.name = run.name or self.folder.resolve().name
        self.why = ""
        self.over = threading.Event()
        self.patrol = Patrol(self.folder, run.watch, ranks, network=str(run.cluster.network), raised=self.raised)
        self.thread = threading.Thread(target=self._walk, name="windlass watch", daemon=True)
        self.page: prometheus.Page | None = None
        for tail in (*self.patrol.joined.tails.values(), self.patrol.events):
            tail.skip()

    def __enter__(self) -> Self:
        if self.watch.prometheus_port is not None:
            self.page = prometheus.Page(self.watch.prometheus_address, self.watch.prometheus_port, self._metrics)
        self.thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.over.set()
        self.thread.join(10)
        self.patrol.round()
        if self.page is not None:
            self.page.close()

    def raised(self, alarm: Alarm) -> None:
        alarms.append(self.folder, alarm)
        self.say(f"alarm: {alarm}")
        # The patrol only tells of losses that are no number: a language model's own loop has stopped by then.
        broken = alarm.broken and self.watch.non_finite == STOP
        if (alarm.level == STOP or broken) and not self.why and not self.over.is_set():
            self.why = str(alarm)
            self.stop()

    def _walk(self) -> None:
        while not self.over.wait(EVERY_SECONDS):
            self.patrol.round()

    def _metrics(self) -> str:
        with self.patrol.lock:
            return prometheus.exposition(self.name, self.patrol.joined.latest, self.patrol.counts)
