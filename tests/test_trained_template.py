"""The chat template that rows were written by goes with the adapter: into final/, exports, samples and `generate`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_keys import stop
from test_faults import material, windlass  # noqa: F401
from transformers import AutoTokenizer

from windlass import tiny
from windlass.data.trained_template import write_defaults
from windlass.files import read_json, read_json_lines

CHAT = [{"role": "user", "content": "mast?"}, {"role": "assistant", "content": "keel"}]
TEMPLATE = (
    "{% for m in messages %}{% if brief %}short {% endif %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STARTS = ("", "\n\n", "  {% if brief %}x{% endif %}\n", "text\n  {% if 1 %}y{% endif %}")


@pytest.mark.parametrize("start", STARTS)
def test_variables_become_defaults_that_callers_may_override(tmp_path: Path, start: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path, vocab=600))
    values: dict[str, Any] = {"brief": True, "names": ["it's", None], "unused": {"a": 1.5}}
    template = start + TEMPLATE + "{{ names }}"

    def render(template: str, **more: Any) -> str:
        return str(tokenizer.apply_chat_template(CHAT, chat_template=template, tokenize=False, **more))

    kept = write_defaults(template, values)
    assert render(kept) == render(template, **values)
    assert render(kept, brief=False) == render(template, **{**values, "brief": False})


@pytest.fixture
def chats(material: Path, tmp_path: Path) -> Path:  # noqa: F811
    """Rows that are chats, a template of the user's own, and a tokenizer with another one."""
    folder = shutil.copytree(material, tmp_path / "here")
    shutil.rmtree(folder / "run")
    for split in ("train", "validation"):
        (folder / "data" / f"{split}.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 60)
    (folder / "own.jinja").write_text(TEMPLATE)
    run = (folder / "run.yaml").read_text()
    run = run.replace("text_field: text, val_split: null", "val_split: validation, chat_template: own.jinja")
    run = run.replace("max_length: 48", "max_length: 64, template_kwargs: {brief: true}")
    run = run.replace(
        'eval_strategy: "no"', "eval_steps: 1\n  sample: {prompts: [mast], chat: true, max_new_tokens: 2}"
    )
    (folder / "run.yaml").write_text(run)
    return folder


def render(folder: Path) -> str:
    return str(AutoTokenizer.from_pretrained(folder).apply_chat_template(CHAT, tokenize=False))


@pytest.mark.long
def test_the_adapter_asks_as_it_was_trained(chats: Path) -> None:
    code, said = windlass("train run.yaml", chats)
    assert code == 0, said
    expected = "short <user>mast?</user>short <assistant>keel</assistant>"
    tokens = AutoTokenizer.from_pretrained(chats / "model")
    arrow = next((chats / "run" / "tokens").glob("*/audit.json"))
    assert "".join(part["text"] for part in read_json(arrow)["samples"][0]["parts"]).startswith(expected), tokens
    assert list(read_json_lines(chats / "run" / "samples.jsonl"))
    assert render(chats / "run" / "final") == expected
    code, said = windlass("export run/checkpoints/step-1 --to exported", chats)
    assert code == 0, said
    assert render(chats / "exported") == expected
    assert "| chat template | own.jinja |" in (chats / "exported" / "README.md").read_text()
    # A folder of its own, without its run
    shutil.move(chats / "run" / "final", chats / "alone")
    shutil.rmtree(chats / "run")
    code, said = windlass("export alone --merge --to again", chats)
    assert code == 0, said
    assert render(chats / "again") == expected
    code, said = windlass("generate alone --prompt mast? --tokens 1 --chat", chats)
    assert code == 0, said


def test_a_mix_of_templates_is_reported(chats: Path) -> None:
    shutil.copytree(chats / "data", chats / "more")
    mix = "mix: [{path: data}, {path: more, chat_template: chatml, template_kwargs: {}}]"
    run = (chats / "run.yaml").read_text().replace("dataset_name_or_path: data", mix)
    (chats / "run.yaml").write_text(run)
    code, said = windlass("data run.yaml", chats)
    assert code == 0, said
    said = " ".join(said.split())
    assert "more is written by the chat template 'chatml', and data by own.jinja" in said, said


@pytest.mark.long
@pytest.mark.fault(
    "a chat template that was edited before the resume",
    "`windlass train --resume`",
    "is not the one that this run began with",
)
@pytest.mark.fault(
    "a chat template that wrote another date when the run began",
    "`windlass train --resume`",
    "the same files make other tokens than when this run began",
)
def test_another_date_at_the_resume_is_refused_unless_the_tokens_are_there(chats: Path) -> None:
    (chats / "own.jinja").write_text("{{ strftime_now('%d %B') }}" + TEMPLATE)
    command = "train run.yaml --override train.sample=null"
    code, said = windlass(command, chats, TZ="day-14")
    assert code == 0, said
    stop(chats)
    without = shutil.copytree(chats, chats.with_name("without"), symlinks=True)
    shutil.rmtree(without / "run" / "tokens")
    code, said = windlass(f"{command} --resume", without, TZ="day+12")
    assert code == 2, said
    assert "the same files make other tokens than when this run began" in " ".join(said.split())
    edited = (chats / "own.jinja").read_text().replace("short", "brief")
    (without / "own.jinja").write_text(edited)
    code, said = windlass(f"{command} --resume", without)
    assert code == 2, said
    assert "own.jinja, is not the one that this run began with" in " ".join(said.split())
    assert "in run/checkpoints/step-1/manifest.json has it" in " ".join(said.split())
    code, said = windlass(f"{command} --resume", chats, TZ="day+12")
    assert code == 0, said
