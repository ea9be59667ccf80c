"""The length of a run: sequences that the rows make, optimizer steps, evaluations, checkpoints."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from windlass.data import mix
from windlass.data.sources import Rows, count_rows
from windlass.model.targets import Adapter
from windlass.plan.resolve import BYTES_PER_TOKEN, estimate_row_tokens
from windlass.plan.workload import Batch
from windlass.runfile import Data, Train

STATE_BYTES = 8  # AdamW keeps two float32 moments per trainable parameter


@dataclass(frozen=True, slots=True)
class Schedule:
    """The length of the run. Fields are None if the number of rows is unknown."""

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


def make_schedule(train: Train, batch: Batch, ranks: int, adapter: Adapter, rows: int | None, reason: str) -> Schedule:
    """Compute the schedule, rounded as in the Trainer: ceil(rows / ranks) rows per rank, a last short step counts."""
    per_epoch = None
    if rows is not None:
        micro_batches = math.ceil(math.ceil(rows / ranks) / batch.micro)
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
    global_sequences = batch.micro * ranks * batch.accumulation
    return Schedule(
        rows=rows,
        rows_reason=reason,
        global_sequences=global_sequences,
        tokens_per_step=global_sequences * batch.length,
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


def count_sequences(rows: Rows, limit: int, *, packing: bool) -> tuple[int | None, int, tuple[str, ...]]:
    """Return the number of sequences that the rows make, their usual length, and notes. Blank rows make none."""
    mean = median_tokens(rows, limit)
    if not rows.count or mean is None:
        return rows.count, limit, ()
    filled = max(1, rows.count - rows.blank)
    notes: list[str] = []
    if rows.blank:
        notes.append(f"{rows.blank:,} of {rows.count:,} rows are blank{rows.blank_how} and left out")
    if packing:
        packed = math.ceil(filled * mean / limit)
        notes.append(f"packing: {filled:,} rows of about {mean} tokens make {packed:,} full sequences")
        return packed, limit, tuple(notes)
    if mean < limit:
        how = f"{rows.how}, {BYTES_PER_TOKEN} bytes a token"
        notes.append(f"time is estimated for rows of {mean} tokens ({how}), memory for {limit}")
    return filled, mean, tuple(notes)


def count_evaluated(data: Data, where: Callable[[str], str]) -> int | None:
    """Count the sequences of one evaluation over all its sets, without a held-out fraction. None: unknown."""
    trained = mix.list_training_sets(data, where)
    splits = [(row_set, row_set.data.validation_split, "data.val_split") for row_set in trained]
    evaluated = mix.list_evaluation_sets(data, where)
    splits += [(row_set, row_set.data.train_split, "data.train_split") for row_set in evaluated]
    total = 0
    for row_set, split, key in splits:
        if split is None:
            continue
        rows = count_rows(row_set.data, split, row_set.where, key)
        sequences, _, _ = count_sequences(rows, data.length, packing=data.packs)
        if sequences is None:
            return None
        total += sequences
    return total


def median_tokens(rows: Rows, limit: int) -> int | None:
    """Return the tokens of a usual row, truncated to `limit`; None if unknown."""
    tokens = estimate_row_tokens(rows)
    return None if tokens is None else min(limit, tokens)
