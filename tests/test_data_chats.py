"""Chats through templates that behave as published ones do: what is supervised, in which rows; what is refused."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windlass import tiny
from windlass.data.chat import ChatTemplate
from windlass.data.prepare import PreparedData, prepare_data
from windlass.runfile import RunFile

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
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"dataset_name_or_path": str(path), "max_length": 512, "packing": False, "chat_template": template}
        tree = {"data": {**data, **section}, "train": {"output_dir": str(tmp_path / "out"), "max_steps": 5}}
        tree["watch"] = {"min_supervised_fraction": 0.0}
        return prepare_data(RunFile.model_validate(tree), tokenizer, say=print)

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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    if name == "thoughts cut off" and any("think>" in m["content"] for m in messages[: wanted[-1] + 1]):
        with refused("not-written"):
            template.render(messages)
        return
    rows = template.render(messages)
    slow = template.render_found(template.read(messages), None, wanted)
    assert [(row.text, row.answers) for row in rows] == [(row.text, row.answers) for row in slow]
    answered = []
    for row in rows:
        assert row.text == write(row.length)
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
