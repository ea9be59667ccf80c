"""The sequences of an optimizer step, cut into micro-batches: as the run file says, or every way there is."""

from __future__ import annotations

from windlass.plan.cost import Batch
from windlass.runfile import Train


def batches_of(train: Train, accumulation: int, length: int) -> tuple[Batch, ...]:
    """Smallest first. `accumulation`: passes of an optimizer step with the smallest micro-batch.

    Every rank makes the same choice: it follows from the run file, the headers and the hardware table, and nothing is
    measured for it.
    """
    if train.per_device_train_batch_size != "auto":
        return (Batch(train.per_device_train_batch_size, accumulation, length),)
    sizes = [size for size in range(1, accumulation + 1) if accumulation % size == 0]
    return tuple(Batch(size, accumulation // size, length) for size in sizes)
