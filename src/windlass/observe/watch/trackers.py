"""Each step's values to the trackers that train.report_to names, as `train/step/FIELD`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from windlass.observe import steps
from windlass.observe.watch.follow import Tail

LEFT_OUT = ("step", "time", "epoch")  # the trackers' own axes
UNPREFIXED = ("AzureMLCallback", "MLflowCallback")  # hand names on as they are; the others put `train/` before them


class Trackers(TrainerCallback):  # type: ignore[misc]
    """Hands every line of rank 0's step file to the Trainer's own callbacks of these trackers."""

    def __init__(self, folder: Path, trainer: Any) -> None:
        kinds = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
        found = trainer.callback_handler.callbacks
        self.trackers = [each for each in found if isinstance(each, kinds)] if kinds else []
        self.tail = Tail(folder / steps.STEPS.format(rank=0))
        self.from_step = 0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.from_step = int(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if not self.trackers or not state.is_world_process_zero:
            return
        for record in self.tail.objects():
            if record.get("step", 0) > self.from_step:
                at = copy.copy(state)
                at.global_step = record["step"]
                for tracker in self.trackers:
                    tracker.on_log(args, at, control, logs=values(record, prefix(tracker)), model=rest.get("model"))

    def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The meter waits for the Trainer's log before it writes such a step."""
        self.on_step_end(args, state, control, **rest)


def values(record: dict[str, Any], prefix: str) -> dict[str, float]:
    """The numbers of one line."""
    return {
        f"{prefix}{name}": value
        for name, value in record.items()
        if name not in LEFT_OUT and isinstance(value, int | float) and not isinstance(value, bool)
    }


def prefix(tracker: TrainerCallback) -> str:
    bare = any(base.__name__ in UNPREFIXED for base in type(tracker).__mro__)
    return "train/step/" if bare else "step/"
