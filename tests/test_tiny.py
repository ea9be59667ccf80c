"""A tiny model is like the model it replaces: the libraries open it, and it is stored like the published one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from windlass import tiny
from windlass.model import read_base
from windlass.rehearse.scale import scale_config


def stored(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Return type and shape of each tensor."""
    found = {}
    for path in directory.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  (it has no __iter__)
                part = file.get_slice(key)
                found[key] = (part.get_dtype(), part.get_shape())
    return found


def test_mistral4_is_stored_as_published(tmp_path: Path) -> None:
    tensors = stored(tiny.write_model(tmp_path, layers=1, both_layouts=True))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Mistral3ForConditionalGeneration"]
    assert config["text_config"]["model_type"] == "mistral4"
    assert config["quantization_config"]["weight_block_size"] is None
    assert config["quantization_config"]["activation_scheme"] == "static"
    experts = "language_model.model.layers.0.mlp.experts"
    attention = "language_model.model.layers.0.self_attn"
    assert tensors[f"{experts}.gate_up_proj"] == ("F8_E4M3", [8, 64, 64])
    assert tensors[f"{experts}.gate_up_proj_scale_inv"][1] == [8, 1, 1]
    assert tensors[f"{experts}.down_proj_activation_scale"][1] == [8]
    assert tensors[f"{attention}.kv_b_proj.weight"][0] == "F8_E4M3"
    assert tensors[f"{attention}.kv_b_proj.weight_scale_inv"] == ("BF16", [])
    assert f"{attention}.kv_b_proj.activation_scale" in tensors
    assert tensors["language_model.lm_head.weight"][0] == "BF16"
    assert tensors["language_model.model.layers.0.mlp.gate.weight"][0] == "BF16"
    for part in ("vision_tower.", "multi_modal_projector."):
        assert any(key.startswith(part) for key in tensors)
    assert {"consolidated.safetensors", "tekken.json", "params.json"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("family", ["mistral4", "mixtral", "llama"])
def test_plain_models_open_with_nothing_missing(tmp_path: Path, family: str) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for seed, folder in zip((1, 1, 2), folders, strict=True):
        tiny.write_model(folder, family, wrapper=False, quantization="none", tokenizer=False, seed=seed, layers=1)
    first, same, other = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert first == same != other
    (architecture,) = json.loads((folders[0] / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, architecture).from_pretrained(folders[0], output_loading_info=True)
    assert not any(info.values()), info
    assert torch.isfinite(model(torch.arange(12)[None]).logits).all()


def test_replica_uses_the_models_tensor_names(tmp_path: Path) -> None:
    """Converters write a wrapper's names in two ways."""
    tensors: dict[str, Any] = load_file(tiny.write_model(tmp_path / "one", tokenizer=False) / "model.safetensors")
    for ours, theirs in tiny.NESTED:
        tensors = {theirs + key.removeprefix(ours) if key.startswith(ours) else key: t for key, t in tensors.items()}
    save_file(tensors, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    base = read_base(tmp_path / "one")
    tiny.write_like(base, scale_config(base, experts_over=2, vocab=None), tmp_path / "other")
    other = read_base(tmp_path / "other")
    keys = [{p.pieces[0].stored.key for p in each.parameters if ".layers.1." in p.name} for each in (base, other)]
    assert keys[0] == keys[1]
    assert all(key.startswith("model.language_model.") for key in keys[0])
