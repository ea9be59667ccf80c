"""Configs of well-known models as their publishers have them: enough for a plan without weights."""

from __future__ import annotations

from typing import Any

_MISTRAL_SMALL_4: dict[str, Any] = {  # what is not here is as transformers' Mistral4Config has it by default
    "model_type": "mistral4",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 64,
    "num_experts_per_tok": 4,
}
_MISTRAL_SMALL_4_FP8: dict[str, Any] = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": _MISTRAL_SMALL_4,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    },
}


def _sizes(
    model_type: str, hidden: int, layers: int, heads: tuple[int, int], intermediate: int, vocab: int, **rest: Any
) -> dict[str, Any]:
    """A config by its sizes. `heads`: of queries, of keys and values."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **rest,
    }


_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_MISTRAL_7B = _sizes("mistral", 4096, 32, (32, 8), 14336, 32000)
_MISTRAL_7B_V3 = _sizes("mistral", 4096, 32, (32, 8), 14336, 32768)
_MISTRAL_SMALL_3 = _sizes("mistral", 5120, 40, (32, 8), 32768, 131072, head_dim=128)
_MIXTRAL_8X7B = _sizes("mixtral", 4096, 32, (32, 8), 14336, 32000, **_MIXTRAL)
_MIXTRAL_8X22B = _sizes("mixtral", 6144, 56, (48, 8), 16384, 32768, **_MIXTRAL)
_LLAMA_8B = _sizes("llama", 4096, 32, (32, 8), 14336, 128256)
_LLAMA_70B = _sizes("llama", 8192, 80, (64, 8), 28672, 128256)
_QWEN2_7B = _sizes("qwen2", 3584, 28, (28, 4), 18944, 152064)

_PHI_4 = _sizes("phi3", 5120, 40, (40, 10), 17920, 100352, pad_token_id=0)
# These have no row in family.py: what transformers builds of them is in descriptions/ (docs/generate.py writes it).
_DEEPSEEK_V3 = _sizes(
    *("deepseek_v3", 7168, 61, (128, 128), 18432, 129280),
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    n_group=8,
    topk_group=4,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
)
_QWEN3_NEXT = _sizes(
    *("qwen3_next", 2048, 48, (16, 2), 5120, 151936),
    head_dim=256,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "Mistral-Small-4-119B-2603": _MISTRAL_SMALL_4_FP8,
    "Mistral-7B-v0.1": _MISTRAL_7B,
    "Mistral-7B-Instruct-v0.1": _MISTRAL_7B,
    "Mistral-7B-Instruct-v0.2": _MISTRAL_7B,
    "Mistral-7B-v0.3": _MISTRAL_7B_V3,
    "Mistral-7B-Instruct-v0.3": _MISTRAL_7B_V3,
    "Mistral-Small-24B-Base-2501": _MISTRAL_SMALL_3,
    "Mistral-Small-24B-Instruct-2501": _MISTRAL_SMALL_3,
    "Mixtral-8x7B-v0.1": _MIXTRAL_8X7B,
    "Mixtral-8x7B-Instruct-v0.1": _MIXTRAL_8X7B,
    "Mixtral-8x22B-v0.1": _MIXTRAL_8X22B | {"vocab_size": 32000},
    "Mixtral-8x22B-Instruct-v0.1": _MIXTRAL_8X22B,
    "Llama-3.1-8B": _LLAMA_8B,
    "Llama-3.1-8B-Instruct": _LLAMA_8B,
    "Llama-3.1-70B": _LLAMA_70B,
    "Llama-3.1-70B-Instruct": _LLAMA_70B,
    "Llama-3.3-70B-Instruct": _LLAMA_70B,
    "Qwen2.5-7B": _QWEN2_7B,
    "Qwen2.5-7B-Instruct": _QWEN2_7B,
    "phi-4": _PHI_4,
    "DeepSeek-V3": _DEEPSEEK_V3,
    "DeepSeek-V3-0324": _DEEPSEEK_V3,
    "DeepSeek-R1": _DEEPSEEK_V3,
    "Qwen3-Next-80B-A3B-Instruct": _QWEN3_NEXT,
    "Qwen3-8B": _sizes("qwen3", 4096, 36, (32, 8), 12288, 151936, head_dim=128),
    "Qwen3-30B-A3B": _sizes("qwen3_moe", 2048, 48, (32, 4), 6144, 151936, moe_intermediate_size=768, **_QWEN3_MOE),
    "Qwen3-235B-A22B": _sizes("qwen3_moe", 4096, 94, (64, 4), 12288, 151936, moe_intermediate_size=1536, **_QWEN3_MOE),
}
