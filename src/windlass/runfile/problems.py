"""pydantic's errors as problems with a place and a hint."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from windlass.errors import Problem
from windlass.runfile.document import Steps, dotted
from windlass.runfile.fields import RunFile, ScriptRun
from windlass.runfile.names import NOT_TAKEN, NOT_VALUES, OTHER_NAMES, RENAMED, close_names
from windlass.runfile.reference import Root, annotation_at, keys, owners, section

# What follows pydantic's "Input should be", in plainer words.
WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid list": "a list",
    "a valid dictionary": "a mapping of keys to values",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def problems_of(
    error: ValidationError, tree: dict[str, Any], where: Callable[[Steps], str], root: Root
) -> dict[Steps, Problem]:
    """One problem for each path that is wrong."""
    grouped: dict[Steps, list[Any]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(_steps(item, tree), []).append(item)
    problems = {}
    for steps, items in grouped.items():
        # For "a list or text", a wrong item of the list is also "not text": only the deeper problem is the user's.
        if any(len(other) > len(steps) and other[: len(steps)] == steps for other in grouped):
            continue
        if any(item["type"] == "extra_forbidden" for item in items):
            what, hint = unknown_key(steps, root, tree)
        else:
            what, hint = _wrong_value(steps, items, tree, root)
        problems[steps] = Problem(what, where(steps), hint)
    return problems


def _steps(item: Any, tree: Any) -> Steps:
    """pydantic's location without its names of alternatives: what can be followed in the file."""
    steps: list[str | int] = []
    for part in item["loc"]:
        in_mapping = isinstance(tree, dict) and isinstance(part, str) and part in tree
        if in_mapping or (isinstance(tree, list) and isinstance(part, int) and part < len(tree)):
            tree = tree[part]
            steps.append(part)
    return (*steps, item["loc"][-1]) if item["type"] == "missing" else tuple(steps)


def _wrong_value(steps: Steps, items: list[Any], tree: Any, root: Root) -> tuple[str, str]:
    """What is wrong, and a hint."""
    key, types = dotted(steps).partition("[")[0], {item["type"] for item in items}
    explain = f"see `windlass explain {key}`"
    if "missing" in types:
        return "is missing", explain
    value: Any = tree
    for step in steps:
        value = value[step]
    messages = dict.fromkeys(item["msg"] for item in items)
    own = [message for message in messages if message.startswith("Value error, ")]
    if own:
        return own[0].removeprefix("Value error, "), explain
    if types & {"string_too_short", "too_short"}:
        return "must not be empty", explain
    wanted = " or ".join(message.removeprefix("Input should be ") for message in messages)
    if steps == ("kind",):
        wanted = "'lora' or 'script'"
    wanted = re.sub(r"a valid dictionary or instance of \w+", "a section", wanted)
    for upstream, plain in WORDS.items():
        wanted = wanted.replace(upstream, plain)
    what = f"must be {wanted.replace('a whole number or a number', 'a number')}, not {shown(value)}"
    if (key, str(value)) in NOT_VALUES:
        return what, NOT_VALUES[key, str(value)]
    if value is None:
        return what, "write a value, or remove the line"
    if inner := section(annotation_at(steps, root)):
        return what, f"indent its keys below it: {', '.join(list(inner.model_fields)[:6])} …"
    if isinstance(value, str):
        if "bool_type" in types and value.lower() in ("true", "false"):
            return what, f"write {value.lower()} without quotes"
        if types & {"int_type", "float_type"} and re.fullmatch(r"[-+0-9._eE]+", value):
            return what, "write the number without quotes and without leading zeros"
        if near := close_names(value, re.findall(r"'([^']+)'", wanted), 1):
            return what, f"did you mean {near[0]}?"
    elif "string_type" in types and not isinstance(value, dict | list):
        return what, f'write it in quotes: "{shown(value)}"'
    return what, explain


def unknown_key(steps: Steps, root: Root, tree: dict[str, Any] | None = None) -> tuple[str, str]:
    """What is wrong with a key that doesn't exist, and which one may have been meant."""
    key, parent = str(steps[-1]), dotted(steps[:-1])
    path = dotted(steps)
    if root is RunFile and path == "script":
        return "is a section of `kind: script` runs", "write `kind: script` above it"
    if root is ScriptRun and path in keys(RunFile):
        return "is not for `kind: script` runs", "remove it: the script has its own settings"
    what = f"`{parent}` has no such key" if parent else "a run file has no such section"
    if key in NOT_TAKEN:
        return what, NOT_TAKEN[key]
    there = section(annotation_at(steps[:-1], root))
    own = [*there.model_fields] if there is not None else []
    own += [old.rpartition(".")[2] for old in RENAMED if old.rpartition(".")[0] == parent]
    other = OTHER_NAMES.get(key.lower(), "")
    other = other if other in keys(root) else ""
    if other.rpartition(".")[0] == parent and other:
        return what, f"write {other}"
    elsewhere = [path for path in owners(key, root) if path != dotted(steps)]
    if not parent and elsewhere and tree is not None:
        header = elsewhere[0].partition(".")[0]
        return f"belongs to `{header}`", f"indent it under `{header}:`" + (
            "" if header in tree else f"; the line `{header}:` is missing"
        )
    if elsewhere:
        return f"{what}; it belongs to `{elsewhere[0].rpartition('.')[0] or 'the top'}`", f"write {elsewhere[0]}"
    near = close_names(key, own)
    if other and not (near and parent):
        return what, f"write {other}"
    if near:
        return what, f"did you mean {', '.join(near)}?"
    if far := close_names(key, [path.rpartition(".")[2] for path in keys(root)], 1):
        return what, f"did you mean {owners(far[0], root)[0]}?"
    if len(own) > 12:
        return what, f"see `windlass explain {parent}`"
    return what, f"its keys are {', '.join(own)}" if own else "remove it"


def shown(value: Any) -> str:
    """A value as the user wrote it, cut short."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}…"
