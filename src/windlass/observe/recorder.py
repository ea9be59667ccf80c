"""Measure each optimizer step of one rank and append it to the rank's step file."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from windlass import run_folder
from windlass.errors import UserError
from windlass.files import Table, WriteGuard, write_json
from windlass.observe import steps
from windlass.observe.counters import Counters, describe_machine
from windlass.observe.flops import RateMeter, find_routers
from windlass.observe.watch.heartbeat import Position

BUDGET: Final = 0.005  # share of the run's time that sampling counters may take
MAX_PENDING: Final = 64  # steps whose GPU times may be pending before the recorder waits for them
PAUSE: Final = "pause"  # evaluating, saving, logging: not part of a step
DIGITS: Final = {  # of measured floats; times have five digits of the step's
    **dict.fromkeys(("epoch", "loss", "router_aux_loss", "grad_norm", "learning_rate"), 7),
    **dict.fromkeys(("model_tflops", "mfu", "hfu"), 4),
    "meter_seconds": 2,
}
TOKEN_COUNTS: Final = ("tokens", "padded_tokens", "supervised_tokens")
# The phase after the one that was marked last.
NEXT: Final = {"start": "data", "data": "forward", "forward": "backward", "backward": "optimizer", PAUSE: "data"}

Time = Any  # of a mark: seconds on the CPU; on a GPU an event in the stream, timed once it has passed


@dataclass(slots=True)
class _Pending:
    """A step that is over for the host; on a GPU its times and `late` values may still be pending."""

    record: dict[str, Any]
    marks: list[tuple[str, Time]]
    late: Tensor | None
    late_names: tuple[str, ...]
    hold: bool  # the caller still has values for it


class Recorder:
    """A training loop calls `start`; for each micro-batch `count_tokens`, in host memory, and `mark`
    after each phase; for each step `end_step`; then `event` and `close`.

    It never waits for the GPU outside of sampled steps. Values of `end_step` are named as in `steps.FIELDS`.
    sample_every: every that many steps, also wait for the GPU, sample every counter and the expert balance; 0: never.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
        *,
        unit: str = steps.TOKENS,
        sample_every: int = 25,
        model: nn.Module | None = None,
        rates: RateMeter | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.ranks = ranks
        self.device = torch.device(device)
        self.unit = unit
        self.sample_every = sample_every
        self.unwritten = WriteGuard(lambda text: print(f"rank {rank}: {text}", file=sys.stderr, flush=True))
        self.latest: dict[str, Any] = {}  # the last record written
        self.sampled = False  # whether the running step is sampled
        self.step = 0  # steps done
        self.progress = 0  # grows with every call
        self._file: TextIO | None = None
        self._pending: deque[_Pending] = deque()
        self._marks: list[tuple[str, Time]] = []
        self._batches: list[tuple[Tensor, int, int]] = []  # counts of tokens, rows and longest row of each micro-batch
        self._cost = 0.0  # seconds that recording the step took
        self._sampling_cost = 0.0  # seconds that sampling took since the start
        self.balance = ExpertBalance(model) if model is not None else None
        self._rates = rates
        self._fields = (*steps.FIELDS, unit)
        self._table = Table(steps.derived_fields(unit))
        folder.mkdir(parents=True, exist_ok=True)
        self.counters = Counters(self.device)
        self.about = {"script_name": "", "report_meta": {}, **(about or {}), "unit": unit, "rank": rank, "ranks": ranks}
        self.about["hardware"] = describe_machine(self.device)
        if rates:
            self.about["arithmetic"] = rates.as_dict()
        self.about["unmeasured"] = self.counters.unmeasured

    # --- what a loop calls ---

    def start(self, step: int = 0, total: int | None = None) -> None:
        """Start measuring time. `total`: the steps of the whole run, if they are known."""
        meter = self.folder / run_folder.METER.format(rank=self.rank)
        with self.unwritten(meter):
            write_json(meter, self.about)
        self._file = self.unwritten.open(self.folder / run_folder.STEPS.format(rank=self.rank), "a")
        self.step = step
        if self.rank == 0:
            with self.unwritten(self.folder / run_folder.EVENTS):
                known = {} if total is None else {"steps": total}
                run_folder.log_event(self.folder, "start", step, **known)
        self._began = time.perf_counter()
        self._marks = [("start", self.now())]
        self._sample_next(bool(self.sample_every))

    def now(self) -> Time:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as `phase`: one of steps.PHASES, or "pause"."""
        began = time.perf_counter()
        self._require_running()
        if phase not in steps.PHASES and phase != PAUSE:
            hint = f"use one of {', '.join(steps.PHASES)}"
            raise UserError(f"{phase!r} is not a phase of a step", "mark", hint, "no-such-phase")
        self.progress += 1
        if phase == PAUSE and self._marks[-1][0] == PAUSE:  # an evaluation of many batches keeps one mark
            self._marks.pop()
        self._marks.append((phase, self.now()))
        self._cost += time.perf_counter() - began

    def count_tokens(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Add one micro-batch to the step's counts. Return its tokens, padding and supervised tokens."""
        began = time.perf_counter()
        counts = batch["counts"] if "counts" in batch else count_tokens_in(batch)
        if counts is not None:
            ids = batch["input_ids"]
            sequences = batch.get("sequences", ids.shape[0] if ids.dim() > 1 else 1)
            self._batches.append((counts, sequences, batch.get("longest", ids.shape[-1])))
        self._cost += time.perf_counter() - began
        return counts

    def end_step(self, step: int, *, hold: bool = False, **values: Any) -> None:
        """End the optimizer step. `hold`: its line waits for `add_values`."""
        began = time.perf_counter()
        self._require_running()
        self._marks.append(("other", self.now()))
        self.step = step
        self.progress += 1
        late = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
        record: dict[str, Any] = {
            "step": step,
            "time": round(time.time(), 3),
            "micro_batches": sum(phase == "backward" for phase, _ in self._marks),
            **self._sample(),
            **{name: value for name, value in values.items() if value is not None and name not in late},
        }
        if self._batches:
            each_counts, sequences, longest = zip(*self._batches, strict=True)
            sums = torch.stack(each_counts).sum(0)
            record |= {"sequences": sum(sequences), "longest": max(longest)}
            counts = dict(zip(TOKEN_COUNTS, sums, strict=True))
            if sums.device.type == "cuda":
                late |= counts
            else:
                record |= counts
        stacked = torch.stack([value.double().reshape(()) for value in late.values()]) if late else None
        if stacked is not None and stacked.device.type == "cuda":
            host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            stacked = host.copy_(stacked, non_blocking=True)
            self._marks.append(("other", self.now()))  # passes only when the copy has arrived
        self._pending.append(_Pending(record, self._marks, stacked, tuple(late), hold))
        self._marks = [("start", self.now())]
        self._batches = []
        self._write_arrived(wait=self.sampled or len(self._pending) > MAX_PENDING)
        self._sample_next(bool(self.sample_every) and step % self.sample_every == 0)
        self._cost += time.perf_counter() - began

    def add_values(self, **values: Any) -> None:
        """Add values to the step that was ended with `hold`."""
        if self._pending and self._pending[-1].hold:
            last = self._pending[-1]
            last.hold = False
            last.record = {**values, **last.record}
            self._write_arrived()

    def event(self, kind: str, step: int, **numbers: Any) -> None:
        """Log an evaluation, a save or another event on rank 0; the time since the last mark was a pause."""
        self._require_running()
        if self.rank == 0:
            with self.unwritten(self.folder / run_folder.EVENTS):
                run_folder.log_event(self.folder, kind, step, **numbers)
        self.mark(PAUSE)

    @property
    def between_steps(self) -> bool:
        """Return whether nothing of the next step has been marked yet."""
        self._require_running()
        return self._marks[-1][0] == "start"

    def position(self) -> Position:
        """Return the position for the heartbeat, which calls this from its own thread."""
        last = self._marks[-1][0] if self._marks else ""
        return Position(self.step + 1, NEXT.get(last, "the end of it") if last else "the beginning", self.progress)

    def close(self) -> None:
        """Write what is still under way. Safe to call twice."""
        if self._file is None:
            return
        for pending in self._pending:
            pending.hold = False
        try:
            self._write_arrived(wait=True)
        finally:
            if self.balance is not None:
                self.balance.stop()
            with suppress(OSError):  # a full disk, which the write has reported
                self._file.close()
            self._file = None

    @property
    def is_running(self) -> bool:
        """Return whether a loop is being measured: it has started and not ended."""
        return self._file is not None

    # --- inside ---

    def _require_running(self) -> None:
        if self._file is None:
            problem = "nothing is measured yet, or no longer"
            raise UserError(problem, "recorder", "write `with meter:` around the loop", "nothing-measured")

    def _sample_next(self, sampled: bool) -> None:
        self.sampled = sampled
        if sampled and self.balance is not None:
            self.balance.start()

    def _sample(self) -> dict[str, Any]:
        """Sample counters: always in a sampled step, otherwise as often as the budget allows."""
        began = time.perf_counter()
        if not self.sampled and self._sampling_cost > BUDGET * (began - self._began):
            return {}
        fields = self.counters.sample()
        balance = self.balance.stop() if self.sampled and self.balance is not None else None
        if balance:
            fields["experts"] = balance
        self._sampling_cost += time.perf_counter() - began
        return fields

    def _write_arrived(self, *, wait: bool = False) -> None:
        """Write every step, in order, whose times and values have arrived."""
        if wait and self._pending and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self._pending and not self._pending[0].hold:
            last = self._pending[0].marks[-1][1]
            if not wait and not isinstance(last, float) and not last.query():
                return
            self._write(self._pending.popleft())

    def _write(self, done: _Pending) -> None:
        seconds = dict.fromkeys((*steps.PHASES, PAUSE), 0.0)
        for (_, start), (phase, end) in zip(done.marks, done.marks[1:], strict=False):
            took = end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
            seconds[phase] += max(took, 0.0)
        record = done.record | {f"{phase}_seconds": took for phase, took in seconds.items()}
        record["meter_seconds"] = self._cost
        self._cost = 0.0
        step_seconds = sum(seconds.values()) - seconds[PAUSE]
        if done.late is not None:
            record = dict(zip(done.late_names, done.late.tolist(), strict=True)) | record
        if "supervised_tokens" in record:
            record |= {name: int(record[name]) for name in TOKEN_COUNTS}
        if self._rates is not None:
            record |= self._rates.of(record.get(self.unit) or 0, step_seconds, record.get("longest", 0))
        places = 4 - math.floor(math.log10(max(step_seconds, 1e-6)))
        measured = [name for name in self._fields if record.get(name) is not None]
        self.latest = self._table.derive({name: drop_noise_digits(name, record[name], places) for name in measured})
        non_finite = [name for name in ("loss", "grad_norm") if not math.isfinite(record.get(name) or 0.0)]
        if non_finite:  # JSON has no NaN
            self.latest |= {"non_finite": non_finite, **dict.fromkeys(non_finite)}
        assert self._file is not None
        # Data that a full disk didn't accept stays in the file's buffer, up to 8 KiB in whole lines, and is written
        # first once there is room again. A header may be lost, so it is written again.
        written = 0
        with self.unwritten(Path(self._file.name)):
            written = self._file.write(self._table.encode(self.latest))
        if not written:
            self._table.columns.clear()


class ExpertBalance:
    """Counts on the device, between `start` and `stop`, how often each expert of each layer is chosen."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = find_routers(model)
        self.counts: dict[int, Tensor] = {}
        self.hooks: list[RemovableHandle] = []

    def start(self) -> None:
        self.stop()
        for layer, (router, _) in enumerate(self.routers):
            # Before all other hooks: expert parallelism appends one that renumbers the experts for its own rank.
            self.hooks.append(router.register_forward_hook(partial(self.count, layer), prepend=True))

    def count(
        self, layer: int, _module: Any, _inputs: Any, output: Any, take: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> None:
        """Add what a router chose. take: returns the own part, if the tokens are not all this run's."""
        chosen = output[-1] if isinstance(output, tuple) else output
        # No gradients: an evaluation between two steps.
        if torch.is_grad_enabled() and isinstance(chosen, Tensor) and not chosen.is_floating_point():
            flat = take(chosen.detach()).reshape(-1).long()
            # scatter_add and not bincount, which reads the largest value and so waits for the GPU.
            experts = self.routers[layer][1]
            total = self.counts.setdefault(layer, torch.zeros(experts, device=flat.device))
            total.scatter_add_(0, flat.clamp(0, experts - 1), torch.ones(flat.shape, device=flat.device))

    def stop(self) -> dict[str, Any] | None:
        """Return the balance, or None if no router ran. 1.0 is an even share; `busiest` 2.0 is twice an even share."""
        while self.hooks:
            self.hooks.pop().remove()
        counts = [self.counts[layer].tolist() for layer in sorted(self.counts)]
        self.counts = {}
        if not counts:
            return None
        balance: dict[str, Any] = {"experts": len(counts[0])}
        for name, end in (("busiest", max), ("idlest", min)):
            balance[name] = [round(end(layer) / max(sum(layer) / len(layer), 1e-9), 4) for layer in counts]
        return {**balance, "unused": [layer.count(0) for layer in counts]}


def count_tokens_in(batch: Mapping[str, Any]) -> Tensor | None:
    """Count tokens, padding and supervised tokens of a micro-batch, on its device; None if it has no token ids."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor):
        return None
    mask = batch.get("attention_mask")
    labels = batch.get("labels")
    positions = batch.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        tokens = mask.count_nonzero().double()
    else:  # packed rows come without a mask: every position is a token
        tokens = torch.full((), ids.numel(), dtype=torch.float64, device=ids.device)
        if isinstance(positions, Tensor) and positions.dim() == 2 and len(positions) > 1:
            # Except padding of shorter rows: positions at the row's end, each a document of its own.
            tokens = tokens - positions.flip(-1).cumsum(-1).eq(0).count_nonzero()
    # The prediction at position i is scored with the label of i + 1: the first label of a row is never used.
    supervised = (labels[..., 1:] != steps.IGNORED).count_nonzero().double() if isinstance(labels, Tensor) else tokens
    return torch.stack([tokens, ids.numel() - tokens, supervised])


def mean_loss(losses: Sequence[Tensor], counts: Sequence[Tensor], *, summed: bool) -> Tensor | None:
    """Return a step's loss: `summed` losses of micro-batches are shares of it, others means over supervised tokens."""
    if not losses:
        return None
    stacked = torch.stack(list(losses))
    if summed:
        return stacked.sum()
    if len(counts) != len(losses):
        return stacked.mean()
    weights = torch.stack(list(counts))[:, 2].to(stacked.device)
    return (stacked * weights).sum() / weights.sum().clamp(min=1)


def drop_noise_digits(name: str, value: Any, places: int) -> Any:
    """Drop digits of floats that are noise: they would be half of the file. Dates need theirs."""
    if not isinstance(value, float) or abs(value) >= 1e6:
        return value
    by_step = name.endswith("_seconds") and name != "meter_seconds"
    value = round(value, places) if by_step else float(f"{value:.{DIGITS.get(name, 5)}g}")
    return int(value) if value.is_integer() else value
