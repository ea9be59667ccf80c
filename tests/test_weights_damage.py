"""Damaged, incomplete and foreign model folders: each a clear error that names the file, never a traceback."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from windlass import tiny
from windlass.errors import UserError
from windlass.model import read_base

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NORM = "language_model.model.norm.weight"
EXPERTS = "language_model.model.layers.1.mlp.experts"


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    return {
        "single": tiny.write(root / "single", tokenizer=False),
        "sharded": tiny.write(root / "sharded", tokenizer=False, files=3),
        "mixtral": tiny.write(root / "mixtral", "mixtral", tokenizer=False),
    }


@pytest.fixture
def folder(request: pytest.FixtureRequest, originals: dict[str, Path], tmp_path: Path) -> Path:
    kind = getattr(request, "param", "single")
    return Path(shutil.copytree(originals[kind], tmp_path / "model"))


def parts(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(file: Path, header: Any, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        stored = load_file(folder / FILE)
        change(stored)
        save_file(stored, folder / FILE)

    return damage


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        said, body = parts(folder / FILE)
        said.pop("__metadata__", None)
        change(said)
        join(folder / FILE, said, body)

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    """Entries of the text model's config changed; `...` removes one."""

    def damage(folder: Path) -> None:
        said = json.loads((folder / CONFIG).read_text())
        text = said["text_config"]
        for key, new in changes.items():
            if new is ...:
                del text[key]
            else:
                text[key] = new
        (folder / CONFIG).write_text(json.dumps(said))

    return damage


def outer(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | changes))

    return damage


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def remove(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def only(*names: str) -> Callable[[Path], None]:
    """config.json, and something else than weights."""

    def damage(folder: Path) -> None:
        (folder / FILE).unlink()
        for name in names:
            (folder / name).write_bytes(b"")

    return damage


def cut(share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with (folder / FILE).open("r+b") as opened:
            opened.truncate(int(opened.seek(0, 2) * share))

    return damage


def length(value: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        said, body = parts(folder / FILE)
        join(folder / FILE, said, body, length=value)

    return damage


def first(said: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = min(said.values(), key=lambda each: each["data_offsets"])
    return entry


def ordered(said: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(said.values(), key=lambda each: each["data_offsets"])


def overlap(said: dict[str, Any]) -> None:
    """The second tensor lies where the first does."""
    one, two = ordered(said)[:2]
    size = two["data_offsets"][1] - two["data_offsets"][0]
    start = one["data_offsets"][1] - 1
    two["data_offsets"] = [start, start + size]


def grow(said: dict[str, Any]) -> None:
    """Every tensor but the first lies two bytes further."""
    for entry in ordered(said)[1:]:
        entry["data_offsets"] = [offset + 2 for offset in entry["data_offsets"]]


def rename(ours: str, theirs: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(stored: dict[str, torch.Tensor]) -> None:
        for key in list(stored):
            stored[key.replace(ours, theirs)] = stored.pop(key)

    return change


SINGLE: dict[str, tuple[Callable[[Path], None], str]] = {
    # the folder
    "no config": (remove(CONFIG), "the model folder has no config.json"),
    "empty": (remove(CONFIG, FILE), "has no config.json.*\n\nhint: the folder is empty: is its volume mounted"),
    "no weights": (remove(FILE), "the model folder has no weights\n\nhint: it must hold model.safetensors"),
    "an adapter": (only("adapter_model.safetensors"), "it holds an adapter, not a model"),
    "publisher's": (only("consolidated-00001.safetensors", "params.json"), "only the publisher's own format"),
    "pickled": (only("pytorch_model.bin"), r"pickled \(\*\.bin\)"),
    "gguf": (only("model-q4.gguf"), "GGUF"),
    "shards alone": (only("model-00001-of-00002.safetensors"), "it has shards but no model.safetensors.index.json"),
    "other name": (only("weights.safetensors"), "none of its safetensors files is named model.safetensors"),
    # config.json
    "config is no JSON": (write(CONFIG, b"{"), "config.json: it is not JSON"),
    "config is binary": (write(CONFIG, b"\xff\x00\xfe"), "config.json: it is not JSON"),
    "config is a list": (write(CONFIG, b"[1]"), "config.json: it is JSON, but not an object"),
    "config is empty": (write(CONFIG, b""), "config.json: it is not JSON"),
    "config is deep": (write(CONFIG, b"[" * 100_000), "config.json: it is not JSON"),
    "config is a number": (write(CONFIG, b'{"a": ' + b"9" * 5000 + b"}"), "config.json: it is not JSON"),
    "config is huge": (write(CONFIG, b" " * (2**24 + 1)), "config.json: it has more than 16777216 bytes"),
    "config is a pointer": (write(CONFIG, b"version https://git-lfs.github.com/spec/v1"), "hint: it is a Git LFS"),
    "no model type": (outer(model_type=None), "config.json: has no model_type"),
    "model type is a number": (outer(model_type=4), "model_type is 4"),
    "no text_config": (outer(text_config=None), "holds its language model in text_config"),
    "unknown family": (config(model_type="mistral5"), r"'mistral5' is not known\n\nhint: nearest known: mistral"),
    "unlike any family": (config(model_type="gpt2"), "all known: mistral4, mistral, ministral3, llama"),
    "a classifier": (outer(architectures=["Mistral3ForReward"]), "architectures says 'Mistral3ForReward'"),
    "zero layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "negative": (config(hidden_size=-4), "hidden_size is -4"),
    "a string": (config(hidden_size="64"), "hidden_size is '64'"),
    "true": (config(hidden_size=True), "hidden_size is True"),
    "a fraction": (config(vocab_size=512.0), r"vocab_size is 512\.0"),
    "a list": (config(vocab_size=[1]), "vocab_size is a list of 1 entries"),
    "enormous": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000\n\nhint: a whole number from 1 to"),
    "more digits than can be shown": (config(vocab_size=10**4000), "a number of more than 20 digits"),
    "missing size": (config(kv_lora_rank=...), "kv_lora_rank is missing"),
    "null size": (config(kv_lora_rank=None), "kv_lora_rank is null"),
    "flag": (config(attention_bias="no"), "attention_bias is 'no'\n\nhint: true or false"),
    "tied, a string": (config(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'"),
    "heads": (config(num_key_value_heads=3), "4 attention heads can't share 3 heads of keys and values"),
    "experts": (config(num_experts_per_tok=9), "each token visits 9 of 8 experts"),
    "other quantisation": (outer(quantization_config={"quant_method": "gptq"}), "quantised by 'gptq'"),
    "odd quantisation": (outer(quantization_config=[]), "quantised by a list"),
    "odd blocks": (
        outer(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 0]}),
        "weight_block_size is a list of 2 entries",
    ),
    # the header
    "header beyond the file": (length(10**9), r"model\.safetensors: its header is said to have 1000000000 bytes"),
    "header of 2^64": (length(2**64 - 1), "its header is said to have 18446744073709551615 bytes"),
    "header cut short": (length(40), "its header is not JSON"),
    "no bytes": (write(FILE, b""), "it has only 0 bytes"),
    "few bytes": (write(FILE, b"\x05\0\0"), "it has only 3 bytes"),
    "a pointer": (write(FILE, b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "not a table": (lambda folder: join(folder / FILE, [1], b""), "its header is not a table of tensors"),
    "truncated": (cut(0.7), r"model\.safetensors: it is truncated: \d+ of \d+ bytes, \d+ tensors are cut off from '"),
    "longer": (lambda f: write(FILE, (f / FILE).read_bytes() + b"abc")(f), "3 bytes at its end belong to no tensor"),
    "overlapping": (header(overlap), "overlaps the tensor before it"),
    "a gap": (header(grow), "lies behind a gap"),
    "offsets too short": (header(lambda h: first(h).update(data_offsets=[0, 1])), "and its offsets span 1"),
    "offsets backwards": (header(lambda h: first(h).update(data_offsets=[8, 0])), "its offsets span -8"),
    "negative offsets": (header(lambda h: first(h).update(data_offsets=[-8, 0])), "that can't be"),
    "no offsets": (header(lambda h: first(h).pop("data_offsets")), "lacks dtype, shape or offsets"),
    "three offsets": (header(lambda h: first(h).update(data_offsets=[0, 1, 2])), "lacks dtype, shape or offsets"),
    "shape is a word": (header(lambda h: first(h).update(shape="ab")), "that can't be"),
    "shape is huge": (header(lambda h: first(h).update(shape=[1] * 1000)), "that can't be"),
    "unknown dtype": (header(lambda h: first(h).update(dtype="BF17")), "unknown dtype 'BF17'"),
    "dtype is a list": (header(lambda h: first(h).update(dtype=["BF16"])), "unknown dtype"),
    "entry is a number": (header(lambda h: h.update(x=3)), "the header's entry for 'x' lacks"),
    # what it holds
    "missing": (tensors(lambda t: t.pop(NORM)), "1 weights are missing: model.norm.weight"),
    "wrong shape": (
        tensors(lambda t: t.update({NORM: torch.ones(32)})),
        r"1 weights have another shape than config\.json says: .*\.norm\.weight is \[32\], not \[64\]",
    ),
    "a size that is another": (config(moe_intermediate_size=48), r"10 weights have another shape .* and 7 more"),
    "a layer more": (config(num_hidden_layers=3), r"weights are missing: model\.layers\.2\..* and \d+ more"),
    "a layer less": (config(num_hidden_layers=1), r"unknown key\): language_model\.model\.layers\.1\..* and \d+ more"),
    "unknown": (tensors(lambda t: t.update({"language_model.extra": torch.ones(1)})), "1 stored.*_model.extra"),
    "prefix": (
        tensors(rename("language_model.", "text_decoder.")),
        r"(?s)33 weights are missing.*names must begin with language_model\.model\. or model\.language_model\.",
    ),
    "twice": (
        tensors(lambda t: t.update({"model.language_model.norm.weight": torch.ones(64)})),
        r"1 stored .*: (model\.language_model|language_model\.model)\.norm\.weight",
    ),
    "scale dropped": (tensors(lambda t: t.pop(f"{EXPERTS}.down_proj_scale_inv")), f"no scale: {EXPERTS}.down_proj"),
    "scale of another shape": (
        tensors(lambda t: t.update({f"{EXPERTS}.down_proj_scale_inv": torch.ones(7, 1, 1)})),
        r"scales do not fit their weight: .*down_proj_scale_inv \[7, 1, 1\] for \[8, 64, 32\]",
    ),
    "scale flattened": (
        tensors(lambda t: t.update({f"{EXPERTS}.down_proj_scale_inv": torch.ones(8)})),
        "scales do not fit their weight",
    ),
    "scale of whole numbers": (
        tensors(lambda t: t.update({f"{EXPERTS}.down_proj_scale_inv": torch.ones(8, 1, 1, dtype=torch.int32)})),
        "down_proj_scale_inv is I32",
    ),
    "scale of 16-bit weights": (
        tensors(lambda t: t.update({f"{EXPERTS}.down_proj": torch.ones(8, 64, 32)})),
        "down_proj_scale_inv beside F32 weights",
    ),
    "whole numbers": (
        tensors(lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})),
        r"dtype that is none of weights: language_model\.model\.norm\.weight is I8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SINGLE)
def test_single_file(folder: Path, fault: str) -> None:
    damage, said = SINGLE[fault]
    damage(folder)
    with pytest.raises(UserError, match=said) as error:
        read_base(folder)
    assert all(str(folder) in problem.where for problem in error.value.problems)
    assert all(problem.hint for problem in error.value.problems)
    assert len(str(error.value)) < 4000


def test_the_undamaged_folder_is_read(folder: Path) -> None:
    assert read_base(folder).total > 0


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        said = json.loads((folder / INDEX).read_text())
        change(said)
        (folder / INDEX).write_text(json.dumps(said))

    return damage


def point(key: str, file: Any) -> Callable[[Path], None]:
    return index(lambda said: said["weight_map"].update({key: file}))


def cut_all(folder: Path) -> None:
    for file in folder.glob("model-*.safetensors"):
        with file.open("r+b") as opened:
            opened.truncate(opened.seek(0, 2) - 1)


SHARD = "model-00001-of-00003.safetensors"
SHARDED: dict[str, tuple[Callable[[Path], None], str]] = {
    "shard missing": (
        remove("model-00002-of-00003.safetensors"),
        r"names 1 of 3 files that are not there: model-00002-of-00003\.safetensors\n\nhint: the download",
    ),
    "all shards missing": (remove(*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))), "names 3 of 3 files"),
    "every shard is truncated": (cut_all, r"(?s)00001-of.*truncated.*00002-of.*truncated.*00003-of.*truncated"),
    "another folder": (point(NORM, "../model.safetensors"), r"what is no file of its folder: \.\./model\.safetensors"),
    "absolute": (point(NORM, "/etc/passwd"), "what is no file of its folder"),
    "file is a number": (point(NORM, 3), "what is no file of its folder: 3"),
    "index of more": (point("language_model.more", SHARD), "names 1 tensors that their file"),
    "index of less": (index(lambda said: said["weight_map"].pop(NORM)), f"1 tensors that it does not name: {NORM}"),
    "index of another shard": (
        index(lambda said: said["weight_map"].update(dict.fromkeys(said["weight_map"], SHARD))),
        r"names \d+ tensors that their file does not hold",
    ),
    "no map": (index(lambda said: said.pop("weight_map")), "it has no weight_map"),
    "empty map": (index(lambda said: said["weight_map"].clear()), "it has no weight_map"),
    "no JSON": (write(INDEX, b"{,}"), "it is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("folder", ["sharded"], indirect=True)
@pytest.mark.parametrize("fault", SHARDED)
def test_sharded(folder: Path, fault: str) -> None:
    damage, said = SHARDED[fault]
    damage(folder)
    with pytest.raises(UserError, match=said):
        read_base(folder)


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.pop("model.layers.0.block_sparse_moe.experts.5.w3.weight"),
            r"1 weights are missing: expert 5 of model\.layers\.0\.mlp\.experts\.gate_up_proj",
        ),
        (
            lambda t: t.update({"model.layers.0.block_sparse_moe.experts.8.w3.weight": torch.ones(32, 64)}),
            r"unknown key\): model\.layers\.0\.block_sparse_moe\.experts\.8\.w3\.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.block_sparse_moe.experts.1.w2.weight": torch.ones(32, 64)}),
            r"experts\.1\.w2\.weight is \[32, 64\], not \[64, 32\]",
        ),
        (rename(".w2.", ".w4."), r"weights are missing: model\.layers\.0\.mlp\.experts\.down_proj"),
    ],
    ids=["an expert missing", "an expert too many", "transposed", "all missing"],
)
def test_experts_one_by_one(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], said: str) -> None:
    tensors(change)(folder)
    with pytest.raises(UserError, match=said):
        read_base(folder)


def test_all_faults_of_a_config_at_once(folder: Path) -> None:
    config(hidden_size=0, vocab_size="many", kv_lora_rank=..., tie_word_embeddings=3)(folder)
    with pytest.raises(UserError) as error:
        read_base(folder)
    assert len(error.value.problems) == 4


def test_no_folder_and_no_permission(folder: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        read_base(folder / "nowhere")
    with pytest.raises(UserError, match="it is a file, not a folder"):
        read_base(folder / CONFIG)


def test_a_config_that_is_a_folder(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()
    with pytest.raises(UserError, match="it can't be read: Is a directory"):
        read_base(folder)
