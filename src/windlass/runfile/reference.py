"""Document keys from their definitions: description, type, default, other names; JSON Schema; the presets."""

import ast
import inspect
import json
import re
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from windlass.errors import UserError
from windlass.runfile.document import Steps, parse_scalar
from windlass.runfile.fields import RunFile, ScriptRun
from windlass.runfile.machines import PLATFORM_SECTIONS
from windlass.runfile.names import OTHER_NAMES, RENAMED, find_close_names
from windlass.runfile.values import Section

Root = type[BaseModel]
Key = tuple[Root, FieldInfo]  # its section and its definition
SECTIONS = ("model", "lora", "data", "train", "dpo", "orpo", "script", "layout", "cluster", "watch", "export")

# The class whose argument a key becomes, and the keys of the section that are windlass's own.
UPSTREAM = {
    "lora": ("PEFT's LoraConfig", {"adapter", "dtype", "experts"}),
    "train": (
        "transformers' TrainingArguments",
        {
            *("compile", "global_batch_size", "objective", "offload_activations", "resume", "router_aux_loss_coef"),
            *("sample", "warmup_ratio"),
        },
    ),
}


def list_alternatives(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, without constraints: list[X], dict[X, Y], sections and plain types."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return list_alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in list_alternatives(part)]
    return [annotation]


def find_section(annotation: Any) -> Root | None:
    found = (o for o in list_alternatives(annotation) if isinstance(o, type) and issubclass(o, BaseModel))
    return next(found, None)


def find_item_annotation(annotation: Any, kind: type) -> Any:
    """Return the annotation of a list's items or a mapping's values."""
    section = find_section(annotation)
    if kind is dict and section is not None and section.model_config.get("extra") == "allow":
        return list[Any]  # of a key of `sweep`
    return next((get_args(option)[-1] for option in list_alternatives(annotation) if get_origin(option) is kind), None)


def find_annotation(steps: Steps, root: Root = RunFile) -> Any:
    """Return the annotation of the value at this path; None if run files have no such path."""
    current: Any = root
    for step in steps:
        inner = find_section(current)
        if inner is not None and step in inner.model_fields:
            current = inner.model_fields[str(step)].rebuild_annotation()
        else:
            current = find_item_annotation(current, list if isinstance(step, int) else dict)
    return current


@cache
def list_fields(root: Root = RunFile) -> dict[str, Key]:
    """Return every path of a run file, in order. Contents of lists and mappings are listed once, without index or
    key."""

    def walk(model: Root, prefix: str) -> Iterator[tuple[str, Key]]:
        for name, field in model.model_fields.items():
            yield prefix + name, (model, field)
            kinds = (
                field.annotation,
                find_item_annotation(field.annotation, list),
                find_item_annotation(field.annotation, dict),
            )
            if inner := next(filter(None, map(find_section, kinds)), None):
                yield from walk(inner, f"{prefix}{name}.")

    return dict(walk(root, ""))


def list_keys(root: Root = RunFile) -> tuple[str, ...]:
    return tuple(list_fields(root))


def find_owners(key: str, root: Root = RunFile) -> list[str]:
    return [path for path in list_fields(root) if path.rpartition(".")[2] == key]


@cache
def list_documented() -> dict[str, Key]:
    return {
        **list_fields(RunFile),
        **{path: key for path, key in list_fields(ScriptRun).items() if path.startswith("script")},
    }


@cache
def _docstrings(model: Root) -> dict[str, str]:
    """Return the docstrings under a section's keys. pydantic can read them too, but does so at every import."""
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    base = model.__bases__[0]
    return (_docstrings(base) if base not in (BaseModel, Section) else {}) | {
        key.target.id: " ".join(str(text.value.value).split())
        for key, text in pairwise(body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def describe(path: str) -> Iterator[str]:
    """Yield a key's meaning, type, default and other names, a line each."""
    model, field = list_documented()[path]
    top, _, name = path.rpartition(".")
    meaning = _docstrings(model)[name]
    yield meaning
    if find_section(field.annotation) and field.default_factory:
        inside = [name for above, _, name in (key.rpartition(".") for key in list_documented()) if above == path]
        yield f"keys: {', '.join(inside)}"
    else:
        yield f"type: {_describe_rule(TypeAdapter(field.rebuild_annotation()).json_schema())}"
        if not field.is_required():
            yield f"default: {format_value(field.default)}"
        elif "Default:" not in meaning:
            yield "required"
        if example := _find_example(path, field):
            yield f"example: {example}"
    upstream, own = UPSTREAM.get(top, ("", set()))
    if upstream and name not in own:
        yield f"same as: {upstream}.{name}"
    for title, table in (("also accepted", RENAMED), ("elsewhere called", OTHER_NAMES)):
        if names := [name for name, key in table.items() if key == path]:
            yield f"{title}: {', '.join(names)}"


def _find_example(path: str, field: FieldInfo) -> str:
    """Return an example of a key on a command line, or in an entry of the list that the key is in."""
    examples: dict[str, str] = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))
    top, _, name = path.rpartition(".")
    set_of_data = top in ("data.mix", "data.eval", "data.keep")  # such a set has keys of `data`
    example = examples.get(path) or (examples.get(f"data.{name}") if set_of_data else "")
    above = examples.get(f"{top}.*")
    if above and not example:
        path = top
        example = above
    example = example or _make_example(field)
    in_list = any(
        path.startswith(f"{key}.") and not find_section(listed.annotation)
        for key, (_, listed) in list_documented().items()
    )
    if in_list and example:  # such keys have no override of their own
        return f"{name}: {example}, in an entry of {top}"
    return example if example.startswith("--") or not example else "--override " + quote(f"{path}={example}")


def _make_example(field: FieldInfo) -> str:
    """Return a value that the key accepts: a choice that is not the default, or the default."""
    rule = TypeAdapter(field.rebuild_annotation()).json_schema()
    choices = [value for part in rule.get("anyOf", [rule]) for value in part.get("enum", [])]
    other = next((value for value in choices if value not in (None, field.default)), None)
    if isinstance(field.default, bool):
        other = not field.default
    value = field.default if other is None else other
    return "" if field.is_required() or value is None or field.default_factory else format_value(value).replace(" ", "")


def _describe_rule(rule: dict[str, Any]) -> str:
    """Describe a JSON Schema rule in words."""
    if "anyOf" in rule:
        return " or ".join(dict.fromkeys(map(_describe_rule, rule["anyOf"])))
    if "enum" in rule or "const" in rule:
        return ", ".join(map(format_value, rule.get("enum", [rule.get("const")])))
    names = {"integer": "whole number", "boolean": "true or false", "string": "text", "object": "mapping"}
    name = "a section" if "$ref" in rule else names.get(kind := rule.get("type", "anything"), kind)
    if name == "array":
        return f"list of {_describe_rule(rule.get('items', {}))}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {rule[key]:g}" for key, sign in signs.items() if key in rule]
    return f"{name} {' and '.join(bounds)}".strip()


def format_value(value: Any) -> str:
    """Return a value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def make_schema() -> dict[str, Any]:
    """Return the JSON Schema of both kinds of run file: `kind: script` chooses the second."""
    roots = {}
    for root in (ScriptRun, RunFile):
        roots[root] = found = root.model_json_schema()
        for path, (model, _) in list_fields(root).items():
            properties = found["$defs"].get(model.__name__, found)["properties"]
            properties[path.rpartition(".")[2]]["description"] = _docstrings(model)[path.rpartition(".")[2]]
        for name in SECTIONS:  # a header may have nothing under it
            if rule := found["properties"].get(name):
                rule["anyOf"] = [{"$ref": rule.pop("$ref")}, {"type": "null"}]
        for name in PLATFORM_SECTIONS.values():
            rule = found["$defs"]["Cluster"]["properties"][name]
            if "$ref" in rule:
                rule["anyOf"] = [{"$ref": rule.pop("$ref")}, {"type": "null"}]
    script = roots[ScriptRun]
    lora = roots[RunFile]
    sections = {**script.pop("$defs"), **lora.pop("$defs")}
    models: dict[str, Any] = {name: field.annotation for name, field in RunFile.model_fields.items()}
    for old, new in RENAMED.items():
        (old_section, _, old_key), (new_section, _, new_key) = old.partition("."), new.partition(".")
        rule = sections[models[new_section].__name__]["properties"][new_key]
        rule = {**rule, "deprecated": True, "description": f"Another name of {new}."}
        sections[models[old_section].__name__]["properties"][old_key] = rule
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


def read_presets() -> dict[str, str]:
    """Return every run file that `windlass init` can print, by name; its first line is a summary."""
    found = (entry for entry in (files("windlass.runfile") / "presets").iterdir() if entry.name.endswith(".yaml"))
    return dict(sorted((entry.name.removesuffix(".yaml"), entry.read_text(encoding="utf-8")) for entry in found))


def read_preset(preset: str = "mistral-small-4") -> str:
    texts = read_presets()
    if preset not in texts:
        near = find_close_names(preset, texts) or texts
        what = f"there is no preset {preset!r}"
        raise UserError(what, "windlass init", f"choose {', '.join(near)}", "no-such-preset")
    return texts[preset]


def render_settings(settings: Mapping[str, Any], remarks: Mapping[str, str], head: str) -> str:
    """Return a run file's text. `settings`: key -> value; `remarks`: key -> comment behind the line."""
    lines = [f"# {head}"]
    lines += ["", *(f"{key}: {format_yaml(value)}" for key, value in settings.items() if "." not in key)]
    section = ""
    ordered = [key for key in list_keys(RunFile) if key in settings and "." in key]
    for key in sorted(ordered, key=lambda key: SECTIONS.index(key.partition(".")[0])):
        top, _, name = key.partition(".")
        lines += ["", f"{top}:"] if top != section else []
        section = top
        text = f"  {name}: {format_yaml(settings[key])}"
        remark = remarks.get(key, "")
        lines.append(text if remark in ("", name) else f"{text}  # {remark}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, ""]))


def format_yaml(value: Any) -> str:
    """Return a value on one line, as `document.parse_scalar` reads it."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_yaml(key)}: {format_yaml(inner)}" for key, inner in value.items()) + "}"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    plain = re.fullmatch(r"[A-Za-z0-9_./~][-A-Za-z0-9_./~+ ]*", value) and parse_scalar(value) == value
    return str(value) if plain else json.dumps(value, ensure_ascii=False)
