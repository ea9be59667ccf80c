"""`windlass best`: the base loaded once, every saved adapter put into it, each row's loss, and which one is lowest.

Adapters are compared on the same rows, so what rows have in common (some are hard for all) cancels out: the interval
is that of the difference, row by row, and far narrower than the spread of the losses.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft import PeftModel

from windlass.data.prepare import prepare
from windlass.errors import UserError
from windlass.run_folder import CHECKPOINTS
from windlass.train import checkpoint, group
from windlass.train.batches import Batches, Collate
from windlass.train.console import quiet
from windlass.train.load import load
from windlass.train.lora import attach
from windlass.train.loss import patch_forward
from windlass.train.parallel import device_of_this_rank
from windlass.train.rank import Rank
from windlass.train.run import join, precision, tokenizer_of

if TYPE_CHECKING:
    from windlass.plan import Plan

CONFIDENCE = 0.95
BASE = "base model"  # without any adapter: what all of them are to be better than

Rows = list[tuple[float, int]]  # of each row the summed loss and the supervised tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """One adapter, and how much worse than the best it is."""

    name: str
    loss: float  # mean per supervised token
    difference: float  # to the best
    low: float  # the difference's confidence interval
    high: float

    @property
    def apart(self) -> bool:
        """Whether the rows tell it from the best."""
        return self.low > 0


@dataclass(frozen=True, slots=True)
class Ranking:
    """Best first."""

    candidates: tuple[Candidate, ...]
    rows: int
    tokens: int
    skipped: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        ranked = [{**asdict(candidate), "apart": candidate.apart} for candidate in self.candidates]
        return {"best": ranked, "rows": self.rows, "tokens": self.tokens, "passed_over": self.skipped}


def best(plan: Plan, here: Rank, run_folder: Path, show: Callable[[Ranking], None]) -> int:
    """One rank's part; rank 0 shows the ranking."""
    job, console = plan.loaded.run, quiet(here)
    join(here, job.train.ddp_timeout)
    intact, skipped = candidates(run_folder)
    here.phase("preparing the data")
    tokenizer = tokenizer_of(plan)
    data = prepare(job, tokenizer, where=plan.loaded.where, cache=run_folder / "tokens", say=console.print)
    if data.validation is None or len(data.validation) < 2:
        raise UserError("there are no rows to compare on", str(run_folder), "name some with --eval-data FILE")
    here.phase("loading the model")
    model, _ = load(plan.base, plan.layout, **precision(job.model))
    model = attach(model, job.lora, plan.adapter, job.train.seed, plan.expert_path).eval()
    patch_forward(model.get_base_model())
    size, order = job.train.per_device_eval_batch_size, np.arange(len(data.validation))
    collate = Collate(data.collator(tokenizer.pad_token_id))
    batches = Batches(data.validation, collate, size, order=lambda _: order, round_rows=size * here.world)
    with model.disable_adapter():
        losses = {BASE: row_losses(model, batches)}
    for folder in intact:
        here.phase(f"evaluating {folder.name}")
        checkpoint.load_adapter(model, folder)
        losses[folder.name] = row_losses(model, batches)
        console.print(f"{folder.name}  evaluated")
    if here.rank == 0:
        show(ranking(losses, skipped))
    return 0


def candidates(run_folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The intact checkpoints, and why others are not. Every rank is given what rank 0 found."""
    found: dict[Path, str] = {}
    if group.rank() == 0:
        found = {folder: checkpoint.damage(folder) for folder in checkpoint.saved(run_folder / CHECKPOINTS)[::-1]}
    found = group.from_rank_0(found)
    intact = [folder for folder, damage in found.items() if not damage]
    if not intact:
        raise UserError("there is no intact checkpoint", str(run_folder / CHECKPOINTS), "let the run save one")
    return intact, {folder.name: damage for folder, damage in found.items() if damage}


@torch.no_grad()
def row_losses(model: PeftModel, batches: Batches) -> Rows:
    """The summed loss and the supervised tokens of every row, on every rank."""
    mine: list[tuple[int, float, int]] = []
    for batch in batches.epoch(0):
        inputs = batch.to(device_of_this_rank()).inputs
        losses = model.get_base_model()(**inputs, per_token=True)[0].double().cpu()
        length = batch.inputs["input_ids"].shape[1]
        row_of = batch.inputs["supervised"] // length
        for i, number in enumerate(batch.rows):  # a row that only fills is behind them
            own = losses[row_of == i]
            mine.append((number, float(own.sum()), len(own)))
    by_number = {number: (loss, tokens) for part in group.gather(mine) for number, loss, tokens in part}
    return [by_number[number] for number in range(len(batches.rows))]


def ranking(losses: dict[str, Rows], skipped: dict[str, str]) -> Ranking:
    means = {name: mean(rows) for name, rows in losses.items()}
    order = sorted(means, key=lambda name: (means[name], name))
    lowest = losses[order[0]]
    ranked = tuple(
        Candidate(name, means[name], means[name] - means[order[0]], *interval(losses[name], lowest)) for name in order
    )
    return Ranking(ranked, len(lowest), sum(tokens for _, tokens in lowest), skipped)


def mean(rows: Rows) -> float:
    return math.fsum(loss for loss, _ in rows) / sum(tokens for _, tokens in rows)


def interval(rows: Rows, lowest: Rows) -> tuple[float, float]:
    """Confidence interval of the difference of two means per token, over the same rows.

    A mean per token of rows with different numbers of tokens is a ratio: its variance is that of the residuals
    (Cochran, Sampling Techniques, 1977, section 6.4).
    """
    count, tokens = len(rows), sum(tokens for _, tokens in rows)
    differences = [one - other for (one, _), (other, _) in zip(rows, lowest, strict=True)]
    centre = math.fsum(differences) / tokens
    squares = math.fsum((each - centre * n) ** 2 for each, (_, n) in zip(differences, rows, strict=True))
    half = quantile(count - 1) * math.sqrt(squares * count / (count - 1)) / tokens
    return centre - half, centre + half


def quantile(freedom: int) -> float:
    """Student's t at CONFIDENCE, two-sided, by Cornish and Fisher's expansion (within 1 % from 4 degrees on)."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def show(ranking: Ranking) -> None:
    """A table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{ranking.rows} rows, {ranking.tokens} supervised tokens", title_justify="left")
    for name in ("adapter", "loss", "worse by", f"{CONFIDENCE:.0%} interval", ""):
        table.add_column(name, justify="right" if name in ("loss", "worse by") else "left")
    for place, each in enumerate(ranking.candidates):
        verdict = "best" if place == 0 else "worse" if each.apart else "no clear difference from the best"
        spread = f"{each.low:+.4f} to {each.high:+.4f}" if place else ""
        table.add_row(each.name, f"{each.loss:.4f}", f"{each.difference:.4f}" if place else "", spread, verdict)
    console = Console()
    console.print(table)
    with contextlib.suppress(StopIteration):
        name, why = next(iter(ranking.skipped.items()))
        console.print(f"{len(ranking.skipped)} skipped; {name}: {why}", markup=False)
