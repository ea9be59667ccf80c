"""Show the data audit in the terminal: tables, and samples with the supervised part between [[ and ]]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Audit = Mapping[str, Any]
SHOWN_CHARACTERS = 300  # at each end of a sample's part
FIGURES = {
    "rows": "rows",
    "empty": "empty, dropped",
    "unsupervised": "nothing supervised, dropped",
    "documents": "documents",
    "duplicates": "duplicates",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
    "truncated": "cut at max_length",
    "tokens_cut": "tokens cut off",
}
SHARES = {"supervised_fraction": "supervised share", "end_learnt_share": "rows with a supervised end"}


def show(audit: Audit, console: Console | None = None) -> None:
    (console or Console(highlight=False)).print(render(audit))


def render(audit: Audit) -> RenderableType:
    source, splits, batching = audit["source"], audit["splits"], audit.get("batching")
    config = f" · {source['config']}" if source["config"] else ""
    parts: list[RenderableType] = [Text(f"{source['name']}{config}: {source['how']}", "bold"), audit["shape"]["said"]]
    if audit["sampled_rows"]:
        parts.append(f"streamed: train is audited by its first {audit['sampled_rows']:,} rows")
    if audit["held_out"]:
        parts.append(f"validation: {audit['held_out']:.1%} of the rows held out, by their own hashes")
    figures = [(said, *(f"{split[key]:,}" for split in splits.values())) for key, said in FIGURES.items()]
    figures += [(said, *(f"{split[key]:.1%}" for split in splits.values())) for key, said in SHARES.items()]
    if overlap := audit.get("overlap"):
        figures.append(("also in train", "", f"{overlap['documents']:,}"))
    parts += ["", table({"": "left", **dict.fromkeys(splits, "right")}, figures)]
    histogram = splits["train"]["histogram"]
    most = max((count for _, _, count in histogram), default=1)
    bars = [(f"{low:,}–{high:,}", f"{count:,}", "█" * round(40 * count / most)) for low, high, count in histogram]
    parts += ["", table({"tokens": "right", "documents": "right", "": "left"}, bars)]
    if batching:
        ways = [
            (f"{'→' if way == batching['configured'] else ' '} {way}", f"{row['micro_batches']:,}", share)
            for way, row in batching["ways"].items()
            for share in [f"{row['useful_share']:.1%}"]
        ]
        parts += ["", table({"batching": "left", "micro-batches": "right", "tokens of positions": "right"}, ways)]
    for sample in audit["samples"]:
        head = f"{sample['split']} document {sample['document']:,} ({sample['tokens']:,} tokens)"
        text = Text()
        for part in sample["parts"]:
            shown = shorten(part["text"])
            text.append(f"[[{shown}]]" if part["learnt"] else shown, style="green" if part["learnt"] else "dim")
        parts += ["", Text(head, "bold"), text]
    parts += [Text(f"! {note}", "yellow") for note in ("", *audit["notes"]) if note]
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))


def table(columns: Mapping[str, Any], rows: Iterable[tuple[str, ...]]) -> Table:
    made = Table(box=None, pad_edge=False)
    for heading, side in columns.items():
        made.add_column(heading, justify=side)
    for row in rows:
        made.add_row(*row)
    return made


def shorten(text: str) -> str:
    if len(text) <= 2 * SHOWN_CHARACTERS:
        return text
    left = len(text) - 2 * SHOWN_CHARACTERS
    return f"{text[:SHOWN_CHARACTERS]} …{left:,} characters… {text[-SHOWN_CHARACTERS:]}"
