"""Models without a row in families.toml: find or derive the description of what transformers would build."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from windlass.errors import Problem, UserError, raise_all
from windlass.files import find_cache_folder, read_json, write_json
from windlass.model.description import hash_config
from windlass.model.family import Family, Wrapper
from windlass.model.parameters import Base, Parameter, Spelling

SHIPPED: Final = Path(__file__).with_name("descriptions")
LOCAL: Final = "windlass.json"  # in a model's folder
# Code that makes descriptions: cached ones from another version of it are not used.
CODE: Final = tuple(
    Path(__file__).parents[1] / name for name in ("introspect/describe.py", "introspect/trace.py", "model/shrink.py")
)


def find_description(config: Mapping[str, Any], where: str, folder: Path | None = None) -> dict[str, Any]:
    """Find the description of this config: shipped, cached, or next to the model; else derive it."""
    key = hash_config(config)
    cached = _name_cache_file(key)
    for file in (SHIPPED / f"{key}.json", cached, *([folder / LOCAL] if folder else [])):
        try:
            description: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if description.get("config") == key and "bare" in description:  # older versions of windlass lack `bare`
            return description
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft")):
        place = folder or Path(where).parent
        refused = [Problem(**problem) for problem in read_json(place / LOCAL).get("problems", ())]
        raise_all([replace(problem, where=f"{place / LOCAL}: {problem.where}") for problem in refused])
        problem = f"windlass has no description of this {config.get('model_type')} model, and there is no torch here"
        command = f"python -m windlass.introspect.describe {shlex.quote(str(place))} > {LOCAL}"
        raise UserError(
            problem, where, f"where torch is, run: {command}; then copy {LOCAL} into {place}", "no-description"
        )
    description = _derive(config, where)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_json(cached, description)
    except OSError:
        pass  # it will be derived again
    return description


def _name_cache_file(key: str) -> Path:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    code = hashlib.sha256(b"".join(file.read_bytes() for file in CODE)).hexdigest()[:8]
    return find_cache_folder() / "models" / f"{key}-{version}-{code}.json"


def _derive(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Ask transformers: here if it is loaded, else in a separate process, because torch takes seconds and memory."""
    if "transformers" in sys.modules:
        here: dict[str, Any] = importlib.import_module("windlass.introspect.describe").derive(config, where)
        return here
    print(f"{where}: asking transformers about {config.get('model_type')} (kept for the next time)", file=sys.stderr)
    command = [sys.executable, "-m", "windlass.introspect.describe", "-", where]
    done = subprocess.run(command, input=json.dumps(config), capture_output=True, text=True, check=False)
    try:
        description: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        hint = "install the versions of constraints.txt"
        raise UserError(f"transformers can't describe it: {why}", where, hint, "not-describable") from None
    raise_all([Problem(**problem) for problem in description.get("problems", ())])
    return description


def read_description(description: Mapping[str, Any], config: Mapping[str, Any], name: str, quantization: Any) -> Base:
    """Return the model that transformers would build, from a description by introspect/describe.py."""
    text = dict(config)
    if description["wrapper"] is not None:
        text = dict(config.get("text_config") or {})
    # In forward order: the embedding, the layers, the final norm and the head.
    first = [_read_parameter(entry) for entry in description["outside"] if entry["part"] == "embedding"]
    last = [_read_parameter(entry) for entry in description["outside"] if entry["part"] != "embedding"]
    layers = [
        _read_parameter(entry, number)
        for number, kind in enumerate(description["order"])
        for entry in description["kinds"][kind]
    ]
    return Base(
        name=name,
        path=None,
        family=_read_family(description),
        config=text | {"model_type": description["model_type"]},
        dims=dict(description["dims"]),
        parameters=(*first, *layers, *last),
        wrapper=_read_wrapper(description, first, last) if description["wrapper"] is not None else None,
        quantization=quantization,
        notes=(quantization or {}).get("notes", ()),
    )


def _read_parameter(entry: Mapping[str, Any], layer: int | None = None) -> Parameter:
    prefix = "" if layer is None else f"model.layers.{layer}."
    spellings = tuple(
        tuple(Spelling(key.replace("@", str(layer)), tuple(shape), tuple(offset)) for key, shape, offset in way)
        for way in entry["stored"]
    )
    flags = {flag: entry.get(flag, False) for flag in ("linear", "buffer", "transposed")}
    return Parameter(prefix + entry["name"], tuple(entry["shape"]), entry["part"], spellings=spellings, **flags)


def _read_wrapper(description: Mapping[str, Any], first: list[Parameter], last: list[Parameter]) -> Wrapper:
    embeddings = [parameter for parameter in first if parameter.name == "model.embed_tokens.weight"]
    heads = [parameter for parameter in last if parameter.part == "head"]
    stems = [way[0].name.removesuffix("embed_tokens.weight") for parameter in embeddings for way in parameter.spellings]
    prefixes = [(stem, "model.") for stem in stems]
    for parameter in heads:
        prefixes += [(way[0].name.removesuffix("weight"), "lm_head.") for way in parameter.spellings]
    skipped = "|".join(description["skipped"]) or "(?!)"
    return Wrapper(description["wrapper"], tuple(prefixes), skipped, ["model.", *stems][-1])


def _read_family(description: Mapping[str, Any]) -> Family:
    traced = {
        number: description["traced"][str(kind)]
        for number, kind in enumerate(description["order"])
        if str(kind) in description.get("traced", ())
    }
    return Family(
        description["model_type"],
        description["class"],
        description["layers"][0],
        other_layers=tuple(description["layers"][1:]),
        attention=tuple(description["attention"]),
        isolates=description["isolates"],
        logits=description["logits"],
        shards=description["shards"],
        expert_parallel=description["expert_parallel"],
        expert_adapters=description["expert_adapters"],
        without_formula=description["without_formula"],
        traced=traced,
        peft_takes=frozenset(description["peft_takes"]),
        idle=frozenset(description["idle"]),
        bare=frozenset(description["bare"]),
        ignored=tuple(description["ignored"]),
    )
