"""Pairs of a chosen and a rejected answer to one prompt, in the forms that data sets have, as two texts each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from windlass.data.answers import RenderedRow, common_prefix_length
from windlass.data.chat import ChatTemplate
from windlass.data.formats import Format, FormatRequest, FormatSpec, alpaca_reader, as_text, guess_columns, render_chat
from windlass.data.messages import FLAGS
from windlass.data.reading import Row
from windlass.errors import UserError, Where
from windlass.runfile import Data
from windlass.runfile.reference import format_yaml
from windlass.runfile.rows import CHAT_KEYS

SIDES: Final = ("chosen", "rejected")
USUAL_SIDES: Final = {
    "chosen": ("chosen", "chosen_response", "accepted", "preferred", "better"),
    "rejected": ("rejected", "rejected_response", "dispreferred", "worse"),
}
USUAL_PROMPTS: Final[tuple[dict[str, tuple[str, ...]], ...]] = (
    {"messages": ("conversation", "chat", "dialog", "dialogue", "turns"), **USUAL_SIDES},
    {"prompt": ("prompt", "question", "query", "problem", "input", "source"), **USUAL_SIDES},
)
# Begins an answer in texts that hold a whole conversation, as HH-RLHF's.
SPEAKER: Final = re.compile(r"\n\nAssistant:")

Messages = list[Any]
Pair = tuple[Any, list[Any]]  # the prompt and both answers: texts, or lists of messages


def require_pairs(data: Data, wanted: FormatSpec | None, columns: Sequence[str], where: Where) -> None:
    """Refuse rows that are no pairs, a prompt by another name, and keys that have no effect on pairs."""
    has = f"the rows have {', '.join(map(repr, columns)) or 'no column'}"
    if wanted is None:
        lacks = " and ".join(f"no {side!r}" for side in SIDES if side not in (*columns, *data.columns))
        usual = guess_columns(columns, (*USUAL_PROMPTS, USUAL_SIDES))
        hint = "name the answers, data.columns: {chosen: …, rejected: …}, or set train.objective: sft"
        hint = f"if that is what they hold, write data.columns: {format_yaml(usual)}" if usual else hint
        problem = f"compares pairs of answers, and {has}, but {lacks}"
        raise UserError(problem, where("train.objective"), hint, "wrong-objective")
    usual = guess_columns(columns, USUAL_PROMPTS)
    if usual and wanted.columns == SIDES and data.format is None:
        hint = f"if it is one, write data.columns: {format_yaml(usual)}; "
        hint += "if the answers begin with their prompt, data.format: preference"
        problem = f"{has}, and no prompt by that name"
        raise UserError(problem, where("data.columns"), hint, "no-such-column")
    for key in ("text_field", "turns", "completion_only_loss"):
        if getattr(data, key) not in ("auto", None, True):
            problem = "no effect on pairs: the loss is computed on both answers, and on nothing else"
            raise UserError(problem, where(f"data.{key}"), "remove it", "no-effect")


def preference_format(request: FormatRequest) -> Format:
    """A prompt, text or messages, with both answers; or both texts or chats in full, which begin with their prompt."""
    answers = [*map(request.column, SIDES)]
    prompt = request.optional("prompt")
    return make_pair_format(request, "preference", [prompt, *answers] if prompt else answers)


def messages_format(request: FormatRequest, column: str) -> Format:
    """Messages, and both answers to them as messages or as text."""
    name = request.column(column, "messages_field")
    kind = {"conversations": "sharegpt"}.get(column, column)
    return make_pair_format(request, kind, [name, *map(request.column, SIDES)])


def rejected_format(request: FormatRequest, rejected: str) -> Format:
    """A chat that ends with the chosen answer, and the rejected chat or the answer in place of the last."""
    return make_pair_format(request, "messages", [request.column("messages"), request.column(rejected)])


def alpaca_pairs(request: FormatRequest) -> Format:
    """An instruction with its input and earlier turns, and both answers."""
    columns = [request.column("instruction"), *map(request.column, SIDES)]
    return make_pair_format(request, "alpaca", columns, alpaca_reader(request))


def make_pair_format(
    request: FormatRequest, name: str, columns: Sequence[str], read_prompt: Callable[[Row], Any] | None = None
) -> Format:
    """Pairs in these columns: the prompt, unless both answers begin with it, then the answers."""
    data = request.data
    *prompt, chosen, rejected = columns
    tools, system = (None, None) if name == "alpaca" else map(request.optional, ("tools", "system"))
    is_chat = name != "preference" or system is not None or bool(CHAT_KEYS.intersection(data.own_changes))
    template: ChatTemplate | None = None
    if is_chat or data.chat_template or getattr(request.tokenizer, "chat_template", None):
        template = request.chat_template("alpaca" if name == "alpaca" else "mistral")

    is_bare = prompt and template and not is_chat and data.format is None
    bare = {"bare": f"data.columns: {{instruction: {prompt[0]}}}"} if is_bare else {}

    def read(row: Row) -> Pair:
        before = read_prompt(row) if read_prompt else read_side(row, *prompt) if prompt else ""
        sides = [read_side(row, chosen), read_side(row, rejected)]
        texts = [side for side in sides if isinstance(side, str)]
        if not prompt and len(texts) == 2:
            at = find_answers(*texts)
            before = texts[0][:at]
            sides = texts = [text[at:] for text in texts]
        if len(texts) == 2 and isinstance(before, str) and not is_chat:
            require_answers([text.strip() for text in texts])
            return before, texts
        if template is None:
            hint = "set data.chat_template: chatml, or the template that the model was trained with"
            raise UserError("messages, and the tokenizer has no chat template", "data", hint, "no-chat-template")
        first = [{"role": "system", "content": row[system]}] if system and row.get(system) else []
        chats = [as_messages(side, "assistant") for side in sides]
        if name == "messages" and not prompt:
            chats[1] = complete_rejected(template, *chats)
        return split_chats(template, first, as_messages(before, "user"), chats)

    def render(row: Row) -> Sequence[RenderedRow]:
        before, answers = read(row)
        if isinstance(before, str):
            at = len(before)
            return [RenderedRow(before + answer, {0: (at, at + len(answer))}, remarks=bare) for answer in answers]
        assert template is not None
        return render_answers(template, before, answers, row.get(tools or ""))

    def chat(row: Row) -> dict[str, Any]:
        before, answers = read(row)
        if template is None or isinstance(before, str):
            return {"messages": [], "tools": None}
        return template.write_request([*before, *answers[0]], row.get(tools or ""))

    what = f"{prompt[0]!r}, then {chosen!r} or {rejected!r}" if prompt else f"{chosen!r} and {rejected!r}"
    through = f" through {template.source}" if template and is_chat else ""
    return Format(
        name,
        f"pairs: {what}{through}, loss on both answers",
        render,
        template.notes if template and is_chat else (),
        tuple(columns),
        template=template,
        chat=chat if template else None,
        pairs=True,
        cuts_prompts=data.truncation == "prompt",
    )


def read_side(row: Row, column: str) -> Any:
    """Return a row's text, messages or one message; an error if the column has something else."""
    value = row.get(column)
    return value if value and isinstance(value, list | dict) else as_text(value or None, column)


def as_messages(value: Any, role: str) -> Messages:
    """Return messages; one message or a text becomes the only one."""
    if isinstance(value, list):
        return value
    return [value if isinstance(value, dict) else {"role": role, "content": value}] if value else []


def complete_rejected(template: ChatTemplate, chosen: Messages, rejected: Messages) -> Messages:
    """Return the rejected chat in full; it may be only what takes the place of the chosen chat's last turn."""
    if any(not turn.is_assistant for turn in template.read(rejected)[:1]):
        return rejected
    answered = any(turn.is_assistant for turn in template.read(chosen)[-1:])
    return [*(chosen[:-1] if answered else chosen), *rejected]


def find_answers(chosen: str, rejected: str) -> int:
    """Return where the answers of two texts begin that begin with one prompt: behind the last common mark of the
    speaker, else with the word that differs first and the space before it."""
    shared = common_prefix_length(chosen, rejected)
    marks = [mark.end() for mark in SPEAKER.finditer(chosen, 0, shared)]
    at = marks[-1] if marks else max((mark.end() for mark in re.finditer(r"\s", chosen[:shared])), default=0)
    at -= not marks and chosen[at - 1 : at] == " "
    if not chosen[:at].strip():
        raise prompt_error("chosen and rejected have no beginning in common, which would be their prompt")
    return at


def split_chats(template: ChatTemplate, first: Messages, before: Messages, chats: Sequence[Messages]) -> Pair:
    """Return the prompt and both answers of a pair; the chats may begin with the prompt.

    first: a system message from a column of its own, which the chats lack.
    """
    turns = [template.read(chat) for chat in chats]
    if all(found and not found[0].is_assistant for found in turns):
        shared = sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(*turns, strict=False)))
        if turns[0] == turns[1]:  # equal answers: the row will be left out
            shared -= 1
        common = "\n".join(turn.words for turn in turns[0][:shared])
        if not all(turn.words.strip() in common for turn in template.read(before)):
            raise prompt_error("the prompt is not what chosen and rejected begin with")
        before = chats[0][:shared]
        chats = [chat[shared:] for chat in chats]
        turns = [found[shared:] for found in turns]
    if any(found and not found[0].is_assistant for found in turns):
        raise prompt_error("the turns before the first answer differ between chosen and rejected")
    asked = template.read(before)
    if asked and asked[-1].is_assistant:
        hint = "move that turn into both answers, or leave out such rows"
        raise UserError("the prompt ends with a turn of the assistant", "data", hint, "prompt-answered")
    require_answers([any(turn.is_assistant and not turn.is_empty for turn in found) for found in turns])
    return [*first, *before], [*chats]


def render_answers(
    template: ChatTemplate, before: Messages, answers: Sequence[Messages], tools: Any
) -> list[RenderedRow]:
    """Return the text with the chosen answer and the one with the rejected answer."""
    found = [render_chat(template, [*before, *answer], tools, False, first=len(before)) for answer in answers]
    if any(len(rows) > 1 for rows in found):
        problem = "the chat template writes turns of an answer differently once later ones follow"
        hint = "keep the last answer of such rows alone, behind the turns before it"
        raise UserError(problem, "data", hint, "turns-rewritten")
    pair = [rows[0] for rows in found]
    require_answers([bool(row.answers) for row in pair])
    heads = sorted((row.text[: row.spans[0][0]] for row in pair), key=len)
    if not heads[1].startswith(heads[0]):
        raise prompt_error("the chat template writes the prompt of chosen and rejected differently")
    return pair


def require_answers(answers: Sequence[Any]) -> None:
    for side, answer in zip(SIDES, answers, strict=True):
        if not answer:
            raise UserError(f"the {side} answer is empty", "data", "fix or leave out such rows", "empty-answer")


def prompt_error(problem: str) -> UserError:
    return UserError(problem, "data", "both answers of a pair need the same prompt: fix such rows", "prompt-differs")


SPOKEN: Final = ("system", "tools", "role", "content", *FLAGS)
# The first one whose columns exist is used.
PAIR_FORMATS: Final = (
    FormatSpec("preference", (), ("prompt", *SIDES), SPOKEN, preference_format),
    FormatSpec(
        "messages", ("messages_field",), ("messages", *SIDES), SPOKEN, partial(messages_format, column="messages")
    ),
    FormatSpec(
        "sharegpt",
        ("messages_field",),
        ("conversations", *SIDES),
        ("from", "value", *SPOKEN),
        partial(messages_format, column="conversations"),
    ),
    FormatSpec("alpaca", (), ("instruction", *SIDES), ("input", "system", "history"), alpaca_pairs),
    FormatSpec("preference", (), SIDES, SPOKEN, preference_format),
    *(
        FormatSpec("messages", (), ("messages", rejected), SPOKEN, partial(rejected_format, rejected=rejected))
        for rejected in ("rejected_messages", "rejected_response")
    ),
)
