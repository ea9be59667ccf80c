"""Turn config.json into a `Base` with every parameter of the language model, or report all its faults at once."""

import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.model import compressed
from windlass.model.derived import find_description, read_description
from windlass.model.description import FETCH, MAX_LAYERS
from windlass.model.family import FAMILIES, WRAPPERS, Family, Wrapper, evaluate_expression
from windlass.model.parameters import Base, Parameter, Spelling

MAX_SIZE: Final = 2**24  # far above any model's
# RoPE types and the keys that each needs: without them, a model would fail when it is loaded.
ROPE: Final = {
    "default": (),
    "proportional": (),
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
READS: Final = (
    "name the 16-bit model that it was made of, with layout.base_dtype: nf4 if memory is short; "
    "windlass reads fp8, mxfp4, bitsandbytes' nf4 and compressed-tensors as published"
)


def describe(config: Mapping[str, Any], where: str, name: str = "", folder: Path | None = None) -> Base:
    """Return the model that a config.json describes, without stored tensors.

    It comes from a table of families.toml, which needs no torch, or else from a description of the model that
    transformers would build: shipped, next to the model, cached, or derived if torch is installed.
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    text = config
    place = where
    if wrapper:
        text = config.get("text_config") or {}
        place = f"{where}: text_config"
        if not isinstance(text, dict):
            raise UserError(
                f"text_config is {reprlib.repr(text)}, not the language model's config",
                where,
                FETCH,
                "wrong-config-value",
            )
    if not text.get("model_type"):
        raise UserError("it has no model_type", place, FETCH, "no-model-type")
    family = FAMILIES.get(str(text.get("model_type")))
    quantization, problems = _read_quantization(config, text, where)
    if family is None or not family.covers(text):
        raise_all(problems)
        return read_description(find_description(config, where, folder), config, name, quantization)

    # A classifier or a bare encoder has the same model_type but other weights.
    architecture = wrapper.architecture if wrapper else family.causal_lm
    written = config.get("architectures")
    if isinstance(written, list) and written:
        written = written[0]
    if written and str(written).lower() != architecture.lower():
        problem = f"architectures is {reprlib.repr(written)}, and windlass trains adapters of {architecture}"
        problems.append(
            Problem(problem, where, "give the folder of the causal language model itself", "other-architecture")
        )

    dims, faults = _read_sizes(family, text)
    tied = text.get("tie_word_embeddings", False)
    if not isinstance(tied, bool | None):
        faults[f"tie_word_embeddings is {reprlib.repr(tied)}"] = "true or false"
    for key in ("rope_scaling", "rope_parameters"):
        faults |= dict.fromkeys(_check_rope(key, text.get(key)), FETCH)
    raise_all([*problems, *(Problem(problem, place, hint, "wrong-config-value") for problem, hint in faults.items())])

    return Base(
        name=name,
        path=None,
        family=family,
        config=dict(text),
        dims=dims,
        parameters=tuple(_list_parameters(family, dims, tied is True, wrapper)),
        wrapper=wrapper,
        quantization=quantization,
        notes=(quantization or {}).get("notes", ()),
    )


def _check_rope(key: str, rope: Any) -> Iterator[str]:
    if not isinstance(rope, dict | None):
        yield f"{key} is {reprlib.repr(rope)}, not a table"
    if not isinstance(rope, dict) or not rope:
        return
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE:
        yield f"{key} has the rope_type {reprlib.repr(kind)}; there are {', '.join(ROPE)}"
        return
    for name in ROPE[kind]:
        value = rope.get(name)
        numbers = value if isinstance(value, list) and value and name.endswith("_factor") else [value]
        if not all(isinstance(number, int | float) and number > 0 for number in numbers):
            yield f"{key}.{name} is {'missing' if value is None else reprlib.repr(value)}, which {kind} needs"


def _read_quantization(config: Mapping[str, Any], text: Mapping[str, Any], where: str) -> tuple[Any, list[Problem]]:
    """Return the weights' quantization config, and its problems."""
    problems: list[Problem] = []
    quantization = config.get("quantization_config")
    if quantization is None:
        quantization = text.get("quantization_config")
    if quantization is not None:
        settings = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
        place = f"{where}: quantization_config"
        if compressed.is_compressed(settings):
            quantization, faults = compressed.read_compressed(settings, place)
            problems += faults
        else:
            problems += _check_quantization(settings, place)
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        key = next((key for key in ("dtype", "torch_dtype") if "float8" in str(table.get(key))), None)
        if key and quantization is None:
            problem = f"{key} is {reprlib.repr(table[key])} without a quantization_config: codes without their scales"
            problems.append(Problem(problem, where, f"{FETCH}; {READS}", "no-quantization-config"))
            break
    return quantization, problems


def _check_quantization(settings: Mapping[str, Any], where: str) -> Iterator[Problem]:
    method = settings.get("quant_method")
    if settings.get("load_in_4bit"):
        method = f"bitsandbytes {settings.get('bnb_4bit_quant_type') or 'fp4'}"
    elif method == "bitsandbytes":
        method = "bitsandbytes int8"
    if method not in ("fp8", "mxfp4", "bitsandbytes nf4"):
        yield Problem(f"unsupported quantization {reprlib.repr(method)}", where, READS, "unsupported-quantization")
        return
    block = settings.get("weight_block_size")
    pair = isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    if block is not None and not pair:
        yield Problem(
            f"weight_block_size is {reprlib.repr(block)}",
            where,
            "two positive whole numbers, or null",
            "wrong-config-value",
        )


def _list_parameters(
    family: Family, dims: Mapping[str, int], tied: bool, wrapper: Wrapper | None
) -> Iterator[Parameter]:
    """Yield every parameter of the causal language model, with its name and shape in transformers."""

    def parameter(name: str, shape: tuple[int, ...], part: str) -> Parameter:
        linear = name.endswith(".weight") and part in ("attention", "mlp", "shared_experts", "head")
        return Parameter(
            name, shape, part, linear=linear, spellings=tuple(_list_spellings(family, wrapper, name, shape, part))
        )

    layer: dict[str, list[tuple[str, tuple[int, ...], str]]] = {"moe": [], "dense": []}
    for kind, listed in layer.items():
        for weight in family.weights:
            needed = (not weight.when or dims[weight.when]) and not (weight.unless and dims[weight.unless])
            if weight.layers not in ("all", kind) or not needed:
                continue
            shape = tuple(evaluate_expression(size, dims) for size in weight.shape.split())
            listed.append((weight.name, shape, weight.part))
            if weight.bias and dims.get(weight.bias):
                listed.append((f"{weight.name.removesuffix('weight')}bias", shape[:1], weight.part))
    yield parameter("model.embed_tokens.weight", (dims["vocab"], dims["hidden"]), "embedding")
    for index in range(dims["layers"]):
        routed = "experts" in dims and index >= dims.get("first_dense", 0)
        for name, shape, part in layer["moe" if routed else "dense"]:
            yield parameter(f"model.layers.{index}.{name}", shape, part)
    yield parameter("model.norm.weight", (dims["hidden"],), "norm")
    if not tied:
        yield parameter("lm_head.weight", (dims["vocab"], dims["hidden"]), "head")


def _list_spellings(
    family: Family, wrapper: Wrapper | None, name: str, shape: tuple[int, ...], part: str
) -> Iterator[tuple[Spelling, ...]]:
    """Yield the ways in which files store a parameter of a family that has a row in families.toml."""
    leaf = name.rpartition(".")[2]
    for theirs, ours in wrapper.prefixes if wrapper else (("", ""),):
        if not name.startswith(ours):
            continue
        for new, old in (("", ""), *family.spellings):
            if new not in name:
                continue
            place = theirs + name.removeprefix(ours).replace(new, old)
            if place != name:
                yield (Spelling(place, shape, (0,) * len(shape)),)
            matrices = family.experts_on_disk.get(leaf, ()) if part == "experts" else ()
            if matrices:
                rows = shape[1] // len(matrices)
                place = place.removesuffix(leaf)
                yield tuple(
                    Spelling(f"{place}#.{matrix}.weight", (rows, shape[2]), (0, number * rows, 0))
                    for number, matrix in enumerate(matrices)
                )


def _read_sizes(family: Family, text: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
    """Return all sizes of the family, and the faults in config.json's sizes, each with its hint."""
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
            least = 0 if size.default == "0" else 1
            if type(value) is int and least <= value <= most:
                dims[name] = value
            else:
                faults[f"{key} is {reprlib.repr(value)}"] = f"a whole number from {least} to {most}"
        elif not size.default or (size.keys and size.required and key is None):
            faults[f"{size.keys[0]} is {'null' if key else 'missing'}"] = FETCH
        elif not faults:  # a faulty size may be missing from `dims`
            dims[name] = evaluate_expression(size.default, dims)
    if not faults:
        if dims["heads"] % dims["kv_heads"]:
            problem = f"{dims['heads']} attention heads can't share {dims['kv_heads']} heads of keys and values"
            faults[problem] = "num_attention_heads is a multiple of num_key_value_heads"
        if dims.get("top_k", 0) > dims.get("experts", 0):
            faults[f"each token visits {dims['top_k']} of {dims['experts']} experts"] = "check num_experts_per_tok"
    return dims, faults
