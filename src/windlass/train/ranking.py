"""The ranking of a run's saved adapters, and its table. No torch."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Candidate:
    """An adapter's loss and its distance from the best one."""

    name: str
    loss: float  # mean per supervised token
    difference: float  # from the best loss
    low: float  # 95 % interval of the difference
    high: float
    apart: bool  # the interval excludes 0


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates from best to worst."""

    candidates: tuple[Candidate, ...]
    rows: int
    tokens: int
    skipped: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        ranked = [asdict(candidate) for candidate in self.candidates]
        return {"best": ranked, "rows": self.rows, "tokens": self.tokens, "passed_over": self.skipped}


def print_ranking(ranking: Ranking) -> None:
    """Print the ranking as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{ranking.rows} rows, {ranking.tokens} supervised tokens", title_justify="left")
    for name in ("adapter", "loss", "worse by", "95% interval", ""):
        table.add_column(name, justify="right" if name in ("loss", "worse by") else "left")
    best, *others = ranking.candidates
    table.add_row(best.name, f"{best.loss:.4f}", "", "", "best")
    for candidate in others:
        verdict = "worse" if candidate.apart else "no clear difference from the best"
        interval = f"{candidate.low:+.4f} to {candidate.high:+.4f}"
        table.add_row(candidate.name, f"{candidate.loss:.4f}", f"{candidate.difference:.4f}", interval, verdict)
    console = Console()
    console.print(table)
    for name, why in ranking.skipped.items():
        console.print(f"skipped {name}: {why}", markup=False)
