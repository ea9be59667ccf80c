"""Chats through templates that behave as published ones do: what is supervised, in which rows; what is refused."""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from text_run import prepare_rows, write_rows
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windlass import tiny
from windlass.data import chat
from windlass.data.chat import ChatTemplate, choose_template
from windlass.data.choose import choose_format
from windlass.data.prepare import PreparedData, prepare_data
from windlass.errors import UserError
from windlass.runfile import Data, RunFile

Prepare = Callable[..., PreparedData]
TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|return|>", "<think>", "</think>"]

ASK = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
TURN = "<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "<|end|>\n"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
MARKED = "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
# By what published templates do. All tokens but `<think>` are special in the tests' tokenizer.
TEMPLATES = {
    "plain": TOOLS + LOOP + ASK,
    "earlier answers rewritten": "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
    "<|assistant|>\n<think>\n\n</think>\n{{ m.content }}<|end|>\n{% else %}" + TURN + "{% endif %}{% endfor %}" + ASK,
    "another end token behind the last": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}" + ASK,
    "one end token more behind the last": LOOP + ASK + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
    "a thought opened by the prompt": LOOP + ASK.replace("\n{%", "\n<think>\n{%"),
    "end token that is the next role": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + ASK,
    "no end token behind the last": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if not loop.last or "
    "add_generation_prompt %}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt and "
    "messages[-1].role != 'assistant' %}<|assistant|>\n{% endif %}",
    "header with other white space": "{% for m in messages %}{% if m.role == 'assistant' %}Answer:\n{{ m.content }}"
    "{{ eos_token }}{% else %}Ask: {{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nAnswer: ' }}{% endif %}",
    "no header": "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}"
    "[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}",
    "roles renamed, trimmed": "{{ bos_token }}{% for m in messages %}"
    "<|{{ 'model' if m.role == 'assistant' else m.role }}|>\n"
    "{{ m.content | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|model|>\n{% endif %}",
    "thoughts cut off": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content.split('</think>')[-1] }}<|end|>\n"
    "{% endfor %}" + ASK,
    "tools before the last user": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if loop.index0 == ns.last %}"
    "[tools]{% endif %}" + TURN + "{% endfor %}" + ASK,
    "marked": MARKED + "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}" + ASK,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    made = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=600))
    made.add_special_tokens({"additional_special_tokens": [token for token in TOKENS if "think" not in token]})
    made.add_tokens(["<think>", "</think>"])
    return made


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Prepare:
    def make(rows: list[Any], template: str, **section: Any) -> PreparedData:
        return prepare_rows(tmp_path, rows, tokenizer, chat_template=template, **section)

    return make


def talk(*texts: str, system: str = "") -> list[dict[str, Any]]:
    """Return a chat of these texts, the user's first."""
    turns = zip(itertools.cycle(("user", "assistant")), texts, strict=False)
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *({"role": role, "content": text} for role, text in turns)]


def supervised(template: ChatTemplate, messages: list[Any], **more: Any) -> list[list[str]]:
    """Return the supervised texts of each row."""
    return [[row.text[start:end] for start, end in row.spans] for row in template.render(messages, **more)]


THREE = talk("Who?", "Crews.", "Why?", "Anchors.", "How?", "By hand.")
ENDED = ["Crews.<|end|>", "Anchors.<|end|>", "By hand.<|end|>"]
EMPTY = "<think>\n\n</think>\n"
EOS = [text.replace("<|end|>", "</s>") for text in ENDED]
EXPECTED = {
    "plain": [ENDED],
    "earlier answers rewritten": [[EMPTY + text] for text in ENDED],
    "another end token behind the last": [[text.replace("end", "return")] for text in ENDED],
    "one end token more behind the last": [[*ENDED[:2], "By hand.<|end|>\n</s>"]],
    "a thought opened by the prompt": [ENDED],
    "end token that is the next role": [["Crews.<|user|>", "Anchors.<|user|>", "By hand."]],
    "no end token behind the last": [[*ENDED[:2], "By hand."]],
    "header with other white space": [EOS],
    "no header": [EOS],
    "roles renamed, trimmed": [ENDED],
    "thoughts cut off": [ENDED],
    "tools before the last user": [[text] for text in ENDED],
    "marked": [ENDED],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_answer_is_supervised_once_from_behind_its_header_to_its_end(tokenizer: Any, name: str) -> None:
    template = ChatTemplate(tokenizer, TEMPLATES[name])
    for _ in range(2):  # the second time by the shape of the first
        assert supervised(template, THREE) == EXPECTED[name]
    assert list(template.shapes.values()) != [[]]
    if name != "marked":
        assert template.render_known(template.read(THREE), [1, 3, 5])  # rendered once, and found in its shape
    # A header is never supervised: not of a second answer in a row, nor of one that begins the chat.
    for messages in ([*THREE[:2], {"role": "assistant", "content": "More."}], THREE[1:4]):
        spans = list(itertools.chain(*supervised(template, messages)))
        assert len(spans) == 2
        assert not any(text.removeprefix(EMPTY).startswith(("<|assistant|>", "<|model|>", "Answer")) for text in spans)
    whole = supervised(template, [*THREE, {"role": "user", "content": "Thanks"}])
    assert [len(row) for row in whole] == [len(row) for row in EXPECTED[name]]  # nothing behind the last answer is


WORDS = st.text("ab <>/|\n{é", min_size=1, max_size=6).filter(str.strip)
TEXTS = st.one_of(
    WORDS, st.sampled_from(["<table>", " x ", "</think>y", "<think>z</think>w", "Answer:", "assistant", "ok", "<"])
)


@st.composite
def random_chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    texts = draw(st.lists(TEXTS, min_size=2, max_size=8))
    return talk(*texts, system=draw(st.sampled_from(["", "Be brief.", "b"])))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=random_chats(), turns=st.sampled_from(["auto", "each", "last"]))
@pytest.mark.parametrize("name", TEMPLATES)
def test_random_chats_have_the_ids_of_the_template_and_what_inference_would_write(
    tokenizer: Any, name: str, messages: list[Any], turns: str
) -> None:
    source = TEMPLATES[name]
    template = ChatTemplate(tokenizer, source, turns=turns)
    options = {"chat_template": source, "tokenize": False}

    def write(count: int, prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], add_generation_prompt=prompt, **options))

    wanted = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-1 if turns == "last" else 0 :]
    cut = name == "thoughts cut off" and [i for i in range(wanted[-1] + 1) if "think>" in messages[i]["content"]]
    if cut and {*cut} & {*wanted}:
        with refused("not-written"):
            template.render(messages)
        return
    try:
        rows = template.render(messages)
    except UserError:  # a user's text was lost; what earlier answers thought may be
        if not cut:
            raise
        return
    slow = template.render_found(template.read(messages), None, wanted)
    assert [(row.text, row.answers) for row in rows] == [(row.text, row.answers) for row in slow]
    answered = []
    for row in rows:
        rest = row.text.removeprefix(write(row.length))  # the next role's token, if that ends an answer
        assert row.text == write(row.length) + rest
        assert not rest or (rest in TOKENS and write(row.length + 1).startswith(row.text))
        for i, (start, end) in row.answers.items():
            answered.append(i)
            prompt, own = write(i, True), write(i + 1)
            assert row.text[:end].startswith(own[:start])
            if name not in ("a thought opened by the prompt", "header with other white space", "marked"):
                assert row.text[:start] == prompt
            if row.text[start:end] not in own[start:]:
                closing = row.text[start:end].removeprefix(own[start:].rstrip()).strip()
                assert closing in TOKENS
    assert sorted(answered) == wanted


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 3}}}
RESULT = {"role": "tool", "content": "21 degrees"}
CALLED = [*talk("Rome?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, *talk("", "Warm.")[1:]]
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
TRUNCATED = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + ASK
NINE = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception("
NINE += "'ids of length 9') }}{% endif %}{% endfor %}{% endfor %}" + LOOP + ASK
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + LOOP + ASK
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if thinking and m.reasoning_content %}<think>{{ m.reasoning_content }}"
)
THINKS += "</think>{% endif %}{{ m.content }}<|end|>\n{% endfor %}" + ASK
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}" + ASK
ALTERNATE = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
ALTERNATE += "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + ASK
USER_MARKED = "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'user' %}{% generation %}{{ m.content }}<|end|>"
USER_MARKED += "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}" + ASK
ALWAYS = "{% for m in messages %}" + TURN + "{% endfor %}<|assistant|>\n"
BEGUN = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.tool_calls %}<|calls_begin|>" + CALLS
BEGUN += "{% if m.tool_calls[1:] %}<|calls_end|>{% endif %}{% else %}<|end|>\n{% endif %}{% endfor %}" + ASK
THOUGHT = [*talk("Who?"), {"role": "assistant", "content": "Crews.", "reasoning_content": "Many hands."}]


@pytest.mark.parametrize(
    ("source", "row", "code", "place", "remedy"),  # of the hint, or words of the problem
    [
        # What is lost, by name: a call (with and without a column of tools), a result, the system message, reasoning.
        (TRUNCATED, {"messages": CALLED}, "not-written", "row 1", "leaves out a tool call"),
        (TRUNCATED + "{# tools #}", {"messages": CALLED, "tools": WEATHER}, "not-written", "row 1", None),
        (NO_SYSTEM, {"messages": talk("Who?", "Crews.", system="Be brief.")}, "not-written", "row 1", None),
        (BEGUN, {"messages": CALLED}, "not-written", "row 1", "leaves out the end of a tool call: '<|calls_end|>'"),
        (THINKS, {"messages": THOUGHT}, "not-written", "data.reasoning", {"template_kwargs": {"thinking": True}}),
        (LOOP + ASK, {"messages": THOUGHT}, "not-written", "data.reasoning", {"reasoning": "drop"}),
        (LOOP + ASK, {"messages": CALLED, "tools": WEATHER}, "tools-not-written", "data.tools", {"tools": "ignore"}),
        # What templates refuse, and what they are refused for.
        ("{% for t in tools %}{% endfor %}" + LOOP + ASK, {"messages": THREE}, "template-refuses", "row 1",
         {"template_kwargs": {"tools": []}}),
        ("{% for t in tools %}{% endfor %}" + LOOP + ASK, {"messages": THOUGHT}, "template-refuses", "row 1",
         {"template_kwargs": {"tools": []}, "reasoning": "drop"}),
        (NINE, {"messages": [CALLED[0], {**CALLED[1], "tool_calls": [{**CALL, "id": "x" * 28}]}]}, "template-refuses",
         "row 1", None),
        (ALTERNATE, {"messages": [*THREE, *THREE[-1:]]}, "template-refuses", "row 1", None),
        (SLOW, {"messages": THREE}, "template-slow", "data.chat_template", None),
        ("{% for m in", {"messages": THREE}, "template-syntax", "data.chat_template", None),
        (USER_MARKED, {"messages": THREE}, "generation-marks", "data.chat_template",
         "{% generation %} marks enclose a user's turn"),
        (ALWAYS.replace("<|end|>\n", ""), {"messages": THREE}, "opens-always", "data.chat_template",
         "opens another answer at the end of every chat"),
        # What is wrong with messages.
        (LOOP + ASK, {"messages": [*THREE, {"role": "wizard", "content": "a"}]}, "unknown-role", "row 1", None),
        (LOOP + ASK, {"messages": [THREE[0], RESULT, THREE[1]]}, "no-call", "row 1", None),
        (LOOP + ASK, {"messages": [{"role": "user", "content": None}, THREE[1]]}, "no-content", "row 1", None),
        (LOOP + ASK, {"messages": THREE, "tools": "[{"}, "invalid-tools", "row 1", None),
    ],
)  # fmt: skip
@pytest.mark.fault(
    "a template that opens another answer behind every chat",
    "`windlass data`",
    "opens another answer at the end of every chat",
)
@pytest.mark.fault("a call that the chat template leaves open", "`windlass data`", "leaves out the end of a tool call")
@pytest.mark.fault("a call that the chat template leaves out", "`windlass data`", "leaves out a tool call")
@pytest.mark.fault(
    "marks around the user's turn in a chat template", "`windlass data`", "{% generation %} marks enclose a user's turn"
)
def test_what_is_refused_and_a_hint_that_makes_it_pass(
    prepared: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    row: Any,
    code: str,
    place: str,
    remedy: dict[str, Any] | str | None,
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    with refused(code, place) as problems:
        prepared([row], source)
    (problem,) = problems
    assert "row 1" in f"{problem.where}{problem.problem}" or code == "template-syntax"
    assert problem.hint
    if isinstance(remedy, str):
        assert remedy in problem.problem
    elif remedy:
        (name, value), *_ = remedy.items()
        written = json.dumps(value) if isinstance(value, dict) else value
        assert f"data.{name}: {written}" in problem.hint
        prepared([row], source, **remedy)


def test_tools_are_ignored_only_where_that_makes_the_row_pass(tokenizer: Any) -> None:
    for names, hint in ([], "leave out such rows"), (["<|im_start|>", "<|im_end|>"], "data.chat_template: chatml"):
        with refused("tools-not-written", "data.tools") as problems:
            ChatTemplate(tiny_tokenizer(names), TRUNCATED).render(CALLED, tools=WEATHER)
        assert problems[0].hint.startswith(hint)
    with refused("tools-not-written", "data.tools") as problems:
        ChatTemplate(tokenizer, LOOP + ASK).render(CALLED, tools=WEATHER)
    assert problems[0].hint == "data.tools: ignore trains on the calls without them"


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("says", "messages", "hint"),
    [
        ("After the optional system message, roles must alternate", [SYSTEM, *THREE, THREE[1]], "join messages"),
        ("After the optional system message, roles must alternate", THREE[1:], "begin with a user"),
        ("After the optional system message, roles must alternate", [*THREE[:2], SYSTEM, *THREE[2:]], "system message"),
        ("roles must alternate", CALLED, "writes no tool results"),
        ("System role not supported", [SYSTEM, *THREE], "system message"),
        ("Only user, system and assistant roles are supported", THREE, "begin with a user"),
    ],
)
def test_hints_fit_the_roles_of_the_refused_chat(tokenizer: Any, says: str, messages: list[Any], hint: str) -> None:
    with refused("template-refuses") as problems:
        ChatTemplate(tokenizer, f'{{{{ raise_exception("{says}") }}}}').render(messages)
    assert hint in problems[0].hint


MARKED_LAST = "{% if loop.last %}<think>\n\n</think>\n{% endif %}"
MARKED_REWRITTEN = MARKED.replace("{% generation %}", "{% generation %}" + MARKED_LAST)
MARKED_REWRITTEN += "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}" + ASK


@pytest.mark.fault(
    "a template with {% generation %} marks that rewrites earlier answers",
    "`windlass data`",
    "writes turns differently once later ones follow",
)
def test_marks_in_a_template_that_rewrites_earlier_answers_give_each_its_own_row(
    tokenizer: Any, prepared: Prepare
) -> None:
    template = ChatTemplate(tokenizer, MARKED_REWRITTEN)
    for _ in range(2):
        assert supervised(template, THREE) == [[EMPTY + text] for text in ENDED]
    (fact,) = prepared([{"messages": THREE}], MARKED_REWRITTEN).audit["facts"]
    assert "1 chat became 3 rows: the chat template writes turns differently once later ones follow" in fact
    with refused("turns-rewritten", "data.turns") as problems:
        prepared([{"messages": THREE}], MARKED_REWRITTEN, turns="all")
    assert "data.turns: auto" in problems[0].hint
    assert supervised(ChatTemplate(tokenizer, MARKED_REWRITTEN, turns="last"), THREE) == [[EMPTY + ENDED[-1]]]


READS: dict[str, Callable[[int, list[Any]], bool]] = {  # of an answer, of its beginning, and of other messages
    "m.content != 'No.'": lambda i, chat: chat[i]["content"] != "No.",
    "m.content[0] == 'N'": lambda i, chat: chat[i]["content"][0] == "N",
    "messages[0].content | length > 3": lambda _, chat: len(chat[0]["content"]) > 3,
    "loop.index0 == 1 or messages[loop.index0 - 2].content | lower == 'yes.'": lambda i, chat: (
        i == 1 or chat[i - 2]["content"].lower() == "yes."
    ),
}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.sampled_from(["No.", "Yes.", "N", "by hand"]), min_size=2, max_size=6))
@pytest.mark.parametrize("condition", READS)
def test_marks_that_depend_on_what_is_said_are_those_of_each_chat(
    tokenizer: Any, condition: str, texts: list[str]
) -> None:
    """If the condition holds, the marks enclose what the template writes before the answer; the text is the same."""
    answer = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    source = "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role != 'assistant' %}{{ m.content }}"
    source += f"{{% elif {condition} %}}{answer.replace('{{', '-- {{')}{{% else %}}-- {answer}{{% endif %}}\n"
    source += "{% endfor %}" + ASK
    template = ChatTemplate(tokenizer, source)
    template.render(THREE)  # by whose shape none of the others is marked
    messages = talk(*texts)
    (row,) = template.render(messages)
    assert row.text == tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
    expected = []
    for i, message in enumerate(messages):
        marked = f"{'-- ' if READS[condition](i, messages) else ''}{message['content']}<|end|>"
        expected += [marked] if message["role"] == "assistant" else []
    assert [row.text[start:end] for start, end in row.spans] == expected


ASKS = (  # what a template may ask of a content by other ways
    *READS,
    "m.content | length > 12",
    "'HAND' in m.content | upper",
    "m.content in ['Yes.', 'No.']",
    "m.content is eq('No.')",
    "m.content + '!' == 'No.!'",
    "mark in m.content",
    "is_long(m.content) == 'long'",
    "ns.words | length > 2",
    "text.isdigit()",
)
SETS = "{% set mark = 'hand' %}{% set ns = namespace(words='') %}{% macro is_long(x) %}"
SETS += "{% if x.split(' ') | length > 2 %}long{% endif %}{% endmacro %}"
INSIDE = "{% set text = m.content %}{% set ns.words = text.split(' ') %}"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.sampled_from(["No.", "Yes.", "1", "Many hands, by turns."]), min_size=4, max_size=4))
@pytest.mark.parametrize("condition", ASKS)
def test_last_answers_that_depend_on_what_is_said_are_those_of_each_chat(
    tokenizer: Any, condition: str, texts: list[str]
) -> None:
    """If the condition holds, the template writes a thought before the last answer: an earlier one has no shape."""
    source = SETS + "{% for m in messages %}" + INSIDE + "<|{{ m.role }}|>\n"
    source += f"{{% if m.role == 'assistant' and loop.last and ({condition}) %}}<think>\n\n</think>\n{{% endif %}}"
    source += "{{ m.content }}<|end|>\n{% endfor %}" + ASK
    template = ChatTemplate(tokenizer, source)
    for messages in (THREE[:4], talk(*texts)):
        rows = template.render(messages)
        slow = template.render_found(template.read(messages), None, [1, 3])
        assert [(row.text, row.answers) for row in rows] == [(row.text, row.answers) for row in slow]


def test_the_hint_on_a_missing_bos_token_makes_the_row_pass(prepared: Prepare, tokenizer: Any) -> None:
    source = "{{ bos_token + '' }}" + LOOP + ASK
    bos, tokenizer.bos_token = tokenizer.bos_token, None
    try:
        with refused("template-refuses", "row 1") as problems:
            prepared([{"messages": THREE}], source)
        assert problems[0].hint.startswith("data.template_kwargs: {bos_token: ''}")
        assert len(prepared([{"messages": THREE}], source, template_kwargs={"bos_token": ""}).train) == 1
    finally:
        tokenizer.bos_token = bos


IF_ANSWER = "{% for m in messages %}{% if m.role == 'assistant' %}"
ELSE_TURN = "{% else %}" + TURN + "{% endif %}{% endfor %}" + ASK
ELSE_THINKS = ELSE_TURN.replace(ASK, ASK.replace("\n{%", "\n<think>\n{%"))
TWO_MARKS = IF_ANSWER + "<|assistant|>\n{% generation %}So:{% endgeneration %} now {% generation %}{{ m.content }}"
TWO_MARKS += "{% endgeneration %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}<|end|>\n{% endfor %}" + ASK
NEVER_AGAIN = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
NEVER_AGAIN += "{% if loop.previtem.role == 'user' %}<|assistant|>{% endif %}{{ m.content }}<|end|>{% endif %}"
NEVER_AGAIN += "{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}<|assistant|>{% endif %}"
IN_WORDS = TEMPLATES["no end token behind the last"].replace("|>\n{% endif %}", "|>\nHere is how:\n{% endif %}")
IN_WORDS = IN_WORDS.replace("<|end|>\nHere is how:\n", "<|end|>\n")
OPENS = "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}" + CALLS + "<|end|>{% else %}{{ m.content }}"
OPENS += "{% if m.role == 'assistant' %}<|return|>{% endif %}{% endif %}</s>{% endfor %}<|assistant|>"
OPENED = ['weather{"city": "Rome", "days": 3}<|end|></s>', "Warm.<|return|></s>"]
HEADER = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
HEADER += "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
MARKED_END = TEMPLATES["marked"] + "{% if messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}"
MARKED_END += "{% endgeneration %}{% endif %}"
ASKS_NONE = "{% for m in messages %}<|{{ m.role }}|>\n" + CALLS + "{% if m['content'] is not none %}({{ m.content }})"
ASKS_NONE += "{% endif %}<|end|>\n{% endfor %}" + ASK
MEASURES = ASKS_NONE.replace("|>\n", "|>\n{{ m['content'] | length }}", 1)
TWICE = [*THREE[:2], {"role": "assistant", "content": "More."}]


@pytest.mark.parametrize(
    ("source", "chat", "answers", "remarks"),
    [
        # An answer that is opened behind every chat: turns end with the tokenizer's end token, or with another one that
        # the template closes all of them with. It's no part of a call.
        (ALWAYS.strip().replace("<|end|>\n", "</s>") + "{{ '\n' }}", THREE, [text[:-7] + "</s>" for text in ENDED], {}),
        (ALWAYS.strip() + "{{ '\n' }}", THREE, ENDED, {}),
        (ALWAYS.replace("<|end|>\n", "<|end|>"), THREE, [f"\n{text}" for text in ENDED], {}),
        (OPENS, CALLED, OPENED, {}),
        (OPENS + "<think></think>", CALLED, OPENED, {"thought"}),
        (LOOP + ASK.replace("\n{%", "\nHere is how:\n{%"), THREE, ENDED, {"thought"}),  # a thought opened in words
        (LOOP + ASK.replace("\n{%", " {%"), THREE, ENDED, {"blank"}),
        # Several answers in a row, without a prompt; the header of the next one is no end of the first.
        (HEADER, TWICE, ["Crews.", "More."], None),
        (NEVER_AGAIN, TWICE, ["Crews.<|end|>", "More.<|end|>"], {"prompt"}),
        (IN_WORDS, TWICE, ["Crews.<|end|>", "More."], {"prompt", "thought"}),
        # An answer that isn't written: no thought, and not that the model learns to end at once.
        ("{% for m in messages %}{% if m.content %}" + TURN + "{% endif %}{% endfor %}" + ASK,
         talk("Who?", "Crews.", "Thanks", ""), None, {"prompt"}),
        # Marks around a header that lacks the prompt's thought; that lose the header and gain the end token; that end
        # with the token that generation ends at, and a new line, as LFM2.5's; several in a turn; of the text's end.
        (IF_ANSWER + "{% generation %}" + TURN + "{% endgeneration %}" + ELSE_THINKS, THREE,
         [f"{text}\n" for text in ENDED], {"thought"}),
        (IF_ANSWER + "{% generation %}<|{{ m.role }}|>\n{{ m.content }}{% endgeneration %}<|end|>\n" + ELSE_TURN,
         THREE, ENDED, None),
        (IF_ANSWER + "<|{{ m.role }}|>{% generation %}\n{{ m.content }}<|end|>{% endgeneration %}\n" + ELSE_TURN,
         THREE, ENDED, None),
        (IF_ANSWER + "<|assistant|>\n{% generation %}{{ m.content }}{{ eos_token }}\n{% endgeneration %}" + ELSE_TURN,
         THREE, EOS, None),
        (TWO_MARKS, THREE[:4], ["So:", ENDED[0], "So:", ENDED[1]], None),
        (TWO_MARKS.replace("<|end|>\n", ""), THREE[:3], ["So:", "Crews.<|user|>"], None),
        (MARKED_END, [*THREE, *talk("Thanks")], ENDED, None),
        (MARKED_END, THREE[:2], [ENDED[0] + "</s>"], None),
        # Answers that call tools have no content where the template asks, and an empty one where it measures it.
        (ASKS_NONE, CALLED[:2], ['weather{"city": "Rome", "days": 3}<|end|>'], None),
        (MEASURES, CALLED[:2], ['0weather{"city": "Rome", "days": 3}()<|end|>'], None),
    ],
)  # fmt: skip
def test_what_a_template_supervises_and_what_is_remarked_on(
    tokenizer: Any, source: str, chat: list[Any], answers: list[str] | None, remarks: set[str] | None
) -> None:
    (row,) = ChatTemplate(tokenizer, source).render(chat)
    assert answers is None or [row.text[start:end] for start, end in row.spans] == answers
    assert remarks is None or {*row.remarks} == {*remarks}
    if row.remarks.get("thought") and source.startswith(OPENS):
        assert row.remarks["thought"] == "'<|assistant|><think></think>'"


NEXT_ROLE = "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
NEXT_ROLE += "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
NEXT_ROLE += "{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}" + ASK
NEXT_MARKED = NEXT_ROLE.replace("|>\n{{ m.content }}{% for", "|>\n{% generation %}{{ m.content }}{% for").replace(
    "{% else %}", "{% endgeneration %}{% else %}"
)
CLOSED = NEXT_ROLE.replace("{% else %}", "{% if not m.tool_calls %}<|end|>{% endif %}{% else %}")


@pytest.mark.parametrize(
    ("source", "stops", "ends"),
    [
        # The next role's token is the end: by the model's generation_config.json, or by the end of other answers.
        (NEXT_ROLE, ["</s>", "<|user|>", "<|tool|>"], ["<|tool|>", "<|user|>"]),
        (NEXT_ROLE, [], ["<|tool|>", "<|user|>"]),
        (NEXT_MARKED, [], ["<|tool|>", "<|user|>"]),
        (NEXT_MARKED.replace("{% endgeneration %}", "{% endgeneration %}{{ '\n' }}"), [], ["\n<|tool|>", "\n<|user|>"]),
        # Behind a text it is another token than behind a call; what ends already takes no more.
        (CLOSED, ["<|end|>", "<|tool|>", "<|user|>"], ["<|tool|>", "<|end|>"]),
        (CLOSED, ["<|end|>"], ["", "<|end|>"]),
    ],
)
def test_the_token_that_generation_ends_at_is_trained_behind_calls_and_texts(
    tokenizer: Any, tmp_path: Path, source: str, stops: list[str], ends: list[str]
) -> None:
    tokenizer.add_tokens(["<call>", "</call>"])
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(stops)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids} if stops else {}))
    template = ChatTemplate(AutoTokenizer.from_pretrained(folder), source)
    messages = [*CALLED, *talk("Thanks")]
    call = '<call>weather{"city": "Rome", "days": 3}</call>'
    assert supervised(template, messages) == [[call + ends[0], "Warm." + ends[1]]]
    alone = replace(template, turns="each", shapes={})
    assert supervised(alone, messages) == [[call + ends[0]], ["Warm." + ends[1]]]
    for row in alone.render(messages):  # the row ends with it, and has nothing of the turn that it begins
        assert any(write(alone, messages[:count]).startswith(row.text) for count in (row.length, row.length + 1))
        assert row.text.rstrip().endswith(tuple(row.text[start:end] for start, end in row.spans))


@pytest.mark.parametrize("stops", [[], ["</s>", "<|user|>"]])
def test_answers_whose_thoughts_are_dropped_later_and_last_ones_end_as_others_do(
    tokenizer: Any, tmp_path: Path, stops: list[str]
) -> None:
    tokenizer.save_pretrained(tmp_path)
    ends = tokenizer.convert_tokens_to_ids(stops)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends} if stops else {}))
    thinks = "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template = ChatTemplate(AutoTokenizer.from_pretrained(tmp_path), NEXT_ROLE.replace("{{ m", thinks + "{{ m", 1))
    thought = "<think>Many hands.</think>"
    last = "<|user|>" if stops else ""  # which generation ends at
    assert supervised(template, [*THOUGHT, *THOUGHT]) == [[f"{thought}Crews.<|user|>"], [f"{thought}Crews.{last}"]]
    for _ in range(2):  # the second time by the shape of the first
        (row,) = template.render(THREE)
        assert [row.text[start:end] for start, end in row.spans][1:] == ["Anchors.<|user|>", f"By hand.{last}"]
        assert row.text == write(template, THREE) + last
    assert template.render_known(template.read(THREE), [1, 3, 5]) == [row]
    assert supervised(template, CALLED[:2])[0][0].endswith("</call>")  # a call's end is another
    data = Data(chat_template=LOOP)
    plain, named = (choose_format(data, ["messages"], each).identity for each in (tokenizer, template.tokenizer))
    assert (plain == named) == (not stops)  # what the tokens are kept under


def write(template: ChatTemplate, messages: list[Any]) -> str:
    return str(template.tokenizer.apply_chat_template(messages, chat_template=template.template, tokenize=False))


DROPPED = "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
DROPPED += "{% generation %}{% if m.reasoning_content and not messages[loop.index:] | selectattr('role', 'eq', "
DROPPED += "'assistant') | rejectattr('tool_calls') | list %}<think>{{ m.reasoning_content }}</think>{% endif %}"
DROPPED += "{{ m.content }}" + CALLS + "{% endgeneration %}{% endif %}<|end|>\n{% endfor %}" + ASK


def test_a_call_keeps_its_thought_in_the_prompt_of_an_answer_that_the_template_drops_it_for(tokenizer: Any) -> None:
    messages = [{**turn, "reasoning_content": "Hm."} if turn["role"] == "assistant" else turn for turn in CALLED]
    template = ChatTemplate(tokenizer, re.sub("{% (end)?generation %}", "", DROPPED))
    prompt = tokenizer.apply_chat_template(
        messages[:3], chat_template=template.template, tokenize=False, add_generation_prompt=True
    )
    call, answer = '<think>Hm.</think>weather{"city": "Rome", "days": 3}<|end|>', "<think>Hm.</think>Warm.<|end|>"
    assert supervised(template, messages) == [[call, answer]]
    assert supervised(template, [*messages, *THREE[:2]])[0] == [call, answer]
    *_, row = replace(template, turns="each", shapes={}).render(messages)
    assert row.text == f"{prompt}{answer}\n"
    assert row.spans == ((len(prompt), len(prompt) + len(answer)),)
    assert row.remarks == {}
    # Marks are of a rendering that lacks it.
    (first, _), (plain, *_) = (ChatTemplate(tokenizer, DROPPED).render(chat) for chat in (messages, CALLED))
    assert "prompt" in first.remarks
    assert plain.remarks.keys() <= {"split"}


RESULTS_FIRST = (
    "{% set ns = namespace(of=false) %}{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>\n" + CALLS
)
RESULTS_FIRST += "{% set ns.of = false %}{% for r in messages %}{% if r == m %}{% set ns.of = true %}"
RESULTS_FIRST += "{% elif r.role != 'tool' %}{% set ns.of = false %}{% elif ns.of %}({{ r.content }}){% endif %}"
RESULTS_FIRST += "{% endfor %}{{ m.content }}<|end|>\n{% endfor %}" + ASK


def test_results_that_the_template_writes_before_the_words_of_the_call_are_found(tokenizer: Any) -> None:
    other = {"type": "function", "function": {"name": "wind", "arguments": {"city": "Rome"}}}
    called = {"role": "assistant", "content": "I look both up.", "tool_calls": [CALL, other]}
    messages = [CALLED[0], called, RESULT, {"role": "tool", "content": "3 knots"}, CALLED[-1], *THREE[:2]]
    template = ChatTemplate(tokenizer, RESULTS_FIRST)
    rows = template.render(messages)
    call = 'weather{"city": "Rome", "days": 3}wind{"city": "Rome"}'
    assert [[row.text[start:end] for start, end in row.spans] for row in rows] == [
        [f"{call}I look both up.<|end|>"],
        ["Warm.<|end|>", "Crews.<|end|>"],
    ]
    assert f"{call}(21 degrees)(3 knots)I look both up.<|end|>" in rows[1].text
    lost = ChatTemplate(
        tokenizer, RESULTS_FIRST.replace("({{ r.content }})", "{% if loop.index == 3 %}(21 degrees){% endif %}")
    )
    with refused("not-written") as problems:
        lost.render(messages)
    assert "'3 knots'" in problems[0].problem


def test_a_blank_that_no_prompt_has_is_the_answers(prepared: Prepare, tokenizer: Any) -> None:
    source = "{% for m in messages %}{{ m.role | upper }}: {% if m.role == 'assistant' %}{% generation %}"
    source += "{{ m.content }} {% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    source += "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    blanks = [f" {text.removesuffix('<|end|>')} " for text in ENDED]
    assert supervised(ChatTemplate(tokenizer, source), THREE) == [blanks]
    # But where the blank behind an answer is a token with the next header, that is not trained on.
    tokenizer.add_tokens([" USER"])
    parts = prepared([{"messages": THREE}], source).audit["samples"][0]["parts"]
    assert [part["text"] for part in parts if part["trained"]] == [*(text[:-1] for text in blanks[:2]), blanks[2]]


def test_a_header_that_takes_the_blanks_of_an_answer_with_it_is_not_trained_on(
    prepared: Prepare, tokenizer: Any
) -> None:
    tokenizer.add_tokens([AddedToken("<|model|>", rstrip=True, special=True)])  # as Phi-3.5's
    source = TEMPLATES["plain"].replace("<|{{ m.role }}|>", "<|{{ m.role | replace('assistant', 'model') }}|>")
    source = source.replace("<|assistant|>", "<|model|>")
    for blank in ("", " ", "\n\n "):
        parts = prepared([{"messages": talk("Who?", f"{blank}Crews.")}], source).audit["samples"][0]["parts"]
        assert [part["text"] for part in parts if part["trained"]] == [ENDED[0]], parts


@pytest.mark.fault(
    "nulls that Parquet fills into a column of tools",
    "`windlass data`",
    "nulls in `tools` were taken for Parquet's filler and left out",
)
@pytest.mark.parametrize("kind", ["text in parquet", "parquet"])
def test_nulls_of_tools_are_kept_but_for_those_that_parquet_fills_in(tokenizer: Any, tmp_path: Path, kind: str) -> None:
    source = "{% for t in tools %}{% if t.function.strict is none %}{{ t | tojson }}{% else %}[tool]{% endif %}"
    source += "{% endfor %}" + LOOP + ASK
    days = {"name": "days", "parameters": {"days": {"type": "integer", "default": None}}, "strict": None}
    city = {"name": "city", "parameters": {"city": {"type": "string"}}, "strict": None}
    tools = [{"type": "function", "function": inner} for inner in (days, city)]
    row = {"messages": [{"role": "user", "content": "Rome?"}, THREE[1]], "tools": tools}
    path = tmp_path / "a.parquet"
    written = row if kind == "parquet" else {**row, "tools": json.dumps(tools)}
    pq.write_table(pa.Table.from_pylist([written]), path)
    done = prepare_rows(tmp_path, [], tokenizer, dataset_name_or_path=str(path), chat_template=source)
    says = "nulls in `tools` were taken for Parquet's filler and left out"
    facts = [fact for fact in done.audit["facts"] if says in fact]
    assert len(facts) == (kind == "parquet")
    seen = [{"type": "function", "function": {**inner, "strict": "-"}} for inner in (days, city)] if facts else tools
    expected = tokenizer.apply_chat_template(
        row["messages"], tools=seen, chat_template=source, tokenize=True, return_dict=False
    )
    assert done.train["input_ids"][0].as_py() == expected


@pytest.mark.fault("an answer without a word", "`windlass data`", "1 row with an empty answer")
@pytest.mark.fault(
    "an answer that spells its own end", "`windlass data`", "an answer spells the token that ends it, '<|end|>'"
)
def test_what_a_user_should_know_of_rows_is_counted_and_said(prepared: Prepare) -> None:
    done = prepared(
        [{"messages": THREE}, {"messages": THREE[:2]}], TEMPLATES["earlier answers rewritten"], val_fraction=0.5
    )
    (fact,) = done.audit["facts"]
    assert fact.startswith("1 chat became 3 rows: the chat template writes turns differently once later ones follow")
    assert "(at '<|end|>\\n<|assistant|>\\n<think>" in fact  # tokens are quoted whole
    assert done.validation is not None
    assert sorted([len(done.train), len(done.validation)]) == [1, 3]  # the rows of a chat stay together
    for template, messages, warned in (
        (LOOP + ASK, THREE, []),
        (LOOP + ASK, talk("Who?", "Crews.", "Thanks"), []),
        (TEMPLATES["no end token behind the last"], THREE, []),
        (TEMPLATES["no end token behind the last"], THREE[:2], ["will not learn to stop"]),
        (LOOP + ASK, talk("Who?", ""), ["1 row with an empty answer"]),
        (LOOP + ASK, talk("Who?", "Crews.<|end|> Or all."), ["an answer spells the token that ends it, '<|end|>'"]),
        (LOOP + ASK, talk("Who<|end|>?", "Crews."), ["spells a special token, such as '<|end|>'"]),
    ):
        done = prepared([{"messages": messages}], template)
        notes = [note for note in done.audit["notes"] if "nothing is evaluated" not in note]
        assert len(notes) == len(warned), notes
        assert all(words in note for words, note in zip(warned, notes, strict=True))
        assert done.audit["facts"] == []
    for rows, share in (([THREE[:2], THREE, THREE], "33.3%"), ([THREE[:2]], "100.0%"), ([THREE], "")):
        done = prepared([{"messages": messages} for messages in rows], TEMPLATES["no end token behind the last"])
        notes = [note for note in done.audit["notes"] if "no supervised part ends with a token" in note]
        assert [note.partition(" of the rows")[0] for note in notes] == [f"in {share}"][: len(share)]
    dated = "{{ date_string or strftime_now('%d %b %Y') }}" + LOOP + ASK
    done = prepared([{"messages": THREE}], dated)
    (fact,) = done.audit["facts"]
    assert "data.template_kwargs: {date_string: " in fact
    assert prepared([{"messages": THREE}], dated, template_kwargs={"date_string": "1 May"}).audit["facts"] == []
    done = prepared([{"messages": THREE}], TEMPLATES["a thought opened by the prompt"])
    assert "a thought that it opens or closes: '<|assistant|>\\n<think>' (" in done.audit["facts"][0]


def test_a_stream_has_the_day_in_its_fingerprint_if_its_rows_have(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is resumed with the same fingerprint only."""

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days=1)

    streamed = partial(prepared, [{"messages": THREE}], streaming=True)
    for template, is_other in ((TEMPLATES["plain"], False), ("{{ strftime_now('%d %b') }}" + LOOP + ASK, True)):
        today = streamed(template=template).fingerprint
        with monkeypatch.context() as patch:
            patch.setattr("windlass.data.chat.datetime", Tomorrow)
            assert (streamed(template=template).fingerprint != today) is is_other


@pytest.mark.fault(
    "answers with thoughts behind a prompt that closes one",
    "`windlass data`",
    'data.template_kwargs: {"enable_thinking": true} gives the one before this answer',
)
def test_a_prompt_that_inference_does_not_give_is_named_with_its_switch(prepared: Prepare) -> None:
    thinks = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    closes = ASK.replace("\n{%", "\n<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{%")
    template = LOOP.replace("{{ m.content }}", thinks) + closes
    chat = [THREE[0], {**THREE[1], "reasoning_content": "By the tide."}]
    (fact,) = prepared([{"messages": chat}], template).audit["facts"]
    assert 'data.template_kwargs: {"enable_thinking": true} gives the one before this answer' in fact
    assert prepared([{"messages": chat}], template, template_kwargs={"enable_thinking": True}).audit["facts"] == []


@pytest.mark.parametrize("packing", [False, True])
def test_chats_that_become_several_rows_keep_together_in_mixes_packs_and_streams(
    tokenizer: Any, tmp_path: Path, packing: bool
) -> None:
    chats = {
        name: [talk(*(f"{name}{i}{turn}." for turn in range(6))) for i in range(count)]
        for name, count in (("a", 8), ("b", 4))
    }
    chats["b"].append(talk("Who?", "b91."))  # of one row
    for name, rows in chats.items():
        write_rows(tmp_path / f"{name}.jsonl", [{"messages": row} for row in rows])
    mix = [{"path": str(tmp_path / f"{name}.jsonl"), "name": name} for name in chats]
    data = {"chat_template": TEMPLATES["earlier answers rewritten"], "max_length": 160, "packing": packing}
    train = {"output_dir": str(tmp_path / "out"), "max_steps": 5}

    def prepare(**section: Any) -> PreparedData:
        run = RunFile.model_validate({"data": {**data, **section}, "train": train})
        return prepare_data(run, tokenizer, say=print)

    def answers(rows: Any) -> list[str]:
        """Return what is supervised, and require that each answer stands behind its own chat."""
        found = []
        for row in rows:
            ends = list(itertools.accumulate(row.get("seq_lengths") or [len(row["input_ids"])]))
            for start, end in itertools.pairwise([0, *ends]):
                ids, labels = row["input_ids"][start:end], row["labels"][start:end]
                (answer,) = re.findall("([ab][0-9]+)[0-9][.]<.end.>", tokenizer.decode([i for i in labels if i >= 0]))
                assert {*re.findall("([ab][0-9])[0-9][.]", tokenizer.decode(ids))} <= {answer}
                found.append(tokenizer.decode([i for i in labels if i >= 0]))
        return sorted(found)

    def expected(*names: str) -> list[str]:
        turns = itertools.chain(*(row for name in names for row in chats[name]))
        return sorted(f"{EMPTY}{turn['content']}<|end|>" for turn in turns if turn["role"] == "assistant")

    mixed = prepare(mix=mix, val_fraction=0.3)
    assert mixed.validation is not None
    sides = [answers(table.to_pylist()) for table in (mixed.train, mixed.validation)]
    assert sorted(itertools.chain(*sides)) == expected("a", "b")
    of_chats = [{text[len(EMPTY) :][:2] for text in side} for side in sides]
    assert not of_chats[0] & of_chats[1]
    train_figures, held = (mixed.audit["splits"][split] for split in ("train", "validation"))
    assert (train_figures["split"], train_figures["split_into"]) == (12, 36)
    assert train_figures["rows"] + held["rows"] == 13
    assert held["rows"] == len(of_chats[1])
    assert [mixed.audit["sources"][name]["split"] for name in chats] == [8, 4]
    assert mixed.audit["facts"][0].startswith("12 chats became 36 rows")
    epoch = 0
    streamed = prepare(dataset_name_or_path=mix[0]["path"], streaming=True)
    rows = iter(streamed.train)
    found: list[str] = []
    while len(found) < len(expected("a")):
        found += answers([next(rows)])
        epoch += 1
    assert sorted(found) == expected("a")
    assert (epoch < len(found)) == packing
    assert streamed.audit["splits"]["train"]["split"] == 8
    both = answers(itertools.islice(prepare(mix=mix, streaming=True).train, 4 * epoch))
    assert {*both} == {*expected("a", "b")}


@pytest.mark.parametrize(("text", "is_date"), [("on the 27.", True), ("1273 crews", False), ("A527", False)])
def test_a_number_that_has_todays_digits_is_no_date(
    tokenizer: Any, text: str, is_date: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(tokenizer, "{% if false %}{{ strftime_now('%d') }}{% endif %}" + LOOP + ASK)
    monkeypatch.setitem(vars(template), "dates", ["27"])
    (row,) = template.render(talk("Who?", text))
    assert ("date" in row.remarks) == is_date


@pytest.mark.parametrize("has_template", [False, True])
def test_without_a_chat_template_only_one_whose_tokens_exist_is_used(
    tokenizer: Any, tmp_path: Path, *, has_template: bool
) -> None:
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    assert choose_template(bare).notes
    token, fitting = ("<|im_start|>", "chatml") if has_template else ("<|other|>", "alpaca")
    other = tiny_tokenizer([token, "<|im_end|>"])
    with refused("no-chat-template", "data.chat_template") as problems:
        choose_template(other)
    assert f"data.chat_template: {fitting}" in problems[0].hint
    assert choose_template(other, Data(chat_template=fitting)).render(THREE)
    kind = choose_format(Data(), ["prompt", "completion"], other)  # plain text needs none
    assert [row.text for row in kind.render({"prompt": "a", "completion": " b"})] == ["a b"]
    with refused("no-chat-template", "data.chat_template"):
        kind.render({"prompt": talk("a"), "completion": [{"role": "assistant", "content": "b"}]})


def tiny_tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that has these special tokens, and not Mistral's."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.add_special_tokens([*tokens, "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
