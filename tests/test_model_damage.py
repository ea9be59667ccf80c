"""Damaged, incomplete and foreign model folders: each is a clear error that names the file, never a traceback."""

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from windlass import tiny
from windlass.errors import UserError
from windlass.model import read_base
from windlass.model.config import describe

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SHARD, ONES = "model-00001-of-00003.safetensors", torch.ones
NORM = "language_model.model.norm.weight"
DOWN = "language_model.model.layers.1.mlp.experts.down_proj"
W = "model.layers.0.block_sparse_moe.experts"
Damage = Callable[[Path], Any]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    return {
        "single": tiny.write_model(root / "single", tokenizer=False),
        "sharded": tiny.write_model(root / "sharded", tokenizer=False, files=3),
        "mixtral": tiny.write_model(root / "mixtral", "mixtral", tokenizer=False),
    }


def edit_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        change(table)
        (folder / name).write_text(json.dumps(table))

    return damage


def text(**changes: Any) -> Damage:
    """Change entries of the text model's config; `...` removes one."""

    def change(config: dict[str, Any]) -> None:
        config["text_config"].update(changes)
        for key in [key for key, value in changes.items() if value is ...]:
            del config["text_config"][key]

    return edit_json(CONFIG, change)


def outer(**changes: Any) -> Damage:
    return edit_json(CONFIG, lambda config: config.update(changes))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        stored = load_file(folder / FILE)
        change(stored)
        save_file(stored, folder / FILE)

    return damage


def put(key: str, tensor: torch.Tensor) -> Damage:
    return tensors(lambda stored: stored.update({key: tensor}))


def rename(old: str, new: str) -> Damage:
    return tensors(lambda stored: [stored.update({k.replace(old, new): stored.pop(k)}) for k in list(stored)])


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def remove(*names: str, instead: str = "") -> Damage:
    """Remove these files, or empty one."""

    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()
        if instead:
            (folder / instead).touch()

    return damage


def header(change: Callable[[list[dict[str, Any]]], Any], length: int | None = None) -> Damage:
    """Change the header's entries, in the order of their tensors, or its length."""

    def damage(folder: Path) -> None:
        data = (folder / FILE).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        table = json.loads(data[8 : 8 + size])
        table.pop("__metadata__", None)
        change(sorted(table.values(), key=lambda entry: entry["data_offsets"]))
        new = json.dumps(table).encode()
        (folder / FILE).write_bytes(struct.pack("<Q", len(new) if length is None else length) + new + data[8 + size :])

    return damage


def shift(entries: list[dict[str, Any]], first: int, by: int) -> None:
    for entry in entries[first:]:
        entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def cut(folder: Path, share: float = 0.7) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.truncate(int(opened.seek(0, 2) * share))


def length(value: int) -> Damage:
    return header(lambda entries: None, value)


def entry(**changes: Any) -> Damage:
    return header(lambda entries: entries[0].update(changes))


def mapped(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return edit_json(INDEX, lambda index: change(index["weight_map"]))


SINGLE: dict[str, tuple[Damage, str]] = {
    # the folder
    "no config": (remove(CONFIG), "the model folder has no config.json"),
    "empty": (remove(CONFIG, FILE), "has no config.json.*\n\nhint: the folder is empty: is its volume mounted"),
    "pickled weights": (
        remove(FILE, instead="pytorch_model.bin"),
        r"only as a pickle.* \(pytorch_model\.bin\)(.|\n)*hint: convert it: python -c \"import transformers",
    ),
    "an adapter": (remove(FILE, instead="adapter_model.safetensors"), r"it contains adapter_model(.|\n)*lora\.adapter"),
    "shards alone": (remove(FILE, instead="model-00001-of-00002.safetensors"), r"no model\.safetensors\.index\.json"),
    # config.json
    "config is no JSON": (write(CONFIG, b"{"), "config.json: it is not JSON"),
    "config is a list": (write(CONFIG, b"[1]"), "config.json: it is JSON, but not an object"),
    "config says it twice": (write(CONFIG, b'{"a": 1, "a": 2}'), "not JSON: the key 'a' is there twice"),
    "no model type": (outer(model_type=None), "config.json: it has no model_type"),
    "no text_config": (outer(text_config=None), "text_config: it has no model_type"),
    "text_config is a list": (outer(text_config=[1]), r"text_config is \[1\], not the language model's config"),
    "unlike any family": (text(model_type="gpt2"), "FSDP plan does not name its layers"),
    "a classifier": (outer(architectures=["Mistral3ForReward"]), "architectures is 'Mistral3ForReward'"),
    "true": (text(hidden_size=True), "hidden_size is True"),
    "enormous": (text(num_hidden_layers=10**9), "num_hidden_layers is 1000000000\n\nhint: a whole number from 1 to"),
    "missing size": (text(kv_lora_rank=...), "kv_lora_rank is missing"),
    "flag": (text(attention_bias="no"), "attention_bias is 'no'\n\nhint: true or false"),
    "heads": (text(num_key_value_heads=3), "4 attention heads can't share 3 heads of keys and values"),
    "positions of no kind": (text(rope_parameters={"rope_type": "x"}), "rope_parameters has the rope_type 'x'"),
    "positions without factor": (text(rope_parameters={"type": "yarn"}), "factor is missing, which yarn needs"),
    "positions of a word": (text(rope_scaling={"type": "linear", "factor": "2"}), "rope_scaling.factor is '2', which"),
    "experts": (text(num_experts_per_tok=9), "each token visits 9 of 8 experts"),
    "other quantization": (outer(quantization_config={"quant_method": "gptq"}), "unsupported quantization 'gptq'"),
    "codes without scales": (
        outer(torch_dtype="float8_e4m3fn", quantization_config=None),
        "torch_dtype is 'float8_e4m3fn' without a quantization_config(.|\n)*hint: fetch config.json again",
    ),
    "odd blocks": (
        outer(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 0]}),
        r"weight_block_size is \[128, 0\]",
    ),
    # the header
    "header beyond the file": (length(10**9), r"model\.safetensors: its header is not a safetensors header"),
    "a pointer": (write(FILE, b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "truncated": (cut, r"model\.safetensors: it is truncated: \d+ of \d+ bytes, \d+ tensors lost from '"),
    "longer": (lambda f: write(FILE, (f / FILE).read_bytes() + b"abc")(f), "the last 3 bytes belong to no tensor"),
    "overlapping": (header(partial(shift, first=1, by=-1)), r"starts at byte \d+, not \d+"),
    "offsets too short": (entry(data_offsets=[0, 1]), "has 1 bytes, which is not its shape's size"),
    "negative offsets": (entry(data_offsets=[-8, 0]), "has an impossible shape or offset"),
    "unknown dtype": (entry(dtype="BF17"), "KeyError: 'BF17'"),
    # what it holds
    "wrong shape": (put(NORM, ONES(32)), r"weights of another shape .* \(1\): .*\.norm\.weight is \[32\], not \[64\]"),
    "prefix": (
        rename("language_model.", "text_decoder."),
        r"(?s)missing weights \(33\): model\.embed_tokens.*unknown tensors.*: text_decoder\.",
    ),
    "twice": (put("model.language_model.norm.weight", ONES(64)), r"unknown .* \(1\): .*model\.norm\.weight"),
    "scale dropped": (tensors(lambda t: t.pop(f"{DOWN}_scale_inv")), rf"without a scale \(1\): {DOWN}"),
    "scale of another shape": (
        put(f"{DOWN}_scale_inv", ONES(7, 1, 1)),
        r"scales that do not fit .* \(1\): .*down_proj_scale_inv is F32 \[7, 1, 1\] for F8_E4M3 \[8, 64, 32\]",
    ),
    "scale of whole numbers": (put(f"{DOWN}_scale_inv", ONES(8, 1, 1, dtype=torch.int32)), "scale_inv is I32"),
    "whole numbers": (put(NORM, ONES(64, dtype=torch.int8)), r"unknown dtype \(1\): .*norm\.weight is I8"),
}  # fmt: skip
SHARDED: dict[str, tuple[Damage, str]] = {
    "every shard is truncated": (cut, r"(?s)00001-of.*truncated.*00002-of.*truncated.*00003-of.*truncated"),
    "another folder": (mapped(lambda m: m.update({NORM: "../x.safetensors"})), r"not a file of this folder: \.\./x"),
    "file is a list": (mapped(lambda m: m.update({NORM: [SHARD]})), "1 of them are missing"),
    "index of more": (mapped(lambda m: m.update({"more": SHARD})), rf"disagree .* \(1\): more in {SHARD}"),
    "a tensor in two shards": (
        lambda f: save_file(load_file(f / SHARD) | {NORM: ONES(64)}, f / SHARD),
        rf"disagree .* \(1\): {NORM} in {SHARD}",
    ),
    "index of less": (mapped(lambda m: m.pop(NORM)), rf"disagree .* \(1\): {NORM} in"),
    "no map": (edit_json(INDEX, lambda index: index.pop("weight_map")), "it has no weight_map"),
}  # fmt: skip
MIXTRAL: dict[str, tuple[Damage, str]] = {
    "an expert missing": (
        tensors(lambda t: t.pop(f"{W}.5.w3.weight")),
        r"missing .* \(1\): model\.layers\.0\.block_sparse_moe\.experts\.5\.w3\.weight",
    ),
    "all missing": (rename(".w2.", ".w4."), r"missing weights \(2\): model\.layers\.0\.mlp\.experts\.down_proj"),
}
CASES = [(layout, fault) for layout in ("SINGLE", "SHARDED", "MIXTRAL") for fault in globals()[layout]]


@pytest.mark.parametrize(("layout", "fault"), CASES)
def test_damage_is_reported(originals: dict[str, Path], tmp_path: Path, layout: str, fault: str) -> None:
    damage, message = globals()[layout][fault]
    folder = shutil.copytree(originals[layout.lower()], tmp_path / "model")
    assert read_base(folder).total > 0
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        read_base(folder)
    assert all(str(folder) in problem.where and problem.hint for problem in error.value.problems)
    assert len(str(error.value)) < 4000


def test_all_config_errors_are_reported_at_once(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(originals["single"], tmp_path / "model")
    text(hidden_size=0, vocab_size="many", kv_lora_rank=..., tie_word_embeddings=3)(folder)
    with pytest.raises(UserError) as error:
        read_base(folder)
    assert len(error.value.problems) == 4
    for path, message in ((folder / "nowhere", "No such file"), (folder / CONFIG, "Not a directory")):
        with pytest.raises(UserError, match=f"the folder can't be read: {message}"):
            read_base(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(data=st.data())
def test_random_configs_are_refused_or_described(originals: dict[str, Path], data: st.DataObject) -> None:
    config = json.loads((originals["single"] / CONFIG).read_text())
    table = data.draw(st.sampled_from([config, config["text_config"]]))
    for key in data.draw(st.lists(st.sampled_from(sorted(table)), max_size=3)):
        table[key] = data.draw(JSON)
    places = [CONFIG]
    try:
        assert describe(config, CONFIG).dims["layers"] > 0
    except UserError as error:
        places = [problem.where for problem in error.problems]
    assert all(place.startswith(CONFIG) for place in places)


def test_folder_with_only_config_json_is_planned(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(originals["single"] / CONFIG, folder)
    base, whole = read_base(folder), read_base(originals["single"])
    assert (base.path, base.total, base.dims) == (None, whole.total, whole.dims)
    assert base.notes == (f"no weights in {folder}: planned from its config.json; check and train will refuse it",)
