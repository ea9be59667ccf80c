"""What can be said of a key from its definition alone: type, default, docstring; and the JSON Schema."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from windlass.runfile.document import Steps
from windlass.runfile.fields import RunFile
from windlass.runfile.names import RENAMED
from windlass.runfile.script import SECTIONS, ScriptRun

Root = type[BaseModel]
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def options(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without constraints: list[X], dict[X, Y], sections and plain types."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return options(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in options(part)]
    return [annotation]


def section(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation stands for, if it does."""
    found = (o for o in options(annotation) if isinstance(o, type) and issubclass(o, BaseModel))
    return next(found, None)


def _arguments(annotation: Any, kind: type) -> tuple[Any, ...]:
    return next((get_args(option) for option in options(annotation) if get_origin(option) is kind), ())


def annotation_at(steps: Steps, root: Root = RunFile) -> Any:
    """The annotation of the value at this path; None where a run file has no such path."""
    current: Any = root
    for step in steps:
        inner = section(current)
        if isinstance(step, int):
            current = next(iter(_arguments(current, list)), None)
        elif inner is not None and step in inner.model_fields:
            current = inner.model_fields[step].annotation
        else:
            current = next(iter(_arguments(current, dict)[1:]), None)
        if current is None:
            return None
    return current


def words(annotation: Any) -> str:
    """What a value must be, for a sentence."""
    parts: list[str] = []
    for option in options(annotation):
        origin = get_origin(option)
        if origin is Literal:
            parts += [_literal(value) for value in get_args(option)]
        elif origin is list:
            inner = words(get_args(option)[0])
            parts.append("a list" if inner == "text" else f"a list, each {inner}")
        elif origin is dict:
            parts.append("a mapping of keys to values")
        elif isinstance(option, type) and issubclass(option, BaseModel):
            parts.append(f"a section with the keys {', '.join(list(option.model_fields)[:4])} …")
        else:
            parts.append(_WORDS.get(option, "something else"))
    if {"a whole number", "a number"} <= set(parts):
        parts.remove("a whole number")
    parts = list(dict.fromkeys(parts))
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def keys(root: Root = RunFile) -> tuple[str, ...]:
    """Every path of a run file, in order; what is inside list items and mappings once, without index or key."""
    return tuple(path for path, _ in _walk(root, ""))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        inner = _inner(field.annotation)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")


def _inner(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *_arguments(annotation, list), *_arguments(annotation, dict)[1:]):
        found = section(candidate)
        if found is not None:
            return found
    return None


def owners(key: str, root: Root = RunFile) -> list[str]:
    """Paths that end in this key, sections of the published recipe first."""
    return [path for path in keys(root) if path.rpartition(".")[2] == key]


def describe(path: str) -> str | None:
    """What a key means, what it takes and its default. A last name alone is enough."""
    path = re.sub(r"\[\d*\]", "", path.strip())
    if path in keys():
        return _described(path)
    own = [key for key in keys(ScriptRun) if key.startswith("script") and path in (key, key.rpartition(".")[2])]
    if path in own or (own and not owners(path) and path not in RENAMED):
        return "\n\n".join(_described(key, ScriptRun) for key in own)
    by_last = {old.rpartition(".")[2]: new for old, new in reversed(RENAMED.items())}
    new = RENAMED.get(path) or by_last.get(path)
    if new is not None and not owners(path):
        return f"{path} is another spelling of {new}\n\n{_described(new)}"
    parent = path.rpartition(".")[0]
    if parent in keys() and _arguments(annotation_at(tuple(parent.split("."))), dict):
        return _described(parent)  # a key of a free mapping, such as one variable of cluster.env
    return "\n\n".join(map(_described, owners(path))) or None


def _described(path: str, root: Root = RunFile) -> str:
    field = dict(_walk(root, ""))[path]
    lines = [path, f"  {' '.join((field.description or '').split())}", f"  takes: {words(field.annotation)}"]
    if _section_like(field):
        inside = [key for key in keys(root) if key.startswith(f"{path}.") and "." not in key[len(path) + 1 :]]
        lines[2] = f"  keys: {', '.join(key.rpartition('.')[2] for key in inside)}"
    elif field.is_required():
        lines += [] if "Default:" in (field.description or "") else ["  required"]
    else:
        lines.append(f"  default: {_shown(field.default)}")
    also = [old for old, new in RENAMED.items() if new == path]
    return "\n".join(lines + ([f"  also written: {', '.join(also)}"] if also else []))


def _section_like(field: FieldInfo) -> bool:
    return section(field.annotation) is not None and field.default_factory is not None


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def schema() -> dict[str, Any]:
    """JSON Schema of both kinds of run file: `kind: script` chooses the second."""
    lora, script = _lora_schema(), _script_schema()
    sections = {**lora.pop("$defs"), **script.pop("$defs")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "windlass run file",
        "if": {"properties": {"kind": {"const": "script"}}, "required": ["kind"]},
        "then": script,
        "else": lora,
        "$defs": sections,
    }


def _script_schema() -> dict[str, Any]:
    found = ScriptRun.model_json_schema(mode="validation")
    for name in SECTIONS:
        described = {"description": ScriptRun.model_fields[name].description}
        found["properties"][name] = described | {
            "anyOf": [{"$ref": f"#/$defs/{_definition(name, ScriptRun)}"}, {"type": "null"}]
        }
    return found


def _lora_schema() -> dict[str, Any]:
    """Old spellings are there too, marked as deprecated."""
    found = RunFile.model_json_schema(mode="validation")
    sections = found["$defs"]
    for old, new in RENAMED.items():
        (old_section, _, old_key), (new_section, _, new_key) = old.partition("."), new.partition(".")
        properties = sections[_definition(new_section)]["properties"]
        sections[_definition(old_section)]["properties"][old_key] = {
            **properties[new_key],
            "deprecated": True,
            "description": f"Another spelling of {new}.",
        }
    headers = found["properties"]
    names = sections["LayoutSection"]["properties"]["name"]["enum"]
    for name in ("model", "lora", "data", "train", "layout", "cluster", "watch"):
        instead = {"enum": [*names, None]} if name == "layout" else {"type": "null"}  # a header with nothing under it
        headers[name] = {
            "description": RunFile.model_fields[name].description,
            "anyOf": [{"$ref": f"#/$defs/{_definition(name)}"}, instead],
        }
    experts = sections["Lora"]["properties"]["experts"]
    experts["anyOf"] = [*experts["anyOf"], {"type": "boolean"}]
    sections["ExpertLora"].pop("required", None)  # what is left out follows from the section around it
    return found


def _definition(name: str, root: Root = RunFile) -> str:
    inner = section(root.model_fields[name].annotation)
    assert inner is not None
    return inner.__name__
