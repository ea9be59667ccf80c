"""Turn a row into text and mark what the loss is computed on: plain text, templates, completions, chats, tokens."""

from __future__ import annotations

import difflib
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windlass.data.answers import RenderedRow
from windlass.data.chat import ChatTemplate, choose_template
from windlass.data.messages import FLAGS
from windlass.data.reading import JSON_KINDS, Row
from windlass.errors import UserError, Where
from windlass.observe.steps import IGNORED
from windlass.runfile.reference import format_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.runfile import Data


@dataclass(frozen=True, slots=True)
class Format:
    """How rows become text."""

    name: str
    description: str
    render: Callable[[Row], Sequence[RenderedRow]]
    """Returns no row for one without text, and several for a chat whose answers need rows of their own."""
    notes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Columns that a row must have; null or empty text leaves the row out."""
    every: bool = True
    """All of them, or one at least."""
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Columns of the other formats, by name, if the format was inferred."""
    template: ChatTemplate | None = None
    """What writes its chats."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Everything that its text depends on besides the row and the tokenizer."""
    chat: Callable[[Row], dict[str, Any]] | None = None
    """Returns the messages and tools of a row that is a chat, as a request to a server has them; of a pair, the chosen
    one's."""
    pairs: bool = False
    """Whether a row is a pair: the text with the chosen answer, then the one with the rejected answer."""
    cuts_prompts: bool = False
    """Whether the prompt of a pair that is too long is cut."""

    def require_columns(self, row: Row) -> None:
        """Refuse a row of another format: dropping it would go unnoticed."""
        absent = [name for name in self.needs if name not in row]
        lacks = absent[0] if absent and (self.every or len(absent) == len(self.needs)) else None
        if lacks is None and any(row.get(name) is not None for name in self.needs):
            return
        filled = [name for name, value in row.items() if value is not None]
        other = next((name for name, columns in self.others.items() if {*columns} <= {*filled}), None)
        if lacks is not None or other:
            problem = f"a row has no {lacks or self.needs[0]!r}; it has {', '.join(map(repr, filled)) or 'nothing'}"
            hint = "fix or remove such rows; put rows of another format into a separate file, listed in data.mix"
            if lacks is None:
                hint += f"; to leave them out, set data.format: {self.name}"
            raise UserError(f"{problem} (format {other})" if other else problem, "data", hint, "incomplete-row")


class NumberedRowError(Exception):
    """An error in a row, whose number is counted from 0."""

    def __init__(self, number: int, error: UserError) -> None:
        super().__init__(number, error)
        self.number = number
        self.error = error


def render_rows(rows: Iterable[Row], kind: Format) -> tuple[list[list[RenderedRow]], dict[str, list[int]]]:
    """Return the texts of each row, none if it is left out, and the numbers of those, by the reason. Raises the error
    of the first row that has one."""
    rendered: list[list[RenderedRow]] = []
    left_out: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        try:
            kind.require_columns(row)
            rendered.append([one for one in kind.render(row) if one.ids is not None or one.text.strip()])
            for one in rendered[-1]:
                require_utf8(one.text)
        except UserError as error:
            raise NumberedRowError(number, error) from None
        if not rendered[-1]:
            null = next((name for name in kind.needs if row.get(name) is None), None)
            left_out.setdefault(f"{null!r} is null" if null else "empty", []).append(number)
    return rendered, left_out


def require_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        piece = text[max(0, error.start - 20) :][:40]
        problem = f"a row contains an unpaired surrogate, which is not text: {piece!r}"
        raise UserError(problem, "data", "rewrite it as valid UTF-8", "not-utf8") from None


@dataclass(frozen=True, slots=True)
class FormatRequest:
    """The inputs from which a format is made: data section, existing columns, tokenizer."""

    data: Data
    columns: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    where: Where

    def require(self, column: str, key: str) -> str:
        if column in self.columns:
            return column
        close = difflib.get_close_matches(column, self.columns, n=1)
        usual = guess_columns(self.columns, list_usual(self.tokenizer)) if key == "text_field" else {}
        hint = f"name one of these: data.columns: {{{key.rpartition('.')[2].removesuffix('_field')}: …}}"
        if usual:
            hint = f"if that is what they hold, write data.columns: {format_yaml(usual)}"
        elif close:
            hint = f"did you mean {close[0]!r}?"
        elif key == "text_field" and len(self.columns) == 2:
            names = dict(zip(("instruction", "output"), self.columns, strict=True))
            hint = f"if the second answers the first, write data.columns: {format_yaml(names)}; for text alone, name "
            hint += "its column: data.columns: {text: …}"
        has = ", ".join(map(repr, self.columns)) or "none"
        problem = f"the data have no column {column!r}; they have {has}"
        raise UserError(problem, self.where(f"data.{key}"), hint, "no-such-column")

    def column(self, name: str, key: str = "") -> str:
        """Return the data's name for a column of the format, set by data.columns or by a key of its own."""
        if name in self.data.columns:
            return self.require(self.data.columns[name], f"columns.{name}")
        return self.require((key and getattr(self.data, key)) or name, key or f"columns.{name}")

    def optional(self, name: str) -> str | None:
        """Do the same for a column that may be missing."""
        return self.column(name) if name in self.data.columns or name in self.columns else None

    def refuse_completion_only(self, what: str) -> None:
        if self.data.completion_only_loss:
            hint = "mark it with [[ ]] in data.prompt_template, or name data.prompt_field and data.completion_field"
            place = self.where("data.completion_only_loss")
            raise UserError(f"{what} has no completion part", place, hint, "no-completion")

    def chat_template(self, fallback: str = "mistral") -> ChatTemplate:
        return choose_template(self.tokenizer, self.data, self.where, fallback=fallback)


TELLING = ("system", "system_prompt", "system_message")  # columns that are part of a prompt
PROMPTS = ("prompt", "question", "query", "problem", "input", "source", "user", "human")
ANSWERS = ("output", "completion", "response", "answer", "solution", "target", "chosen", "assistant", "bot")
OPTIONAL = {"input", "system"}
# Columns of formats and their names in data sets; the first row whose columns all exist is used.
USUAL: tuple[dict[str, tuple[str, ...]], ...] = (
    {"messages": ("conversation", "chat", "dialog", "dialogue", "turns")},
    {"instruction": ("instruction",), "output": ANSWERS, "input": ("context",), "system": TELLING},
    {"prompt": PROMPTS, "completion": ANSWERS},
    {"text": ("content", "body", "document", "article", "story", "code")},
)
# And with a chat template, through which prompts and answers are then written.
USUAL_CHATS = (USUAL[0], {**USUAL[1], "instruction": ("instruction", *PROMPTS)}, *USUAL[2:])


def list_usual(tokenizer: Any) -> tuple[dict[str, tuple[str, ...]], ...]:
    return USUAL_CHATS if getattr(tokenizer, "chat_template", None) else USUAL


def guess_columns(columns: Sequence[str], usual: Sequence[Mapping[str, Sequence[str]]] = USUAL) -> dict[str, str]:
    """Return `data.columns` for data with usual names; empty if there is no match."""
    there = {column.lower(): column for column in columns}
    for names in usual:
        found = {name: there[one] for name, known in names.items() if (one := next(filter(there.get, known), None))}
        if names.keys() - found.keys() <= OPTIONAL:
            return {name: column for name, column in found.items() if name != column}
    return {}


def as_text(value: Any, column: str) -> str:
    """Return a column's text; empty if it is absent, an error if it is not text."""
    if value is None or isinstance(value, str):
        return value or ""
    hint = "name a column of text, or write data.prompt_template, which writes numbers and reaches inside: "
    hint += "{answers[text][0]}"
    problem = f"column {column!r} has {describe_type(value)}, not text: {str(value)[:80]}"
    raise UserError(problem, "data", hint, "column-not-text")


def describe_type(value: Any) -> str:
    return JSON_KINDS.get(type(value), f"a {type(value).__name__}")


def text_format(request: FormatRequest) -> Format:
    request.refuse_completion_only("plain text")
    name = request.column("text", "text_field")
    description = f"text in {name!r}, loss on every token"
    return Format(
        "text", description, lambda row: [RenderedRow(as_text(row[name], name), everything=True)], needs=(name,)
    )


def completion_format(request: FormatRequest) -> Format:
    """A prompt and a completion, on which the loss is computed; either may be a list of messages."""
    data = request.data
    tools = request.optional("tools")
    prompt = request.column("prompt", "prompt_field")
    completion = request.column("completion", "completion_field")
    everything = data.completion_only_loss is False
    template = cache(request.chat_template)  # most tokenizers here need none
    as_chats = f"data.columns: {{instruction: {prompt}, output: {completion}}}"
    bare = {"bare": as_chats} if getattr(request.tokenizer, "chat_template", None) and data.format is None else {}

    def render(row: Row) -> Sequence[RenderedRow]:
        question = row[prompt]
        answer = row[completion]
        if not answer:
            return []
        if isinstance(question, list) or isinstance(answer, list):
            before = question if isinstance(question, list) else [{"role": "user", "content": question or ""}]
            after = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
            return render_chat(template(), [*before, *after], row.get(tools or ""), everything, first=len(before))
        head = as_text(question, prompt)
        tail = as_text(answer, completion)
        if not tail.strip():
            return []
        answer_span = (len(head), len(head) + len(tail))
        return [RenderedRow(head + tail, {0: answer_span}, remarks=bare, everything=everything)]

    description = f"{prompt!r} then {completion!r}, loss on {'every token' if everything else repr(completion)}"
    used = None
    if data.chat_template:
        used = template()
    elif request.tokenizer is not None and not getattr(request.tokenizer, "chat_template", None):
        with suppress(UserError):  # plain text needs none, and a row of messages says what is missing
            used = template()
    return Format("prompt-completion", description, render, needs=(prompt, completion), template=used)


def chat_format(request: FormatRequest, column: str = "messages") -> Format:
    """A list of messages and the tools they may call; a system prompt may have its own column."""
    name = request.column(column, "messages_field")
    tools = request.optional("tools")
    system = request.optional("system")

    def messages_of(row: Row) -> list[Any]:
        messages = row[name]
        if isinstance(messages, str):
            try:
                messages = json.loads(messages) if messages.strip() else []
            except json.JSONDecodeError:
                hint = "name it in data.text_field, or convert it to [{role, content}, …]"
                problem = f"column {name!r} is text, not a list of messages"
                raise UserError(problem, request.where("data.messages_field"), hint, "not-messages") from None
        if messages and not isinstance(messages, list):
            problem = f"column {name!r} has {describe_type(messages)}, not a list of messages: {str(messages)[:80]}"
            raise UserError(problem, "data", "write [{role, content}, …]", "not-messages")
        first = [{"role": "system", "content": row[system]}] if system and row.get(system) else []
        return [*first, *messages] if messages else []

    return make_chat_format(request, f"chats in {name!r}", messages_of, tools, column, (name,))


def alpaca_reader(request: FormatRequest) -> Callable[[Row], list[Any]]:
    """Return what reads the turns before the answer: a system prompt, earlier turns, the instruction with its input."""
    instruction = request.column("instruction")
    more, system, history = (request.optional(name) for name in ("input", "system", "history"))

    def read(row: Row) -> list[Any]:
        asked, given = (as_text(row.get(column or ""), column or "") for column in (instruction, more))
        first = [{"role": "system", "content": row[system]}] if system and row.get(system) else []
        earlier = row.get(history or "") or ()
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in earlier):
            hint = "write [[question, answer], …]"
            raise UserError(f"column {history!r} has no pairs: {str(earlier)[:80]}", "data", hint, "not-pairs")
        turns = [
            {"role": role, "content": text}
            for pair in earlier
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        parts = {"instruction": asked, "input": given} if given.strip() else {}
        user = {"role": "user", "content": "\n\n".join(filter(str.strip, (asked, given))), **parts}
        return [*first, *turns, user]

    return read


def alpaca_format(request: FormatRequest) -> Format:
    """An instruction, an optional input, and the output; earlier turns and a system prompt may precede it."""
    instruction, output = map(request.column, ("instruction", "output"))
    more = request.optional("input")
    read = alpaca_reader(request)

    def messages_of(row: Row) -> list[Any]:
        answer = as_text(row.get(output), output)
        return [*read(row), {"role": "assistant", "content": answer}] if answer.strip() else []

    what = f"{instruction!r}{f' with {more!r}' if more else ''} then {output!r}"
    return make_chat_format(request, what, messages_of, None, "alpaca", (instruction, output))


LOSS = {
    **dict.fromkeys(("auto", "all"), "assistant turns"),
    "last": "the last assistant turn",
    "each": "assistant turns, a row for each",
}


def render_chat(
    template: ChatTemplate, messages: Sequence[Any], tools: Any, everything: bool, first: int = 0
) -> list[RenderedRow]:
    """Return the rows of a chat; with loss on everything, the one that has all of it."""
    if everything:
        return [RenderedRow(template.render_whole(messages, tools), everything=True, closed=True)]
    rows = template.render(messages, first=first, tools=tools)
    whole = "".join(row.text for row in rows) if len(rows) > 1 else ""
    return [row._replace(closed=True, whole=whole, part=part) for part, row in enumerate(rows)]


def make_chat_format(
    request: FormatRequest,
    what: str,
    messages_of: Callable[[Row], list[Any]],
    tools: str | None,
    name: str,
    needs: tuple[str, ...],
) -> Format:
    """Rows that are chats or are converted to chats."""
    template = request.chat_template("alpaca" if name == "alpaca" else "mistral")
    everything = request.data.completion_only_loss is False
    if everything and template.turns in ("last", "each"):
        problem = "the loss is computed on everything (data.completion_only_loss)"
        raise UserError(problem, request.where("data.turns"), "remove one of them", "no-effect")

    def render(row: Row) -> Sequence[RenderedRow]:
        messages = messages_of(row)
        return render_chat(template, messages, row.get(tools or ""), everything) if messages else []

    def chat(row: Row) -> dict[str, Any]:
        return template.write_request(messages_of(row), row.get(tools or ""))

    loss = "every token" if everything else LOSS[template.turns]
    kind = {"conversations": "sharegpt"}.get(name, name)
    description = f"{what} through {template.source}, loss on {loss}"
    return Format(kind, description, render, template.notes, needs, template=template, chat=chat)


def tokens_format(request: FormatRequest) -> Format:
    """Rows of tokens: `labels` or a mask say on which of them the loss is computed."""
    name = request.column("input_ids")
    labels = request.optional("labels")
    mask = next(filter(None, map(request.optional, ("completion_mask", "assistant_masks"))), None)
    attended = request.optional("attention_mask")
    everything = request.data.completion_only_loss is False

    def render(row: Row) -> Sequence[RenderedRow]:
        given = row[name] or []
        place = request.where("data.columns.input_ids")
        ids = np.array(given or [0])[: len(given)] if isinstance(given, list) else np.array(given)
        if ids.dtype.kind != "i" or ids.ndim != 1 or ids.min(initial=0) < 0:
            problem = f"column {name!r} is not a list of token ids: {str(given)[:80]}"
            raise UserError(problem, place, "check the column", "not-token-ids")
        marks, real = (row.get(name or "") or None for name in (labels or mask, attended))
        if given and marks is real is None:
            return [RenderedRow("", everything=True, closed=True, ids=ids)]
        if any(each is not None and len(each) != len(ids) for each in (marks, real)):
            lengths = [len(each or given) for each in (given, marks, real)]
            problem = "{} ids, {} labels, {} in the mask".format(*lengths)
            raise UserError(problem, place, "fix such rows", "unequal-lengths")
        kept = np.array(marks) != (IGNORED if labels else 0) if marks else np.ones(len(ids), np.bool_)
        if labels and marks and (kept & (np.array(marks) != ids)).any():
            hint = "write the same ids, and -100 where no loss is computed; windlass shifts them by one itself"
            raise UserError(f"{labels!r} has other ids than {name!r}", place, hint, "labels-differ")
        if real:
            there = np.array(real, np.bool_)
            ids = ids[there]
            kept = kept[there]
        if not len(ids):
            return []
        edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)).tolist()
        spans = dict(enumerate(zip(edges[::2], edges[1::2], strict=True)))
        return [RenderedRow("", spans, everything=everything or bool(kept.all()), closed=True, ids=ids)]

    loss = "every token" if everything or not (labels or mask) else f"what {labels or mask!r} marks"
    return Format("input_ids", f"tokens in {name!r}, loss on {loss}", render, needs=(name,))


@dataclass(frozen=True, slots=True)
class TemplatePiece:
    """Part of a template: literal text or a formatted column; supervised inside [[ ]]."""

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
            raise UserError(problem, place, "check what the column holds", "template-field") from None


def parse_template(text: str, place: str) -> list[TemplatePiece]:
    r"""Parse a template: `{column}` as in a format string, `[[…]]` around what is trained on, `\[[` for a bracket."""
    pieces = []
    inside = False
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        hint = "write {column}; a brace itself is {{ or }}"
        raise UserError(f"not a template: {error}", place, hint, "template-syntax") from None
    for literal, name, spec, conversion in parsed:
        for part in re.split(r"(\\\[\[|\\\]\]|\[\[|\]\])", literal):
            if part not in ("[[", "]]"):
                if part:
                    unescaped = part.removeprefix("\\") if part in ("\\[[", "\\]]") else part
                    pieces.append(TemplatePiece(unescaped, inside))
                continue
            if inside == (part == "[["):
                hint = r"[[ and ]] come in pairs; \[[ is the bracket itself"
                raise UserError(f"{part} without its other half", place, hint, "template-syntax")
            inside = not inside
        if name is not None:
            pieces.append(TemplatePiece("", inside, name, conversion, spec or ""))
    if inside:
        hint = r"put ]] where the completion ends; \[[ is the bracket itself"
        raise UserError("[[ is never closed", place, hint, "template-syntax")
    return pieces


def template_format(request: FormatRequest) -> Format:
    r"""`Question: {q}\nAnswer: [[{a}]]`: loss on the part inside [[ ]], or on everything if nothing is marked."""
    place = request.where("data.prompt_template")
    text = request.data.prompt_template or ""
    pieces = parse_template(text, place)
    columns = dict.fromkeys(piece.column for piece in pieces if piece.field is not None)
    if not columns:
        hint = f"write {{column}}; there are {', '.join(request.columns)}"
        raise UserError("the template names no column", place, hint, "no-column-named")
    for column in columns:
        request.require(column, "prompt_template")
    marked = any(piece.supervised for piece in pieces)
    if not marked:
        request.refuse_completion_only("a template without [[ ]]")
    marked = marked and request.data.completion_only_loss is not False
    needed = [piece.field is not None and (piece.supervised or not marked) for piece in pieces]
    trained_on = {piece.column: None for piece, is_needed in zip(pieces, needed, strict=True) if is_needed}

    def render(row: Row) -> Sequence[RenderedRow]:
        parts = [piece.render(row, place) for piece in pieces]
        if any(needed) and not any(part.strip() for part, is_needed in zip(parts, needed, strict=True) if is_needed):
            return []  # the supervised part contains nothing from the row
        spans = []
        at = 0
        for piece, part in zip(pieces, parts, strict=True):
            if piece.supervised and part:
                spans.append((at, at + len(part)))
            at += len(part)
        return [RenderedRow("".join(parts), dict(enumerate(spans)), everything=not marked)]

    description = f"data.prompt_template, loss on {'the part in [[ ]]' if marked else 'every token'}"
    return Format("template", description, render, needs=tuple(trained_on), every=False)


class FormatSpec(NamedTuple):
    """A format: keys of `data` that request it, columns that identify it, optional columns, and its constructor."""

    name: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    more: tuple[str, ...]
    make: Callable[[FormatRequest], Format]


BESIDE = ("tools", "system", *FLAGS)  # columns beside a chat, and keys of its messages
SPOKEN = ("tools", "role", "content")
PROMPT_FIELDS = ("prompt_field", "completion_field")
sharegpt_format = partial(chat_format, column="conversations")
TOKEN_MARKS = ("labels", "completion_mask", "assistant_masks", "attention_mask")
# The first one that a key requests is used, else the first whose columns exist.
FORMATS = (
    FormatSpec("template", ("prompt_template",), (), (), template_format),
    FormatSpec("messages", ("messages_field",), ("messages",), ("role", "content", *BESIDE), chat_format),
    FormatSpec("sharegpt", ("messages_field",), ("conversations",), ("from", "value", *BESIDE), sharegpt_format),
    FormatSpec("prompt-completion", PROMPT_FIELDS, ("prompt", "completion"), SPOKEN, completion_format),
    FormatSpec("alpaca", (), ("instruction", "output"), ("input", "system", "history"), alpaca_format),
    FormatSpec("input_ids", (), ("input_ids",), TOKEN_MARKS, tokens_format),
    FormatSpec("text", ("text_field",), ("text",), (), text_format),
)
