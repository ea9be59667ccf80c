"""Bases that compressed-tensors published: their values are the library's, bit for bit; what windlass can't read is
refused by name."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from refusals import refused
from safetensors.torch import load_file, save_file
from test_export import peft_model, plain_model
from torch import Tensor
from transformers import AutoModelForImageTextToText

from windlass import tiny
from windlass.errors import UserError
from windlass.export import export
from windlass.model import read_base
from windlass.model.base import find_published_base
from windlass.model.compressed import is_ignored
from windlass.model.config import describe
from windlass.model.mistral_layout import make_params, rename_module, rename_vision
from windlass.model.quantization import published_dtype, quantizable_names
from windlass.plan.layout import Layout
from windlass.settings import FOUR_BITS
from windlass.train.load import list_unique_tensors, load_base
from windlass.weights.quantized import dequantize, list_quantized_params

ALONE = Layout(name="resident", reason="test", nodes=1, gpus_per_node=1, shard=1, precision="no")
ROWS, COLUMNS = 32, 64  # of k_proj in the tiny Llama
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
# SHA-256 of what compressed-tensors 0.20.0 decompresses `make_patterned`'s tensors to, in bfloat16.
GOLDEN = {
    "fp8-tensor": "5947caefa867cbd9",
    "fp8-channel": "74ca116dd3d2148d",
    "fp8-block": "5947caefa867cbd9",
    "nvfp4": "21f1f9606eeec232",
    "int4": "92a423de03f449d2",
    "int4-channel": "d8018294843ed217",
    "uint4": "d8b998430c7636c2",
}


def base_dtype(scheme: str) -> str:
    return scheme.partition("-")[0]


def make_patterned(scheme: str) -> dict[str, Tensor]:
    """Return tensors of one matrix, by the ends of their names."""

    def count(size: int, modulus: int) -> Tensor:
        return (torch.arange(size) * 37 + 11) % modulus

    scales = ((count(ROWS * COLUMNS // 16, 101) + 1) / 997).view(ROWS, COLUMNS // 16)
    if scheme.startswith("fp8"):
        codes = count(ROWS * COLUMNS, 127).to(torch.uint8).view(torch.float8_e4m3fn).view(ROWS, COLUMNS)
        one = {"tensor": scales[0, :1], "channel": scales[:, :1].bfloat16(), "block": scales[:1, :1]}
        return {"": codes, "_scale": one[scheme.removeprefix("fp8-")].contiguous()}
    codes = count(ROWS * COLUMNS // 2, 256).to(torch.uint8).view(ROWS, COLUMNS // 2)
    if scheme == "nvfp4":
        scales = (scales * 3000).to(torch.float8_e4m3fn)
        return {"_packed": codes, "_scale": scales, "_global_scale": torch.tensor([1234.5])}
    scales = scales[:, :1] if scheme.endswith("channel") else scales
    shape = torch.tensor([ROWS, COLUMNS])
    stored = {"_packed": codes.view(torch.int32), "_scale": scales.bfloat16().contiguous(), "_shape": shape}
    if scheme == "uint4":
        zeros = count(ROWS // 8 * COLUMNS // 16 * 4, 256).to(torch.uint8).view(torch.int32)
        stored["_zero_point"] = zeros.view(ROWS // 8, COLUMNS // 16)
    return stored


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    for scheme in tiny.COMPRESSED:
        tiny.write_model(folder / scheme, "llama", quantization=scheme, tokenizer=False)
    return folder


def changed(
    root: Path, to: Path, scheme: str, change: Callable[[dict[str, Tensor]], Any] = len, config: Any = None
) -> Path:
    """Return a copy of a checkpoint with changed tensors, and other keys in its quantization_config."""
    stored = load_file(root / scheme / "model.safetensors")
    change(stored)
    to.mkdir(exist_ok=True)
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    table = json.loads((root / scheme / "config.json").read_text())
    table["quantization_config"] |= config or {}
    (to / "config.json").write_text(json.dumps(table))
    return to


def load(folder: Path, dtype: torch.dtype, kept: str) -> Any:
    return load_base(read_base(folder), replace(ALONE, base_dtype=kept), dtype=dtype)[0]


def values_of(folder: Path, dtype: torch.dtype, kept: str) -> dict[str, Tensor]:
    return read_values(load(folder, dtype, kept), dtype, kept)


def read_values(model: Any, dtype: torch.dtype, kept: str) -> dict[str, Tensor]:
    """Return all weights as the model computes with them, from codes or decoded while loading."""
    weights = list_quantized_params(model)
    assert bool(weights) == (kept != "bf16")
    values = {}
    for name, tensor in list_unique_tensors(model).items():
        if name in weights:
            coding = weights[name].format
            tensor = dequantize(*coding.parts(tensor.detach(), weights[name].scale), coding, dtype)
        values[name] = tensor.detach()
    return values


@pytest.mark.parametrize("scheme", tiny.COMPRESSED)
def test_values_are_those_that_the_library_gave(root: Path, tmp_path: Path, scheme: str) -> None:
    def put(stored: dict[str, Tensor]) -> None:
        stored |= {f"{K_PROJ}{end}": tensor for end, tensor in make_patterned(scheme).items()}

    folder = changed(root, tmp_path, scheme, put)
    for kept in ("bf16", base_dtype(scheme)):
        values = values_of(folder, torch.bfloat16, kept)[K_PROJ]
        digest = hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        assert digest[:16] == GOLDEN[scheme], kept


@pytest.mark.parametrize("scheme", tiny.COMPRESSED)
def test_codes_and_decoded_weights_compute_the_same(root: Path, scheme: str) -> None:
    dtype = torch.bfloat16 if scheme == "fp8-channel" else torch.float32
    assert published_dtype(read_base(root / scheme)) == base_dtype(scheme)
    models = {how: load(root / scheme, dtype, how) for how in (base_dtype(scheme), "bf16")}
    kept, decoded = (read_values(model, dtype, how) for how, model in models.items())
    for name, values in decoded.items():
        assert torch.equal(kept[name], values), name
    outcomes = []
    for model in models.values():
        embedded = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        loss = model(inputs_embeds=embedded, labels=torch.arange(32).view(2, 16)).loss
        outcomes.append((loss.detach(), *torch.autograd.grad(loss, embedded)))
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def group(**weights: Any) -> dict[str, Any]:
    form, usual = tiny.COMPRESSED["int4"]
    return {"config_groups": {"group_0": {"targets": ["Linear"], "format": form, "weights": {**usual, **weights}}}}


OF_FP8 = tiny.make_compressed_config("fp8-channel")["config_groups"]["group_0"]
OF_NVFP4 = tiny.make_compressed_config("nvfp4")["config_groups"]["group_0"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown scheme": (
        {"config_groups": {"group_0": {**OF_NVFP4, "format": "mxfp6-pack-quantized"}}},
        "unsupported scheme: mxfp6-pack-quantized, float of 4 bits by tensor_group",
    ),
    "zero points of floats": (
        {"config_groups": {"group_0": {**OF_FP8, "weights": {**OF_FP8["weights"], "symmetric": False}}}},
        "float of 8 bits by channel, with zero points",
    ),
    "columns reordered while served": (
        group(actorder="dynamic"),
        "actorder: group, whose columns are in another order",
    ),
    "mixed schemes": (
        {"config_groups": {"group_0": OF_NVFP4, "group_1": OF_FP8}},
        "weights of several schemes: group_0 is nvfp4-pack-quantized, float of 4 bits by tensor_group; group_1 is",
    ),
    "a preset's name": ({"config_groups": {"NVFP4": ["Linear"]}}, "its weights' scheme can't be read: ['Linear']"),
    "sparse weights": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights ('sparse-24-bitmask')"),
    "rotated weights": ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "rotated weights"),
}


@pytest.mark.fault(
    "weights of several compressed-tensors schemes", "`windlass plan`", "weights of several schemes: group_0 is nvfp4"
)
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.fault(
    "a compressed-tensors scheme that windlass doesn't read",
    "`windlass plan`",
    "unsupported scheme: mxfp6-pack-quantized, float of 4 bits by tensor_group",
)
def test_what_is_not_read_is_refused_by_name(root: Path, tmp_path: Path, case: str) -> None:
    config, why = REFUSED[case]
    with refused("unsupported-quantization") as problems:
        read_base(changed(root, tmp_path, "int4", config=config))
    assert why in problems[0].problem
    assert "layout.base_dtype: nf4" in problems[0].hint


def test_schemes_that_are_the_same_in_several_groups_are_read(root: Path, tmp_path: Path) -> None:
    two = {"config_groups": {"group_0": OF_NVFP4, "group_1": {**OF_NVFP4, "targets": ["re:.*o_proj"]}}}
    assert published_dtype(read_base(changed(root, tmp_path, "nvfp4", config=two))) == "nvfp4"


@pytest.mark.fault(
    "a weight that compressed-tensors stored lacks its scale",
    "`windlass plan`",
    "quantized weights without a scale (1): model.layers.0.self_attn.k_proj.weight",
)
@pytest.mark.parametrize(
    ("scheme", "end"),
    [("fp8-channel", "_scale"), ("uint4", "_zero_point")],
)
def test_a_missing_scale_is_named(root: Path, tmp_path: Path, scheme: str, end: str) -> None:
    folder = changed(root, tmp_path, scheme, lambda stored: stored.pop(f"{K_PROJ}{end}"))
    with refused("no-scale") as problems:
        read_base(folder)
    assert len(problems) == 1
    expected = "quantized weights without a scale (1): model.layers.0.self_attn.k_proj.weight"
    assert expected in problems[0].problem


def test_what_servers_quantize_besides_is_said_and_left_aside(root: Path, tmp_path: Path) -> None:
    def add(stored: dict[str, Tensor]) -> None:
        for name in ("k_scale", "v_scale"):
            stored[f"model.layers.0.self_attn.{name}"] = torch.tensor(0.5)
        stored[K_PROJ.replace("weight", "input_global_scale")] = torch.tensor([0.5])

    folder = changed(root, tmp_path, "fp8-channel", add, {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    base = read_base(folder)
    assert [note.partition(" quantize this model's ")[2].split()[0] for note in base.notes] == ["activations;", "KV"]
    assert {stored.key.rpartition(".")[2] for stored in base.unread} == {"k_scale", "v_scale", "input_global_scale"}
    load_base(base, ALONE)


def test_what_is_left_in_16_bits_is_named_whole_or_begun_by_a_pattern() -> None:
    named = "model.layers.0.self_attn.q_proj"
    for ignored in ([named], ["re:.*q_proj"], ["re:model.layers.0"], ["re:model.language_model.layers.0.self_attn"]):
        assert is_ignored(named, ignored), ignored
    for ignored in (["model.layers.0"], ["q_proj"], ["re:layers.0"], ["re:model.layers.1"], []):
        assert not is_ignored(named, ignored), ignored


def test_what_is_quantized_is_known_from_config_alone() -> None:
    published = find_published_base("Qwen3-30B-A3B")
    assert published
    config = published.config | {"architectures": None}
    quantized = tiny.make_compressed_config("nvfp4")
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    base = describe(config | {"quantization_config": {**quantized, "ignore": ignore}}, "config.json")
    assert published_dtype(base) == "nvfp4"
    assert {name.rpartition(".")[2] for name in quantizable_names(base)} == {"gate_up_proj", "down_proj"}


def test_bytes_are_those_that_the_plan_counts(root: Path) -> None:
    for kind in ("nvfp4", "int4", "uint4"):
        model, _ = load_base(read_base(root / kind), replace(ALONE, base_dtype=kind))
        weights = list_quantized_params(model)
        stored = list_unique_tensors(model)
        most = sum(stored[name].numel() for name in weights)
        values = sum(stored[name][..., 0].numel() * weight.format.columns for name, weight in weights.items())
        planned = FOUR_BITS[kind]._replace(block=16).bytes + (4 / 64 if kind == "nvfp4" else 0)
        assert most == pytest.approx(values * planned, rel=0.02)


def test_a_run_that_asks_for_another_dtype_is_told_what_there_is(root: Path) -> None:
    with pytest.raises(UserError, match="is not stored in INT4"):
        load_base(read_base(root / "nvfp4"), replace(ALONE, base_dtype="int4"))


def write_native(root: Path, to: Path, quantized: dict[str, Any]) -> Path:
    """Write the tiny Mistral 4 in Mistral's own layout alone, as its NVFP4 is published, and its config.json in FP8."""
    tiny.write_model(root, "mistral4", quantization="nvfp4", tokenizer=False)
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}  # of the other repository
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config))
    params = make_params({key: value for key, value in config.items() if key != "quantization_config"})
    (to / "params.json").write_text(json.dumps({**params, "quantization": quantized}))
    stored = {}
    for key, tensor in load_file(root / "model.safetensors").items():
        text = key.removeprefix("language_model.")
        if re.match("vision_tower|multi_modal_projector", key):
            stored[rename_vision(key)] = tensor
        elif match := re.fullmatch(r"model\.(layers\.\d+)\.mlp(\.experts\.\d+)\.(gate|up|down)_proj\.(\w+)", text):
            stored[f"{match[1]}{match[2]}.{ {'gate': 'w1', 'up': 'w3', 'down': 'w2'}[match[3]] }.{match[4]}"] = tensor
        else:
            module, _, leaf = text.rpartition(".")
            stored[f"{rename_module(module)}.{leaf}"] = tensor
    save_file(stored, to / "consolidated-00001-of-00001.safetensors", metadata={"format": "pt"})
    return to


def test_nvfp4_in_mistrals_own_layout_is_read(tmp_path: Path) -> None:
    quantized = tiny.make_compressed_config("nvfp4") | {"quant_method": "compressed_tensors"}
    folder = write_native(tmp_path / "theirs", tmp_path / "native", quantized)
    assert published_dtype(read_base(folder)) == "nvfp4"
    for kept in ("nvfp4", "bf16"):
        one, other = (values_of(path, torch.bfloat16, kept) for path in (folder, tmp_path / "theirs"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], values) for name, values in other.items())
    (folder / "config.json").unlink()
    with refused("no-config") as problems:
        read_base(folder)
    assert "copy config.json and the tokenizer's files" in problems[0].hint


# PEFT still uses names of transformers that its next major version drops.
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("layout", ["native", "ignored"])
def test_a_mistral_4_in_nvfp4_is_merged_into_16_bits(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its experts, stored one by one, become the fused ones that transformers opens; from Mistral's own layout alone,
    what vLLM opens."""
    write_native(tmp_path / "theirs", tmp_path / "native", tiny.make_compressed_config("nvfp4"))
    base = tmp_path / layout
    targets: dict[str, Any] = {"target_modules": ["o_proj"]}
    if layout == "ignored":  # experts of a layer in 16 bits, and no adapter on them
        ignore_experts(tmp_path / "theirs", base)
    else:
        targets["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    plain = plain_model(base).state_dict()
    model = peft_model(base, targets)
    model.save_pretrained(str(tmp_path / "adapter"))

    to = tmp_path / "merged"
    record = export(tmp_path / "adapter", to, merge=True, dtype="bf16", probes=False, say=print)
    assert record["deviations"] == []
    assert "kl" in record["logits"]
    assert record["kept"] == pytest.approx(1, abs=0.02)
    names = {name for file in to.glob("*.safetensors") for name in load_file(file)}
    assert not {name for name in names if re.search("packed|scale", name)}
    fused = {name for name in names if name.endswith("mlp.experts.gate_up_proj")}
    single = {name for name in names if re.search(r"^layers.*experts\.0\.w1\.weight$", name)}
    assert (bool(fused), bool(single)) == (layout != "native", layout == "native")
    assert "quantization" not in json.loads((to / "config.json").read_text())
    assert "quantization_config" not in json.loads((to / "config.json").read_text())

    truth = PeftModel.from_pretrained(plain_model(base), str(tmp_path / "adapter")).merge_and_unload().state_dict()
    merged = plain_model(to).state_dict()
    assert merged.keys() == truth.keys()
    for name, value in truth.items():
        if torch.equal(value, plain[name]):
            assert torch.equal(merged[name], value.bfloat16().float()), name
        else:  # to one of its two neighbours
            assert torch.allclose(merged[name], value, rtol=2.0**-7 * 1.001, atol=1e-7), name
    if layout != "native":
        plain = AutoModelForImageTextToText.from_pretrained(to, dtype=torch.bfloat16).state_dict()
        for name, value in merged.items():
            if "experts" in name:
                assert torch.equal(plain[name.replace("model.", "model.language_model.", 1)].float(), value)
    else:
        with refused("base-in-mistral-layout", "--layout"):
            export(tmp_path / "adapter", tmp_path / "other", merge=True, dtype="bf16", layout="hf", say=print)


def ignore_experts(folder: Path, to: Path) -> None:
    """Write a tiny Mistral 4 in NVFP4 whose second layer has its experts in 16 bits, one by one."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*layers.1.mlp.experts.*")
    (to / "config.json").write_text(json.dumps(config))
    stored = load_file(to / "model.safetensors")
    for key in [key for key in stored if "layers.1.mlp.experts" in key]:
        packed = stored.pop(key)
        if key.endswith("_packed"):
            rows, columns = packed.shape
            stored[key.removesuffix("_packed")] = torch.randn(rows, 2 * columns, dtype=torch.bfloat16) / 10
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
