"""What is known of a key from its definition: description, type, default, other names; JSON Schema; the presets."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from windlass.errors import UserError
from windlass.runfile.document import Steps
from windlass.runfile.fields import RunFile, ScriptRun
from windlass.runfile.names import OTHER_NAMES, RENAMED, close_names

Root = type[BaseModel]
SECTIONS = ("model", "lora", "data", "train", "script", "layout", "cluster", "watch")

# The class whose argument a key becomes, and the keys of the section that are windlass's own.
UPSTREAM = {
    "lora": ("PEFT's LoraConfig", {"adapter", "dtype", "experts"}),
    "train": ("transformers' TrainingArguments", {"global_batch_size", "resume", "warmup_ratio"}),
}


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


def items(annotation: Any, kind: type) -> Any:
    """The annotation of a list's items or a mapping's values."""
    return next((get_args(option)[-1] for option in options(annotation) if get_origin(option) is kind), None)


def annotation_at(steps: Steps, root: Root = RunFile) -> Any:
    """The annotation of the value at this path; None if a run file has no such path."""
    current: Any = root
    for step in steps:
        inner = section(current)
        if isinstance(step, int):
            current = items(current, list)
        elif inner is not None and step in inner.model_fields:
            current = inner.model_fields[step].rebuild_annotation()
        else:
            current = items(current, dict)
        if current is None:
            return None
    return current


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, tuple[type[BaseModel], FieldInfo]]]:
    for name, field in model.model_fields.items():
        owner = next(base for base in model.__mro__ if name in base.__annotations__)
        yield prefix + name, (owner, field)
        kinds = (field.annotation, items(field.annotation, list), items(field.annotation, dict))
        if inner := next(filter(None, map(section, kinds)), None):
            yield from _walk(inner, f"{prefix}{name}.")


@cache
def fields(root: Root = RunFile) -> dict[str, tuple[type[BaseModel], FieldInfo]]:
    """Every path of a run file, in order. What is inside lists and mappings stands once, without index or key."""
    return dict(_walk(root, ""))


def keys(root: Root = RunFile) -> tuple[str, ...]:
    return tuple(fields(root))


def owners(key: str, root: Root = RunFile) -> list[str]:
    """Paths that end in this key."""
    return [path for path in keys(root) if path.rpartition(".")[2] == key]


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings under a section's keys. pydantic can read them too, but does so at every import."""
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    return {
        key.target.id: " ".join(str(text.value.value).split())
        for key, text in pairwise(body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


@cache
def documented() -> dict[str, tuple[type[BaseModel], FieldInfo]]:
    """The paths of both kinds of run file."""
    return {**fields(RunFile), **{path: row for path, row in fields(ScriptRun).items() if path.startswith("script")}}


def describe(path: str) -> str | None:
    """What a key means, its type, default and other names. The last part of its path is enough."""
    path = re.sub(r"\[\d*\]", "", path.strip())
    found = [path] if path in documented() else [key for key in documented() if key.rpartition(".")[2] == path]
    if found:
        return "\n\n".join(map(_described, found))
    by_last = {old.rpartition(".")[2]: new for old, new in reversed(RENAMED.items())}
    if new := RENAMED.get(path) or by_last.get(path) or OTHER_NAMES.get(path.rpartition(".")[2]):
        return f"{path} is another name of {new}\n\n{_described(new)}"
    parent = path.rpartition(".")[0]
    if parent in keys() and items(fields()[parent][1].annotation, dict):
        return _described(parent)  # a key of a free mapping, such as one variable of cluster.env
    return None


def _described(path: str) -> str:
    model, field = documented()[path]
    top, _, name = path.rpartition(".")
    text = _docstrings(model).get(name, "")
    lines = [path, text]
    if section(field.annotation) and field.default_factory:
        inside = [key for key in documented() if key.rpartition(".")[0] == path]
        lines.append(f"keys: {', '.join(key.rpartition('.')[2] for key in inside)}")
    else:
        lines.append(f"type: {words(TypeAdapter(field.rebuild_annotation()).json_schema())}")
        if not field.is_required():
            lines.append(f"default: {_shown(field.default)}")
        elif "Default:" not in text:
            lines.append("required")
    upstream, own = UPSTREAM.get(top, ("", set()))
    if upstream and name not in own:
        lines.append(f"same as: {upstream}.{name}")
    for title, table in (("also accepted", RENAMED), ("elsewhere called", OTHER_NAMES)):
        if names := [name for name, key in table.items() if key == path]:
            lines.append(f"{title}: {', '.join(names)}")
    return "\n  ".join(lines)


def words(rule: dict[str, Any]) -> str:
    """A JSON Schema rule in words."""
    if "anyOf" in rule:
        return " or ".join(dict.fromkeys(map(words, rule["anyOf"])))
    if "$ref" in rule:
        return "a section"
    if "enum" in rule or "const" in rule:
        return ", ".join(map(_shown, rule.get("enum", [rule.get("const")])))
    names = {"integer": "whole number", "boolean": "true or false", "string": "text", "object": "mapping"}
    name = names.get(rule.get("type", ""), rule.get("type", "anything"))
    if name == "array":
        return f"list of {words(rule.get('items', {}))}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {rule[key]:g}" for key, sign in signs.items() if key in rule]
    return f"{name} {' and '.join(bounds)}".strip()


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def schema() -> dict[str, Any]:
    """JSON Schema of both kinds of run file: `kind: script` chooses the second."""
    lora, script = _schema(RunFile), _schema(ScriptRun)
    sections = {**script.pop("$defs"), **lora.pop("$defs")}
    for old, new in RENAMED.items():
        (old_section, _, old_key), (new_section, _, new_key) = old.partition("."), new.partition(".")
        properties = sections[new_section.capitalize()]["properties"]
        sections[old_section.capitalize()]["properties"][old_key] = {
            **properties[new_key],
            "deprecated": True,
            "description": f"Another name of {new}.",
        }
    layout_names = sections["LayoutSection"]["properties"]["name"]["enum"]
    lora["properties"]["layout"]["anyOf"].append({"enum": layout_names})  # `layout: hybrid`
    sections["Lora"]["properties"]["experts"]["anyOf"].append({"type": "boolean"})
    sections["ExpertLora"].pop("required", None)  # what is left out follows from the section around it
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "windlass run file",
        "if": {"properties": {"kind": {"const": "script"}}, "required": ["kind"]},
        "then": script,
        "else": lora,
        "$defs": sections,
    }


def _schema(root: Root) -> dict[str, Any]:
    """pydantic's, with the keys' docstrings, and with headers that have nothing under them."""
    found = root.model_json_schema(mode="validation")
    for path, (model, _) in fields(root).items():
        rule = found["$defs"].get(model.__name__, found)
        name = path.rpartition(".")[2]
        rule["properties"][name]["description"] = _docstrings(model)[name]
    for name in SECTIONS:
        if name in found["properties"]:
            rule = found["properties"][name]
            rule["anyOf"] = [{"$ref": rule.pop("$ref")}, {"type": "null"}]
    return found


def presets() -> dict[str, str]:
    """Name and one-line summary of every run file that `windlass init` can print."""
    return {name: text.splitlines()[0].removeprefix("# ") for name, text in sorted(_texts().items())}


def init(preset: str = "mistral-small-4") -> str:
    """The text of a preset."""
    texts = _texts()
    if preset not in texts:
        near = close_names(preset, texts) or sorted(texts)
        raise UserError(f"there is no preset {preset!r}", "windlass init", f"choose {', '.join(near)}")
    return texts[preset]


def _texts() -> dict[str, str]:
    folder = files("windlass.runfile") / "presets"
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8") for entry in found}
