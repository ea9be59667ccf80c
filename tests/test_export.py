"""Exports against PEFT's own merge and transformers' own loading; planted faults are reported."""

import importlib
import json
import math
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from windlass import cli, tiny
from windlass.errors import RunError, UserError
from windlass.export import export as export_with_probe
from windlass.export import push_to_hub
from windlass.export.deltas import read_deltas
from windlass.export.generate import generate, load_model
from windlass.export.merge import _report_files
from windlass.export.merged_files import plan_merge, write_merge
from windlass.export.proof import BOUNDS, Proof, prove_files
from windlass.export.rounding import FLOAT32_BITS, FORMATS, make_dither, round_to
from windlass.export.source import CONFIG, choose_adapter, find_local_base, require_local_base
from windlass.files import read_json, write_json
from windlass.model import Stored, read_base
from windlass.model.files import DIGEST, PUBLISHED, read_header
from windlass.model.wrapped import outer_name, rename_keys
from windlass.plan.layout import Layout
from windlass.run_folder import BASE_MODEL, DATA
from windlass.train.checkpoint.folder import find_best, list_checkpoints, seal_checkpoint
from windlass.train.load import load_base
from windlass.train.logits import compute_logits, find_rows, open_adapter
from windlass.weights.same_base import describe_base, digest_files

# PEFT still uses names of transformers that its next major version drops; it does not look for rank_pattern among
# expert parameters when it warns, only when it applies it.
pytestmark = [
    pytest.mark.xdist_group("export"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]
load_ranks = importlib.import_module("load_ranks")  # beside this file
export = partial(export_with_probe, probes=False)  # as many passes as all else; tests/test_verify.py looks at them
ALONE = Layout(name="resident", reason="test", nodes=1, gpus_per_node=1, shard=1, precision="no")
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]

# name -> (the tiny base, PEFT's config)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "published": (
        {"family": "mistral4", "files": 3, "both_layouts": True},
        {"target_modules": [*MLA, "down_proj"], **EXPERTS, "rank_pattern": {r"experts\.down_proj": 2}},
    ),
    "blocks": (  # sides that are no multiples of a block; experts stored one by one
        {"family": "mixtral", "quantization": "block128", "files": 2, "hidden": 192, "moe_intermediate": 160},
        {"target_modules": ["q_proj", "o_proj"], **EXPERTS, "alpha_pattern": {"q_proj": 3}},
    ),
    "channels": (  # compressed-tensors'
        {"family": "qwen3_moe", "quantization": "fp8-channel"},
        {"target_modules": ["q_proj", "o_proj"], **EXPERTS},
    ),
    "dora": (
        {"family": "mistral", "quantization": "tensor"},
        {"target_modules": ["k_proj", "up_proj"], "use_dora": True},
    ),
    "tied": ({"family": "llama", "tied": True}, {"target_modules": ["gate_proj"], "modules_to_save": ["norm"]}),
    "wide": (
        {"family": "llama", "dtype": "float32"},
        {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    ),
}


def make(folder: Path, name: str) -> Path:
    """Write a base and an adapter attached and saved by PEFT itself, its factors far from zero."""
    options, config = CASES[name]
    tiny.write_model(folder / "base", **options)
    model = peft_model(folder / "base", config)
    model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    return folder


def plain_model(base: Path) -> nn.Module:
    model: nn.Module = load_base(read_base(base), ALONE, dtype=torch.float32)[0]
    return model


def peft_model(base: Path, config: dict[str, Any]) -> PeftModel:
    model = get_peft_model(plain_model(base), LoraConfig(r=4, lora_alpha=8, **{"task_type": "CAUSAL_LM", **config}))
    model.peft_config["default"].base_model_name_or_path = str(base)
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.05)
        elif parameter.requires_grad and "lora_A" not in key:
            parameter.data.mul_(1.1)
    return model


def silent(_text: str) -> None:
    return


class Case:
    """One base and adapter, PEFT's own merge of them in float32, and windlass's, each made once."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, make(folder, name)
        self.base, self.adapter = folder / "base", folder / "adapter"
        self.records: dict[str, dict[str, Any]] = {}

    @cached_property
    def plain(self) -> dict[str, Tensor]:
        return plain_model(self.base).state_dict()

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        model = PeftModel.from_pretrained(plain_model(self.base), str(self.adapter))
        return dict(model.merge_and_unload().state_dict())

    def merged(self, dtype: str | None) -> Path:
        to = self.folder / (dtype or "own")
        if not to.exists():
            probes = dtype == "bf16" and self.name == "dora"
            self.records[str(dtype)] = export_with_probe(
                self.adapter, to, merge=True, dtype=dtype, say=silent, probes=probes
            )
        return to


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    root = tmp_path_factory.mktemp("export")
    yield {name: Case(root / name, name) for name in CASES}
    shutil.rmtree(root)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: value for path in sorted(folder.glob("model*.safetensors")) for key, value in load_file(path).items()}


@pytest.mark.parametrize("name", ["published", "blocks", "dora", "tied"])
@pytest.mark.takes("exports, merges and opens again")
def test_merge_in_16_bits_equals_pefts(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    folder = case.merged("bf16")
    record = case.records["bf16"]
    assert record["deviations"] == []
    assert record["logits"]["kl"] <= record["logits"]["bound_kl"]
    state = plain_model(folder).state_dict()
    assert state.keys() == case.truth.keys()
    for key, true in case.truth.items():
        # Rounded once: to a neighbour if the adapter changes it, else to the nearer one.
        error = 2.0**-7 if not torch.equal(true, case.plain[key]) else 2.0**-8
        off = (state[key] - true).abs() > true.abs() * error * 1.001 + 1e-7
        assert not off.any(), f"{key}: {int(off.sum())} of {off.numel()}"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    base = read_base(folder)
    assert {piece.stored.dtype for p in base.parameters for piece in p.pieces} <= {"BF16"}


@pytest.mark.parametrize("name", ["blocks", "dora"])
@pytest.mark.takes("exports, merges and opens again")
def test_a_merge_is_the_same_in_smaller_blocks_of_rows(
    name: str, cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model's matrix is one block; large ones have many, each with its own rows of factors and magnitudes."""
    whole = cases[name].merged("bf16")
    monkeypatch.setattr("windlass.export.rounding.BLOCK_VALUES", 2**10)
    export(cases[name].adapter, tmp_path / "parts", merge=True, dtype="bf16", say=silent)
    after = tensors_of(tmp_path / "parts")
    for key, value in tensors_of(whole).items():
        torch.testing.assert_close(value.float(), after[key].float(), rtol=2.0**-7, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["published", "blocks", "channels", "wide"])
def test_merge_keeps_untouched_bytes(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    folder = case.merged(None)
    assert case.records["None"]["deviations"] == []
    for path in case.base.glob("model*"):  # also the index, and every file's header
        assert (folder / path.name).stat().st_size == path.stat().st_size
    assert (folder / "config.json").read_bytes() == (case.base / "config.json").read_bytes()
    before, after = tensors_of(case.base), tensors_of(folder)
    assert list(before) == list(after)
    config = json.loads((case.adapter / "adapter_config.json").read_text())
    touched = {*config["target_modules"], *(config["modules_to_save"] or [])}
    touched |= {"experts"} if config["target_parameters"] else set()
    for key, tensor in before.items():
        assert (after[key].dtype, after[key].shape) == (tensor.dtype, tensor.shape)
        if not any(part in key for part in touched):
            assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (after[key], tensor))), key
    state = plain_model(folder).state_dict()
    for key, true in case.truth.items():  # on average the adapter is all there, whatever the rounding
        change = true - case.plain[key]
        if change.abs().max() > 0:
            kept = float(((state[key] - case.plain[key]) * change).sum() / (change * change).sum())
            assert abs(kept - 1) < 0.1, f"{key}: {kept}"


@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "nvfp4", "int4", "uint4"])
@pytest.mark.takes("exports, merges and opens again")
def test_4_bit_base_is_merged_into_16_bits_and_into_its_own(kind: str, tmp_path: Path) -> None:
    """Compares with PEFT's merge into their publishers' decoding. In 16 bits unadapted weights are equal bit by bit; in
    4 bits scales are the base's bytes, and codes say base + adapter in the mean, as their publisher decodes them."""
    base, adapter, wide, out, own = (tmp_path / name for name in ("base", "adapter", "wide", "out", "own"))
    if kind != "mxfp4":
        tiny.write_model(base, "mixtral", quantization=kind, moe_intermediate=64, intermediate=64, layers=2)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 96}
        tiny.write_family(base, "gpt_oss", config=sizes, layers=2, quantized={"quant_method": kind})
    model = peft_model(base, {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"]})
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(0.2)  # what it adds is a part of 4 bits' steps
    model.save_pretrained(str(adapter), save_embedding_layers=False)
    record = export(adapter, out, merge=True, dtype="bf16", say=silent)
    assert (record["deviations"], record["dtype"]) == ([], "bf16")
    assert record["logits"]["kl"] <= record["logits"]["bound_kl"]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    load_ranks.write_unpacked(base, wide, kind)
    plain = plain_model(wide).state_dict()
    truth = PeftModel.from_pretrained(plain_model(wide), str(adapter)).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert merged.keys() == truth.keys()
    for key, true in truth.items():
        if "o_proj" in key or "down_proj" in key:
            assert torch.allclose(merged[key], true, rtol=2.0**-7 * 1.001, atol=1e-7), key
        else:
            assert torch.equal(merged[key], true.bfloat16().float()), key

    record = export(adapter, own, merge=True, say=silent)
    assert (record["deviations"], record["dtype"]) == ([], "own")
    assert record["kept"] == pytest.approx(1, abs=0.05)
    assert (own / "config.json").read_bytes() == (base / "config.json").read_bytes()
    before, after = tensors_of(base), tensors_of(own)
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        key
        for key in before
        if re.search(r"(o_proj|down_proj|w2)(\.weight)?(_packed|_blocks|)$", key) and "bias" not in key
    }
    load_ranks.write_unpacked(own, tmp_path / "decoded", kind)
    for key, values in plain_model(tmp_path / "decoded").state_dict().items():
        change = truth[key] - plain[key]
        if not change.any():
            assert torch.equal(values, plain[key]), key
        else:
            assert float(((values - plain[key]) * change).sum() / change.square().sum()) == pytest.approx(1, abs=0.1), (
                key
            )


@pytest.mark.fault(
    "a merge into 4 bits that rounds to the nearest code, which loses the adapter",
    "`windlass export --merge`",
    "of its adapter, and rounding explains",
)
@pytest.mark.takes("exports, merges and opens again")
def test_a_merge_into_4_bits_that_loses_the_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_model(tmp_path / "base", "llama", quantization="uint4", hidden=256, intermediate=512, layers=2)
    model = peft_model(tmp_path / "base", {"target_modules": ["o_proj", "up_proj"]})
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(0.02)
    model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    lines: list[str] = []
    record = export(tmp_path / "adapter", tmp_path / "merged", merge=True, say=lines.append)
    assert record["kept"] == pytest.approx(1, abs=0.15)
    assert any("noise that is large beside this adapter" in line for line in lines)  # it is small
    half = 2 ** (FLOAT32_BITS - 1)
    monkeypatch.setattr("windlass.export.rounding.make_dither", lambda *given: make_dither(*given).fill_(half))
    with refused("not-base-plus-adapter", error=RunError) as problems:
        merge(tmp_path, tmp_path / "nearest")
    assert "of its adapter, and rounding explains" in problems[0].problem


def test_the_same_merge_is_the_same_bytes_whatever_the_workers(cases: dict[str, Case], tmp_path: Path) -> None:
    export(cases["published"].adapter, tmp_path, merge=True, workers=1, say=silent)
    for path in cases["published"].merged(None).iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(FORMATS, key=str)),
    size=st.sampled_from([1e-41, 1e-30, 1e-6, 1e-4, 0.02, 1.0, 400.0]),
    seed=st.integers(0, 2**20),
)
def test_rounding_picks_adjacent_values_and_keeps_exact_ones(dtype: torch.dtype, size: float, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    values = (torch.randn(64, 64, generator=dice) * size).clamp(-440, 440)
    place = ((0, 64), (0, 64))
    mantissa, least, largest = FORMATS[dtype]
    exact = torch.cat([values.to(dtype).float(), torch.tensor([0.0, -0.0, largest, -largest] * 16).view(1, 64)])
    kept = round_to(exact, dtype, "x", ((0, 65), (0, 64)))
    assert torch.equal(kept.view(torch.uint8), exact.to(dtype).view(torch.uint8))  # signs of zeros too
    rounded = round_to(values, dtype, "x", place).double()
    exponent = (torch.frexp(values.double()).exponent - 1).clamp(min=least)
    assert ((rounded - values).abs() < torch.exp2(exponent.double() - mantissa) * 1.0001).all()
    assert torch.equal(round_to(values, dtype, "x", place).double(), rounded)


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_never_reaches_infinity(dtype: torch.dtype) -> None:
    *_, largest = FORMATS[dtype]
    values = torch.tensor([largest, -largest]).repeat(64, 32) * (1 + 2.0**-20)
    assert torch.equal(round_to(values, dtype, "x", ((0, 64), (0, 64))).float().abs(), torch.full((64, 64), largest))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("weight", [-1.0, "subnormal"])
def test_dithering_preserves_small_changes_on_average(dtype: torch.dtype, weight: float | str) -> None:
    """One weight in fifty moves by a full step: the sum is right. Rounding to nearest would lose the change."""
    place = ((0, 256), (0, 256))
    mantissa, least, _ = FORMATS[dtype]
    step = 2.0**-mantissa
    if isinstance(weight, str):
        step = 2.0 ** (least - mantissa)
        weight = step
    grown = torch.full((256, 256), weight + math.copysign(step / 50, weight))
    assert (grown.to(dtype).float() == weight).all()
    change = (round_to(grown, dtype, "any", place).double() - weight) / math.copysign(step, weight)
    assert set(change.flatten().tolist()) == {0.0, 1.0}
    assert math.isclose(float(change.mean()), 1 / 50, rel_tol=0.02)
    assert float((change.mean(1) - 1 / 50).abs().max()) < 1 / 50  # evenly over rows too


@pytest.mark.takes("exports, merges and opens again")
def test_a_small_adapter_survives_a_merge_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault, rounding to the nearest value, loses most of it, and the proof refuses the result."""
    torch.manual_seed(0)
    tiny.write_model(tmp_path / "base", "llama", hidden=256)
    model = peft_model(tmp_path / "base", {"target_modules": ["q_proj", "down_proj"]})
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            parameter.data.mul_(2e-3)
            parameter.data[: len(parameter) // 2] = 0
    model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    record = merge(tmp_path, tmp_path / "merged")
    assert record["deviations"] == []
    assert record["kept"] > 0.9  # of sampled rows
    truth = PeftModel.from_pretrained(plain_model(tmp_path / "base"), str(tmp_path / "adapter"))
    expected = dict(truth.merge_and_unload().state_dict())
    before = tensors_of(tmp_path / "base")
    changed = kept = nearest = 0.0
    for key, value in tensors_of(tmp_path / "merged").items():
        alone = len(value) // 2 if "q_proj" in key or "down_proj" in key else len(value)  # rows without an adapter
        assert torch.equal(value[:alone].view(torch.int16), before[key][:alone].view(torch.int16))
        old = before[key].float()
        change = expected[key] - old
        changed += float((change * change).sum())
        kept += float(((value.float() - old) * change).sum())
        nearest += float(((expected[key].to(value.dtype).float() - old) * change).sum())
    assert abs(kept / changed - 1) < 0.05
    assert nearest / changed < 0.5
    module = "windlass.export.merged_files"
    monkeypatch.setattr(f"{module}.round_to", lambda values, dtype, *_: values.to(dtype))  # the fault
    with refused("not-base-plus-adapter", error=RunError) as problems:
        merge(tmp_path, tmp_path / "nearest")
    assert "of its adapter, and rounding explains" in problems[0].problem


@pytest.mark.parametrize(("dtype", "finer"), [(None, "bf16"), ("float32", None)])
def test_a_dtype_that_is_too_coarse_names_a_finer_one(
    dtype: str | None, finer: str | None, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.export.proof.BOUNDS", dict.fromkeys(BOUNDS, ((0.0, 0.0), (0.0, 0.0))))
    with refused("not-base-plus-adapter", error=RunError) as problems:
        merge(made, tmp_path / "out", dtype)
    assert re.findall(r"--dtype (\w+)", problems[0].problem) == ([finer] if finer else [])


@pytest.mark.takes("exports, merges and opens again")
def test_a_merge_into_float32(cases: dict[str, Case]) -> None:
    case = cases["published"]
    state = plain_model(case.merged("float32")).state_dict()
    assert case.records["float32"]["logits"]["dtype"] == "F32"
    for key, true in case.truth.items():
        assert torch.allclose(state[key], true, rtol=1e-5, atol=1e-7), key


def test_export_of_the_adapter_only(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["published"]
    options: dict[str, Any] = {"called": "org/published", "model_class": "Mistral4ForCausalLM", "say": silent}
    assert export(case.adapter, tmp_path, **options)["deviations"] == []
    before = load_file(case.adapter / "adapter_model.safetensors")
    after = load_file(tmp_path / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for path in tmp_path.iterdir():
        if path.suffix in (".md", ".json"):
            assert str(case.folder) not in path.read_text(), path.name
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/published"
    assert isinstance(PeftModel.from_pretrained(plain_model(case.base), str(tmp_path)), PeftModel)
    source = choose_adapter(tmp_path)  # it names its base, which is not a folder here
    with refused("base-not-here", "adapter_config.json"):
        require_local_base(source)
    assert require_local_base(choose_adapter(tmp_path, str(case.base))).path == case.base
    # Again into the same folder, in 16 bits
    export(case.adapter, tmp_path, dtype="bf16", **options)
    after = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(before[key].bfloat16(), after[key]) for key in before)
    assert (tmp_path / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.fault("an export under names that its model has not", "`windlass export`", "PEFT can't open it on")
@pytest.mark.fault("an export that PEFT opens without a tensor", "`windlass export`", "gets no tensor")
def test_an_export_that_peft_opens_elsewhere_or_in_part_is_refused(
    cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["published"]
    options: dict[str, Any] = {"model_class": "Mistral3ForConditionalGeneration", "say": silent}
    inside = "windlass.export.adapter"
    monkeypatch.setattr(f"{inside}.outer_name", lambda name, place: outer_name(name, f"{place}layers."))
    with refused("not-base-plus-adapter", error=RunError) as problems:
        export(case.adapter, tmp_path / "elsewhere", **options)
    assert "PEFT can't open it on Mistral3ForConditionalGeneration: " in problems[0].problem

    def misspell(tensors: dict[str, Any], rename: Any) -> dict[str, Any]:
        right, wrong = "layers.1.self_attn.o_proj", "layers.1.attn.o_proj"
        return {key.replace(right, wrong): tensor for key, tensor in rename_keys(tensors, rename).items()}

    monkeypatch.setattr(f"{inside}.outer_name", outer_name)
    monkeypatch.setattr(f"{inside}.rename_keys", misspell)
    with refused("not-base-plus-adapter", error=RunError) as problems:
        export(case.adapter, tmp_path / "in part", **options)
    assert "layers.1.attn.o_proj.lora_A.weight has no place in Mistral3" in problems[0].problem
    empty = "layers.1.self_attn.o_proj.lora_A.default.weight of Mistral3ForConditionalGeneration gets no tensor"
    assert empty in problems[0].problem


def test_an_adapter_opens_on_the_multimodal_class_and_on_the_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the cards show, in plain PEFT: the trained model's logits, and nothing on the vision tower.

    Its modules share names with the language model's, and PEFT shortens names to what they differ in.
    """
    base = tiny.write_model(tmp_path / "base", "mistral4", quantization="none", dtype="float32", layers=4)
    model = peft_model(base, {"target_modules": [*MLA, "down_proj"], **EXPERTS, "modules_to_save": ["lm_head"]})
    model.peft_config["default"].target_modules = set(model.base_model.targeted_module_names)
    model.save_pretrained(str(tmp_path / "saved"), save_embedding_layers=False)
    rows = torch.arange(24).view(2, 12) + 20
    trained = compute_logits(model, rows)
    outer, inner = "Mistral3ForConditionalGeneration", "Mistral4ForCausalLM"
    for to, source, more in (("outer", "saved", []), ("inner", "outer", ["--for", inner]), ("again", "inner", [])):
        arguments = ["export", str(tmp_path / source), "--to", str(tmp_path / to), "--base", str(base), "--no-probe"]
        with pytest.raises(SystemExit, match="0"):
            cli.main([*arguments, "--base-name", str(base), *more])
        assert f"named     for {inner if to == 'inner' else outer}" in capsys.readouterr().err
        names = json.loads((tmp_path / to / "adapter_config.json").read_text())["target_modules"]
        assert len(names) == 4 * 6  # each by its full name
        assert all(name.startswith("model.language_model.") == (to != "inner") for name in names)
        monkeypatch.chdir(tmp_path / to)
        snippets = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
        for snippet, kind in zip(snippets, (inner, outer) if to == "inner" else (outer, inner), strict=True):
            space: dict[str, Any] = {}
            exec(snippet, space)
            opened = space["model"].eval()
            assert type(opened.get_base_model()).__name__ == kind
            assert not any("lora_" in name and "vision" in name for name, _ in opened.named_parameters())
            assert torch.allclose(compute_logits(opened, rows), trained, atol=1e-5)
        # windlass itself takes both: to generate, to merge, to train on
        assert torch.equal(compute_logits(open_adapter(plain_model(base), tmp_path / to), rows), trained)
        assert len(read_deltas(choose_adapter(tmp_path / to), read_base(base)).by_name) == 4 * 6 + 4 * 2 + 1
    assert load_file("adapter_model.safetensors").keys() == load_file("../outer/adapter_model.safetensors").keys()
    # On the other class than it was named for, PEFT itself refuses it
    with pytest.raises(ValueError, match="No modules were targeted"):
        PeftModel.from_pretrained(plain_model(base), str(tmp_path / "outer"))
    servers = f"a server: vllm, sglang, llama.cpp, peft; or a class that opens it: {outer}, {inner}"
    for wrong, message in (
        (["--for", "LlamaForCausalLM"], f"base is no LlamaForCausalLM\n\nhint: {servers}"),
        (["--for", inner, "--merge"], "a merged model is its base's, whoever reads it"),
        (["--for", "vllm", "--merge"], "a merged model is its base's, whoever reads it"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["export", str(tmp_path / "saved"), "--to", str(tmp_path / "no"), "--base", str(base), *wrong])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
    both = load_file("adapter_model.safetensors") | load_file("../inner/adapter_model.safetensors")
    save_file(both, "adapter_model.safetensors")
    with refused("adapter-misfit") as problems:
        read_deltas(choose_adapter(tmp_path / to), read_base(base))
    assert "names of the language model and of the wrapper for the same" in problems[0].problem


@pytest.fixture
def run(cases: dict[str, Case], tmp_path: Path) -> Path:
    """A run folder as training leaves it: three saves, the second the best, steps and evaluations."""
    folder = tmp_path / "my run"
    manifest = {
        "run": {
            "name": "wiki & co",
            "lora": {"r": 4, "target_modules": ["q_proj"]},
            "data": {"dataset_name_or_path": "/secret/place/wiki"},
            "train": {"learning_rate": 1e-4},
        },
        "versions": {"torch": "2.13.0"},
    }
    losses = {10: 2.5, 20: 1.5, 30: 2.0}
    for step, loss in losses.items():
        saved = folder / "checkpoints" / f"step-{step}"
        shutil.copytree(cases["wide"].adapter, saved)
        seal_checkpoint(saved, {**manifest, "eval_loss": loss})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = [{"step": i, "loss": 3 - i / 20} for i in range(1, 31)]
    (folder / "steps-rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_best_undamaged_checkpoint_is_chosen(run: Path) -> None:
    """Checkpoints store their evaluation loss. The log may lack lines, or have some of undone steps."""
    (run / "events.jsonl").write_text('{"kind": "eval", "step": 30, "eval_loss": 0.1}\n{"kind": "ev')
    assert (
        choose_adapter(run).folder
        == find_best(list_checkpoints(run / "checkpoints"))
        == run / "checkpoints" / "step-20"
    )
    assert "lowest evaluation loss of 3 saved: 1.5000 at step-20" in choose_adapter(run).why
    with (run / "checkpoints" / "step-20" / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert choose_adapter(run).folder.name == "step-30"
    assert "skipped step-20: adapter_model.safetensors" in choose_adapter(run).why


def test_the_card(run: Path, tmp_path: Path) -> None:
    """Of a run on pairs."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["run"] |= {"dpo": {"beta": 0.3, "loss": "ipo"}, "orpo": {"beta": 0.1}}
    manifest["run"]["train"]["objective"] = "dpo"
    manifest["run"]["lora"]["adapter"] = "/secret/sft/final"
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "data.json").write_text(json.dumps({"sequences": {"train": 4000, "validation": 200}}))
    events = [{"kind": "eval", "step": 20, "eval_loss": 0.55, "eval_rewards/accuracies": 0.812}]
    events.append({"kind": "eval", "step": 30, "eval_loss": 0.5})
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    export(run, tmp_path / "out", say=silent)
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "by DPO; the reference is the adapter that it began with, sft/final.\n",
        "| 20 | 0.5500 | 81.2 % |\n| 30 | 0.5000 |  |\n\n",
        "| train.objective | dpo |\n| dpo.beta | 0.3 |\n| dpo.loss | ipo |\n",
        "wiki & co",
        "torch 2.13.0",
        "# license",
    ):
        assert text in card, text
    assert "orpo" not in card
    assert "/secret" not in card
    front = yaml.safe_load(card.split("---")[1])
    assert (front["base_model"], front["datasets"], front["tags"]) == ("base", ["wiki"], ["lora", "windlass", "dpo"])
    assert "license" not in front


def test_generate_gives_the_same_merged_and_unmerged(cases: dict[str, Case], tmp_path: Path) -> None:
    pieces: list[str] = []
    one = generate(cases["wide"].merged(None), "def f", tokens=8, say=silent, write=pieces.append)
    other = generate(cases["wide"].adapter, "def f", tokens=8, say=silent)
    assert one == other
    assert "".join(pieces).strip() == one.strip()
    exported = tmp_path / "exported"  # finds its base, wherever it is opened from
    export(cases["wide"].adapter, exported, say=silent, probes=False)
    assert generate(exported, "def f", tokens=8, say=silent) == one
    assert AutoPeftModelForCausalLM.from_pretrained(exported).active_adapter == "default"
    with refused("no-adapter"):
        generate(tmp_path, "x", say=silent)


def test_generation_ends_where_the_models_own_file_says(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", "llama", dtype="float32")
    tiny.write_tokenizer(model)
    ids = AutoTokenizer.from_pretrained(model)("It is", return_tensors="pt")["input_ids"]
    token = int(AutoModelForCausalLM.from_pretrained(model)(ids).logits[0, -1].argmax())
    ask = partial(generate, model, "It is", chat=False, say=silent)
    whole, first = ask(tokens=6), ask(tokens=1)
    assert whole != first
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, token]}))
    assert ask(tokens=6) == first


def test_generate_asks_as_a_chat_unless_told_and_says_why_an_answer_is_empty(tmp_path: Path) -> None:
    """The model is made to choose token 0, which ends its answers."""
    tiny.write_model(tmp_path / "model", "llama")
    tiny.write_tokenizer(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    said: list[str] = []
    for chat, other in ((None, "--raw"), (True, "--raw"), (False, "--chat")):
        assert generate(tmp_path / "model", "def f", tokens=4, chat=chat, say=said.append).strip() == ""
        assert "the answer is empty: its first token ended it" in said[-1]
        assert other in said[-1]


def test_generate_gives_the_same_with_the_base_in_fp8(cases: dict[str, Case]) -> None:
    """If 16 bits don't fit. Adapters of experts are not merged into codes then."""
    source, base = choose_adapter(cases["published"].adapter), read_base(cases["published"].base)
    tokens = torch.arange(20)[None]
    one, other = (load_model(base, source, dtype)(tokens).logits for dtype in ("bf16", "fp8"))
    assert torch.equal(one, other)
    assert not torch.allclose(one, load_model(base, None, "fp8")(tokens).logits, atol=0.05)
    with refused("dora-needs-16-bits"):
        load_model(read_base(cases["dora"].base), choose_adapter(cases["dora"].adapter), "fp8")


# --- exports that go wrong ---

LAYER = "language_model.model.layers.1"
O_PROJ, DOWN = f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def made(cases: dict[str, Case]) -> Path:
    """The published layout: base, adapter, and correct merges of both dtypes, to be damaged in copies."""
    cases["published"].merged(None)
    return cases["published"].merged("bf16").parent


def merge(root: Path, to: Path, dtype: str | None = None) -> dict[str, Any]:
    return export(root / "adapter", to, merge=True, dtype=dtype, say=silent)


def stored(folder: Path, key: str) -> Stored:
    headers = (read_header(path) for path in sorted(folder.glob("model*.safetensors")))
    return next(header[key] for header in headers if key in header)


def tensor(folder: Path, key: str) -> Tensor:
    return load_file(stored(folder, key).file)[key]


def overwrite(folder: Path, key: str, values: Tensor) -> None:
    place = stored(folder, key)
    with place.file.open("r+b") as file:
        file.seek(place.start)
        file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


# Faults in a merged model: each gets the folder with base and adapter, the copy to damage, and its dtype.


def lose_tensor(_made: Path, copy: Path, _dtype: str) -> None:
    path = stored(copy, O_PROJ).file
    kept = {name: value for name, value in load_file(path).items() if name != O_PROJ}
    save_file(kept, path, metadata={"format": "pt"})


def flip_bit(key: str) -> Callable[[Path, Path, str], None]:
    def fault(_made: Path, copy: Path, _dtype: str) -> None:
        place = stored(copy, key)
        with place.file.open("r+b") as file:
            file.seek(place.end - 1)
            last = file.read(1)
            file.seek(place.end - 1)
            file.write(bytes([last[0] ^ 1]))

    return fault


def forget_adapter(key: str) -> Callable[[Path, Path, str], None]:
    """Store the base's weight instead of the merged one."""

    def fault(made: Path, copy: Path, dtype: str) -> None:
        base, scale = tensor(made / "base", key), tensor(made / "base", f"{key}_scale_inv")
        if dtype == "own":
            overwrite(copy, f"{key}_scale_inv", scale)
        overwrite(copy, key, base if dtype == "own" else (base.float() * scale.float()).bfloat16())

    return fault


def keep_old_scale(made: Path, copy: Path, _dtype: str) -> None:
    """The weight exceeds the base's scale: the case's adapter is large."""
    old = tensor(made / "base", f"{DOWN}_scale_inv")
    assert not torch.equal(tensor(copy, f"{DOWN}_scale_inv"), old)
    overwrite(copy, f"{DOWN}_scale_inv", old)


UNTOUCHED = "vision_tower.transformer.layers.0.attention.q_proj.weight"
FAULTS: list[tuple[str, Callable[[Path, Path, str], None], str]] = [
    ("own", lose_tensor, f"the files disagree about which file holds a tensor (1): {O_PROJ}"),
    ("own", flip_bit(UNTOUCHED), f"{UNTOUCHED} is not byte-equal to the base's, though not adapted"),
    *((dtype, forget_adapter(key), key.removeprefix(LAYER)) for dtype in ("bf16", "own") for key in (O_PROJ, DOWN)),
    ("own", keep_old_scale, "experts.down_proj"),
]


@pytest.mark.parametrize(("dtype", "fault", "message"), FAULTS)
def test_damaged_merge_is_detected(
    made: Path, tmp_path: Path, dtype: str, fault: Callable[[Path, Path, str], None], message: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made / dtype, copy)
    fault(made, copy, dtype)
    source = choose_adapter(made / "adapter")
    base = require_local_base(source)
    deltas = read_deltas(source, base)
    plan = plan_merge(base, deltas, copy, dtype)
    deviations = prove_files(base, deltas, plan, copy, source.weights, lambda _: None).deviations
    assert deviations
    assert all(message in deviation for deviation in deviations), deviations


def test_a_deviation_is_an_error_and_deletes_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_badly(*arguments: Any) -> None:
        write_merge(*arguments)
        flip_bit(UNTOUCHED)(made, tmp_path / "out", "")
        (tmp_path / "out" / "tokenizer.json").write_text("{}")

    monkeypatch.setattr("windlass.export.merge.write_merge", write_badly)  # the fault
    with refused("not-base-plus-adapter", str(tmp_path / "out"), RunError) as problems:
        merge(made, tmp_path / "out")
    assert problems[0].problem.endswith(": tokenizer.json is not the base's")
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (len(record["deviations"]), record["logits"]) == (1, {"skipped": "the files are wrong"})


def test_a_block_of_zeros_stays_one(tmp_path: Path) -> None:
    """Its scale is zero; where the adapter adds nothing, so is the new one: no 0 / 0."""
    root = make(tmp_path, "blocks")
    key = "model.layers.1.self_attn.q_proj.weight"
    place = stored(root / "base", key)
    weights = load_file(place.file)
    side = min(128, weights[key].shape[0])
    weights[key].view(torch.uint8)[:side, :128] = 0
    weights[f"{key}_scale_inv"][0, 0] = 0
    save_file(weights, place.file, metadata={"format": "pt"})
    path = root / "adapter" / "adapter_model.safetensors"
    factors = load_file(path)
    factors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][:side] = 0
    save_file(factors, path, metadata={"format": "pt"})
    assert merge(root, root / "merged")["deviations"] == []
    merged = tensor(root / "merged", key).float()
    assert merged.isfinite().all()
    assert not merged[:side, :128].any()
    assert tensor(root / "merged", f"{key}_scale_inv")[0, 0] == 0


@pytest.mark.takes("exports, merges and opens again")
def test_adapter_on_another_base_is_refused(
    cases: dict[str, Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of its weights differs. An adapter without a digest is accepted, and that is printed."""
    printed: list[str] = []
    adapter, other, base = tmp_path / "adapter", tmp_path / "other", read_base(cases["tied"].base)
    export(cases["tied"].adapter, tmp_path / "unproven", merge=True, say=printed.append)
    assert [line for line in printed if "that it was trained on base is unproven" in line]
    shutil.copytree(cases["tied"].adapter, adapter)
    (adapter / BASE_MODEL).write_text(json.dumps(describe_base(base, digest_files(base))))
    shutil.copytree(cases["tied"].base, other)
    last = max((piece.stored for each in read_base(other).parameters for piece in each.pieces), key=lambda s: s.end)
    content = bytearray(last.file.read_bytes())
    content[last.start] ^= 1
    last.file.write_bytes(content)

    record = export(adapter, tmp_path / "same", merge=True, say=silent)
    assert (record["base_digest"], record["other_base"]) == (digest_files(base), "")
    with refused("other-base", "--base") as problems:
        export(adapter, tmp_path / "none", merge=True, base=str(other), say=silent)
    digests = [digest_files(read_base(other)), digest_files(base)]
    assert re.findall(r"\(digest (\w+)\)", problems[0].problem) == digests
    assert not (tmp_path / "none").exists()
    with refused("other-base", "--base"):
        generate(adapter, "import", base=str(other), tokens=1, say=silent)

    options = ["--base", str(other), "--allow-other-base"]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["export", str(adapter), "--to", str(tmp_path / "accepted"), "--merge", *options, "--json"])
    assert "are not those" in json.loads(capsys.readouterr().out)["other_base"]
    assert "another one than the adapter was trained on" in (tmp_path / "accepted" / "README.md").read_text()
    with pytest.raises(SystemExit, match="0"):
        cli.main(["generate", str(adapter), "--prompt", "import", "--tokens", "1", *options])
    assert "accepted with --allow-other-base" in capsys.readouterr().err
    # The adapter alone keeps its record.
    export(adapter, tmp_path / "alone", say=silent)
    with refused("other-base", "--base"):
        export(tmp_path / "alone", tmp_path / "none", merge=True, base=str(other), say=silent)


def test_an_adapter_of_another_model(made: Path, tmp_path: Path) -> None:
    others: tuple[dict[str, Any], ...] = ({"hidden": 96}, {"family": "mistral"})
    for number, other in enumerate(others):
        base = tiny.write_model(tmp_path / str(number), tokenizer=False, **other)
        for merging in (False, True):
            with refused("adapter-misfit"):
                export(made / "adapter", tmp_path / "out", merge=merging, base=str(base), say=silent)
    assert not (tmp_path / "out").exists()


def lose_half(factors: dict[str, Tensor]) -> None:
    del factors[next(key for key in factors if key.endswith("o_proj.lora_B.weight"))]


def add_embedding(factors: dict[str, Tensor]) -> None:
    factors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 512)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"use_dora": True}, None, "use_dora is True in adapter_config.json, and not in the weights"),
        ({"r": 16}, None, "has rank 4, and adapter_config.json has 16"),
        ({"layer_replication": [[0, 2], [1, 2]]}, None, "layer_replication"),
        ({}, add_embedding, "lora_embedding_A"),
        ({}, lose_half, "not a pair of matrices"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(
    made: Path,
    tmp_path: Path,
    config: dict[str, Any],
    change: Callable[[dict[str, Tensor]], None] | None,
    message: str,
) -> None:
    adapter = tmp_path / "changed"
    shutil.copytree(made / "adapter", adapter)
    given = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(given | config))
    if change:
        factors = load_file(adapter / "adapter_model.safetensors")
        change(factors)
        save_file(factors, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        export(adapter, tmp_path / "out", merge=True, say=silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.fault(
    "a trained copy of a tied embedding",
    "`windlass export --merge`",
    "trained a copy of the embedding and left the head",
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_a_trained_copy_of_a_tied_embedding_is_not_merged(cases: dict[str, Case], tmp_path: Path) -> None:
    model = peft_model(cases["tied"].base, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]})
    model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    with refused("tied-embedding") as problems:
        export(tmp_path / "adapter", tmp_path / "out", merge=True, say=silent)
    assert "trained a copy of the embedding and left the head, which is tied to it" in problems[0].problem
    assert not (tmp_path / "out").exists()
    assert export(tmp_path / "adapter", tmp_path / "alone", say=silent)["deviations"] == []


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_a_head_that_peft_saves_with_its_base_is_adapted_once(cases: dict[str, Case], tmp_path: Path) -> None:
    model = peft_model(cases["published"].base, {"target_modules": ["lm_head", "o_proj"]})
    model.save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    saved = load_file(file)
    (key,) = (key for key in saved if "base_layer" in key)
    assert export(tmp_path / "adapter", tmp_path / "out", merge=True, dtype="bf16", say=silent)["deviations"] == []
    save_file(saved | {key: saved[key] * 1.1}, file)
    with refused("adapter-misfit") as problems:
        export(tmp_path / "adapter", tmp_path / "other", merge=True, say=silent)
    assert "lm_head.weight is adapted twice" in problems[0].problem


def test_what_is_said_of_the_bases_own_weights_is_not_copied(made: Path, tmp_path: Path) -> None:
    """Their digest, as `windlass fetch` records it, and how an export that is the base was proven."""
    base = shutil.copytree(made / "base", tmp_path / "base")
    (base / PUBLISHED).write_text(json.dumps({DIGEST: digest_files(read_base(base))}))
    (base / "export.json").write_text(json.dumps({"kind": "merged", "deviations": []}))
    (base / "probe.json").write_text("{}")
    export(made / "adapter", tmp_path / "out", merge=True, base=str(base), say=silent, probes=False)
    assert not {PUBLISHED, "probe.json"} & {path.name for path in (tmp_path / "out").iterdir()}
    load_base(read_base(tmp_path / "out"), ALONE)


def test_nothing_of_an_earlier_export_is_left(cases: dict[str, Case], tmp_path: Path) -> None:
    adapter, out = cases["published"].adapter, tmp_path / "out"
    export(adapter, out, say=silent)
    for name in ("base_model.json", "chat_template.jinja", "probe.json"):
        (out / name).write_text("{}")
    export(adapter, out, say=silent, probes=False)
    assert not {"base_model.json", "chat_template.jinja", "probe.json"} & {path.name for path in out.iterdir()}


def test_impossible_dtypes_and_folders_are_refused(made: Path, tmp_path: Path) -> None:
    adapter, out = made / "adapter", tmp_path / "out"
    plain = str(tiny.write_model(tmp_path / "plain", "mistral4", quantization="none", tokenizer=False))
    with refused("base-not-quantized"):
        export(adapter, out, merge=True, dtype="fp8", base=plain, say=silent)
    shutil.copytree(made / "own", tmp_path / "copy")
    with refused("folder-taken"):
        merge(made, tmp_path / "copy", "bf16")
    with refused("folder-taken"):
        export(adapter, tmp_path / "copy", say=silent)
    assert not (tmp_path / "copy" / "adapter_config.json").exists()
    with refused("own-folder"):
        merge(made, made / "base")
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    for place in (taken / "thesis.tex", file):
        place.write_text("years of work")
    for merging in (True, False):
        with refused("no-such-dtype"):
            export(adapter, out, merge=merging, dtype="int4", say=silent)
        with refused("folder-taken"):
            export(adapter, taken, merge=merging, say=silent)
        with refused("unwritable"):
            export(adapter, file / "inside", merge=merging, say=silent)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the bytes of a file, like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.fault("a full disk while merging", "`windlass export --merge`", "make room and repeat the command")
def test_interrupted_merge_starts_over(made: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    largest = max(path.stat().st_size for path in (made / "base").glob("model-*"))
    with largest_file(largest - 1), refused("disk-full", error=RunError) as problems:
        merge(made, to)
    assert problems[0].hint == "make room and repeat the command"
    assert not (to / "config.json").exists()  # nothing that could be taken for a model

    @contextmanager
    def interrupted(_stage: str, size: int) -> Iterator[Callable[[int], None]]:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if done > size / 2:
                raise KeyboardInterrupt

        yield advance

    (to / "config.json").write_text("{}")  # of an attempt that was killed while it was proven
    with pytest.raises(KeyboardInterrupt):
        export(made / "adapter", to, merge=True, dtype="bf16", say=silent, progress=interrupted)
    assert not (to / "config.json").exists()
    merge(made, to)
    assert sorted(path.name for path in to.iterdir()) == sorted(path.name for path in (made / "own").iterdir())
    for path in to.glob("model*"):
        assert path.read_bytes() == (made / "own" / path.name).read_bytes(), path.name
    # The rounded adapter is written by safetensors, which has an error of its own.
    with largest_file(4000), refused("disk-full"):
        export(made / "adapter", tmp_path / "adapter", dtype="bf16", say=silent)


def test_missing_disk_space_is_found_before_writing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with refused("no-room"):
        merge(made, tmp_path / "out")


def test_unreachable_hub_is_reported(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    for name, code in (("org/name", "hub-unreachable"), ("no name/at all", "hub-name")):
        with refused(code, f"--push {name}") as problems:
            push_to_hub(made / "own", name, say=silent)
        assert "verysecret" not in str(problems)


def test_a_base_that_is_named_by_the_hub_is_found_where_it_was_fetched(
    cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--tiny"
    shutil.copytree(cases["tied"].base, cached / "snapshots" / "abc")
    adapter = shutil.copytree(cases["tied"].adapter, tmp_path / "adapter")
    write_json(adapter / CONFIG, read_json(adapter / CONFIG) | {"base_model_name_or_path": "org/tiny"})
    assert find_local_base(choose_adapter(adapter)) is None
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    found = find_local_base(choose_adapter(adapter))
    assert found
    assert found.path == cached / "snapshots" / "abc"


def test_a_runs_own_rows_are_told_from_others_in_its_folder(tmp_path: Path) -> None:
    """`windlass best --eval-data` adds rows of another file."""
    assert find_rows(None) is find_rows(tmp_path) is None
    for name, splits in (("a", ("train", "validation")), ("b", ("train",))):
        folder = tmp_path / "tokens" / name
        folder.mkdir(parents=True)
        write_json(folder / "audit.json", {"fingerprint": name})
        for split in splits:
            (folder / f"{split}.arrow").touch()
    for own, file in (("b", "b/train.arrow"), ("a", "a/validation.arrow"), ("gone", "a/validation.arrow")):
        write_json(tmp_path / DATA, {"fingerprint": own})
        assert find_rows(tmp_path) == tmp_path / "tokens" / file


@pytest.mark.parametrize(("explained", "said"), [(1.5, True), (0.3, False)])
def test_a_merge_that_rounding_hides_is_said_to_be_untold(explained: float, said: bool) -> None:
    proof = Proof(kept=0.4, explained=explained, least_kept=("model.layers.0.mlp.up_proj.weight", 0.1))
    printed: list[str] = []
    _report_files(proof, printed.append)
    assert any("can't tell whether so small an adapter is there" in line for line in printed) is said
