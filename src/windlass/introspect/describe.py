"""Describe, as JSON, what transformers would build from a config.json: found on the meta device, for a plan without
torch.

`python -m windlass.introspect.describe FOLDER` prints it. Nothing here reads a weight.
"""

import contextlib
import json
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from peft import LoraConfig
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils import transformers_weight_conversion as peft_conversion
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto

from windlass.errors import UserError
from windlass.introspect.trace import trace_layers
from windlass.model.description import MAX_LAYERS, hash_config
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
FETCH: Final = "fetch config.json again from where the model was published"
UNTRIED: Final[dict[str, Any]] = {"isolates": None, "logits": None, "idle": [], "shards": True}
TOP_K: Final = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "experts_per_token")


def derive(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the description of the model of a config.json, or why it can't be trained here."""
    outer = _read_config(config, where)
    try:
        text = outer.get_text_config()
    except ValueError as error:
        raise UserError(_first_line(error), where, "give the folder of one language model") from None
    wrapped = text is not outer
    causal = find_model_class(text, config, where)
    if not 0 < (getattr(text, "num_hidden_layers", 0) or 0) <= MAX_LAYERS:
        what = f"num_hidden_layers is {reprlib.repr(getattr(text, 'num_hidden_layers', None))}"
        raise UserError(what, where, f"a whole number from 1 to {MAX_LAYERS}")
    wrapper = find_wrapper_class(outer, config, where) if wrapped else None
    try:
        with _silence_transformers(), torch.device("meta"):
            model = causal(text)
            around = wrapper(outer) if wrapper else model
    except Exception as error:  # whatever a model class objects to
        what = f"transformers can't build {causal.__name__} of it: {_first_line(error)}"
        raise UserError(what, where, FETCH) from None
    layers = {name: each for name, each in model.named_modules() if isinstance(each, GradientCheckpointingLayer)}
    layers = {name: each for name, each in layers.items() if re.fullmatch(r"model\.layers\.\d+", name)}
    if not layers or not all(name in model._fsdp_plan for name in ("model.embed_tokens", "model.layers.*")):
        what = f"{causal.__name__} can't be sharded: transformers' FSDP plan does not name its layers"
        raise UserError(what, where, "use a model whose decoder layers are model.layers.N, as most have them")
    if single := [name for name, each in model.state_dict().items() if each.ndim == 0]:
        what = f"{causal.__name__} is not supported: {single[0]} is a single number, which the loader does not read"
        raise UserError(what, where, "models that were tried are in docs/families.md")
    spelled, skipped = _trace_spellings(model, around, where)

    modules, parts = dict(model.named_modules()), _assign_parts(model, layers)
    outside: list[Any] = []
    by_layer: dict[int, list[Any]] = {number: [] for number in range(len(layers))}
    buffers = {name for name, _ in model.named_buffers()}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied
            continue
        seen.add(id(tensor))
        owner, _, leaf = name.rpartition(".")
        entry = {"name": name, "shape": list(tensor.shape), "part": parts[name], "stored": spelled[name]}
        entry |= {"linear": True} if leaf == "weight" and type(modules[owner]) is nn.Linear else {}
        entry |= {"buffer": True} if name in buffers else {}
        entry |= {"transposed": True} if tensor.ndim == 3 and getattr(modules[owner], "is_transposed", False) else {}
        if match := re.match(r"model\.layers\.(\d+)\.", name):
            number = match[1]
            entry["name"] = name.removeprefix(match[0])
            entry["stored"] = [
                [[re.sub(rf"(?<=\.){number}(?=\.)", "@", piece[0], count=1), *piece[1:]] for piece in one]
                for one in entry["stored"]
            ]
            by_layer[int(number)].append(entry)
        else:
            outside.append(entry)
    kinds: list[Any] = []
    order = []
    for entries in by_layer.values():
        if entries not in kinds:
            kinds.append(entries)
        order.append(kinds.index(entries))
    experts = max(
        (e["shape"][0] for k in kinds for e in k if e["part"] == "experts" and len(e["shape"]) == 3), default=0
    )
    vocab, hidden = model.get_input_embeddings().weight.shape
    heads, kv_heads = (
        max((getattr(each, key, None) or 0) for each in getattr(text, "per_layer_config", None) or [text])
        for key in ("num_attention_heads", "num_key_value_heads")
    )
    dims = {"layers": len(layers), "hidden": hidden, "vocab": vocab, "heads": heads or 1, "kv_heads": kv_heads or heads}
    if experts:
        top_k = next((getattr(text, key) for key in TOP_K if getattr(text, key, None)), None)
        if type(top_k) is not int or top_k > experts:
            raise UserError(f"each token visits {top_k} of {experts} experts", where, "check num_experts_per_tok")
        dims |= {"experts": experts, "top_k": top_k}
    types = [*(getattr(text, "layer_types", None) or ()), *[""] * len(layers)]
    odd = [
        kind in NO_FORMULA_TYPES or any(NO_FORMULA.search(type(each).__name__) for each in layer.modules())
        for kind, layer in zip(types, layers.values(), strict=False)
    ]
    attention = ["eager", *(kind for kind, flag in KINDS.items() if getattr(model, flag, False))]
    found = {
        "config": hash_config(config),
        "transformers": transformers.__version__,
        "model_type": text.model_type,
        "class": causal.__name__,
        "layers": list(dict.fromkeys(type(each).__name__ for each in layers.values())),
        "wrapper": wrapper.__name__ if wrapper else None,
        "skipped": skipped,
        "ignored": sorted(causal._keys_to_ignore_on_load_unexpected or ()),
        "attention": attention,
        "peft_takes": sorted(_names_mistaken_by_peft(text.model_type)),
        **_try_out(causal, text, "sdpa" if "sdpa" in attention else "eager"),
        "expert_parallel": bool(model.ep_plan),
        "expert_adapters": all(map(_is_adaptable, filter(_is_experts, model.modules()))),
        "without_formula": sum(odd),
        "dims": dims,
        "outside": outside,
        "kinds": kinds,
        "order": order,
    }
    if any(odd) and found["logits"]:  # else it is refused. One layer of each kind; the model is used up by it
        first = {kind: number for number, kind in reversed([*enumerate(order)]) if odd[number]}
        with contextlib.suppress(Exception), _silence_transformers():  # what can't be traced is estimated as attention
            traced = trace_layers(model, [*first.values()])
            found["traced"] = {str(kind): traced[number] for kind, number in first.items()}
    return found


# --- which classes ------------------


def _read_config(config: Mapping[str, Any], where: str) -> Any:
    model_type: Any = config.get("model_type")
    known = transformers.CONFIG_MAPPING
    if config.get("auto_map") and isinstance(model_type, str) and model_type not in known:
        what = (
            f"{model_type!r} is code that comes with the checkpoint, but windlass only shards transformers' own models"
        )
        raise UserError(what, where, "use a model that transformers has, or that was converted to one")
    inner = config.get("text_config")
    inner = inner.get("model_type") if isinstance(inner, dict) else None
    types = (model_type, inner or model_type)
    if unknown := [each for each in types if not isinstance(each, str) or each not in known]:
        what = f"unknown model type {reprlib.repr(unknown[0])}"
        hint = f"transformers {transformers.__version__} builds what windlass trains: a newer one may know it"
        raise UserError(what, where if unknown[0] == model_type else f"{where}: text_config", hint)
    try:
        with _silence_transformers():
            return known[model_type].from_dict({k: v for k, v in config.items() if k != "quantization_config"})
    except Exception as error:  # whatever a config class objects to
        what = f"transformers' {known[model_type].__name__} refuses it: {_first_line(error)}"
        raise UserError(what, where, FETCH) from None


def find_model_class(text: Any, config: Mapping[str, Any], where: str) -> Any:
    """Return the causal language model's class of this config; encoders and encoder-decoders have none."""
    name: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    stem = type(text).__name__.removesuffix("Config")
    names = [name if isinstance(name, str) else "", f"{stem}ForCausalLM", f"{stem.removesuffix('Text')}ForCausalLM"]
    classes = [getattr(transformers, each, None) for each in names if each]
    found = [each for each in classes if each is not None and isinstance(text, each.config_class)]
    if not found and isinstance(name, str) and text.model_type == config.get("model_type", text.model_type):
        found = [each for each in classes[:1] if each is not None]  # another family's class, as transformers says
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    use = "use a decoder-only causal language model, such as llama, qwen3, mistral or gemma3"
    if getattr(text, "is_encoder_decoder", False):
        raise UserError(f"{text.model_type} is an encoder-decoder, and windlass trains decoders", where, use)
    if not found:
        what = f"transformers has no causal language model of type {text.model_type}"
        raise UserError(what, where, use)
    if (
        getattr(text, "is_decoder", None) is False
        and text.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    ):
        what = f"{text.model_type} is an encoder: it does not predict the next token"
        raise UserError(what, where, use)
    if text.model_type == config.get("model_type") and architecture not in ("", found[0].__name__):
        what = f"architectures is {architecture!r}, and windlass trains adapters of {found[0].__name__}"
        raise UserError(what, where, "give the folder of the causal language model itself")
    return found[0]


def find_wrapper_class(outer: Any, config: Mapping[str, Any], where: str) -> Any:
    """Return the multimodal class around the language model."""
    mapped = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(outer.model_type)
    for name in [*(config.get("architectures") or ()), mapped]:
        found = getattr(transformers, str(name), None)
        if found is not None and isinstance(outer, found.config_class):
            return found
    what = f"transformers has no model with a language model in it of type {outer.model_type}"
    raise UserError(what, where, "give the folder of a language model, or of a model that transformers has")


def _names_mistaken_by_peft(model_type: str) -> Iterable[str]:
    """Return module names that PEFT mistakes for this family's routed experts, wherever they are."""
    family = peft_conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    fused = peft_conversion._MOE_FUSED_TARGETS.get(family)
    if not fused or get_checkpoint_conversion_mapping(model_type) is None:
        return ()
    names: Iterable[str] = peft_conversion._MOE_TARGET_MODULE_MAPPING[family]
    return names


# --- parts, by the modules that parameters are of ------------------


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_concatenated") or type(module).__name__.endswith("Experts")


def _assign_parts(model: Any, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the part of the model that each state belongs to."""
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    found = {}
    for name in model.state_dict():
        owner = modules[name.rpartition(".")[0]]
        layer = next((each for each in layers if name.startswith(f"{each}.")), None)
        if "Norm" in type(owner).__name__:
            found[name] = "norm"
        elif layer is None:
            found[name] = "head" if owner is head else "embedding" if isinstance(owner, nn.Embedding) else "mlp"
        else:
            found[name] = _part_in_layer(layers[layer], name.removeprefix(f"{layer}.").split("."))
    return found


def _part_in_layer(layer: nn.Module, path: list[str]) -> str:
    chain = [layer.get_submodule(".".join(path[: i + 1])) for i in range(len(path) - 1)]
    if not chain:
        return "norm"  # a scale of the layer's own
    if any(map(_is_experts, chain)):
        return "experts"
    if ATTENTION.search(type(chain[0]).__name__):
        return "attention"
    routed = any(map(_is_experts, layer.modules()))
    if routed and any(map(_is_experts, chain[0].modules())):  # next to experts: a router, or experts for every token
        linears = sum(isinstance(each, nn.Linear) for each in chain[1].modules()) if len(chain) > 1 else 0
        return "shared_experts" if linears > 1 else "router"
    return "shared_experts" if routed else "mlp"


# --- how files spell parameters ------------------


class _Views(TorchFunctionMode):
    """Skips copies, so that what a conversion makes of a parameter stays a view of it if possible."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.contiguous, Tensor.clone) else func(*args, **(kwargs or {}))


def _trace_spellings(model: Any, around: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return how files store each of the model's states, and patterns for all other names.

    One way is a list of [stored name, shape, offset in the parameter]; # in a name counts along the first dimension.
    """
    inner = next(name for name, each in around.named_modules() if type(each) is type(model.model))
    # In the model around it -> in the language model.
    names = {name: name for name in model.state_dict()} if around is model else {}
    outputs = next((name for name, each in around.named_modules() if each is around.get_output_embeddings()), "")
    head = next((name for name, each in model.named_modules() if each is model.get_output_embeddings()), "")
    own = set(model.state_dict())
    for name in around.state_dict():
        if name.startswith(f"{inner}.") and f"model.{name.removeprefix(f'{inner}.')}" in own:
            names[name] = f"model.{name.removeprefix(f'{inner}.')}"
        elif outputs and name.startswith(f"{outputs}.") and f"{head}.{name.removeprefix(f'{outputs}.')}" in own:
            names[name] = f"{head}.{name.removeprefix(f'{outputs}.')}"
    state: dict[str, Tensor] = {}
    for name, tensor in around.state_dict(keep_vars=True).items():  # a tied one once
        if all(tensor is not other for other in state.values()):
            state[name] = tensor
    names = {name: ours for name, ours in names.items() if name in state}
    mine = {state[name].untyped_storage()._cdata: (name, state[name]) for name in names}
    found: dict[str, Any] = {
        ours: [[[name, list(state[name].shape), [0] * state[name].ndim]]] for name, ours in names.items()
    }
    with _Views(), torch.no_grad():
        stored = revert_weight_conversion(around, dict(state))
    pieces: dict[str, list[Any]] = {}
    others = [name for name in state if name not in names]
    for key, view in stored.items():
        if (whole := mine.get(view.untyped_storage()._cdata)) is None:
            if all(tensor.untyped_storage()._cdata != view.untyped_storage()._cdata for tensor in state.values()):
                what = f"transformers makes {key} in a way that can't be read in parts"
                raise UserError(what, where, "load it with transformers and save it again: save_pretrained(FOLDER)")
            others.append(key)
            continue
        name, tensor = whole
        steps = tensor.stride()[tensor.ndim - view.ndim :]
        if any(size > 1 and a != b for size, a, b in zip(view.shape, view.stride(), steps, strict=True)):
            what = f"{key} is stored transposed or interleaved, which windlass does not undo"
            raise UserError(what, where, "load it with transformers and save it unconverted")
        offset, rest = [], view.storage_offset() - tensor.storage_offset()
        for step in tensor.stride():
            offset.append(rest // step)
            rest %= step
        pieces.setdefault(names[name], []).append([key, list(view.shape), offset])
    for ours, each in pieces.items():
        one = _count(each)
        if one not in found[ours]:
            found[ours].insert(0, one)
    for ours, ways in found.items():  # its own name needs no saying
        found[ours] = [way for way in ways if way[0][0] != ours]
    language = [*names, *(key for key, view in stored.items() if view.untyped_storage()._cdata in mine)]
    return found, _find_prefixes(others, language)


def _count(pieces: list[Any]) -> list[Any]:
    """Merge pieces that differ only by their number along the first dimension."""
    if len(pieces) == 1:
        return pieces
    found: dict[str, list[Any]] = {}
    for key, shape, offset in pieces:
        found.setdefault(re.sub(rf"(?<=\.experts\.){offset[0]}(?=\.)", "#", key), []).append([key, shape, offset])
    return [[name, each[0][1], each[0][2]] for name, each in found.items()]


def _find_prefixes(others: list[str], language: list[str]) -> list[str]:
    """Return, as regular expressions, prefixes of names that no parameter of the language model has."""
    found = set()
    for name in others:
        steps = name.split(".")
        for i in range(1, len(steps) + 1):
            start = ".".join(steps[:i])
            if not any(each == start or each.startswith(f"{start}.") for each in language):
                found.add(re.escape(start) + r"(\..+)?")
                break
    return sorted(found)


# --- packed documents ------------------


def _try_out(causal: Any, text: Any, attention: str) -> dict[str, Any]:
    """Test on a small model whether packed documents are isolated, and whether its logits are what the loss assumes.
    None if it can't be tested."""
    try:
        with _silence_transformers():
            small = type(text).from_dict(shrink_config(text.to_dict()), attn_implementation=attention)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = causal(small).float().eval()
                ids = torch.randint(16, 500, (1, 24))
        other = ids.clone()
        other[0, :12] = (ids[0, :12] + 7) % 500
        positions = torch.arange(12).repeat(2)[None]
        uncalled = _watch_float32(model)
        with torch.no_grad(), _silence_transformers():
            one, two = (model(input_ids=each, position_ids=positions, use_cache=False).logits for each in (ids, other))
            scale, cap = read_logit_shaping(small)
            states = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(states) * scale
        logits = cap * torch.tanh(logits / cap) if cap else logits
        rounding, change = LEAKS * one.abs().max(), (one - two).abs().amax(-1)[0]
        if change[:12].max() <= rounding:  # a model that does not react to its input proves nothing
            return UNTRIED
        idle = _find_untrainable(model, ids)
        isolates, same = bool(change[12:].max() <= rounding), bool((logits - one).abs().max() <= rounding)
        return {"isolates": isolates, "logits": same, "idle": idle, "shards": not uncalled}
    except Exception:  # a family that can't be shrunk: no proof
        return UNTRIED


def _watch_float32(model: Any) -> set[nn.Module]:
    """Return the modules that transformers keeps in float32, without those whose forward is called.

    FSDP2 gathers each of them before its forward: weights read in another way stay sharded.
    """
    kept = [re.compile(each.replace("*", ".*")) for each in model._get_dtype_plan(torch.bfloat16)]
    owners = {
        name.rpartition(".")[0] for name, _ in model.named_parameters() if any(each.search(name) for each in kept)
    }
    found = {model.get_submodule(name) for name in owners}
    for module in found:
        module.register_forward_pre_hook(lambda called, _: found.discard(called))
    return found


def _find_untrainable(model: Any, ids: Tensor) -> list[str]:
    """Return names of linear modules that get no gradient or that PEFT refuses."""
    reached = set[str]()

    def watch(leaf: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: reached.add(leaf))  # type: ignore[no-untyped-call]

        return hook

    linears = [(name.rpartition(".")[2], each) for name, each in model.named_modules() if type(each) is nn.Linear]
    for leaf, each in linears:
        each.register_forward_hook(watch(leaf))
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    for leaf in [*reached]:
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, leaf)
        except ValueError:
            reached.remove(leaf)
    return sorted({leaf for leaf, _ in linears} - reached)


def read_logit_shaping(config: Any) -> tuple[float, float | None]:
    """Return the factor of the head's product before the softmax, and its bound by tanh."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)


def _is_adaptable(experts: Any) -> bool:
    """Return whether these experts have the form that adapters are written for: two products, gate and up fused."""
    return getattr(experts, "has_gate", False) and not getattr(experts, "has_post_expert_norm", True)


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


def main(path: Path, where: str = "") -> None:
    try:
        text = sys.stdin.read() if str(path) == "-" else (path / "config.json" if path.is_dir() else path).read_text()
        print(json.dumps(derive(json.loads(text), where or str(path))))
    except UserError as error:
        print(json.dumps({"problems": [each.as_dict() for each in error.problems]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
