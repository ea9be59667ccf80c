"""Show the data audit and rows in the terminal, what the loss is computed on between [[ and ]]."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

SHOWN_CHARACTERS = 300  # characters shown at each end of a sample's part
FIGURES = {
    "rows": ("rows", ","),
    "empty": ("empty, dropped", ","),
    "unsupervised": ("nothing supervised, dropped", ","),
    "split": ("chats that became several rows", ","),
    "documents": ("documents", ","),
    "answers": ("supervised parts", ","),
    "answers_ended": ("that end where generation stops", ","),
    "duplicates": ("duplicates", ","),
    "tokens": ("tokens", ","),
    "supervised_tokens": ("supervised tokens", ","),
    "truncated": ("cut at max_length", ","),
    "tokens_cut": ("tokens cut off", ","),
    "supervised_fraction": ("supervised share", ".1%"),
    "end_trained_share": ("rows with a supervised end", ".1%"),
    "chosen_tokens": ("tokens of a chosen answer (median)", ",.0f"),
    "rejected_tokens": ("tokens of a rejected answer (median)", ",.0f"),
    "chosen_longer": ("pairs whose chosen answer is longer", ".1%"),
}
SET_COLUMNS = ("rows", "tokens", "supervised", "cut", "duplicates")


def print_audit(audit: Mapping[str, Any], console: Console | None = None) -> None:
    source = audit["source"]
    splits = audit["splits"]
    batching = audit["batching"]
    config = f" · {source['config']}" if source["config"] else ""
    parts: list[RenderableType] = [Text(f"{source['name']}{config}: {source['how']}", "bold")]
    parts += [] if audit["sources"] else [audit["shape"]["description"]]
    if audit["sampled_rows"]:
        parts.append(f"streamed: train is audited by its first {audit['sampled_rows']:,} rows")
    if held_out := explain_held_out(audit):
        parts.append(held_out)
    train = splits["train"]
    figures = {key: each for key, each in FIGURES.items() if key in train and (key != "split" or train["split"])}
    of_pairs = "chosen_longer" in train
    rows = [
        (name, *(format(s[key], spec) if key in s else "" for s in splits.values()))
        for key, (name, spec) in figures.items()
    ]
    if overlap := audit.get("overlap"):
        rows.append(("also in train", "", f"{overlap['documents']:,}"))
        rows.append(("nearly the same in train", "", f"{overlap['near']:,}"))
    parts.append(_table({"": "left", **dict.fromkeys(splits, "right")}, rows))
    headings = {"sources": "set", "evaluated": "evaluation set", "kept": "kept set"}
    for key, heading in headings.items():
        last = "in an epoch" if key == "sources" else "also in train"
        if sets := audit.get(key):
            columns = {heading: "left", **dict.fromkeys((*SET_COLUMNS, last), "right")}
            parts.append(_table(columns, [_set_row(*each) for each in sets.items()]))
            parts += [f"  {name}: {figures['description']}" for name, figures in sets.items()]
    histogram = splits["train"]["histogram"]
    most = max((count for _, _, count in histogram), default=1)
    bars = [(f"{low:,}–{high:,}", f"{count:,}", "█" * round(40 * count / most)) for low, high, count in histogram]
    counted = "sequences" if of_pairs else "documents"
    parts.append(_table({"tokens": "right", counted: "right", "": "left"}, bars))
    ways = [
        (
            f"{'→' if way == batching['configured'] else ' '} {way}",
            f"{f['micro_batches']:,}",
            f"{f['useful_share']:.1%}",
        )
        for way, f in batching.get("ways", {}).items()
    ]
    parts.append(_table({"batching": "left", "micro-batches": "right", "tokens of positions": "right"}, ways))
    for sample in audit["samples"]:
        name = f"{sample['split']} document {sample['document']:,}"
        side = f", {sample['side']}" if "side" in sample else ""
        text = Text(f"\n{name}{side} ({sample['tokens']:,} tokens)\n", "bold")
        for part in sample["parts"]:
            shown = part["text"]
            hidden = len(part["text"]) - 2 * SHOWN_CHARACTERS
            if hidden > 0:
                shown = f"{shown[:SHOWN_CHARACTERS]} …{hidden:,} characters… {shown[-SHOWN_CHARACTERS:]}"
            text.append(*((f"[[{shown}]]", "not bold green") if part["trained"] else (shown, "not bold dim")))
        parts.append(text)
    parts += [*audit["facts"], *(Text(f"! {note}", "yellow") for note in audit["notes"])]
    (console or Console(highlight=False)).print(Group(*(Text(p) if isinstance(p, str) else p for p in parts)))


def _set_row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of one set of a mix or of the evaluation sets."""
    last = f"{figures['in_epoch']:,} ({figures['epochs']:.2g}x)" if "in_epoch" in figures else ""
    if overlap := figures.get("overlap"):
        last = f"{overlap['documents']:,} + {overlap['near']:,} nearly"
    shares = (f"{figures['supervised_fraction']:.1%}", f"{figures['truncated_share']:.1%}")
    return name, f"{figures['rows']:,}", f"{figures['tokens']:,}", *shares, f"{figures['duplicates']:,}", last


def explain_held_out(audit: Mapping[str, Any]) -> str:
    """Return which share of the rows is held out; empty if none is."""
    if not audit["held_out"]:
        return ""
    held = audit["splits"]["validation"]["documents"]
    share = held / max(1, held + audit["splits"]["train"]["documents"])
    return f"validation: {share:.1%} of the rows held out, by their own hashes"


def print_rows(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print rows as text: what the loss is computed on in green between [[ and ]], special tokens in blue."""
    console = console or Console(highlight=False)
    if any(row["parts"] for row in rows):
        console.print(Text("[[loss is computed on this]], the rest is context", "dim"))
    for row in rows:
        console.print(_describe_row(row))
        text = Text()
        for trained, parts in groupby(row["parts"], key=lambda part: part["trained"]):
            text.append("[[" if trained else "", "green")
            for part in parts:
                style = "green" if trained else "default"
                text.append(part["text"], "bold blue" if part["special"] else style)
            text.append("]]" if trained else "", "green")
        console.print(text)


def print_tokens(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print rows token by token."""
    console = console or Console(highlight=False)
    for row in rows:
        console.print(_describe_row(row))
        for place, token in enumerate(row["tokens"]):
            line = f"{place:5} {token['id']:7} {'loss' if token['loss'] else '    '} {token['text']!r}"
            console.print(Text(line, "green" if token["loss"] else "dim"), soft_wrap=True)


def _describe_row(row: Mapping[str, Any]) -> Text:
    return Text(f"\n{row['source']}, row {row['row']:,}: {row['description']}", "bold")


def _table(columns: Mapping[str, Any], rows: Iterable[tuple[str, ...]]) -> Group:
    table = Table(box=None, pad_edge=False)
    for heading, side in columns.items():
        table.add_column(heading, justify=side)
    for row in rows:
        table.add_row(*row)
    return Group("", table)
