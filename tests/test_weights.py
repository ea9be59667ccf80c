"""Checkpoints in the layouts they are published in: every stored tensor finds its place, or its reason."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from windlass import tiny
from windlass.errors import UserError
from windlass.model import Base, Piece, find_base, published_base, read_base
from windlass.model.published import CONFIGS

LAYOUTS: dict[str, dict[str, Any]] = {
    "published": {"family": "mistral4", "decoys": True},
    "published, sharded": {"family": "mistral4", "files": 5, "decoys": True},
    "blocks": {"family": "mistral4", "quantization": "block128", "hidden": 192, "moe_intermediate": 160},
    "plain": {"family": "mistral4", "wrapper": False, "quantization": "none"},
    "dense first": {"family": "mistral4", "config": {"first_k_dense_replace": 1}},
    "mistral, wrapped": {"family": "mistral", "wrapper": True, "quantization": "tensor"},
    "llama, tied": {"family": "llama", "tied": True, "files": 3},
    "mixtral": {"family": "mixtral"},
    "mixtral, fp8": {"family": "mixtral", "quantization": "tensor", "files": 2},
    "qwen3_moe": {"family": "qwen3_moe", "files": 3},
    "qwen3_moe, blocks": {"family": "qwen3_moe", "quantization": "block128", "hidden": 192, "moe_intermediate": 160},
    "qwen3_moe, some dense": {"family": "qwen3_moe", "config": {"mlp_only_layers": [0]}},
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    return {name: tiny.write(root / name.replace(", ", "-"), tokenizer=False, **how) for name, how in LAYOUTS.items()}


def model_of(checkpoint: Base) -> torch.nn.Module:
    config = transformers.CONFIG_MAPPING[checkpoint.family.model_type].from_dict(dict(checkpoint.config))
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, checkpoint.family.causal_lm)(config)
    return model


def value(piece: Piece) -> torch.Tensor:
    """What a piece without scale holds, read by its offsets alone."""
    stored = piece.stored
    assert (stored.dtype, piece.scale) == ("BF16", None)
    with stored.file.open("rb") as opened:
        opened.seek(stored.start)
        data = bytearray(opened.read(stored.end - stored.start))
    return torch.frombuffer(data, dtype=torch.bfloat16).reshape(stored.shape)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_are_the_model_s(checkpoints: dict[str, Path], name: str) -> None:
    checkpoint = read_base(checkpoints[name])
    wanted = {name: tuple(parameter.shape) for name, parameter in model_of(checkpoint).named_parameters()}
    assert {parameter.name: parameter.shape for parameter in checkpoint.parameters} == wanted
    assert checkpoint.total == sum(map(prod, wanted.values()))
    assert checkpoint.path == checkpoints[name]
    assert checkpoint.notes == ()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_stored_tensor_has_a_use_or_a_reason(checkpoints: dict[str, Path], name: str) -> None:
    folder = checkpoints[name]
    checkpoint = read_base(folder)
    pieces = [piece for parameter in checkpoint.parameters for piece in parameter.pieces]
    used = [stored.key for piece in pieces for stored in (piece.stored, piece.scale) if stored]
    unread = [stored.key for stored in checkpoint.unread]
    stored = {key for file in folder.glob("model*.safetensors") for key in load_file(file)}
    assert sorted([*used, *unread]) == sorted(stored)
    assert all(key.endswith("activation_scale") or "vision" in key or "projector" in key for key in unread)
    assert all((piece.stored.dtype == "F8_E4M3") == (piece.scale is not None) for piece in pieces)
    assert any(piece.scale for piece in pieces) == (checkpoint.quantization is not None)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe, some dense", "llama, tied", "plain"])
def test_pieces_hold_what_transformers_loads(checkpoints: dict[str, Path], name: str) -> None:
    """Offsets of experts and halves, against the library's own loading."""
    checkpoint = read_base(checkpoints[name])
    model = getattr(transformers, checkpoint.family.causal_lm).from_pretrained(checkpoints[name], dtype=torch.bfloat16)
    truth = model.state_dict()
    for parameter in checkpoint.parameters:
        assembled = torch.full(parameter.shape, float("nan"), dtype=torch.bfloat16)
        for piece in parameter.pieces:
            part = value(piece)
            outer = len(parameter.shape) - part.ndim
            spot = assembled[piece.offset[0]] if outer else assembled
            for axis, (start, size) in enumerate(zip(piece.offset[outer:], part.shape, strict=True)):
                spot = spot.narrow(axis, start, size)
            spot.copy_(part)
        assert torch.equal(assembled, truth[parameter.name]), parameter.name


def test_wrapper_and_quantisation_are_told(checkpoints: dict[str, Path]) -> None:
    checkpoint = read_base(checkpoints["published"])
    assert checkpoint.wrapper == "Mistral3ForConditionalGeneration"
    assert checkpoint.family.causal_lm == "Mistral4ForCausalLM"
    assert checkpoint.config["model_type"] == "mistral4"
    assert checkpoint.quantization is not None
    assert checkpoint.quantization["weight_block_size"] is None
    (experts,) = (p for p in checkpoint.parameters if p.name == "model.layers.1.mlp.experts.down_proj")
    assert experts.pieces[0].stored.key == "language_model.model.layers.1.mlp.experts.down_proj"
    assert experts.pieces[0].scale is not None
    assert experts.pieces[0].scale.shape == (8, 1, 1)
    assert checkpoint.dims["dense_layers"] == 0
    assert read_base(checkpoints["dense first"]).dims["dense_layers"] == 1


def test_block_scales_are_two_dimensional(checkpoints: dict[str, Path]) -> None:
    checkpoint = read_base(checkpoints["qwen3_moe, blocks"])
    scales = {piece.scale.shape for p in checkpoint.parameters for piece in p.pieces if piece.scale}
    assert (2, 2) in scales
    assert checkpoint.quantization is not None
    assert checkpoint.quantization["weight_block_size"] == [128, 128]
    fused = [p for p in checkpoint.parameters if p.part == "experts"]
    assert {len(p.pieces) for p in fused} == {8, 16}
    assert fused[0].pieces[1].offset == (0, 160, 0)


def rewrite(folder: Path, target: Path, rename: Any) -> Path:
    """The same checkpoint under other names."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    save_file({rename(key): tensor.contiguous() for key, tensor in stored.items()}, target / "model.safetensors")
    return target


def newer(key: str) -> str:
    """As classes of transformers 5 call it in memory, and the publisher's converter writes it."""
    for old, new in (("language_model.lm_head", "lm_head"), ("language_model.model", "model.language_model")):
        if key.startswith(old):
            return key.replace(old, new, 1)
    return f"model.{key}"


def test_the_wrapper_s_newer_spelling_is_read_too(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    old = read_base(checkpoints["published"])
    new = read_base(rewrite(checkpoints["published"], tmp_path / "new", newer))
    assert [(p.name, p.shape, p.part) for p in new.parameters] == [(p.name, p.shape, p.part) for p in old.parameters]
    assert {s.key for s in new.unread} == {newer(s.key) for s in old.unread}
    assert new.parameters[0].pieces[0].stored.key == "model.language_model.embed_tokens.weight"


def test_experts_that_are_fused_on_disk_are_read_in_every_family(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    (experts, _) = (p for p in read_base(tmp_path).parameters if p.part == "experts")
    assert experts.pieces[0].stored.key == "model.layers.0.mlp.experts.gate_up_proj"
    assert experts.pieces[0].offset == (0, 0, 0)


def test_a_tied_head_that_is_stored_all_the_same_is_noted(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "tied", "llama", tied=True, tokenizer=False)
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    checkpoint = read_base(folder)
    assert {each.key: why for each, why in checkpoint.unread.items()} == {
        "lm_head.weight": "config.json ties the head to the embedding"
    }
    assert checkpoint.notes == ("lm_head.weight is stored and not read: config.json ties the head to the embedding",)


def test_a_head_tied_by_the_wrapper_is_tied(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = rewrite(checkpoints["published"], tmp_path / "tied", str)
    stored = load_file(folder / "model.safetensors")
    del stored["language_model.lm_head.weight"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"1 weights are missing: lm_head\.weight"):
        read_base(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    checkpoint = read_base(folder)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert not any(p.part == "head" for p in checkpoint.parameters)
    assert len(checkpoint.notes) == 1


def test_one_whole_file_goes_before_an_index(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = rewrite(checkpoints["published"], tmp_path / "both", str)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert read_base(folder).total == read_base(checkpoints["published"]).total


def test_names_are_the_folder_s_or_the_hub_cache_s(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    snapshots = tmp_path / "models--mistralai--Mistral-7B-v0.1" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "0123abcd").symlink_to(checkpoints["llama, tied"])
    assert read_base(snapshots / "0123abcd").name == "Mistral-7B-v0.1"
    assert read_base(checkpoints["llama, tied"]).name == "llama-tied"


def test_find_reads_a_folder(checkpoints: dict[str, Path]) -> None:
    found = find_base(str(checkpoints["mixtral"]), "run.yaml:2")
    assert found.path == checkpoints["mixtral"]


@pytest.mark.parametrize("prefix", ["/data/input/Models/", "mistralai/", "", "no/such/"])
def test_find_plans_known_models_without_weights(prefix: str) -> None:
    found = find_base(f"{prefix}Mistral-Small-4-119B-2603", "run.yaml:2: model.model_name_or_path")
    assert found.path is None
    assert found.total == 118_972_826_624
    (note,) = found.notes
    assert note.startswith(f"no weights at {prefix}Mistral-Small-4-119B-2603: planned from the published config")
    assert note.endswith("check and train will refuse this path")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("/data/Mistral-Small-4-119B", "nearest published: Mistral-Small-4-119B-2603"),
        ("Qwen/Qwen3-30B-A3", "nearest published: Qwen3-30B-A3B"),
        ("zzz", "published configs are known of Mistral-Small-4-119B-2603"),
        ("", "folder"),
        ("~no-such-user-here/x", "can't be opened"),
        ("a" * 5000, "can't be opened"),
        ("a\0b", "no config is known"),
    ],
)
def test_unknown_models_are_refused_with_the_nearest(asked: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        find_base(asked, "run.yaml:2: model.model_name_or_path")
    assert len(str(error.value)) < 1500


def test_a_file_is_no_model_folder(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="is a file, not a folder"):
        find_base(str(checkpoints["published"] / "model.safetensors"), "run.yaml:2")


def sparse_119b(folder: Path, shards: int = 48) -> int:
    """Mistral Small 4 as published: true headers before files of true length that take no space. Returns its bytes."""
    known = published_base("Mistral-Small-4-119B-2603")
    assert known is not None
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("vision_tower.patch_conv.weight", "BF16", (1024, 3, 14, 14))]
    for p in known.parameters:
        key, fp8 = f"language_model.{p.name}", p.part in ("attention", "shared_experts", "experts")
        tensors.append((key, "F8_E4M3" if fp8 else "BF16", p.shape))
        if p.part == "experts":
            tensors += [(f"{key}_scale_inv", "BF16", (128, 1, 1)), (f"{key}_activation_scale", "BF16", (128,))]
        elif fp8:
            tensors += [(f"{key}_scale_inv", "BF16", ()), (f"{key[:-6]}activation_scale", "BF16", ())]
    sizes = [prod(shape) * (1 if dtype == "F8_E4M3" else 2) for _, dtype, shape in tensors]
    total, done = sum(sizes), 0
    headers: list[dict[str, Any]] = [{} for _ in range(shards)]
    lengths = [0] * shards
    for (key, dtype, shape), size in zip(tensors, sizes, strict=True):
        shard = done * shards // total
        headers[shard][key] = {"dtype": dtype, "shape": shape, "data_offsets": [lengths[shard], lengths[shard] + size]}
        lengths[shard] += size
        done += size
    weight_map: dict[str, str] = {}
    for shard, (header, length) in enumerate(zip(headers, lengths, strict=True)):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            opened.truncate(8 + len(text) + length)
        weight_map |= dict.fromkeys(header, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIGS["Mistral-Small-4-119B-2603"]))
    return total


MEASURE = """
import re, sys, time
from pathlib import Path
from windlass.model import read_base
took = []
for _ in range(5):
    started = time.perf_counter()
    checkpoint = read_base(Path(sys.argv[1]))
    took.append(time.perf_counter() - started)
# Not ru_maxrss, which a process inherits from the one that started it.
mib = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
print(min(took), mib, checkpoint.total, int("torch" in sys.modules or "pydantic" in sys.modules))
"""


def test_119_billion_parameters_are_read_in_no_time_and_memory(tmp_path: Path) -> None:
    total = sparse_119b(tmp_path)
    assert total > 119e9
    taken = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    if taken > 2**26:
        pytest.skip("this file system has no sparse files")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    seconds, mib, parameters, heavy = map(float, done.stdout.split())
    assert parameters == 118_972_826_624
    assert seconds < 0.3
    assert mib < 60
    assert not heavy
