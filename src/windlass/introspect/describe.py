"""Describe, as JSON, the model that transformers builds from a config.json on the meta device: for a plan without
torch.

`python -m windlass.introspect.describe FOLDER` prints it. Nothing here reads a weight.
"""

import contextlib
import json
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from peft import LoraConfig
from peft.utils import transformers_weight_conversion as peft_conversion
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto

from windlass.compat import check_mamba_targets, get_expert_plan, has_post_expert_norm
from windlass.errors import UserError, print_error
from windlass.introspect.trace import trace_layers
from windlass.model.description import FETCH, MAX_LAYERS, hash_config
from windlass.model.shrink import shrink_config

ATTENTION: Final = re.compile(r"Attention|DeltaNet|Mamba|Mixer|Conv|LinearAttn")
# Modules that mix tokens in a way that the plan has no formula for, and transformers' names for layers that have one.
NO_FORMULA: Final = re.compile(r"DeltaNet|Mamba|Mixer|Conv|LinearAttn|Recurrent|Lightning|Indexer|Compress")
NO_FORMULA_TYPES: Final = ("linear_attention", "mamba", "hybrid", "conv", "indexed_attention")
LEAKS: Final = 1e-5  # relative to a logit: a larger change caused by another document is no rounding
KINDS: Final = {
    "sdpa": "_supports_sdpa",
    **dict.fromkeys(("flash_attention_2", "flash_attention_3", "flash_attention_4"), "_supports_flash_attn"),
    "flex_attention": "_supports_flex_attn",
}
LARGEST_TRIAL: Final = 100_000_000  # parameters: a family whose names of sizes shrink.py doesn't know
DATA: Final = Tensor.data.__get__  # type: ignore[attr-defined]
UNLIKE: Final = "use a model whose decoder layers are model.layers.N, as most have them"
UNTRIED: Final[dict[str, Any]] = {"isolates": None, "logits": None, "idle": [], "bare": [], "shards": True}
TOP_K: Final = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "experts_per_token")


def derive(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the description of the model of a config.json, or why it can't be trained here."""
    outer = _read_config(config, where)
    try:
        text = outer.get_text_config()
    except ValueError as error:
        raise UserError(
            _first_line(error), where, "give the folder of one language model", "ambiguous-config"
        ) from None
    model_class = find_model_class(text, config, where)
    count = getattr(text, "num_hidden_layers", None)
    if not hasattr(text, "num_hidden_layers"):
        problem = f"{model_class.__name__} can't be sharded: its config has no num_hidden_layers"
        raise UserError(problem, where, UNLIKE, "not-shardable")
    if not 0 < (count or 0) <= MAX_LAYERS:
        problem = f"num_hidden_layers is {reprlib.repr(count)}"
        raise UserError(problem, where, f"a whole number from 1 to {MAX_LAYERS}", "wrong-config-value")
    wrapper = None if text is outer else find_wrapper_class(outer, config, where)
    try:
        with _silence_transformers(), torch.device("meta"):
            model = model_class(text)
            around = wrapper(outer) if wrapper else model
    except Exception as error:  # whatever a model class objects to
        problem = f"transformers can't build {model_class.__name__} of it: {_first_line(error)}"
        raise UserError(problem, where, FETCH, "config-refused") from None
    layers = _find_layers(model, where)
    spelled, skipped = _trace_spellings(model, around, where)
    outside, kinds, order = _list_states(model, layers, spelled)
    dims = _read_dims(model, text, len(layers), kinds, where)
    odd = _find_odd_layers(text, layers)
    attention = ["eager", *(kind for kind, flag in KINDS.items() if getattr(model, flag, False))]
    description = {
        "config": hash_config(config),
        "transformers": transformers.__version__,
        "model_type": text.model_type,
        "class": model_class.__name__,
        "layers": list(dict.fromkeys(type(layer).__name__ for layer in layers.values())),
        "wrapper": wrapper.__name__ if wrapper else None,
        "skipped": skipped,
        "ignored": sorted(model_class._keys_to_ignore_on_load_unexpected or ()),
        "attention": attention,
        "peft_takes": sorted({*_names_mistaken_by_peft(text.model_type), *_names_renamed_by_peft(model)}),
        **_try_out(model_class, text, "sdpa" if "sdpa" in attention else "eager"),
        "expert_parallel": bool(get_expert_plan(model)),
        "expert_adapters": all(map(_is_adaptable, filter(_is_experts, model.modules()))),
        "without_formula": sum(odd),
        "dims": dims,
        "outside": outside,
        "kinds": kinds,
        "order": order,
    }
    classes = {name: type(layer).__name__ for name, layer in layers.items()}
    skipped = [name for name in layers if classes[name] in description["idle"]]
    description["idle"] = [name for name in description["idle"] if name not in classes.values()] + skipped
    if any(odd) and description["logits"]:  # else it is refused. One layer of each kind; the model is used up by it
        first = {kind: number for number, kind in reversed([*enumerate(order)]) if odd[number]}
        with contextlib.suppress(Exception), _silence_transformers():  # what can't be traced is estimated as attention
            traced = trace_layers(model, [*first.values()])
            description["traced"] = {str(kind): traced[number] for kind, number in first.items()}
    return description


def _find_layers(model: Any, where: str) -> dict[str, nn.Module]:
    """Return the decoder layers by name; refuse a model that can't be sharded by them or read into."""
    name_of_class = type(model).__name__
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and re.fullmatch(r"model\.layers\.\d+", name)
    }
    if not layers or not all(name in model._fsdp_plan for name in ("model.embed_tokens", "model.layers.*")):
        problem = f"{name_of_class} can't be sharded: transformers' FSDP plan does not name its layers"
        raise UserError(problem, where, UNLIKE, "not-shardable")
    weights: dict[int, str] = {}  # of linear layers: an adapter of one layer can't be merged into a weight of several
    for name, module in model.named_modules():
        if type(module) is nn.Linear and weights.setdefault(id(module.weight), name) != name:
            problem = f"{name_of_class} is not supported: {weights[id(module.weight)]} and {name} share a weight"
            raise UserError(problem, where, "use a model whose layers have weights of their own", "shared-weights")
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 0:
            problem = f"{name_of_class} is not supported: {name} is a single number, which the loader does not read"
            raise UserError(problem, where, "models that were tried are in docs/families.md", "scalar-tensor")
    return layers


def _list_states(
    model: Any, layers: Mapping[str, nn.Module], spelled: Mapping[str, Any]
) -> tuple[list[Any], list[Any], list[int]]:
    """Return the states outside of layers, those of each kind of layer, and each layer's kind.

    In a layer's names and spellings, its number is left out or written @.
    """
    modules = dict(model.named_modules())
    parts = _assign_parts(model, layers)
    buffers = {name for name, _ in model.named_buffers()}
    outside: list[Any] = []
    by_layer: list[list[Any]] = [[] for _ in layers]
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied
            continue
        seen.add(id(tensor))
        owner, _, leaf = name.rpartition(".")
        entry = {"name": name, "shape": list(tensor.shape), "part": parts[name], "stored": spelled[name]}
        if leaf == "weight" and type(modules[owner]) is nn.Linear:
            entry["linear"] = True
        if name in buffers:
            entry["buffer"] = True
        if tensor.ndim == 3 and getattr(modules[owner], "is_transposed", False):
            entry["transposed"] = True
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match is None:
            outside.append(entry)
            continue
        number = re.compile(rf"(?<=\.){match[1]}(?=\.)")
        entry["name"] = name.removeprefix(match[0])
        entry["stored"] = [[[number.sub("@", key, count=1), *place] for key, *place in way] for way in spelled[name]]
        by_layer[int(match[1])].append(entry)
    kinds: list[Any] = []
    order = []
    for entries in by_layer:
        if entries not in kinds:
            kinds.append(entries)
        order.append(kinds.index(entries))
    return outside, kinds, order


def _read_dims(model: Any, text: Any, layers: int, kinds: Sequence[Any], where: str) -> dict[str, int]:
    vocab, hidden = model.get_input_embeddings().weight.shape
    configs = getattr(text, "per_layer_config", None) or [text]
    heads = max((getattr(config, "num_attention_heads", None) or 0) for config in configs)
    kv_heads = max((getattr(config, "num_key_value_heads", None) or 0) for config in configs)
    dims = {"layers": layers, "hidden": hidden, "vocab": vocab, "heads": heads or 1, "kv_heads": kv_heads or heads}
    stacks = [entry["shape"] for entries in kinds for entry in entries if entry["part"] == "experts"]
    experts = max((shape[0] for shape in stacks if len(shape) == 3), default=0)
    if experts:
        top_k = next((getattr(text, key) for key in TOP_K if getattr(text, key, None)), None)
        if type(top_k) is not int or top_k > experts:
            raise UserError(
                f"each token visits {top_k} of {experts} experts",
                where,
                "check num_experts_per_tok",
                "wrong-config-value",
            )
        dims |= {"experts": experts, "top_k": top_k}
    return dims


def _find_odd_layers(text: Any, layers: Mapping[str, nn.Module]) -> list[bool]:
    """Return for each layer whether it mixes tokens in a way that the plan has no formula for."""
    types = [*(getattr(text, "layer_types", None) or ()), *[""] * len(layers)]
    return [
        kind in NO_FORMULA_TYPES or any(NO_FORMULA.search(type(module).__name__) for module in layer.modules())
        for kind, layer in zip(types, layers.values(), strict=False)
    ]


# --- which classes ------------------


def _read_config(config: Mapping[str, Any], where: str) -> Any:
    model_type: Any = config.get("model_type")
    known = transformers.CONFIG_MAPPING
    if config.get("auto_map") and isinstance(model_type, str) and model_type not in known:
        code = f"{model_type!r} is code that comes with the checkpoint"
        hint = "use a model that transformers has, or that was converted to one"
        raise UserError(f"{code}, but windlass only shards transformers' own models", where, hint, "remote-code")
    inner = config.get("text_config")
    inner_type = inner.get("model_type") if isinstance(inner, dict) else None
    for name, place in ((model_type, where), (inner_type or model_type, f"{where}: text_config")):
        if not isinstance(name, str) or name not in known:
            hint = f"transformers {transformers.__version__} builds what windlass trains: a newer one may know it"
            raise UserError(f"unknown model type {reprlib.repr(name)}", place, hint, "unknown-model-type")
    try:
        with _silence_transformers():
            described = {key: value for key, value in config.items() if key != "quantization_config"}
            # save_pretrained writes infinity as {"__float__": "Infinity"}, which from_dict alone does not read.
            return known[model_type].from_dict(known[model_type]._decode_special_floats(described))
    except Exception as error:  # whatever a config class objects to
        problem = f"transformers' {known[model_type].__name__} refuses it: {_first_line(error)}"
        raise UserError(problem, where, FETCH, "config-refused") from None


def find_model_class(text: Any, config: Mapping[str, Any], where: str) -> Any:
    """Return the causal language model's class of this config; encoders and encoder-decoders have none."""
    model_type = text.model_type
    name: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    stem = type(text).__name__.removesuffix("Config")
    names = [name if isinstance(name, str) else "", f"{stem}ForCausalLM", f"{stem.removesuffix('Text')}ForCausalLM"]
    classes = [getattr(transformers, name, None) for name in names if name]
    fitting = [known for known in classes if known is not None and isinstance(text, known.config_class)]
    if not fitting and isinstance(name, str) and model_type == config.get("model_type", model_type):
        fitting = [
            known for known in classes[:1] if known is not None
        ]  # another family's class, by transformers' table
    hint = "use a decoder-only causal language model, such as llama, qwen3, mistral or gemma3"
    if getattr(text, "is_encoder_decoder", False):
        raise UserError(
            f"{model_type} is an encoder-decoder, and windlass trains decoders", where, hint, "not-a-decoder"
        )
    if not fitting:
        raise UserError(
            f"transformers has no causal language model of type {model_type}", where, hint, "no-causal-model"
        )
    is_masked = model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if getattr(text, "is_decoder", None) is False and is_masked:
        raise UserError(f"{model_type} is an encoder: it does not predict the next token", where, hint, "not-a-decoder")
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    if model_type == config.get("model_type") and architecture not in ("", fitting[0].__name__):
        problem = f"architectures is {architecture!r}, and windlass trains adapters of {fitting[0].__name__}"
        raise UserError(problem, where, "give the folder of the causal language model itself", "other-architecture")
    return fitting[0]


def find_wrapper_class(outer: Any, config: Mapping[str, Any], where: str) -> Any:
    """Return the multimodal class around the language model."""
    mapped = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(outer.model_type)
    for name in [*(config.get("architectures") or ()), mapped]:
        known = getattr(transformers, str(name), None)
        if known is not None and isinstance(outer, known.config_class):
            return known
    problem = f"transformers has no model with a language model in it of type {outer.model_type}"
    raise UserError(
        problem, where, "give the folder of a language model, or of a model that transformers has", "no-causal-model"
    )


def _names_mistaken_by_peft(model_type: str) -> Iterable[str]:
    """Return module names that PEFT mistakes for this family's routed experts, wherever they are."""
    family = peft_conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    fused = peft_conversion._MOE_FUSED_TARGETS.get(family)
    if not fused or get_checkpoint_conversion_mapping(model_type) is None:
        return ()
    names: Iterable[str] = peft_conversion._MOE_TARGET_MODULE_MAPPING[family]
    return names


def _names_renamed_by_peft(model: Any) -> Iterator[str]:
    """Yield names of linear modules whose adapters PEFT gives another module's name when it opens them."""
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    keys = {f"base_model.model.{name}.lora_A.weight": torch.empty(1, 1) for name in linears}
    found = peft_conversion.convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(), keys)
    kept = {name.replace(".default.", ".") for name in found}
    for name, key in zip(linears, keys, strict=True):
        if key not in kept:
            yield name.rpartition(".")[2]


# --- parts, by the modules that parameters are of ------------------


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_concatenated") or type(module).__name__.endswith("Experts")


def _assign_parts(model: Any, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the part of the model that each state belongs to."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    parts = {}
    for name in model.state_dict():
        owner = modules[name.rpartition(".")[0]]
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if "Norm" in type(owner).__name__:
            parts[name] = "norm"
        elif layer is not None:
            parts[name] = _part_in_layer(layers[layer], name.removeprefix(f"{layer}.").split("."))
        elif owner is head:
            parts[name] = "head"
        else:
            parts[name] = "embedding" if isinstance(owner, nn.Embedding) else "mlp"
    return parts


def _part_in_layer(layer: nn.Module, path: list[str]) -> str:
    chain = [layer.get_submodule(".".join(path[: i + 1])) for i in range(len(path) - 1)]
    if not chain:
        return "norm"  # a scale of the layer's own
    if any(map(_is_experts, chain)):
        return "experts"
    if ATTENTION.search(type(chain[0]).__name__):
        return "attention"
    if not any(map(_is_experts, layer.modules())):
        return "mlp"
    if any(map(_is_experts, chain[0].modules())):  # next to experts: a router, or experts for every token
        linears = [module for module in chain[1].modules() if isinstance(module, nn.Linear)] if len(chain) > 1 else []
        return "shared_experts" if len(linears) > 1 else "router"
    return "shared_experts"


# --- how files spell parameters ------------------


class _Views(TorchFunctionMode):
    """Makes clone and contiguous no-ops, so converted tensors stay views of the parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.contiguous, Tensor.clone) else func(*args, **(kwargs or {}))


def _trace_spellings(model: Any, around: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return how files store each of the model's states, and patterns for all other names.

    One way is a list of [stored name, shape, offset in the parameter]; # in a name counts along the first dimension.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in around.state_dict(keep_vars=True).items():  # a tied one once
        if all(tensor is not other for other in state.values()):
            state[name] = tensor
    inner_names = {name: inner for name, inner in _list_inner_names(model, around).items() if name in state}
    by_memory = {_memory(state[name]): name for name in inner_names}
    memories = {_memory(tensor) for tensor in state.values()}
    with _Views(), torch.no_grad():
        stored = revert_weight_conversion(around, dict(state))
    pieces: dict[str, list[Any]] = {}
    others = [name for name in state if name not in inner_names]
    for key, view in stored.items():
        name = by_memory.get(_memory(view))
        if name is None:
            if _memory(view) not in memories:
                problem = f"transformers makes {key} in a way that can't be read in parts"
                raise UserError(
                    problem,
                    where,
                    "load it with transformers and save it again: save_pretrained(FOLDER)",
                    "not-in-parts",
                )
            others.append(key)
            continue
        tensor = state[name]
        strides = tensor.stride()[tensor.ndim - view.ndim :]
        if any(size > 1 and a != b for size, a, b in zip(view.shape, view.stride(), strides, strict=True)):
            problem = f"{key} is stored transposed or interleaved, which windlass does not undo"
            raise UserError(problem, where, "load it with transformers and save it unconverted", "stored-transposed")
        offset = []
        rest = view.storage_offset() - tensor.storage_offset()
        for stride in tensor.stride():
            offset.append(rest // stride)
            rest %= stride
        pieces.setdefault(inner_names[name], []).append([key, list(view.shape), offset])
    ways: dict[str, Any] = {
        inner: [[[name, list(state[name].shape), [0] * state[name].ndim]]] for name, inner in inner_names.items()
    }
    for inner, pieces_of_state in pieces.items():
        way = _count(pieces_of_state)
        if way not in ways[inner]:
            ways[inner].insert(0, way)
    for inner in ways:  # its own name needs no saying
        ways[inner] = [way for way in ways[inner] if way[0][0] != inner]
    language = [*inner_names, *(key for key, view in stored.items() if _memory(view) in by_memory)]
    return ways, [re.escape(prefix) + r"(\..+)?" for prefix in _find_prefixes(others, language)]


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def _list_inner_names(model: Any, around: Any) -> dict[str, str]:
    """Return the names of the language model's states: in the model around it -> its own."""
    own = model.state_dict()
    if around is model:
        return {name: name for name in own}
    places = {_find_name(around, lambda module: type(module) is type(model.model)): "model"}
    outputs = _find_name(around, lambda module: module is around.get_output_embeddings())
    if outputs:
        places[outputs] = _find_name(model, lambda module: module is model.get_output_embeddings())
    names = {}
    for name in around.state_dict():
        for outer, inner in places.items():
            renamed = f"{inner}.{name.removeprefix(f'{outer}.')}"
            if name.startswith(f"{outer}.") and renamed in own:
                names[name] = renamed
                break
    return names


def _find_name(model: nn.Module, test: Callable[[nn.Module], bool]) -> str:
    return next((name for name, module in model.named_modules() if test(module)), "")


def _count(pieces: list[Any]) -> list[Any]:
    """Merge pieces that differ only by their number along the first dimension."""
    if len(pieces) == 1:
        return pieces
    merged: dict[str, list[Any]] = {}
    for key, shape, offset in pieces:
        name = re.sub(rf"(?<=\.experts\.){offset[0]}(?=\.)", "#", key)
        merged.setdefault(name, [name, shape, offset])
    return list(merged.values())


def _find_prefixes(others: list[str], language: list[str]) -> list[str]:
    """Return beginnings of names that no name of the language model has."""
    prefixes = set()
    for name in others:
        components = name.split(".")
        for end in range(1, len(components) + 1):
            prefix = ".".join(components[:end])
            if not any(f"{inner}.".startswith(f"{prefix}.") for inner in language):
                prefixes.add(prefix)
                break
    return sorted(prefixes)


# --- packed documents ------------------


def _try_out(model_class: Any, text: Any, attention: str) -> dict[str, Any]:
    """Test on a small model whether packed documents are isolated, and whether its logits are what the loss assumes.
    None if it can't be tested."""
    try:
        with _silence_transformers():
            small = type(text).from_dict(shrink_config(text.to_dict()), attn_implementation=attention)
            with torch.device("meta"):
                if model_class(small).num_parameters() > LARGEST_TRIAL:
                    return UNTRIED
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = model_class(small).float().eval()
                ids = torch.randint(16, 500, (1, 24))
        other_ids = ids.clone()
        other_ids[0, :12] = (ids[0, :12] + 7) % 500
        positions = torch.arange(12).repeat(2)[None]
        uncalled = _watch_float32(model)
        with torch.no_grad(), _silence_transformers():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            other_logits = model(input_ids=other_ids, position_ids=positions, use_cache=False).logits
            scale, cap = read_logit_shaping(small)
            states = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            expected = model.get_output_embeddings()(states) * scale
        if cap:
            expected = cap * torch.tanh(expected / cap)
        rounding = LEAKS * logits.abs().max()
        change = (logits - other_logits).abs().amax(-1)[0]
        if change[:12].max() <= rounding:  # a model that does not react to its input proves nothing
            return UNTRIED
        reads = _Reads(model)
        with reads, torch.random.fork_rng(devices=[]):  # dropout
            idle = _find_untrainable(model, ids)
        return {
            "isolates": bool(change[12:].max() <= rounding),
            "logits": bool((expected - logits).abs().max() <= rounding),
            "idle": idle,
            "bare": sorted(reads.names),
            "shards": not uncalled,
        }
    except Exception:  # a family that can't be shrunk: no proof
        return UNTRIED


def _watch_float32(model: Any) -> set[nn.Module]:
    """Return the modules that transformers keeps in float32, without those whose forward is called.

    FSDP2 gathers each of them before its forward: weights read in another way stay sharded.
    """
    patterns = [re.compile(name.replace("*", ".*")) for name in model._get_dtype_plan(torch.bfloat16)]
    uncalled = {
        model.get_submodule(name.rpartition(".")[0])
        for name, _ in model.named_parameters()
        if any(pattern.search(name) for pattern in patterns)
    }
    for module in uncalled:
        module.register_forward_pre_hook(lambda called, _: uncalled.discard(called))
    return uncalled


class _Reads(TorchFunctionMode):
    """Records linear layers whose weight is read by anything but their own product: it must not become codes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.names = set[str]()
        modules = model.model.layers.named_modules()
        self.linears = {id(m.weight): name.rpartition(".")[2] for name, m in modules if type(m) is nn.Linear}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == DATA or getattr(func, "__name__", "") not in ("linear", "__get__"):
            self.names |= {self.linears[id(value)] for value in args if id(value) in self.linears}
        return func(*args, **(kwargs or {}))


def _find_untrainable(model: Any, ids: Tensor) -> list[str]:
    """Return last components of names of linear modules that get no gradient or that PEFT refuses, and beginnings of
    those beside the layers that get none, such as towers for images and sound: layers may have equal last components.
    Then classes of layers that text skips."""
    reached = set[str]()

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: reached.add(name))  # type: ignore[no-untyped-call]

        return hook

    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in linears:
        model.get_submodule(name).register_forward_hook(watch(name))
    model.train()  # Gemma 3n then reads a weight that it otherwise calls
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    beside = {name for name in linears if name not in reached and not name.startswith("model.layers.")}
    language = [name for name in linears if name not in beside]
    trained = {name.rpartition(".")[2] for name in reached}
    for leaf in [*trained]:
        try:
            check_mamba_targets(LoraConfig(), model, leaf)
        except ValueError:
            trained.remove(leaf)
    leaves = {name.rpartition(".")[2] for name in language}
    numbers = {int(name.split(".")[2]) for name in reached if name.startswith("model.layers.")}
    used = {type(model.model.layers[number]) for number in numbers}
    skipped = {type(layer).__name__ for layer in model.model.layers if type(layer) not in used}
    return [*sorted(leaves - trained), *_find_prefixes([*beside], language), *sorted(skipped)]


def read_logit_shaping(config: Any) -> tuple[float, float | None]:
    """Return the factor of the head's product before the softmax, and its bound by tanh."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)


def _is_adaptable(experts: Any) -> bool:
    """Return whether these experts have the form that adapters are written for: two products, gate and up fused."""
    return getattr(experts, "has_gate", False) and not has_post_expert_norm(experts)


@contextlib.contextmanager
def _silence_transformers() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def main(source: str, where: str = "") -> None:
    try:
        file = Path(source, "config.json") if Path(source).is_dir() else Path(source)
        text = sys.stdin.read() if source == "-" else file.read_text()
        print(json.dumps(derive(json.loads(text), where or source)))
    except UserError as error:
        print(json.dumps({"problems": [problem.as_dict() for problem in error.problems]}))
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
