"""Shrink a language model's config.json, keeping every kind of layer and properties that code depends on."""

from collections.abc import Mapping
from typing import Any, Final

# The small value of each key, including families' different names for one size; smaller original values stay.
SMALL: Final[dict[str, int]] = {
    "hidden_size": 64, "n_embd": 64,
    "intermediate_size": 128, "ffn_hidden_size": 128, "n_inner": 128, "intermediate_size_mlp": 128,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "head_dim": 16, "attention_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 16,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1,
    "num_key_value_heads": 2, "num_attention_heads": 4, "n_head": 4,
    # intervals at which a kind of layer occurs: every second layer
    "full_attention_interval": 2, "sliding_window_pattern": 2, "_sliding_window_pattern": 2, "decoder_sparse_step": 2,
    "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "moe_layer_interval": 2,
    "query_pre_attn_scalar": 16, "hidden_size_per_layer_input": 16, "mamba_d_state": 8, "mamba_n_heads": 8,
    "mamba_d_ssm": 128, "block_size": 8, "num_kv_shared_layers": 2,
    "attention_hidden_size": 128, "n_mamba_heads": 8, "adapter_rank": 8,
    "num_expert_group": 2, "num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4,
    "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "nemo_conv_channels": 64,
}  # fmt: skip
EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "num_blocks")
PARTS_OF_A_HEAD: Final = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")  # they keep their ratios
TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink_config(config: Mapping[str, Any], *, layers: int = 4, experts: int = 8, vocab: int = 512) -> dict[str, Any]:
    """Return `config` (of the text model, with all its keys) with small numbers under the same keys."""
    new = dict(config)
    for key, value in SMALL.items():
        if type(config.get(key)) is int:
            new[key] = min(value, config[key])
    heads = next((config[key] for key in ("num_attention_heads", "n_head") if config.get(key)), 0)
    if config.get("num_key_value_heads") in (1, heads):  # keep whether keys are shared by some, all or no queries
        new["num_key_value_heads"] = 1 if config["num_key_value_heads"] == 1 else new["num_attention_heads"]
    for number, size in (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim")):
        if type(config.get(size)) is int and config.get(number):  # the widths of a state's heads add up to its own
            wide = new.get("mamba_d_ssm") or new.get("mamba_expand", 2) * new["hidden_size"]
            new[size] = wide // new[number]
    parts = {key: config[key] for key in PARTS_OF_A_HEAD if config.get(key)}
    if parts:
        new |= {key: 8 * value // min(parts.values()) // 2 * 2 for key, value in parts.items()}
        whole = sum(new[key] for key in PARTS_OF_A_HEAD[:2] if key in parts)
        if config.get("qk_head_dim"):
            new["qk_head_dim"] = whole
        if config.get("head_dim"):
            rotated = config["head_dim"] == config.get("qk_rope_head_dim")
            new["head_dim"] = new["qk_rope_head_dim"] if rotated else whole or new["head_dim"]
    new |= {key: experts for key in EXPERTS if type(config.get(key)) is int and config[key] > 1}
    new |= {key: layers for key in LAYERS if key in config}
    count = next((config[key] for key in LAYERS if key in config), 0)
    by_layer = {key: entry for key, entry in config.items() if isinstance(entry, list) and len(entry) == count > 0}
    own = {int(number): entry for number, entry in (config.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}  # each kind of layer -> the index of one such layer
    for i in range(count):
        kinds.setdefault(str([*(entry[i] for entry in by_layer.values()), own.get(i)]), i)
    chosen = [list(kinds.values())[i % len(kinds)] for i in range(layers)] if kinds else []
    for key, entry in by_layer.items():
        new[key] = [min(SMALL[key], entry[i]) if key in SMALL else entry[i] for i in chosen]
    if own:
        outer = {key: entry for key, entry in config.items() if key not in by_layer and key != "per_layer_config"}
        new["per_layer_config"] = {
            str(i): _shrink_layer(outer, own[one], new) for i, one in enumerate(chosen) if one in own
        }
    if "hybrid_layer_ids" in config and "layers_block_type" in by_layer:
        new["hybrid_layer_ids"] = [i for i, kind in enumerate(new["layers_block_type"]) if kind == "hybrid"]
    for key in ("mlp_only_layers", "no_rope_layers", "moe_layers"):
        if isinstance(config.get(key), list) and key not in by_layer:
            new[key] = [i for i in config[key] if type(i) is int and i < layers]
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict):  # longrope has one factor per pair of a head's rotated values
        wide = int(new.get("head_dim") or new["hidden_size"] // max(new.get("num_attention_heads", 1), 1))
        share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        shorter = {
            key: value[: int(wide * share) // 2] if isinstance(value, list) and "factor" in key else value
            for key, value in rope.items()
        }
        new |= {key: shorter for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    towers = {key: value for key, value in config.items() if isinstance(value, dict) and "hidden_size" in value}
    new |= {key: shrink_config(tower, layers=1) for key, tower in towers.items()}  # for images and sound
    new |= {key: vocab for key in ("vocab_size", "vocab_size_per_layer_input") if config.get(key)}
    for key in TOKENS:
        given = config.get(key)
        one = given[0] if isinstance(given, list) and given else given
        if type(one) is int:
            new[key] = one if one < vocab else TOKENS.index(key)
    return new


def _shrink_layer(outer: Mapping[str, Any], own: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of one layer that replace `shared`, the small sizes of all layers; `outer`: their originals."""
    small = shrink_config({**outer, **own})
    if "head_dim" in own and not any(outer.get(key) for key in PARTS_OF_A_HEAD):
        small["head_dim"] = min(own["head_dim"], 32)  # a head that is wider than the others stays wider
    kept = (*own, *(key for key in ("head_dim", *PARTS_OF_A_HEAD) if small.get(key) != shared.get(key)))
    return {key: small[key] for key in kept}
