"""What differs between model families, as data. Everything else in windlass asks these rows.

A family is one `model_type` of transformers' config.json. Its row says how config.json gives the sizes, which weights
a layer has and in what shapes, how the files spell them, and what the usual LoRA names stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

PARTS = ("embedding", "attention", "mlp", "shared_experts", "experts", "router", "norm", "head")

# The names of `Base.dims`, which shapes and costs are made of. A family has those that apply to it; flags are 0 or 1.
# layers · hidden: of the residual stream · vocab: rows of the embedding
# heads, kv_heads, head_dim (of queries and keys), v_head_dim
# query, key, attended: outputs of the query and key projections, inputs of the output projection
# q_rank (0: queries are not compressed), kv_rank: widths that latent attention compresses to
# rope_dim, nope_dim: parts of its heads that are, are not rotated by position
# kv_latent, kv_expanded: outputs of its compression and expansion
# intermediate: of a dense feed-forward · experts, top_k, expert_intermediate: routed experts
# expert_gate_up: gate and up of an expert, fused · shared_experts, shared_intermediate: these together
# first_dense: layers before the first with routed experts
# qkv_bias, output_bias, mlp_bias: flags
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
    shape: str  # names of dims
    part: str
    layers: str = "all"  # all, dense or moe
    when: str = ""  # only if this dim is not 0
    unless: str = ""  # only if this dim is 0
    bias: str = ""  # a bias comes with it if this flag is set


@dataclass(frozen=True, slots=True)
class Family:
    """One row per `model_type` of transformers' config.json."""

    model_type: str
    causal_lm: str  # class that is trained: Mistral4ForCausalLM
    layer: str  # class that is sharded, layer by layer: Mistral4DecoderLayer
    sizes: Mapping[str, Size] = field(default_factory=dict, compare=False, repr=False)
    derived: Mapping[str, Callable[[Dims], int]] = field(default_factory=dict, compare=False, repr=False)
    weights: tuple[Weight, ...] = field(default=(), compare=False, repr=False)
    spellings: tuple[tuple[str, str], ...] = ()  # parts of names in the model -> on disk
    # Fused parameter -> the matrices that it is stored as, expert by expert
    experts_on_disk: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    # Whether the router hands its weights on in the width of compute. Elsewhere softmax leaves them in float32, and
    # the experts' weighted rows with them.
    narrow_routing: bool = False
    since: str = ""  # transformers' first release with the class; the wheel of the minor version before has it not
    default_only: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # what a row is not for
    other_layers: tuple[str, ...] = ()  # further classes of layers
    attention: tuple[str, ...] = (
        *("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"),
    )
    isolates: bool | None = True  # whether packed documents don't see each other; None: it was not found out
    logits: bool | None = True  # whether logits are the head's product, scaled and capped as config.json says
    expert_parallel: bool = True  # whether transformers has a plan for it
    expert_adapters: bool = True  # whether its experts are of a form that adapters are written for
    peft_takes: frozenset[str] = frozenset()  # names of modules that PEFT takes for routed experts
    ignored: tuple[str, ...] = ()  # regular expressions: stored tensors that transformers leaves aside
    derived_by: str = ""  # the version of transformers that described it; empty: a row below

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.layer, *self.other_layers)

    @property
    def usual_attention(self) -> str:
        """Where the run file names none."""
        return "sdpa" if "sdpa" in self.attention else "eager"

    def covers(self, text: Mapping[str, Any]) -> bool:
        """Whether the row describes this config, and not only others of its model_type."""
        return all(text.get(key, value) in (value, None) for key, value in self.default_only.items())


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal model around a causal language model: the same weights under other names."""

    architecture: str
    # Beginnings of names on disk -> in the language model. `language_model.model.` is what save_pretrained writes,
    # `model.language_model.` what newer classes call it in memory and the publisher's converter writes.
    prefixes: tuple[tuple[str, str], ...] = (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        ("lm_head.", "lm_head."),
    )
    # Regular expression: keys of the parts that the language model does not need
    skipped: str = r"(model\.)?(vision_tower|multi_modal_projector)\..+"


WRAPPERS: dict[str, Wrapper] = {  # by model_type
    "mistral3": Wrapper("Mistral3ForConditionalGeneration"),
    "llava": Wrapper("LlavaForConditionalGeneration"),
}

# The usual names of a feed-forward's matrices, and the fused parameter that has them in routed experts.
FUSED: dict[str, str] = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("down_proj", "w2"), "down_proj"),
}

# Usual names of LoRA targets -> the modules that have their part in layers without one of that name, and why.
_TWO_STEPS = "latent attention makes queries in two steps"
_KEYS_VALUES = "latent attention makes keys and values together"
_ONE = "queries, keys and values are one matrix"
_GATED = "linear attention makes queries, keys, values and its gate together"
_ATTENDED = ((("dense",), "the output projection's name here"), (("out_proj",), "the output projection's name here"))
_NO_GATE = "this feed-forward has two matrices and no gate"
_TOGETHER = tuple(((name,), _ONE) for name in ("qkv_proj", "query_key_value", "Wqkv", "c_attn"))
_LINEAR = ((("in_proj_qkvz", "in_proj_ba"), _GATED), (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _GATED))
USUAL: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "q_proj": ((("q_a_proj", "q_b_proj"), _TWO_STEPS), *_TOGETHER, *_LINEAR),
    **dict.fromkeys(("k_proj", "v_proj"), ((("kv_a_proj_with_mqa", "kv_b_proj"), _KEYS_VALUES), *_TOGETHER, *_LINEAR)),
    "o_proj": _ATTENDED,
    **dict.fromkeys(
        ("gate_proj", "up_proj"),
        ((("gate_up_proj",), "gate and up are one matrix"), (("fc1",), _NO_GATE), (("c_fc",), _NO_GATE)),
    ),
    "down_proj": ((("fc2",), _NO_GATE), (("c_proj",), _NO_GATE)),
}

# Stored tensors that no causal language model needs, whatever its family, and why they are not read
ACTIVATIONS = "scale of activations: weights are converted, activations are not quantised"
UNREAD: dict[str, str] = {
    r".+[._]activation_scale": ACTIVATIONS,
    r".+\.input_scale": ACTIVATIONS,
    r".+\.rotary_emb\.inv_freq": "computed from config.json",
}
IGNORED = "transformers leaves it aside"
VISION = "vision part"  # of a wrapper: `skipped`
TIED = "config.json ties the head to the embedding"


_EVERY: dict[str, Size] = {
    "layers": Size(("num_hidden_layers",)),
    "hidden": Size(("hidden_size",)),
    "vocab": Size(("vocab_size",)),
    "heads": Size(("num_attention_heads",)),
}
_GROUPED: dict[str, Size] = {
    "kv_heads": Size(("num_key_value_heads",), lambda d: d["heads"]),
    "head_dim": Size(("head_dim",), lambda d: d["hidden"] // d["heads"], required=False),
    "v_head_dim": Size((), lambda d: d["head_dim"]),
}
_DENSE: dict[str, Size] = {**_GROUPED, "intermediate": Size(("intermediate_size",))}
_BIASED: dict[str, Size] = {
    name: Size(("attention_bias",), 0, required=False, flag=True) for name in ("qkv_bias", "output_bias")
}
_HEAD_DIM_128 = {"head_dim": Size(("head_dim",), 128, required=False)}
_DERIVED: dict[str, Callable[[Dims], int]] = {
    "query": lambda d: d["heads"] * d["head_dim"],
    "key": lambda d: d["kv_heads"] * d["head_dim"],
    "attended": lambda d: d["heads"] * d["v_head_dim"],
}
_EXPERT_DERIVED: dict[str, Callable[[Dims], int]] = {"expert_gate_up": lambda d: 2 * d["expert_intermediate"]}

_LAYER_NORMS = (
    Weight("input_layernorm.weight", "hidden", "norm"),
    Weight("post_attention_layernorm.weight", "hidden", "norm"),
)
_GROUPED_ATTENTION = (
    Weight("self_attn.q_proj.weight", "query hidden", "attention", bias="qkv_bias"),
    Weight("self_attn.k_proj.weight", "key hidden", "attention", bias="qkv_bias"),
    Weight("self_attn.v_proj.weight", "key hidden", "attention", bias="qkv_bias"),
    Weight("self_attn.o_proj.weight", "hidden attended", "attention", bias="output_bias"),
)
_HEAD_NORMS = (
    Weight("self_attn.q_norm.weight", "head_dim", "norm"),
    Weight("self_attn.k_norm.weight", "head_dim", "norm"),
)
_LATENT_ATTENTION = (
    Weight("self_attn.q_proj.weight", "query hidden", "attention", unless="q_rank"),
    Weight("self_attn.q_a_proj.weight", "q_rank hidden", "attention", when="q_rank", bias="qkv_bias"),
    Weight("self_attn.q_a_layernorm.weight", "q_rank", "norm", when="q_rank"),
    Weight("self_attn.q_b_proj.weight", "query q_rank", "attention", when="q_rank"),
    Weight("self_attn.kv_a_proj_with_mqa.weight", "kv_latent hidden", "attention", bias="qkv_bias"),
    Weight("self_attn.kv_a_layernorm.weight", "kv_rank", "norm"),
    Weight("self_attn.kv_b_proj.weight", "kv_expanded kv_rank", "attention"),
    Weight("self_attn.o_proj.weight", "hidden attended", "attention", bias="output_bias"),
)
_FEED_FORWARD = (
    Weight("mlp.gate_proj.weight", "intermediate hidden", "mlp", "dense", bias="mlp_bias"),
    Weight("mlp.up_proj.weight", "intermediate hidden", "mlp", "dense", bias="mlp_bias"),
    Weight("mlp.down_proj.weight", "hidden intermediate", "mlp", "dense", bias="mlp_bias"),
)
_ROUTED = (
    Weight("mlp.experts.gate_up_proj", "experts expert_gate_up hidden", "experts", "moe"),
    Weight("mlp.experts.down_proj", "experts hidden expert_intermediate", "experts", "moe"),
    Weight("mlp.gate.weight", "experts hidden", "router", "moe"),
)
_SHARED = (
    Weight("mlp.shared_experts.gate_proj.weight", "shared_intermediate hidden", "shared_experts", "moe"),
    Weight("mlp.shared_experts.up_proj.weight", "shared_intermediate hidden", "shared_experts", "moe"),
    Weight("mlp.shared_experts.down_proj.weight", "hidden shared_intermediate", "shared_experts", "moe"),
)
_DENSE_WEIGHTS = (*_GROUPED_ATTENTION, *_FEED_FORWARD, *_LAYER_NORMS)


def _routed(*experts: str) -> dict[str, Size]:
    """Sizes of routed experts; `experts`: the key that has their number."""
    return {
        "top_k": Size(("num_experts_per_tok",)),
        "experts": Size(experts),
        "expert_intermediate": Size(("moe_intermediate_size",)),
    }


def _family(
    model_type: str,
    name: str,
    since: str,
    sizes: Mapping[str, Size] = MappingProxyType({}),
    derived: Mapping[str, Callable[[Dims], int]] = MappingProxyType({}),
    weights: tuple[Weight, ...] = _DENSE_WEIGHTS,
    **rest: Any,
) -> Family:
    """A row with what all families have; by default grouped attention and one feed-forward in each layer."""
    causal_lm, layer = f"{name}ForCausalLM", f"{name}DecoderLayer"
    sizes, derived = {**_EVERY, **sizes}, {**_DERIVED, **derived}
    return Family(model_type, causal_lm, layer, sizes, derived, weights, since=since, **rest)


_FAMILIES = (
    _family(
        "mistral4",
        "Mistral4",
        "5.4",
        sizes={
            **_BIASED,
            "kv_heads": Size(("num_key_value_heads",), lambda d: d["heads"]),
            "q_rank": Size(("q_lora_rank",), 0),
            "kv_rank": Size(("kv_lora_rank",)),
            "rope_dim": Size(("qk_rope_head_dim",)),
            "nope_dim": Size(("qk_nope_head_dim",)),
            "head_dim": Size((), lambda d: d["nope_dim"] + d["rope_dim"]),
            "v_head_dim": Size(("v_head_dim",)),
            "intermediate": Size(("intermediate_size",)),
            **_routed("n_routed_experts", "num_local_experts"),
            "shared_experts": Size(("n_shared_experts",)),
            "first_dense": Size(("first_k_dense_replace",), 0, required=False, least=0),
        },
        derived={
            **_EXPERT_DERIVED,
            "kv_latent": lambda d: d["kv_rank"] + d["rope_dim"],
            "kv_expanded": lambda d: d["heads"] * (d["nope_dim"] + d["v_head_dim"]),
            "shared_intermediate": lambda d: d["shared_experts"] * d["expert_intermediate"],
        },
        weights=(*_LATENT_ATTENTION, *_ROUTED, *_SHARED, *_FEED_FORWARD, *_LAYER_NORMS),
    ),
    _family("mistral", "Mistral", "4.34", _DENSE),
    _family("ministral3", "Ministral3", "5.0", {**_DENSE, **_HEAD_DIM_128}),
    _family(
        "llama",
        "Llama",
        "4.28",
        {
            **_DENSE,
            **_BIASED,
            "kv_heads": Size(("num_key_value_heads",), lambda d: d["heads"], required=False),
            "mlp_bias": Size(("mlp_bias",), 0, required=False, flag=True),
        },
    ),
    _family("qwen2", "Qwen2", "4.37", {**_DENSE, "qkv_bias": Size((), 1)}),
    _family("qwen3", "Qwen3", "4.51", {**_DENSE, **_BIASED, **_HEAD_DIM_128}, weights=(*_DENSE_WEIGHTS, *_HEAD_NORMS)),
    _family(
        "mixtral",
        "Mixtral",
        "4.36",
        {
            **_GROUPED,
            **_routed("num_local_experts", "num_experts"),
            "expert_intermediate": Size(("intermediate_size",)),
        },
        _EXPERT_DERIVED,
        (*_GROUPED_ATTENTION, *_ROUTED, *_LAYER_NORMS),
        spellings=(("mlp.", "block_sparse_moe."),),
        experts_on_disk={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    ),
    _family(
        "qwen3_moe",
        "Qwen3Moe",
        "4.51",
        {**_GROUPED, **_BIASED, **_routed("num_experts", "num_local_experts")},
        _EXPERT_DERIVED,
        (*_GROUPED_ATTENTION, *_HEAD_NORMS, *_ROUTED, *_LAYER_NORMS),
        experts_on_disk={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
        narrow_routing=True,
        default_only={"mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
