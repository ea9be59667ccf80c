"""Rows, batches, steps, checkpoints: the arithmetic of the run's length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windlass.model.targets import Adapter
from windlass.plan.cost import Batch
from windlass.runfile import Train

OPTIMIZER_BYTES = 8  # AdamW keeps two float32 moments per trainable parameter


@dataclass(frozen=True, slots=True)
class Schedule:
    """None where the number of rows is not known."""

    rows: int | None
    rows_reason: str  # how the rows were counted, or why they could not be
    global_sequences: int  # micro-batch x ranks x accumulation
    tokens_per_step: int  # when every row is full
    steps_per_epoch: int | None
    steps: int | None
    warmup_steps: int | None
    evaluations: int | None
    checkpoints: int | None  # written during the run
    checkpoints_kept: int | None
    checkpoint_bytes: int


def schedule(train: Train, batch: Batch, ranks: int, adapter: Adapter, rows: int | None, reason: str) -> Schedule:
    """The same rounding as the Trainer's: every rank sees ceil(rows / ranks) rows, a last short step counts."""
    global_sequences = batch.micro * ranks * batch.accumulation
    per_epoch = None
    if rows is not None:
        micro_batches = math.ceil(math.ceil(rows / ranks) / batch.micro)
        per_epoch = max(1, math.ceil(micro_batches / batch.accumulation))
    steps = train.max_steps if train.max_steps > 0 else per_epoch and math.ceil(per_epoch * train.num_train_epochs)
    saves = _times(train.save_strategy, train.save_steps, steps, per_epoch)
    kept = saves if train.save_total_limit is None or saves is None else min(saves, train.save_total_limit)
    return Schedule(
        rows=rows,
        rows_reason=reason,
        global_sequences=global_sequences,
        tokens_per_step=global_sequences * batch.length,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=_warmup(train, steps),
        evaluations=_times(train.eval_strategy, train.eval_steps, steps, per_epoch),
        checkpoints=saves,
        checkpoints_kept=kept,
        checkpoint_bytes=adapter.trainable * (adapter.dtype_bytes + OPTIMIZER_BYTES),
    )


def _warmup(train: Train, steps: int | None) -> int | None:
    if train.warmup_steps:
        return train.warmup_steps
    if not train.warmup_ratio:
        return 0
    return None if steps is None else math.ceil(steps * train.warmup_ratio)


def _times(strategy: str, every: float | None, steps: int | None, per_epoch: int | None) -> int | None:
    """How often something that happens by `strategy` happens in the run."""
    if strategy == "no":
        return 0
    if steps is None:
        return None
    if strategy == "epoch":
        return None if per_epoch is None else math.ceil(steps / per_epoch)
    interval = max(1, math.ceil(steps * every)) if every and every < 1 else int(every or 1)
    return steps // interval
