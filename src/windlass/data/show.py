"""The audit for a reader: tables in the terminal, the learnt part of the samples between [[ and ]]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Audit = Mapping[str, Any]
# Of a sample's part so many characters are shown at each end.
SHOWN_CHARACTERS = 300


def show(audit: Audit, console: Console | None = None) -> None:
    """Print it."""
    (console or Console(highlight=False)).print(render(audit))


def render(audit: Audit) -> RenderableType:
    source, shape = audit["source"], audit["shape"]
    config = f" · {source['config']}" if source["config"] else ""
    parts: list[RenderableType] = [
        Text(f"{source['name']}{config}: {source['how']}", style="bold"),
        Text(shape["said"]),
    ]
    if audit["sampled_rows"]:
        parts.append(Text(f"streamed: train is audited by its first {audit['sampled_rows']:,} rows"))
    if audit["held_out"]:
        parts.append(Text(f"validation: {audit['held_out']:.1%} of the rows held out, by their own hashes"))
    parts += [Text(), figures(audit), Text(), lengths(audit)]
    if audit.get("batching"):
        parts += [Text(), ways(audit["batching"])]
    for sample in audit["samples"]:
        parts += [Text(), *one_sample(sample)]
    parts += [Text(f"! {note}", style="yellow") for note in ("", *audit["notes"]) if note]
    return Group(*parts)


FIGURES = {
    "rows": "rows",
    "empty": "empty, dropped",
    "unsupervised": "nothing to learn, dropped",
    "documents": "documents",
    "duplicates": "duplicates",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
    "truncated": "cut at max_length",
    "tokens_cut": "tokens cut off",
}
SHARES = {"supervised_fraction": "supervised share", "end_learnt_share": "rows that learn to end"}


def figures(audit: Audit) -> Table:
    """Every count of every split."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for split in audit["splits"]:
        table.add_column(split, justify="right")
    for key, said in FIGURES.items():
        table.add_row(said, *(f"{split[key]:,}" for split in audit["splits"].values()))
    for key, said in SHARES.items():
        table.add_row(said, *(f"{split[key]:.1%}" for split in audit["splits"].values()))
    overlap = audit.get("overlap")
    if overlap is not None:
        table.add_row("also in train", "", f"{overlap['documents']:,}")
    return table


def lengths(audit: Audit) -> Table:
    """The length histogram of the training set, as bars."""
    rows = audit["splits"]["train"]["histogram"]
    table = Table(box=None, pad_edge=False)
    for heading, side in (("tokens", "right"), ("documents", "right"), ("", "left")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    most = max((count for _, _, count in rows), default=1)
    for low, high, count in rows:
        table.add_row(f"{low:,}–{high:,}", f"{count:,}", "█" * round(40 * count / most))
    return table


def ways(batching: Audit) -> Table:
    """What each way of batching would compute."""
    table = Table(box=None, pad_edge=False)
    for heading, side in (("batching", "left"), ("micro-batches", "right"), ("tokens of positions", "right")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    for way, row in batching["ways"].items():
        mark = "→ " if way == batching["configured"] else "  "
        table.add_row(f"{mark}{way}", f"{row['micro_batches']:,}", f"{row['useful_share']:.1%}")
    return table


def one_sample(sample: Audit) -> list[RenderableType]:
    """A decoded document, what is learnt in green and between [[ and ]]."""
    text = Text()
    for part in sample["parts"]:
        shown = shortened(part["text"])
        text.append(f"[[{shown}]]" if part["learnt"] else shown, style="green" if part["learnt"] else "dim")
    head = f"{sample['split']} document {sample['document']:,} ({sample['tokens']:,} tokens)"
    return [Text(head, style="bold"), text]


def shortened(text: str) -> str:
    if len(text) <= 2 * SHOWN_CHARACTERS:
        return text
    left = len(text) - 2 * SHOWN_CHARACTERS
    return f"{text[:SHOWN_CHARACTERS]} …{left:,} characters… {text[-SHOWN_CHARACTERS:]}"
