"""Differences between model families, as data; and the usual names of LoRA targets with their meaning in each family.

For each family, families.toml lists how config.json gives the sizes, each layer's weights and shapes, and how files
name them.
"""

import ast
import operator
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("embedding", "attention", "mlp", "shared_experts", "experts", "router", "norm", "head")

# The names in `Base.dims`, from which shapes and costs are computed; flags are 0 or 1. Families have those that apply.
# layers · hidden: width of the residual stream · vocab: rows of the embedding
# heads, kv_heads, head_dim (of queries and keys), v_head_dim
# q_rank (0: queries are not compressed), kv_rank: widths that latent attention compresses to
# rope_dim, nope_dim: parts of its heads with and without rotary positions
# intermediate: width of a dense feed-forward · experts, top_k, expert_intermediate: routed experts · shared_experts
# first_dense: layers before the first with routed experts
# qkv_bias, output_bias, mlp_bias: flags
Dims = Mapping[str, int]


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


def evaluate_expression(expression: str, dims: Dims) -> int:
    """Evaluate an expression of families.toml, such as `heads*head_dim`."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.Name(name):
                return dims[name]
            case ast.BinOp(left, how, right):
                return int(_OPERATORS[type(how)](value(left), value(right)))
        raise ValueError(f"families.toml: {expression!r} is more than names, numbers, +, -, * and //")

    return value(ast.parse(expression, mode="eval").body)


@dataclass(frozen=True, slots=True)
class Size:
    """One entry of `dims`: how to read it from config.json."""

    keys: tuple[str, ...]  # its spellings; none: always `default`
    default: str = ""  # an expression, used if config.json has null or nothing; empty: no default
    required: bool = True  # the key must be present, even if it may be null
    flag: bool = False  # a boolean, not a number


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of a decoder layer, with its name below `model.layers.N.`"""

    name: str
    shape: str  # expressions of dims
    part: str
    layers: str  # all, dense or moe
    when: str  # only if this dim is not 0
    unless: str  # only if this dim is 0
    bias: str  # it has a bias if this flag is set


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: one `model_type` of transformers' config.json."""

    model_type: str
    causal_lm: str  # class that is trained: Mistral4ForCausalLM
    layer: str  # class that is sharded, layer by layer: Mistral4DecoderLayer
    sizes: Mapping[str, Size] = field(default_factory=dict, compare=False, repr=False)
    weights: tuple[Weight, ...] = field(default=(), compare=False, repr=False)
    spellings: tuple[tuple[str, str], ...] = ()  # parts of names in the model -> on disk
    # Fused parameter -> the matrices that store it, one expert at a time
    experts_on_disk: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    # Whether the router returns its weights in the compute dtype. In other families they stay in softmax's float32, and
    # so do the experts' weighted rows.
    narrow_routing: bool = False
    since: str = ""  # transformers' first release with the class; the previous minor version's wheel lacks it
    default_only: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # values required
    other_layers: tuple[str, ...] = ()  # further classes of layers
    attention: tuple[str, ...] = (
        *("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"),
    )
    isolates: bool | None = True  # whether packed documents can't attend to each other; None: unknown
    logits: bool | None = True  # whether logits are the head's product, scaled and capped as config.json says
    shards: bool = True  # whether every weight is gathered before it is used
    expert_parallel: bool = True  # whether transformers has a plan for it
    expert_adapters: bool = True  # whether its experts are of a form that adapters are written for
    without_formula: int = 0  # layers of linear attention, a state space, a convolution or an indexer
    # trace.py's measurements of these layers, by layer number
    traced: Mapping[int, Mapping[str, list[float]]] = field(default_factory=dict, compare=False, repr=False)
    # Last components of linear modules that no gradient reaches; how names of towers for images and sound begin
    idle: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset()  # the same of those whose weight others read: it can't be codes
    peft_takes: frozenset[str] = frozenset()  # names of modules that PEFT mistakes for routed experts
    ignored: tuple[str, ...] = ()  # regular expressions: stored tensors that transformers ignores

    @property
    def layers(self) -> tuple[str, ...]:
        return (self.layer, *self.other_layers)

    @property
    def usual_attention(self) -> str:
        """Return the attention implementation to use if the run file names none."""
        return "sdpa" if "sdpa" in self.attention else "eager"

    def covers(self, text: Mapping[str, Any]) -> bool:
        """Return whether the row describes this config, and not only others of its model_type."""
        return all(text.get(key, value) in (value, None) for key, value in self.default_only.items())


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal model around a causal language model, which has the same weights under other names."""

    architecture: str
    # Prefixes on disk -> in the language model. save_pretrained writes `language_model.model.`; newer classes in memory
    # and the publisher's converter use `model.language_model.`.
    prefixes: tuple[tuple[str, str], ...] = (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        ("lm_head.", "lm_head."),
    )
    # Regular expression: keys of tensors that the language model does not need
    skipped: str = r"(model\.)?(vision_tower|multi_modal_projector)\..+"
    place: str = "model.language_model."  # the class's name for the language model's `model.`


WRAPPERS: dict[str, Wrapper] = {  # by model_type
    "mistral3": Wrapper("Mistral3ForConditionalGeneration"),
    "llava": Wrapper("LlavaForConditionalGeneration"),
}

# The usual names of a feed-forward's matrices -> the fused parameter that contains them in routed experts.
FUSED: dict[str, str] = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("down_proj", "w2"), "down_proj"),
}

# Usual names of LoRA targets -> the modules that replace them in layers without one of that name, and why.
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
ACTIVATIONS = "scale of activations: weights are converted, activations are not quantized"
CACHE = "scale of the KV cache, which training has none of"
SHAPES = "shape of packed weights, which config.json gives too"
UNREAD: dict[str, str] = {
    r".+[._]activation_scale": ACTIVATIONS,
    r".+\.(input|output)_(global_)?(scale|zero_point)": ACTIVATIONS,
    r".+\.[kqv]_(scale|zero_point)": CACHE,
    r".+\.weight_shape": SHAPES,
    r".+\.rotary_emb\.inv_freq": "computed from config.json",
}
IGNORED = "transformers leaves it aside"
VISION = "vision part"  # of a wrapper: `skipped`
TIED = "config.json ties the head to the embedding"


def _read_size(text: str) -> tuple[str, Size]:
    """Parse one line of [sizes]."""
    name, _, rest = text.partition(":")
    words, _, default = rest.partition("=")
    keys = tuple(word for word in words.split() if word not in "?!")
    return name, Size(keys, default.strip(), required=not {"?", "!"} & {*words.split()}, flag="!" in words)


def _read_weight(text: str) -> Weight:
    """Parse one line of [weights]."""
    name, shape, rest = re.split(r" \[|\] ", text)
    part, *words = rest.split()
    options = dict(word.split("=") for word in words if "=" in word)
    kind = next((word for word in words if "=" not in word), "all")
    return Weight(name, shape, part, kind, *(options.get(key, "") for key in ("if", "unless", "bias")))


def _read_families() -> dict[str, Family]:
    table = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
    families = {}
    for model_type, row in table["family"].items():
        stem = row.pop("class")
        sizes = [line for name in row.pop("sizes").split() for line in table["sizes"][name]]
        sizes += row.pop("size", ())
        weights = [line for name in row.pop("weights").split() for line in table["weights"][name]]
        row["spellings"] = tuple(row.get("spellings", {}).items())
        families[model_type] = Family(
            model_type,
            causal_lm=f"{stem}ForCausalLM",
            layer=f"{stem}DecoderLayer",
            sizes=dict(map(_read_size, sizes)),
            weights=tuple(map(_read_weight, weights)),
            **row,
        )
    return families


FAMILIES: dict[str, Family] = _read_families()
