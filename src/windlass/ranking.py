"""The ranking of a run's saved adapters, and its table. No torch."""

from dataclasses import asdict, dataclass
from typing import Any, Final

UNCLEAR: Final = "unclear"  # the interval of a difference includes 0


@dataclass(frozen=True, slots=True)
class RankedAdapter:
    """An adapter's loss and its distance from the best one."""

    name: str
    loss: float  # mean per supervised token, or per pair
    difference: float  # from the best loss, or from the best share of preferred answers
    low: float  # 95 % interval of the difference
    high: float
    apart: bool  # the interval excludes 0
    accuracy: float | None = None  # share of pairs whose chosen answer is preferred
    kept_worse: float | None = None  # how much worse than the base's the worst kept set's loss is
    kept_kl: float | None = None  # that set's divergence from the base


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates from best to worst."""

    candidates: tuple[RankedAdapter, ...]
    rows: int
    tokens: int  # of pairs: their number
    skipped: dict[str, str]
    by: str = "loss"
    caution: str = ""  # why the losses can't be compared
    note: str = ""  # about the best adapter

    def as_dict(self) -> dict[str, Any]:
        said = {name: text for name, text in (("caution", self.caution), ("note", self.note)) if text}
        ranked = list(map(asdict, self.candidates))
        counts = {"rows": self.rows, "tokens": self.tokens}
        return {"best": ranked, **counts, "passed_over": self.skipped, "by": self.by, **said}


def print_ranking(ranking: Ranking) -> None:
    """Print the ranking as a table on stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    best = ranking.candidates[0]
    of_pairs = best.accuracy is not None
    counted = f"{ranking.rows} pairs" if of_pairs else f"{ranking.rows} rows, {ranking.tokens} supervised tokens"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    has_kept = any(candidate.kept_worse is not None for candidate in ranking.candidates)
    kept_columns = ["kept sets", "KL"] * has_kept
    for name in ("adapter", "loss", *["accuracy"] * of_pairs, *kept_columns, "worse by", "95% interval", ""):
        is_number = name in ("loss", "accuracy", *kept_columns, "worse by")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "")
    for candidate in ranking.candidates:
        cells = [candidate.name, f"{candidate.loss:.4f}"]
        cells += [] if candidate.accuracy is None else [f"{candidate.accuracy:.1%}"]
        if has_kept:
            known = candidate.kept_worse is not None
            cells += [f"{candidate.kept_worse:+.4f}", f"{candidate.kept_kl:.4f}"] if known else ["", ""]
        verdict = "worse" if candidate.apart else UNCLEAR
        interval = f"{candidate.low:+.4f} to {candidate.high:+.4f}"
        cells += ["", "", "best"] if candidate is best else [f"{candidate.difference:.4f}", interval, verdict]
        table.add_row(*cells)
    console = Console()
    console.print(f"{counted}, ranked by {ranking.by}" if of_pairs else counted, highlight=False)
    console.print(table)
    if any(not candidate.apart for candidate in ranking.candidates[1:]):
        console.print(f"{UNCLEAR}: the interval has 0 in it: no clear difference from the best", highlight=False)
    for name, why in ranking.skipped.items():
        console.print(f"skipped {name}: {why}", markup=False)
    for said in filter(None, (ranking.caution, ranking.note)):
        console.print(said, style="yellow", markup=False)
