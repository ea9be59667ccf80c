"""The watch of a script's ranks, in the process that started them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from windlass.observe.watch.detectors import Alarm
from windlass.observe.watch.monitor import STOP, Monitor, report_alarm
from windlass.runfile import ScriptRun


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
        self.monitor.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.monitor.close()

    def _on_alarm(self, alarm: Alarm) -> None:
        report_alarm(self.folder, alarm, self.say)
        if (alarm.level == STOP or self._is_loss_broken(alarm)) and not self.why and not self.monitor.over.is_set():
            self.why = str(alarm)
            self.stop()

    def _is_loss_broken(self, alarm: Alarm) -> bool:
        """A language model's own loop stops itself at a loss that is not finite; a script's ranks are stopped here."""
        if alarm.kind != "non_finite" or self.limits.non_finite != STOP:
            return False
        records = self.monitor.history.joined[-1].values()
        return any("loss" in (record.get("non_finite") or ()) for record in records)
