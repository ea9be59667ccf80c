"""The order of rows, and this rank's micro-batches: steps have the same rows on any number of ranks."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from windlass.data.packing import Order, to_numpy
from windlass.data.prepare import PreparedData
from windlass.errors import RunError, UserError
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.runfile import Train
from windlass.train.collate import FILL, ROW, Batch, Collate
from windlass.train.fsdp import get_device
from windlass.train.long_rows import Cut
from windlass.train.pairs import make_collate

SHARED: Final = Path("/dev/shm")  # through which workers pass batches
PREFETCHED: Final = 2  # batches of a worker: torch's default
TOKEN_BYTES: Final = 32  # of a batch: numbers and labels of 8 bytes, positions, masks


def require_shared_memory(plan: Plan) -> None:
    """Refuse a /dev/shm that can't hold what workers prefetch: torch would wait forever for a batch."""
    train = plan.run.train
    rows = plan.batch.micro + train.per_device_eval_batch_size  # those to train on wait during an evaluation
    tokens = rows * plan.batch.sides * plan.batch.length
    needed = plan.layout.gpus_per_node * train.dataloader_num_workers * PREFETCHED * tokens * TOKEN_BYTES
    free = shutil.disk_usage(SHARED).free if SHARED.is_dir() else needed
    if free < needed:
        problem = f"/dev/shm has {free >> 10:,} KiB free, and the batches of this node's workers take {needed >> 10:,}"
        hint = "write 0: the ranks load their data themselves; or mount a larger one (cluster.large_shm, --shm-size)"
        raise UserError(problem, plan.where("train.dataloader_num_workers"), hint, "shared-memory")


class Batches:
    """This rank's micro-batches. The last step of an epoch is filled up to `round_rows`, the rows of one step over all
    ranks.

    order: returns the row numbers of an epoch. Micro-batch k of reader r holds the rows from (k x readers + r) x micro
    on, so a step has the same rows on any number of ranks. A reader is a rank, or the ranks that share rows.
    """

    def __init__(
        self,
        rows: Any,
        collate: Collate,
        micro: int,
        *,
        order: Callable[[int], np.ndarray[Any, Any]] | None,
        round_rows: int,
        workers: int = 0,
        timeout: float = 0,
        pin: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self.names = names  # names of the data sets, by number
        self.rows = rows
        self.collate = collate
        self.micro = micro
        self.order = order
        self.round_rows = round_rows
        ranks = collate.cut.ranks if collate and collate.cut else 1
        self.reader = collectives.get_rank() // ranks
        self.readers = collectives.get_world_size() // ranks
        self.workers = workers
        # torch's loader draws a seed at every start: from its own generator, not from training's. Forked workers read
        # the rows where they are mapped; others would get a copy of all of them.
        self.options: dict[str, Any] = {
            "pin_memory": pin and torch.cuda.is_available(),
            "generator": torch.Generator(),
            "multiprocessing_context": "fork" if workers else None,
            "timeout": timeout if workers else 0,  # of a worker that stands still, where torch would wait forever
        }

    def __len__(self) -> int:
        """Return the rounds (steps) of an epoch."""
        assert self.order is not None  # unknown for a stream
        return -(-len(self.order(0)) // self.round_rows)

    def epoch(self, number: int, rounds_done: int = 0) -> Iterator[Batch]:
        """Yield an epoch's micro-batches after `rounds_done` rounds. A stream is one endless epoch."""
        micro_batches = rounds_done * self.round_rows // (self.micro * self.readers)
        if self.order is None:
            # With several workers, all but the first would get nothing from a single generator.
            stream = _Stream(self, micro_batches)
            return raise_data_errors(
                iter(DataLoader(stream, batch_size=None, num_workers=min(1, self.workers), **self.options))
            )
        return self.in_order(self.order(number), micro_batches)

    def in_order(self, order: np.ndarray[Any, Any], micro_batches: int = 0) -> Iterator[Batch]:
        """Yield micro-batches of these rows, after the first `micro_batches`."""
        fill = np.full(-len(order) % self.round_rows, FILL, dtype=order.dtype)
        dealt = np.concatenate([order, fill]).reshape(-1, self.readers, self.micro)[micro_batches:, self.reader]
        rows = _Rows(self.rows, self.collate.fill)
        if not self.workers and not self.options["pin_memory"]:  # a loader costs more than collating does
            return (self.collate(rows.__getitems__(numbers)) for numbers in dealt.tolist())
        options = {"collate_fn": self.collate, "num_workers": self.workers, **self.options}
        return raise_data_errors(iter(DataLoader(rows, batch_sampler=dealt.tolist(), **options)))

    def train(self, step: int, length: RunLength) -> Iterator[Batch]:
        """Yield micro-batches of epoch after epoch, starting after optimizer step `step`."""
        first, done = (0, step) if length.steps_per_epoch is None else divmod(step, length.steps_per_epoch)
        assert self.round_rows == length.accumulation * self.micro * self.readers
        for number in itertools.count(first):
            yield from self.epoch(number, done)
            done = 0


@dataclass(frozen=True, slots=True)
class RunLength:
    """The number of optimizer steps of a run."""

    total: int
    steps_per_epoch: int | None  # unknown for a stream
    accumulation: int  # micro-batches per step

    @classmethod
    def of(cls, train: Train, batches: Batches, accumulation: int) -> Self:
        steps_per_epoch = None if batches.order is None else len(batches)
        epochs = math.ceil(train.epochs * (steps_per_epoch or 1))
        return cls(train.max_steps if train.max_steps > 0 else epochs, steps_per_epoch, accumulation)

    def epoch(self, step: int) -> float:
        return step / (self.steps_per_epoch or self.total)

    def ends_epoch(self, step: int) -> bool:
        return self.steps_per_epoch is not None and step % self.steps_per_epoch == 0

    def is_due(self, step: int, strategy: str, every_steps: int) -> bool:
        """Return whether to evaluate or save after this step."""
        last = step == self.total
        if strategy == "steps":
            return last or step % every_steps == 0
        return strategy == "epoch" and (last or self.ends_epoch(step))


def count_steps(plan: Plan, data: PreparedData, pad_token_id: int) -> RunLength:
    batches = make_batches(plan, data, pad_token_id, mark_tokens=False)
    return RunLength.of(plan.run.train, batches, plan.batch.accumulation)


def make_batches(
    plan: Plan, data: PreparedData, pad_token_id: int, *, mark_tokens: bool, cut: Cut | None = None
) -> Batches:
    """Return the micro-batches to train on, in an order that follows from seed and epoch, or in a stream's own."""
    train = plan.run.train
    sequences = plan.schedule.global_sequences

    def order(epoch: int) -> Order:
        return data.order(seed=train.order_seed, epoch=epoch, global_batch=sequences)

    return Batches(
        data.train,
        make_collate(data, pad_token_id, mark_tokens=mark_tokens, cut=cut),
        plan.batch.micro,
        order=None if data.lengths is None else order,
        round_rows=sequences,
        workers=train.dataloader_num_workers,
        timeout=train.ddp_timeout,
        pin=train.dataloader_pin_memory,
        names=data.sources,
    )


def make_validation_batches(plan: Plan, data: PreparedData, pad_token_id: int, cut: Cut | None = None) -> Batches:
    """Return the batches to evaluate on: every validation row, in its order. cut: of rows that ranks share."""
    collate = make_collate(data, pad_token_id, cut=cut)
    return make_batches_in_order(plan, data.validation, data.evaluated, collate)


def make_kept_batches(plan: Plan, data: PreparedData, pad_token_id: int) -> Batches | None:
    """Return the batches of the kept sets, if there are any."""
    if data.keep is None:
        return None
    return make_batches_in_order(plan, data.keep, data.kept, make_collate(data, pad_token_id, kept=True))


def make_batches_in_order(plan: Plan, table: Any, names: Sequence[str], collate: Collate) -> Batches:
    assert table is not None
    train = plan.run.train
    micro = train.per_device_eval_batch_size
    rows = np.arange(len(table))
    return Batches(
        table,
        collate,
        micro,
        order=lambda _: rows,
        round_rows=micro * collectives.get_world_size() // (collate.cut.ranks if collate.cut else 1),
        workers=train.dataloader_num_workers,
        timeout=train.ddp_timeout,
        pin=train.dataloader_pin_memory,
        names=names,
    )


def sum_over_batches(
    batches: Batches, measure: Callable[[Batch], Tensor], begin_batch: Callable[[], bool] = lambda: False
) -> list[float] | None:
    """Return the sums over all batches and ranks of what `measure` returns; None if `begin_batch` says on any rank that
    a stop signal came. A collective."""
    total = torch.zeros((), dtype=torch.float64, device=get_device())
    stop = None  # a signal up to the previous batch: reading it then lets the device run ahead
    for host_batch in batches.epoch(0):
        stops = begin_batch()
        with torch.no_grad():
            figures = measure(host_batch.to(total.device)).double()
        vector = torch.cat([figures, figures.new_tensor([float(stops)])])
        if collectives.get_world_size() > 1:
            dist.all_reduce(vector)
        total = total + vector
        if stop is not None and bool(stop):  # the rest can outlast the grace period
            break
        stop = vector[-1]
    assert total.ndim, "no batches: empty sets are refused as the data are prepared"
    *sums, stopped = total.tolist()
    return None if stopped else sums


class RowError(UserError):
    """A row of a stream that can't be trained on. All ranks read all rows, so all raise it in the same step."""


class _Rows(Dataset[Any]):
    """Rows with their numbers, as views of Arrow's memory: 20 times as fast as indexing `datasets`."""

    def __init__(self, rows: pa.Table, fill: dict[str, Any]) -> None:
        self.fill = fill
        self.columns: dict[str, list[tuple[Any, Any]]] = {}
        for name in rows.column_names:
            chunks = rows.column(name).chunks
            self.columns[name] = [(to_numpy(chunk.offsets), to_numpy(chunk.values)) for chunk in chunks]
        self.starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [self.fill if number == FILL else self._row(number) for number in numbers]

    def _row(self, number: int) -> dict[str, Any]:
        chunk = int(np.searchsorted(self.starts, number, side="right")) - 1
        place = number - int(self.starts[chunk])
        row: dict[str, Any] = {ROW: number}
        for name, chunks in self.columns.items():
            offsets, values = chunks[chunk]
            row[name] = values[offsets[place] : offsets[place + 1]]
        return row


class _Stream(IterableDataset[Batch | UserError]):
    """This rank's micro-batches of a stream that every rank reads in full."""

    def __init__(self, batches: Batches, first: int) -> None:
        self.batches = batches
        self.first = first

    def __iter__(self) -> Iterator[Batch | UserError]:
        batches = self.batches
        numbered = ({**row, ROW: number} for number, row in enumerate(batches.rows))
        of_all_readers = batches.micro * batches.readers
        rows = itertools.islice(numbered, self.first * of_all_readers, None)
        first = batches.reader * batches.micro
        try:
            while True:
                everyones = list(itertools.islice(rows, of_all_readers))
                if not everyones:
                    return
                yield batches.collate(everyones[first : first + batches.micro])
        except UserError as error:  # passed on as a value: raised here, a loader's worker would print its traceback
            yield RowError.of(error.problems)


def raise_data_errors(batches: Iterator[Batch | UserError]) -> Iterator[Batch]:
    """Yield the batches; raise what is wrong with a row, or that a worker has not answered for train.ddp_timeout."""
    try:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader timed out" not in str(error):
            raise
        what = f"no rows from a worker of this rank: {error}"
        hint = "write 0: the ranks load their data themselves; or raise train.ddp_timeout if its storage is that slow"
        raise RunError(what, "train.dataloader_num_workers", hint, "worker-stuck") from None
