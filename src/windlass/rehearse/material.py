"""A process of the rehearsal: tokenize and judge the user's first rows, write them out, and write the tiny replica.

`python -m windlass.rehearse.material REQUEST.json` prints one line of JSON for each part when it is done.
"""

import itertools
import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from windlass import tiny
from windlass.data.audit import audit_split, find_ended_parts, find_problems
from windlass.data.choose import choose_format
from windlass.data.documents import Documents
from windlass.data.formats import parse_template
from windlass.data.reading import Row, locate_row, read_rows
from windlass.data.select import list_all_sets, list_training_sets, require_validation, select_rows
from windlass.data.sources import resolve_source
from windlass.data.tokenize import tokenize
from windlass.errors import UserError, Where, raise_all
from windlass.files import read_json
from windlass.model import Base, find_base, read_base
from windlass.plan.resolve import resolve_auto
from windlass.rehearse.scale import STAND_IN_VOCAB, scale_config
from windlass.runfile import Data, Loaded, read_run_file
from windlass.runfile.accelerate import load_accelerate

MOST_ROWS = 2000  # that are read
MOST_BYTES = 8 << 20  # of them
LEAST_ROWS = 32
VALIDATION_ROWS = 16
LENGTH = 512  # tokens of a row
MANY = 32768  # tokens of a vocabulary from which rows are shorter: each token has its logits
LENGTH_OF_MANY = 256
LEAST_SUPERVISED = 16  # number of rows that must have a supervised token within the rehearsal's length
ENOUGH = 0.5  # share of the uncut rows that must end so
COMPARED = ("layers", "hidden", "heads", "kv_heads", "experts", "top_k", "vocab")

TOKENIZER = (  # every file that may belong to a tokenizer, and those that say where answers end
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
)


def main(request: Path) -> None:
    asked = json.loads(request.read_text())
    accelerate = load_accelerate(asked["accelerate"] and Path(asked["accelerate"]))
    loaded = read_run_file(Path(asked["run"]), asked["overrides"], accelerate)
    folder = Path(asked["folder"])
    base = find_base(loaded.run.model.model_name_or_path, loaded.where("model.model_name_or_path"))
    tokenizer = copy_tokenizer(base, loaded, folder / "model")
    rows = take_rows(loaded, base, tokenizer, folder / "data", asked["sequences"])
    print(json.dumps({"part": "data", **rows}), flush=True)
    config = scale_config(base, experts_over=asked["experts_over"], vocab=base.dims["vocab"] if base.path else None)
    replica = read_base(tiny.write_like(base, config, folder / "model"))
    # Properties that code depends on are unchanged.
    kept = (replica.family.causal_lm, replica.wrapper, bool(replica.quantization))
    assert kept == (base.family.causal_lm, base.wrapper, bool(base.quantization)), kept
    facts = {
        "parameters": replica.total,
        "yours": base.total,
        "class": replica.family.causal_lm,
        "wrapper": replica.wrapper.architecture if replica.wrapper else None,
        "quantization": (replica.quantization or {}).get("quant_method"),
        "sizes": {name: [base.dims[name], replica.dims[name]] for name in COMPARED if name in replica.dims},
    }
    print(json.dumps({"part": "replica", **facts}), flush=True)


def copy_tokenizer(base: Base, loaded: Loaded, model: Path) -> Any:
    """Copy the model's tokenizer next to the replica; use a stand-in if there is none on this machine."""
    from transformers import AutoTokenizer

    model.mkdir(parents=True, exist_ok=True)
    if base.path is None:
        tiny.write_tokenizer(model, STAND_IN_VOCAB)
    for path in base.path.iterdir() if base.path else ():
        if path.name in TOKENIZER or path.suffix == ".py":
            shutil.copy(path, model)
    remote = loaded.run.model.trust_remote_code
    return AutoTokenizer.from_pretrained(model, trust_remote_code=remote, mistral_format=False)


def take_rows(loaded: Loaded, base: Base, tokenizer: Any, folder: Path, sequences: int) -> dict[str, Any]:
    """Judge the first rows of the user's data as training will, and write those that the rehearsal trains on."""
    run, _ = resolve_auto(loaded, base, loaded.run.readers)
    data = run.data
    where = loaded.where
    stand_ins = list[str]()
    vocab = base.dims["vocab"] if base.path else None
    trained = list_training_sets(data, where)
    taken: list[dict[str, list[Row]]] = []  # per set, by split
    places: list[dict[str, Any]] = []  # places of the rows, likewise
    columns = list[tuple[str, ...]]()
    sets = list_all_sets(data, where)
    selected = []
    for of in sets:
        places.append({})
        if reason := find_unreachable_reason(of.data, of.where):
            forms = list_requested_columns(of.data)
            taken.append({"train": make_up_rows(forms, 600), "validation": make_up_rows(forms, 60)})
            columns.append(tuple(forms))
            stand_ins.append(f"data: {reason}; 600 rows with the columns {', '.join(forms)} stand in")
            continue
        selection = select_rows(of, lambda _: None)
        rows = dict[str, list[Row]]()
        selected.append(selection)
        columns.append(selection.columns)
        for name, parts in (("train", selection.train), ("validation", selection.validation)):
            if parts:
                rows[name] = []
                size = 0
                places[-1][name] = {"place": partial(locate_row, parts)}
                for row in itertools.islice(read_rows(parts), MOST_ROWS):
                    rows[name].append(row)
                    if (size := size + len(str(row))) > MOST_BYTES:
                        break
        if rows.get("validation") == []:
            problem = f"{data.validation_split} has no rows"
            raise UserError(problem, where("data.val_split"), "name a split that has some", "no-rows")
        taken.append(rows)
    if len(selected) == len(sets):
        require_validation(run, selected, where)
    if base.path is None:
        what = f"{STAND_IN_VOCAB} tokens in Mistral's format stand in"
        stand_ins.append(f"tokenizer and chat template: the model's folder is not on this machine; {what}")
    kinds = [choose_format(of.data, each, tokenizer, of.where) for of, each in zip(sets, columns, strict=True)]
    made = [
        {name: tokenize(part, kind, tokenizer, data.length, **at.get(name, {})) for name, part in rows.items()}
        for rows, kind, at in zip(taken, kinds, places, strict=True)
    ]
    splits = {name: [each[name] for each in made[: len(trained)] if name in each] for name in ("train", "validation")}
    tokens = {name: Documents.concatenate(found) for name, found in splits.items() if found}
    audit = {"splits": {name: audit_split(part, tokenizer) for name, part in tokens.items()}}
    raise_all(find_problems(audit, vocabulary=vocab, least_fraction=run.watch.min_supervised_fraction, where=where))
    documents = tokens["train"]
    kind = kinds[0]
    end = check_ends(documents, tokenizer, base, data.length, where)
    # Short, and long enough that enough rows have a supervised token within it. The first token is never predicted.
    firsts = [int(documents.supervised[span][1:].argmax()) + 1 for span in documents.spans()]
    length = min(LENGTH_OF_MANY if (vocab or 0) > MANY else LENGTH, data.length)
    if data.pairs:  # those that exceed the length are refused
        length = int(documents.sides.max())
    while length < data.length and sum(place < length for place in firsts) < min(LEAST_SUPERVISED, len(firsts)):
        length = min(2 * length, data.length)

    # As many rows as an epoch of `sequences` needs: empty rows count as none, several packed ones as one sequence.
    counts = {}
    for name, part in tokens.items():
        per_document = part.counts["rows"] / max(1, len(part.lengths))
        wanted = (sequences if name == "train" else VALIDATION_ROWS) * per_document
        if data.packs and name == "train":
            wanted *= length / float(documents.lengths.clip(max=length).mean())
        counts[name] = max(LEAST_ROWS if name == "train" else 1, math.ceil(wanted))
    for number, rows in enumerate(taken):
        into = folder / (str(number) if len(sets) > 1 else "")
        into.mkdir(parents=True, exist_ok=True)
        for name in rows:
            lines = (json.dumps(row, default=str) + "\n" for row in rows[name][: counts.get(name)])
            (into / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        "rows": min(documents.counts["rows"], counts["train"]),
        "validation": "validation" in tokens,
        "length": length,
        "format": kind.description if len(sets) == 1 else ", ".join(each.name for each in kinds),
        "columns": list(dict.fromkeys(itertools.chain(*columns))),
        "rows_seen": documents.counts["rows"],
        "supervised_share": audit["splits"]["train"]["supervised_fraction"],
        "end": end,
        "stand_ins": stand_ins,
    }


def find_unreachable_reason(data: Data, where: Where) -> str:
    """Return why the rows can't be read on this machine, or nothing. A missing local path is an error."""
    name = data.dataset_name_or_path
    try:
        source = resolve_source(data, where)
    except UserError:
        top = Path(name).expanduser()
        if top.is_absolute() and not top.parent.is_dir():  # the volume is not mounted here
            return f"{name} is not on this machine"
        raise
    if source.format == "hub":
        from windlass.data.hub import fetch_source

        try:  # a rehearsal's processes have HF_HUB_OFFLINE: only what was fetched before is there
            fetch_source(data, where, lambda _: None)
        except UserError:
            return f"{name} has not been fetched from the hub (`windlass fetch RUN` brings it)"
    return ""


def list_requested_columns(data: Data) -> dict[str, Any]:
    """Return the columns that the data section names, each with the form of a value; `{}` stands for the text."""
    if data.prompt_template:
        forms: dict[str, Any] = {}
        for piece in parse_template(data.prompt_template, "data.prompt_template"):
            if piece.field is not None:  # `answers[text][0]` -> answers, {"text": ["{}"]}
                form: Any = "{}"
                for step in reversed(re.findall(r"[^\[\].]+", piece.field)[1:]):
                    form = [form] * (int(step) + 1) if step.isdecimal() else {step: form}
                forms[piece.column] = form
        return forms
    asked = "What is it? "
    answered = "{}"
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    chat = [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]
    answers = {"output": answered}
    if data.pairs:
        turns.pop()
        chat.pop()
        answers = {"chosen": answered, "rejected": "I don't know."}
    published: dict[str, dict[str, Any]] = {
        "messages": {data.messages_field or "messages": turns},
        "sharegpt": {data.messages_field or "conversations": chat},
        "alpaca": {"instruction": asked, **answers},
        "prompt-completion": {data.prompt_field or "prompt": asked, data.completion_field or "completion": answered},
        "input_ids": {"input_ids": [*range(5, 25)]},
        "text": {data.text_field or "text": answered},
        "preference": {"prompt": asked},
    }
    keys = {"messages": data.messages_field, "prompt-completion": data.prompt_field}
    usual = "preference" if data.pairs else "text"
    named: str = data.format or next((name for name, key in keys.items() if key), usual)
    columns = {**published[named], **(answers if data.pairs else {})}
    return {data.columns.get(name, name): form for name, form in columns.items()}


def make_up_rows(forms: dict[str, Any], count: int) -> list[Row]:
    """Return rows in these forms, made of the text that every Python has."""
    from pydoc_data.topics import topics

    def fill(form: Any, text: str) -> Any:
        if isinstance(form, dict):
            return {key: fill(value, text) for key, value in form.items()}
        if isinstance(form, list):
            return [fill(value, text) for value in form]
        return text if form == "{}" else form

    lines = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 40]
    return [fill(forms, text) for text in itertools.islice(itertools.cycle(lines), count)]


def check_ends(documents: Documents, tokenizer: Any, base: Base, longest: int, where: Where) -> str:
    """Check that the model will learn to stop: rows must end with a supervised token that generation stops at."""
    sources: list[tuple[str, Any]] = [("the tokenizer", tokenizer.eos_token_id)]
    if base.path is not None:
        generation = read_json(base.path / "generation_config.json").get("eos_token_id")
        sources = [("generation_config.json", generation), ("config.json", base.config.get("eos_token_id")), *sources]
    named = ((who, value if isinstance(value, list) else [value]) for who, value in sources)
    who, stops = next(((who, set(ids)) for who, ids in named if ids != [None]), ("everything", set[int]()))
    uncut = documents.sides.max(1) < longest
    if not uncut.any():
        return "every row is cut before its end"
    owners, ends = find_ended_parts(documents, stops, tokenizer)
    ended = len({*owners[ends].tolist()} & {*np.flatnonzero(uncut).tolist()})
    if ended >= ENOUGH * uncut.sum():
        return f"{ended} of {uncut.sum()} rows end with a token that generation stops at"
    tails = [documents.ids[span][documents.supervised[span]][-1] for span in documents.spans()]

    def spell(tokens: Iterable[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in tokens) or "nothing"

    usual = Counter(map(int, tails)).most_common(1)
    stopping = f"generation stops at {spell(sorted(stops))}, as {who} says"
    problem = f"the model would never stop: {ended} of {uncut.sum()} rows end with a supervised token at which "
    problem += f"{stopping}; most end with {spell(token for token, _ in usual)}"
    hint = "let the chat template close the assistant's turn with eos_token, or [[ ]] reach the end of the template; "
    hint += "or put the rows' last token into eos_token_id of the model's generation_config.json"
    raise UserError(problem, where("model.model_name_or_path"), hint, "never-stops")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except UserError as error:
        found = [asdict(problem) for problem in error.problems]
        print(json.dumps({"part": "problems", "problems": found}), flush=True)
        sys.exit(2)
