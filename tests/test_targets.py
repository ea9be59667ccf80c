"""LoRA targets and parameter counts against PEFT itself, on every family; errors for patterns without a match."""

import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from refusals import refused
from test_model import SIZES, config_of

from windlass.model import Base, find_published_base
from windlass.model.config import describe
from windlass.model.targets import Adapter, resolve_adapter
from windlass.runfile import Lora
from windlass.train.lora import make_peft_config

USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROUTED = ("mistral4", "mixtral", "qwen3_moe")
REMAPPED = ("mixtral", "qwen3_moe")  # PEFT changes targets of its own accord here, exact names excepted


MORE: dict[str, dict[str, Any]] = {  # so that one name reaches several parts, and biases
    "mistral4": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "llama": {"attention_bias": True, "mlp_bias": True},
}


def small_base(model_type: str, **more: Any) -> tuple[Any, Base]:
    """Return transformers' config, and the base described by such a model's headers."""
    config = config_of(model_type, **{**MORE.get(model_type, {}), **more})
    return config, describe(config.to_dict(), "config.json", "small")


def by_peft(config: Any, causal_lm: str, **settings: Any) -> tuple[dict[str, int], int]:
    """Return what PEFT builds: trainable parameters of each adapted module or expert parameter, and in total."""
    with torch.device("meta"):
        model = getattr(transformers, causal_lm)(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings), low_cpu_mem_usage=True)
    found: dict[str, int] = {}
    for name, module in peft_model.named_modules():
        if isinstance(module, LoraLayer):
            place = name.removeprefix("base_model.model.").replace(".base_layer", "")
            leaf = getattr(module, "parameter_name", None)
            own = (p.numel() for n, p in module.named_parameters() if "lora_" in n and not n.startswith("base_layer."))
            found[f"{place}.{leaf}" if leaf else place] = sum(own)
    return found, sum(p.numel() for p in peft_model.parameters() if p.requires_grad)


def own(base: Base, **settings: Any) -> Adapter:
    lora = Lora(**{"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, **settings})
    return resolve_adapter(lora, base, lambda key: f"run.yaml: {key}")


def agree(model_type: str, ours: dict[str, Any], peft: dict[str, Any], **more: Any) -> Adapter:
    """Resolve here, configure PEFT with the user's words, and compare names and numbers."""
    config, base = small_base(model_type, **more)
    adapter = own(base, **ours)
    parameters = list(adapter.target_parameters) or None
    exact = {"r": 3, **peft, "target_modules": list(adapter.target_modules), "target_parameters": parameters}
    found, trainable = by_peft(config, base.family.causal_lm, **exact)
    if model_type not in REMAPPED:
        assert by_peft(config, base.family.causal_lm, **{"r": 3, **peft}) == (found, trainable)
    names = [module for target in adapter.targets for module in target.modules]
    assert len(names) == len(set(names))
    assert set(names) == set(found)
    assert adapter.trainable == trainable
    for target in adapter.targets:
        assert target.parameters == sum(found[module] for module in target.modules)
    return adapter


O_PROJ: dict[str, Any] = {"target_modules": ["o_proj"]}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
OWN_RANK = {"rank_pattern": {r".*\.experts\.(gate_up|down)_proj": 2}}
STACKS = ("gate_up_proj", "down_proj")
RANKS = {"rank_pattern": {r"layers\.(0|1)\..*o_proj": 5, "mlp.down_proj": 1}, "alpha_pattern": {"o_proj": 7}}
TWO = ["o_proj", "down_proj"]
NAMES = (USUAL, ["q_proj", "down_proj"], ["self_attn.o_proj", "model.layers.1.mlp.up_proj"])
# what -> families, our settings, PEFT's
AGREE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "all-linear": (SIZES, {"target_modules": "all-linear"}, {"target_modules": "all-linear"}),
    "all": (ROUTED, {"target_modules": "all"}, {"target_modules": "all-linear", **EXPERTS}),
    "all of a dense model": (["llama"], {"target_modules": "all"}, {"target_modules": "all-linear"}),
    "dora": (["mistral", "mistral4"], {**O_PROJ, "use_dora": True}, {**O_PROJ, "use_dora": True}),
    "both experts": (ROUTED, {**O_PROJ, "experts": {"targets": ["gate_up_proj", "down_proj"]}}, {**O_PROJ, **EXPERTS}),
    "ranks by pattern": (["llama"], same := {"target_modules": TWO, **RANKS}, same),
    "two layers": (
        ["mistral", "mistral4"],
        {**O_PROJ, "layers_to_transform": [0, 2]},
        {**O_PROJ, "layers_to_transform": [0, 2]},
    ),
    "experts of one layer": (
        ROUTED,
        {**O_PROJ, "experts": True, "layers_to_transform": 1},
        {
            **O_PROJ,
            "layers_to_transform": 1,
            "target_parameters": [f"layers.1.{p}" for p in EXPERTS["target_parameters"]],
        },
    ),
    "experts of their own rank": (ROUTED, {**O_PROJ, "experts": {"r": 2}}, {**O_PROJ, **EXPERTS, **OWN_RANK}),
    **{
        f"expression {pattern}": (["llama", "mistral4"], {"target_modules": pattern}, {"target_modules": pattern})
        for pattern in (r".*\.self_attn\..*proj.*", r"model\.layers\.[02]\..*o_proj")
    },
    **{
        f"{', '.join(names)}, bias {bias}": (["llama"], same := {"target_modules": names, "bias": bias}, same)
        for names, bias in zip(NAMES, ("none", "all", "lora_only"), strict=True)
    },
}


@pytest.mark.parametrize(("model_type", "case"), [(family, case) for case in AGREE for family in AGREE[case][0]])
def test_targets_and_counts_equal_pefts(model_type: str, case: str) -> None:
    _, ours, peft = AGREE[case]
    adapter = agree(model_type, ours, peft)
    if case == "experts of their own rank":
        assert "rank by part: attention 3, experts 2" in adapter.notes
        assert {target.r for target in adapter.targets} == {2, 3}


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_patterns_give_pefts_values_and_scales() -> None:
    """peft_config names modules exactly; given the patterns, PEFT builds the same adapter from the same seed."""
    config, base = small_base("llama")
    keys: dict[str, Any] = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": TWO, **RANKS}
    adapters = []
    for lora in (make_peft_config(Lora(**keys), own(base, **keys)), LoraConfig(task_type="CAUSAL_LM", **keys)):
        torch.manual_seed(0)
        adapters.append(get_peft_model(transformers.LlamaForCausalLM(config), lora))
    (ours, scales), (theirs, expected) = (
        (each.state_dict(), {n: m.scaling for n, m in each.named_modules() if isinstance(m, LoraLayer)})
        for each in adapters
    )
    assert scales == expected
    assert {scale["default"] for scale in scales.values()} == {7 / 5, 7 / 3, 6 / 1}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


def test_latent_attention_translates_the_usual_names() -> None:
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = agree("mistral4", {"target_modules": USUAL}, {"target_modules": names})
    by_pattern = {(target.pattern, target.part): target for target in adapter.targets}
    assert by_pattern["q_proj", "attention"].names == ("q_a_proj", "q_b_proj")
    assert len(by_pattern["q_proj", "attention"].modules) == 6
    assert by_pattern["v_proj", "attention"].modules == ()
    assert by_pattern["v_proj", "attention"].note.endswith("already adapted through k_proj")
    # The first layer is dense here: the same name reaches two parts.
    assert len(by_pattern["gate_proj", "mlp"].modules) == 1
    assert len(by_pattern["gate_proj", "shared_experts"].modules) == 2
    notes = "\n".join(adapter.notes)
    assert "q_proj -> q_a_proj, q_b_proj: latent attention" in notes
    assert re.search(r"routed experts, \d\d\.\d % of the weights, are not adapted: set lora\.experts", notes)
    assert "kv_b_proj: vLLM" in notes
    # Queries that are not compressed keep their name; v_proj alone reaches the latent too.
    q_proj = {"target_modules": ["q_proj"]}
    assert agree("mistral4", q_proj, q_proj, q_lora_rank=None).targets[0].note == ""
    peft = {"target_modules": ["kv_a_proj_with_mqa", "kv_b_proj"]}
    assert len(agree("mistral4", {"target_modules": ["v_proj"]}, peft).target_modules) == 6


def test_mistral_small_4_by_the_baseline_recipe() -> None:
    base = find_published_base("Mistral-Small-4-119B-2603")
    assert base is not None
    adapter = own(base, r=16, target_modules=USUAL, lora_dropout=0.05)
    assert adapter.trainable == 27_463_680
    counts = {p: sum(t.parameters for t in adapter.targets if t.part == p) for p in ("attention", "shared_experts")}
    assert counts == {"attention": 16_846_848, "shared_experts": 10_616_832}
    assert "routed experts, 97.5 % of the weights, are not adapted: set lora.experts" in adapter.notes
    with_experts = own(base, r=16, target_modules=USUAL, experts=True)
    assert with_experts.trainable == 1_084_428_288
    assert len(with_experts.target_parameters) == 72
    assert not any("not adapted" in note for note in with_experts.notes)


# family, expression -> what the warnings say, in order; nothing where it reaches what its words suggest
MEANT: list[tuple[str, str, list[str]]] = [
    ("mistral", r".*\.self_attn\.(q|k|v|o)_proj", []),
    ("mistral", r"model\.layers\.[02]\..*o_proj", []),  # layers by their numbers
    ("mistral", r".*(self_attn|mlp).*", []),
    ("qwen3_moe", r".*(self_attn|mlp).*", ["nothing matches its 'mlp'"]),  # routed experts are no modules
    (
        "mistral4",
        r".*\.self_attn\.(q|k|v|o)_proj",
        ["reaches o_proj of self_attn, not q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj; nothing "],
    ),
    ("mistral", r".*self_attn.*|.*feed_forward.*", ["nothing matches its '.*feed_forward.*'"]),
    ("deep", r"model\.layers\.\d\.self_attn\.[a-z]_proj", [
        "reaches self_attn's q_proj in 10 of 12, k_proj in 10 of 12, v_proj in 10 of 12, o_proj in 10 of 12 layers",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "pattern", "expected"), MEANT)
def test_incomplete_target_pattern_is_warned_about(model_type: str, pattern: str, expected: list[str]) -> None:
    deep = {"model_type": "mistral", "num_hidden_layers": 12}
    _, base = small_base(**(deep if model_type == "deep" else {"model_type": model_type}))
    for warning, words in zip(own(base, target_modules=pattern).warnings, expected, strict=True):
        assert words in warning


def test_experts_names_are_expanded() -> None:
    """lora.experts satisfies a name that only routed experts have; gate and up of experts are one parameter."""
    _, base = small_base("mixtral")
    adapter = own(base, target_modules=["q_proj", "gate_proj", "w2"], experts=True)
    assert {"gate_proj -> gate_up_proj of lora.experts", "w2 -> down_proj of lora.experts"} <= set(adapter.notes)
    assert len(adapter.target_parameters) == 6
    adapter = own(base, target_modules=["o_proj"], experts={"targets": ["gate_proj", "up_proj"]})
    assert adapter.target_parameters == tuple(f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(3))
    assert "gate_proj -> gate_up_proj: fused in routed experts" in adapter.notes


def test_dtype_bytes_and_notes() -> None:
    _, base = small_base("mistral")
    full = own(base, modules_to_save=["embed_tokens", "lm_head"])
    assert list(full.in_full) == ["model.embed_tokens.weight", "lm_head.weight"]
    assert full.trainable == own(base).trainable + sum(full.in_full.values())
    assert any(note.startswith("modules_to_save: vLLM loads no adapter") for note in full.notes)
    assert (own(base).dtype_bytes, own(base, dtype="bfloat16").dtype_bytes) == (4, 2)
    assert not any("bias" in note for note in own(base, bias="all").notes)
    _, base = small_base("qwen2")
    assert any(note.startswith("bias: all trains 192 biases") for note in own(base, bias="all").notes)


# model type, settings, code, and the hint of each error
WRONG: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("mistral", {"target_modules": ["q_prj"]}, "no-match", ["nearest: q_proj"]),
    ("mistral", {"target_modules": ["all-linear"]}, "no-match", ["without a list"]),
    ("mistral", {"target_modules": "q_proj"}, "no-match", ["full names"]),
    ("mistral", {"target_modules": ["q_proj", "lm_head"]}, "adapted-head", ["leave it out"]),
    ("llama, tied", {"target_modules": ["lm_head"]}, "no-match", ["this model's head is its embedding"]),
    ("qwen3_moe", {"target_modules": ["gate"]}, "no-match", ["known"]),
    ("qwen3_moe", {"target_modules": ["down_proj"]}, "no-match", ["adapt them with lora.experts: true"]),
    ("mixtral", {"target_modules": USUAL}, "no-match", ["lora.experts: true"] * len(USUAL[4:])),
    ("mistral", {"rank_pattern": {"q_prj": 4}}, "unused-pattern", ["adapted: model.layers.0"]),
    ("mistral", {"layers_to_transform": [0, 3]}, "no-such-layer", ["small has layers 0 to 2"]),
    (
        *("mistral4", {"target_modules": "model.layers.0.mlp.*", "layers_to_transform": 1}),
        *("no-match-in-layers", ["name layers that have it"]),
    ),
    ("mistral", {"modules_to_save": ["lm_head", "norm"]}, "not-trainable-in-full", ["choose of embed_tokens, lm_head"]),
    ("llama, tied", {"modules_to_save": ["embed_tokens"]}, "not-trainable-in-full", ["leave lora.modules_to_save out"]),
    ("mistral", {"experts": True}, "no-experts", ["leave lora.experts out"]),
    ("mistral4", {"experts": True, "use_dora": True}, "dora-of-experts", ["lora.use_dora: false"]),
    (
        "mistral4",
        {"experts": {"targets": ["gate_up_proj", "w9"]}},
        "no-such-parameter",
        ["known: gate_up_proj, down"],
    ),
]


@pytest.mark.fault("a tied embedding to be trained in full", "`windlass plan`", "leave lora.modules_to_save out")
@pytest.mark.parametrize(("model_type", "settings", "code", "hints"), WRONG)
def test_pattern_without_matches_is_an_error(
    model_type: str, settings: dict[str, Any], code: str, hints: list[str]
) -> None:
    family, _, tied = model_type.partition(", ")
    _, base = small_base(family, tie_word_embeddings=bool(tied))
    with refused(code) as problems:
        own(base, **settings)
    for problem, hint in zip(problems, hints, strict=True):
        assert problem.code == code
        assert hint in problem.hint
        assert problem.where.startswith("run.yaml: lora.")
    if settings.get("target_modules") == ["gate"]:
        assert problems[0].problem.endswith("no module of Qwen3MoeForCausalLM that can be adapted: it is the router")
