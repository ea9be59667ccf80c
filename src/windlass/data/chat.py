"""Conversations through a chat template, and which stretches of the text are the assistant's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

# Mistral's instruct format, for its base tokenizers, which have the control tokens and no template. Written after the
# format that mistral-common documents for its tekken tokenizers (V7): no spaces around the control tokens.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}[SYSTEM_PROMPT]{{ m['content'] }}[/SYSTEM_PROMPT]"
    "{% elif m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only system, user and assistant messages can be written') }}{% endif %}"
    "{% endfor %}"
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


@dataclass(frozen=True, slots=True)
class Chat:
    """A template in use, and how the assistant's part is told."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    said: str
    notes: tuple[str, ...] = ()

    def render(self, messages: Sequence[Any], *, first: int = 0, tools: Any = None) -> tuple[str, tuple[Span, ...]]:
        """The text, and the assistant's stretches of it among the messages from `first` on."""
        turns = [message_of(message) for message in messages]
        tools = json.loads(tools) if isinstance(tools, str) else tools
        if GENERATION.search(self.template):
            return self.by_marks(turns, first, tools)
        text = self.text(turns, tools)
        spans = []
        for i, turn in enumerate(turns):
            if turn["role"] == "assistant" and i >= first:
                start = self.start_of_answer(turns[:i], text, tools) if i else 0
                tail = self.text(turns[: i + 1], tools)
                if not text.startswith(tail) or len(tail) <= start:
                    raise unstable(tail, text)
                spans.append((start, len(tail)))
        return text, tuple(spans)

    def start_of_answer(self, before: list[dict[str, Any]], text: str, tools: Any) -> int:
        """Where the assistant's own words begin: behind the prompt that the template writes for it to answer."""
        prompt = self.text(before, tools, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # Reasoning templates open a thought in the prompt which a finished answer may lack: behind what both have.
        plain = self.text(before, tools)
        if not text.startswith(plain):
            raise unstable(plain, text)
        return max(len(plain), agreeing(text, prompt))

    def by_marks(self, turns: list[dict[str, Any]], first: int, tools: Any) -> tuple[str, tuple[Span, ...]]:
        """The template itself says which part is the assistant's, with {% generation %}."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            [turns],
            tools=tools or None,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        skipped = sum(turn["role"] == "assistant" for turn in turns[:first])
        return texts[0], tuple((start, end) for start, end in spans[0][skipped:])

    def text(self, turns: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                chat_template=self.template,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except TemplateError as error:
            roles = ", ".join(str(turn["role"]) for turn in turns)
            raise UserError(
                f"the chat template refuses a conversation ({roles}): {error}",
                "data",
                "fix or leave out such rows: most templates want user and assistant in turn, system first",
            ) from None
        return str(text)


def agreeing(one: str, other: str) -> int:
    """Length of the common beginning."""
    limit = min(len(one), len(other))
    return next((i for i in range(limit) if one[i] != other[i]), limit)


def unstable(head: str, text: str) -> UserError:
    at = agreeing(head, text)
    return UserError(
        "the chat template writes earlier turns differently once later ones follow "
        f"(at {text[max(0, at - 30) : at + 30]!r}), so the assistant's part can't be told",
        "data",
        "give the tokenizer a chat template with {% generation %} … {% endgeneration %} around the assistant's part",
    )


def message_of(message: Any) -> dict[str, Any]:
    """One message with `role` and `content`, whether it was written so or as `from` and `value`."""
    if not isinstance(message, dict):
        raise UserError(f"a message is a {type(message).__name__}", "data", 'write {"role": …, "content": …}')
    # Columnar files fill what a message lacks with None; templates test for presence.
    found = {key: value for key, value in message.items() if value is not None}
    role = found.pop("from", None) or found.get("role")
    if role is None:
        raise UserError(f"a message has no role; it has {', '.join(found)}", "data", 'write {"role": …, "content": …}')
    if "value" in found and "content" not in found:
        found["content"] = found.pop("value")
    found["role"] = ROLES.get(role, role)
    found.setdefault("content", "")
    return found


def conversation(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The tokenizer's template, or Mistral's where it has none."""
    if getattr(tokenizer, "chat_template", None):
        return Chat(tokenizer, tokenizer.get_chat_template(), "the tokenizer's chat template")
    unknown = [mark for mark in ("[INST]", "[/INST]") if mark not in tokenizer.get_vocab()]
    notes = ["the tokenizer has no chat template: Mistral's is used"]
    if unknown:
        notes.append(f"{' and '.join(unknown)} are no tokens of this tokenizer and are spelt out")
    return Chat(tokenizer, MISTRAL, "Mistral's chat template (the tokenizer has none)", tuple(notes))
