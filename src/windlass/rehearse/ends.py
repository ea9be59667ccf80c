"""Whether the model will learn to stop: rows must end with a token that is learnt, and at which generation stops."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.data.tokenize import Documents
from windlass.errors import UserError
from windlass.model import Base

TAIL = 3  # learnt tokens at a row's end among which the end token is: templates write a line break behind it
ENOUGH = 0.5  # share of the rows that were not cut


def ends(
    documents: Documents,
    tokenizer: Any,
    checkpoint: Base | None,
    longest: int,
    shape: str,
    where: Callable[[str], str],
) -> str:
    """What the rows end with; a UserError when the model would never stop. `checkpoint`: where its own ids count."""
    stops, said = stopping(tokenizer, checkpoint)
    tails = [
        documents.ids[start : start + size][documents.supervised[start : start + size]][-TAIL:].tolist()
        for start, size in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)
        if size < longest
    ]
    if not tails:
        return "every row is cut before its end"
    ended = sum(bool(stops & set(tail)) for tail in tails)
    if ended >= ENOUGH * len(tails):
        return f"{ended} of {len(tails)} rows end with a token that generation stops at"
    marks = Counter(token for tail in tails for token in tail[::-1] if special(tokenizer, token))
    place = where("data.messages_field") if shape == "chat" else where("model.model_name_or_path")
    if marks and marks.most_common(1)[0][1] >= ENOUGH * len(tails):
        token = marks.most_common(1)[0][0]
        raise UserError(
            f"rows end with {tokenizer.convert_ids_to_tokens(token)!r} ({token}), and generation stops at {said}: "
            "the model would never stop",
            place,
            f"put {token} into eos_token_id of the model's generation_config.json, or fix the tokenizer's eos_token",
        )
    closing = "the chat template writes no end of turn" if shape == "chat" else "the end of a row is not learnt"
    raise UserError(
        f"{closing}: {ended} of {len(tails)} rows end with a learnt token that generation stops at ({said})",
        place,
        "let the template close the assistant's turn with eos_token"
        if shape == "chat"
        else "let the learnt part [[ ]] reach the end of the template, and the tokenizer have an eos_token",
    )


def special(tokenizer: Any, token: int) -> bool:
    return token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder


def stopping(tokenizer: Any, checkpoint: Base | None) -> tuple[set[int], str]:
    """The ids that generation stops at, and who says so: generation_config.json, config.json, else the tokenizer."""
    named: list[tuple[str, Any]] = [("the tokenizer", tokenizer.eos_token_id)]
    if checkpoint is not None:
        named.insert(0, ("config.json", checkpoint.config.get("eos_token_id")))
        if checkpoint.path is not None:
            named.insert(0, ("generation_config.json", generation(checkpoint.path)))
    for who, value in named:
        ids = {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
        if ids:
            words = ", ".join(f"{tokenizer.convert_ids_to_tokens(one)!r} ({one})" for one in sorted(ids))
            return ids, f"{words}, as {who} says"
    return set(), "nothing: neither config.json nor the tokenizer names an end token"


def generation(folder: Path) -> Any:
    try:
        found = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        return None
    return found.get("eos_token_id") if isinstance(found, dict) else None
