"""Token ids of chats compared with those of mistral-common, where it is installed."""

import base64
import json
import shutil
from pathlib import Path

import pytest

from windlass import tiny
from windlass.data.mistral_ids import open_encoder
from windlass.data.prepare import prepare_data
from windlass.data.tokenize import open_tokenizer
from windlass.model import find_base
from windlass.runfile import RunFile

pytest.importorskip("mistral_common", reason="mistral-common is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # its own

CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
CONTROL += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"]
CONTROL += ["[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who turns it?"}]
CHAT += [{"role": "assistant", "content": "Crews of 12."}]
OPEN = "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
CLOSE = "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tekken.json of bytes, and the tokenizer.json that transformers makes of it."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    folder = tiny.write_model(tmp_path_factory.mktemp("tekken") / "model", "mistral4")
    pieces = [bytes([byte]) for byte in range(256)] + [b"er", b"ew", b"Cr", b"ews"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(CONTROL)]
    sizes = {"default_vocab_size": len(pieces) + len(special), "default_num_special_tokens": len(special)}
    config = {"pattern": r"\p{L}+|\s|[^\p{L}\s]", "num_vocab_tokens": len(pieces), "version": "v7", **sizes}
    tekken = {"config": config, "vocab": vocabulary, "special_tokens": special, "type": "Tekken"}
    (folder / "tekken.json").write_text(json.dumps(tekken))
    convert_tekken_tokenizer(str(folder / "tekken.json"), "{{ 1 }}").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("between", "said"),
    [
        ("", ["train: 4 chats compared, with the tokens that mistral-common makes of them; it refuses ", "row 5: "]),
        (" ", ["row 1: token ", " is ' ' (49), and '[/INST]' (4) where mistral-common writes the same messages"]),
    ],
)
def test_the_first_token_that_mistral_common_writes_otherwise_is_named(
    folder: Path, tmp_path: Path, between: str, said: list[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(OPEN + "{% elif m.role == 'user' %}[INST]{{ m.content }}" + between + "[/INST]" + CLOSE)
    thanks = {"role": "user", "content": "Thanks"}
    untrained = {"role": "assistant", "content": "Ahoy.", "train": False}
    rows = [CHAT, CHAT[1:], [*CHAT, thanks], [*CHAT, thanks, untrained], CHAT[2:]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = {"dataset_name_or_path": str(tmp_path / "a.jsonl"), "max_length": 99, "packing": False}
    tree = {"data": {**data, "chat_template": str(template)}, "model": {"model_name_or_path": str(folder)}}
    run = RunFile.model_validate({**tree, "train": {"output_dir": str(tmp_path / "out"), "max_steps": 5}})
    tokenizer = open_tokenizer(find_base(str(folder), "model"), run.model, str)
    audit = prepare_data(run, tokenizer, say=print).audit
    (text,) = [text for text in audit["notes" if between else "facts"] if "mistral-common" in text]
    assert all(words in text for words in said), text
    # The next start has it from the cache of tokens, unless the file is another.
    before = open_encoder.cache_info()
    assert (prepare_data(run, tokenizer, say=print).audit, open_encoder.cache_info()) == (audit, before)
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "tekken.json").write_text("{}")
    tokenizer.name_or_path = str(tmp_path / "other")
    facts = prepare_data(run, tokenizer, say=print).audit["facts"]
    assert any("mistral-common can't open tekken.json" in fact for fact in facts)
