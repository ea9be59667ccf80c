"""Show the data audit and rows, in the terminal or as a page: what the loss is computed on stands between [[ and ]]."""

import heapq
import itertools
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from windlass import __version__
from windlass.data.cache import Say
from windlass.data.choose import choose_format
from windlass.data.documents import Documents
from windlass.data.packing import iter_documents
from windlass.data.preference import SIDES
from windlass.data.prepare import prepare_data
from windlass.data.reading import locate_row, read_rows
from windlass.data.select import RowSet, list_all_sets, select_rows
from windlass.data.tokenize import open_model_tokenizer, tokenize
from windlass.errors import UserError, require_writable
from windlass.files import write_atomic
from windlass.observe.format import format_plural
from windlass.runfile import Loaded

SAMPLED_ROWS = 12  # of every set, on a page
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


def sample_token_rows(
    loaded: Loaded,
    *,
    say: Say,
    sample: int | None,
    row: int | None,
    source: str | None,
    prepared: int | None = None,
) -> list[dict[str, Any]]:
    """Return tokenized rows: one by its number in its split, from 1, or a seeded sample of every set. prepared: instead
    the documents in this row of the training set, counted from 0 as alarms do."""
    run = loaded.run
    tokenizer, _ = open_model_tokenizer(loaded)
    if prepared is not None:
        return _show_prepared_row(loaded, prepared, tokenizer, say)
    selections = [select_rows(rows, say) for rows in list_all_sets(run.data, loaded.where)]
    names = [selection.name for selection in selections]
    if source is not None and source not in names:
        raise UserError(f"there is no set {source!r}", "--source", f"it is one of {', '.join(names)}", "no-such-set")
    if source is not None:
        selections = [selection for selection in selections if selection.name == source]
    elif row is not None:
        selections = selections[:1]
    shown = []
    for selection in selections:
        format_ = choose_format(selection.data, selection.columns, tokenizer, selection.where)
        for number, columns in _pick_rows(selection, sample or 1, row, run.train.order_seed):
            place = partial(lambda parts, number, _: locate_row(parts, number), selection.train, number)
            documents = tokenize([columns], format_, tokenizer, run.data.length, place=place)
            spans = [*documents.spans(sides=True)] or [slice(0, 0)]
            for part, span in enumerate(spans, 1):
                texts = _describe_tokens(documents.ids[span], documents.supervised[span], tokenizer)
                summary = _summarize(documents, texts["tokens"])
                if format_.pairs:
                    summary = f"{SIDES[part - 1]}, {summary}"
                elif len(spans) > 1:
                    summary += f" (row {part} of the {len(spans)} that this chat became)"
                facts = {"source": selection.name, "row": number + 1, "format": format_.name, "description": summary}
                shown.append({**facts, **texts})
    return shown


def _show_prepared_row(loaded: Loaded, number: int, tokenizer: Any, say: Say) -> list[dict[str, Any]]:
    with TemporaryDirectory() as spare:
        data = prepare_data(loaded.run, tokenizer, spare=Path(spare), where=loaded.where, say=say)
        if loaded.run.data.streaming or not 0 <= number < len(data.train):
            hint = "prepared rows are counted from 0; those of a stream are not stored"
            raise UserError("no such row was prepared", f"--prepared-row {number}", hint, "no-such-row")
        shown = []
        for ids, supervised in iter_documents(data.train.slice(number, 1).replace_schema_metadata()):
            facts = {"source": "prepared rows", "row": number, "description": format_plural(len(ids), "token")}
            shown.append({**facts, **_describe_tokens(ids, supervised, tokenizer)})
    return shown


def _describe_tokens(ids: Any, supervised: Any, tokenizer: Any) -> dict[str, list[dict[str, Any]]]:
    """Return a row's tokens, and parts of its text: each special token, and each run of others that the loss is
    computed on or not."""
    flags = enumerate(zip(ids.tolist(), supervised.tolist(), strict=True))
    tokens = [{"id": id_, "text": tokenizer.decode([id_]), "loss": bool(at and flag)} for at, (id_, flag) in flags]
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    parts = []
    written = ""
    joined: list[int] = []
    marks = [(token["loss"], place if token["id"] in special else None) for place, token in enumerate(tokens)]
    for (trained, alone), run in itertools.groupby(zip(marks, tokens, strict=True), key=lambda each: each[0]):
        own = [token["id"] for _, token in run]
        joined += own
        text = tokenizer.decode(joined, skip_special_tokens=False)
        # The whole row decoded so far, because words lose the space before them if they are decoded alone.
        added = text.removeprefix(written) if text.startswith(written) else tokenizer.decode(own)
        parts.append({"text": added, "trained": trained, "special": alone is not None})
        written = text
    return {"parts": parts, "tokens": tokens}


def _pick_rows(selection: RowSet, sample: int, row: int | None, seed: int) -> list[tuple[int, dict[str, Any]]]:
    """Return rows of a set with their numbers: this one, or a seeded sample."""
    rows = enumerate(read_rows(selection.train))
    if row is None:
        rng = random.Random(seed)
        drawn = heapq.nsmallest(sample, ((rng.random(), number, columns) for number, columns in rows))
        return sorted((number, columns) for _, number, columns in drawn)
    picked = list(itertools.islice(rows, row - 1, row))
    if not picked:
        count = sum(1 for _ in read_rows(selection.train))
        problem = f"{selection.name} has {format_plural(count, 'row')}"
        raise UserError(problem, "--row", f"the last one is --row {count}", "no-such-row")
    return picked


def _summarize(document: Documents, tokens: Sequence[dict[str, Any]]) -> str:
    """Return how many tokens of a row are trained on, or why it is left out."""
    for reason in document.left_out:
        return reason
    if document.counts["unsupervised"]:
        return "left out (nothing supervised within max_length)"
    cut = f", {document.counts['tokens_cut']:,} more are cut off" if document.counts["truncated"] else ""
    return f"{format_plural(len(tokens), 'token')}, {sum(token['loss'] for token in tokens):,} trained on{cut}"


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
    ways = []
    for way, f in batching.get("ways", {}).items():
        mark = "→" if way == batching["configured"] else " "
        ways.append((f"{mark} {way}", f"{f['micro_batches']:,}", f"{f['useful_share']:.1%}"))
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
        for trained, parts in itertools.groupby(row["parts"], key=lambda part: part["trained"]):
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


def write_rows_page(path: Path, audit: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a page of the audit's figures and notes, and of rows, in the report's look; it fetches nothing."""
    from windlass.observe.report.page import render_template

    figures = [
        (name, [format(split[key], spec) if key in split else "" for split in audit["splits"].values()])
        for key, (name, spec) in FIGURES.items()
        if any(split.get(key) for split in audit["splits"].values())
    ]
    page = render_template(
        "rows.html.j2",
        scripts=("scheme.js",),
        styles=("page.css", "rows.css"),
        audit=audit,
        train=audit["splits"]["train"],
        figures=figures,
        held_out=explain_held_out(audit),
        rows=rows,
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    with require_writable(path, "name another file with --html"):
        write_atomic(path, page)
