"""Compare the tokens of chats with those that mistral-common makes of the same messages: a server that uses it renders
no chat template."""

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windlass.data.formats import Format
from windlass.data.reading import locate_row, read_rows
from windlass.data.select import RowSet
from windlass.data.tokenize import encode_batch
from windlass.observe.format import format_plural

COMPARED = 20  # chats of each set


def find_mistral_file(folder: Path) -> Path | None:
    """Return what mistral-common would read of a model's folder, if it is installed."""
    versioned = sorted(folder.glob("tokenizer.model.v*"), reverse=True)  # others don't say their version
    files = [*folder.glob("tekken.json"), *versioned]
    return files[0] if files and find_spec("mistral_common") else None


def compare_with_mistral(file: Path | None, rows: RowSet, kind: Format, tokenizer: Any) -> tuple[str, str]:
    """Return a fact about a set's first chats and a warning, either empty."""
    if file is None or kind.chat is None:
        return "", ""
    try:
        encode = open_encoder(file)
    except Exception as error:  # whatever a damaged file or an absent library raises
        return f"mistral-common can't open {file.name}, so no tokens were compared: {_describe(error)}", ""
    same = 0
    refused = ""
    parts = rows.train or rows.validation
    for number, row in enumerate(itertools.islice(read_rows(parts), COMPARED)):
        rendered = kind.render(row)[: 1 if kind.pairs else None]  # the chosen answer
        chat = kind.chat(row) if rendered else {}
        messages = chat.get("messages", [])
        count = max((i for i, message in enumerate(messages, 1) if message["role"] == "assistant"), default=0)
        if not count or str(messages[count - 1]["content"] or "").strip() not in rendered[-1].text:
            continue  # not an answer, or one that is left out
        try:
            theirs = encode({**chat, "messages": messages[:count]})
        except Exception as error:  # its own and pydantic's
            refused = refused or f"; it refuses {locate_row(parts, number)}: {_describe(error)}"
            continue
        ours = [int(token) for token in encode_batch(rendered[-1:], tokenizer)[0][0]]
        ours = ours[: len(theirs)] if count < len(messages) else ours
        if ours != theirs:
            return "", f"{locate_row(parts, number)}: {describe_difference(ours, theirs, tokenizer)}"
        same += 1
    chats = format_plural(same, "chat")
    return f"{rows.name}: {chats} compared, with the tokens that mistral-common makes of them{refused}", ""


@cache
def open_encoder(file: Path) -> Callable[[Mapping[str, Any]], list[int]]:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tokenizer = MistralTokenizer.from_file(str(file), mode=ValidationMode.finetuning)

    def encode(chat: Mapping[str, Any]) -> list[int]:
        request = ChatCompletionRequest(messages=chat["messages"], tools=chat["tools"] or None)
        return [int(token) for token in tokenizer.encode_chat_completion(request).tokens]

    return encode


def describe_difference(ours: list[int], theirs: list[int], tokenizer: Any) -> str:
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    at = next(place for place, (own, other) in pairs if own != other)
    names = [
        f"{tokenizer.decode([ids[at]])!r} ({ids[at]})" if at < len(ids) else "the end"  # ' a' and 'a' may read alike
        for ids in (ours, theirs)
    ]
    return (
        f"token {at} is {names[0]}, and {names[1]} where mistral-common writes the same messages, as vLLM with "
        "--tokenizer-mode mistral does: name a data.chat_template that writes what it does, or serve with "
        "--tokenizer-mode hf"
    )


def _describe(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
