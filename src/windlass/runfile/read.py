"""A YAML file and overrides -> a typed run, or every problem at once; and where each value was said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from windlass.errors import Problem, UserError, raise_all
from windlass.runfile import overrides as overriding
from windlass.runfile.complaints import complaints
from windlass.runfile.document import Document, Steps, dotted, load
from windlass.runfile.fields import RunFile
from windlass.runfile.names import RENAMED
from windlass.runfile.rules import contradictions, remarks
from windlass.runfile.script import ScriptRun

_SECTIONS = ("script", "model", "lora", "data", "train", "layout", "cluster", "watch")


@dataclass(frozen=True, slots=True)
class Said:
    """The places of all values of a run file."""

    path: Path
    notes: tuple[str, ...]
    places: dict[str, str]

    def where(self, path: str) -> str:
        """Where a value comes from: `run.yaml:12: lora.r`, `--override lora.r=32`, or `default: lora.r`."""
        return _where(self.places, path)

    def given(self, path: str) -> bool:
        """Whether somebody said it: in the file or as an override."""
        return not self.where(path).startswith("default: ")


@dataclass(frozen=True, slots=True)
class Loaded(Said):
    """The run file of a language model's run, and the place of every value."""

    run: RunFile


@dataclass(frozen=True, slots=True)
class LoadedScript(Said):
    """The run file of a script's run, and the place of every value."""

    run: ScriptRun


KINDS: dict[str, type[RunFile | ScriptRun]] = {"lora": RunFile, "script": ScriptRun}


def read(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """The run of a run file that trains a language model; for what makes sense for no other."""
    loaded = read_any(path, overrides)
    if isinstance(loaded, LoadedScript):
        hint = "plan, check, train, submit, watch and report are for scripts too"
        raise UserError("this is for runs that train a language model, not for a script", loaded.where("kind"), hint)
    return loaded


def kind(path: Path, overrides: Sequence[str] = ()) -> str:
    """Which kind a run file is, before all that may be wrong with it is looked at: lora where nothing else is said."""
    try:
        value = load(Path(path)).value
    except UserError:
        return "lora"
    return "script" if isinstance(value, dict) and _kind(value, overrides) == "script" else "lora"


def read_any(path: Path, overrides: Sequence[str] = ()) -> Loaded | LoadedScript:
    """The run of a run file. Raises UserError with all that is wrong, each with its place and a hint."""
    document = load(Path(path))
    tree = _mapping(document)
    places = {dotted(steps): document.place(line, steps) for steps, line in document.lines.items() if steps}
    problems = list(document.problems)
    root = KINDS.get(_kind(tree, overrides), RunFile)
    notes = _renamed(tree, places, problems) if root is RunFile else []
    for text in overrides:
        done = overriding.apply(tree, text, root)
        if isinstance(done, Problem):
            problems.append(done)
        else:
            _overridden(places, tree, done, text)
    if isinstance(tree.get("layout"), str) and "layout" in places:
        places["layout.name"] = places["layout"]
    tree = {key: _section(key, value) for key, value in tree.items()}
    run, wrong = _validated(tree, root, lambda steps: _place(places, steps, document.file), problems)

    def where(path: str) -> str:
        return _where(places, path)

    def sound(path: str) -> bool:
        return not any(path == bad or path.startswith((f"{bad}.", f"{bad}[")) for bad in wrong)

    problems += contradictions(run, where, sound=sound)
    raise_all(problems)
    told = (*notes, *remarks(run, where))
    if isinstance(run, ScriptRun):
        return LoadedScript(Path(path), told, places, run)
    return Loaded(Path(path), told, places, run)


def _kind(tree: dict[str, Any], overrides: Sequence[str]) -> str:
    """The override counts; a kind that there is not is reported with all else, as of a language model's run."""
    said = [text.partition("=")[2] for text in overrides if text.partition("=")[0].strip() == "kind"]
    return str([tree.get("kind"), *said][-1])


def _mapping(document: Document) -> dict[str, Any]:
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "plain text or a single value"
        hint = "it begins with sections such as `model:`, `data:`, `train:`; `windlass init` writes one"
        raise_all([*document.problems, Problem(f"holds {kind}, not sections", document.file, hint)])
    if not document.value:
        raise UserError("is empty", document.file, "`windlass init > run.yaml` writes a commented one to start from")
    return {key: dict(value) if isinstance(value, dict) else value for key, value in document.value.items()}


def _renamed(tree: dict[str, Any], places: dict[str, str], problems: list[Problem]) -> list[str]:
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
            continue  # reported as a section that is none
        if new_key in target:
            what = f"is another spelling of {new}, which is there too ({places.get(new, new)})"
            problems.append(Problem(what, places.get(old, old), "keep one of them"))
            continue
        target[new_key] = value
        places[new] = places.get(old, old)
        notes.append(f"{places[new]} is read as {new}")
    return notes


def _section(key: str, value: Any) -> Any:
    """A header with nothing under it is an empty section; `layout: hybrid` names the layout."""
    if key == "layout" and isinstance(value, str):
        return {"name": value}
    return {} if value is None and key in _SECTIONS else value


def _overridden(places: dict[str, str], tree: Any, steps: Steps, text: str) -> None:
    """The override is the place of its key, and of every key inside the value that it gave."""
    path, value = dotted(steps), tree
    for known in [known for known in places if known.startswith((f"{path}.", f"{path}["))]:
        del places[known]
    for step in steps:
        value = value[step]

    def place(path: str, value: Any) -> None:
        places[path] = f"--override {text}"
        for key, inner in value.items() if isinstance(value, dict) else ():
            place(f"{path}.{key}", inner)

    place(path, value)


def _place(places: dict[str, str], steps: Steps, file: str) -> str:
    """Where to look for what stands, or should stand, at this path."""
    for length in range(len(steps), 0, -1):
        found = places.get(dotted(steps[:length]))
        if found is not None:
            return found if length == len(steps) or found.startswith("--") else _inside(found, steps, length)
    return f"{file}: {dotted(steps)}" if steps else file


def _inside(found: str, steps: Steps, length: int) -> str:
    return found.removesuffix(dotted(steps[:length])) + dotted(steps)


def _where(places: dict[str, str], path: str) -> str:
    if path in places:
        return places[path]
    holder = path.partition("[")[0]  # an entry of a list that was overridden as a whole
    if places.get(holder, "").startswith("--override"):
        return places[holder]
    return f"default: {path}"


def _validated(
    tree: dict[str, Any], root: type[RunFile | ScriptRun], where: Callable[[Steps], str], problems: list[Problem]
) -> tuple[RunFile | ScriptRun, list[str]]:
    """The run; where values are wrong they are reported and taken out, so that contradictions among the others show."""
    wrong: list[str] = []
    for _ in range(8):
        try:
            return root.model_validate(tree), wrong
        except ValidationError as error:
            found, paths = complaints(error, tree, where, root)
            problems += found
            wrong += [dotted(steps) for steps in paths]
            for steps in paths:
                tree = _without(tree, steps)
    return (RunFile() if root is RunFile else ScriptRun(kind="script")), list(_SECTIONS)


def _without(tree: dict[str, Any], steps: Steps) -> dict[str, Any]:
    """The tree without the key that holds this path: a list or free mapping goes as a whole."""
    section, key = steps[0] if steps else "", steps[1] if len(steps) > 1 else None
    kept = {name: value for name, value in tree.items() if name != section}
    if key is not None and isinstance(tree.get(str(section)), dict):
        kept[str(section)] = {name: value for name, value in tree[str(section)].items() if name != key}
    return kept
