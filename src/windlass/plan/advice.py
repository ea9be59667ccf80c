"""What would make the run faster: single keys of the run file, each with its gain by the plan's own figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from windlass.plan.batch import batches_of
from windlass.plan.compare import Contender, Trial, chosen, chosen_batch, contend, trials
from windlass.plan.cost import Batch, Work
from windlass.plan.layout import Candidate
from windlass.runfile import RunFile

WORTH = 1.05  # below this a gain is within what the estimate can tell
LEAST_PRIME = 3  # beside smaller numbers a step would be quite another one


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, or all of them together, and the useful tokens per second that it would give."""

    change: str  # data.packing: true
    tokens_per_second: float
    gain: float  # against the run as planned
    remark: str


def advise(work: Work, usual: int, contenders: Sequence[Contender], run: RunFile, *, fixed: bool) -> tuple[Advice, ...]:
    """Each lever alone, then all together, the best first. `fixed`: the run file says the micro-batch."""
    ways = batches_of(
        run.train.model_copy(update={"per_device_train_batch_size": "auto"}),
        work.batch.micro * work.batch.accumulation,
        work.batch.length,
    )
    here = [c.candidate for c in contenders if c.candidate.here and c.candidate.possible]
    full = work.batch.length
    now = trials(work, work.layout, usual, [work.batch])[0].cost.tokens_per_second
    found: list[tuple[str, Trial | Contender | None, str]] = []
    packed = work
    if not run.data.packing and usual < full:
        masked = run.model_copy(update={"data": run.data.model_copy(update={"packing": True})}).masked
        packed = replace(work, masked=masked, document=None if masked else usual)
        remark = f"a sequence then holds {full / usual:.1f} rows; a step learns from as many times the tokens"
        found.append(("data.packing: true", chosen_batch(trials(packed, work.layout, full, [work.batch])), remark))
    if fixed and len(ways) > 1:
        one = chosen_batch(trials(work, work.layout, usual, ways))
        found.append(("train.per_device_train_batch_size: auto", one, _cut(one.batch)))
    if not work.layout.activation_checkpointing:
        again = replace(work.layout, activation_checkpointing=True)
        one = chosen_batch(trials(work, again, usual, [work.batch] if fixed else ways))
        found.append(
            ("train.gradient_checkpointing: true", one, f"{one.cost.gpu_gib:,.1f} GiB a GPU, {_cut(one.batch)}")
        )
    if not work.layout.reason.startswith("chosen"):
        other = chosen([c for c in contenders if c.candidate.here])
        found.append(("layout: auto", other, f"takes {other.name}" if other else ""))
    single = _worth(found, now)
    if len(found) > 1:
        single += _worth([_together(packed, full, here, ways)], now)
    if not fixed and len(ways) == 2 and work.batch.micro == 1 and ways[-1].micro > LEAST_PRIME:
        single += _worth([_neighbour(work, usual, run, ways[-1].micro)], now)
    return tuple(sorted(single, key=lambda advice: -advice.gain))


def _neighbour(work: Work, usual: int, run: RunFile, prime: int) -> tuple[str, Trial, str]:
    """A prime number of sequences can't be cut into passes of several: the better of the numbers beside it."""
    ways = [batches_of(run.train, count, work.batch.length) for count in (prime - 1, prime + 1)]
    best = min((chosen_batch(trials(work, work.layout, usual, way)) for way in ways), key=_token_seconds)
    count = best.batch.micro * best.batch.accumulation
    change = f"train.gradient_accumulation_steps: {count}"
    if run.train.global_batch_size:
        change = f"train.global_batch_size: {count * work.layout.ranks}"
    return change, best, f"{_cut(best.batch)}; {prime} can be cut into passes of 1 or {prime} alone"


def _token_seconds(trial: Trial) -> float:
    return 1 / trial.cost.tokens_per_second if trial.fits else math.inf


def _together(
    work: Work, full: int, here: Sequence[Candidate], ways: Sequence[Batch]
) -> tuple[str, Contender | None, str]:
    """Every lever at once, with and without checkpointing, under whichever layout is then the fastest."""
    laid = [
        replace(c, layout=replace(c.layout, activation_checkpointing=again))
        for c in here
        if c.layout
        for again in (False, True)
    ]
    best = chosen(contend(work, full, laid, ways))
    if best is None or best.layout is None:
        return "all of these", None, ""
    again = "checkpointing" if best.layout.activation_checkpointing else "no checkpointing"
    return "all of these", best, f"{best.name}, {_cut(best.batch)}, {again}"


def _worth(found: Sequence[tuple[str, Trial | Contender | None, str]], now: float) -> list[Advice]:
    made = []
    for change, way, remark in found:
        if way is not None and way.cost is not None and way.cost.fits:
            gain = way.cost.tokens_per_second / now
            made += [Advice(change, way.cost.tokens_per_second, gain, remark)] * (gain >= WORTH)
    return made


def _cut(batch: Batch) -> str:
    return f"{batch.micro} x {batch.accumulation} passes"
