"""Try chat templates on chats of many kinds: which tokens the loss is computed on, what is refused and why.

    python benchmarks/chat_templates.py FOLDER [FOLDER …] [--only NAME] [--kind a] [--docs docs/data.md]

FOLDER has templates as models publish them (*.jinja). Each gets a tiny tokenizer that has its special tokens. A row is
right if its ids are those of `apply_chat_template`, and if what is supervised is what the model has to write behind the
prompt of inference (`add_generation_prompt`), to the token that ends the turn. `--docs` writes the table there.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass import tiny
from windlass.data.audit import audit_split, find_warnings
from windlass.data.formats import choose_format
from windlass.data.messages import arguments_as_text
from windlass.data.tokenize import Documents, tokenize
from windlass.errors import UserError
from windlass.runfile import Data

TAG = re.compile(r"</?[|｜]?[A-Za-z_][A-Za-z_0-9▁|｜:]*[|｜]?>|\[/?[A-Z_]{2,}\]")
PLAIN_TAG = re.compile(r"</?(?:b|i|think|tools?|tool_\w+|function\w*|parameter|arg_\w+)>")  # tokens, but not special
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


def make_tokenizer(folder: Path, template: str, vocab: int = 600) -> Any:
    """Return a tiny tokenizer that has the special tokens which the template spells, and ends turns as it does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(folder, vocab))
    found = [*dict.fromkeys(TAG.findall(template))]
    special = [
        token
        for token in found
        if not re.match(r"</?(?:b|i|think|tools?|tool_\w+|function\w*|parameter|arg_\w+)>", token)
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([token for token in found if token not in special])
    tokenizer.chat_template = template
    return tokenizer


def try_chat(tokenizer: Any, row: dict[str, Any], keys: dict[str, Any]) -> Verdict:
    """Turn a chat into rows as training does, and judge them."""
    try:
        kind = choose_format(Data(**keys), [*row], tokenizer)
        rendered = kind.render(row)
        documents = tokenize([row], kind, tokenizer, 4096)
    except UserError as error:
        problem = error.problems[0]
        return Verdict(f"R {problem.code}", f"{problem.problem} | {problem.hint}")
    warnings = [*find_warnings({"splits": {"train": audit_split(documents, tokenizer)}, "batching": {}})]
    why = judge(tokenizer, row, rendered, documents, keys)
    return Verdict("W" if why else "ok", why, len(rendered), tuple(warnings))


def judge(tokenizer: Any, row: dict[str, Any], rendered: Any, documents: Documents, keys: dict[str, Any]) -> str:
    """Return what is wrong with the rows of a chat, or nothing."""
    messages = row["messages"]
    tools = row.get("tools") if keys.get("tools") != "ignore" else None
    options = {"tools": tools, "tokenize": False, **keys.get("template_kwargs", {})}

    def write(count: int, prompt: bool = False) -> str:
        chat = messages[:count]
        try:
            return str(tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, **options))
        except TypeError:  # arguments as text
            return str(
                tokenizer.apply_chat_template([*map(arguments_as_text, chat)], add_generation_prompt=prompt, **options)
            )

    finished = set()
    for count in range(1, len(messages) + 1):
        with suppress(Exception):  # a template that refuses the first turns alone
            finished.add(tuple(tokenizer(write(count), add_special_tokens=False)["input_ids"]))
    for span, one in zip(documents.spans(), rendered, strict=True):
        ids = documents.ids[span]
        if tuple(ids.tolist()) not in finished:
            return "ids are not those of apply_chat_template"
        marked = "".join(one.text[start:end] for start, end in one.supervised)
        if tokenizer.decode(ids[documents.supervised[span]].tolist()).split() != marked.split():
            return f"the tokens supervised are not those of {marked!r}"
    left = {i for i, message in enumerate(messages) if message["role"] == "assistant"}
    for one in rendered:
        spans = [*one.supervised]
        if len(spans) > len(left):  # several marks in a turn
            for i in reversed(range(len(spans) - 1)):
                if spans[i][1] == spans[i + 1][0]:
                    spans[i : i + 2] = [(spans[i][0], spans[i + 1][1])]
        for start, end in spans:
            reasons = {i: compare(one.text[:start], one.text[start:end], write, i, messages) for i in sorted(left)}
            fitting = [i for i, reason in reasons.items() if not reason]
            if not fitting:
                return f"{one.text[start:end]!r} after {one.text[:start][-40:]!r} is no answer: {reasons}"
            left.remove(fitting[0])
    left = {i for i in left if messages[i]["content"] or messages[i].get("tool_calls")}
    return f"not trained on: {left}" if left else ""


def compare(before: str, part: str, write: Any, i: int, messages: list[Any]) -> str:
    """Return why a supervised part is not what the model has to write as message `i`, or nothing."""
    closing = rf"(?:\s|{TAG.pattern})*"
    after_answer = i > 0 and messages[i - 1]["role"] == "assistant"
    if i == 0 or after_answer:
        opened = rf"{closing}(?:\w+)?{closing}"
        if not re.match(opened + re.escape(messages[i]["content"].strip()), part):
            return "header supervised"
    else:
        seen, prompt = "".join(before.split()), "".join(write(i, True).split())
        if not prompt.startswith(seen):
            return "another prompt"
        absent = prompt[len(seen) :]
        if not re.fullmatch(rf"{closing}(?:thought)?{closing}", absent):
            return f"header supervised: {absent!r}"
    text = write(i + 1)
    rest = (text[len(before) :] if text.startswith(before) else text[text.rfind(part.strip()[:20]) :]).strip()
    written = part.strip()
    if written == rest:
        return ""
    ends = re.compile(rf"(?:\s|{TAG.pattern}|</s>)*$")
    if ends.sub("", written) == ends.sub("", rest) and (TAG.search(written[-20:]) or ends.sub("", rest) == rest):
        return ""  # to another of the tokens that end the turn, or to the one that follows
    return f"{rest!r} would have to be written"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="templates whose name has this in it")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=[*KINDS])
    parser.add_argument("--docs", type=Path)
    parser.add_argument("-v", action="store_true", help="print reasons and warnings")
    options = parser.parse_args()
    lines = [f"| template | {' | '.join(options.kind)} |", f"|---|{'---|' * len(options.kind)}"]
    print(*lines, sep="\n", flush=True)
    for path in sorted(path for folder in options.folders for path in folder.glob("*.jinja")):
        if options.only.lower() not in path.name.lower():
            continue
        with tempfile.TemporaryDirectory() as name:
            tokenizer = make_tokenizer(Path(name), path.read_text(encoding="utf-8"))
            verdicts = {kind: try_chat(tokenizer, KINDS[kind][1], {}) for kind in options.kind}
        lines.append(f"| {path.stem} | {' | '.join(verdict.cell for verdict in verdicts.values())} |")
        print(lines[-1], flush=True)
        if options.v:
            for kind, verdict in verdicts.items():
                if verdict.why or verdict.warnings:
                    print(f"    {kind}: {verdict.why}", *verdict.warnings, sep="\n       ! ", flush=True)
    if options.docs:
        text = options.docs.read_text(encoding="utf-8")
        start, end = (text.index(mark) for mark in MARKS)
        table = "\n".join(lines)
        options.docs.write_text(f"{text[: start + len(MARKS[0])]}\n{table}\n{text[end:]}", encoding="utf-8")


if __name__ == "__main__":
    main()
