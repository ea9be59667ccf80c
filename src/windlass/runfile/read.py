"""A run file and `--override`s to a typed run, or every problem at once; and where each value was set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from windlass.errors import Problem, UserError, raise_all
from windlass.runfile.document import Document, Steps, dotted, load, parse, scalar, unprintable
from windlass.runfile.fields import RunFile, ScriptRun
from windlass.runfile.names import RENAMED
from windlass.runfile.problems import problems_of, unknown_key
from windlass.runfile.reference import SECTIONS, Root, annotation_at, items, section
from windlass.runfile.rules import contradictions, remarks


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A run file's path, what is worth knowing about it, and where its values were set."""

    path: Path
    notes: tuple[str, ...]
    places: dict[str, str]

    def where(self, path: str) -> str:
        """Where a value was set: `run.yaml:12: lora.r`, `--override lora.r=32`, or `default: lora.r`."""
        overridden_list = self.places.get(path.partition("[")[0], "")
        default = overridden_list if overridden_list.startswith("--override") else f"default: {path}"
        return self.places.get(path, default)

    def given(self, path: str) -> bool:
        """Whether the file or an override sets it."""
        return not self.where(path).startswith("default: ")


@dataclass(frozen=True, slots=True)
class Loaded(LoadedFile):
    """The run file of a language model's run."""

    run: RunFile


@dataclass(frozen=True, slots=True)
class LoadedScript(LoadedFile):
    """The run file of a `kind: script` run."""

    run: ScriptRun


def read(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a run file that trains a language model."""
    loaded = read_any(path, overrides)
    if isinstance(loaded, LoadedScript):
        hint = "scripts have plan, check, train, submit, watch and report"
        raise UserError("this command is for language models, not for `kind: script`", loaded.where("kind"), hint)
    return loaded


def kind(path: Path, overrides: Sequence[str] = ()) -> str:
    """`lora` or `script`, without looking at anything else in the file."""
    try:
        value = load(Path(path)).value
    except UserError:
        return "lora"  # `read` reports what is wrong
    return "script" if isinstance(value, dict) and _root(value, overrides) is ScriptRun else "lora"


def _root(tree: dict[str, Any], overrides: Sequence[str]) -> type[RunFile | ScriptRun]:
    overridden = [text.partition("=")[2] for text in overrides if text.partition("=")[0].strip() == "kind"]
    return ScriptRun if [tree.get("kind"), *overridden][-1] == "script" else RunFile


def read_any(path: Path, overrides: Sequence[str] = ()) -> Loaded | LoadedScript:
    """Read a run file of either kind. Raises UserError with all that is wrong, each with its place and a hint."""
    document = load(Path(path))
    tree = _mapping(document)
    places = {dotted(steps): document.place(line, steps) for steps, line in document.lines.items() if steps}
    problems = list(document.problems)
    root = _root(tree, overrides)
    notes = _rename(tree, places, problems) if root is RunFile else []
    for text in overrides:
        try:
            steps, value = _override(tree, text, root)
        except UserError as error:
            problems += error.problems
            continue
        for known in [known for known in places if known.startswith((f"{dotted(steps)}.", f"{dotted(steps)}["))]:
            del places[known]
        _set_places(places, dotted(steps), value, f"--override {text}")
    if isinstance(tree.get("layout"), str):
        tree["layout"] = {"name": tree["layout"]}
        places["layout.name"] = places["layout"]
    tree.update({name: {} for name in SECTIONS if name in tree and tree[name] is None})

    run, wrong, more = _validate(tree, root, places, document.file)

    def is_valid(path: str) -> bool:
        return not any(path == bad or path.startswith((f"{bad}.", f"{bad}[")) for bad in wrong)

    where = LoadedFile(Path(path), (), places).where
    problems += [*more, *contradictions(run, where, is_valid=is_valid)]
    line = re.compile(re.escape(document.file) + r":(\d+)")
    raise_all(sorted(problems, key=lambda each: int(found[1]) if (found := line.match(each.where)) else 0))
    notes += remarks(run, where)
    if isinstance(run, ScriptRun):
        return LoadedScript(Path(path), tuple(notes), places, run)
    return Loaded(Path(path), tuple(notes), places, run)


def _mapping(document: Document) -> dict[str, Any]:
    if not isinstance(document.value, dict):
        what = f"contains {'a list' if isinstance(document.value, list) else 'a single value'}, not sections"
        hint = "it needs sections such as `model:`, `data:`, `train:`; `windlass init` writes one"
        raise_all([*document.problems, Problem(what, document.file, hint)])
    if not document.value:
        raise UserError("is empty", document.file, "`windlass init > run.yaml` writes one to start from")
    return {key: dict(value) if isinstance(value, dict) else value for key, value in document.value.items()}


def _rename(tree: dict[str, Any], places: dict[str, str], problems: list[Problem]) -> list[str]:
    """Move old spellings to where they belong, values and places alike."""
    notes: list[str] = []
    for old, new in RENAMED.items():
        (old_section, _, old_key), (new_section, _, new_key) = old.partition("."), new.partition(".")
        if not isinstance(tree.get(old_section), dict) or old_key not in tree[old_section]:
            continue
        if tree.get(new_section) is None:
            tree[new_section] = {}
        target = tree[new_section]
        value = tree[old_section].pop(old_key)
        if not isinstance(target, dict):
            continue  # reported as a section that isn't one
        if new_key in target:
            what = f"is another name of {new}, which is set too ({places.get(new, new)})"
            problems.append(Problem(what, places.get(old, old), "remove one of them"))
            continue
        target[new_key] = value
        places[new] = places.get(old, old)
        notes.append(f"{places[new]} is read as {new}")
    return notes


def _validate(
    tree: dict[str, Any], root: type[RunFile | ScriptRun], places: dict[str, str], file: str
) -> tuple[RunFile | ScriptRun, list[str], list[Problem]]:
    """The run, the wrong paths and their problems. Wrong keys are removed, to find contradictions among the others."""
    wrong: list[str] = []
    problems: list[Problem] = []
    for _ in range(8):
        try:
            return root.model_validate(tree), wrong, problems
        except ValidationError as error:
            found = problems_of(error, tree, lambda steps: _nearest_place(places, steps, file), root)
        problems += found.values()
        wrong += map(dotted, found)
        for steps in found:  # a list or free mapping goes as a whole
            if len(steps) > 1 and isinstance(tree.get(str(steps[0])), dict):
                tree[str(steps[0])] = {key: value for key, value in tree[str(steps[0])].items() if key != steps[1]}
            elif steps:
                tree.pop(str(steps[0]), None)
    return (RunFile() if root is RunFile else ScriptRun(kind="script")), [*wrong, *SECTIONS], problems


def _nearest_place(places: dict[str, str], steps: Steps, file: str) -> str:
    """Where a path is set, or what encloses it."""
    for length in range(len(steps), 0, -1):
        outer = dotted(steps[:length])
        if outer in places:
            place = places[outer]
            exact = length == len(steps) or place.startswith("--")
            return place if exact else place.removesuffix(outer) + dotted(steps)
    return f"{file}: {dotted(steps)}" if steps else file


# --- overrides ------------------------------------------------------------------------------------------------------

_STEP = re.compile(r"\.?([^.\[\]=]+)|\[(\d{1,6})\]")


def _override(tree: dict[str, Any], text: str, root: Root) -> tuple[Steps, Any]:
    """Put the value of `a.b=value` into the tree."""
    place = f"--override {text}"
    if unprintable(text):
        raise UserError("contains a character that can't be printed", f"--override {ascii(text)[1:-1]}", "remove it")
    path, equals, value_text = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise UserError("is not of the form a.b=value", place, "such as --override train.learning_rate=1e-4")
    steps = _path(path, root)
    annotation = annotation_at(steps, root)
    if not steps or annotation is None:
        hint = unknown_key(steps or (path,), root)[1]
        raise UserError(f"the run file has no {path}", place, hint)
    try:
        value = _typed(value_text, annotation)
        current: Any = tree
        for depth, step in enumerate(steps[:-1]):
            current[step] = current = _container(current, steps[: depth + 1], steps[depth + 1], root)
        if isinstance(current, list) and steps[-1] == len(current):
            current.append(value)
        else:
            current[steps[-1]] = value
    except UserError as error:
        raise UserError(error.problems[0].problem, place, error.problems[0].hint) from None
    return steps, value


def _path(path: str, root: Root) -> Steps:
    """The steps of a path, old spellings translated; empty if it isn't one."""
    steps: Steps = ()
    position = 0
    while position < len(path):
        annotation = annotation_at(steps, root)
        values = items(annotation, dict) if steps else None
        if values is not None and section(values) is None:
            return (*steps, path[position:].removeprefix("."))  # a key of a free mapping may contain dots
        found = _STEP.match(path, position)
        if found is None or len(steps) > 12:
            return ()
        name, index = found.groups()
        if index is None and name.isdecimal() and items(annotation, list) is not None:
            index = name
        steps = (*steps, int(index) if index else name)
        position = found.end()
        if root is RunFile and dotted(steps) in RENAMED:
            steps = tuple(RENAMED[dotted(steps)].split("."))
    return steps


def _typed(text: str, annotation: Any) -> Any:
    """The value as the key's type wants it: as YAML if that is valid, else as the text that was given."""
    failure: UserError | None = None
    value = scalar(text)
    if text.startswith(("[", "{", '"', "'")):
        try:
            document = parse(text, "--override")
            raise_all(document.problems)
            value = document.value
            text = value if isinstance(value, str) else text  # quotes are no part of the value
        except UserError as error:
            failure = error
    for candidate in (value, text):
        try:
            TypeAdapter(annotation).validate_python(candidate, strict=True)
        except ValidationError:
            continue
        return candidate
    if failure:
        raise failure
    return value


def _container(parent: Any, steps: Steps, following: str | int, root: Root) -> Any:
    """A copy of the list or mapping that the next step goes into."""
    step, path = steps[-1], dotted(steps)
    if isinstance(step, int) and step >= len(parent):
        raise UserError(
            f"{dotted(steps[:-1])} has {len(parent)} items: there is no [{step}]", "", "give the whole item"
        )
    there = parent[step] if isinstance(step, int) else parent.get(step)
    if isinstance(following, str):
        if path == "layout" and isinstance(there, str):
            return {"name": there}
        return dict(there) if isinstance(there, dict) else {}
    if there is None:
        there = root.model_construct()
        for name in steps:
            there = getattr(there, str(name), None)
    if there is not None and not isinstance(there, list):
        raise UserError(f"{path} is not a list here", "", "give the whole list: [a, b]")
    there = list(there or [])
    if following > len(there):
        raise UserError(f"{path} has {len(there)} items: there is no [{following}]", "", f"[{len(there)}] appends one")
    return there


def _set_places(places: dict[str, str], path: str, value: Any, place: str) -> None:
    """An override is the place of its key, and of every key inside its value."""
    places[path] = place
    for key, inner in value.items() if isinstance(value, dict) else ():
        _set_places(places, f"{path}.{key}", inner, place)
