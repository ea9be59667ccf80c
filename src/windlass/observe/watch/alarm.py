"""One finding of the watch, and the file that holds them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from windlass.observe import steps

# kind -> what it means. Each but `non_finite` and `failed` is also a key of the run file's `watch` section.
KINDS: Final[dict[str, str]] = {
    "loss_divergence": "the loss is far above what it was",
    "gradient_spike": "one step's gradient norm is far above those before it",
    "non_finite": "a loss or gradient was no finite number",
    "straggler": "one rank is slower than the others, which wait for it",
    "memory_growth": "memory grows steadily towards its end",
    "memory_imbalance": "one rank holds much more than the others",
    "stall": "no progress; which rank is absent from which collective",
    "throughput": "steps take much longer than they did",
    "throttling": "a GPU holds its clock down",
    "sockets": "NCCL goes over sockets where there is InfiniBand",
    "eval_loss": "the evaluation loss rises",
    "dead_experts": "experts that the router never chooses",
    "failed": "the run stopped itself",
}


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    step: int
    message: str
    rank: int | None = None  # None: of the whole run
    level: str = "warn"  # the action it led to; `stop` makes the report's verdict bad
    broken: bool = False  # no figure after it means anything; for who acts on it, not for the file
    time: float = field(default_factory=lambda: round(time.time(), 3))

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        return f"{self.kind.replace('_', ' ')} at step {self.step}{rank}: {self.message}"


def append(folder: Path, alarm: Alarm) -> None:
    """One line, in one write."""
    line = {name: value for name, value in asdict(alarm).items() if name != "broken"}
    with (folder / steps.ALARMS).open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(line, ensure_ascii=False) + "\n")
