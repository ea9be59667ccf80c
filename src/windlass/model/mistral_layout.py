"""Mistral's own layout of Mistral 4, which vLLM reads and Mistral's repositories have beside transformers':
params.json and consolidated*.safetensors, with other names, and each expert's matrices with scales of their own."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError
from windlass.model.files import PARAMS, read_header, read_headers
from windlass.model.parameters import Base, Parameter, Spelling, Stored
from windlass.model.stored import assign_stored

CONSOLIDATED: Final = "consolidated.safetensors"
CONSOLIDATED_INDEX: Final = "consolidated.safetensors.index.json"
MODEL_TYPE: Final = "mistral4"
SUFFIXES: Final = {".weight_scale_inv": ".qscale_weight", ".activation_scale": ".qscale_act"}

# transformers' names of modules, below `model.layers.N.` if they are in a layer, and Mistral's.
TEXT: Final = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}": f"attention.w{name.removesuffix('_proj')}" for name in ("q_a_proj", "q_b_proj")},
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate": "gate",
    **{f"mlp.{name}": f"feed_forward.{own}" for name, own in (("gate_proj", "w1"), ("down_proj", "w2"))},
    "mlp.up_proj": "feed_forward.w3",
    "mlp.shared_experts.gate_proj": "shared_experts.w1",
    "mlp.shared_experts.down_proj": "shared_experts.w2",
    "mlp.shared_experts.up_proj": "shared_experts.w3",
}
VISION: Final = {  # beginnings and parts of names
    r"^vision_tower\.": "vision_encoder.",
    r"^multi_modal_projector\.linear_1\.": "vision_language_adapter.w_in.",
    r"^multi_modal_projector\.linear_2\.": "vision_language_adapter.w_out.",
    r"^multi_modal_projector\.patch_merger\.": "patch_merger.",
    r"^multi_modal_projector\.norm\.": "pre_mm_projector_norm.",
    r"(?<=attention\.)([qkvo])_proj\.": r"w\1.",
    r"(?<=feed_forward\.)gate_proj\.": "w1.",
    r"(?<=feed_forward\.)down_proj\.": "w2.",
    r"(?<=feed_forward\.)up_proj\.": "w3.",
}
SKIPPED: Final = r"(vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm)\..+"
ROTATED_ROWS: Final = re.compile(
    r"vision_encoder\..+\.attention\.w[qk]\.weight"
)  # rows in another order than transformers'


def has_mistral_layout(base: Base) -> bool:
    """Return whether Mistral's layout stands beside the one that was read."""
    folder = base.path
    return (
        base.family.model_type == MODEL_TYPE
        and folder is not None
        and (folder / PARAMS).is_file()
        and any(folder.glob("consolidated*.safetensors"))
    )


def has_mistral_layout_alone(base: Base) -> bool:
    """Return whether the weights were read from Mistral's layout, because no other is there."""
    return any(tensor.file.name.startswith("consolidated") for tensor in base.stored())


def has_separate_experts(base: Base) -> bool:
    """Return whether a Mistral 4's experts are stored one by one, as compressed-tensors' are: transformers opens fused
    ones alone."""
    experts = (parameter for parameter in base.parameters if parameter.part == "experts")
    return base.family.model_type == MODEL_TYPE and any(len(parameter.pieces) > 1 for parameter in experts)


def read_mistral_layout(folder: Path, base: Base) -> Base:
    """Read the same model from Mistral's layout. Scales have transformers' names, as in every `Base`."""
    files = sorted(folder.glob("consolidated*.safetensors"))
    stored: dict[str, Stored] = {}
    for headers in map(read_header, files) if files else [read_headers(folder)]:
        for key, tensor in headers.items():
            known = _rename_suffix(key, {own: name for name, own in SUFFIXES.items()})
            stored[known] = replace(tensor, key=known)
    parameters = tuple(
        replace(parameter, pieces=(), spellings=(tuple(list_spellings(parameter)),)) for parameter in base.parameters
    )
    wrapper = base.wrapper and replace(base.wrapper, skipped=SKIPPED)
    bare = replace(base, parameters=parameters, wrapper=wrapper, unread={}, notes=(), path=folder if files else None)
    return assign_stored(bare, {}, stored, str(folder / PARAMS))


def name_in_file(key: str) -> str:
    """Return the name that a tensor of `read_mistral_layout` has in its file."""
    return _rename_suffix(key, SUFFIXES)


def _rename_suffix(key: str, suffixes: Mapping[str, str]) -> str:
    for old, new in suffixes.items():
        if key.endswith(old):
            return key.removesuffix(old) + new
    return key


def list_spellings(parameter: Parameter) -> Iterator[Spelling]:
    """Yield the tensors that store a parameter: one, or those of each expert (`#`)."""
    module, _, leaf = parameter.name.rpartition(".")
    shape = parameter.shape
    if parameter.part != "experts":
        yield Spelling(f"{rename_module(module)}.{leaf}", shape, (0,) * len(shape))
        return
    layer = rename_module(module.removesuffix(".mlp.experts"))
    matrices = ("w1", "w3") if leaf == "gate_up_proj" else ("w2",)
    rows = shape[1] // len(matrices)
    for number, matrix in enumerate(matrices):
        yield Spelling(f"{layer}.experts.#.{matrix}.weight", (rows, shape[2]), (0, number * rows, 0))


def rename_module(module: str) -> str:
    match = re.fullmatch(r"model\.(layers\.\d+)(?:\.(.+))?", module)
    if match is None:
        return TEXT[module]
    return f"{match[1]}.{TEXT[match[2]]}" if match[2] else match[1]


def rename_vision(key: str) -> str:
    key = key.removeprefix("model.")
    for pattern, new in VISION.items():
        key = re.sub(pattern, new, key)
    return key


def make_params(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return params.json of a config.json."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not rope.get("mscale_all_dim") or rope.get("rope_type", rope.get("type")) != "yarn":
        problem = "its rotary positions are not YaRN with mscale_all_dim, which is all that params.json can say"
        raise UserError(problem, "--layout", "leave it out", "no-such-layout")
    params = {
        "dim": text["hidden_size"],
        "n_layers": text["num_hidden_layers"],
        "head_dim": text.get("head_dim") or text["qk_nope_head_dim"] + text["qk_rope_head_dim"],
        "hidden_dim": text["intermediate_size"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "rope_theta": rope.get("rope_theta", text.get("rope_theta", 10000.0)),
        "norm_eps": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"],
        "tied_embeddings": bool(text.get("tie_word_embeddings")),
        "max_position_embeddings": text["max_position_embeddings"],
        **{key: text[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")},
        "v_head_dim": text["v_head_dim"],
        "llama_4_scaling": {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope.get("llama_4_scaling_beta", 0.1),
        },
        "yarn": {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "factor": rope["factor"],
            "apply_scale": True,  # mscale_all_dim
            "beta": rope.get("beta_fast", 32.0),
            "alpha": rope.get("beta_slow", 1.0),
        },
        "moe": {
            "expert_parallel": 1,
            "expert_model_parallel": 1,
            "route_every_n": 1,
            "first_k_dense_replace": text.get("first_k_dense_replace", 0),
            "num_experts": text["n_routed_experts"],
            "num_experts_per_tok": text["num_experts_per_tok"],
            "num_shared_experts": text["n_shared_experts"],
            "expert_hidden_dim": text["moe_intermediate_size"],
            "routed_scale": text.get("routed_scaling_factor", 1.0),
            "num_expert_groups": text.get("n_group", 1),
            "num_expert_groups_per_tok": text.get("topk_group", 1),
        },
    }
    quantized = config.get("quantization_config")
    if quantized:
        scheme = "TENSOR" if quantized.get("activation_scheme") == "static" else "NO_SCALES"
        params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}
    vision = config.get("vision_config")
    if vision:
        rotary = vision.get("rope_parameters") or {}
        same = ("hidden_size", "num_channels", "image_size", "patch_size", "intermediate_size", "num_hidden_layers")
        params["vision_encoder"] = {
            **{key: vision[key] for key in (*same, "num_attention_heads")},
            "max_image_size": vision["image_size"],
            "rope_theta": rotary.get("rope_theta", vision.get("rope_theta", 10000.0)),
            "image_token_id": config.get("image_token_index", config.get("image_token_id", 10)),
            "image_break_token_id": 12,
            "image_end_token_id": 13,
            "adapter_bias": bool(config.get("multimodal_projector_bias")),
            "spatial_merge_size": config.get("spatial_merge_size", 1),
            "add_pre_mm_projector_layer_norm": True,
            "mm_projector_id": "patch_merge",
        }
    return params
