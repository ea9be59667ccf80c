"""Try chat templates on chats of many kinds: which tokens the loss is computed on, what is refused and why.

    python benchmarks/chat_templates.py FOLDER [FOLDER …] [--only NAME] [--kind a] [--docs docs/data.md]

FOLDER has templates as models publish them (*.jinja). Each gets a tiny tokenizer that has its special tokens. A row is
right if its ids are those of `apply_chat_template`, and if what is supervised is what the model has to write behind the
prompt of inference (`add_generation_prompt`), to the token that ends the turn. `--docs` writes the table there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from windlass import tiny
from windlass.data.audit import audit_split, find_warnings
from windlass.data.choose import choose_format
from windlass.data.documents import Documents
from windlass.data.messages import arguments_as_text
from windlass.data.tokenize import tokenize
from windlass.errors import UserError
from windlass.runfile import Data

TAG = re.compile(r"</?[|｜]?[A-Za-z_][A-Za-z_0-9▁|｜:]*[|｜]?>|\[/?[A-Z_]{2,}\]|\]~!?b[\[\]]|\[e~\[|\]<\]minimax\[>\[")
OPENED = re.compile(rf"(?:\s|<[^<>\s]*>|{TAG.pattern}|thought|analysis)*")  # a thought that a prompt opens
IN_TAGS = re.compile(r"<think>(.*?)</think>", re.DOTALL)
EXPLAINED = ("no-call", "unsupported-part", "unknown-role")  # of the chat, whatever the template
PLAIN_TAG = re.compile(r"</?(?:b|i|think|tools?|tool_\w+|function\w*|parameter|arg_\w+)>")  # tokens, but not special
STARTS = re.compile("start|begin", re.IGNORECASE)
MARK = "endgeneration"
MARKS = ("<!-- chat templates -->", "<!-- end -->")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(city: str, id_: str = "abcdefg01") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return answer("", tool_calls=[{"id": id_, "type": "function", "function": function}])


def result(text: str, id_: str = "abcdefg01") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "name": "get_weather", "content": text}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "a city"}},
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Answer in short sentences."}
ASKED, HELLO, TABLE = (
    user("What does a windlass do?"),
    answer("It lifts an anchor."),
    answer("<table>1</table> as asked"),
)
TOOLS = [user("Weather in Rome?"), call("Rome"), result("21 degrees"), answer("It has 21 degrees.")]
THOUGHT, SECOND = ({"reasoning_content": text} for text in ("Ships carry anchors.", "Many hands."))
THOUGHT_INSIDE = "<think>\nShips carry anchors.\n</think>\n\nIt lifts."
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a": ("one turn", {"messages": [ASKED, HELLO]}),
    "b": (
        "three turns",
        {"messages": [ASKED, HELLO, user("Who?"), answer("The crew."), user("By hand?"), answer("Often so.")]},
    ),
    "c": (
        "system message, two turns",
        {"messages": [SYSTEM, ASKED, HELLO, user("Who turns it?"), answer("The crew.")]},
    ),
    "d": ("tool call and answer", {"messages": TOOLS, "tools": [WEATHER]}),
    "dm": (
        "two rounds of tools",
        {
            "messages": [*TOOLS, user("And Oslo?"), call("Oslo"), result("9 below"), answer("9 below.")],
            "tools": [WEATHER],
        },
    ),
    "dx": ("tool messages without `tools`", {"messages": TOOLS}),
    "e1": ("reasoning in its field", {"messages": [ASKED, answer(HELLO["content"], **THOUGHT)]}),
    "e2": ("`<think>` in the content", {"messages": [ASKED, answer(THOUGHT_INSIDE)]}),
    "e3": (
        "reasoning in two turns",
        {"messages": [ASKED, answer("It lifts.", **THOUGHT), user("Who?"), answer("Crews.", **SECOND)]},
    ),
    "f": ("ends with the user", {"messages": [ASKED, HELLO, user("Who turns it?")]}),
    "g": ("two answers in a row", {"messages": [ASKED, HELLO, answer("And lowers it.")]}),
    "h": ("empty answer", {"messages": [ASKED, HELLO, user("Thanks"), answer("")]}),
    "i": (
        "blanks around, tags inside",
        {"messages": [user(" A table? "), TABLE, user("<b>Why</b>\n"), answer("So.\n")]},
    ),
    "j": ("begins with the assistant", {"messages": [answer("Ahoy!"), ASKED, HELLO]}),
}  # fmt: skip


@dataclass
class Verdict:
    """What became of a chat: right, refused (`code`), or wrong, with the reason; the rows it became; warnings."""

    state: str
    why: str = ""
    rows: int = 1
    warnings: tuple[str, ...] = ()

    @property
    def cell(self) -> str:
        rows = f" ({self.rows})" if self.rows > 1 else ""
        return f"{self.state}{rows}{'!' if self.warnings else ''}"


def make_tokenizer(folder: Path, template: str) -> Any:
    """Return a tiny tokenizer that has the special tokens which the template spells, and ends turns as it does."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").exists():
        tiny.write_tokenizer(folder, 600)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    written = [template]
    for chat, prompt in itertools.product(([ASKED], [ASKED, answer("It lifts.", **THOUGHT)]), (False, True)):
        with suppress(Exception):  # a template raises what it likes
            written.append(tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False))
    found = [*dict.fromkeys(TAG.findall("\n".join(written)))]
    plain = [token for token in found if PLAIN_TAG.fullmatch(token)]
    special = [token for token in found if token not in plain]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(plain)
    if "<|END_OF_TURN_TOKEN|>" in special:  # a template that opens an answer behind every chat is read by it
        tokenizer.eos_token = "<|END_OF_TURN_TOKEN|>"
    return tokenizer


def try_chat(tokenizer: Any, row: dict[str, Any], keys: dict[str, Any]) -> Verdict:
    """Turn a chat into rows as training does, and judge them."""
    truth = Inference(tokenizer, row, keys)
    try:
        documents = tokenize([row], choose_format(Data(**keys), [*row], tokenizer), tokenizer, 4096)
    except UserError as error:
        problem = error.problems[0]
        false = "" if truth.explains(problem.code) else " FALSE"
        return Verdict(f"R {problem.code}{false}", f"{problem.problem} | {problem.hint}")
    warnings = [*find_warnings({"splits": {"train": audit_split(documents, tokenizer)}, "batching": {}})]
    why = truth.judge(documents, " ".join(warnings))
    if why and any("tool_calls" in message for message in row["messages"]):
        why = Inference(tokenizer, row, keys, none=True).judge(documents, " ".join(warnings))
    return Verdict("WRONG" if why else "ok", why, len(documents.lengths), tuple(warnings))


class Inference:
    """What a model is given and has to write at inference for each answer of a chat, by apply_chat_template alone."""

    def __init__(self, tokenizer: Any, row: dict[str, Any], keys: dict[str, Any], *, none: bool = False) -> None:
        self.tokenizer = tokenizer
        self.none = none
        self.messages = [{**message, "content": message["content"] or ""} for message in row["messages"]]
        for message in self.messages:
            if "tool_calls" in message:
                message["tool_calls"] = [*map(read_arguments, message["tool_calls"])]
        for message in self.messages if none else ():  # OpenAI's format has none in an answer that calls tools
            message["content"] = message["content"] or (None if "tool_calls" in message else "")
        self.tools = row.get("tools") if keys.get("tools") != "ignore" else None
        self.variables = keys.get("template_kwargs", {})
        self.stops = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.ids = cache(lambda count, prompt=False: self.write(self.messages[:count], prompt, self.tools))
        opened = [user("qz"), answer("zq")]
        self.header = self.text(self.write(opened[:1], True))[len(self.text(self.write(opened[:1], False))) :].strip()
        self.header = re.sub(r"<[^<>]*(?:think|channel).*", "", self.header, flags=re.DOTALL | re.IGNORECASE).strip()
        last, middle = (self.write(chat, False) or [] for chat in (opened, [*opened, user("q")]))
        last, middle = (ids[self.written_at(ids, ["zq"]) :] for ids in (last, middle))
        both = last[: shared_length(last, middle)]  # what closes an answer, whatever follows
        closing = [token for token in both if token in self.stops and not STARTS.search(self.text([token]))]
        ends = [ids[:1] for ids in (last, middle) if ids and ids[0] in self.stops]
        self.turn_ends = {closing[-1]} if closing else {*itertools.chain(*ends)}

    def write(self, messages: list[Any], prompt: bool, tools: Any = None) -> list[int] | None:
        """Return the ids of a chat, or None if the template refuses it."""
        options = {"tools": tools, "add_generation_prompt": prompt, "return_dict": True, **self.variables}
        for chat in (messages, [*map(arguments_as_text, messages)]):
            with suppress(Exception):  # a template raises what it likes
                if not self.none:
                    return [*self.tokenizer.apply_chat_template(chat, **options)["input_ids"]]
                # apply_chat_template drops what is None, servers don't
                named = {**self.tokenizer.special_tokens_map, **options, "return_dict": False}
                (text,), _ = render_jinja_template([chat], chat_template=self.tokenizer.chat_template, **named)
                return [*self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        return None

    def text(self, ids: Sequence[int] | None) -> str:
        return str(self.tokenizer.decode(ids or [], clean_up_tokenization_spaces=False))

    def words(self, i: int) -> list[str]:
        """Return what an answer says, calls, each thing apart."""
        message = self.messages[i]
        content = message["content"] or ""
        thoughts = IN_TAGS.findall(content)
        said = IN_TAGS.sub("", content)
        return [
            text for text in (message.get("reasoning_content", ""), *thoughts, said, *self.calls(i)) if text.strip()
        ]

    def calls(self, i: int) -> list[str]:
        """Return the names and values of an answer's calls."""
        calls = [inner["function"] for inner in self.messages[i].get("tool_calls", ())]
        return [str(value) for inner in calls for value in (inner["name"], *leaves(inner["arguments"]))]

    def written_at(self, ids: Sequence[int], words: list[str]) -> int:
        """Return where all of the words have been written."""
        wanted = [forms(word) for word in words]
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            seen = squeeze(self.text(ids[:middle]))
            low, high = (low, middle) if all(any(f in seen for f in word) for word in wanted) else (middle + 1, high)
        return low

    def completion(self, ids: list[int], i: int) -> tuple[list[int], bool]:
        """Return what is written of the ids that a finished chat has behind the prompt, and whether it is closed."""
        said = self.written_at(ids, self.words(i))
        ends = [at for at in range(said, len(ids)) if ids[at] in self.stops]
        turns = [at for at in ends if ids[at] in self.turn_ends]
        if not ends:
            return ids, False
        thought_only = not self.messages[i]["content"] and not self.calls(i)  # an empty answer may follow it
        return ids[: (turns[-1 if thought_only else 0] if turns else ends[-1]) + 1], True

    def begins_at(self, i: int, start: int) -> tuple[int | str, set[str]]:
        """Return where answer `i` begins in the chat that ends with it, or why nowhere, and what to say of it."""
        whole = self.ids(i + 1)
        if whole is None:
            return "the template refuses the chat that ends here", set()
        follows = i and self.messages[i - 1]["role"] == "assistant"
        prompt = self.ids(i, True) if i else None
        same = shared_length(prompt or [], whole)
        absent = self.text((prompt or [])[same:])
        added = (prompt or [])[shared_length(prompt or [], self.ids(i) or []) :] or (prompt or [])[-8:]
        headed = self.header in self.text(added)
        opens = not headed and squeeze(self.text(whole[same:])).startswith(squeeze(self.header))
        if prompt is not None and not absent.strip() and not opens and (headed or not follows):
            return same, set()
        if prompt and headed and squeeze(self.text(prompt)) == squeeze(self.text(whole[:start])):
            return start, set()  # but for white space
        if OPENED.fullmatch(absent) and re.search("think|thought|reason", absent, re.IGNORECASE):
            return same, {"thought"}
        if re.search("think|thought|reason", absent) and not TAG.search(absent):  # opened in words
            return same, {"thought"}
        if absent and headed and squeeze(absent) == squeeze(self.header):
            return same, {"prompt"}
        if absent.strip() and self.header.endswith(absent.strip()):  # what it ends with, words
            return same, {"thought"}
        # No prompt leads to it, or another one: it still begins behind a header, if templates write one.
        before = self.text(whole[:start]).rstrip()
        opened = re.sub(r"(?:<[^<>]*think[^<>]*>|\s)*$", "", before, flags=re.IGNORECASE)
        if {before, opened} & {text for text in (before, opened) if text.endswith(self.header)} or follows or opens:
            return start, {"prompt"} if i else set()
        if not i:
            return start, set()
        return f"{absent[-60:]!r} of the prompt is not in the chat", set()

    def compare(self, i: int, ids: list[int], start: int, end: int) -> tuple[int, str, set[str]]:
        """Return how far a supervised part is what the model has to write as answer `i`, or why not; what to say."""
        begin, notes = self.begins_at(i, start)
        whole = self.ids(i + 1) or []
        if isinstance(begin, str):
            return 0, begin, notes
        if MARK in self.tokenizer.chat_template and OPENED.fullmatch(self.text(whole[start:begin])):
            notes = notes | {"thought"} if self.text(whole[start:begin]).strip() else notes
            begin = start  # a mark may take the whole of a thought that the prompt opens
        if ids[:start] != whole[:begin]:
            return 0, f"begins behind {self.text(ids[:start])[-50:]!r}, not {self.text(whole[:begin])[-50:]!r}", notes
        written, closed = self.completion(whole[begin:], i)
        trained = ids[start:end]
        while not closed and written and not self.text(written[-1:]).strip():
            written.pop()
        size = len(written)
        if trained[:size] == written and not closed:  # the token that closes it in longer chats
            closing = next((at for at in range(size, len(trained)) if self.text([trained[at]]).strip()), len(trained))
            if closing == len(trained):
                return closing, "", notes
            return (closing + 1 if trained[closing] in self.stops else size), "", notes
        rest = self.text(whole[begin:]).strip()
        if closed and rest == self.text(trained).strip() and not squeeze(TAG.sub("", rest[len(self.text(written)) :])):
            return (
                len(trained),
                "",
                notes,
            )  # to the end of the text: which of its closing tokens ends a turn, servers say
        if trained[:size] == written:
            spaces = MARK in self.tokenizer.chat_template and not self.text(trained[size:]).strip()
            return len(trained) if spaces else size, "", notes  # a mark may take a line break more
        return 0, f"trains {self.text(trained)[-60:]!r}, not {self.text(written)[-60:]!r}", notes

    def judge(self, documents: Documents, warnings: str) -> str:
        """Return what is wrong with the rows of a chat, or nothing."""
        chats = [self.ids(count) for count in range(1, len(self.messages) + 1)]
        left = {*self.answers}
        notes = {"empty"} if any(not self.words(i) for i in left) else set()
        stopped = len(documents.lengths) > 0
        for span in documents.spans():
            ids, marked = documents.ids[span].tolist(), documents.supervised[span]
            # It may end with the next role's token, which a chat that the next turn changes has nowhere.
            begun = any(chat and chat[: len(ids)] == ids for chat in chats)
            if ids not in chats and not (marked[-1] and (begun or (ids[-1] in self.turn_ends and ids[:-1] in chats))):
                return "ids are not those of apply_chat_template"
            ended = False
            edges = np.flatnonzero(np.diff(np.concatenate([[0], marked, [0]]))).reshape(-1, 2).tolist()
            for start, end in edges:
                while start < end:  # answers may follow each other without a header
                    found = {i: self.compare(i, ids, start, end) for i in sorted(left)}
                    fitting = next((i for i, (size, _, _) in found.items() if size), None)
                    if fitting is None:
                        return "; ".join(f"{i}: {reason}" for i, (_, reason, _) in found.items()) or "too many parts"
                    size, _, said_of_it = found[fitting]
                    notes |= said_of_it
                    left.remove(fitting)
                    start += size
                    ended |= ids[start - 1] in self.stops or ids[start - 2] in self.stops
            stopped &= ended
        if left := {i for i in left if self.words(i)}:
            return f"not trained on: {left}"
        said = {remark["kind"] for remark in documents.remarks} - {"split", "date", "special"}
        said |= {"stop"} if "learn to stop" in warnings else set()
        notes |= set() if stopped else {"stop"}
        return f"says {sorted(said)}, not {sorted(notes)}" if said != notes else ""

    def explains(self, code: str) -> bool:
        """Return whether the template can't write this chat for the reason that this code stands for."""
        chats = {i: self.ids(i + 1) for i in self.answers}
        if code == "template-refuses":
            return None in (*chats.values(), *(self.ids(i, True) for i in self.answers if i))
        if code == "tools-not-written":
            return self.write(self.messages, False, self.tools) == self.write(self.messages, False, None)
        if code == "not-written":
            texts = {i: squeeze(self.text(chats[i])) for i in self.answers}
            tails = {
                i: squeeze(self.text((chats[i] or [])[shared_length(chats[i] or [], self.ids(i, True) or []) :]))
                for i in self.answers
            }
            last = max(self.answers)
            others = [forms(m["content"]) for m in self.messages[:last] if m["role"] != "assistant"]
            own = [(tails[i], forms(word)) for i in self.answers for word in self.words(i)]
            # Earlier calls and their results are what the last answer is given.
            own += [(texts[last], [tails[i]]) for i in self.answers if i < last and self.calls(i)]
            wanted = [*own, *((texts[last], words) for words in others)]
            return any(not any(form in text for form in words) for text, words in wanted)
        if code == "opens-always":
            return str(self.tokenizer.eos_token) not in self.text(self.ids(2))
        if code == "answer-not-found":
            return any(not self.text(chats[i]).startswith(self.text(self.ids(i, True))) for i in self.answers)
        return code in EXPLAINED


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def squeeze(text: str) -> str:
    return "".join(text.split())


def forms(text: str) -> list[str]:
    """Return how templates write a text: as it is, or as JSON with or without escapes."""
    return [squeeze(form) for form in (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])]


def read_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as a mapping, which servers make of JSON before a template is given them."""
    inner = given["function"]
    read = json.loads(inner["arguments"]) if isinstance(inner["arguments"], str) else inner["arguments"]
    return {**given, "function": {**inner, "arguments": read}}


def leaves(value: Any) -> Iterator[Any]:
    """Yield names and values in a call's arguments."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    elif not isinstance(value, bool) and value is not None:
        yield value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="templates whose name has this in it")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=[*KINDS])
    parser.add_argument("--docs", type=Path)
    parser.add_argument("-v", action="store_true", help="print reasons and warnings")
    parser.add_argument("-vv", action="store_true")
    options = parser.parse_args()
    lines = [f"| template | {' | '.join(options.kind)} |", f"|---|{'---|' * len(options.kind)}"]
    print(*lines, sep="\n", flush=True)
    folder = Path(tempfile.mkdtemp())
    for path in sorted(path for given in options.folders for path in given.glob("*.jinja")):
        if options.only.lower() not in path.name.lower():
            continue
        tokenizer = make_tokenizer(folder, path.read_text(encoding="utf-8"))
        verdicts = {kind: try_chat(tokenizer, KINDS[kind][1], {}) for kind in options.kind}
        lines.append(f"| {path.stem} | {' | '.join(verdict.cell for verdict in verdicts.values())} |")
        print(lines[-1], flush=True)
        if options.v:
            for kind, verdict in verdicts.items():
                if verdict.state not in ("ok", *(["R not-written"] if not options.vv else [])):
                    print(f"    {kind}: {verdict.state} {verdict.why}"[:400], flush=True)
    if options.docs:
        text = options.docs.read_text(encoding="utf-8")
        start, end = (text.index(mark) for mark in MARKS)
        table = "\n".join(lines)
        options.docs.write_text(f"{text[: start + len(MARKS[0])]}\n{table}\n{text[end:]}", encoding="utf-8")


if __name__ == "__main__":
    main()
