"""What differs between model families, as data. Everything else in windlass asks these rows.

A family is one `model_type` of transformers' config.json. Its row says how config.json gives the sizes, which weights
a layer has and in what shapes, how the files spell them, and what the usual LoRA names stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PARTS = ("embedding", "attention", "mlp", "shared_experts", "experts", "router", "norm", "head")

# The names of `Base.dims`. A family has those that apply to it; flags are 0 or 1.
DIMS: dict[str, str] = {
    "layers": "decoder layers",
    "dense_layers": "of these, layers with a plain feed-forward",
    "moe_layers": "of these, layers with routed experts",
    "hidden": "width of the residual stream",
    "vocab": "rows of the embedding",
    "heads": "attention heads of the queries",
    "kv_heads": "attention heads of keys and values",
    "head_dim": "width of one head's query and key",
    "v_head_dim": "width of one head's value",
    "query": "heads x head_dim: outputs of the query projection",
    "key": "kv_heads x head_dim: outputs of the key projection",
    "attended": "heads x v_head_dim: inputs of the output projection",
    "q_rank": "latent attention: width that queries are compressed to; 0: not compressed",
    "kv_rank": "latent attention: width that keys and values are compressed to",
    "rope_dim": "latent attention: part of a head that is rotated by position, one key for all heads",
    "nope_dim": "latent attention: part of a head that is not rotated",
    "kv_latent": "latent attention: kv_rank + rope_dim, outputs of the compression",
    "kv_expanded": "latent attention: heads x (nope_dim + v_head_dim), outputs of the expansion",
    "intermediate": "width of a dense layer's feed-forward",
    "experts": "routed experts of a layer",
    "top_k": "routed experts that each token goes to",
    "expert_intermediate": "width of one routed expert",
    "expert_gate_up": "2 x expert_intermediate: gate and up of an expert, fused",
    "shared_experts": "experts that every token goes to",
    "shared_intermediate": "width of the shared experts together",
    "first_dense": "layers before the first with routed experts",
    "sparse_step": "every n-th layer has routed experts",
    "qkv_bias": "flag: query, key and value projections have a bias",
    "output_bias": "flag: the output projection has a bias",
    "mlp_bias": "flag: the feed-forward has biases",
}

Dims = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Size:
    """How config.json gives one entry of `dims`."""

    keys: tuple[str, ...]  # its spellings; none: it is always `default`
    default: int | Callable[[Dims], int] | None = None  # if config.json has null or nothing
    required: bool = True  # it must be there, even if it may be null
    least: int = 1
    flag: bool = False  # true or false rather than a number


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of a decoder layer, by the model's own name below `model.layers.N.`"""

    name: str
    shape: tuple[str, ...]  # names of dims
    part: str
    layers: str = "all"  # all, dense or moe
    when: str = ""  # only if this dim is not 0
    unless: str = ""  # only if this dim is 0
    bias: str = ""  # a bias comes with it if this flag is set


@dataclass(frozen=True, slots=True)
class Usual:
    """What a usual LoRA target name stands for in a family that has no module of that name."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Family:
    """One row per `model_type` of transformers' config.json."""

    model_type: str
    causal_lm: str  # class that is trained: Mistral4ForCausalLM
    layer: str  # class that is sharded, layer by layer: Mistral4DecoderLayer
    sizes: Mapping[str, Size] = field(default_factory=dict, compare=False, repr=False)
    derived: Mapping[str, Callable[[Dims], int]] = field(default_factory=dict, compare=False, repr=False)
    weights: tuple[Weight, ...] = field(default=(), compare=False, repr=False)
    dense_list: str = ""  # key of config.json that lists dense layers by number
    spellings: tuple[tuple[str, str], ...] = ()  # parts of names on disk -> in the model
    experts_on_disk: Mapping[str, tuple[str, int]] = field(default_factory=dict, compare=False, repr=False)
    usual: Mapping[str, Usual] = field(default_factory=dict, compare=False, repr=False)
    # Module names that PEFT 0.21 takes for routed experts in this family, whatever else has that name
    # (peft.utils.transformers_weight_conversion): it can't adapt a dense layer of them.
    taken_for_experts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal model around a causal language model: the same weights under other names."""

    model_type: str
    architecture: str
    prefixes: tuple[tuple[str, str], ...]  # beginnings of names on disk -> in the language model
    skipped: str  # regular expression: keys of the parts that the language model does not need


# `language_model.model.` is what save_pretrained writes, `model.language_model.` what newer classes call it in memory
# and the publisher's converter writes.
_NESTED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
WRAPPERS: dict[str, Wrapper] = {
    name: Wrapper(name, architecture, _NESTED, r"(model\.)?(vision_tower|multi_modal_projector)\..+")
    for name, architecture in (
        ("mistral3", "Mistral3ForConditionalGeneration"),
        ("llava", "LlavaForConditionalGeneration"),
    )
}

# The usual names of a feed-forward's matrices, and the fused parameter that has them in routed experts.
FUSED: dict[str, str] = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("down_proj", "w2"), "down_proj"),
}

# Stored tensors that no causal language model needs, whatever its family, and why they are not read
ACTIVATIONS = "scale of activations: weights are converted, activations are not quantised"
UNREAD: dict[str, str] = {
    r".+[._]activation_scale": ACTIVATIONS,
    r".+\.input_scale": ACTIVATIONS,
    r".+\.rotary_emb\.inv_freq": "computed from config.json",
}
VISION = "vision part"  # of a wrapper: `skipped`
TIED = "config.json ties the head to the embedding"


_EVERY: dict[str, Size] = {
    "layers": Size(("num_hidden_layers",)),
    "hidden": Size(("hidden_size",)),
    "vocab": Size(("vocab_size",)),
    "heads": Size(("num_attention_heads",)),
}
_GROUPED: dict[str, Size] = {
    **_EVERY,
    "kv_heads": Size(("num_key_value_heads",), lambda d: d["heads"]),
    "head_dim": Size(("head_dim",), lambda d: d["hidden"] // d["heads"], required=False),
    "v_head_dim": Size((), lambda d: d["head_dim"]),
}
_DENSE: dict[str, Size] = {**_GROUPED, "intermediate": Size(("intermediate_size",))}
_BIASED: dict[str, Size] = {
    name: Size(("attention_bias",), 0, required=False, flag=True) for name in ("qkv_bias", "output_bias")
}
_TOP_K: dict[str, Size] = {"top_k": Size(("num_experts_per_tok",))}

_GROUPED_DERIVED: dict[str, Callable[[Dims], int]] = {
    "query": lambda d: d["heads"] * d["head_dim"],
    "key": lambda d: d["kv_heads"] * d["head_dim"],
    "attended": lambda d: d["heads"] * d["v_head_dim"],
}
_EXPERT_DERIVED: dict[str, Callable[[Dims], int]] = {"expert_gate_up": lambda d: 2 * d["expert_intermediate"]}

_LAYER_NORMS = (
    Weight("input_layernorm.weight", ("hidden",), "norm"),
    Weight("post_attention_layernorm.weight", ("hidden",), "norm"),
)
_GROUPED_ATTENTION = (
    Weight("self_attn.q_proj.weight", ("query", "hidden"), "attention", bias="qkv_bias"),
    Weight("self_attn.k_proj.weight", ("key", "hidden"), "attention", bias="qkv_bias"),
    Weight("self_attn.v_proj.weight", ("key", "hidden"), "attention", bias="qkv_bias"),
    Weight("self_attn.o_proj.weight", ("hidden", "attended"), "attention", bias="output_bias"),
)
_HEAD_NORMS = (
    Weight("self_attn.q_norm.weight", ("head_dim",), "norm"),
    Weight("self_attn.k_norm.weight", ("head_dim",), "norm"),
)
_LATENT_ATTENTION = (
    Weight("self_attn.q_proj.weight", ("query", "hidden"), "attention", unless="q_rank"),
    Weight("self_attn.q_a_proj.weight", ("q_rank", "hidden"), "attention", when="q_rank", bias="qkv_bias"),
    Weight("self_attn.q_a_layernorm.weight", ("q_rank",), "norm", when="q_rank"),
    Weight("self_attn.q_b_proj.weight", ("query", "q_rank"), "attention", when="q_rank"),
    Weight("self_attn.kv_a_proj_with_mqa.weight", ("kv_latent", "hidden"), "attention", bias="qkv_bias"),
    Weight("self_attn.kv_a_layernorm.weight", ("kv_rank",), "norm"),
    Weight("self_attn.kv_b_proj.weight", ("kv_expanded", "kv_rank"), "attention"),
    Weight("self_attn.o_proj.weight", ("hidden", "attended"), "attention", bias="output_bias"),
)
_FEED_FORWARD = (
    Weight("mlp.gate_proj.weight", ("intermediate", "hidden"), "mlp", "dense", bias="mlp_bias"),
    Weight("mlp.up_proj.weight", ("intermediate", "hidden"), "mlp", "dense", bias="mlp_bias"),
    Weight("mlp.down_proj.weight", ("hidden", "intermediate"), "mlp", "dense", bias="mlp_bias"),
)
_ROUTED = (
    Weight("mlp.experts.gate_up_proj", ("experts", "expert_gate_up", "hidden"), "experts", "moe"),
    Weight("mlp.experts.down_proj", ("experts", "hidden", "expert_intermediate"), "experts", "moe"),
    Weight("mlp.gate.weight", ("experts", "hidden"), "router", "moe"),
)
_SHARED = (
    Weight("mlp.shared_experts.gate_proj.weight", ("shared_intermediate", "hidden"), "shared_experts", "moe"),
    Weight("mlp.shared_experts.up_proj.weight", ("shared_intermediate", "hidden"), "shared_experts", "moe"),
    Weight("mlp.shared_experts.down_proj.weight", ("hidden", "shared_intermediate"), "shared_experts", "moe"),
)
_DENSE_WEIGHTS = (*_GROUPED_ATTENTION, *_FEED_FORWARD, *_LAYER_NORMS)

_LATENT_NAMES: dict[str, Usual] = {
    "q_proj": Usual(("q_a_proj", "q_b_proj"), "latent attention makes queries in two steps"),
    "k_proj": Usual(("kv_a_proj_with_mqa", "kv_b_proj"), "latent attention makes keys and values together"),
    "v_proj": Usual(("kv_a_proj_with_mqa", "kv_b_proj"), "latent attention makes keys and values together"),
}


def _dense(
    model_type: str,
    name: str,
    sizes: Mapping[str, Size] | None = None,
    weights: tuple[Weight, ...] = _DENSE_WEIGHTS,
) -> Family:
    """A row of the plain kind: grouped attention and one feed-forward in each layer."""
    return Family(
        model_type,
        f"{name}ForCausalLM",
        f"{name}DecoderLayer",
        sizes={**_DENSE, **(sizes or {})},
        derived=_GROUPED_DERIVED,
        weights=weights,
    )


_HEAD_DIM_128 = {"head_dim": Size(("head_dim",), 128, required=False)}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "mistral4",
            "Mistral4ForCausalLM",
            "Mistral4DecoderLayer",
            sizes={
                **_EVERY,
                **_BIASED,
                **_TOP_K,
                "kv_heads": Size(("num_key_value_heads",), lambda d: d["heads"]),
                "q_rank": Size(("q_lora_rank",), 0),
                "kv_rank": Size(("kv_lora_rank",)),
                "rope_dim": Size(("qk_rope_head_dim",)),
                "nope_dim": Size(("qk_nope_head_dim",)),
                "head_dim": Size((), lambda d: d["nope_dim"] + d["rope_dim"]),
                "v_head_dim": Size(("v_head_dim",)),
                "intermediate": Size(("intermediate_size",)),
                "experts": Size(("n_routed_experts", "num_local_experts")),
                "expert_intermediate": Size(("moe_intermediate_size",)),
                "shared_experts": Size(("n_shared_experts",)),
                "first_dense": Size(("first_k_dense_replace",), 0, required=False, least=0),
            },
            derived={
                **_GROUPED_DERIVED,
                **_EXPERT_DERIVED,
                "kv_latent": lambda d: d["kv_rank"] + d["rope_dim"],
                "kv_expanded": lambda d: d["heads"] * (d["nope_dim"] + d["v_head_dim"]),
                "shared_intermediate": lambda d: d["shared_experts"] * d["expert_intermediate"],
            },
            weights=(*_LATENT_ATTENTION, *_ROUTED, *_SHARED, *_FEED_FORWARD, *_LAYER_NORMS),
            usual=_LATENT_NAMES,
        ),
        _dense("mistral", "Mistral"),
        _dense("ministral3", "Ministral3", _HEAD_DIM_128),
        _dense(
            "llama",
            "Llama",
            {
                **_BIASED,
                "kv_heads": Size(("num_key_value_heads",), lambda d: d["heads"], required=False),
                "mlp_bias": Size(("mlp_bias",), 0, required=False, flag=True),
            },
        ),
        _dense("qwen2", "Qwen2", {"qkv_bias": Size((), 1)}),
        _dense("qwen3", "Qwen3", {**_BIASED, **_HEAD_DIM_128}, (*_DENSE_WEIGHTS, *_HEAD_NORMS)),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "MixtralDecoderLayer",
            sizes={
                **_GROUPED,
                **_TOP_K,
                "experts": Size(("num_local_experts", "num_experts")),
                "expert_intermediate": Size(("intermediate_size",)),
            },
            derived={**_GROUPED_DERIVED, **_EXPERT_DERIVED},
            weights=(*_GROUPED_ATTENTION, *_ROUTED, *_LAYER_NORMS),
            spellings=(("block_sparse_moe.", "mlp."),),
            experts_on_disk={"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "Qwen3MoeDecoderLayer",
            sizes={
                **_DENSE,
                **_BIASED,
                **_TOP_K,
                "experts": Size(("num_experts", "num_local_experts")),
                "expert_intermediate": Size(("moe_intermediate_size",)),
                "sparse_step": Size(("decoder_sparse_step",), 1, required=False),
            },
            derived={**_GROUPED_DERIVED, **_EXPERT_DERIVED},
            weights=(*_GROUPED_ATTENTION, *_HEAD_NORMS, *_ROUTED, *_FEED_FORWARD, *_LAYER_NORMS),
            dense_list="mlp_only_layers",
            experts_on_disk={
                "gate_proj": ("gate_up_proj", 0),
                "up_proj": ("gate_up_proj", 1),
                "down_proj": ("down_proj", 0),
            },
            taken_for_experts=("gate_proj", "up_proj", "down_proj"),
        ),
    )
}
