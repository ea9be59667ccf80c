"""config.json -> family, sizes and the list of parameters, with everything that is wrong in it reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.errors import Problem, UserError, raise_all
from windlass.model.family import FAMILIES, WRAPPERS, Family, Size, Wrapper
from windlass.model.parameters import Parameter

# Far above any model, and low enough that a slip of the keyboard does not make a list of a billion parameters.
MOST_LAYERS = 4096
MOST = 2**24


@dataclass(frozen=True, slots=True)
class Described:
    """What config.json says."""

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
    wrapper, text, place = _unwrapped(config, where)
    family = _family(text, place)
    problems = [*_architecture(config, wrapper, family, where)]
    outermost = config if config.get("quantization_config") is not None else text
    quantization = outermost.get("quantization_config")
    problems += _quantization(quantization, where)
    dims, found = _dims(family, text, place)
    problems += found
    routed: frozenset[int] = frozenset()
    if not problems:
        problems += _contradictions(dims, place)
    if not problems:
        routed, found = _routed(family, dims, text, place)
        problems += found
    tied = text.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        problems.append(Problem(f"tie_word_embeddings is {_shown(tied)}", place, "true or false"))
    raise_all(problems)
    dims |= {"dense_layers": dims["layers"] - len(routed), "moe_layers": len(routed)}
    outer = wrapper is not None and config.get("tie_word_embeddings") is True
    return Described(family, wrapper, dict(text), dims, routed, tied is True, outer, quantization)


def list_parameters(described: Described, *, tied: bool) -> Iterator[Parameter]:
    """Every parameter of the causal language model, by the names and shapes it has in transformers."""
    dims, family = described.dims, described.family
    hidden, vocab = dims["hidden"], dims["vocab"]
    kinds = {kind: tuple(_layer(family, dims, kind)) for kind in ("moe", "dense")}
    yield Parameter("model.embed_tokens.weight", (vocab, hidden), "embedding")
    for index in range(dims["layers"]):
        for name, shape, part in kinds["moe" if index in described.routed else "dense"]:
            yield Parameter(f"model.layers.{index}.{name}", shape, part)
    yield Parameter("model.norm.weight", (hidden,), "norm")
    if not tied:
        yield Parameter("lm_head.weight", (vocab, hidden), "head")


def _layer(family: Family, dims: Mapping[str, int], kind: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for weight in family.weights:
        if weight.layers not in ("all", kind) or (weight.when and not dims[weight.when]):
            continue
        if weight.unless and dims[weight.unless]:
            continue
        shape = tuple(dims[name] for name in weight.shape)
        yield weight.name, shape, weight.part
        if weight.bias and dims.get(weight.bias):
            yield f"{weight.name.removesuffix('weight')}bias", shape[:1], weight.part


def _unwrapped(config: Mapping[str, Any], where: str) -> tuple[Wrapper | None, Mapping[str, Any], str]:
    """The text model's part of config.json, and the wrapper around it if there is one."""
    model_type = config.get("model_type")
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if wrapper is None:
        return None, config, where
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise UserError(
            f"{wrapper.architecture} holds its language model in text_config, and there is none",
            where,
            "fetch config.json again from where the model was published",
        )
    return wrapper, text, f"{where}: text_config"


def _family(text: Mapping[str, Any], place: str) -> Family:
    model_type = text.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    known = [*FAMILIES, *WRAPPERS]
    if not isinstance(model_type, str):
        said = "has no model_type" if model_type is None else f"model_type is {_shown(model_type)}"
        raise UserError(said, place, f"is this a model's config.json? Known model types: {', '.join(known)}")
    close = difflib.get_close_matches(model_type[:80], known, 3, 0.5)
    hint = f"nearest known: {', '.join(close)}; " if close else ""
    raise UserError(f"the model type {_shown(model_type)} is not known", place, f"{hint}all known: {', '.join(known)}")


def _architecture(config: Mapping[str, Any], wrapper: Wrapper | None, family: Family, where: str) -> Iterator[Problem]:
    """A classifier or a bare encoder has the same model_type, and other weights."""
    named = config.get("architectures")
    wanted = wrapper.architecture if wrapper else family.causal_lm
    first = named[0] if isinstance(named, list) and named else named
    if first is None or first == [] or (isinstance(first, str) and first.lower() == wanted.lower()):
        return
    yield Problem(
        f"architectures says {_shown(first)}, and windlass adapts {wanted}",
        where,
        "give the folder of the causal language model itself",
    )


def _quantization(said: Any, where: str) -> Iterator[Problem]:
    if said is None:
        return
    method = said.get("quant_method") if isinstance(said, dict) else said
    if method != "fp8":
        yield Problem(
            f"the weights are quantised by {_shown(method)}",
            f"{where}: quantization_config",
            "windlass reads fp8 (one scale a tensor, an expert or a block) and 16- or 32-bit weights",
        )
        return
    block = said.get("weight_block_size")
    good = isinstance(block, list) and len(block) == 2 and all(_whole(side) and side > 0 for side in block)
    if block is not None and not good:
        yield Problem(
            f"weight_block_size is {_shown(block)}",
            f"{where}: quantization_config",
            "two positive whole numbers, or null",
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dims(family: Family, text: Mapping[str, Any], place: str) -> tuple[dict[str, int], list[Problem]]:
    """All sizes of the family, and what is wrong with those that config.json gives."""
    dims: dict[str, int] = {}
    problems: dict[str, Problem] = {}
    for name, size in family.sizes.items():
        key = next((key for key in size.keys if key in text), None)
        value = text[key] if key else None
        if value is None:
            found = _absent(size, key, dims)
            if isinstance(found, int):
                dims[name] = found
            elif found:
                problems[found] = Problem(found, place, "fetch config.json again from where the model was published")
            continue
        fault = _fault(value, size, MOST_LAYERS if name == "layers" else MOST)
        if fault:
            problems[str(key)] = Problem(f"{key} is {_shown(value)}", place, fault)
        else:
            dims[name] = int(value)
    if not problems:
        dims |= {name: compute(dims) for name, compute in family.derived.items()}
    return dims, list(problems.values())


def _absent(size: Size, key: str | None, dims: Mapping[str, int]) -> int | str:
    """What a size is that config.json leaves out or gives as null; or what to say of it."""
    if size.otherwise is None or (size.keys and size.required and key is None):
        return f"{size.keys[0]} is {'null' if key else 'missing'}"
    if isinstance(size.otherwise, int):
        return size.otherwise
    try:
        return size.otherwise(dims)
    except KeyError:  # of a size that is itself at fault, and reported
        return ""


def _fault(value: Any, size: Size, most: int) -> str:
    if size.flag:
        return "" if isinstance(value, bool) else "true or false"
    if not _whole(value) or not size.least <= value <= most:
        return f"a whole number from {size.least} to {most}"
    return ""


def _shown(value: Any) -> str:
    """Whatever stood there, in one line. A number of ten thousand digits can't be turned into text at all."""
    if _whole(value) and not -(10**20) < value < 10**20:
        return "a number of more than 20 digits"
    if isinstance(value, dict | list):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)} entries"
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:60]}…"


def _contradictions(dims: Mapping[str, int], place: str) -> Iterator[Problem]:
    heads, kv_heads = dims["heads"], dims["kv_heads"]
    if heads % kv_heads:
        yield Problem(
            f"{heads} attention heads can't share {kv_heads} heads of keys and values",
            place,
            "num_attention_heads is a multiple of num_key_value_heads",
        )
    if not dims["head_dim"]:
        yield Problem(f"hidden_size {dims['hidden']} is less than the {heads} attention heads", place, "check the two")
    if dims.get("top_k", 0) > dims.get("experts", 0):
        yield Problem(
            f"each token visits {dims['top_k']} of {dims['experts']} experts", place, "check num_experts_per_tok"
        )


def _routed(
    family: Family, dims: Mapping[str, int], text: Mapping[str, Any], place: str
) -> tuple[frozenset[int], list[Problem]]:
    """The layers that have routed experts."""
    if "experts" not in dims:
        return frozenset(), []
    listed: Sequence[Any] = (text.get(family.dense_list) or ()) if family.dense_list else ()
    if not isinstance(listed, list | tuple) or not all(map(_whole, listed)):
        fault = Problem(f"{family.dense_list} is {_shown(listed)}", place, "a list of layer numbers")
        return frozenset(), [fault]
    first, step = dims.get("first_dense", 0), dims.get("sparse_step", 1)
    dense = set(listed)
    layers = (i for i in range(first, dims["layers"]) if (i + 1) % step == 0 and i not in dense)
    return frozenset(layers), []
