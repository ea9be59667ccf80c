"""What an adapter does to the base's parameters, read from PEFT's format and held against the model's shapes.

LoRA: W + s BA. DoRA: the rows of that, brought to a learnt length. A parameter that was trained whole (a bias, a
module of `modules_to_save`) is replaced. Anything else is refused: a merge that leaves a part of the adapter out
would be wrong without a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.errors import Problem, raise_all
from windlass.export.choose import CONFIG, Chosen
from windlass.model import Base, Parameter, Stored
from windlass.model.family import WRAPPERS
from windlass.model.files import read_header
from windlass.train.reading import DTYPES, Files, whole

PREFIX = "base_model.model."
SHOWN = 3
KEY = re.compile(r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")

# Fields of PEFT's LoraConfig that change what the weights mean, and the values under which they don't.
PLAIN: dict[str, tuple[Any, ...]] = {
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}
# Ways to begin that leave the base as it was. The others (pissa, olora, corda, loftq, lora_ga) move a part of the base
# into the adapter: what PEFT saves belongs to a base that is on no disk, unless it was converted when saved.
KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal", "default")


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter's change: names and places of the factors, not their values."""

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
    """An update's values in float32: A is [r, in] and B [out, r]; of stacked experts [E, r, in] and [E, out, r]."""

    update: Update
    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None

    def rows(self, expert: int, start: int, stop: int) -> Tensor:
        """s BA of some rows of one matrix."""
        a, b = (self.a[expert], self.b[expert]) if self.update.experts else (self.a, self.b)
        return (b[start:stop] @ a) * self.update.scale


class Updates:
    """All changes by the parameter's name; their values are read when they are asked for, and a few are kept."""

    def __init__(self, by_name: Mapping[str, Update]) -> None:
        self.by_name = by_name
        self.files = Files()
        self.factors = lru_cache(maxsize=4)(self._factors)  # experts that are stored one by one ask again and again

    def _factors(self, name: str) -> Factors:
        update = self.by_name[name]
        if update.replaced is not None:
            values = whole(update.replaced, self.files).float()
            return Factors(update, values, values)
        assert update.a is not None
        assert update.b is not None
        a, b = whole(update.a, self.files).float(), whole(update.b, self.files).float()
        if update.experts:
            # PEFT's order: rows of A go by expert, then rank; columns of B by rank, then expert.
            a = a.reshape(update.experts, -1, a.shape[-1])
            b = b.reshape(b.shape[0], -1, update.experts).permute(2, 0, 1).contiguous()
        magnitude = None if update.magnitude is None else whole(update.magnitude, self.files).float().reshape(-1)
        return Factors(update, a, b, magnitude)


def read(chosen: Chosen, checkpoint: Base) -> Updates:
    """Every tensor of the adapter put to its parameter, or one error that says what does not fit."""
    raise_all(list(_refusals(chosen.config, str(chosen.folder / CONFIG))))
    stored = read_header(chosen.weights)
    shapes = {parameter.name: parameter for parameter in checkpoint.parameters}
    rename = _renaming(checkpoint)
    gathered: dict[str, dict[str, Stored]] = {}  # module as PEFT nests it -> kind -> tensor
    updates: dict[str, Update] = {}
    unknown: list[str] = []
    for key, tensor in stored.items():
        match = KEY.fullmatch(key)
        if tensor.dtype not in DTYPES:
            unknown.append(f"{key} ({tensor.dtype})")
        elif match:
            gathered.setdefault(rename(match["module"]), {})[match["kind"]] = tensor
        else:
            name = rename(key).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            parameter = shapes.get(name)
            if parameter is not None and parameter.shape == tensor.shape:
                updates[name] = Update(parameter, replaced=tensor)
            else:
                unknown.append(key)
    misfits: list[str] = []
    for module, kinds in gathered.items():
        update = _update(module, kinds, shapes, chosen.config)
        if isinstance(update, str):
            misfits.append(update)
        elif update.parameter.name in updates:
            misfits.append(f"{update.parameter.name} is adapted twice")
        else:
            updates[update.parameter.name] = update
    raise_all(list(_problems(chosen.weights, checkpoint, stored, unknown, misfits)))
    return Updates(updates)


def _refusals(config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    if config.get("peft_type") != "LORA":
        kind = str(config.get("peft_type"))
        yield Problem(f"the adapter is of the kind {kind}", where, "windlass exports LoRA, rsLoRA and DoRA adapters")
    for name, plain in PLAIN.items():
        if config.get(name, plain[0]) not in plain:
            yield Problem(
                f"{name} is {str(config[name])[:60]}", where, f"windlass can't export it; it knows {plain[0]!r} only"
            )
    start = config.get("init_lora_weights", True)
    if start not in KEEP_BASE:
        yield Problem(
            f"init_lora_weights: {start} changed the base when training began, and the adapter belongs to that",
            where,
            "save it with PEFT's path_initial_model_for_weight_conversion, which turns it into a plain adapter",
        )


def _renaming(checkpoint: Base) -> Any:
    """A name in PEFT's file -> the language model's: adapters may have been trained inside the wrapper."""
    wrapper = next((w for w in WRAPPERS.values() if w.architecture == checkpoint.wrapper), None)
    prefixes = [pair for pair in wrapper.prefixes if pair[1] == "model."] if wrapper else []

    def rename(name: str) -> str:
        name = name.removeprefix(PREFIX)
        for ours, theirs in prefixes:
            if name.startswith(ours):
                return theirs + name[len(ours) :]
        return name

    return rename


def _update(
    module: str, kinds: Mapping[str, Stored], shapes: Mapping[str, Parameter], config: Mapping[str, Any]
) -> Update | str:
    """The update of one LoRA pair; or why it is none."""
    a, b = kinds.get("lora_A"), kinds.get("lora_B")
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
        return f"{module} has {', '.join(sorted(kinds))}, and a pair of matrices lora_A and lora_B is needed"
    place = module.replace(".base_layer", "")  # PEFT nests the adapters of two parameters of one module
    parameter = shapes.get(f"{place}.weight") or _expert_parameter(place, a.shape, b.shape, shapes)
    if parameter is None:
        return f"{place} is no module of this model, or its adapter is of other sizes ({a.shape[1]} -> {b.shape[0]})"
    experts = parameter.shape[0] if len(parameter.shape) == 3 else 1
    rank, rest = divmod(a.shape[0], experts)
    fits = (b.shape[0], a.shape[1]) == parameter.shape[-2:] and a.shape[0] == b.shape[1] and not rest
    if not fits:
        return f"{place} is {list(parameter.shape)}, its adapter {list(b.shape)} x {list(a.shape)}"
    asked, alpha = _strength(place, parameter, config)
    if asked != rank:
        return f"{place} has rank {rank}, and {CONFIG} says {asked}"
    magnitude = kinds.get("lora_magnitude_vector")
    if bool(config.get("use_dora")) != (magnitude is not None):
        return f"{place}: use_dora is {bool(config.get('use_dora'))}, and its file says otherwise"
    if magnitude is not None and math.prod(magnitude.shape) != parameter.shape[0]:
        return f"{place} has {parameter.shape[0]} rows, and DoRA's lengths are {math.prod(magnitude.shape)}"
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Update(parameter, scale, a, b, magnitude)


def _expert_parameter(
    place: str, a: Sequence[int], b: Sequence[int], shapes: Mapping[str, Parameter]
) -> Parameter | None:
    """The fused parameter of a module of experts: PEFT's names don't say which, its sizes do."""
    for leaf in ("gate_up_proj", "down_proj"):
        parameter = shapes.get(f"{place}.{leaf}")
        if parameter is not None and parameter.shape[-2:] == (b[0], a[1]):
            return parameter
    return None


def _strength(place: str, parameter: Parameter, config: Mapping[str, Any]) -> tuple[int, float]:
    """Rank and alpha, by PEFT's own rule for its patterns."""
    from peft.utils.other import get_pattern_key

    targeted = any(parameter.name.endswith(name) for name in config.get("target_parameters") or ())
    key = parameter.name if targeted else place
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    rank = ranks.get(get_pattern_key(ranks.keys(), key), config["r"])
    return int(rank), float(alphas.get(get_pattern_key(alphas.keys(), key), config["lora_alpha"]))


def _problems(
    path: Path, checkpoint: Base, stored: Mapping[str, Stored], unknown: Sequence[str], misfits: Sequence[str]
) -> Iterator[Problem]:
    hint = f"is {checkpoint.name} the model that it was trained on? Name the right one: --base DIR"
    if not stored:
        yield Problem("the adapter holds no tensors", str(path), "export from another checkpoint of the run")
    for what, names in (
        ("tensors belong to no parameter of this model", unknown),
        ("adapters do not fit this model", misfits),
    ):
        if names:
            more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield Problem(f"{len(names)} {what}: {'; '.join(names[:SHOWN])}{more}", str(path), hint)


def alive(updates: Updates) -> bool:
    """Whether any factor B is other than zero. An adapter that was never trained changes nothing."""
    return any(bool(torch.any(updates.factors(name).b)) for name in updates.by_name)
