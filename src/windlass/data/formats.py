"""Turn a row into text and mark what the loss is computed on: plain text, a template, prompt and completion, chats."""

from __future__ import annotations

import difflib
import json
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.data.chat import ChatTemplate, Span, chat_template
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
    columns: tuple[str, ...]
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

    @property
    def everything(self) -> bool:
        """Whether prompts are trained on as well."""
        return self.data.completion_only_loss is False

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
    request = Request(data, columns, tokenizer, where)
    for keys, _, make in FORMATS:
        if any(key in data.model_fields_set and getattr(data, key) for key in keys):
            return make(request)
    for _, needed, make in FORMATS:
        if any(set(names) <= set(columns) for names in needed):
            return make(request)
    return text_format(request)


def text_format(request: Request) -> Format:
    request.refuse_completion_only("plain text")
    field = request.require(request.data.text_field, "text_field")

    def render(row: Row) -> Rendered | None:
        text = as_text(row.get(field), field)
        return Rendered(text) if text.strip() else None

    return Format("text", f"text in {field!r}, loss on every token", (field,), f"text:{field}", render)


def as_text(value: Any, field: str) -> str:
    """A column's text; a number is written out, an absent value is empty, anything else is no text."""
    if value is None:
        return ""
    if isinstance(value, str | bool | int | float):
        return str(value)
    hint = "name a column of text, or write data.prompt_template, which reaches inside: {answers[text][0]}"
    raise UserError(f"column {field!r} has a {type(value).__name__}, not text: {str(value)[:80]}", "data", hint)


def completion_format(request: Request) -> Format:
    """A prompt and the completion that the loss is computed on; either may be a list of messages."""
    prompt = request.require(request.data.prompt_field or "prompt", "prompt_field")
    completion = request.require(request.data.completion_field or "completion", "completion_field")
    everything = request.everything
    template: list[ChatTemplate] = []  # made at the first row that is a chat: most tokenizers here need none

    def render(row: Row) -> Rendered | None:
        question, answer = row.get(prompt), row.get(completion)
        if isinstance(question, list) or isinstance(answer, list):
            if not template:
                template.append(chat_template(request.tokenizer))
            before = question if isinstance(question, list) else [{"role": "user", "content": question or ""}]
            after = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer or ""}]
            text, spans = template[0].render([*before, *after], first=len(before))
            return Rendered(text, None if everything else spans, closed=True)
        head, tail = as_text(question, prompt), as_text(answer, completion)
        if not tail.strip():
            return None
        return Rendered(head + tail, None if everything else ((len(head), len(head) + len(tail)),))

    description = f"{prompt!r} then {completion!r}, loss on {'every token' if everything else repr(completion)}"
    identity = f"pair:{prompt}:{completion}:{everything}"
    return Format("prompt-completion", description, (prompt, completion), identity, render)


def chat_format(request: Request) -> Format:
    field = request.data.messages_field or next((c for c in ("messages", "conversations") if c in request.columns), "")
    request.require(field, "messages_field")
    template, everything = chat_template(request.tokenizer), request.everything

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
    identity = f"chat:{field}:{everything}:{template.template}"
    return Format("chat", description, (field,), identity, render, notes=template.notes)


MARKS = re.compile(r"\\\[\[|\\\]\]|\[\[|\]\]")


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


def parse_template(text: str, place: str) -> list[Piece]:
    """A template's parts: `{column}` as in a format string, `[[…]]` around what is trained on, `\\[[` for a bracket."""
    pieces, inside = [], False
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(f"not a template: {error}", place, "write {column}; a brace itself is {{ or }}") from None
    for literal, field, spec, conversion in parsed:
        at = 0
        for mark in MARKS.finditer(literal):
            pieces.append(Piece(literal[at : mark.start()], inside))
            at = mark.end()
            if mark[0].startswith("\\"):
                pieces.append(Piece(mark[0][1:], inside))
                continue
            if inside == (mark[0] == "[["):
                hint = r"[[ and ]] come in pairs; \[[ is the bracket itself"
                raise UserError(f"{mark[0]} without its other half", place, hint)
            inside = not inside
        pieces.append(Piece(literal[at:], inside))
        if field is not None:
            pieces.append(Piece("", inside, field, conversion, spec or ""))
    if inside:
        raise UserError("[[ is never closed", place, r"put ]] where the completion ends; \[[ is the bracket itself")
    return [piece for piece in pieces if piece.literal or piece.field is not None]


def template_format(request: Request) -> Format:
    """`Question: {q}\\nAnswer: [[{a}]]`: loss on the part inside [[ ]], on all of it when nothing is marked."""
    place, text = request.where("data.prompt_template"), request.data.prompt_template or ""
    pieces = parse_template(text, place)
    columns = tuple(dict.fromkeys(piece.column for piece in pieces if piece.field is not None))
    if not columns:
        hint = f"write {{column}}; there are {', '.join(request.columns)}"
        raise UserError("the template names no column", place, hint)
    for column in columns:
        request.require(column, "prompt_template")
    if not any(piece.supervised for piece in pieces):
        request.refuse_completion_only("a template without [[ ]]")
    marked = any(piece.supervised for piece in pieces) and not request.everything
    needed = {piece.column for piece in pieces if piece.field is not None and (piece.supervised or not marked)}

    def render(row: Row) -> Rendered | None:
        parts, spans, at = [], [], 0
        filled = not needed
        for piece in pieces:
            part = piece.literal if piece.field is None else format_column(piece, row, place)
            filled |= piece.column in needed and bool(part.strip())
            parts.append(part)
            if piece.supervised and part:
                spans.append((at, at + len(part)))
            at += len(part)
        if not filled:
            return None  # nothing from the row is in what would be trained on
        return Rendered("".join(parts), tuple(spans) if marked else None)

    description = f"data.prompt_template, loss on {'the part in [[ ]]' if marked else 'every token'}"
    return Format("template", description, columns, f"template:{marked}:{text}", render)


def format_column(piece: Piece, row: Row, place: str) -> str:
    try:
        value, _ = string.Formatter().get_field(piece.field or "", (), row)
        if value is None:
            return ""
        return format(string.Formatter().convert_field(value, piece.conversion), piece.spec)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        if piece.column not in row:
            return ""
        hint = "check what the column holds"
        raise UserError(f"{{{piece.field}}} can't be written for a row: {error}", place, hint) from None


# Keys of `data` that request a format; else columns that identify it; and what makes it. The first that fits is taken.
FORMATS: tuple[tuple[tuple[str, ...], tuple[tuple[str, ...], ...], Callable[[Request], Format]], ...] = (
    (("prompt_template",), (), template_format),
    (("messages_field",), (("messages",), ("conversations",)), chat_format),
    (("prompt_field", "completion_field"), (("prompt", "completion"),), completion_format),
    (("text_field",), (("text",),), text_format),
)
