"""Mistral's own layout of a merged Mistral 4: the same model as in transformers' layout, under the
names that servers read."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from test_export import MLA, export, peft_model, silent
from torch import Tensor

from windlass import tiny
from windlass.errors import RunError
from windlass.export.merged_files import write_merge
from windlass.files import read_json

pytestmark = [
    pytest.mark.xdist_group("export"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]
# What vLLM's MistralLarge3ForCausalLM and PixtralForConditionalGeneration read.
READ = re.compile(
    r"(tok_embeddings|norm|output)\.weight"
    r"|layers\.\d+\.(attention_norm|ffn_norm|gate)\.weight"
    r"|layers\.\d+\.attention\.((wq_a|wq_b|wkv_a_with_mqa|wkv_b|wo)\.(weight|qscale_weight|qscale_act)|(q|kv)_a_norm\.weight)"
    r"|layers\.\d+\.(shared_experts|experts\.\d+)\.w[123]\.(weight|qscale_weight|qscale_act)"
    r"|vision_encoder\.(ln_pre|patch_conv|transformer\.layers\.\d+\.(attention_norm|ffn_norm"
    r"|attention\.w[qkvo]|feed_forward\.w[123]))\.weight"
    r"|vision_language_adapter\.w_(in|out)\.weight|patch_merger\.merging_layer\.weight|pre_mm_projector_norm\.weight"
)
CONFIG = {"target_modules": [*MLA, "down_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
VISION_LAYER = "vision_encoder.transformer.layers.0"
HALF_STEP = {"none": 2.0**-8, "tensor": 2.0**-4}  # relative


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases in FP8 and in 16 bits, with both layouts and with one, and an adapter."""
    root = tmp_path_factory.mktemp("layouts")
    for quantization in ("tensor", "none"):
        base = tiny.write_model(root / quantization, "mistral4", quantization=quantization, both_layouts=True, files=2)
        one = root / f"{quantization} alone"
        shutil.copytree(base, one, ignore=shutil.ignore_patterns("consolidated*", "params.json"))
    peft_model(root / "none", CONFIG).save_pretrained(str(root / "adapter"), save_embedding_layers=False)
    return root


def read_files(folder: Path, pattern: str) -> dict[str, Tensor]:
    return {key: value for path in sorted(folder.glob(pattern)) for key, value in load_file(path).items()}


def decode_transformers(folder: Path) -> dict[str, Tensor]:
    """Return the values of transformers' layout by Mistral's names, as a reader of names would."""
    stored = read_files(folder, "model*.safetensors")
    names = {"embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "kv_b_proj": "wkv_b"}
    names |= {"q_a_proj": "wq_a", "q_b_proj": "wq_b", "kv_a_proj_with_mqa": "wkv_a_with_mqa", "o_proj": "wo"}
    values = {}
    for key, codes in stored.items():
        if "scale" in key or not key.startswith("language_model."):
            continue
        scale = stored.get(f"{key}_scale_inv", torch.ones(())).float()
        value = codes.float() * scale
        layer = re.sub(r"language_model\.model\.(layers\.\d+)\..*", r"\1", key)
        for expert, matrix in enumerate(value) if ".experts." in key and value.ndim == 3 else ():
            if key.endswith("gate_up_proj"):
                values[f"{layer}.experts.{expert}.w1"], values[f"{layer}.experts.{expert}.w3"] = matrix.chunk(2)
            else:
                values[f"{layer}.experts.{expert}.w2"] = matrix
        module = key.removesuffix(".weight").rpartition(".")[2]
        if ".shared_experts." in key:
            matrix = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[module]
            values[f"{layer}.shared_experts.{matrix}"] = value
        elif ".self_attn." in key and module in names:
            values[f"{layer}.attention.{names[module]}"] = value
        elif module in names or key.endswith("model.norm.weight"):
            values[names.get(module, "norm")] = value
    return values


def decode_mistral(folder: Path) -> dict[str, Tensor]:
    stored = read_files(folder, "consolidated*.safetensors")
    weights = {key.removesuffix(".weight"): value for key, value in stored.items() if key.endswith(".weight")}
    return {
        key: value.float() * stored.get(f"{key}.qscale_weight", torch.ones(())).float()
        for key, value in weights.items()
    }


@pytest.mark.parametrize(
    ("quantization", "dtype", "alone"),  # alone: the base has one layout, not both
    [("tensor", None, False), ("tensor", None, True), ("tensor", "bf16", False), ("none", None, True)],
)
def test_both_layouts_decode_alike(
    quantization: str, dtype: str | None, alone: bool, made: Path, tmp_path: Path
) -> None:
    """Within half a step of the format; to the bit where both have the same scale, or one is written from the other."""
    base = made / (f"{quantization} alone" if alone else quantization)
    record = export(
        made / "adapter", tmp_path / "out", merge=True, dtype=dtype, base=str(base), layout="mistral", say=silent
    )
    assert (record["deviations"], record["layouts"]) == ([], ["hf", "mistral"])
    out = tmp_path / "out"
    stored = read_files(out, "consolidated*.safetensors")
    assert all(READ.fullmatch(key) for key in stored), [key for key in stored if not READ.fullmatch(key)]
    one, other = decode_transformers(out), decode_mistral(out)
    before_one, before_other = decode_transformers(base), decode_mistral(made / quantization)
    assert len(one) > 50
    assert one.keys() <= other.keys()
    in_fp8 = quantization == "tensor" and dtype is None
    params, expected = (read_json(folder / "params.json") for folder in (out, made / quantization))
    assert ("quantization" in params) == in_fp8
    assert {**params, "quantization": 0} == {**expected, "quantization": 0}
    for name, value in one.items():
        if alone:
            assert torch.equal(other[name], value), name
            continue
        apart = (before_one[name] - before_other[name]).abs()  # the base's own layouts, within half a step
        assert (apart <= before_one[name].abs() * HALF_STEP[quantization] + value.abs().max() * 1e-5).all(), name
        # Each is rounded once, to one of its neighbours: by the same dither, so they are seldom a full step apart.
        rounded = torch.maximum(value.abs(), other[name].abs()) * HALF_STEP["tensor" if in_fp8 else "none"]
        both = (4 if in_fp8 else 2) * rounded
        assert ((other[name] - value).abs() <= both + apart + value.abs().max() * 1e-5).all(), name
        if in_fp8 and not apart.any() and ".experts." not in name:
            assert torch.equal(other[name], value), name
    adapted = re.compile(r"attention\.w|experts")
    for name, after in stored.items():
        if (not alone and not adapted.search(name)) or name.startswith("vision"):
            before = read_files(made / quantization, "consolidated*.safetensors")[name]
            assert torch.equal(after.view(torch.uint8), before.view(torch.uint8)), name


@pytest.mark.takes("writes and merges both layouts")
def test_layouts_by_default_and_by_request(made: Path, tmp_path: Path) -> None:
    printed: list[str] = []
    for number, (base, layout, files) in enumerate((("none", None, 1), ("none", "hf", 0), ("none alone", None, 0))):
        out = tmp_path / str(number)
        export(made / "adapter", out, merge=True, base=str(made / base), layout=layout, say=printed.append)
        assert len(list(out.glob("consolidated*.safetensors"))) == files
        assert (out / "params.json").is_file() == bool(files)
    notes = [line for line in printed if "vLLM doesn't open this folder" in line]
    assert len(notes) == 2
    assert all("add --layout mistral" in note for note in notes)
    llama = tiny.write_model(tmp_path / "llama", "llama", tokenizer=False)
    peft_model(llama, {"target_modules": ["q_proj"]}).save_pretrained(str(tmp_path / "small"))
    with refused("no-such-layout", "--layout"):
        export(tmp_path / "small", tmp_path / "no", merge=True, layout="mistral", say=silent)
    with refused("no-such-layout", "--layout"):
        export(tmp_path / "small", tmp_path / "no", layout="mistral", say=silent)


@pytest.mark.takes("writes and merges both layouts")
def test_files_that_vllm_needs_and_the_base_lacks(made: Path, tmp_path: Path) -> None:
    """With the command that gets each, if the base has a name on the hub."""
    base = tmp_path / "base"
    shutil.copytree(made / "none alone", base)
    (base / "tekken.json").unlink()

    def notes(**options: Any) -> list[str]:
        lines: list[str] = []
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        adapter = made / "adapter" if "merge" in options else tmp_path / "served"
        export(adapter, tmp_path / "out", base=str(base), say=lines.append, **options)
        return [line for line in lines if "vLLM needs" in line]

    (note,) = notes(merge=True, called="org/name")
    assert f"`hf download org/name --include '*processor_config.json' --local-dir {tmp_path / 'out'}`" in note
    (note,) = notes(merge=True, layout="mistral")
    assert "copy it there from the repository that base was downloaded from" in note
    assert f"tekken.json in {tmp_path / 'out'}, and the base has none" in note
    peft_model(base, {"target_modules": ["o_proj"]}).save_pretrained(str(tmp_path / "served"))
    (note,) = notes(server="vllm", called="org/name")  # an unmerged adapter is served with the base's own folder
    assert f"`hf download org/name --include '*processor_config.json' --local-dir {base}`" in note
    for name in ("params.json", "consolidated.safetensors"):
        (base / name).touch()
    (note,) = notes(server="vllm")
    assert f"vLLM needs tekken.json in {base}, and the base has none" in note
    for name in ("params.json", "consolidated.safetensors"):
        (base / name).unlink()
    (base / "processor_config.json").write_text("{}")
    assert notes(merge=True) == notes(server="vllm") == []


@pytest.mark.fault(
    "params.json beside other weights than config.json", "`windlass export --merge`", "belong to different weights"
)
def test_layouts_of_different_weights_are_refused(made: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(made / "tensor", base)
    weights = load_file(base / "consolidated.safetensors")
    weights["layers.1.experts.3.w3.qscale_weight"] *= 2
    save_file(weights, base / "consolidated.safetensors")
    with refused("layouts-differ") as problems:
        export(made / "adapter", tmp_path / "out", merge=True, base=str(base), say=silent)
    assert "belong to different weights (1): model.layers.1.mlp.experts.gate_up_proj" in problems[0].problem
    export(made / "adapter", tmp_path / "out", merge=True, base=str(base), layout="hf", say=silent)


@pytest.mark.parametrize(
    ("key", "alone"),
    [
        ("layers.0.experts.2.w3.weight", True),
        ("vision_encoder.transformer.layers.0.attention.wk.weight", False),
    ],
)
def test_damage_to_mistrals_files_is_detected(
    key: str, alone: bool, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_badly(plan: Any, *arguments: Any) -> None:
        write_merge(plan, *arguments)
        for file in (tmp_path / "out").glob("consolidated*.safetensors"):
            weights = load_file(file)
            if key in weights:
                weights[key] = weights[key].flip(0)
                save_file(weights, file, metadata={"format": "pt"})

    monkeypatch.setattr("windlass.export.merge.write_merge", write_badly)  # the fault
    base = made / ("none alone" if alone else "none")
    with refused("not-base-plus-adapter", error=RunError):
        export(made / "adapter", tmp_path / "out", merge=True, base=str(base), layout="mistral", say=silent)
