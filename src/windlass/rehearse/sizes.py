"""A model's config with small numbers: what code depends on keeps its kind, everything else shrinks. No torch."""

from __future__ import annotations

import math
from typing import Any

from windlass.model import Base

# Ids of the stand-in tokenizer, which has Mistral's order: tiny.SPECIAL.
STAND_IN_IDS = {"pad_token_id": 11, "bos_token_id": 1, "eos_token_id": 2}
STAND_IN_VOCAB = 1024
WIDTH, WIDTH_OF_BLOCKS = 64, 256  # FP8 with a scale a block: two blocks in each direction
HEADS, HEAD_DIM, LEAST_LATENT = 4, 16, 8
USUAL_DEVIATION, USUAL_HIDDEN = 0.02, 4096  # transformers' own, where config.json says none; and for what width


def shrunk(checkpoint: Base, *, experts_over: int, vocab: int | None) -> dict[str, Any]:
    """The text config of the twin.

    experts_over: ranks that must divide the experts. vocab: rows of the embedding, which are the model's own where its
    tokenizer is used; None: those of the stand-in.
    """
    config, dims = dict(checkpoint.config), dict(checkpoint.dims)
    blocks = bool((checkpoint.quantization or {}).get("weight_block_size"))
    new = {
        "hidden": min(dims["hidden"], WIDTH_OF_BLOCKS if blocks else WIDTH),
        "vocab": vocab or STAND_IN_VOCAB,
        "layers": layers(config, dims),
        **heads(dims),
        **latent(dims),
        **widths(dims, blocks),
        **routed(config, dims, experts_over),
    }
    for name, value in new.items():
        size = checkpoint.family.sizes.get(name)
        for key in size.keys if size else ():
            if config.get(key) is not None:
                config[key] = value
    return {**config, **consequences(config, new, dims), **({} if vocab else STAND_IN_IDS)}


def layers(config: dict[str, Any], dims: dict[str, int]) -> int:
    """Two, and as many as it takes for every kind of layer to be there."""
    kinds = len(set(config.get("layer_types") or ()))
    first = 2 if dims.get("first_dense") else 0
    return min(dims["layers"], max(2, kinds, first, dims.get("sparse_step", 1)))


def heads(dims: dict[str, int]) -> dict[str, int]:
    """Whether keys are shared by some, all or no queries stays."""
    count, shared = min(HEADS, dims["heads"]), dims["kv_heads"]
    kv = count if shared == dims["heads"] else 1 if shared == 1 else max(1, count // 2)
    return {"heads": count, "kv_heads": kv, "head_dim": HEAD_DIM}


def latent(dims: dict[str, int]) -> dict[str, int]:
    """Latent attention's parts of a head keep their ratios: positions are rotated by it."""
    if "kv_rank" not in dims:
        return {}
    parts = {name: dims[name] for name in ("rope_dim", "nope_dim", "v_head_dim")}
    least = min(parts.values())
    small = {name: LEAST_LATENT * value // least // 2 * 2 for name, value in parts.items()}
    return {**small, "kv_rank": 16, "q_rank": 32 if dims.get("q_rank") else 0}


def widths(dims: dict[str, int], blocks: bool) -> dict[str, int]:
    named = {"intermediate": 256 if blocks else 128, "expert_intermediate": 128 if blocks else 32}
    return {name: min(value, dims[name]) for name, value in named.items() if name in dims}


def routed(config: dict[str, Any], dims: dict[str, int], over: int) -> dict[str, int]:
    """Experts that the ranks divide, in groups as they were, enough to choose from."""
    if "experts" not in dims:
        return {}
    unit = math.lcm(over, 2 * int(config.get("n_group") or 1))
    wanted = max(min(8, dims["experts"]), min(2 * dims["top_k"], dims["experts"]))
    experts = unit * math.ceil(wanted / unit)
    return {"experts": experts, "top_k": min(dims["top_k"], experts), "first_dense": min(1, dims.get("first_dense", 0))}


def consequences(config: dict[str, Any], new: dict[str, int], dims: dict[str, int]) -> dict[str, Any]:
    """Keys beside the sizes that must go with them."""
    found: dict[str, Any] = {}
    count = new["layers"]
    for key, value in config.items():
        if isinstance(value, list) and len(value) == dims["layers"]:  # an entry for each layer
            kinds = list(dict.fromkeys(map(str, value)))
            found[key] = [next(v for v in value if str(v) == kinds[i % len(kinds)]) for i in range(count)]
    if config.get("mlp_only_layers"):
        found["mlp_only_layers"] = [0]
    if "kv_rank" in dims:
        whole = new["rope_dim"] + new["nope_dim"]
        found |= {key: whole for key in ("head_dim", "qk_head_dim") if config.get(key)}
    # Products of narrower matrices have a smaller spread: without this every answer would be the same. Much above it,
    # 16-bit rounding decides which expert a token visits, and a merged model answers otherwise than it should.
    deviation = float(config.get("initializer_range") or USUAL_DEVIATION)
    grown = deviation * math.sqrt(dims["hidden"] / new["hidden"])
    found["initializer_range"] = min(grown, USUAL_DEVIATION * math.sqrt(USUAL_HIDDEN / new["hidden"]))
    dropped = {"architectures", "quantization_config", "dtype", "torch_dtype", "_name_or_path", "transformers_version"}
    return found | dict.fromkeys(dropped & config.keys())
