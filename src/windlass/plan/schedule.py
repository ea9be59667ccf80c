"""The length of a run: optimizer steps, evaluations, checkpoints."""

import math
from dataclasses import dataclass

from windlass.model.targets import Adapter
from windlass.plan.rows import Counts
from windlass.plan.workload import BatchSize
from windlass.runfile import Train

STATE_BYTES = 8  # AdamW keeps two float32 moments per trainable parameter


@dataclass(frozen=True, slots=True)
class Schedule:
    """The length of the run. Fields are None if the number of rows is unknown."""

    rows: int | None  # sequences of an epoch, or pairs
    rows_reason: str  # how the rows were counted, or why they could not be
    tolerance: float | None  # the share by which `rows` may be off; 0: none; None: estimated without the tokenizer
    global_sequences: int  # micro-batch x readers x accumulation
    tokens_per_step: int  # when every row is full
    steps_per_epoch: int | None
    steps: int | None
    warmup_steps: int | None
    evaluations: int | None
    checkpoints: int | None  # written during the run
    checkpoints_kept: int | None
    checkpoint_bytes: int


def make_schedule(train: Train, batch: BatchSize, readers: int, adapter: Adapter, counts: Counts) -> Schedule:
    """Compute the schedule, rounded as in the Trainer: ceil(rows / ranks) rows per rank, a last short step counts.

    `readers`: ranks, or groups of ranks that split rows.
    """
    rows = counts.sequences
    per_epoch = None
    if rows is not None:
        micro_batches = math.ceil(math.ceil(rows / readers) / batch.micro)
        per_epoch = max(1, math.ceil(micro_batches / batch.accumulation))
    steps = None
    if train.max_steps > 0:
        steps = train.max_steps
    elif per_epoch is not None:
        steps = math.ceil(per_epoch * train.epochs)
    warmup: int | None = train.warmup_steps or 0
    if not warmup and train.warmup_ratio:
        warmup = None if steps is None else math.ceil(steps * train.warmup_ratio)
    saves = _count_events(train.save_strategy, train.save_steps, steps, per_epoch)
    kept = saves
    if saves is not None and train.save_total_limit is not None:
        kept = min(saves, train.save_total_limit)
    global_sequences = batch.micro * readers * batch.accumulation
    return Schedule(
        rows=rows,
        rows_reason=counts.reason,
        tolerance=0.0 if train.max_steps > 0 else counts.tolerance,
        global_sequences=global_sequences,
        tokens_per_step=global_sequences * batch.sides * batch.length,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=warmup,
        evaluations=_count_events(train.evaluation, train.eval_steps, steps, per_epoch),
        checkpoints=saves,
        checkpoints_kept=kept,
        checkpoint_bytes=adapter.trainable * (adapter.dtype_bytes + STATE_BYTES),
    )


def _count_events(strategy: str, every: float | None, steps: int | None, per_epoch: int | None) -> int | None:
    """Return how often the run evaluates or saves with this strategy; `every` below 1 is a share of the run."""
    if strategy == "no":
        return 0
    if steps is None:
        return None
    if strategy == "epoch":
        return None if per_epoch is None else math.ceil(steps / per_epoch)
    if every and every < 1:
        return steps // max(1, math.ceil(steps * every))
    return steps // int(every or 1)
