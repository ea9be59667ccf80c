"""The user's first rows: read, rendered and tokenised as training does it, judged, and written out for the rehearsal.

Imports numpy and tokenizers.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.data import audit as auditing
from windlass.data.formats import choose_format, parse_template
from windlass.data.prepare import check_selection, select_rows
from windlass.data.readers import read_rows
from windlass.data.sources import resolve
from windlass.data.tokenize import Documents, tokenize
from windlass.errors import UserError, raise_all
from windlass.model import Base
from windlass.rehearse.ends import ends
from windlass.runfile import Data, Loaded

MOST_ROWS, MOST_BYTES = 2000, 8 << 20  # that are looked at
LEAST_ROWS, VALIDATION_ROWS = 32, 16
LENGTH, LENGTH_OF_MANY, MANY = 512, 256, 32768  # tokens; shorter where each has the logits of a large vocabulary
LEAST_LEARNT = 16  # rows that must have something to learn within the rehearsal's length

Row = dict[str, Any]


def take(
    loaded: Loaded, checkpoint: Base, tokenizer: Any, folder: Path, sequences: int, *, own: bool
) -> dict[str, Any]:
    """Judge the first rows of the user's data and write what the rehearsal trains on. `own`: the model's tokenizer."""
    run, where = loaded.run, loaded.where
    data, stand_ins = run.data, []
    if reason := unreachable(data, where):
        columns = columns_of(data)
        train, validation = [list(made_up(columns, count)) for count in (600, 60)]
        names: tuple[str, ...] = tuple(columns)
        stand_ins.append(f"data: {reason}; {len(train)} rows with the columns {', '.join(names)} stand in")
    else:
        chosen = select_rows(data, where, lambda _: None)
        names = chosen.columns
        train = list(first(read_rows(chosen.source, chosen.train)))
        validation = list(first(read_rows(chosen.source, chosen.validation))) if chosen.validation else []
        raise_all(check_selection(run, chosen, where))
        if chosen.validation and not validation:
            raise UserError(f"{data.val_split} has no rows", where("data.val_split"), "name a split that has some")
    shape = choose_format(data, names, tokenizer, where)
    tokens = {"train": tokenize(train, shape, tokenizer, data.max_length)}
    if validation:
        tokens["validation"] = tokenize(validation, shape, tokenizer, data.max_length)
    audit = {"splits": {name: auditing.audit_split(part, tokenizer.eos_token_id) for name, part in tokens.items()}}
    vocabulary = checkpoint.dims["vocab"] if own else None
    least = run.watch.min_supervised_fraction
    raise_all(auditing.find_problems(audit, vocabulary=vocabulary, least_fraction=least, where=where))
    end = ends(tokens["train"], tokenizer, checkpoint if own else None, data.max_length, shape.name, where)
    length = fitting(tokens["train"], data.max_length, LENGTH_OF_MANY if (vocabulary or 0) > MANY else LENGTH)
    written = write(folder, train, validation, tokens, sequences, length if data.packing else 0)
    figures = audit["splits"]["train"]
    return {
        **written,
        "length": length,
        "shape": shape.description,
        "columns": list(names),
        "rows_seen": len(train),
        "supervised_share": figures["supervised_fraction"],
        "truncated": figures["truncated"],
        "end": end,
        "stand_ins": stand_ins,
    }


def first(found: Iterator[Row]) -> Iterator[Row]:
    """So many rows, and not more than so many bytes of them."""
    size = 0
    for row in itertools.islice(found, MOST_ROWS):
        yield row
        size += len(str(row))
        if size > MOST_BYTES:
            return


def unreachable(data: Data, where: Any) -> str:
    """Why the rows can't be read on this machine; empty where they can. A path that should be here is an error."""
    name = data.dataset_name_or_path
    try:
        source = resolve(data, where)
    except UserError:
        top = Path(name).expanduser()
        if top.is_absolute() and not top.parent.is_dir():  # the volume is not mounted here
            return f"{name} is not on this machine"
        raise
    if source.format != "hub":
        return ""
    from windlass.data.hub import fetch_source

    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        fetch_source(data, where, lambda _: None)
    except UserError:
        return f"{name} has not been fetched from the hub (windlass fetch RUN brings it)"
    finally:
        os.environ.pop("HF_HUB_OFFLINE") if before is None else os.environ.update(HF_HUB_OFFLINE=before)
    return ""


def columns_of(data: Data) -> dict[str, Any]:
    """The columns that the data section speaks of, each with a value's form; `{}` stands for the text."""
    if data.prompt_template:
        columns: dict[str, Any] = {}
        for piece in parse_template(data.prompt_template, "data.prompt_template"):
            if piece.field is not None:
                name, form = form_of(piece.field)
                columns[name] = form
        return columns
    asked = data.model_fields_set
    if "messages_field" in asked and data.messages_field:
        turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "{}"}]
        return {data.messages_field: turns}
    if data.prompt_field and data.completion_field:
        return {data.prompt_field: "What is it? ", data.completion_field: "{}"}
    return {data.text_field: "{}"}


def form_of(field: str) -> tuple[str, Any]:
    """`answers[text][0]` -> answers, {"text": ["{}"]}"""
    name, *steps = re.findall(r"[^\[\].]+", field)
    form: Any = "{}"
    for step in reversed(steps):
        form = [form] * (int(step) + 1) if step.isdecimal() else {step: form}
    return name, form


def made_up(columns: dict[str, Any], count: int) -> Iterator[Row]:
    """Rows of the text that every Python carries, in these forms."""
    from pydoc_data.topics import topics

    lines = [line.strip() for name in sorted(topics) for line in topics[name].split("\n\n") if len(line) > 40]
    for i in range(count):
        text = " ".join(lines[i % len(lines)].split())
        yield {name: filled(form, text) for name, form in columns.items()}


def filled(form: Any, text: str) -> Any:
    if isinstance(form, dict):
        return {key: filled(value, text) for key, value in form.items()}
    if isinstance(form, list):
        return [filled(value, text) for value in form]
    return text if form == "{}" else form


def fitting(documents: Documents, longest: int, wanted: int) -> int:
    """The rehearsal's length: short, and long enough that enough rows have something to learn within it."""
    firsts = [
        next((place for place in range(1, size) if documents.supervised[start + place]), size)
        for start, size in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)
    ]
    needed = min(LEAST_LEARNT, len(firsts))
    length = min(wanted, longest)
    while length < longest and sum(place < length for place in firsts) < needed:
        length = min(2 * length, longest)
    return length


def write(
    folder: Path, train: list[Row], validation: list[Row], tokens: dict[str, Documents], sequences: int, packed_to: int
) -> dict[str, Any]:
    """As many rows as make an epoch of `sequences`; packed, several rows are one sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = tokens["train"]
    per_row = len(documents.lengths) / len(train)  # rows that are empty make none
    wanted = sequences / per_row
    if packed_to:
        wanted *= packed_to / float(documents.lengths.clip(max=packed_to).mean())
    counts = {"train": max(LEAST_ROWS, math.ceil(wanted))}
    if validation:
        counts["validation"] = math.ceil(VALIDATION_ROWS * len(validation) / len(tokens["validation"].lengths))
    for name, rows in (("train", train), ("validation", validation)):
        if rows:
            text = "".join(json.dumps(row, default=str) + "\n" for row in rows[: counts[name]])
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {"rows": min(len(train), counts["train"]), "validation": bool(validation)}
