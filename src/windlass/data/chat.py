"""Render chats through a chat template and find which stretches of the text are the assistant's."""

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
class ChatTemplate:
    """A tokenizer and the template that renders chats for it; `source` says where the template comes from."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    source: str = ""
    notes: tuple[str, ...] = ()

    def render(self, messages: Sequence[Any], *, first: int = 0, tools: Any = None) -> tuple[str, tuple[Span, ...]]:
        """The text, and the assistant's stretches of it among the messages from `first` on."""
        turns = [as_message(message) for message in messages]
        tools = (json.loads(tools) if isinstance(tools, str) else tools) or None
        if GENERATION.search(self.template):  # the template itself marks the assistant's part
            from transformers.utils.chat_template_utils import render_jinja_template

            names = self.tokenizer.special_tokens_map
            texts, marked = render_jinja_template(
                [turns], tools=tools, chat_template=self.template, return_assistant_tokens_mask=True, **names
            )
            skipped = sum(turn["role"] == "assistant" for turn in turns[:first])
            return texts[0], tuple((start, end) for start, end in marked[0][skipped:])
        text, spans = self.apply(turns, tools), []
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant" or i < first:
                continue
            # An answer begins behind the prompt that the template writes for it. Reasoning templates open a thought
            # in that prompt which a finished answer may lack: then behind what both have.
            prompt = self.apply(turns[:i], tools, prompt=True) if i else ""
            plain = prompt if text.startswith(prompt) else self.apply(turns[:i], tools)
            until = self.apply(turns[: i + 1], tools)
            start = max(len(plain), common_length(text, prompt))
            for head in (plain, until):
                if not text.startswith(head) or len(until) <= start:
                    at = common_length(text, head)
                    raise UserError(
                        "the chat template writes earlier turns differently once later ones follow "
                        f"(at {text[max(0, at - 30) : at + 30]!r}), so the assistant's part can't be found",
                        "data",
                        "give the tokenizer a chat template with {% generation %} … {% endgeneration %} around the "
                        "assistant's part",
                    )
            spans.append((start, len(until)))
        return text, tuple(spans)

    def apply(self, turns: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    turns, chat_template=self.template, tools=tools, tokenize=False, add_generation_prompt=prompt
                )
            )
        except TemplateError as error:
            roles = ", ".join(str(turn["role"]) for turn in turns)
            hint = "fix or leave out such rows: most templates want user and assistant in turn, system first"
            raise UserError(f"the chat template refuses a chat ({roles}): {error}", "data", hint) from None


def common_length(one: str, other: str) -> int:
    """Of the beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def as_message(message: Any) -> dict[str, Any]:
    """One message with `role` and `content`, also where it was written as `from` and `value`."""
    # Columnar files fill what a message lacks with None; templates test for presence.
    found = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    role = found.pop("from", None) or found.get("role")
    if role is None:
        problem = f"a message has no role: {str(message)[:80]}"
        raise UserError(problem, "data", 'write {"role": …, "content": …}')
    if "value" in found and "content" not in found:
        found["content"] = found.pop("value")
    return {"content": "", **found, "role": ROLES.get(role, role)}


def chat_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The tokenizer's template, or Mistral's where it has none."""
    if getattr(tokenizer, "chat_template", None):
        return ChatTemplate(tokenizer, tokenizer.get_chat_template(), "the tokenizer's chat template")
    notes = ["the tokenizer has no chat template: Mistral's is used"]
    if unknown := [mark for mark in ("[INST]", "[/INST]") if mark not in tokenizer.get_vocab()]:
        notes.append(f"{' and '.join(unknown)} are no tokens of this tokenizer and are spelt out")
    return ChatTemplate(tokenizer, MISTRAL, "Mistral's chat template (the tokenizer has none)", tuple(notes))
