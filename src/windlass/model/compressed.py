"""compressed-tensors' quantization_config, as llm-compressor writes it, in windlass's own terms."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from re import fullmatch
from typing import Any, Final, NamedTuple

from windlass.errors import Problem

METHOD: Final = "compressed-tensors"
# (format, type, bits, strategy) of weights that windlass reads, and the dtype that layout.base_dtype calls them by.
READ: Final = {
    **{
        (f"{form}-quantized", "float", 8, strategy): "fp8"
        for form in ("float", "naive")
        for strategy in ("tensor", "channel", "block")
    },
    ("nvfp4-pack-quantized", "float", 4, "tensor_group"): "nvfp4",
    **{("pack-quantized", "int", 4, strategy): "int4" for strategy in ("group", "channel")},
}
HINT: Final = (
    "name the 16-bit model that it was made of, with layout.base_dtype: nf4 if memory is short; of compressed-tensors "
    "windlass reads float-quantized in 8 bits, nvfp4-pack-quantized, and pack-quantized in 4 bits"
)
CODE: Final = "unsupported-quantization"


class Scheme(NamedTuple):
    """How config_groups says that weights are stored."""

    format: Any
    type: Any
    bits: Any
    strategy: Any
    block: tuple[int, int] | None
    group: int  # columns that share a scale; 0: a full row
    is_symmetric: bool

    @property
    def dtype(self) -> str | None:
        """Return the dtype that layout.base_dtype calls these weights by; None if windlass doesn't read them."""
        dtype = READ.get((self.format, self.type, self.bits, self.strategy))
        if dtype == "int4" and not self.is_symmetric:
            return "uint4"
        return dtype if self.is_symmetric else None

    def __str__(self) -> str:
        zeros = "" if self.is_symmetric else ", with zero points"
        return f"{self.format}, {self.type} of {self.bits} bits by {self.strategy}{zeros}"


def is_compressed(settings: Mapping[str, Any]) -> bool:
    return str(settings.get("quant_method")).lower().replace("_", "-") == METHOD


def read_compressed(settings: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return the config with windlass's keys, and its problems.

    quant_method: fp8 or a name of settings.FOUR_BITS · weight_block_size: as FP8 models' own configs have it ·
    group_size: columns that share a scale, 0 for a full row · published: the config as it is written · notes: what of
    it training leaves aside.
    """
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return {}, [Problem("config_groups is missing: compressed-tensors' weights have no scheme", where, HINT, CODE)]
    problems = list(_find_unsupported(settings, where))
    schemes: dict[Scheme, str] = {}
    for name, group in groups.items():
        place = f"{where}: config_groups.{name}"
        try:
            scheme = _read_scheme(group["weights"], group.get("format") or settings.get("format"))
        except (KeyError, TypeError, ValueError, AttributeError):
            text = f"its weights' scheme can't be read: {reprlib.repr(group)}"
            problems.append(Problem(text, place, HINT, CODE))
            continue
        if group["weights"].get("actorder") in ("group", "dynamic"):
            text = "actorder: group, whose columns are in another order than their scales"
            problems.append(Problem(text, place, HINT, CODE))
        elif scheme.dtype is None:
            problems.append(Problem(f"unsupported scheme: {scheme}", place, HINT, CODE))
        schemes.setdefault(scheme, name)
    if len(schemes) > 1 and not problems:
        listed = "; ".join(f"{name} is {scheme}" for scheme, name in schemes.items())
        problems.append(Problem(f"weights of several schemes: {listed}", where, HINT, CODE))
    if problems:
        return {}, problems
    (scheme,) = schemes
    return {
        "quant_method": scheme.dtype,
        "weight_block_size": list(scheme.block) if scheme.block else None,
        "group_size": scheme.group,
        "ignore": settings.get("ignore") or [],
        "published": dict(settings),
        "notes": tuple(_list_notes(settings, groups.values())),
    }, []


def _find_unsupported(settings: Mapping[str, Any], where: str) -> Iterator[Problem]:
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        text = f"sparse weights ({reprlib.repr(sparsity['format'])}), whose zeros are not stored"
        yield Problem(text, f"{where}: sparsity_config", HINT, CODE)
    if settings.get("transform_config"):
        text = "rotated weights, which are right only with rotations of what they are multiplied with"
        yield Problem(text, f"{where}: transform_config", HINT, CODE)


def _read_scheme(weights: Mapping[str, Any], form: Any) -> Scheme:
    """Read a group's scheme. Raises ValueError and the like if it can't be."""
    strategy = weights.get("strategy")
    group = weights.get("group_size")
    if strategy is None:  # compressed-tensors' defaults
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    sides: Any = weights.get("block_structure")
    if isinstance(sides, str):
        sides = [int(side) for side in sides.split("x")]
    if strategy == "block" and (len(sides) != 2 or min(sides) < 1):
        raise ValueError(sides)
    return Scheme(
        form,
        weights.get("type", "int"),
        weights.get("num_bits", 8),
        strategy,
        (sides[0], sides[1]) if strategy == "block" else None,
        int(group or 0) if strategy in ("group", "tensor_group") else 0,
        weights.get("symmetric", True) is True,
    )


def _list_notes(settings: Mapping[str, Any], groups: Any) -> Iterator[str]:
    if any(group.get(f"{side}_activations") for group in groups for side in ("input", "output")):
        yield "servers quantize this model's activations; training keeps the weights alone quantized"
    if settings.get("kv_cache_scheme"):
        yield "servers quantize this model's KV cache, which training has none of: its scales are not read"


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """Return whether the config leaves a module's weights in 16 bits: by its name, or a pattern after `re:`."""
    names = (module, f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}")
    for entry in ignore:
        pattern = entry.removeprefix("re:")
        if any(fullmatch(f"{pattern}.*", name) if pattern != entry else name == entry for name in names):
            return True
    return False
