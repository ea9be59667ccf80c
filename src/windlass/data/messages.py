"""Read the messages of a chat, as data sets write them, into the form that chat templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from windlass.errors import UserError
from windlass.runfile.names import ROLES as NAMES_OF_ROLES

TEXT_ROLES = ("system", "user", "assistant")
OWN_ROLES = (*TEXT_ROLES, "tool")
ROLES = {  # their names in data sets
    name: "assistant" if role == "call" else role for role, names in NAMES_OF_ROLES.items() for name in names
}
CALLS = NAMES_OF_ROLES["call"]
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of a message
THOUGHT = re.compile(r"<think>(.*?)</think>\s*|\[THINK\](.*?)\[/THINK\]", re.DOTALL)  # or tags inside its content
KEYS: tuple[str, ...] = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING)
KEYS += ("type", "text", "function", "arguments", "id")  # of their parts
FLAGS = ("weight", "train")  # whether the loss is computed on a message, in OpenAI's and in Axolotl's format


class Turn(NamedTuple):
    """A message in the form that templates take, whether the data exclude it from the loss, and its reasoning."""

    message: dict[str, Any]
    trained: bool | None
    reasoning: list[str]

    @property
    def is_assistant(self) -> bool:
        return bool(self.message["role"] == "assistant")

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []

    @property
    def is_plain(self) -> bool:
        return not self.calls and not self.reasoning

    @property
    def is_empty(self) -> bool:
        return not self.words.strip() and self.is_plain

    @property
    def words(self) -> str:
        """The content without reasoning."""
        content = self.message["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        return THOUGHT.sub("", text) if self.is_assistant and opens_thought(text) else text


def opens_thought(text: str) -> bool:
    return "<think>" in text or "[THINK]" in text


class Unfilled(dict[str, Any]):
    """A call's arguments without the nulls that a column of structs had among them."""


class Structs(list[Any]):
    """A list of structs from a columnar file: each has the keys of all, null where a row had none."""


def drop_none(value: Any, kept: str = "arguments") -> Any:
    """Remove None values but under the key `kept`: columnar files fill in what other rows have, and templates test for
    presence."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {k: v if k == kept else drop_none(v, kept) for k, v in value.items() if v is not None}
    return [drop_none(item, kept) for item in value] if isinstance(value, list) else value


def unfill_arguments(value: Any, key: str = "") -> Any:
    """Remove None values from calls' arguments in a columnar file."""
    if isinstance(value, list):
        return [unfill_arguments(item) for item in value]
    if not isinstance(value, dict):
        return value
    if key == "arguments":
        kept = drop_none(value, "")
        return kept if kept == value else Unfilled(kept)
    return {name: unfill_arguments(inner, name) for name, inner in value.items()}


OTHER_NAMES = {"role": "from", "from": "role", "content": "value", "value": "content"}


def read_turn(
    message: Any, names: Mapping[str, str] = {}, roles: Mapping[str, str] = ROLES, *, drop_reasoning: bool = False
) -> Turn:
    """Read a message in the format of OpenAI, ShareGPT or similar, into `role` and `content`."""
    if not isinstance(message, dict):
        problem = f"a message has no role: {str(message)[:80]}"
        raise UserError(problem, "data", 'write {"role": …, "content": …}', "no-role")
    role = message.get("role") if len(message) == 2 and not names else None
    text = message.get("content")
    # Most are one of these, and the code below would not change them.
    if type(text) is str and role in TEXT_ROLES and (role != "assistant" or not opens_thought(text)):
        return Turn(message, None, [])
    found = {key: drop_none(value) for key, value in message.items() if value is not None and key not in names}
    renamed = {name: drop_none(message[key]) for key, name in names.items() if message.get(key) is not None}
    # What the run file names comes before what the message has by a usual name.
    hidden = {OTHER_NAMES[name] for name in renamed.keys() & OTHER_NAMES.keys()}
    found = {key: value for key, value in found.items() if key not in hidden} | renamed
    named = found.pop("from", None) or found.get("role")
    if named is None:
        problem = f"a message has no role: {str(message)[:80]}"
        hint = "if its key has another name: data.columns: "
        raise UserError(problem, "data", f"{hint}{{role: {next(iter(found), 'speaker')}}}", "no-role")
    role = roles.get(str(named).lower(), named)
    if "value" in found and "content" not in found:
        found["content"] = found.pop("value")
    given = [found.pop(flag) for flag in FLAGS if flag in found]
    if given and given[0] not in (0, 1):
        hint = "write 0 or 1: loss is computed on it or not"
        raise UserError(f"a message has the weight {given[0]}", "data", hint, "wrong-weight")
    trained = bool(given[0]) if given else None
    if trained and role != "assistant":
        hint = "leave the flag out; data.completion_only_loss: false computes the loss on everything"
        raise UserError(f"a message of {role!r} is marked to be trained on", "data", hint, "not-an-answer")
    if named in CALLS:  # LLaMA-Factory's and ms-swift's roles for an answer that calls tools
        calls = parse_json(found.pop("content", ""))
        found["tool_calls"] = calls if isinstance(calls, list) else [calls]
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [read_call(call) for call in calls]
    if not {"content", "tool_calls", *REASONING} & found.keys():
        hint = 'write "content": "" if it is meant to be empty, or leave out such rows'
        raise UserError(f"a message of {role!r} has no content", "data", hint, "no-content")
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
        problem = f"a message's content is a {type(content).__name__}, not text"
        raise UserError(problem, "data", "write it as text", "content-not-text")
    parts = [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content]
    kinds = {str(part.get("type")) for part in parts}
    if other := kinds - {"text", "thinking"}:
        hint = "leave out such rows: windlass trains on text"
        raise UserError(f"a message has a part of the type {min(other)!r}", "data", hint, "unsupported-part")
    if "thinking" not in kinds:
        return "".join(part["text"] for part in parts), []
    thoughts = [part.get("thinking") or [] for part in parts if part["type"] == "thinking"]  # text, or a list of parts
    return parts, ["".join(part["text"] if isinstance(part, dict) else str(part) for part in each) for each in thoughts]


def read_call(call: Any) -> Any:
    """Return a tool call with its arguments as a mapping, also if they are written as JSON."""
    if not isinstance(call, dict):
        hint = 'write {"function": {"name": …, "arguments": …}}'
        raise UserError(f"a tool call is a {type(call).__name__}: {str(call)[:80]}", "data", hint, "invalid-call")
    inner: dict[str, Any] = call["function"] if isinstance(call.get("function"), dict) else call
    read = {**inner, "arguments": parse_json(inner.get("arguments", {}))}
    return {**call, "function": read} if inner is not call else {"type": "function", "function": read}


def read_json_column(value: Any) -> Any:
    """Read a column of tools, which may be JSON."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value
    except json.JSONDecodeError as error:
        problem = f"a row's tools are not valid JSON: {error}"
        raise UserError(problem, "data", "fix or leave out such rows", "invalid-tools") from None


def parse_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "{}")
    except json.JSONDecodeError:
        problem = f"a tool call is not valid JSON: {value[:80]!r}"
        raise UserError(problem, "data", "fix or leave out such rows", "not-json") from None


def arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, **({"tool_calls": calls} if calls else {})}


def require_calls(turns: Sequence[Turn]) -> None:
    """Refuse a tool's result that no answer precedes."""
    answered = False
    for turn in turns:
        if turn.message["role"] == "tool" and not answered:
            hint = "put the answer that calls the tool before its result, or leave out such rows"
            raise UserError("a tool's result follows no answer that could have called it", "data", hint, "no-call")
        answered = turn.is_assistant or (answered and turn.message["role"] == "tool")


def find_lost_part(
    turns: Sequence[Turn], text: str, answers: Mapping[int, tuple[int, int]]
) -> tuple[str, str, str] | None:
    """Return what of the turns isn't in the text, or None: as words, with the key and the hint that help.

    Templates may trim, escape and rearrange. Reasoning is needed only in the answers that are trained on.
    """
    at = called_at = 0
    leave_out = "leave out such rows, or name a data.chat_template that writes it"
    for number, turn in enumerate(turns):
        role = turn.message["role"]
        words = turn.words
        trained = number in answers
        before = {"system": 0, "tool": called_at}.get(role, at)  # results may precede the words of the answer
        start, stop = answers.get(number, (before, len(text)))
        end = find_written(words, text, start, stop)
        if end < 0:
            what = "the system message" if role == "system" else f"what a message of {role!r} says"
            return f"{what}: {words.strip()[:60]!r}", "data", leave_out
        for call in turn.calls:
            for value in (call["function"].get("name"), *list_values(call["function"]["arguments"])):
                if find_written(str(value), text, start, stop) < 0:
                    return f"a tool call: {str(value)[:60]!r} of {call['function'].get('name')!r}", "data", leave_out
        for thought in turn.reasoning if trained else ():
            if find_written(thought, text, start, stop) < 0:
                return describe_lost_thought(thought)
        if role in ("assistant", "tool"):
            called_at = stop if trained else start if role == "assistant" else end
        at = stop if trained else at if role == "system" else max(at, end)
    return None


def describe_lost_thought(thought: str) -> tuple[str, str, str]:
    hint = "train without it (data.reasoning: drop), or name a data.chat_template that writes it"
    return f"an answer's reasoning: {thought.strip()[:60]!r}", "data.reasoning", hint


def find_written(words: str, text: str, start: int, stop: int) -> int:
    """Return where the words end in this part of the text, trimmed, escaped or rearranged; -1 if they are not there."""
    words = words.strip()
    for form in (words, json.dumps(words, ensure_ascii=False)[1:-1], json.dumps(words)[1:-1]):
        found = text.find(form, start, stop)
        if found >= 0:
            return found + len(form)
    several = re.findall(r"\w+", words)
    places = [text.find(word, start, stop) for word in several]
    return max(places) if len(several) > 1 and min(places) >= 0 else -1


def list_values(arguments: Any) -> Iterator[Any]:
    """Yield names and values of a call's arguments, at any depth."""
    if isinstance(arguments, dict):
        for name, value in arguments.items():
            yield name
            yield from list_values(value)
    elif isinstance(arguments, list):
        for value in arguments:
            yield from list_values(value)
    elif isinstance(arguments, str | int | float) and not isinstance(arguments, bool):
        yield arguments


REFUSALS = (  # by what a template says
    (r"length 9", "write ids of nine letters or digits: `id` of a call, and `tool_call_id` of its result"),
    (r"'append' of 'list'", "transformers lets no template change a list: in a template of your own, xs + [x] does"),
    (r"'[be]os_token' is undefined", "data.template_kwargs: {bos_token: ''} writes none, as the tokenizer has none"),
)


def explain_refusal(roles: Sequence[str], said: str, *, writes_tools: bool) -> str:
    """Return a hint for a chat with these roles and what the template says that refuses it."""
    for words, hint in REFUSALS:
        if re.search(words, said):
            return hint
    about_roles = re.search("alternate|[Rr]ole", said)
    if "tool" in roles and not writes_tools and about_roles:
        return "leave out such rows: the template writes no tool results"
    system_is_late = "system" in roles[1:] and about_roles
    refuses_system = "system" in roles and "ystem" in said and not re.search("alternate|after", said)
    if system_is_late or refuses_system:
        return "put what the system message says into the user's first message"
    if re.search("alternate|[Rr]oles|role '[ua]|user query|must start", said):
        return "begin with a user; join messages of one role in a row"
    return "leave out such rows, or name a data.chat_template that writes them"
