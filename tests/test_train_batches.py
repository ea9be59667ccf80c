"""Order of rows, micro-batches of ranks, optimizers and schedules: the loop's inputs, without the loop."""

import os
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS

from windlass.data.audit import PACKED
from windlass.data.collate import PaddedCollator, PaddedPackingCollator, PaddingFreeCollator
from windlass.data.prepare import PreparedData
from windlass.errors import RunError
from windlass.observe.background import BackgroundReport
from windlass.runfile import Train
from windlass.runfile.names import OPTIMIZERS as NAMES
from windlass.runfile.names import SCHEDULES
from windlass.train import optimizer
from windlass.train.batches import Batches, RunLength
from windlass.train.collate import ROW, SOURCE, Batch, Collate
from windlass.train.patches import Patches


def batches(count: int, micro: int, world: int, rank: int, step: int, *, stream: bool = False, **more: Any) -> Batches:
    rows: list[dict[str, Any]] = [{"input_ids": [1, *range(2, 4 + number)], "labels": None} for number in range(count)]
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows]
    data = IterableDataset.from_generator(lambda: iter(rows * 9)) if stream else pa.Table.from_pylist(rows)
    order = None if stream else lambda epoch: np.random.default_rng(epoch).permutation(count)
    made = Batches(data, Collate(PaddedCollator(0)), micro, order=order, round_rows=step, **more)
    made.reader, made.readers = rank, world
    return made


def taken(of: Batches, step: int, accumulation: int, per_epoch: int | None, count: int) -> list[Batch]:
    found = of.train(step, RunLength(0, per_epoch, accumulation))
    return [next(found) for _ in range(count)]


@pytest.mark.fault("a worker of the data that stands still", "`windlass train`", "timed out after 1 seconds")
@pytest.mark.takes("waits for a second")
@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_stands_still_is_not_awaited_forever(stream: bool) -> None:
    rank = os.getpid()

    def pad(rows: Any) -> Any:
        time.sleep(60 * (os.getpid() != rank))

    made = batches(4, 2, 1, 0, 2, stream=stream, workers=1, timeout=1)
    made.collate = Collate(pad)
    began = time.monotonic()
    with refused("worker-stuck", "train.dataloader_num_workers", RunError) as problems:
        next(iter(made.epoch(0)))
    assert time.monotonic() - began < 30
    assert "timed out after 1 seconds" in problems[0].problem
    assert problems[0].hint.startswith("write 0: ")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 23), st.sampled_from([(1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 4, 1)]), st.integers(0, 9))
def test_every_number_of_ranks_has_the_same_steps_also_after_a_resume(
    count: int, how: tuple[int, int, int], step: int
) -> None:
    """4 rows per step, as ranks x micro-batch x accumulation. Every epoch has every row once, in its own order."""
    world, micro, accumulation = how
    per_epoch = -(-count // 4)
    rows: list[list[int]] = []
    for number in range(step, step + 2 * per_epoch):
        of_step: list[int] = []
        for rank in range(world):
            for batch in taken(batches(count, micro, world, rank, 4), number, accumulation, per_epoch, accumulation):
                of_step += batch.rows
                assert batch.supervised == sum(row + 2 for row in batch.rows)
        rows.append(sorted(of_step))
    for number, of_step in enumerate(rows, step):
        epoch, place = divmod(number, per_epoch)
        expected = np.random.default_rng(epoch).permutation(count)[place * 4 :][:4]
        assert of_step == sorted(expected.tolist())


def test_resume_within_an_epoch_keeps_all_rows_of_the_next() -> None:
    """11 rows, 3 steps per epoch: from the third step on, over two epochs without a new start."""
    rows = [row for batch in taken(batches(11, 4, 1, 0, 4), 2, 1, 3, 7) for row in batch.rows]
    order = [np.random.default_rng(epoch).permutation(11).tolist() for epoch in range(3)]
    assert rows == [*order[0][8:], *order[1], *order[2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_resumes_at_its_position(workers: int) -> None:
    expected = [[0, 1], [4, 5], [8, 9], [12, 13], [16, 17]]
    found = taken(batches(6, 2, 2, 0, 4, stream=True, workers=workers), 0, 1, None, 5)
    assert [batch.rows for batch in found] == expected
    found = taken(batches(6, 2, 2, 0, 4, stream=True, workers=workers), 2, 1, None, 3)
    assert [batch.rows for batch in found] == expected[2:]


def test_batches_draw_no_random_numbers_from_training() -> None:
    state = torch.get_rng_state()
    taken(batches(9, 2, 1, 0, 2), 0, 1, 5, 7)
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_forked_while_a_report_is_started_keep_none_of_its_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a start slow enough for the workers of an epoch to be forked in the middle of it."""
    begun = threading.Event()

    def fork_slowly(*arguments: Any, fork: Any = subprocess._fork_exec) -> int:  # type: ignore[attr-defined]
        begun.set()
        time.sleep(0.5)
        pid: int = fork(*arguments)
        return pid

    monkeypatch.setattr(subprocess, "_fork_exec", fork_slowly)
    report = BackgroundReport(tmp_path)
    report.command = [shutil.which("true") or ""]
    saver = threading.Thread(target=report.start, daemon=True)
    saver.start()
    assert begun.wait(60)
    epoch = batches(9, 2, 1, 0, 2, workers=2).epoch(0)
    next(epoch)
    saver.join(60)
    assert not saver.is_alive()
    assert len(list(epoch)) == 4  # the workers lived until here
    assert report.process is not None
    report.process.wait(60)


@pytest.mark.parametrize("batching", [PACKED, "padded in batches of like length"])
def test_each_epoch_has_its_own_order(batching: str) -> None:
    """The planted fault: a shuffle that depends only on the seed."""
    lengths = np.arange(5, 105)
    data = PreparedData(pa.table({}), None, {}, "", "", lengths=lengths, batching=batching)
    orders = [data.order(seed=3, epoch=epoch, global_batch=8) for epoch in (0, 0, 1, 2)]
    assert orders[0].tolist() == orders[1].tolist()
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert all(sorted(order.tolist()) == list(range(100)) for order in orders)


@pytest.mark.parametrize("batching", [PACKED, "padded in batches of like length"])
def test_each_epoch_of_a_mix_takes_the_rows_that_none_has_had(batching: str) -> None:
    """The planted fault: the same part of a set in every epoch, in another order."""
    lengths = np.arange(5, 105)
    shares = ((60, 20), (40, 40))  # a third of the first set, all of the second
    data = PreparedData(pa.table({}), None, {}, "", "", lengths=lengths, batching=batching, shares=shares)
    orders = [data.order(seed=3, epoch=epoch, global_batch=8).tolist() for epoch in range(3)]
    assert all({*range(60, 100)} <= {*order} and len(order) == 60 for order in orders)
    of_the_first = [row for order in orders for row in order if row < 60]
    assert sorted(of_the_first) == list(range(60))


# --- optimizers and schedules, against transformers' trainer ---


class Given(torch.optim.Optimizer):
    """Stands in for a library's class and records its arguments."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, {})
        self.given = settings


CLASSES = {
    "bitsandbytes.optim": ("AdamW", "Lion", "RMSprop", "AdEMAMix"),
    "torchao.optim": ("AdamW4bit", "AdamW8bit"),
    "grokadamw": ("GrokAdamW",),
    "optimi": ("StableAdamW",),
    "torchdistx.optimizers": ("AnyPrecisionAdamW",),
    "schedulefree": ("RAdamScheduleFree", "AdamWScheduleFree", "SGDScheduleFree"),
}
TRAIN = {
    "learning_rate": 3e-4,
    "weight_decay": 0.2,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "warmup_steps": 7,
}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of libraries that are not installed here."""
    for path, names in CLASSES.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        for name in names:
            setattr(sys.modules[path], name, type(name, (Given,), {}))
    there = ("bitsandbytes", "torchao", "grokadamw", "torch_optimi", "schedulefree")
    for name in there:
        monkeypatch.setattr(f"transformers.trainer_optimizer.is_{name}_available", lambda *_: True)
    monkeypatch.setattr("transformers.trainer_optimizer.importlib.metadata.version", lambda _: "0.17")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_equal_transformers_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"a.weight": nn.Parameter(torch.ones(2, 2)), "a.bias": nn.Parameter(torch.ones(2))}
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], optim=name, **TRAIN)
    theirs, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert name in _OPTIMIZER_HANDLERS
    seen: dict[str, Any] = {}
    original = theirs.__init__

    def keep(self: Any, groups: Any, **given: Any) -> None:
        seen.update(given)
        original(self, groups, **given)

    monkeypatch.setattr(theirs, "__init__", keep)
    train = Train.model_validate({**TRAIN, "optim": name})
    made = optimizer.create_optimizer(train, [*named.items(), ("frozen", frozen)], 100)
    assert type(made) is theirs
    assert seen == settings
    decayed, undecayed = made.param_groups
    assert [decayed["params"], decayed["weight_decay"]] == [[named["a.weight"]], 0.2]
    assert [undecayed["params"], undecayed["weight_decay"]] == [[named["a.bias"]], 0.0]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_honours_the_configured_warm_up(name: str) -> None:
    needed = {"min_lr": {"min_lr": 1e-6}, "num_decay_steps": {"num_decay_steps": 5}}
    more = needed[SCHEDULES[name][0]] if SCHEDULES[name] else None
    for keys, steps in (({"warmup_ratio": 0.05}, 5), ({"warmup_ratio": 1.0}, 100), ({"warmup_steps": 1}, 1)):
        train = Train.model_validate({"lr_scheduler_type": name, "lr_scheduler_kwargs": more, **keys})
        assert train.warmup(100) == steps
    made = optimizer.create_optimizer(train, [("a", nn.Parameter(torch.ones(1)))], 100)
    schedule = optimizer.create_scheduler(train, made, 100)
    follows = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(schedule).__name__ == "GreedyLR"
    assert optimizer.is_metric_scheduler(train) == follows
    if not follows and name != "constant":
        rates = [made.param_groups[0]["lr"]]
        for _ in range(2):
            schedule.step()
            rates.append(made.param_groups[0]["lr"])
        assert len(set(rates)) > 1


@pytest.mark.parametrize("collator", [PaddedCollator(0), PaddedPackingCollator(0), PaddingFreeCollator()])
@pytest.mark.parametrize("lengths", [[9], [4, 5]])
def test_forward_needs_no_device_synchronization(collator: Any, lengths: list[int]) -> None:
    """The batch says whether a row has several documents; the loss is the same as if transformers searched for them."""

    class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
        values = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.values += func.overloadpacket.__name__ == "_local_scalar_dense"
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    Patches().patch_forward(model)
    row = {"input_ids": np.arange(1, 10), "seq_lengths": lengths, ROW: 0}
    inputs = Collate(collator)([row]).inputs
    with torch.no_grad(), Asked() as asked:  # type: ignore[no-untyped-call]
        found = model(**inputs)
    assert not asked.values
    with torch.no_grad(), Asked() as asked:  # type: ignore[no-untyped-call]
        wanted = model(**inputs | {"several": None})
    assert asked.values
    assert torch.equal(found.last_hidden_state, wanted.last_hidden_state)


def test_targets_of_rows_laid_end_to_end_belong_to_their_own_data_set() -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5] * length, "labels": [5] * length, ROW: number, SOURCE: [number]}
        for number, length in enumerate((3, 4))
    ]
    batch = Collate(PaddingFreeCollator())(rows)
    assert batch.sources is not None
    assert batch.sources.tolist() == [0, 0, 1, 1, 1]
