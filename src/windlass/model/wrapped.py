"""Names in a saved adapter: those of the language model alone, or of the multimodal model (the wrapper) around it."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

PREFIX: Final = "base_model.model."  # prefix of every name in PEFT's files
KEY: Final = re.compile(r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
Rename = Callable[[str], str]


def inner_name(name: str) -> str:
    """Convert a module's name, or a pattern for names, from the wrapper's to the language model's."""
    return re.sub(r"(?<![^.^])language_model\\?\.", "", name, count=1)


def outer_name(name: str, place: str = "model.language_model.") -> str:
    """Convert a name back, to what the wrapper calls the language model's `model.` (`Wrapper.place`)."""
    head = place.removesuffix("model.") if place.endswith(".model.") else ""
    renamed = re.sub(r"^(\^?)model(?=\\?\.)", rf"\1{place.removesuffix('.')}", inner_name(name))
    return re.sub(r"^(\^?)(?=lm_head)", rf"\1{head}", renamed)


def rename_keys(tensors: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    return {PREFIX + rename(key.removeprefix(PREFIX)): tensor for key, tensor in tensors.items()}


def rename_config(config: Mapping[str, Any], keys: Iterable[str], rename: Rename) -> dict[str, Any]:
    """Rename modules in adapter_config.json when the tensors (`keys`) are renamed.

    Names are given in full: the last part alone would match modules of the vision tower too.
    """
    pairs = [match["module"] for key in keys if (match := KEY.fullmatch(key.removeprefix(PREFIX)))]
    names = dict.fromkeys(name.replace(".base_layer", "") for name in pairs)  # PEFT nests adapters of one module
    # Fused experts, which are no modules.
    wanted = [name.rpartition(".") for name in config.get("target_parameters") or ()]
    parameters = [f"{name}.{leaf}" for name in names for stem, _, leaf in wanted if f".{name}".endswith(f".{stem}")]
    modules = names.keys() - {name.rpartition(".")[0] for name in parameters}
    renamed: dict[str, Any] = {
        "target_modules": sorted(map(rename, modules)),
        "target_parameters": [*map(rename, parameters)] or None,
    }
    for patterns in ("rank_pattern", "alpha_pattern"):
        renamed[patterns] = {rename(name): value for name, value in (config.get(patterns) or {}).items()}
    return renamed
