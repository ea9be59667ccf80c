"""`--override a.b=value`: a path of the run file, and a value read as that key's type wants it."""

from __future__ import annotations

import re
from typing import Any, get_origin

from windlass.errors import Problem, UserError
from windlass.runfile.complaints import nearest_paths
from windlass.runfile.document import Steps, dotted, parse, scalar, unprintable
from windlass.runfile.fields import RunFile
from windlass.runfile.names import NOT_TAKEN, RENAMED
from windlass.runfile.reference import Root, annotation_at, options, section

_STEP = re.compile(r"\.?([^.\[\]=]+)|\[(\d{1,6})\]")


def apply(tree: dict[str, Any], text: str, root: Root = RunFile) -> Steps | Problem:
    """Put the override's value into the tree; the path that it set, or what is wrong with it."""
    place = f"--override {text}"
    if unprintable(text):
        return Problem("holds a character that can't be printed", f"--override {ascii(text)[1:-1]}", "take it out")
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        return Problem("is not of the form a.b=value", place, "such as --override train.learning_rate=1e-4")
    steps = _steps(path, root)
    if steps is None or annotation_at(steps, root) is None:
        near = nearest_paths(path, root)
        hint = f"nearest: {', '.join(near)}" if near else "`windlass schema` lists every key"
        hint = NOT_TAKEN.get(path.rpartition(".")[2], hint)
        return Problem(f"the run file has no {path}", place, hint)
    try:
        _put(tree, steps, _typed(value, annotation_at(steps, root)), root)
    except UserError as error:
        return Problem(error.problems[0].problem, place, error.problems[0].hint)
    return steps


def _steps(path: str, root: Root) -> Steps | None:
    """The steps of a path, old spellings translated; keys of free mappings may hold dots."""
    steps: Steps = ()
    position = 0
    while position < len(path):
        free = steps and _free(annotation_at(steps, root))
        if free:
            return (*steps, path[position:].removeprefix("."))
        found = _STEP.match(path, position)
        if found is None:
            return None
        name, index = found.groups()
        numbered = index or (name if name.isdecimal() and _is_list(annotation_at(steps, root)) else None)
        steps = (*steps, int(numbered) if numbered else name)
        position = found.end()
        if len(steps) > 12:
            return None
        if root is RunFile and len(steps) == 2 and dotted(steps) in RENAMED:
            steps = tuple(RENAMED[dotted(steps)].split("."))
    return steps


def _is_list(annotation: Any) -> bool:
    return any(get_origin(option) is list for option in options(annotation))


def _free(annotation: Any) -> bool:
    """A mapping with plain values: the rest of a path is its key, whatever dots that has."""
    found = [option for option in options(annotation) if get_origin(option) is dict]
    return bool(found) and section(found[0].__args__[1]) is None


def _typed(text: str, annotation: Any) -> Any:
    kinds = options(annotation)
    if text in ("null", "~", "Null", "NULL", "") and (type(None) in kinds or str not in kinds):
        return None
    origins = {get_origin(kind) for kind in kinds}
    if section(annotation) is not None and (text.startswith("{") or str not in kinds):
        return _yaml(text)
    if (text.startswith("[") and list in origins) or (text.startswith("{") and dict in origins):
        return _yaml(text)
    if str in kinds and len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return _yaml(text)
    value = scalar(text)
    takes_number = {int, float} & set(kinds) and isinstance(value, int | float) and not isinstance(value, bool)
    if takes_number or (bool in kinds and isinstance(value, bool)):
        return float(value) if int not in kinds and takes_number else value
    return text if str in kinds else value


def _yaml(text: str) -> Any:
    document = parse(text, "--override")
    if document.problems:
        raise UserError.of(document.problems)
    return document.value


def _put(tree: dict[str, Any], steps: Steps, value: Any, root: Root) -> None:
    current: Any = tree
    for depth, step in enumerate(steps):
        last = depth == len(steps) - 1
        if isinstance(step, int):
            if step > len(current) or (step == len(current) and not last):
                what = f"{dotted(steps[:depth])} has {len(current)} items: there is no [{step}]"
                raise UserError(what, "", f"[{len(current)}] would append one")
            if step == len(current):
                current.append(None)
        if last:
            current[step] = value
            return
        there = current[step] if isinstance(step, int) else current.get(step)
        current[step] = current = _container(
            there, steps[: depth + 1], list_next=isinstance(steps[depth + 1], int), root=root
        )


def _container(there: Any, steps: Steps, *, list_next: bool, root: Root) -> Any:
    """What the next step goes into: what is there, or what its absence stands for."""
    if list_next:
        there = _default(steps, root) if there is None else there
        if not isinstance(there, list):
            raise UserError(f"{dotted(steps)} is not a list here", "", "give the whole list: [a, b]")
        return list(there)
    if isinstance(there, dict):
        return dict(there)
    return {"name": there} if steps == ("layout",) and isinstance(there, str) else {}


def _default(steps: Steps, root: Root) -> Any:
    value: Any = root.model_construct()
    for step in steps:
        value = getattr(value, step, None) if isinstance(step, str) else None
    return value if value is not None else []
