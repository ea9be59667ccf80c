"""Tokens come from the cache only for the rows that a run file asks for: each key of `data` is changed alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_run import prepare_rows
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from windlass import tiny
from windlass.data.choose import CHANGES_NO_ROW
from windlass.data.prepare import PreparedData
from windlass.runfile import Data

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ mark }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
LONG = [*CHAT, {"role": "user", "content": "How?"}, {"role": "assistant", "content": "So.", "reasoning_content": "Mm"}]
PAIR = {"prompt": "Why?", "completion": " Because.", "question": "How?"}
TALK = {"prompt": CHAT[:1], "completion": CHAT[1:], "messages": CHAT, "text": "Why not?"}
IDS = {"input_ids": [5, 6, 7, 8], "marks": [0, 0, 1, 1]}
TOOLS = json.dumps([{"name": "look"}])

# Key of `data` -> the row, and the two sections; a column's name follows a dot.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "format": (TALK, {"format": "messages"}, {"format": "text"}),
    "text_field": ({"text": "One.", "body": "Two."}, {}, {"text_field": "body"}),
    "prompt_template": (PAIR, {}, {"prompt_template": "{prompt} [[{completion}]]!"}),
    "prompt_field": (PAIR, {}, {"prompt_field": "question"}),
    "completion_field": (PAIR, {}, {"completion_field": "question"}),
    "messages_field": ({"messages": CHAT, "dialog": LONG}, {}, {"messages_field": "dialog"}),
    "chat_template": ({"messages": CHAT}, {}, {"chat_template": "alpaca"}),
    "template_kwargs": ({"messages": CHAT}, {}, {"template_kwargs": {"mark": "!"}}),
    "completion_only_loss": (PAIR, {}, {"completion_only_loss": False}),
    "turns": ({"messages": LONG}, {}, {"turns": "last"}),
    "tools": ({"messages": CHAT, "tools": TOOLS}, {}, {"tools": "ignore"}),
    "reasoning": ({"messages": LONG}, {}, {"reasoning": "drop"}),
    "max_length": ({"text": "One, two, three, four, five."}, {}, {"max_length": 6}),
    "packing": ({"text": "One."}, {}, {"packing": True}),
    "streaming": ({"text": "One."}, {}, {"streaming": True}),
    "columns": ({"messages": CHAT, "dialog": LONG}, {}, {"columns": {"messages": "dialog"}}),
    "columns.completion_mask": (IDS, {}, {"columns": {"completion_mask": "marks"}}),
    "columns.assistant_masks": (IDS, {}, {"columns": {"assistant_masks": "marks"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    made = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=600))
    made.chat_template = TEMPLATE
    return made


def prepare(folder: Path, tokenizer: Any, row: dict[str, Any], section: dict[str, Any], cache: str) -> PreparedData:
    return prepare_rows(folder, [row] * 4, tokenizer, more={"cache": folder / cache}, **section)


def rows_of(prepared: PreparedData) -> Any:
    train: Any = prepared.train
    return list(train.take(4)) if prepared.lengths is None else train.to_pylist()


def test_every_key_of_data_is_changed_or_can_change_no_row() -> None:
    named = {key.partition(".")[0] for key in CHANGES}
    assert named | CHANGES_NO_ROW.keys() == Data.model_fields.keys()
    assert not named & CHANGES_NO_ROW.keys()


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_key_takes_nothing_stale_from_the_cache(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, key: str
) -> None:
    row, before, after = CHANGES[key]
    first = prepare(tmp_path, tokenizer, row, before, "shared")
    second = prepare(tmp_path, tokenizer, row, after, "shared")
    alone = prepare(tmp_path, tokenizer, row, after, "own")
    assert rows_of(second) == rows_of(alone)
    assert second.fingerprint == alone.fingerprint != first.fingerprint


def test_an_edited_template_file_takes_nothing_from_the_cache(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "chat.jinja"
    seen = set()
    for text in (TEMPLATE, TEMPLATE.replace("user", "User").replace(": ", "> ")):
        file.write_text(text)
        for row in ({"messages": CHAT}, {"prompt": CHAT[:1], "completion": CHAT[1:]}):
            seen.add(prepare(tmp_path, tokenizer, row, {"chat_template": str(file)}, "shared").fingerprint)
    assert len(seen) == 2


def test_equal_rows_have_equal_fingerprints_however_they_were_asked_for(tmp_path: Path, tokenizer: Any) -> None:
    """A resumed run may spell its keys otherwise, and have its files under other names."""
    row = {"text": "One.", "body": "One."}
    one, two = (prepare(tmp_path, tokenizer, row, section, "shared") for section in ({}, {"text_field": "body"}))
    assert one.fingerprint == two.fingerprint
    assert len([path for path in (tmp_path / "shared").iterdir() if path.is_dir()]) == 2
