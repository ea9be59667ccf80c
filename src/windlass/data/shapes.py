"""A row into text, with the part that is learnt marked: plain text, a template, prompt and completion, or a chat."""

from __future__ import annotations

import difflib
import json
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.data.chat import Chat, conversation
from windlass.data.read import Row
from windlass.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.runfile import Data

Where = Callable[[str], str]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of one row. `learnt` are the stretches of characters that are supervised; None is all of it.

    `closed` text brings its own first and last tokens, as a chat template writes them.
    """

    text: str
    learnt: tuple[Span, ...] | None = None
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows become text. `identity` is all that a rendering depends on besides the row and the tokenizer."""

    name: str
    said: str
    columns: tuple[str, ...]
    identity: str
    render: Callable[[Row], Rendered | None]
    notes: tuple[str, ...] = ()


def recognise(data: Data, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, where: Where = str) -> Shape:
    """The shape of these columns: the one that the run file asks for by name, else the one they have."""
    asked = data.model_fields_set
    one_shape(data, where)
    if data.prompt_template:
        return template(data, columns, where)
    if "messages_field" in asked and data.messages_field:
        need(data.messages_field, columns, where("data.messages_field"))
        return chat(data.messages_field, data, tokenizer, where)
    if {"prompt_field", "completion_field"} & asked and (data.prompt_field or data.completion_field):
        return pair(data, columns, tokenizer, where)
    if "text_field" in asked and data.text_field:
        need(data.text_field, columns, where("data.text_field"))
        return plain(data.text_field, data, where)
    for name in (data.messages_field, "messages", "conversations"):
        if name and name in columns:
            return chat(name, data, tokenizer, where)
    if (data.prompt_field or "prompt") in columns and (data.completion_field or "completion") in columns:
        return pair(data, columns, tokenizer, where)
    field = data.text_field or "text"
    need(field, columns, where("data.text_field"))
    return plain(field, data, where)


def one_shape(data: Data, where: Where) -> None:
    """Two shapes asked for at once: one of them would be passed over in silence. `text_field` is every run file's."""
    asked = [key for key in ("prompt_template", "messages_field", "prompt_field") if getattr(data, key)]
    if len(asked) > 1:
        raise UserError(
            f"data.{asked[0]} and data.{asked[1]} are two answers to one question",
            where(f"data.{asked[1]}"),
            "keep one",
        )


def marked_part(data: Data, where: Where, shape: str) -> None:
    """`completion_only_loss: true` where nothing tells the completion."""
    if data.completion_only_loss:
        raise UserError(
            f"{shape} has no part that is the completion",
            where("data.completion_only_loss"),
            "mark it with [[ ]] in data.prompt_template, or name data.prompt_field and data.completion_field",
        )


def need(column: str, columns: Sequence[str], place: str) -> None:
    if column in columns:
        return
    close = difflib.get_close_matches(column, columns, n=1)
    raise UserError(
        f"the data have no column {column!r}; they have {', '.join(map(repr, columns)) or 'none'}",
        place,
        f"did you mean {close[0]!r}?" if close else "name one of these, or write data.prompt_template over them",
    )


def plain(field: str, data: Data, where: Where) -> Shape:
    marked_part(data, where, "plain text")

    def render(row: Row) -> Rendered | None:
        text = written(row.get(field), field)
        return Rendered(text) if text.strip() else None

    return Shape("text", f"text in {field!r}, every token learnt", (field,), f"text:{field}", render)


def written(value: Any, field: str) -> str:
    """A column's text; a number is written out, an absent value is empty, anything else is no text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return str(value)
    raise UserError(
        f"column {field!r} holds a {type(value).__name__}, not text: {str(value)[:80]}",
        "data",
        "name a column of text, or write data.prompt_template, which reaches inside: {answers[text][0]}",
    )


def pair(data: Data, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, where: Where) -> Shape:
    """A prompt, which is read, and a completion, which is learnt; either may be a list of messages."""
    prompt, completion = data.prompt_field or "prompt", data.completion_field or "completion"
    need(prompt, columns, where("data.prompt_field"))
    need(completion, columns, where("data.completion_field"))
    everything = data.completion_only_loss is False
    talk: list[Chat] = []  # made at the first row that is a conversation: most tokenizers here need no template

    def render(row: Row) -> Rendered | None:
        asked, answer = row.get(prompt), row.get(completion)
        if isinstance(asked, list) or isinstance(answer, list):
            if not talk:
                talk.append(conversation(tokenizer))
            before = asked if isinstance(asked, list) else [{"role": "user", "content": asked or ""}]
            after = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer or ""}]
            text, spans = talk[0].render([*before, *after], first=len(before))
            return Rendered(text, None if everything else spans, closed=True)
        head, tail = written(asked, prompt), written(answer, completion)
        if not tail.strip():
            return None
        return Rendered(head + tail, None if everything else ((len(head), len(head) + len(tail)),))

    learnt = "every token learnt" if everything else f"{completion!r} learnt"
    return Shape(
        "prompt-completion",
        f"{prompt!r} then {completion!r}, {learnt}",
        (prompt, completion),
        f"pair:{prompt}:{completion}:{everything}",
        render,
    )


def chat(field: str, data: Data, tokenizer: PreTrainedTokenizerBase, where: Where) -> Shape:
    talk = conversation(tokenizer)
    everything = data.completion_only_loss is False

    def render(row: Row) -> Rendered | None:
        messages = row.get(field)
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except json.JSONDecodeError:
                hint = "name it in data.text_field, or convert it to [{role, content}, …]"
                what = f"column {field!r} is text, not a list of messages"
                raise UserError(what, where("data.messages_field"), hint) from None
        if not messages:
            return None
        text, spans = talk.render(messages, tools=row.get("tools"))
        return Rendered(text, None if everything else spans, closed=True)

    return Shape(
        "chat",
        f"conversations in {field!r} through {talk.said}, {'every token' if everything else 'assistant turns'} learnt",
        (field,),
        f"chat:{field}:{everything}:{talk.template}",
        render,
        notes=talk.notes,
    )


MARKS = re.compile(r"\\\[\[|\\\]\]|\[\[|\]\]")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a template: text as it stands, or a column formatted; learnt when it is inside [[ ]]."""

    literal: str
    field: str | None
    conversion: str | None
    spec: str
    learnt: bool


def pieces_of(text: str, place: str) -> list[Piece]:
    """A template's parts. `{column}` as in a format string, `[[…]]` around what is learnt, `\\[[` for the signs."""
    pieces, learnt = [], False
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(f"not a template: {error}", place, "write {column}; a brace itself is {{ or }}") from None
    for literal, field, spec, conversion in parsed:
        at = 0
        for mark in MARKS.finditer(literal):
            pieces.append(Piece(literal[at : mark.start()], None, None, "", learnt))
            at = mark.end()
            if mark[0].startswith("\\"):
                pieces.append(Piece(mark[0][1:], None, None, "", learnt))
                continue
            if learnt == (mark[0] == "[["):
                raise UserError(f"{mark[0]} without its other half", place, r"[[ and ]] come in pairs; \[[ is the sign")
            learnt = not learnt
        pieces.append(Piece(literal[at:], None, None, "", learnt))
        if field is not None:
            pieces.append(Piece("", field, conversion, spec or "", learnt))
    if learnt:
        raise UserError("[[ is never closed", place, r"put ]] where the learnt part ends; \[[ is the sign itself")
    return [piece for piece in pieces if piece.literal or piece.field is not None]


def template(data: Data, columns: Sequence[str], where: Where) -> Shape:
    """`Question: {q}\\nAnswer: [[{a}]]`: text over columns, the part inside [[ ]] learnt; all of it when none is."""
    place, text = where("data.prompt_template"), data.prompt_template or ""
    pieces = pieces_of(text, place)
    fields = [column_of(piece.field) for piece in pieces if piece.field is not None]
    if not fields:
        raise UserError("the template names no column", place, f"write {{column}}; there are {', '.join(columns)}")
    for field in fields:
        need(field, columns, place)
    marked = any(piece.learnt for piece in pieces) and data.completion_only_loss is not False
    if not any(piece.learnt for piece in pieces):
        marked_part(data, where, "a template without [[ ]]")
    learnt_fields = {column_of(p.field) for p in pieces if p.field is not None and (p.learnt or not marked)}

    def render(row: Row) -> Rendered | None:
        out, spans, at = [], [], 0
        filled = False
        for piece in pieces:
            part = piece.literal if piece.field is None else value_of(piece, row, place)
            filled |= piece.field is not None and column_of(piece.field) in learnt_fields and bool(part.strip())
            out.append(part)
            if piece.learnt and part:
                spans.append((at, at + len(part)))
            at += len(part)
        if learnt_fields and not filled:
            return None  # nothing from the row is in what would be learnt
        return Rendered("".join(out), tuple(spans) if marked else None)

    said = "the part in [[ ]] learnt" if marked else "every token learnt"
    return Shape(
        "template", f"data.prompt_template, {said}", tuple(dict.fromkeys(fields)), f"template:{marked}:{text}", render
    )


def column_of(field: str | None) -> str:
    return re.split(r"[\[.]", field or "")[0]


def value_of(piece: Piece, row: Row, place: str) -> str:
    field = piece.field or ""
    try:
        value, _ = string.Formatter().get_field(field, (), row)
        if value is None:
            return ""
        value = string.Formatter().convert_field(value, piece.conversion)
        return format(value, piece.spec)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        if column_of(field) not in row:
            return ""
        raise UserError(
            f"{{{field}}} can't be written for a row: {error}", place, "check what the column holds"
        ) from None
