"""Exports against PEFT's own merge and transformers' own loading. Faults are in test_export_faults.py."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from windlass import tiny
from windlass.errors import UserError
from windlass.export import export, hints
from windlass.export.generate import generate, load_model
from windlass.export.proof import free_memory
from windlass.export.rounding import FORMATS, dither, encode
from windlass.export.source import base_of, choose_adapter
from windlass.model import read_base
from windlass.plan.layout import Layout
from windlass.train import checkpoint
from windlass.train.checkpoint import seal
from windlass.train.load import load
from windlass.train.logits import compute_logits

# PEFT still uses names of transformers that its next major version drops; it does not look for rank_pattern among
# expert parameters when it warns, only when it applies it.
pytestmark = [
    pytest.mark.xdist_group("export"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]
ALONE = Layout(name="resident", reason="test", nodes=1, gpus_per_node=1, shard=1, precision="no")
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]

# name -> (the tiny base, PEFT's config)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "published": (
        {"family": "mistral4", "files": 3, "decoys": True},
        {"target_modules": [*MLA, "down_proj"], **EXPERTS, "rank_pattern": {r"experts\.down_proj": 2}},
    ),
    "blocks": (  # sides that are no multiples of a block; experts stored one by one
        {"family": "mixtral", "quantization": "block128", "files": 2, "hidden": 192, "moe_intermediate": 160},
        {"target_modules": ["q_proj", "o_proj"], **EXPERTS, "alpha_pattern": {"q_proj": 3}},
    ),
    "one by one": ({"family": "qwen3_moe"}, {"target_modules": ["v_proj"], **EXPERTS, "use_rslora": True}),
    "dora": (
        {"family": "mistral", "quantization": "tensor"},
        {"target_modules": ["k_proj", "up_proj"], "use_dora": True},
    ),
    "tied": ({"family": "llama", "tied": True}, {"target_modules": ["gate_proj"], "modules_to_save": ["norm"]}),
    "wide": ({"family": "llama", "dtype": "float32"}, {"target_modules": ["q_proj"], "use_rslora": True}),
}


def make(folder: Path, name: str) -> Path:
    """A base and an adapter that PEFT itself attached and saved, its factors far from zero."""
    options, config = CASES[name]
    tiny.write(folder / "base", **options)
    model = peft_model(folder / "base", config)
    model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    return folder


def plain_model(base: Path) -> nn.Module:
    model: nn.Module = load(read_base(base), ALONE, dtype=torch.float32)[0]
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
        to = self.folder / f"merged-{dtype}"
        if not to.exists():
            self.records[str(dtype)] = export(self.adapter, to, merge=True, dtype=dtype, say=silent).record
        return to


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    root = tmp_path_factory.mktemp("export")
    yield {name: Case(root / name, name) for name in CASES}
    shutil.rmtree(root)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: value for path in sorted(folder.glob("model*.safetensors")) for key, value in load_file(path).items()}


@pytest.mark.parametrize("name", CASES)
def test_merged_in_16_bits_is_what_peft_merges(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    folder = case.merged("bf16")
    record = case.records["bf16"]
    assert record["deviations"] == []
    assert record["logits"]["kl"] <= record["logits"]["bound_kl"]
    state = plain_model(folder).state_dict()
    assert state.keys() == case.truth.keys()
    for key, true in case.truth.items():
        # Rounded once; sums in another order may move a value across the middle between two neighbours.
        off = (state[key] - true).abs() > true.abs() * 2.0**-8 * 1.001 + 1e-7
        assert not off.any(), f"{key}: {int(off.sum())} of {off.numel()}"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    base = read_base(folder)
    assert {piece.stored.dtype for p in base.parameters for piece in p.pieces} <= {"BF16"}


@pytest.mark.parametrize("name", CASES)
def test_merged_in_its_own_dtype_keeps_every_byte_that_it_can(name: str, cases: dict[str, Case]) -> None:
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


def test_transformers_opens_the_merged_model(cases: dict[str, Case]) -> None:
    """The published layout: wrapper, vision part, fused experts, and nothing missing or unexpected."""
    from transformers import Mistral3ForConditionalGeneration

    base, folder = cases["published"].base, cases["published"].merged("bf16")
    model, info = Mistral3ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    rows = torch.arange(24).view(2, 12) + 20
    with torch.no_grad():
        assert torch.allclose(model(input_ids=rows).logits, plain_model(folder)(input_ids=rows).logits, atol=1e-4)
    assert not (folder / "params.json").exists()  # it would lead servers to weights without the adapter
    assert not list(folder.glob("consolidated*"))
    for name in ("tokenizer.json", "chat_template.jinja", "tekken.json"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("model-*")}


def test_the_same_merge_is_the_same_bytes_whatever_the_workers(cases: dict[str, Case], tmp_path: Path) -> None:
    export(cases["published"].adapter, tmp_path, merge=True, workers=1, say=silent)
    for path in cases["published"].merged(None).iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(FORMATS, key=str)),
    size=st.floats(1e-4, 400),
    seed=st.integers(0, 2**20),
)
def test_codes_are_neighbours_and_what_is_a_code_stays(dtype: torch.dtype, size: float, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    values = (torch.randn(64, 64, generator=dice) * size).clamp(-440, 440)
    place = ((0, 64), (0, 64))
    codes = values.to(dtype)
    assert torch.equal(
        encode(codes.float(), dtype, dither("x", place)).view(torch.uint8) | 128, codes.view(torch.uint8) | 128
    )
    got = encode(values, dtype, dither("x", place)).float()
    mantissa, least, _ = FORMATS[dtype]
    step = torch.exp2((torch.frexp(values).exponent - 1).clamp(min=least).float() - mantissa)
    assert ((got - values).abs() < step * 1.0001).all()
    assert torch.equal(got.to(dtype).float(), got)


def test_what_is_far_below_a_code_survives_on_average() -> None:
    """One weight in fifty steps up by a whole code: the sum is right. To the nearest, nothing would be left."""
    place = ((0, 256), (0, 256))
    grown = torch.full((256, 256), 16.0) + 2 / 50  # neighbours: 16 and 18
    assert (grown.to(torch.float8_e4m3fn).float() == 16).all()
    codes = encode(grown, torch.float8_e4m3fn, dither("any", place)).float()
    assert set(codes.flatten().tolist()) == {16.0, 18.0}
    assert math.isclose(float(codes.mean() - 16), 2 / 50, rel_tol=0.02)
    rows = codes.mean(1) - 16  # evenly over rows and columns too
    assert float((rows - 2 / 50).abs().max()) < 2 / 50


def test_the_adapter_alone(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["published"]
    assert export(case.adapter, tmp_path, called="org/published", say=silent).record["deviations"] == []
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
    source = choose_adapter(tmp_path)  # it names its base, which is no folder here
    with pytest.raises(UserError, match="the weights of the base model org/published are not on this machine") as no:
        base_of(source, None)
    assert "--base DIR" in str(no.value)
    assert base_of(source, str(case.base)).path == case.base
    # Again into the same folder, in 16 bits
    export(case.adapter, tmp_path, dtype="bf16", say=silent)
    after = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(before[key].bfloat16(), after[key]) for key in before)
    assert (tmp_path / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644


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
        seal(saved, {**manifest, "eval_loss": loss})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = [{"step": i, "loss": 3 - i / 20} for i in range(1, 31)]
    (folder / "steps-rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"kind": "eval", "step": step, "eval_loss": loss} for step, loss in losses.items()]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return folder


def test_the_best_checkpoint_is_chosen_and_a_damaged_one_is_not(run: Path) -> None:
    """Its checkpoints know how they evaluated. The log may have lost lines, or have those of steps that were undone."""
    (run / "events.jsonl").write_text('{"kind": "eval", "step": 30, "eval_loss": 0.1}\n{"kind": "ev')
    assert (
        choose_adapter(run).folder
        == checkpoint.best_of(checkpoint.saved(run / "checkpoints"))
        == run / "checkpoints" / "step-20"
    )
    assert "lowest evaluation loss of 3 saved: 1.5000 at step-20" in choose_adapter(run).why
    with (run / "checkpoints" / "step-20" / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert choose_adapter(run).folder.name == "step-30"
    assert "skipped step-20: adapter_model.safetensors" in choose_adapter(run).why


def test_the_card(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", say=silent)
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        'base_model: "base"',
        "library_name: peft",
        "| 20 | 1.5000 |",
        "wiki & co",
        "torch 2.13.0",
        "# license",
    ):
        assert text in card, text
    assert "/secret" not in card
    import yaml

    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "base"
    assert front["datasets"] == ["wiki"]
    assert "license" not in front


def test_what_servers_do_with_each_target(cases: dict[str, Case], tmp_path: Path) -> None:
    source = cases["published"].adapter
    answer = hints(source, export(source, tmp_path / "out", say=silent), None)
    vllm = {row.target: row for row in answer.rows if row.server == "vLLM"}
    assert vllm["kv_b_proj"].unmerged == "not applied"
    assert "48974" in vllm["kv_b_proj"].source
    assert vllm["experts"].adapters == 4
    assert vllm["q_a_proj"].unmerged == "applied"
    assert "--merge" in answer.advice
    assert "--max-lora-rank 8" in answer.commands["base and adapter"]


class Elsewhere(nn.Module):
    """A model on another device than the host."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device="meta"))

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert input_ids.device == self.weight.device
        assert not use_cache
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 3))


def test_rows_go_to_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_logits(Elsewhere(), torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 3)
    assert free_memory() > 10**6
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (12345, 10**9))
    assert free_memory() == 12345


def test_generate_gives_the_same_merged_and_unmerged(cases: dict[str, Case], tmp_path: Path) -> None:
    pieces: list[str] = []
    one = generate(cases["wide"].merged(None), "def f", tokens=8, say=silent, write=pieces.append)
    other = generate(cases["wide"].adapter, "def f", tokens=8, say=silent)
    assert one == other
    assert "".join(pieces).strip() == one.strip()
    with pytest.raises(UserError, match="neither a run folder nor an adapter"):
        generate(tmp_path, "x", say=silent)


@pytest.mark.parametrize("name", ["published", "blocks"])
def test_generate_gives_the_same_with_the_base_in_fp8(cases: dict[str, Case], name: str) -> None:
    """If 16 bits don't fit. Adapters of experts are not merged into codes then."""
    source, base = choose_adapter(cases[name].adapter), read_base(cases[name].base)
    tokens = torch.arange(20)[None]
    one, other = (load_model(base, source, dtype)(tokens).logits for dtype in ("bf16", "fp8"))
    assert torch.equal(one, other)
    assert not torch.allclose(one, load_model(base, None, "fp8")(tokens).logits, atol=0.05)


def test_a_dora_needs_16_bits_to_generate(cases: dict[str, Case]) -> None:
    with pytest.raises(UserError, match="DoRA needs base weights in 16 bits") as caught:
        load_model(read_base(cases["dora"].base), choose_adapter(cases["dora"].adapter), "fp8")
    assert "merge it first" in str(caught.value)
