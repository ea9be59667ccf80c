"""Every family of docs/families.md: derived as in transformers, loaded bit for bit, trained like TRL."""

import functools
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import warm
from peft import LoraConfig, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file

from windlass import plan as planning
from windlass import runfile, tiny
from windlass.errors import UserError
from windlass.export import export
from windlass.export.deltas import read_deltas
from windlass.export.source import choose_adapter
from windlass.introspect import describe as derive
from windlass.introspect.trace import trace_layers
from windlass.model import PARTS, read_base
from windlass.model.config import describe
from windlass.model.derived import find_description
from windlass.model.family import FAMILIES as ROWS
from windlass.model.quantization import quantizable_names
from windlass.model.shrink import shrink_config
from windlass.model.targets import resolve_adapter
from windlass.model.wrapped import outer_name
from windlass.plan.layout import Layout
from windlass.plan.workload import Traced
from windlass.runfile import Lora
from windlass.train.checkpoint.snapshot import load_adapter, save_adapter
from windlass.train.load import load_base
from windlass.train.lora import attach_adapter
from windlass.train.parallel import make_config
from windlass.train.patches import Patches
from windlass.train.samples import iter_choices, keeps_keys

pytestmark = pytest.mark.long

test_train: Any = importlib.import_module("test_train")

WIDE = {"initializer_range": 0.5}
# family -> what its tiny model has beside the shrunk defaults: those that meet code of their own. The others, and these
# with more steps, are in docs/families.md, by benchmarks/families.py.
NAMES = """
deepseek_v3 gpt_oss gemma3 granite qwen3_next mistral4 mistral3 llava llama4 phi3 phi phi4_multimodal longcat_flash
minimax minimax_m2 glm4_moe
"""
FAMILIES: dict[str, dict[str, Any]] = {name: {} for name in NAMES.split()} | {
    "qwen3_moe": {"mlp_only_layers": [0]},
    # At 0.02, TRL itself comes to another gradient norm (6e-4) of weights that are one rounding apart.
    "gemma4_text": WIDE,
}
FEW = ("deepseek_v3", "gpt_oss", "gemma3")  # what every run of the tests tries
REST = tuple(name for name in FAMILIES if name not in FEW)
STEPS = {FEW: 4, REST: 10}  # that are compared with TRL
ALL = [*FEW, *(pytest.param(name, marks=pytest.mark.prove) for name in REST)]
PUBLISHED_IN_FP8 = ("deepseek_v3", "glm4_moe", "qwen3_moe", "qwen3_next", "minimax_m2")  # with a scale for each block
# A router that is a linear module, and is not called; towers for images and sound
IDLE = {"longcat_flash": {"classifier"}, "phi4_multimodal": {"model.embed_tokens_extend"}}
LEAKING = ("gpt_oss", "qwen3_next", "minimax")  # transformers' packing: a mask without positions, a state that goes on


@functools.cache
def written(root: Path, name: str) -> Path:
    return tiny.write_family(root / name, name, config={"gemma4": WIDE, **FAMILIES}.get(name, {}), tokenizer=True)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def lora(**given: Any) -> Lora:
    return Lora.model_validate({"r": 4, "lora_alpha": 8, "lora_dropout": 0, "target_modules": "all-linear", **given})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("name", ALL)
def test_counts_and_targets_equal_transformers_and_pefts(root: Path, name: str) -> None:
    base = read_base(written(root, name))
    text = transformers.CONFIG_MAPPING[base.family.model_type].from_dict(dict(base.config))
    text.tie_word_embeddings = not any(p.part == "head" for p in base.parameters)
    model = getattr(transformers, base.family.causal_lm)(text)
    assert base.total == model.num_parameters()
    assert {p.name: p.shape for p in base.parameters} == {
        key: tuple(tensor.shape)
        for key, tensor in model.state_dict().items()
        if key in {p.name for p in base.parameters}
    }
    assert {p.part for p in base.parameters} <= set(PARTS)
    assert base.family.isolates is (name not in LEAKING)
    assert base.family.without_formula == {"qwen3_next": 2, "minimax": 2}.get(name, 0)
    assert base.family.logits is True
    adapter = resolve_adapter(lora(), base, str)
    linears = {key for key, each in model.named_modules() if type(each) is torch.nn.Linear and key != "lm_head"}
    config = LoraConfig(r=4, target_modules=list(adapter.target_modules), task_type="CAUSAL_LM")
    assert adapter.trainable == get_peft_model(model, config).get_nb_trainable_parameters()[0]
    # What PEFT itself would adapt, but for what it takes for routed experts, and for what gets no gradient.
    taken = tuple(f".{leaf}" for leaf in base.family.peft_takes | base.family.idle)
    towers = tuple(f"{beginning}." for beginning in base.family.idle)
    assert base.family.idle == IDLE.get(name, set())
    expected = {each for each in linears if not each.endswith(taken) and not each.startswith(towers)}
    assert set(adapter.target_modules) == expected
    if base.wrapper:  # where an export for the multimodal class finds them
        with torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(written(root, name))
            modules = dict(getattr(transformers, base.wrapper.architecture)(config).named_modules())
        assert {outer_name(each, base.wrapper.place) for each in (*adapter.target_modules, "lm_head")} <= modules.keys()


PROMPTS = [5, 9, 11, 3, 40, 41, 7], [8, 7, 6], [12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
KEEPING = {"bamba": {"attn_layer_indices": [1]}, "recurrent_gemma": {}}  # states beside keys; states in its layers


@pytest.mark.parametrize("name", [*ALL, *(pytest.param(name, marks=pytest.mark.prove) for name in KEEPING)])
def test_rows_are_continued_with_what_is_kept_as_without(root: Path, name: str) -> None:
    folder = tiny.write_family(root / name, name, config=KEEPING[name]) if name in KEEPING else written(root, name)
    base = read_base(folder)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    model = getattr(transformers, base.family.causal_lm)(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:  # a tied embedding as large as the rest would repeat the last token
            torch.nn.init.normal_(weight, std=0.001 if len(weight) == config.vocab_size else 1.0)
    expected = []
    with torch.no_grad(), Patches() as patches:
        for prompt in PROMPTS:
            row = list(prompt)
            for _ in range(8):
                row.append(int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
            expected.append(row[len(prompt) :])
        patches.patch_forward(model)
        batches = [PROMPTS] if keeps_keys(model) else [[prompt] for prompt in PROMPTS]
        found: list[tuple[int, ...]] = []
        for batch in batches:
            choices = iter_choices(model, batch, 64, model.device)
            found += zip(*(next(choices) for _ in range(8)), strict=True)
    assert [list(row) for row in found] == expected
    assert len({token for row in expected for token in row}) > 3


@pytest.mark.parametrize("row", ROWS)
def test_rows_for_machines_without_torch_equal_what_is_derived(row: str, tmp_path: Path) -> None:
    config = json.loads((tiny.write_model(tmp_path / "m", row, tokenizer=False) / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    by_row, found = describe(config, "config.json"), derive.derive(config, "config.json")
    entries = [(f"model.layers.{i}.{e['name']}", e) for i, k in enumerate(found["order"]) for e in found["kinds"][k]]
    entries += [(e["name"], e) for e in found["outside"]]
    rows = {p.name: (list(p.shape), p.part, p.linear) for p in by_row.parameters}
    assert rows == {name: (e["shape"], e["part"], e.get("linear", False)) for name, e in entries}
    assert found["dims"].items() <= by_row.dims.items()
    spelled = {p.name: {each.name for way in p.spellings for each in way} for p in by_row.parameters}
    for name, entry in entries:  # published layouts by experts and wrappers
        number = (name.split(".") * 3)[2]
        assert {each[0].replace("@", number) for way in entry["stored"] for each in way} <= spelled[name]
    ours, theirs = by_row.family, found
    assert (ours.causal_lm, list(ours.layers), ours.isolates) == (theirs["class"], theirs["layers"], theirs["isolates"])


def test_shipped_descriptions_equal_what_is_derived() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
    for file, text in importlib.import_module("generate").descriptions().items():
        shipped, found = json.loads(file.read_text()), json.loads(text)
        assert {**shipped, "transformers": ""} == {**found, "transformers": ""}


def test_sizes_that_depend_on_each_other_are_shrunk_together(tmp_path: Path) -> None:
    config = json.loads((tiny.write_family(tmp_path / "m", "falcon_h1") / "config.json").read_text())
    assert derive.derive(config, "config.json")["logits"] is True  # it ran, tiny


@pytest.mark.fault(
    "a model that FSDP2 would leave sharded", "`windlass plan`", "BailingHybridForCausalLM can't be sharded"
)
def test_a_model_that_reads_ungathered_weights_is_not_sharded(tmp_path: Path) -> None:
    """transformers keeps its convolutions in float32, a group of FSDP2's own, and calls them as functions."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps({"text": "a b"}) + "\n")
    (tmp_path / "run.yaml").write_text(test_train.RUN.format(folder=tmp_path, steps=2))
    path = tiny.write_family(tmp_path / "m", "bailing_hybrid", tokenizer=True)
    given = test_train.case(2, model__model_name_or_path=str(path), layout="full-shard")["overrides"]
    with pytest.raises(UserError, match="BailingHybridForCausalLM can't be sharded"):
        planning.make_plan(runfile.read_run_file(tmp_path / "run.yaml", given))


def test_a_plan_warns_of_layers_without_a_formula_and_suggests_nothing_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps({"text": "a b"}) + "\n")
    (tmp_path / "run.yaml").write_text(test_train.RUN.format(folder=tmp_path, steps=2))
    for name, odd, packs in (("minimax", True, False), ("granite", False, True)):
        model = {"model__model_name_or_path": str(written(root, name)), "cluster__gpu": "H100"}
        plan = planning.make_plan(
            runfile.read_run_file(tmp_path / "run.yaml", test_train.case(8, **model)["overrides"])
        )
        assert (
            any("2 of 4 layers have no formula" in each and "measured by tracing" in each for each in plan.notes) is odd
        )
        suggested = [*(each.override for each in plan.warnings), *(each.change for each in plan.advice)]
        assert any("data.packing" in each for each in suggested) is packs


def test_traced_layer_keeps_the_same_bytes_as_a_real_one() -> None:
    config = transformers.CONFIG_MAPPING["qwen3_next"].from_dict(
        shrink_config(transformers.CONFIG_MAPPING["qwen3_next"]().to_dict(), layers=1)
    )
    real = transformers.Qwen3NextForCausalLM(config).to(torch.bfloat16).model.requires_grad_(False)
    with torch.device("meta"):
        traced = trace_layers(transformers.Qwen3NextForCausalLM(config), [0])[0]
    layer, kept = real.layers[0], dict[int, int]()
    layer.mlp.experts.forward = lambda states, *_: states
    own = {each.untyped_storage()._cdata for each in layer.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    states = torch.randn(1, 512, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each), torch.autocast("cpu", torch.bfloat16):
        output = layer(states, position_embeddings=None)
    own = {states.untyped_storage()._cdata, output.untyped_storage()._cdata}
    seen = sum(size for key, size in kept.items() if key not in own)
    assert traced["kept"][1] == pytest.approx(seen, rel=0.02)
    shape = Traced(traced)
    assert shape.at("kept", 512) == traced["kept"][1]
    assert shape.at("kept", 4096) == pytest.approx(8 * traced["kept"][1], rel=0.1)  # linear attention
    assert traced["forward_operators"][0] < traced["forward_operators"][2]  # chunk by chunk
    assert not any(traced["attention"])
    assert 0 < traced["forward_products"][0] < traced["backward_products"][0]


def test_common_target_names_are_translated(root: Path) -> None:
    seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for name, expected in {
        "phi3": "q_proj -> qkv_proj: queries, keys and values are one matrix",
        "qwen3_next": "q_proj -> in_proj_qkvz, in_proj_ba of 2 layers: linear attention makes queries",
        "deepseek_v3": "gate_proj is left out: PEFT takes it for the routed experts",
        "phi": "down_proj -> fc2: this feed-forward has two matrices and no gate",
    }.items():
        adapter = resolve_adapter(lora(target_modules=seven), read_base(written(root, name)), str)
        assert expected in "\n".join(adapter.notes), adapter.notes
    assert {module.rpartition(".")[2] for module in adapter.target_modules} == {*seven[:3], "dense", "fc1", "fc2"}


def test_refused_families_have_a_reason(root: Path, tmp_path: Path) -> None:
    for model_type, why in {
        "t5": "encoder-decoder",
        "bert": "encoder",
        "vit": "no causal language model",
        "gpt2": "can't be sharded",
        "blt": "its config has no num_hidden_layers",
        "apertus": "is a single number",
    }.items():
        config = transformers.CONFIG_MAPPING[model_type]().to_dict()
        with pytest.raises(UserError, match=why) as error:
            describe(config | {"architectures": None}, "config.json")
        assert error.value.problems[0].hint
    with pytest.raises(UserError, match="code that comes with the checkpoint"):
        describe({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "config.json")
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for quantized, named in (({"quant_method": "awq"}, "'awq'"), (eight, "'bitsandbytes int8'"), ("gptq", "'gptq'")):
        config = transformers.LlamaConfig().to_dict() | {"quantization_config": quantized}
        with pytest.raises(UserError, match=rf"unsupported quantization {named}(.|\n)*layout.base_dtype: nf4"):
            describe(config, "config.json")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_transposed_experts_merge_as_peft_merges_them(root: Path, tmp_path: Path) -> None:
    base = read_base(written(root, "gpt_oss"))
    model = transformers.GptOssForCausalLM.from_pretrained(base.path)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    names = [p.name for p in base.parameters if p.transposed]
    adapted = get_peft_model(model, LoraConfig(r=2, target_parameters=names, init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path))
    deltas, after = read_deltas(choose_adapter(tmp_path), base), adapted.merge_and_unload().state_dict()
    assert sorted(deltas.by_name) == sorted(names)
    for name in names:
        for expert, change in enumerate(after[name] - before[name]):
            assert torch.allclose(deltas.factors(name).rows(expert, 0, len(change)), change, atol=1e-5)
    wrapped = read_base(written(root, "llama4_text"))
    with pytest.raises(UserError, match="routed experts of Llama4ForCausalLM are not supported"):
        resolve_adapter(lora(experts={"r": 2}), wrapped, str)
    with pytest.raises(UserError, match=r"lora\.bias: the head's bias can't be trained(.|\n)*lora_only"):
        resolve_adapter(lora(bias="all"), read_base(written(root, "phi")), str)


@pytest.mark.fault(
    "targets that are all left out", "`windlass plan`", "nothing would be adapted: gate_proj is left out"
)
def test_targets_that_are_all_left_out_are_refused(root: Path) -> None:
    """PEFT takes these names for the routed experts, which lora.experts adapts."""
    base = read_base(written(root, "deepseek_v3"))
    with refused("nothing-adapted", "lora.target_modules") as problems:
        resolve_adapter(lora(target_modules=["gate_proj", "up_proj", "down_proj"]), base, str)
    assert problems[0].problem.startswith("nothing would be adapted: gate_proj is left out: PEFT takes it")
    assert problems[0].hint.endswith("o_proj, or set lora.experts: true")
    assert resolve_adapter(lora(target_modules=["gate_proj", "o_proj"]), base, str).trainable


@pytest.mark.fault(
    "adapters in a tower for images or sound, which text never reaches",
    "`windlass plan`",
    "'up_proj_for_speech' can't be trained: PEFT refuses it, or text alone",
)
def test_towers_for_images_and_sound_get_no_adapter(root: Path) -> None:
    """Phi 4 multimodal's sound encoder has modules of the same names as the layers."""
    base = read_base(written(root, "phi4_multimodal"))
    # Of towers too, whose own configs say float32
    assert make_config(base, torch.bfloat16, "eager").vision_config.dtype is torch.bfloat16
    modules = [p.name.removesuffix(".weight") for p in base.parameters if p.linear]
    assert any("audio_embed" in module and module.endswith(".o_proj") for module in modules)
    adapter = resolve_adapter(lora(), base, str)
    assert {module.split(".")[1] for module in adapter.target_modules} == {"layers"}
    assert len(adapter.target_modules) == 4 * 4
    assert "without model.embed_tokens_extend: PEFT refuses it, or text alone" in adapter.notes[0]
    adapter = resolve_adapter(lora(target_modules=["o_proj"]), base, str)
    assert len(adapter.target_modules) == 4
    assert any(note.startswith("model.embed_tokens_extend gets no adapter: ") for note in adapter.notes)
    for targets, place in (
        (["o_proj", "up_proj_for_speech"], "lora.target_modules[1]"),
        (["feed_forward_in.down_proj"], "lora.target_modules[0]"),
        (r".*audio_embed.*o_proj", "lora.target_modules"),
    ):
        with refused("idle-parameter", place):
            resolve_adapter(lora(target_modules=targets), base, str)
    with pytest.raises(UserError, match="'up_proj_for_speech' can't be trained: PEFT refuses it, or text alone"):
        resolve_adapter(lora(target_modules=["up_proj_for_speech"]), base, str)
    with refused("idle-parameter", "lora.bias"):
        resolve_adapter(lora(bias="all"), base, str)
    with refused("not-trainable-in-full", "lora.modules_to_save[0]") as problems:
        resolve_adapter(lora(modules_to_save=["position_embedding"]), base, str)
    assert problems[0].hint == "choose of embed_tokens, lm_head"


@pytest.mark.fault(
    "adapters in layers that text skips", "`windlass plan`", "'cross_attn.q_proj' can't be trained: PEFT refuses it"
)
def test_layers_that_text_skips_get_no_adapter(root: Path) -> None:
    """Llama 3.2 Vision's layers with cross-attention do nothing where there is no image."""
    base = read_base(written(root, "mllama"))
    assert base.family.idle == {"model.layers.3"}
    adapter = resolve_adapter(lora(target_modules=["q_proj", "gate_proj"]), base, str)
    assert {module.split(".")[2] for module in adapter.target_modules} == {"0", "1", "2"}
    assert any(note.startswith("model.layers.3 gets no adapter: ") for note in adapter.notes)
    with refused("idle-parameter", "lora.target_modules[0]") as problems:
        resolve_adapter(lora(target_modules=["cross_attn.q_proj"]), base, str)
    assert problems[0].problem.startswith("'cross_attn.q_proj' can't be trained: PEFT refuses it")


@pytest.mark.fault(
    "adapters on a weight that several layers share", "`windlass plan`", "self_attn.q_proj share a weight"
)
@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_layers_that_share_a_weight_are_refused(name: str) -> None:
    """Only the first layer was adapted, and a merge would have changed all."""
    config = tiny.make_small_config(name).to_dict() | {"architectures": None}
    with refused("shared-weights", "config.json") as problems:
        describe(config, "config.json")
    assert problems[0].problem.endswith("self_attn.q_proj share a weight")


@pytest.mark.fault(
    "codes where a model reads a weight itself", "`windlass train`", "belongs to Gemma3nTextAltUp, which can't compute"
)
def test_a_weight_that_the_model_reads_itself_stays_in_16_bits(tmp_path: Path) -> None:
    """Gemma 3n clamps two in training, and calls neither then or only one."""
    path = tiny.write_family(tmp_path / "m", "gemma3n_text")
    base = read_base(path)
    assert base.family.idle == {"correction_coefs"}  # in training alone
    assert base.family.bare == {"correction_coefs", "prediction_coefs"}
    names = {name.split(".")[-2] for name in quantizable_names(base)}
    assert "modality_router" in names
    assert not names & base.family.bare
    write_fp8(path)
    base = read_base(path.with_name("m in FP8"))
    alone = Layout("resident", "test", 1, 1, shard=1, base_dtype="fp8")
    with refused("unsupported-module", "layout.base_dtype") as problems:
        load_base(base, alone)
    assert "belongs to Gemma3nTextAltUp, which can't compute with FP8 weights" in problems[0].problem


def test_a_model_that_is_not_shrunk_is_not_built_by_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan took 12.7 GiB of longcat_flash, whose sizes have names of their own."""
    config = shrink_config(transformers.LlamaConfig().to_dict()) | {"architectures": None}
    assert derive.derive(config, "config.json")["isolates"] is True
    monkeypatch.setattr(derive, "shrink_config", lambda config: config)
    assert derive.derive(config | {"vocab_size": 1_000_000}, "config.json")["isolates"] is None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("name", ["laguna", "gemma4"])
def test_adapters_of_names_that_peft_or_a_wrapper_changes_open_again(root: Path, tmp_path: Path, name: str) -> None:
    """PEFT renames Laguna's shared experts; Gemma 4 has embeddings for each layer beside its embedding."""
    base = read_base(written(root, name))
    adapter = resolve_adapter(lora(), base, str)
    alone = Layout("resident", "test", 1, 1, shard=1, precision="no")
    model = attach_adapter(load_base(base, alone, dtype=torch.float32)[0], lora(), adapter, seed=1)
    save_adapter(model, tmp_path / "adapter")
    load_adapter(model, tmp_path / "adapter")  # as a resumed run does
    if name == "laguna":
        assert "without down_proj, gate_proj, up_proj: PEFT takes it" in adapter.notes[0]
    classes = [base.family.causal_lm, *([base.wrapper.architecture] if base.wrapper else [])]
    for model_class in classes:
        said: list[str] = []
        export(tmp_path / "adapter", tmp_path / model_class, model_class=model_class, probes=False, say=said.append)
        assert said[-1].endswith(f"byte-equal, each at its place in {model_class}")
    assert len(classes) == (2 if name == "gemma4" else 1)


def test_machine_without_torch_gets_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = transformers.Olmo2Config(num_hidden_layers=3).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"python -m windlass\.introspect\.describe /\S+ > windlass\.json; then copy"):
        find_description(config, str(tmp_path / "config.json"), tmp_path)
    (tmp_path / "windlass.json").write_text(json.dumps(derive.derive(config, "config.json")))
    assert find_description(config, "config.json", tmp_path)["class"] == "Olmo2ForCausalLM"
    with pytest.raises(UserError, match="no description"):  # of another model
        find_description(config | {"hidden_size": 32}, "config.json", tmp_path)


def test_a_refusal_where_torch_is_is_printed_and_reported_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.Olmo2Config(num_hidden_layers=3).to_dict() | {"model_type": "unheard-of"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        derive.main(str(tmp_path))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "error: " in printed.err
    assert "unheard-of" in printed.err
    (tmp_path / "windlass.json").write_text(printed.out)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"windlass\.json: .*unheard-of"):
        find_description(config, str(tmp_path / "config.json"), tmp_path)


def write_fp8(plain: Path, side: int = 32) -> None:
    """Write a copy stored as codes with a scale per block; the plain one gets the decoded values."""
    copy = shutil.copytree(plain, plain.with_name(f"{plain.name} in FP8"))
    kept = ("embedding", "norm", "head", "router")
    parameters = [p for p in read_base(plain).parameters if p.part not in kept and (p.linear or p.part == "experts")]
    pieces = [piece.stored for p in parameters for piece in p.pieces]
    keys = {each.key for each in pieces if len(each.shape) == 2 and not each.key.endswith("bias")}
    values = load_file(plain / "model.safetensors")
    stored = dict(values)
    for key in keys:
        rows, columns = values[key].shape
        scale = torch.rand(-(-rows // side), -(-columns // side)) / 500 + 1e-4
        spread = scale.repeat_interleave(side, 0)[:rows].repeat_interleave(side, 1)[:, :columns]
        stored[key] = (values[key] / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{key}_scale_inv"], values[key] = scale, stored[key].float() * spread
    save_file(stored, copy / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [side, side]}
    (copy / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("names", "ranks"), [(FEW, 2), pytest.param(REST, 4, marks=pytest.mark.prove)], ids=["few", "rest"]
)
def test_the_loader_is_bit_equal(names: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    for name in names:
        written(tmp_path / "models", name)
        if name in PUBLISHED_IN_FP8:
            write_fp8(tmp_path / "models" / name)
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("family_ranks.py")), str(tmp_path / "models"), str(tmp_path / "out")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (tmp_path / "out").exists(), done.stderr[-4000:]
    outcomes = json.loads((tmp_path / "out").read_text())
    assert len(outcomes) >= 2 * len(names)
    assert {case.split()[0] for case in outcomes if "in FP8" in case} == {*names} & {*PUBLISHED_IN_FP8}
    assert {case: why for case, why in outcomes.items() if why} == {}


@pytest.fixture(scope="session")
def trained(root: Path) -> Callable[[tuple[str, ...]], tuple[Any, Any]]:
    """Train every family with plain TRL in one process, and with windlass on two ranks."""
    (root / "data").mkdir()
    chance = random.Random(0)
    rows = [" ".join(chance.choices(test_train.WORDS.split(), k=chance.randint(3, 12))) for _ in range(96)]
    (root / "data" / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (root / "run.yaml").write_text(test_train.RUN.format(folder=root, steps=STEPS[REST]))

    @functools.cache
    def start(names: tuple[str, ...]) -> tuple[Any, Any]:
        how = {}
        for name in names:
            base = read_base(written(root, name))
            how[name] = {"model__model_name_or_path": str(root / name), "train__max_steps": STEPS[names]}
            if "experts" in base.dims and base.family.expert_adapters:
                how[name] |= test_train.EXPERTS
        folder = f"{names[0]} "
        one = {name: test_train.case(1, plain=True, **given) for name, given in how.items()}
        two = {name: test_train.case(2, **given) for name, given in how.items()}
        return test_train.launched(root, 1, one, folder), test_train.launched(root, 2, two, folder)

    return start


@pytest.mark.parametrize("name", ALL)
def test_two_ranks_equal_plain_trl_in_one_process(
    trained: Callable[[tuple[str, ...]], tuple[Any, Any]], name: str
) -> None:
    names = FEW if name in FEW else REST
    one, two = trained(names)
    assert two[name].get("error") is None, two[name]["error"]
    steps, reference = two.steps(name), one.steps(name)
    assert len(steps) == len(reference) == STEPS[names]
    for step, expected in zip(steps, reference, strict=True):
        for key in ("loss", "grad_norm"):
            assert step[key] == pytest.approx(expected[key], rel=1e-5), (step, expected)
