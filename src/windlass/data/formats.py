"""Turn a row into text and mark what the loss is computed on: plain text, a template, prompt and completion, chats."""

from __future__ import annotations

import difflib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.data.chat import Span, chat_template
from windlass.data.readers import Row
from windlass.data.sources import Where
from windlass.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.runfile import Data


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of one row. `supervised` are the stretches of characters that the loss is computed on; None is all of it.

    `closed` text brings its own first and last tokens, as a chat template writes them.
    """

    text: str
    supervised: tuple[Span, ...] | None = None
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """How rows become text. `identity` is all that this depends on besides the row and the tokenizer."""

    name: str
    description: str
    identity: str
    render: Callable[[Row], Rendered | None]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What a format is made from: the data section, the columns there are, the tokenizer."""

    data: Data
    columns: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    where: Where

    def require(self, column: str, key: str) -> str:
        if column in self.columns:
            return column
        close = difflib.get_close_matches(column, self.columns, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "name one of these, or write data.prompt_template over them"
        has = ", ".join(map(repr, self.columns)) or "none"
        raise UserError(f"the data have no column {column!r}; they have {has}", self.where(f"data.{key}"), hint)

    def refuse_completion_only(self, what: str) -> None:
        if self.data.completion_only_loss:
            hint = "mark it with [[ ]] in data.prompt_template, or name data.prompt_field and data.completion_field"
            place = self.where("data.completion_only_loss")
            raise UserError(f"{what} has no part that is the completion", place, hint)


def choose_format(data: Data, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, where: Where = str) -> Format:
    """The format that the run file requests by a key, else the first one whose columns are there."""
    asked = [key for key in ("prompt_template", "messages_field", "prompt_field") if getattr(data, key)]
    if len(asked) > 1:
        one, two = asked[:2]
        raise UserError(f"data.{one} and data.{two} choose different formats", where(f"data.{two}"), "keep one")
    by_key = (f for f in FORMATS if any(key in data.model_fields_set and getattr(data, key) for key in f.keys))
    by_columns = (f for f in FORMATS if any(set(needed) <= set(columns) for needed in f.columns))
    chosen = next(by_key, None) or next(by_columns, FORMATS[-1])
    return chosen.make(Request(data, columns, tokenizer, where))


def as_text(value: Any, field: str) -> str:
    """A column's text; a number is written out, an absent value is empty, anything else is no text."""
    if value is None or isinstance(value, str | bool | int | float):
        return "" if value is None else str(value)
    hint = "name a column of text, or write data.prompt_template, which reaches inside: {answers[text][0]}"
    raise UserError(f"column {field!r} has a {type(value).__name__}, not text: {str(value)[:80]}", "data", hint)


def text_format(request: Request) -> Format:
    request.refuse_completion_only("plain text")
    field = request.require(request.data.text_field, "text_field")
    return Format(
        "text", f"text in {field!r}, loss on every token", field, lambda row: Rendered(as_text(row.get(field), field))
    )


def completion_format(request: Request) -> Format:
    """A prompt and the completion that the loss is computed on; either may be a list of messages."""
    data = request.data
    prompt = request.require(data.prompt_field or "prompt", "prompt_field")
    completion = request.require(data.completion_field or "completion", "completion_field")
    everything = data.completion_only_loss is False
    template = cache(lambda: chat_template(request.tokenizer))  # most tokenizers here need none

    def render(row: Row) -> Rendered | None:
        question, answer = row.get(prompt), row.get(completion)
        if isinstance(question, list) or isinstance(answer, list):
            before = question if isinstance(question, list) else [{"role": "user", "content": question or ""}]
            after = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer or ""}]
            text, spans = template().render([*before, *after], first=len(before))
            return Rendered(text, None if everything else spans, closed=True)
        head, tail = as_text(question, prompt), as_text(answer, completion)
        if not tail.strip():
            return None
        return Rendered(head + tail, None if everything else ((len(head), len(head) + len(tail)),))

    description = f"{prompt!r} then {completion!r}, loss on {'every token' if everything else repr(completion)}"
    return Format("prompt-completion", description, f"{prompt}:{completion}:{everything}", render)


def chat_format(request: Request) -> Format:
    field = request.data.messages_field or next((c for c in ("messages", "conversations") if c in request.columns), "")
    request.require(field, "messages_field")
    template, everything = chat_template(request.tokenizer), request.data.completion_only_loss is False

    def render(row: Row) -> Rendered | None:
        messages = row.get(field)
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except json.JSONDecodeError:
                hint = "name it in data.text_field, or convert it to [{role, content}, …]"
                place = request.where("data.messages_field")
                raise UserError(f"column {field!r} is text, not a list of messages", place, hint) from None
        if not messages:
            return None
        text, spans = template.render(messages, tools=row.get("tools"))
        return Rendered(text, None if everything else spans, closed=True)

    loss = "every token" if everything else "assistant turns"
    description = f"chats in {field!r} through {template.source}, loss on {loss}"
    return Format("chat", description, f"{field}:{everything}:{template.template}", render, template.notes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a template: text as it stands, or a column formatted; supervised when it is inside [[ ]]."""

    literal: str
    supervised: bool
    field: str | None = None
    conversion: str | None = None
    spec: str = ""

    @property
    def column(self) -> str:
        return re.split(r"[\[.]", self.field or "")[0]

    def render(self, row: Mapping[str, Any], place: str) -> str:
        if self.field is None or row.get(self.column) is None:
            return self.literal
        formatter = string.Formatter()
        try:
            value, _ = formatter.get_field(self.field, (), row)
            return "" if value is None else format(formatter.convert_field(value, self.conversion), self.spec)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            problem = f"{{{self.field}}} can't be written for a row: {error}"
            raise UserError(problem, place, "check what the column holds") from None


def parse_template(text: str, place: str) -> list[Piece]:
    """A template's parts: `{column}` as in a format string, `[[…]]` around what is trained on, `\\[[` for a bracket."""
    pieces, inside = [], False
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(f"not a template: {error}", place, "write {column}; a brace itself is {{ or }}") from None
    for literal, field, spec, conversion in parsed:
        for part in re.split(r"(\\\[\[|\\\]\]|\[\[|\]\])", literal):
            if part not in ("[[", "]]"):
                pieces += [Piece(part.removeprefix("\\") if part in ("\\[[", "\\]]") else part, inside)] if part else []
                continue
            if inside == (part == "[["):
                hint = r"[[ and ]] come in pairs; \[[ is the bracket itself"
                raise UserError(f"{part} without its other half", place, hint)
            inside = not inside
        if field is not None:
            pieces.append(Piece("", inside, field, conversion, spec or ""))
    if inside:
        raise UserError("[[ is never closed", place, r"put ]] where the completion ends; \[[ is the bracket itself")
    return pieces


def template_format(request: Request) -> Format:
    """`Question: {q}\\nAnswer: [[{a}]]`: loss on the part inside [[ ]], on all of it when nothing is marked."""
    place, text = request.where("data.prompt_template"), request.data.prompt_template or ""
    pieces = parse_template(text, place)
    columns = dict.fromkeys(piece.column for piece in pieces if piece.field is not None)
    if not columns:
        hint = f"write {{column}}; there are {', '.join(request.columns)}"
        raise UserError("the template names no column", place, hint)
    for column in columns:
        request.require(column, "prompt_template")
    marked = any(piece.supervised for piece in pieces)
    if not marked:
        request.refuse_completion_only("a template without [[ ]]")
    marked = marked and request.data.completion_only_loss is not False
    needed = [piece.field is not None and (piece.supervised or not marked) for piece in pieces]

    def render(row: Row) -> Rendered | None:
        parts = [piece.render(row, place) for piece in pieces]
        if any(needed) and not any(part.strip() for part, is_needed in zip(parts, needed, strict=True) if is_needed):
            return None  # nothing from the row is in what would be trained on
        spans, at = [], 0
        for piece, part in zip(pieces, parts, strict=True):
            if piece.supervised and part:
                spans.append((at, at + len(part)))
            at += len(part)
        return Rendered("".join(parts), tuple(spans) if marked else None)

    description = f"data.prompt_template, loss on {'the part in [[ ]]' if marked else 'every token'}"
    return Format("template", description, f"{marked}:{text}", render)


class FormatRow(NamedTuple):
    """Keys of `data` that request a format, sets of columns that identify it, and what makes it."""

    keys: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    make: Callable[[Request], Format]


# The first that a key requests is taken, else the first whose columns are there.
FORMATS = (
    FormatRow(("prompt_template",), (), template_format),
    FormatRow(("messages_field",), (("messages",), ("conversations",)), chat_format),
    FormatRow(("prompt_field", "completion_field"), (("prompt", "completion"),), completion_format),
    FormatRow(("text_field",), (("text",),), text_format),
)
