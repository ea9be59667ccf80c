"""The rows of families against transformers' own models: the same names and shapes, on small and published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from windlass.model import published_base
from windlass.model.config import describe, list_parameters
from windlass.model.family import DIMS, FAMILIES, PARTS, WRAPPERS
from windlass.model.published import CONFIGS

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "n_shared_experts": 2, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 7, "max_position_embeddings": 2**20,
}  # fmt: skip
QWEN_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 12}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral4": ("mistral4", LATENT),
    "mistral4, first layers dense": ("mistral4", LATENT | {"first_k_dense_replace": 2}),
    "mistral4, whole queries": ("mistral4", LATENT | {"q_lora_rank": None}),
    "mistral4, biases": ("mistral4", LATENT | {"attention_bias": True}),
    "mistral4, tied": ("mistral4", LATENT | {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "mistral, own head size": ("mistral", {"head_dim": 12}),
    "ministral3": ("ministral3", {"head_dim": 12, "max_position_embeddings": 262144}),
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", QWEN_MOE),
    "qwen3_moe, biases": ("qwen3_moe", QWEN_MOE | {"attention_bias": True}),
    "qwen3_moe, every other layer": ("qwen3_moe", QWEN_MOE | {"decoder_sparse_step": 2}),
    "qwen3_moe, listed dense": ("qwen3_moe", QWEN_MOE | {"mlp_only_layers": [1]}),
}


def on_meta(config: Any, causal_lm: str) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, causal_lm)(config)
    return model


def of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    described = describe(config, "config.json")
    return {p.name: p.shape for p in list_parameters(described, tied=described.tied)}


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_of_the_model(case: str) -> None:
    model_type, sizes = CASES[case]
    config = transformers.CONFIG_MAPPING[model_type](**{**SMALL, **sizes})
    family = FAMILIES[model_type]
    model = on_meta(config, family.causal_lm)
    assert of(config.to_dict()) == shapes(model)
    assert type(model.get_submodule("model.layers.0")).__name__ == family.layer


def test_every_family_is_compared() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_documented_and_parts_known(case: str) -> None:
    model_type, sizes = CASES[case]
    described = describe(transformers.CONFIG_MAPPING[model_type](**{**SMALL, **sizes}).to_dict(), "config.json")
    assert described.dims.keys() <= DIMS.keys()
    assert described.dims["dense_layers"] + described.dims["moe_layers"] == SMALL["num_hidden_layers"]
    assert {p.part for p in list_parameters(described, tied=False)} <= set(PARTS)


def test_no_documented_size_is_unused() -> None:
    own = [{*family.sizes, *family.derived, "dense_layers", "moe_layers"} for family in FAMILIES.values()]
    assert set().union(*own) == DIMS.keys()


# As the model cards and the libraries' own counts have them.
TOTALS = {
    "Mistral-Small-4-119B-2603": 118_972_826_624,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Mixtral-8x22B-v0.1": 140_620_634_112,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}


@pytest.mark.parametrize("name", TOTALS)
def test_published_models_have_their_published_size(name: str) -> None:
    known = published_base(name)
    assert known is not None
    assert known.total == TOTALS[name]
    assert known.path is None
    assert not any(parameter.pieces for parameter in known.parameters)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_make_the_models_that_transformers_makes(name: str) -> None:
    known = published_base(name)
    assert known is not None
    config = transformers.CONFIG_MAPPING[known.family.model_type].from_dict(dict(known.config))
    assert {p.name: p.shape for p in known.parameters} == shapes(on_meta(config, known.family.causal_lm))


def test_mistral_small_4_is_the_library_s_default() -> None:
    known = published_base("mistral-small-4-119b-2603")  # whatever the case
    assert known is not None
    assert known.name == "Mistral-Small-4-119B-2603"
    assert known.wrapper == "Mistral3ForConditionalGeneration"
    assert known.quantization is not None
    default = transformers.Mistral4Config().to_dict()
    differ = {key: value for key, value in known.config.items() if default[key] != value}
    assert differ == {}
    by_part = {part: sum(p.count for p in known.parameters if p.part == part) for part in PARTS}
    assert by_part == {
        "embedding": 536_870_912,
        "attention": 36 * (2 * 1024 * 4096 + 320 * 4096 + 6144 * 256 + 4096 * 4096),
        "mlp": 0,
        "shared_experts": 905_969_664,
        "experts": 115_964_116_992,
        "router": 18_874_368,
        "norm": 36 * (1024 + 256 + 2 * 4096) + 4096,
        "head": 536_870_912,
    }


def test_unknown_names_are_not_published() -> None:
    assert published_base("Mistral-Small-5") is None


def test_wrappers_are_transformers_own() -> None:
    for wrapper in WRAPPERS.values():
        assert transformers.CONFIG_MAPPING[wrapper.model_type].model_type == wrapper.model_type
        assert hasattr(transformers, wrapper.architecture)
