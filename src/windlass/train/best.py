"""`windlass best`: the base loaded once, every saved adapter put into it, each row's loss, and which one is lowest.

Adapters are compared on the same rows, so what rows have in common (some are hard for all) cancels out: the interval
is that of the difference, row by row, and far narrower than the spread of the losses.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import cross_entropy

from windlass.data.prepare import prepare
from windlass.errors import UserError
from windlass.observe.steps import IGNORED
from windlass.train import checkpoint, group
from windlass.train.console import quiet
from windlass.train.load import load
from windlass.train.lora import attach
from windlass.train.rank import Place
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
    passed_over: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        ranked = [{**asdict(candidate), "apart": candidate.apart} for candidate in self.candidates]
        return {"best": ranked, "rows": self.rows, "tokens": self.tokens, "passed_over": self.passed_over}


def best(plan: Plan, here: Place, run_folder: Path, show: Callable[[Ranking], None]) -> int:
    """One rank's part; rank 0 shows the ranking."""
    job, console = plan.loaded.run, quiet(here)
    join(here, job.train.ddp_timeout)
    whole, passed_over = candidates(run_folder)
    here.phase("preparing the data")
    tokenizer = tokenizer_of(plan)
    data = prepare(job, tokenizer, where=plan.loaded.where, cache=run_folder / "tokens", say=console.print)
    if data.validation is None or len(data.validation) < 2:
        raise UserError("there are no rows to compare on", str(run_folder), "name some with --eval-data FILE")
    here.phase("loading the model")
    model, _ = load(plan.base, plan.layout, **precision(job.model))
    model = attach(model, job.lora, plan.adapter, job.train.seed, plan.expert_path).eval()
    batches = batched(data.validation, here, job.train.per_device_eval_batch_size, tokenizer.pad_token_id)
    with model.disable_adapter():
        losses = {BASE: evaluated(model, batches, len(data.validation))}
    for folder in whole:
        here.phase(f"evaluating {folder.name}")
        checkpoint.load_adapter(model, folder)
        losses[folder.name] = evaluated(model, batches, len(data.validation))
        console.print(f"{folder.name}  evaluated")
    if here.rank == 0:
        show(ranking(losses, passed_over))
    return 0


def candidates(run_folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The whole checkpoints, and why others are none. Every rank is given what rank 0 found."""
    found = list(checkpoint.newest(run_folder / "checkpoints")) if group.rank() == 0 else []
    found = group.from_rank_0(found)
    whole = [folder for folder, damage in found if not damage]
    if not whole:
        raise UserError("no whole checkpoint is there", str(run_folder / "checkpoints"), "let the run save one")
    return whole, {folder.name: damage for folder, damage in found if damage}


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of this rank side by side; `numbers` are their places in the set."""

    numbers: list[int]
    ids: Tensor
    labels: Tensor
    mask: Tensor


def batched(rows: Any, here: Place, size: int, padding: int) -> list[Batch]:
    """Every rank as many batches as the others: a sharded model's forward pass needs all of them."""
    mine = [
        number % len(rows) for number in range(here.rank, math.ceil(len(rows) / here.world) * here.world, here.world)
    ]
    device = torch.device("cuda", here.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    made = []
    for start in range(0, len(mine), size):
        numbers = mine[start : start + size]
        chosen = [rows[number] for number in numbers]
        length = max(len(row["input_ids"]) for row in chosen)

        def padded(name: str, fill: int, chosen: Sequence[Any] = chosen, length: int = length) -> Tensor:
            lists = [[*row[name], *[fill] * (length - len(row[name]))] for row in chosen]
            return torch.tensor(lists, device=device)

        lengths = torch.tensor([len(row["input_ids"]) for row in chosen], device=device)
        mask = (torch.arange(length, device=device) < lengths[:, None]).long()
        labels = padded("labels", IGNORED) if "labels" in chosen[0] else padded("input_ids", IGNORED)
        made.append(Batch(numbers, padded("input_ids", padding), labels, mask))
    return made


@torch.no_grad()
def evaluated(model: PeftModel, batches: Sequence[Batch], count: int) -> Rows:
    """The loss of every row of the set, on every rank."""
    mine: list[tuple[int, float, int]] = []
    for batch in batches:
        logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits[:, :-1]
        labels = batch.labels[:, 1:]
        losses = [
            cross_entropy(row.float(), wanted, reduction="sum", ignore_index=IGNORED)
            for row, wanted in zip(logits, labels, strict=True)
        ]
        tokens = labels.ne(IGNORED).sum(dim=1).tolist()
        mine += zip(batch.numbers, torch.stack(losses).tolist(), tokens, strict=True)
    by_number = {number: (loss, tokens) for part in group.gather(mine) for number, loss, tokens in part}
    return [by_number[number] for number in range(count)]


def ranking(losses: dict[str, Rows], passed_over: dict[str, str]) -> Ranking:
    means = {name: mean(rows) for name, rows in losses.items()}
    order = sorted(means, key=lambda name: (means[name], name))
    lowest = losses[order[0]]
    ranked = tuple(
        Candidate(name, means[name], means[name] - means[order[0]], *interval(losses[name], lowest)) for name in order
    )
    return Ranking(ranked, len(lowest), sum(tokens for _, tokens in lowest), passed_over)


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
        verdict = "best" if place == 0 else "worse" if each.apart else "not told apart from the best"
        spread = f"{each.low:+.4f} to {each.high:+.4f}" if place else ""
        table.add_row(each.name, f"{each.loss:.4f}", f"{each.difference:.4f}" if place else "", spread, verdict)
    console = Console()
    console.print(table)
    with contextlib.suppress(StopIteration):
        name, why = next(iter(ranking.passed_over.items()))
        console.print(f"{len(ranking.passed_over)} passed over; {name}: {why}", markup=False)
