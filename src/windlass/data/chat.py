"""Render chats through a chat template and find which parts of the text are the assistant's."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.data.sources import Where
from windlass.errors import UserError
from windlass.runfile.names import ROLES as NAMES_OF_ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.runfile import Data

Span = tuple[int, int]

TEMPLATES = Path(__file__).parent / "templates"
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
# The parts of transformers' render_jinja_template: calling them directly saves a tenth to a third of the time per chat.
STEPS = ("_compile_jinja_template", "_render_with_assistant_indices")
CONTROL = re.compile(r"<\|[a-z_]+\|>|\[/?[A-Z_]+\]")  # how templates write control tokens
OWN_ROLES = ("system", "user", "assistant", "tool")
ROLES = {  # their names in data sets
    name: "assistant" if role == "call" else role for role, names in NAMES_OF_ROLES.items() for name in names
}
CALLS = NAMES_OF_ROLES["call"]
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of a message
THOUGHT = re.compile(r"<think>(.*?)</think>\s*|\[THINK\](.*?)\[/THINK\]", re.DOTALL)  # or tags inside its content
FLAGS = ("weight", "train")  # whether the loss is computed on a message, in OpenAI's and in Axolotl's format


class Turn(NamedTuple):
    """A message in the form that templates take, whether the data exclude it from the loss, and its reasoning."""

    message: dict[str, Any]
    trained: bool | None
    reasoning: list[str]

    @property
    def is_assistant(self) -> bool:
        return bool(self.message["role"] == "assistant")


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer and the template that renders chats for it; `source` says where the template comes from."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    source: str = ""
    notes: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False
    """Loss on the last answer alone."""
    drop_reasoning: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """What a message's keys are called in these data, and how they are called here."""

    @cached_property
    def has_generation_marks(self) -> bool:
        """Return whether the template itself marks the assistant's part."""
        return bool(GENERATION.search(self.template))

    @cached_property
    def roles(self) -> dict[str, str]:
        """Return role names in messages and the template's names for them: some templates rename `tool`."""
        own = {name: name for name, role in ROLES.items() if role in ("tool", "system") and self.supports_role(name)}
        return {**ROLES, **own}

    def supports_role(self, role: str) -> bool:
        return re.search(rf"""(['"]){re.escape(role)}\1""", self.template) is not None

    @cached_property
    def variables(self) -> dict[str, Any]:
        """Return the variables that the template reads besides the chat: each one costs time per row."""
        named = {**self.tokenizer.special_tokens_map, **self.kwargs}
        return {name: value for name, value in named.items() if name in self.template}

    def render(self, messages: Sequence[Any], *, first: int = 0, tools: Any = None) -> tuple[str, tuple[Span, ...]]:
        """Return the text and the assistant's supervised spans, from message `first` on."""
        turns = [read_turn(message, self.names, self.roles, drop_reasoning=self.drop_reasoning) for message in messages]
        for role in {str(turn.message["role"]) for turn in turns}.difference(OWN_ROLES):
            if not self.supports_role(role):
                problem = f"a message has the role {role!r}, which {self.source or 'the chat template'} doesn't name"
                close = difflib.get_close_matches(role.lower(), ROLES, n=1)
                hint = f"did you mean {close[0]}? roles are" if close else "write one of the roles"
                hint += f" {', '.join(OWN_ROLES)}, or one that a data.chat_template of yours names"
                raise UserError(problem, "data", hint)
        tools = drop_none(json.loads(tools) if isinstance(tools, str) and tools.strip() else tools) or None
        if tools and not re.search(r"\btools\b", self.template):
            hint = "set data.chat_template to one that does, such as chatml"
            raise UserError(
                f"{self.source or 'the chat template'} doesn't render tools, and a row has some", "data", hint
            )
        answers = [i for i, turn in enumerate(turns) if turn.is_assistant]
        wanted = [i for i in answers if i >= first][-1 if self.last else 0 :]
        wanted = [i for i in wanted if turns[i].trained is not False]
        if self.has_generation_marks:
            text, marked = self.apply(turns, tools, marks=True)
            if len(marked) != len(answers) != len(wanted):
                problem = f"the chat template marks {len(marked)} parts of a chat with {len(answers)} assistant turns"
                hint = "mark each assistant turn once: {% generation %} … {% endgeneration %}"
                raise UserError(problem, "data", hint)
            spans = marked if len(marked) != len(answers) else [marked[answers.index(i)] for i in wanted]
            reasoning = [thought for i in wanted for thought in turns[i].reasoning]
            self.require_reasoning(reasoning, "".join(text[a:b] for a, b in spans))
            return text, tuple(spans)
        text = self.apply(turns, tools)[0]
        spans = list[Span]()
        for i in wanted:
            # An answer begins after the prompt that the template writes for it. Reasoning templates open a thought in
            # that prompt, which a finished answer may lack: then it begins after what both have in common.
            prompt = self.apply(turns[:i], tools, prompt=True)[0] if i else ""
            plain = prompt if text.startswith(prompt) else self.apply(turns[:i], tools)[0]
            until = self.apply(turns[: i + 1], tools)[0] if i + 1 < len(turns) else text
            start = max(len(plain), common_prefix_length(text, prompt))
            for head in (plain, until):
                if not text.startswith(head) or len(until) <= start:
                    at = common_prefix_length(text, head)
                    raise UserError(
                        "the chat template writes earlier turns differently once later ones follow "
                        f"(at {text[max(0, at - 30) : at + 30]!r}), so the assistant's part can't be found",
                        "data",
                        "compute the loss on the last turn alone (data.turns: last), or give data.chat_template a "
                        "template with {% generation %} … {% endgeneration %} around the assistant's part",
                    )
            self.require_reasoning(turns[i].reasoning, text[start : len(until)])
            spans.append((start, len(until)))
        return text, tuple(spans)

    def require_reasoning(self, thoughts: Sequence[str], written: str) -> None:
        for thought in thoughts:
            if thought.strip() not in written:
                problem = f"{self.source or 'the chat template'} leaves out an answer's reasoning: {thought[:60]!r}"
                hint = "train without it (data.reasoning: drop), or name a data.chat_template that writes it"
                raise UserError(problem, "data.reasoning", hint)

    def apply(
        self, turns: list[Turn], tools: Any, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text, and the spans that the template's own marks enclose."""
        from jinja2 import TemplateError
        from transformers.utils import chat_template_utils as jinja

        chat = [turn.message for turn in turns]
        options: dict[str, Any] = {"tools": tools, "chat_template": self.template, "add_generation_prompt": prompt}
        options |= {"return_assistant_tokens_mask": marks, **self.variables}
        try:
            # For chats of plain text, which are most, the function below gives the same result more slowly.
            compiled, tracked = (getattr(jinja, step, None) for step in STEPS)
            plain = not tools and all(
                {*map(type, m.values())} == {str} and m.keys().isdisjoint(REASONING) for m in chat
            )
            if plain and compiled and tracked:
                inputs = {"tools": None, "documents": None, "add_generation_prompt": prompt, **self.variables}
                if marks:
                    text, spans = tracked(compiled(self.template), chat, **inputs)
                    return text, spans
                return compiled(self.template).render(messages=chat, **inputs), []
            try:
                texts, marked = jinja.render_jinja_template([chat], **options)
            except TypeError:  # a template that takes a call's arguments as text, as in OpenAI's format
                texts, marked = jinja.render_jinja_template([list(map(arguments_as_text, chat))], **options)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message["role"]) for message in chat)
            hint = "fix or leave out such rows: most templates want user and assistant in turn, system first"
            raise UserError(f"the chat template refuses a chat ({roles}): {error}", "data", hint) from None
        return str(texts[0]), [(start, end) for start, end in marked[0]] if marks else []


def common_prefix_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    if one.startswith(other):
        return len(other)
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def drop_none(value: Any) -> Any:
    """Remove None values: columnar files fill in None for what other rows have, and templates test for presence."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {k: drop_none(v) for k, v in value.items() if v is not None}
    return [drop_none(item) for item in value] if isinstance(value, list) else value


def read_turn(
    message: Any, names: Mapping[str, str] = {}, roles: Mapping[str, str] = ROLES, *, drop_reasoning: bool = False
) -> Turn:
    """Read a message in the format of OpenAI, ShareGPT or similar, into `role` and `content`."""
    if not isinstance(message, dict):
        raise UserError(f"a message has no role: {str(message)[:80]}", "data", 'write {"role": …, "content": …}')
    plain = not names and message.keys() == {"role", "content"} and type(message["content"]) is str
    if plain and message["role"] in ("system", "user"):  # most are: the code below would not change them
        return Turn(message, None, [])
    found = {names.get(key, key): drop_none(value) for key, value in message.items() if value is not None}
    named = found.pop("from", None) or found.get("role")
    if named is None:
        problem = f"a message has no role: {str(message)[:80]}"
        hint = "if its key has another name: data.columns: "
        raise UserError(problem, "data", f"{hint}{{role: {next(iter(found), 'speaker')}}}")
    role = roles.get(str(named).lower(), named)
    if "value" in found and "content" not in found:
        found["content"] = found.pop("value")
    given = [found.pop(flag) for flag in FLAGS if flag in found]
    if given and given[0] not in (0, 1):
        raise UserError(f"a message has the weight {given[0]}", "data", "write 0 or 1: loss is computed on it or not")
    trained = bool(given[0]) if given else None
    if trained and role != "assistant":
        hint = "leave the flag out; data.completion_only_loss: false computes the loss on everything"
        raise UserError(f"a message of {role!r} is marked to be trained on", "data", hint)
    if named in CALLS:  # LLaMA-Factory's and ms-swift's roles for an answer that calls tools
        calls = parse_json(found.pop("content", ""))
        found["tool_calls"] = calls if isinstance(calls, list) else [calls]
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [read_call(call) for call in calls]
    found["content"], thoughts = read_content(found.get("content", ""))
    if role == "assistant":
        thoughts += [str(found[name]) for name in REASONING if found.get(name)]
        if drop_reasoning:
            found = {k: v for k, v in found.items() if k not in REASONING}
            thoughts = []
            if isinstance(found["content"], list):
                found["content"] = "".join(part["text"] for part in found["content"] if part["type"] == "text")
            found["content"] = THOUGHT.sub("", found["content"])
        elif isinstance(found["content"], str):
            thoughts += [one or other for one, other in THOUGHT.findall(found["content"])]
    return Turn({**found, "role": role}, trained, [thought for thought in thoughts if thought.strip()])


def read_content(content: Any) -> tuple[Any, list[str]]:
    """Join parts of text. With reasoning, parts are left as they are and the reasoning is returned."""
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise UserError(f"a message's content is a {type(content).__name__}, not text", "data", "write it as text")
    parts = [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content]
    kinds = {str(part.get("type")) for part in parts}
    if other := kinds - {"text", "thinking"}:
        hint = "leave out such rows: windlass trains on text"
        raise UserError(f"a message has a part of the type {min(other)!r}", "data", hint)
    if "thinking" not in kinds:
        return "".join(part["text"] for part in parts), []
    thoughts = [part.get("thinking") or [] for part in parts if part["type"] == "thinking"]  # text, or a list of parts
    return parts, ["".join(part["text"] if isinstance(part, dict) else str(part) for part in each) for each in thoughts]


def read_call(call: Any) -> Any:
    """Return a tool call with its arguments as a mapping, also if they are written as JSON."""
    if not isinstance(call, dict):
        hint = 'write {"function": {"name": …, "arguments": …}}'
        raise UserError(f"a tool call is a {type(call).__name__}: {str(call)[:80]}", "data", hint)
    inner: dict[str, Any] = call["function"] if isinstance(call.get("function"), dict) else call
    read = {**inner, "arguments": parse_json(inner.get("arguments", {}))}
    return {**call, "function": read} if inner is not call else {"type": "function", "function": read}


def parse_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "{}")
    except json.JSONDecodeError:
        raise UserError(
            f"a tool call is not valid JSON: {value[:80]!r}", "data", "fix or leave out such rows"
        ) from None


def arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def choose_template(
    tokenizer: PreTrainedTokenizerBase, data: Data | None = None, where: Where = str, *, fallback: str = "mistral"
) -> ChatTemplate:
    """Return the template that the run file sets, else the tokenizer's, else the fallback."""
    asked = data.chat_template if data else None
    own = getattr(tokenizer, "chat_template", None)
    notes = []
    named = asked
    if asked is None and own:
        template = tokenizer.get_chat_template()
        source = "the tokenizer's chat template"
    elif asked is None:
        named = fallback
        template = read_template(fallback)
        notes.append(f"the tokenizer has no chat template: {fallback.capitalize()}'s is used")
        source = f"{fallback.capitalize()}'s chat template (the tokenizer has none)"
    else:
        template, source = find_template(asked, own, where("data.chat_template"))
    unknown = sorted({*CONTROL.findall(template)} - {*tokenizer.get_vocab()}) if named else []
    if unknown:
        are = "are no tokens of this tokenizer and are" if len(unknown) > 1 else "is no token of this tokenizer and is"
        notes.append(f"{' and '.join(unknown)} {are} spelt out")
    if data is None:
        return ChatTemplate(tokenizer, template, source, tuple(notes))
    require_variables(template, data.template_kwargs, where)
    names = {data.columns[name]: name for name in ("role", "content", "from", "value", *FLAGS) if name in data.columns}
    return ChatTemplate(
        tokenizer, template, source, tuple(notes), data.template_kwargs, data.turns == "last",
        data.reasoning == "drop", names,
    )  # fmt: skip


def read_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def find_template(asked: str, own: Any, place: str) -> tuple[str, str]:
    """Find a template by name, in the tokenizer or here; or take the template itself, or a file."""
    names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    if isinstance(own, dict) and asked in own:
        return own[asked], f"the tokenizer's chat template {asked!r}"
    if asked in names:
        return read_template(asked), f"the chat template {asked!r}"
    if "{{" in asked or "{%" in asked:
        return asked, "data.chat_template"
    try:
        text = Path(asked).expanduser().read_text(encoding="utf-8")
        return (json.loads(text)["chat_template"] if asked.endswith(".json") else text), asked
    except OSError as error:
        close = difflib.get_close_matches(asked, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"write one of {', '.join(names)}, a file, or the template"
        raise UserError(f"no chat template {asked!r}: {error.strerror}", place, hint) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{asked} is not a chat template: {error}", place, "name a .jinja file") from None


def require_variables(template: str, kwargs: Mapping[str, Any], where: Where) -> None:
    """Refuse variables that the template doesn't read: they would silently have no effect."""
    from jinja2 import Environment, TemplateError, meta

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
        known = sorted(meta.find_undeclared_variables(tree))
    except TemplateError as error:
        raise UserError(f"not a chat template: {error}", where("data.chat_template"), "fix its Jinja") from None
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"remove it; the template uses {', '.join(known)}"
            raise UserError(f"the chat template doesn't use a variable {name!r}", where("data.template_kwargs"), hint)
