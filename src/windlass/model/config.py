"""config.json -> family, sizes and the list of parameters, with everything that is wrong in it reported at once."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.model.family import FAMILIES, WRAPPERS, Family, Weight, Wrapper
from windlass.model.parameters import Parameter

# Far above any model, and low enough that a typing error does not make a list of a billion parameters.
MAX_LAYERS: Final = 4096
MAX_SIZE: Final = 2**24


@dataclass(frozen=True, slots=True)
class Described:
    """What config.json says of a model."""

    family: Family
    wrapper: Wrapper | None
    config: dict[str, Any]  # the text model's
    dims: dict[str, int]
    routed: frozenset[int]  # layers with routed experts
    tied: bool
    wrapper_tied: bool
    quantization: dict[str, Any] | None


def describe(config: Mapping[str, Any], where: str) -> Described:
    """Everything that windlass takes from a model's config.json, or one error that lists all of its faults."""
    # The language model's part, and the wrapper around it if there is one
    model_type = config.get("model_type")
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    text = config.get("text_config") if wrapper else config
    if wrapper and not isinstance(text, dict):
        problem = f"{wrapper.architecture} has its language model in text_config, and there is none"
        raise UserError(problem, where, "fetch config.json again from where the model was published")
    assert text is not None
    place = f"{where}: text_config" if wrapper else where
    family = _family(text, place)

    problems = [*_other_architecture(config, wrapper, family, where)]
    quantization = config.get("quantization_config")
    if quantization is None:
        quantization = text.get("quantization_config")
    problems += _quantization(quantization, f"{where}: quantization_config")
    tied = text.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        problems.append(Problem(f"tie_word_embeddings is {_shown(tied)}", place, "true or false"))
    dims, faults = _dims(family, text, place)
    listed = (text.get(family.dense_list) or []) if family.dense_list else []
    if not isinstance(listed, list | tuple) or not all(map(_is_int, listed)):
        faults.append(Problem(f"{family.dense_list} is {_shown(listed)}", place, "a list of layer numbers"))
    raise_all([*problems, *(faults or _contradictions(dims, place))])

    routed: frozenset[int] = frozenset()
    if "experts" in dims:
        first, step, dense = dims.get("first_dense", 0), dims.get("sparse_step", 1), set(listed)
        routed = frozenset(i for i in range(first, dims["layers"]) if (i + 1) % step == 0 and i not in dense)
    dims |= {"dense_layers": dims["layers"] - len(routed), "moe_layers": len(routed)}
    outer = wrapper is not None and config.get("tie_word_embeddings") is True
    return Described(family, wrapper, dict(text), dims, routed, tied is True, outer, quantization)


def list_parameters(described: Described, *, tied: bool) -> Iterator[Parameter]:
    """Every parameter of the causal language model, with the name and shape that it has in transformers."""
    dims = described.dims
    layer = {kind: tuple(_layer(described.family.weights, dims, kind)) for kind in ("moe", "dense")}
    yield Parameter("model.embed_tokens.weight", (dims["vocab"], dims["hidden"]), "embedding")
    for index in range(dims["layers"]):
        for name, shape, part in layer["moe" if index in described.routed else "dense"]:
            yield Parameter(f"model.layers.{index}.{name}", shape, part)
    yield Parameter("model.norm.weight", (dims["hidden"],), "norm")
    if not tied:
        yield Parameter("lm_head.weight", (dims["vocab"], dims["hidden"]), "head")


def _layer(
    weights: tuple[Weight, ...], dims: Mapping[str, int], kind: str
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for weight in weights:
        if weight.layers not in ("all", kind):
            continue
        if (weight.when and not dims[weight.when]) or (weight.unless and dims[weight.unless]):
            continue
        shape = tuple(dims[name] for name in weight.shape)
        yield weight.name, shape, weight.part
        if weight.bias and dims.get(weight.bias):
            yield f"{weight.name.removesuffix('weight')}bias", shape[:1], weight.part


def _family(text: Mapping[str, Any], place: str) -> Family:
    model_type = text.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    known = [*FAMILIES, *WRAPPERS]
    if not isinstance(model_type, str):
        problem = "it has no model_type" if model_type is None else f"model_type is {_shown(model_type)}"
        raise UserError(problem, place, f"is this a model's config.json? Known model types: {', '.join(known)}")
    close = difflib.get_close_matches(model_type[:80], known, 3, 0.5)
    nearest = f"nearest: {', '.join(close)}; " if close else ""
    raise UserError(f"unknown model type {_shown(model_type)}", place, f"{nearest}known: {', '.join(known)}")


def _other_architecture(
    config: Mapping[str, Any], wrapper: Wrapper | None, family: Family, where: str
) -> Iterator[Problem]:
    """A classifier or a bare encoder has the same model_type, and other weights."""
    named = config.get("architectures")
    wanted = wrapper.architecture if wrapper else family.causal_lm
    first = named[0] if isinstance(named, list) and named else named
    if first is None or first == [] or (isinstance(first, str) and first.lower() == wanted.lower()):
        return
    problem = f"architectures is {_shown(first)}, and windlass trains adapters of {wanted}"
    yield Problem(problem, where, "give the folder of the causal language model itself")


def _quantization(quantization: Any, where: str) -> Iterator[Problem]:
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        hint = "windlass reads fp8 (one scale a tensor, an expert or a block) and 16- or 32-bit weights"
        yield Problem(f"unsupported quantisation {_shown(method)}", where, hint)
        return
    block = quantization.get("weight_block_size")
    good = isinstance(block, list) and len(block) == 2 and all(_is_int(side) and side > 0 for side in block)
    if block is not None and not good:
        yield Problem(f"weight_block_size is {_shown(block)}", where, "two positive whole numbers, or null")


def _dims(family: Family, text: Mapping[str, Any], place: str) -> tuple[dict[str, int], list[Problem]]:
    """All sizes of the family, and what is wrong with those that config.json gives."""
    dims: dict[str, int] = {}
    problems: dict[str, Problem] = {}
    for name, size in family.sizes.items():
        key = next((key for key in size.keys if key in text), None)
        value = text[key] if key else None
        if value is not None:
            most = MAX_LAYERS if name == "layers" else MAX_SIZE
            if size.flag:
                fault = "" if isinstance(value, bool) else "true or false"
            else:
                good = _is_int(value) and size.least <= value <= most
                fault = "" if good else f"a whole number from {size.least} to {most}"
            if fault:
                problems[str(key)] = Problem(f"{key} is {_shown(value)}", place, fault)
            else:
                dims[name] = int(value)
        elif size.default is None or (size.keys and size.required and key is None):
            problem = f"{size.keys[0]} is {'null' if key else 'missing'}"
            problems[problem] = Problem(problem, place, "fetch config.json again from where the model was published")
        elif isinstance(size.default, int):
            dims[name] = size.default
        else:
            with contextlib.suppress(KeyError):  # of a size that is itself at fault, and reported
                dims[name] = size.default(dims)
    if not problems:
        dims |= {name: compute(dims) for name, compute in family.derived.items()}
    return dims, list(problems.values())


def _contradictions(dims: Mapping[str, int], place: str) -> Iterator[Problem]:
    heads, kv_heads = dims["heads"], dims["kv_heads"]
    if heads % kv_heads:
        problem = f"{heads} attention heads can't share {kv_heads} heads of keys and values"
        yield Problem(problem, place, "num_attention_heads is a multiple of num_key_value_heads")
    if not dims["head_dim"]:
        problem = f"hidden_size {dims['hidden']} is less than the {heads} attention heads"
        yield Problem(problem, place, "check the two")
    if dims.get("top_k", 0) > dims.get("experts", 0):
        problem = f"each token visits {dims['top_k']} of {dims['experts']} experts"
        yield Problem(problem, place, "check num_experts_per_tok")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """Whatever was there, in one line. Python refuses to print a number of ten thousand digits."""
    if _is_int(value) and not -(10**20) < value < 10**20:
        return "a number of more than 20 digits"
    if isinstance(value, dict | list):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
