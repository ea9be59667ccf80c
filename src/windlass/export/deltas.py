"""Read an adapter's changes to the base's parameters from PEFT's format, and check them against the model's shapes.

LoRA: W + s BA. DoRA: the same with its rows rescaled to a trained length. A parameter that was trained in full (a bias,
a module of `modules_to_save`) is replaced. Anything else is refused: a merge must not silently leave out a part of the
adapter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.export.source import CONFIG, AdapterSource
from windlass.model import Base, Parameter, Stored
from windlass.model.family import FUSED
from windlass.model.files import abbreviate, read_header
from windlass.model.saved_adapter import require_supported
from windlass.model.wrapped import KEY, PREFIX, inner_name, rename_config, rename_keys
from windlass.weights.reading import DTYPES, Files, read_tensor


@dataclass(frozen=True, slots=True)
class Delta:
    """One parameter's change: names and places of the factors, without values."""

    parameter: Parameter
    scale: float = 1.0  # alpha / r, or alpha / sqrt(r)
    a: Stored | None = None
    b: Stored | None = None
    magnitude: Stored | None = None
    replaced: Stored | None = None

    @property
    def experts(self) -> int:
        return self.parameter.shape[0] if len(self.parameter.shape) == 3 else 0


@dataclass(frozen=True, slots=True)
class Factors:
    """A delta's values in float32: A is [r, in] and B [out, r]; for stacked experts [E, r, in] and [E, out, r]."""

    delta: Delta
    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None

    def rows(self, expert: int, start: int, stop: int) -> Tensor:
        """Return s BA for some rows of one matrix."""
        a = self.a
        b = self.b
        if self.delta.experts:
            a = a[expert]
            b = b[expert]
        return (b[start:stop] @ a) * self.delta.scale


class Deltas:
    """All changes by parameter name. Values are read on demand, and a few are cached."""

    def __init__(self, by_name: Mapping[str, Delta]) -> None:
        self.by_name = by_name
        self.files = Files()
        self.factors = lru_cache(maxsize=4)(self._factors)  # experts stored one by one read it repeatedly

    def _factors(self, name: str) -> Factors:
        delta = self.by_name[name]
        if delta.replaced is not None:
            value = self._read(delta.replaced)
            return Factors(delta, value, value)
        a = self._read(delta.a)
        b = self._read(delta.b)
        if delta.experts:
            # PEFT's order: rows of A go by expert, then r; columns of B by r, then expert.
            a = a.reshape(delta.experts, -1, a.shape[-1])
            b = b.reshape(b.shape[0], -1, delta.experts).permute(2, 0, 1).contiguous()
        if delta.parameter.transposed:  # (B A)^T = A^T B^T
            a, b = b.mT.contiguous(), a.mT.contiguous()
        return Factors(delta, a, b, None if delta.magnitude is None else self._read(delta.magnitude).reshape(-1))

    def _read(self, stored: Stored | None) -> Tensor:
        return torch.empty(0) if stored is None else read_tensor(stored, self.files).float()


def read_deltas(source: AdapterSource, base: Base) -> Deltas:
    """Assign every tensor of the adapter to its parameter, or raise one error that lists what does not fit."""
    require_supported(source.config, str(source.folder / CONFIG))
    saved = read_header(source.weights)
    if not saved:
        hint = "export from another checkpoint of the run"
        raise UserError("the adapter contains no tensors", str(source.weights), hint, "no-tensors")
    stored: Mapping[str, Stored] = saved
    config = source.config
    if base.wrapper:
        stored = rename_keys(saved, inner_name)
        config = config | rename_config(config, saved, inner_name)
    parameters = {parameter.name: parameter for parameter in base.parameters}
    pairs: dict[str, dict[str, Stored]] = {}  # module by PEFT's nested name -> kind -> tensor
    deltas: dict[str, Delta] = {}
    misfits: list[str] = []
    if len(stored) < len(saved):
        misfits.append("it has names of the language model and of the wrapper for the same")
    for key, tensor in stored.items():
        inner_key = key.removeprefix(PREFIX)
        match = KEY.fullmatch(inner_key)
        name = inner_key.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        if tensor.dtype not in DTYPES:
            misfits.append(_describe_misfit(key, tensor))
        elif match:
            pairs.setdefault(match["module"], {})[match["kind"]] = tensor
        elif name in parameters and parameters[name].shape == tensor.shape:
            deltas[name] = Delta(parameters[name], replaced=tensor)
        else:
            misfits.append(_describe_misfit(key, tensor))
    for module, kinds in pairs.items():
        delta = _make_delta(module, kinds, parameters, config)
        if isinstance(delta, str):
            misfits.append(delta)
        elif delta.parameter.name in deltas and not _is_copy(deltas[delta.parameter.name]):
            misfits.append(f"{delta.parameter.name} is adapted twice: by a pair, and by other weights below it")
        else:
            deltas[delta.parameter.name] = delta
    if misfits:
        hint = f"is {base.name} the model that it was trained on? Name the right one: --base DIR"
        problem = f"the adapter does not fit this model ({len(misfits)}): {abbreviate(misfits)}"
        raise UserError(problem, str(source.weights), hint, "adapter-misfit")
    return Deltas(deltas)


def _is_copy(delta: Delta) -> bool:
    """Return whether weights that an adapter brings along are the base's own: PEFT saves an adapted head with it."""
    stored = [*(piece.stored for piece in delta.parameter.pieces), delta.replaced]
    if len(stored) != 2 or delta.replaced is None:
        return False
    with Files() as files:
        base, brought = (read_tensor(each, files).float() for each in stored if each is not None)
    return torch.equal(base, brought)


def _describe_misfit(key: str, tensor: Stored) -> str:
    return f"{key} ({tensor.dtype} {list(tensor.shape)}) belongs to no parameter of it"


def _make_delta(
    module: str, kinds: Mapping[str, Stored], parameters: Mapping[str, Parameter], config: Mapping[str, Any]
) -> Delta | str:
    """Return the change that one LoRA pair makes, or why it makes none."""
    from peft.utils.other import get_pattern_key

    a = kinds.get("lora_A")
    b = kinds.get("lora_B")
    magnitude = kinds.get("lora_magnitude_vector")
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
        return f"{module} has {', '.join(sorted(kinds))}, not a pair of matrices lora_A and lora_B"
    module = module.replace(".base_layer", "")  # PEFT nests adapters of two parameters of one module
    # PEFT's names don't say which fused parameter of an experts module it is; the sizes do.
    candidates = [parameters.get(f"{module}.{leaf}") for leaf in ("weight", *dict.fromkeys(FUSED.values()))]
    sides = {True: (a.shape[1], b.shape[0]), False: (b.shape[0], a.shape[1])}  # of a transposed one; of any other
    parameter = candidates[0] or next((p for p in candidates if p and p.shape[-2:] == sides[p.transposed]), None)
    if parameter is None:
        sizes = f"{a.shape[1]} -> {b.shape[0]}"
        return f"{module} is not a module of this model, or its adapter is of other sizes ({sizes})"
    experts = parameter.shape[0] if len(parameter.shape) == 3 else 1
    r, rest = divmod(a.shape[0], experts)
    if sides[parameter.transposed] != parameter.shape[-2:] or a.shape[0] != b.shape[1] or rest:
        return f"{module} is {list(parameter.shape)}, its adapter {list(b.shape)} x {list(a.shape)}"
    # r and alpha, by PEFT's own rule for its patterns
    targeted = any(parameter.name.endswith(name) for name in config.get("target_parameters") or ())
    key = parameter.name if targeted else module
    r_by_pattern = config.get("rank_pattern") or {}
    alpha_by_pattern = config.get("alpha_pattern") or {}
    configured = int(r_by_pattern.get(get_pattern_key(r_by_pattern.keys(), key), config["r"]))
    alpha = float(alpha_by_pattern.get(get_pattern_key(alpha_by_pattern.keys(), key), config["lora_alpha"]))
    if configured != r:
        return f"{module} has rank {r}, and {CONFIG} has {configured}"
    if bool(config.get("use_dora")) != (magnitude is not None):
        return f"{module}: use_dora is {bool(config.get('use_dora'))} in {CONFIG}, and not in the weights"
    if magnitude is not None and math.prod(magnitude.shape) != parameter.shape[0]:
        return f"{module} has {parameter.shape[0]} rows, and DoRA's magnitude {math.prod(magnitude.shape)}"
    scale = alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r
    return Delta(parameter, scale, a, b, magnitude)
