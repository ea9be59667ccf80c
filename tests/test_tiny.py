"""A tiny model is what it stands for: the libraries open it, and its layout on disk is the published one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass import tiny


def header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        entries: dict[str, Any] = json.loads(opened.read(length))
    entries.pop("__metadata__")
    return entries


def keys(directory: Path) -> dict[str, Any]:
    return {key: entry for file in directory.glob("model*.safetensors") for key, entry in header(file).items()}


def test_mistral4_is_stored_as_published(tmp_path: Path) -> None:
    stored = keys(tiny.write(tmp_path, layers=1, decoys=True))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Mistral3ForConditionalGeneration"]
    assert config["text_config"]["model_type"] == "mistral4"
    assert config["quantization_config"]["weight_block_size"] is None
    assert config["quantization_config"]["activation_scheme"] == "static"
    experts = "language_model.model.layers.0.mlp.experts"
    attention = "language_model.model.layers.0.self_attn"
    assert stored[f"{experts}.gate_up_proj"] | {"data_offsets": 0} == {
        "dtype": "F8_E4M3",
        "shape": [8, 64, 64],
        "data_offsets": 0,
    }
    assert stored[f"{experts}.gate_up_proj_scale_inv"]["shape"] == [8, 1, 1]
    assert stored[f"{experts}.down_proj_activation_scale"]["shape"] == [8]
    assert stored[f"{attention}.kv_b_proj.weight"]["dtype"] == "F8_E4M3"
    assert stored[f"{attention}.kv_b_proj.weight_scale_inv"] | {"data_offsets": 0} == {
        "dtype": "BF16",
        "shape": [],
        "data_offsets": 0,
    }
    assert f"{attention}.kv_b_proj.activation_scale" in stored
    assert stored["language_model.lm_head.weight"]["dtype"] == "BF16"
    assert stored["language_model.model.layers.0.mlp.gate.weight"]["dtype"] == "BF16"
    assert any(key.startswith("vision_tower.") for key in stored)
    assert any(key.startswith("multi_modal_projector.") for key in stored)
    assert {"consolidated.safetensors", "tekken.json", "params.json"} <= {file.name for file in tmp_path.iterdir()}


def test_a_tied_head_is_not_stored(tmp_path: Path) -> None:
    assert not [key for key in keys(tiny.write(tmp_path, tied=True, tokenizer=False)) if "lm_head" in key]


def test_the_index_names_every_key_once(tmp_path: Path) -> None:
    tiny.write(tmp_path, files=3, tokenizer=False)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == keys(tmp_path).keys()
    assert len(set(index.values())) == 3
    assert all(key in header(tmp_path / file) for key, file in index.items())


def test_mixtral_experts_are_stored_one_by_one(tmp_path: Path) -> None:
    stored = keys(tiny.write(tmp_path, "mixtral", experts=4, tokenizer=False))
    assert [stored[f"model.layers.1.block_sparse_moe.experts.{i}.w1.weight"]["shape"] for i in range(4)] == [
        [32, 64]
    ] * 4


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_plain_models_open_with_nothing_missing(tmp_path: Path, family: str) -> None:
    import transformers

    tiny.write(tmp_path, family, wrapper=False, quantization="none", tokenizer=False)
    (architecture,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.isfinite(model(torch.arange(12)[None]).logits).all()


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        tiny.write(tmp_path / str(i), tokenizer=False, seed=seed) for i, seed in enumerate([1, 1, 2])
    )
    content = [(directory / "model.safetensors").read_bytes() for directory in (first, again, other)]
    assert content[0] == content[1] != content[2]


@pytest.mark.parametrize("scheme", ["tensor", "block128"])
def test_codes_times_scales_are_the_weights(scheme: str) -> None:
    torch.manual_seed(0)
    for weight in (torch.randn(200, 300), torch.randn(3, 130, 70) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]):
        code, scale = tiny._to_fp8(weight, scheme)
        spread = scale.float()
        if scheme == "block128":
            spread = spread.repeat_interleave(128, -2).repeat_interleave(128, -1)
            spread = spread[..., : weight.shape[-2], : weight.shape[-1]]
        error = (code.float() * spread - weight).abs()
        # e4m3 has 3 bits of mantissa: half a step is 1/16 of the value; the smallest codes step by 2**-9.
        assert (error <= weight.abs() / 16 + spread * 2**-9).all()


def test_the_tokenizer_opens_beside_the_publishers_own(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny.write(tmp_path, decoys=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "The with statement, naïvely — x[0] += 1"
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id == 1
    assert tokenizer.pad_token_id == 11
    assert len(tokenizer) == 512
    assert len(tokens) < len(text)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>"
    )


def test_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tiny model of 'bert'"):
        tiny.write(tmp_path, "bert")
