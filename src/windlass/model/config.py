"""config.json -> a `Base` with every parameter of the language model, or everything that is wrong in it at once."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.model.family import FAMILIES, WRAPPERS, Family
from windlass.model.parameters import Base, Parameter

# Far above any model, and low enough that a typing error does not make a list of a billion parameters.
MAX_LAYERS: Final = 4096
MAX_SIZE: Final = 2**24
FETCH: Final = "fetch config.json again from where the model was published"


def describe(config: Mapping[str, Any], where: str, name: str = "") -> Base:
    """The model that a config.json describes, without stored tensors.

    The only source of parameters and sizes: another way to describe a model than the rows of family.py plugs in here.
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    text, place = config, where
    if wrapper:
        text, place = config.get("text_config") or {}, f"{where}: text_config"
        if not isinstance(text, dict):
            raise UserError(f"text_config is {reprlib.repr(text)}, not the language model's config", where, FETCH)
    model_type = text.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = [*FAMILIES, *WRAPPERS]
        problem = f"unknown model type {reprlib.repr(model_type)}" if model_type else "it has no model_type"
        close = difflib.get_close_matches(str(model_type)[:80], known, 3, 0.5)
        nearest = f"nearest: {', '.join(close)}; " if close else ""
        raise UserError(problem, place, f"{nearest}known: {', '.join(known)}")
    problems: list[Problem] = []

    # A classifier or a bare encoder has the same model_type, and other weights.
    architecture = wrapper.architecture if wrapper else family.causal_lm
    named = config.get("architectures")
    named = named[0] if isinstance(named, list) and named else named
    if named and str(named).lower() != architecture.lower():
        problem = f"architectures is {reprlib.repr(named)}, and windlass trains adapters of {architecture}"
        problems.append(Problem(problem, where, "give the folder of the causal language model itself"))

    quantization = config.get("quantization_config")
    quantization = text.get("quantization_config") if quantization is None else quantization
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        spot = f"{where}: quantization_config"
        if method != "fp8":
            hint = "windlass reads fp8 (one scale a tensor, an expert or a block) and 16- or 32-bit weights"
            problems.append(Problem(f"unsupported quantisation {reprlib.repr(method)}", spot, hint))
        elif (block := quantization.get("weight_block_size")) is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
        ):
            problem = f"weight_block_size is {reprlib.repr(block)}"
            problems.append(Problem(problem, spot, "two positive whole numbers, or null"))

    dims, faults = _read_sizes(family, text)
    if not isinstance(tied := text.get("tie_word_embeddings", False), bool | None):
        faults[f"tie_word_embeddings is {reprlib.repr(tied)}"] = "true or false"
    raise_all([*problems, *(Problem(problem, place, hint) for problem, hint in faults.items())])

    return Base(
        name=name,
        path=None,
        family=family,
        config=dict(text),
        dims=dims,
        parameters=tuple(_list_parameters(family, dims, tied is True)),
        wrapper=wrapper,
        quantization=quantization,
    )


def _list_parameters(family: Family, dims: Mapping[str, int], tied: bool) -> Iterator[Parameter]:
    """Every parameter of the causal language model, with the name and shape that it has in transformers."""
    layer: dict[str, list[tuple[str, tuple[int, ...], str]]] = {"moe": [], "dense": []}
    for kind, listed in layer.items():
        for weight in family.weights:
            needed = (not weight.when or dims[weight.when]) and not (weight.unless and dims[weight.unless])
            if weight.layers not in ("all", kind) or not needed:
                continue
            shape = tuple(dims[size] for size in weight.shape.split())
            listed.append((weight.name, shape, weight.part))
            if weight.bias and dims.get(weight.bias):
                listed.append((f"{weight.name.removesuffix('weight')}bias", shape[:1], weight.part))
    yield Parameter("model.embed_tokens.weight", (dims["vocab"], dims["hidden"]), "embedding")
    for index in range(dims["layers"]):
        routed = "experts" in dims and index >= dims.get("first_dense", 0)
        for name, shape, part in layer["moe" if routed else "dense"]:
            yield Parameter(f"model.layers.{index}.{name}", shape, part)
    yield Parameter("model.norm.weight", (dims["hidden"],), "norm")
    if not tied:
        yield Parameter("lm_head.weight", (dims["vocab"], dims["hidden"]), "head")


def _read_sizes(family: Family, text: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
    """All sizes of the family; and what is wrong with those that config.json gives, each with its hint."""
    dims: dict[str, int] = {}
    faults: dict[str, str] = {}
    for name, size in family.sizes.items():
        key = next((key for key in size.keys if key in text), None)
        value = text[key] if key else None
        most = MAX_LAYERS if name == "layers" else MAX_SIZE
        if value is not None and size.flag:
            if not isinstance(value, bool):
                faults[f"{key} is {reprlib.repr(value)}"] = "true or false"
            dims[name] = int(value is True)
        elif value is not None:
            if type(value) is int and size.least <= value <= most:
                dims[name] = value
            else:
                faults[f"{key} is {reprlib.repr(value)}"] = f"a whole number from {size.least} to {most}"
        elif size.default is None or (size.keys and size.required and key is None):
            faults[f"{size.keys[0]} is {'null' if key else 'missing'}"] = FETCH
        elif not faults:  # else one that it goes by may be missing
            dims[name] = size.default(dims) if callable(size.default) else size.default
    if not faults:
        dims |= {name: compute(dims) for name, compute in family.derived.items()}
        if dims["heads"] % dims["kv_heads"]:
            problem = f"{dims['heads']} attention heads can't share {dims['kv_heads']} heads of keys and values"
            faults[problem] = "num_attention_heads is a multiple of num_key_value_heads"
        if dims.get("top_k", 0) > dims.get("experts", 0):
            faults[f"each token visits {dims['top_k']} of {dims['experts']} experts"] = "check num_experts_per_tok"
    return dims, faults
