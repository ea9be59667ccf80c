"""The kinds of alarm."""

from __future__ import annotations

from typing import Final

from windlass.observe.watch.alarms import Alarm as Alarm
from windlass.observe.watch.alarms import append as append

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
