"""An adapter in PEFT's format, to continue or to export: what windlass can take, in the run file's terms."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from windlass.errors import Problem, UserError, Where, is_written, raise_all
from windlass.files import read_json
from windlass.model.files import abbreviate, read_header
from windlass.model.parameters import Base
from windlass.model.targets import LAYER, Adapter, match_first, pattern_matches, resolve_adapter
from windlass.model.wrapped import KEY, PREFIX, inner_name, rename_config
from windlass.run_folder import ADAPTER, ADAPTER_CONFIG, CHECKPOINTS
from windlass.runfile import Lora, RunFile
from windlass.runfile.fields import ExpertLora

# Fields of PEFT's LoraConfig that change the meaning of the weights, and their neutral values.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
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
# Initializations that leave the base unchanged. The others (pissa, olora, corda, loftq, lora_ga) move a part of the
# base into the adapter: unless it was converted when saved, it belongs to a base that is stored nowhere.
KEEPS_BASE: Final = (True, False, "gaussian", "eva", "orthogonal", "default")
# Keys of `lora` that must be as the adapter has them, and those whose effect on each module must.
TAKEN: Final = ("r", "lora_alpha", "use_rslora", "use_dora", "bias", "modules_to_save")
PLACED: Final = ("experts", "target_modules", "layers_to_transform", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """The configuration and the names of an adapter's tensors, as the language model alone has them."""

    folder: Path
    config: Mapping[str, Any]
    ranks: Mapping[str, int]  # r of each adapted module, from the shapes of its tensors
    parameters: tuple[str, ...]  # fused expert parameters

    def r_of(self, name: str) -> int:
        r: int = match_first(self.config.get("rank_pattern") or {}, name, self.config["r"])
        return r

    def alpha_of(self, name: str) -> float:
        alpha: float = match_first(self.config.get("alpha_pattern") or {}, name, self.config["lora_alpha"])
        return alpha


def require_supported(config: Mapping[str, Any], where: str) -> None:
    """Refuse an adapter whose weights mean something else than LoRA, rsLoRA or DoRA on the stored base."""
    problems = []
    code = "unsupported-adapter"
    if config.get("peft_type") != "LORA":
        problem = f"the adapter is of the kind {config.get('peft_type')}"
        problems.append(Problem(problem, where, "windlass takes LoRA, rsLoRA and DoRA adapters", code))
    for name in NEUTRAL.keys() & config.keys():
        if config[name] not in NEUTRAL[name]:
            hint = f"windlass takes it only with {NEUTRAL[name][0]!r}"
            problems.append(Problem(f"{name} is {str(config[name])[:60]}", where, hint, code))
    start = config.get("init_lora_weights", True)
    if start not in KEEPS_BASE:
        problem = f"init_lora_weights: {start} changed the base when training began, and the adapter belongs to that"
        hint = "save it with PEFT's path_initial_model_for_weight_conversion, which turns it into a plain adapter"
        problems.append(Problem(problem, where, hint, code))
    raise_all(problems)


def find_adapter(run: RunFile) -> Path | None:
    """Return the folder of the adapter to continue from: lora.adapter, or a checkpoint of a run that began with it."""
    if run.lora.adapter is None:
        return None
    folders = (Path(run.lora.adapter), *sorted(Path(run.folder, CHECKPOINTS).glob("step-*")))
    return next((folder for folder in folders if (folder / ADAPTER_CONFIG).is_file()), None)


def read_saved_adapter(folder: Path) -> SavedAdapter:
    config = read_json(folder / ADAPTER_CONFIG)
    require_supported(config, str(folder / ADAPTER_CONFIG))
    weights = folder / ADAPTER
    if not weights.is_file():
        raise UserError(
            f"no {ADAPTER} in {folder}", str(folder), "save the adapter again with a current PEFT", "incomplete-adapter"
        )
    tensors = read_header(weights)
    names = {inner_name(name.removeprefix(PREFIX)): stored.shape for name, stored in tensors.items()}
    if any(inner_name(name) != name for name in tensors):
        config = config | rename_config(config, tensors, inner_name)
    pairs = [(match["module"], shape[0]) for name, shape in names.items() if (match := _match_a(name))]
    ranks = {name.replace(".base_layer", ""): r for name, r in pairs}
    wanted = [name.rpartition(".") for name in config.get("target_parameters") or ()]
    parameters = [f"{name}.{leaf}" for name in ranks for stem, _, leaf in wanted if f".{name}".endswith(f".{stem}")]
    holders = {name.rpartition(".")[0] for name in parameters}
    modules = {name: r for name, r in ranks.items() if name not in holders}
    return SavedAdapter(folder, config, modules, tuple(dict.fromkeys(parameters)))


def _match_a(name: str) -> Any:
    match = KEY.fullmatch(name)
    return match if match and match["kind"] == "lora_A" else None


def continue_adapter(run: RunFile, base: Base, where: Where) -> tuple[RunFile, str]:
    """Return the run with the `lora` section of the adapter that it continues, and what was taken from there.

    A key that the run file sets must be as the adapter has it.
    """
    folder = find_adapter(run)
    if folder is None:
        return run, ""
    saved = read_saved_adapter(folder)
    lost = [name for name in _list_targets(saved.config, base) if name not in saved.ranks]
    if lost:
        hint = "copy the folder again, or take another checkpoint of its run"
        raise UserError(f"{ADAPTER} has no tensors for {abbreviate(lost)}", str(folder), hint, "incomplete-adapter")
    lora = run.lora
    values = _read_values(saved, lora)
    given = {key for key in Lora.model_fields if is_written(where, f"lora.{key}")}
    hint = "leave it out: the adapter decides"
    problems = [
        Problem(
            f"is {getattr(lora, key)}, and {folder} was trained with {values[key]}",
            where(f"lora.{key}"),
            hint,
            "other-adapter",
        )
        for key in TAKEN
        if key in given and (getattr(lora, key) or None) != (values[key] or None)
    ]
    raise_all(problems)
    lora = lora.model_copy(update={key: value for key, value in values.items() if key not in given})
    if "target_modules" not in given:
        lora = _choose_targets(lora, saved, base)
    try:
        adapter = resolve_adapter(lora, base, where)
    except UserError as error:
        if "target_modules" in given:
            raise
        problem = f"{folder} can't be continued: {error.problems[0].problem}"
        raise UserError(problem, where("lora.adapter"), "name an adapter of this model", "other-adapter") from None
    for difference in _find_differences(adapter, lora, saved):
        key = next((key for key in PLACED if key in given), "adapter")
        hint = "name an adapter of this model" if key == "adapter" else f"remove lora.{key}: the adapter decides"
        raise UserError(f"{folder} is another adapter: {difference}", where(f"lora.{key}"), hint, "other-adapter")
    taken = f"lora.r {lora.r}, lora.lora_alpha {lora.lora_alpha:g} and the modules that {folder} adapts"
    return run.model_copy(update={"lora": lora}), taken


def _list_targets(config: Mapping[str, Any], base: Base) -> Iterator[str]:
    """Yield the modules that PEFT adapts by this configuration."""
    targets = config.get("target_modules") or ()
    layers = config.get("layers_to_transform")
    if config.get("exclude_modules") or targets == "all-linear":
        return
    for name in (p.name.removesuffix(".weight") for p in base.parameters if p.linear):
        layer = LAYER.search(name)
        if layers is not None and (layer is None or int(layer[1]) not in layers):
            continue
        if re.fullmatch(targets, name) if isinstance(targets, str) else _is_named(name, targets):
            yield name


def _is_named(module: str, names: Iterable[str]) -> bool:
    """Return whether a list of names has a module, by PEFT's rule."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def _read_values(saved: SavedAdapter, lora: Lora) -> dict[str, Any]:
    """Return the keys of `lora` that an adapter has; of one with a fixed half, without that half."""
    config = saved.config
    halves = 2 if lora.starts_from_weights else 1
    more = math.sqrt(halves) if config.get("use_rslora") else halves

    def scale(alpha: float) -> float:
        return alpha if more == 1 else alpha / more

    experts = None
    for name in saved.parameters[:1]:
        leaves = sorted({name.rpartition(".")[2] for name in saved.parameters})
        experts = ExpertLora(r=saved.r_of(name), lora_alpha=saved.alpha_of(name), targets=leaves)
    patterns = {
        key: {pattern: value for pattern, value in (config.get(key) or {}).items() if _matches_any(pattern, saved)}
        for key in ("rank_pattern", "alpha_pattern")
    }
    return {
        "r": config["r"] // halves,
        "lora_alpha": scale(config["lora_alpha"]),
        "rank_pattern": {pattern: r // halves for pattern, r in patterns["rank_pattern"].items()},
        "alpha_pattern": {pattern: scale(alpha) for pattern, alpha in patterns["alpha_pattern"].items()},
        "use_rslora": bool(config.get("use_rslora")),
        "use_dora": bool(config.get("use_dora")),
        "bias": config.get("bias") or "none",
        "modules_to_save": sorted(config.get("modules_to_save") or ()) or None,
        "experts": experts,
    }


def _matches_any(pattern: str, saved: SavedAdapter) -> bool:
    return any(pattern_matches(pattern, module) for module in saved.ranks)


def _choose_targets(lora: Lora, saved: SavedAdapter, base: Base) -> Lora:
    """Return the shortest of the ways to name exactly the adapter's modules."""
    leaves = sorted({module.rpartition(".")[2] for module in saved.ranks})
    layers = sorted({int(match[1]) for module in saved.ranks if (match := LAYER.search(module))})
    for chosen in (None, layers) if lora.layers_to_transform is None else (lora.layers_to_transform,):
        named = lora.model_copy(update={"target_modules": leaves, "layers_to_transform": chosen})
        with contextlib.suppress(UserError):
            if {*resolve_adapter(named, base, str).target_modules} == saved.ranks.keys():
                return named
    return named if lora.layers_to_transform else lora.model_copy(update={"target_modules": list(saved.ranks)})


def _find_differences(adapter: Adapter, lora: Lora, saved: SavedAdapter) -> Iterator[str]:
    """Yield what of the resolved adapter is not as it was saved."""
    alphas = {name: adapter.alphas.get(name, adapter.alpha) for name in adapter.target_modules}
    alphas |= {name: lora.experts.lora_alpha for name in adapter.target_parameters if lora.experts}
    modules = {*adapter.target_modules}
    parameters = {*adapter.target_parameters}
    for name in sorted((saved.ranks.keys() - modules) | ({*saved.parameters} - parameters)):
        yield f"it adapts {name}, and this run would not"
    for name in sorted((modules - saved.ranks.keys()) | (parameters - {*saved.parameters})):
        yield f"this run would adapt {name}, and it does not"
    for name, r in adapter.r_by_module.items():
        if {r, saved.r_of(name), saved.ranks.get(name, r)} != {r}:
            yield f"{name} has r {saved.ranks.get(name, saved.r_of(name))}, and would have {r}"
    for name, alpha in alphas.items():
        if alpha != saved.alpha_of(name):
            yield f"{name} has lora_alpha {saved.alpha_of(name):g}, and would have {alpha:g}"
