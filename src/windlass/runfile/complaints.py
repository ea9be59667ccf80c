"""pydantic's errors as plain sentences: what is wrong, where it stands, what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from windlass.errors import Problem
from windlass.runfile.document import Steps, dotted
from windlass.runfile.fields import RunFile
from windlass.runfile.names import NOT_TAKEN, NOT_VALUES, RENAMED, close_names
from windlass.runfile.reference import Root, annotation_at, keys, options, owners, section, words
from windlass.runfile.script import SECTIONS, ScriptRun

Where = Callable[[Steps], str]

_BOUNDS = {
    "greater_than": ("gt", "must be above {:g}"),
    "greater_than_equal": ("ge", "must be at least {:g}"),
    "less_than": ("lt", "must be below {:g}"),
    "less_than_equal": ("le", "must be at most {:g}"),
}
_MAPPINGS = ("model", "lora", "data", "train", "cluster", "watch", "script")


def complaints(
    error: ValidationError, tree: dict[str, Any], where: Where, root: Root = RunFile
) -> tuple[list[Problem], list[Steps]]:
    """Every problem once, and the paths that they are about."""
    grouped: dict[Steps, list[Any]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(_steps(item, tree), []).append(item)
    # In `a list or text`, a wrong item of the list is also "not text": the deeper complaint is the one to make.
    kept = {s: i for s, i in grouped.items() if not any(len(o) > len(s) and o[: len(s)] == s for o in grouped)}
    headless: list[Steps] = [
        steps for steps in kept if len(steps) == 1 and _unknown(kept[steps]) and _owner(steps[0], root)
    ]
    problems = _without_header(headless, tree, where, root)
    for steps, items in kept.items():
        if steps in headless:
            continue
        problem = _unknown_key(steps, where, root) if _unknown(items) else _wrong_value(steps, items, tree, where, root)
        problems.append(problem)
    return problems, list(kept)


def _steps(item: Any, tree: Any) -> Steps:
    """pydantic's location without its names of alternatives: what can be followed in the file."""
    steps: list[str | int] = []
    current = tree
    for part in item["loc"]:
        is_key = isinstance(current, dict) and isinstance(part, str) and part in current
        if is_key or (isinstance(current, list) and isinstance(part, int) and part < len(current)):
            current = current[part]
            steps.append(part)
    if item["type"] == "missing":
        steps.append(item["loc"][-1])
    return tuple(steps)


def _unknown(items: list[Any]) -> bool:
    return any(item["type"] == "extra_forbidden" for item in items)


def _owner(key: str | int, root: Root) -> str:
    """The section whose key this is, if it stands at the top of the file by mistake."""
    renamed = RENAMED if root is RunFile else {}
    new = next((new for old, new in renamed.items() if old.rpartition(".")[2] == key), None)
    found = [path for path in owners(str(key), root) if path.count(".") == 1] or ([new] if new else [])
    return found[0].partition(".")[0] if found else ""


def _without_header(headless: list[Steps], tree: dict[str, Any], where: Where, root: Root) -> list[Problem]:
    problems = []
    for owner in dict.fromkeys(_owner(steps[0], root) for steps in headless):
        lost = [str(steps[0]) for steps in headless if _owner(steps[0], root) == owner]
        first, plural = where((lost[0],)), len(lost) > 1
        known = owner in root.model_fields
        what = f"{', '.join(lost)} {'belong' if plural else 'belongs'} to `{owner}`"
        if owner in tree:
            hint = f"move {'them' if plural else 'it'} under `{owner}:`"
        else:
            what += f", but the header `{owner}:` is missing above {'them' if plural else 'it'}"
            hint = f"put the header back and indent its keys:\n{owner}:\n" + "\n".join(f"  {key}: …" for key in lost)
        problems.append(Problem(what, first, hint if known else f"move it under `{owner}:`"))
    return problems


def _unknown_key(steps: Steps, where: Where, root: Root) -> Problem:
    key, parent = str(steps[-1]), dotted(steps[:-1])
    if other := _other_kind(steps, root):
        return Problem(other[0], where(steps), other[1])
    there = section(annotation_at(steps[:-1], root))
    names = [*there.model_fields] if there is not None else []
    names += [old.rpartition(".")[2] for old in RENAMED if old.rpartition(".")[0] == parent]
    place = where(steps)
    home = f"`{parent}` has no such key" if parent else "a run file has no such section"
    if key in NOT_TAKEN:
        return Problem(home, place, NOT_TAKEN[key])
    elsewhere = [path for path in owners(key, root) if path != dotted(steps)]
    if elsewhere:
        return Problem(
            f"{home}; it belongs to `{elsewhere[0].rpartition('.')[0] or 'the top'}`", place, _move(elsewhere)
        )
    near = close_names(key, names)
    if near:
        return Problem(home, place, f"nearest: {', '.join(near)}")
    far = close_names(key, [path.rpartition(".")[2] for path in keys(root)], 1)
    if far:
        return Problem(home, place, f"nearest: {owners(far[0], root)[0]}")
    return Problem(home, place, f"there are: {', '.join(names)}" if names else "take it out")


def _move(paths: list[str]) -> str:
    return f"write it as {' or '.join(paths)}"


def _other_kind(steps: Steps, root: Root) -> tuple[str, str] | None:
    """What to say of a key that the other kind of run has."""
    path = dotted(steps)
    if root is RunFile and path == "script":
        return "is a section of runs of kind: script, and this is none", "write `kind: script` above it"
    if root is ScriptRun and path in keys(RunFile) and path not in keys(ScriptRun):
        hint = f"take it out; the script has its own settings: {', '.join(SECTIONS)} are what windlass has to know"
        return "is of runs that train a language model, and this one is of kind: script", hint
    return None


def nearest_paths(path: str, root: Root = RunFile) -> list[str]:
    """Paths that a misspelt one may have meant: by its whole, then by its last name."""
    by_last = {known.rpartition(".")[2]: known for known in reversed(keys(root))}
    last = close_names(path.rpartition(".")[2], by_last)
    return list(dict.fromkeys([*close_names(path, keys(root)), *(by_last[name] for name in last)]))[:3]


def _wrong_value(steps: Steps, items: list[Any], tree: Any, where: Where, root: Root) -> Problem:
    place, value = where(steps), _value(tree, steps)
    key = dotted(steps).partition("[")[0]
    hint = NOT_VALUES.get((key, str(value)), f"`windlass explain {key}` says what it is")
    for item in items:
        if item["type"] == "missing":
            return Problem("is missing", place, f"it takes {_takes(steps, root)}")
        if item["type"] == "value_error":
            return Problem(item["msg"].removeprefix("Value error, "), place, hint)
        if item["type"] in _BOUNDS:
            name, sentence = _BOUNDS[item["type"]]
            return Problem(f"{sentence.format(item['ctx'][name])}, not {shown(value)}", place, hint)
        if item["type"] in ("string_too_short", "too_short"):
            return Problem("must not be empty", place, hint)
        if item["type"] == "finite_number":
            return Problem(f"must be a finite number, not {shown(value)}", place, hint)
    if value is None:
        return Problem(f"must be {_takes(steps, root)}, not empty", place, "write a value, or take the line out")
    return Problem(f"must be {_takes(steps, root)}, not {shown(value)}", place, _mend(steps, value, root) or hint)


def _takes(steps: Steps, root: Root) -> str:
    if len(steps) == 1 and steps[0] in _MAPPINGS:
        return "a section: keys and values, indented under it"
    return "lora or script" if steps == ("kind",) else words(annotation_at(steps, root))


def _mend(steps: Steps, value: Any, root: Root) -> str:
    kinds = options(annotation_at(steps, root))
    if isinstance(value, bool | int | float) and str in kinds:
        return f'write it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    if isinstance(value, str):
        if bool in kinds and value.lower() in ("true", "false"):
            return f"write {value.lower()} without quotes"
        if {int, float} & set(kinds) and re.fullmatch(r"[-+0-9._eE]+", value):
            return "write the number without quotes and without leading zeros"
        near = close_names(value, _takes(steps, root).replace(" or ", ", ").split(", "), 1)
        return f"nearest: {near[0]}" if near else ""
    inner = section(annotation_at(steps, root))
    if inner is not None and issubclass(inner, BaseModel):
        return f"it has {', '.join(list(inner.model_fields)[:6])}"
    return ""


def _value(tree: Any, steps: Steps) -> Any:
    for step in steps:
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def shown(value: Any) -> str:
    """A value as the user wrote it, cut short."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}…"
