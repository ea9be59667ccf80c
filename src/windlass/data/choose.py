"""Choose the format of a data set's rows: by name, by a key, or by their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from windlass.data.formats import FORMATS, TELLING, Format, FormatRequest, FormatSpec, guess_columns, list_usual
from windlass.data.preference import PAIR_FORMATS, require_pairs
from windlass.errors import UserError, Where
from windlass.runfile.reference import format_yaml
from windlass.runfile.rows import CHAT_KEYS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.runfile import Data

# Keys of `data` that change no row's tokens, and why: with any other key changed, nothing is taken from the cache.
CHANGES_NO_ROW = {
    "dataset_name_or_path": "the contents of the files are compared",
    "dataset_config_name": "it chooses files",
    "train_split": "the files and slices that it chooses are compared",
    "val_split": "the files and slices that it chooses are compared",
    "val_fraction": "whether and how much is held out is compared",
    "mix": "each of its sets is compared; shares are taken of the rows afterwards",
    "eval": "each of its sets is compared",
    "keep": "each of its sets is compared",
    "truncation": "it cuts pairs only, of which it is compared",
}


def choose_format(data: Data, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, where: Where = str) -> Format:
    """Return the format that the run file requests by name or by a key, else the first one whose columns exist."""
    asked = [key for key in ("prompt_template", "messages_field", "prompt_field") if getattr(data, key)]
    if len(asked) > 1:
        one, two = asked[:2]
        problem = f"data.{one} and data.{two} choose different formats"
        raise UserError(problem, where(f"data.{two}"), "keep one", "two-formats")

    def there(needed: Sequence[str]) -> bool:
        return all(name in data.columns or name in columns for name in needed)

    formats: Sequence[FormatSpec] = PAIR_FORMATS if data.pairs else FORMATS
    named = [f for f in formats if f.name == data.format]
    if data.format is not None and not named:
        hint = f"it is one of {', '.join(dict.fromkeys(f.name for f in formats))}, or set another train.objective"
        problem = f"{data.format} rows are {'no pairs' if data.pairs else 'pairs, and train.objective is sft'}"
        raise UserError(problem, where("data.format"), hint, "wrong-objective")
    by_name = (f for f in named if there(f.columns))
    by_key = (f for f in formats if any(getattr(data, key) for key in f.keys))
    by_columns = [f for f in formats if f.columns and there(f.columns)]
    by_mapping = (f for f in by_columns if {*data.columns} <= {*f.columns, *f.more})
    wanted = next(by_name, named[0] if named else None) or next(by_key, None)
    wanted = wanted or next(by_mapping, by_columns[0] if by_columns else None)
    if data.pairs:
        require_pairs(data, wanted, columns, where)
    elif wanted is None and {"chosen", "rejected"} <= {*columns}:
        hint = "set train.objective: dpo to compare them; to train on the chosen ones alone, write "
        hint += f"data.columns: {format_yaml(guess_columns(columns) or {'messages': 'chosen'})}"
        problem = "the rows are pairs of a chosen and a rejected answer, and train.objective is sft"
        raise UserError(problem, where("data.dataset_name_or_path"), hint, "wrong-objective")
    chosen = wanted or formats[-1]
    if asked and asked[0] not in chosen.keys:
        problem = f"data.{asked[0]} is not of the format {chosen.name}"
        raise UserError(problem, where(f"data.{asked[0]}"), "remove one of them", "not-in-format")
    odd = [name for name in data.columns if name not in (*chosen.columns, *chosen.more)]
    if odd:
        problem = f"the format {chosen.name} has no {odd[0]!r}"
        hint = f"it has {', '.join((*chosen.columns, *chosen.more))}; data.format chooses another"
        usual = guess_columns(columns, list_usual(tokenizer)) if data.format is None else {}
        if usual:
            hint = f"name the format's column, then yours: data.columns: {format_yaml(usual)}"
        raise UserError(problem, where(f"data.columns.{odd[0]}"), hint, "not-in-format")
    for key in sorted(CHAT_KEYS.intersection(data.own_changes)):
        if chosen.name in ("template", "input_ids", "text"):
            problem = f"no effect on {chosen.name} rows: no chat template writes them"
            raise UserError(problem, where(f"data.{key}"), "remove it, or set data.format", "no-effect")
    others = {f.name: f.columns for f in FORMATS if f.columns and f is not chosen and data.format is None}
    made = chosen.make(FormatRequest(data, columns, tokenizer, where))
    if not data.pairs and data.format is None and {"chosen", "rejected"} <= {*columns} - {*made.needs}:
        note = "the columns chosen and rejected are not trained on: train.objective: dpo compares them"
        made = replace(made, notes=(*made.notes, note))
    read = {*made.needs, *chosen.columns, *chosen.more, *data.columns.values()}
    unread = [name for name in columns if name in TELLING and name not in read]
    if unread and data.format is None and chosen.name != "template":
        note = f"the column {unread[0]} is not read: data.columns: {{instruction: …, output: …, system: {unread[0]}}}"
        made = replace(
            made, notes=(*made.notes, f"{note} writes it into each chat, or set data.format to leave it out")
        )
    keys = {key: value for key, value in data.model_dump(mode="json").items() if key not in CHANGES_NO_ROW}
    identity = {**keys, "format": made.name, "template": made.template.template if made.template else None}
    identity |= {"pairs": data.truncation} if data.pairs else {}
    identity |= {"bare": True} if data.format in ("prompt-completion", "preference") else {}  # and no remark of it
    identity |= {"ends": sorted(made.template.ends)} if made.template else {}
    return replace(made, others=others, identity=identity)
