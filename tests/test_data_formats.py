"""Rows in the shapes of well-known published data sets: where the loss is computed, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_run import prepare_rows
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windlass import tiny
from windlass.data.audit import list_facts
from windlass.data.prepare import PreparedData
from windlass.errors import UserError

Prepare = Callable[..., PreparedData]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
TEXT_CALLS = CALLS.replace("{{ c.function.arguments | tojson }}", "{{ '=' + c.function.arguments }}")
THINKS = "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
END = "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}: {{ t.function.parameters.properties | join(',') }}]{% endfor %}"
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "unit": None}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "get_current_weather", "arguments": '{"city": "Rome"}'}}
OPENAI = {  # OpenAI's fine-tuning format: tools, a call without content, its result, several parts, weights
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "21"},
        {"role": "assistant", "content": "It is 21.", "weight": 1},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "No problem", "weight": 0},
    ],
    "parallel_tool_calls": False,
    "tools": [WEATHER],
}
SHAREGPT = {  # as OpenHermes-2.5 and its relatives
    "id": "x",
    "conversations": [
        {"from": "system", "value": "Be brief.", "weight": None},
        {"from": "human", "value": "Hello?", "weight": 0},
        {"from": "gpt", "value": "Hi.", "weight": 0},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "Because.", "weight": 1},
    ],
}
GLAIVE = {  # glaive_toolcall as LLaMA-Factory publishes it
    "conversations": [
        {"from": "human", "value": "Weather in Rome?"},
        {"from": "function_call", "value": '{"name": "get_current_weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": '{"temperature": 21}'},
        {"from": "gpt", "value": "It is 21."},
    ],
    "tools": json.dumps([WEATHER]),
    "system": "Be brief.",
}
ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "4", "text": "Below is …"}
DOLLY = {"instruction": "Add.", "context": "", "response": "4", "category": "closed_qa"}
NAMED = {"columns": {"input": "context", "output": "response"}}
GSM8K = {"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"}
THOUGHT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reasoning_content": "two twice"}]
THINK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>two twice</think>\n\n4"}]
CHUNKS = [  # Mistral's reasoning models
    {"role": "user", "content": "2+2?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "two twice"}]},
            {"type": "text", "text": "4"},
        ],
    },
]
IDS = {"input_ids": [1, 40, 41, 42, 2, 0], "attention_mask": [1, 1, 1, 1, 1, 0]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    made = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=600))
    made.chat_template = TOOLS + TURNS + THINKS + CALLS + END
    return made


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Prepare:
    def make(row: Any, template: str | None = None, **section: Any) -> PreparedData:
        section |= {"chat_template": template} if template else {}
        return prepare_rows(tmp_path, row if isinstance(row, list) else [row], tokenizer, **section)

    return make


def parts(done: PreparedData, tokenizer: Any) -> list[str]:
    """Return the text that the loss is computed on, span by span."""
    return [part["text"] for part in done.audit["samples"][0]["parts"] if part["trained"]]


@pytest.mark.parametrize(
    ("row", "section", "kind", "expected"),
    [
        (OPENAI, {}, "messages", ['get_current_weather{"city": "Rome"}<end>', "It is 21.<end>"]),
        (OPENAI, {"turns": "last"}, "messages", None),  # the last has weight 0: nothing to train on
        (SHAREGPT, {}, "sharegpt", ["Because.<end>"]),
        (GLAIVE, {}, "sharegpt", ['get_current_weather{"city": "Rome"}<end>', "It is 21.<end>"]),
        (GLAIVE, {"turns": "last"}, "sharegpt", ["It is 21.<end>"]),
        (ALPACA, {"format": "text"}, "text", ["<s>Below is …</s>"]),
        (DOLLY, {**NAMED, "chat_template": "alpaca"}, "alpaca", ["4</s>"]),
        (GSM8K, {"columns": {"prompt": "question", "completion": "answer"}}, "prompt-completion", None),
        ({"messages": THOUGHT}, {}, "messages", ["4(two twice)<end>"]),
        ({"messages": THINK}, {"reasoning": "drop"}, "messages", ["4<end>"]),
        ({"messages": CHUNKS}, {"reasoning": "drop"}, "messages", ["4<end>"]),
        (IDS, {}, "input_ids", None),
        ({**IDS, "labels": [-100, -100, 41, 42, 2, -100]}, {}, "input_ids", None),
    ],
)  # fmt: skip
def test_published_rows_have_loss_on_the_right_tokens(
    prepared: Prepare, tokenizer: Any, row: Any, section: dict[str, Any], kind: str, expected: list[str] | None
) -> None:
    if row is OPENAI and section:
        with pytest.raises(UserError, match="no row of train has a supervised token"):
            prepared(row, **section)
        return
    done = prepared(row, **section)
    assert done.audit["shape"]["name"] == kind
    text = tokenizer.decode(done.train["input_ids"][0].as_py())
    if kind == "input_ids":
        assert done.train["input_ids"][0].as_py() == [1, 40, 41, 42, 2]  # padding is not trained on
        assert done.train.to_pylist()[0].get("labels", IDS["input_ids"][:5])[2:] == [41, 42, 2]
    elif row is GSM8K:
        assert parts(done, tokenizer) == [f"{GSM8K['answer']}</s>"]
    else:
        assert parts(done, tokenizer) == expected
    if row in (OPENAI, GLAIVE):
        assert text.startswith("[get_current_weather: city,unit]")  # JSON has no filler
        assert ("<system>Be brief." in text) == (row is GLAIVE)
    if row is OPENAI:
        assert "<user>Weather in Rome?<end>" in text


def test_templates_by_name_file_and_text(prepared: Prepare, tokenizer: Any, tmp_path: Path) -> None:
    both = [ALPACA, {**ALPACA, "input": ""}]
    done = prepared(both, chat_template="alpaca")
    first, second = (tokenizer.decode(row) for row in done.train["input_ids"].to_pylist())
    assert "### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:\n4</s>" in first
    assert "### Instruction:\nAdd.\n\n### Response:\n4</s>" in second
    assert "paired with an input" in first
    assert "paired with an input" not in second
    for name, end in (
        ("chatml", "Because.<|im_end|>"),
        ("llama3", "Because.<|eot_id|>"),
        ("mistral", "Because.</s>"),
    ):
        done = prepared(SHAREGPT, chat_template=name)
        assert parts(done, tokenizer) == [end]
        assert any("spelt out" in note for note in done.audit["notes"]) == (name != "mistral")
    (tmp_path / "own.jinja").write_text(TURNS + END)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TURNS + END}))
    for template in (str(tmp_path / "own.jinja"), str(tmp_path / "chat_template.json"), TURNS + END):
        assert parts(prepared(SHAREGPT, template), tokenizer) == ["Because.<end>"]
    shout = "{% if shout %}LOUD {% endif %}" + TURNS + END
    loud = prepared(SHAREGPT, shout, template_kwargs={"shout": True}).train["input_ids"][0].as_py()
    assert "LOUD" in tokenizer.decode(loud)
    calls = parts(prepared(OPENAI, TOOLS + TURNS + TEXT_CALLS + END), tokenizer)  # that takes arguments as text
    assert calls[0] == 'get_current_weather={"city": "Rome"}<end>'
    # One that drops earlier reasoning, as Qwen's does: its last turn alone can be trained on.
    drops = TURNS + "{% if loop.last and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}" + END
    done = prepared({"messages": THOUGHT + THOUGHT}, drops, turns="each")
    rows = [tokenizer.decode(ids) for ids in done.train["input_ids"].to_pylist()]
    assert rows == ["<user>2+2?<end><assistant>4(two twice)<end>", f"<user>2+2?<end><assistant>4<end>{rows[0]}"]


def test_nulls_among_arguments_are_values_but_where_a_file_fills_them_in(
    prepared: Prepare, tokenizer: Any, tmp_path: Path
) -> None:
    template = TURNS + CALLS + END

    def chat(arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "get_current_weather", "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]}

    nulls = {"city": None, "at": {"lat": None, "lon": 2}}
    written = 'get_current_weather{"city": null, "at": {"lat": null, "lon": 2}}<end>'
    facts = "nulls among a call's arguments, as of 'get_current_weather', .* JSON text .*rows 1, 2"
    rows = [chat(nulls), chat({"city": "Rome", "at": None})]
    done = prepared(rows, template)
    assert parts(done, tokenizer) == [written]
    assert not re.search(facts, "".join(list_facts(done.audit)))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    for kind in ("parquet", "arrow"):
        done = prepared(rows, template, dataset_name_or_path=str(tmp_path / f"a.{kind}"))
        assert parts(done, tokenizer) == ['get_current_weather{"at": {"lon": 2}}<end>']
        assert re.search(facts, "".join(list_facts(done.audit)))
    pq.write_table(pa.Table.from_pylist([chat(json.dumps(nulls))]), tmp_path / "b.parquet")
    done = prepared([], template, dataset_name_or_path=str(tmp_path / "b.parquet"))
    assert parts(done, tokenizer) == [written]
    assert not re.search(facts, "".join(list_facts(done.audit)))
    pq.write_table(pa.Table.from_pylist([chat({"city": "Rome"})] * 2), tmp_path / "c.parquet")
    done = prepared([], template, dataset_name_or_path=str(tmp_path / "c.parquet"))  # that has nothing to fill in
    assert not re.search(facts, "".join(list_facts(done.audit)))


def test_roles_by_any_usual_name_or_one_that_the_template_names(prepared: Prepare, tokenizer: Any) -> None:
    call = json.dumps({"name": "get_current_weather", "arguments": {"city": "Rome"}})
    turns = [("developer", "Be brief."), ("Human", "?"), ("tool_call", call), ("tool_response", "21"), ("AI", "Warm.")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    done = prepared(rows)
    text = tokenizer.decode(done.train["input_ids"][0].as_py())
    assert text.startswith("<system>Be brief.<end><user>?<end><assistant>")
    assert "<tool>21<end><assistant>Warm.<end>" in text
    assert parts(done, tokenizer) == ['get_current_weather{"city": "Rome"}<end>', "Warm.<end>"]
    own = "{% set x = ['wizard', 'developer'] %}" + TURNS + CALLS + END
    rows[0]["messages"].insert(1, {"role": "wizard", "content": "Abra."})
    text = tokenizer.decode(prepared(rows, own).train["input_ids"][0].as_py())
    assert text.startswith("<developer>Be brief.<end><wizard>Abra.<end><user>?<end>")


@pytest.mark.parametrize(
    ("row", "section", "words"),
    [
        (SHAREGPT, {"format": "alpaca"}, "run.yaml:9: data.columns.instruction: the data have no column 'instruction'"),
        (SHAREGPT, {"columns": {"text": "id", "role": "who"}}, "data.columns.text: the format sharegpt has no 'text'"),
        (SHAREGPT, {"columns": {"from": "who"}}, None),
        (GSM8K, {}, "write data.columns: {instruction: question, output: answer}"),
        (DOLLY, {}, "write data.columns: {output: response, input: context}"),
        ({"content": "a"}, {}, "write data.columns: {text: content}"),
        (GSM8K, {"text_field": "question", "turns": "last"}, "data.turns: no effect on text rows"),
        (SHAREGPT, {"completion_only_loss": False, "turns": "last"}, "data.turns: the loss is computed on everything"),
        (SHAREGPT, {"chat_template": "chatlm"}, "no chat template 'chatlm'.*\n\n.*did you mean chatml"),
        (SHAREGPT, {"template_kwargs": {"tool": 1}}, "template_kwargs: the chat template doesn't use a variable"),
        ({"messages": [{"role": "user", "content": "a", "train": True}]}, {}, "'user' is marked to be trained on"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, {}, "has the weight 0.5"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {}, "part of the type 'image_url'"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, {}, "content is a dict, not text"),
        ({"messages": [{"speaker": "user", "content": "a"}]}, {}, r"no role: .*\n\n.*data.columns: {role: speaker}"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f()"]}]}, {}, "a tool call is a str"),
        ({"conversations": [{"from": "function_call", "value": "f("}]}, {}, "a tool call is not valid JSON"),
        ({"conversations": [{"from": "Asistant", "value": "a"}]}, {}, "did you mean assistant"),
        ({**ALPACA, "history": ["Hello"]}, {}, "column 'history' has no pairs"),
        ({**IDS, "labels": [1, 2]}, {}, "6 ids, 2 labels"),
        ({**IDS, "labels": [40, 41, 42, 2, 0, 0]}, {}, "'labels' has other ids than 'input_ids'"),
        ({"input_ids": ["a"]}, {}, "not a list of token ids"),
        ({"input_ids": 5}, {}, "not a list of token ids"),
    ],
)  # fmt: skip
def test_refused_rows_are_named(prepared: Prepare, row: Any, section: dict[str, Any], words: str | None) -> None:
    if words is None:  # a name for what some messages have
        prepared([row, {"conversations": [{"who": "human", "value": "a"}, {"who": "gpt", "value": "b"}]}], **section)
        return
    with pytest.raises(UserError, match=words):
        prepared(row, **section)


@pytest.mark.parametrize("column", ["completion_mask", "assistant_masks"])
def test_a_mask_says_which_tokens_have_loss(prepared: Prepare, column: str) -> None:
    (row,) = prepared({**IDS, column: [0, 1, 0, 0, 1, 1]}).train.to_pylist()
    assert row["input_ids"] == [1, 40, 41, 42, 2]
    assert row["labels"] == [-100, 40, -100, -100, 2]


@pytest.mark.parametrize("usual", [{"role": "user", "content": "No."}, {"from": "human", "value": "No."}])
def test_named_fields_come_before_usual_ones(prepared: Prepare, tokenizer: Any, usual: dict[str, str]) -> None:
    row = {"messages": [{**usual, "who": "user", "what": "Why?"}, {"who": "gpt", "what": "So.", **usual}]}
    done = prepared(row, columns={"role": "who", "content": "what"})
    assert parts(done, tokenizer) == ["So.<end>"]
