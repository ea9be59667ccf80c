"""LoRA targets and parameter counts against PEFT itself, on every family; errors for what matches nothing."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from windlass.errors import UserError
from windlass.model import Base, published_base
from windlass.model.config import describe, list_parameters
from windlass.model.targets import Adapter, resolve
from windlass.runfile import Lora

USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "mistral4": {
        "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7,
        "first_k_dense_replace": 1, "max_position_embeddings": 2**20,
    },
    "mistral": {},
    "ministral3": {"head_dim": 12, "max_position_embeddings": 262144},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 2},
}  # fmt: skip
ROUTED = ("mistral4", "mixtral", "qwen3_moe")
REMAPPED = ("mixtral", "qwen3_moe")  # PEFT changes targets of its own accord here, exact names excepted


def described(model_type: str, **more: Any) -> tuple[Any, Base]:
    """transformers' config and what the headers of such a base would say."""
    config = transformers.CONFIG_MAPPING[model_type](**{**SMALL, **SIZES[model_type], **more})
    said = describe(config.to_dict(), "config.json")
    named = tuple(list_parameters(said, tied=said.tied))
    return config, Base("small", None, said.family, said.config, said.dims, named)


def by_peft(config: Any, causal_lm: str, **asked: Any) -> tuple[dict[str, int], int]:
    """What PEFT makes of it: trainable parameters of each adapted module or expert parameter, and of all."""
    with torch.device("meta"):
        model = getattr(transformers, causal_lm)(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **asked), low_cpu_mem_usage=True)
    found: dict[str, int] = {}
    for name, module in peft_model.named_modules():
        if isinstance(module, LoraLayer):
            place = name.removeprefix("base_model.model.").replace(".base_layer", "")
            leaf = getattr(module, "parameter_name", None)
            own = (p.numel() for n, p in module.named_parameters() if "lora_" in n and not n.startswith("base_layer."))
            found[f"{place}.{leaf}" if leaf else place] = sum(own)
    return found, sum(p.numel() for p in peft_model.parameters() if p.requires_grad)


def counted(adapter: Adapter, base: Base) -> set[str]:
    assert adapter.trainable >= sum(target.parameters for target in adapter.targets)
    assert sum(adapter.by_part.values()) == sum(target.parameters for target in adapter.targets)
    names = [module for target in adapter.targets for module in target.modules]
    assert len(names) == len(set(names))
    assert {p.name.removesuffix(".weight") for p in base.parameters} >= set(names)
    return set(names)


def own(lora: Lora, base: Base) -> Adapter:
    return resolve(lora, base, lambda key: f"run.yaml: {key}")


def lora(**settings: Any) -> Lora:
    return Lora(**{"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, **settings})


def agree(model_type: str, asked: Lora, peft: dict[str, Any], **more: Any) -> Adapter:
    """Resolve here, ask PEFT in its own words, and compare names and numbers."""
    config, base = described(model_type, **more)
    adapter = own(asked, base)
    exact = {
        "target_modules": list(adapter.target_modules),
        "target_parameters": list(adapter.target_parameters) or None,
    }
    if model_type not in REMAPPED:
        assert by_peft(config, base.family.causal_lm, r=asked.r, **peft) == by_peft(
            config, base.family.causal_lm, r=asked.r, **peft | exact
        )
    found, trainable = by_peft(config, base.family.causal_lm, r=asked.r, **peft | exact)
    assert counted(adapter, base) == set(found)
    assert adapter.trainable == trainable
    for target in adapter.targets:
        assert target.parameters == sum(found[module] for module in target.modules)
    return adapter


@pytest.mark.parametrize("model_type", SIZES)
def test_all_linear_is_peft_s(model_type: str) -> None:
    adapter = agree(model_type, lora(target_modules="all-linear"), {"target_modules": "all-linear"})
    assert not any("lm_head" in module for module in adapter.target_modules)


@pytest.mark.parametrize("model_type", SIZES)
def test_all_linear_is_every_linear_layer_but_the_head(model_type: str) -> None:
    config, base = described(model_type)
    with torch.device("meta"):
        model = getattr(transformers, base.family.causal_lm)(config)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    adapter = own(lora(target_modules="all-linear"), base)
    out = linear - set(adapter.target_modules) - {"lm_head"}
    assert set(adapter.target_modules) <= linear
    if model_type != "qwen3_moe":
        assert out == set()
        return
    # PEFT would adapt the routed experts instead: said, and not done.
    assert {name.rpartition(".")[2] for name in out} == {"gate_proj", "up_proj", "down_proj"}
    assert any("the feed-forward of dense layers is not adapted" in note for note in adapter.notes)
    with pytest.raises(UserError, match="can't adapt the dense layers"):
        own(lora(target_modules=["down_proj"]), base)


def test_peft_still_takes_dense_layers_for_experts() -> None:
    """Once this fails, `taken_for_experts` can go."""
    config, base = described("qwen3_moe")
    dense = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")]
    found, _ = by_peft(config, base.family.causal_lm, r=3, target_modules=[*dense, "o_proj"])
    assert set(dense).isdisjoint(found)
    assert "model.layers.1.mlp.experts.gate_up_proj" in found


@pytest.mark.parametrize("model_type", [name for name in SIZES if name not in ROUTED])
@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_the_usual_names_of_dense_models(model_type: str, bias: str) -> None:
    for names in (USUAL, ["q_proj", "down_proj"], ["self_attn.o_proj", "model.layers.1.mlp.up_proj"]):
        agree(model_type, lora(target_modules=names, bias=bias), {"target_modules": names, "bias": bias})


@pytest.mark.parametrize("model_type", SIZES)
def test_dora_adds_a_magnitude_per_output(model_type: str) -> None:
    asked = lora(target_modules=["o_proj"], use_dora=True)
    agree(model_type, asked, {"target_modules": ["o_proj"], "use_dora": True})


@pytest.mark.parametrize("model_type", SIZES)
@pytest.mark.parametrize("pattern", [r".*\.self_attn\..*proj.*", r"model\.layers\.[02]\..*o_proj"])
def test_regular_expressions_match_as_peft_s(model_type: str, pattern: str) -> None:
    agree(model_type, lora(target_modules=pattern), {"target_modules": pattern})


@pytest.mark.parametrize("model_type", ROUTED)
@pytest.mark.parametrize("targets", [["gate_up_proj", "down_proj"], ["down_proj"]])
def test_routed_experts_as_target_parameters(model_type: str, targets: list[str]) -> None:
    asked = lora(target_modules=["o_proj"], experts={"targets": targets})
    named = [f"mlp.experts.{target}" for target in targets]
    adapter = agree(model_type, asked, {"target_modules": ["o_proj"], "target_parameters": named})
    assert all(name.rpartition(".")[2] in targets for name in adapter.target_parameters)
    assert adapter.by_part.keys() == {"attention", "experts"}


@pytest.mark.parametrize("model_type", ROUTED)
def test_experts_of_their_own_rank(model_type: str) -> None:
    asked = lora(target_modules=["o_proj"], experts={"r": 2})
    ranks = {r".*\.experts\.(gate_up|down)_proj": 2}
    named = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    peft = {"target_modules": ["o_proj"], "target_parameters": named, "rank_pattern": ranks}
    adapter = agree(model_type, asked, peft)
    assert "rank by part: attention 3, experts 2" in adapter.notes
    assert {target.r for target in adapter.targets} == {2, 3}


@pytest.mark.parametrize("model_type", ROUTED)
def test_all_is_every_linear_and_the_experts(model_type: str) -> None:
    named = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    agree(model_type, lora(target_modules="all"), {"target_modules": "all-linear", "target_parameters": named})


def test_all_of_a_dense_model() -> None:
    agree("llama", lora(target_modules="all"), {"target_modules": "all-linear"})


def test_latent_attention_translates_the_usual_names() -> None:
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = agree("mistral4", lora(target_modules=USUAL), {"target_modules": names})
    by_pattern = {(target.pattern, target.part): target for target in adapter.targets}
    assert by_pattern["q_proj", "attention"].names == ("q_a_proj", "q_b_proj")
    assert len(by_pattern["q_proj", "attention"].modules) == 6
    assert by_pattern["v_proj", "attention"].modules == ()
    assert by_pattern["v_proj", "attention"].note.endswith("already adapted through k_proj")
    # The first layer is dense here: the same name reaches two parts.
    assert len(by_pattern["gate_proj", "mlp"].modules) == 1
    assert len(by_pattern["gate_proj", "shared_experts"].modules) == 2
    said = "\n".join(adapter.notes)
    assert "q_proj -> q_a_proj, q_b_proj: latent attention" in said
    assert re.search(r"routed experts, \d\d\.\d % of the weights, are not adapted: set lora\.experts", said)
    assert "kv_b_proj: vLLM" in said


def test_queries_that_are_not_compressed_keep_their_name() -> None:
    adapter = agree("mistral4", lora(target_modules=["q_proj"]), {"target_modules": ["q_proj"]}, q_lora_rank=None)
    assert adapter.targets[0].note == ""
    assert not any("kv_b_proj" in note for note in adapter.notes)


def test_v_proj_alone_reaches_the_latent_too() -> None:
    peft = {"target_modules": ["kv_a_proj_with_mqa", "kv_b_proj"]}
    assert len(agree("mistral4", lora(target_modules=["v_proj"]), peft).target_modules) == 6


def test_mistral_small_4_by_the_published_recipe() -> None:
    base = published_base("Mistral-Small-4-119B-2603")
    assert base is not None
    adapter = own(lora(r=16, target_modules=USUAL, lora_dropout=0.05), base)
    assert adapter.trainable == 27_463_680
    assert adapter.percent == pytest.approx(100 * 27_463_680 / 118_972_826_624)
    assert adapter.by_part == {"attention": 16_846_848, "shared_experts": 10_616_832}
    assert "routed experts, 97.5 % of the weights, are not adapted: set lora.experts" in adapter.notes
    with_experts = own(lora(r=16, target_modules=USUAL, experts=True), base)
    assert with_experts.trainable == 1_084_428_288
    assert len(with_experts.target_parameters) == 72
    assert not any("not adapted" in note for note in with_experts.notes)


def test_a_name_within_routed_experts_alone_is_satisfied_by_lora_experts() -> None:
    _, base = described("mixtral")
    adapter = own(lora(target_modules=["q_proj", "gate_proj", "w2"], experts=True), base)
    assert "gate_proj -> gate_up_proj of lora.experts" in adapter.notes
    assert "w2 -> down_proj of lora.experts" in adapter.notes
    assert len(adapter.target_parameters) == 6


def test_bytes_follow_the_dtype() -> None:
    _, base = described("mistral")
    assert own(lora(), base).dtype_bytes == 4
    assert own(lora(dtype="bfloat16"), base).dtype_bytes == 2


def test_a_rank_that_is_not_low_is_noted() -> None:
    _, base = described("mistral4")
    said = own(lora(r=6, target_modules=["q_a_proj", "o_proj"]), base).notes
    assert "rank 6 is not low for q_a_proj: it is at least half of the matrix's smaller side" in said
    assert not any("for o_proj" in note for note in said)


def test_biases_are_counted_and_noted() -> None:
    _, base = described("qwen2")
    assert any(note.startswith("bias: all trains 192 biases") for note in own(lora(bias="all"), base).notes)
    _, base = described("mistral")
    assert not any("bias" in note for note in own(lora(bias="all"), base).notes)


WRONG: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    (
        "mistral",
        {"target_modules": ["q_prj"]},
        [("'q_prj' matches no module of MistralForCausalLM", "nearest: q_proj")],
    ),
    (
        "mistral",
        {"target_modules": ["q_proj", "wq", "query_key_value"]},
        [("'wq' matches no module", "q_proj"), ("'query_key_value' matches no module", "known: q_proj, k_proj")],
    ),
    ("mistral", {"target_modules": ["proj"]}, [("'proj' matches no module", "q_proj")]),
    ("mistral", {"target_modules": ["all-linear"]}, [("'all-linear' matches", "without a list")]),
    ("mistral", {"target_modules": "q_proj"}, [("matches no module; as a list, [q_proj], it would", "full names")]),
    ("mistral", {"target_modules": ["embed_tokens"]}, [("that can be adapted: it is the embedding", "known: q_proj")]),
    ("mistral", {"target_modules": ["input_layernorm"]}, [("it is the norm", "known")]),
    ("qwen3_moe", {"target_modules": ["gate"]}, [("it is the router", "known")]),
    ("mixtral", {"target_modules": USUAL}, [(f"'{n}' matches", "lora.experts: true") for n in USUAL[4:]]),
    ("mixtral", {"target_modules": ["gate_up_proj"]}, [("'gate_up_proj' matches", "a fused parameter")]),
    ("mistral", {"target_modules": ["q_proj", "lm_head"]}, [("lm_head can't be adapted: the loss", "leave it out")]),
    ("qwen3", {"target_modules": ".*(o_proj|lm_head)"}, [("lm_head can't be adapted: the loss", "leave it out")]),
    ("mistral", {"experts": True}, [("no routed experts", "leave lora.experts out")]),
    ("mistral4", {"experts": True, "use_dora": True}, [("can't be DoRA", "lora.use_dora: false")]),
    (
        "mistral4",
        {"experts": {"targets": ["gate_up_proj", "w9"]}},
        [("'w9' is no parameter of the routed experts", "known: gate_up_proj, down_proj")],
    ),
]


@pytest.mark.parametrize(("model_type", "settings", "said"), WRONG)
def test_what_matches_nothing_is_said(model_type: str, settings: dict[str, Any], said: list[tuple[str, str]]) -> None:
    _, base = described(model_type)
    with pytest.raises(UserError) as error:
        own(lora(**settings), base)
    assert len(error.value.problems) == len(said)
    for problem, (what, hint) in zip(error.value.problems, said, strict=True):
        assert what in problem.problem
        assert hint in problem.hint
        assert problem.where.startswith("run.yaml: lora.")


def test_each_pattern_is_named_by_its_place() -> None:
    _, base = described("mistral")
    with pytest.raises(UserError) as error:
        own(lora(target_modules=["q_proj", "nope"]), base)
    assert error.value.problems[0].where == "run.yaml: lora.target_modules[1]"


def test_a_tied_head_has_nothing_to_adapt() -> None:
    _, base = described("llama", tie_word_embeddings=True)
    with pytest.raises(UserError, match="this model's head is its embedding"):
        own(lora(target_modules=["lm_head"]), base)


def test_gate_and_up_of_experts_are_one_parameter() -> None:
    _, base = described("mixtral")
    adapter = own(lora(target_modules=["o_proj"], experts={"targets": ["gate_proj", "up_proj"]}), base)
    assert adapter.target_parameters == tuple(f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(3))
    assert "gate_proj -> gate_up_proj: fused in routed experts" in adapter.notes
