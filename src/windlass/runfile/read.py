"""Read a run file and `--override`s into a typed run, or report every problem at once; and record where each value
was set."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from windlass.errors import DEFAULT, Problem, UserError, raise_all
from windlass.run_folder import TRIALS
from windlass.runfile.accelerate import AccelerateFile, translate
from windlass.runfile.document import Steps, find_unprintable, join_steps, load_document, parse_document, parse_scalar
from windlass.runfile.fields import RunFile, ScriptRun
from windlass.runfile.machines import PLATFORM_SECTIONS
from windlass.runfile.names import INSTEAD, NOT_TAKEN, NOT_VALUES, OTHER_NAMES, RENAMED, find_close_names
from windlass.runfile.reference import (
    SECTIONS,
    Root,
    find_annotation,
    find_item_annotation,
    find_owners,
    find_section,
    format_value,
    list_keys,
)
from windlass.runfile.rules import find_contradictions, list_remarks
from windlass.runfile.sweep import Trial, find_halving_problems, list_trials, why_shared

INCOMPLETE = "INCOMPLETE: "  # begins the first line of what `windlass import` could not translate in full


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A run file's path, notes about it, and where its values were set."""

    path: Path
    notes: tuple[str, ...]
    places: dict[str, str]

    def where(self, path: str) -> str:
        """Return where a value was set: `run.yaml:12: lora.r`, `--override lora.r=32`, or `default: lora.r`."""
        return self.places.get(path, DEFAULT + path)


@dataclass(frozen=True, slots=True)
class Loaded(LoadedFile):
    run: RunFile
    trials: tuple["Loaded", ...] = ()  # of a sweep: the run file of each
    trial: Trial | None = None  # which of them this is

    @property
    def runs(self) -> "tuple[Loaded, ...]":
        """Return the runs that this file makes: itself, or the trials of its sweep."""
        return self.trials or (self,)


@dataclass(frozen=True, slots=True)
class LoadedScript(LoadedFile):
    run: ScriptRun


def read_run_file(path: Path, overrides: Sequence[str] = (), accelerate: AccelerateFile | None = None) -> Loaded:
    """Read a run file that trains a language model."""
    loaded = read_any(path, overrides, accelerate)
    if isinstance(loaded, LoadedScript):
        hint = "scripts have plan, check, train, submit, watch and report"
        what = "this command is for language models, not for `kind: script`"
        raise UserError(what, loaded.where("kind"), hint, "not-for-scripts")
    return loaded


def read_kind(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return `lora` or `script`, without checking anything else in the file."""
    try:
        value = load_document(Path(path)).value
    except UserError:
        return "lora"  # reading the run reports what is wrong
    return "script" if isinstance(value, dict) and _find_root(value, overrides) is ScriptRun else "lora"


def _find_root(tree: dict[str, Any], overrides: Sequence[str]) -> type[RunFile | ScriptRun]:
    overridden = [text.partition("=")[2] for text in overrides if text.partition("=")[0].strip() == "kind"]
    return ScriptRun if [tree.get("kind"), *overridden][-1] == "script" else RunFile


def parse_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE for a run file that is being written: only by the names that it has."""
    known = list_keys(RunFile)
    settings: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        key = "layout.name" if key == "layout" else key
        if key not in known or not equals:
            renamed = RENAMED.get(key) or OTHER_NAMES.get(key.rpartition(".")[2])
            close = [renamed] if renamed else find_close_names(key, known)
            hint = f"did you mean {', '.join(close)}?" if close else "write KEY=VALUE, such as data.packing=false"
            raise UserError("sets no key of the run file", f"--override {override}", hint, "unknown-key")
        section, _, inner = key.partition(".")
        name, *below = inner.split(".")
        steps = [f"{section}.{name}" if inner else section, *below]  # a section's values are settings of their own
        place = settings
        for step in steps[:-1]:
            if not isinstance(place.get(step), dict):
                place[step] = {}
            place = place[step]
        place[steps[-1]] = _convert_value(value, find_annotation(tuple(key.split("."))))
    return settings


def _refuse_incomplete(path: Path) -> None:
    """Refuse what `windlass import` could not translate in full: it would train something else."""
    first = ""
    with contextlib.suppress(OSError, ValueError):
        if path.is_file():  # a pipe or a device may never end
            with path.open(encoding="utf-8") as file:
                first = file.readline(2000)
    if first.startswith(f"# {INCOMPLETE}"):
        problem = f"is incomplete: {first.removeprefix(f'# {INCOMPLETE}').strip()}"
        hint = "mend those keys in the other tool's file and import it again; or set what they stand for here, "
        hint += "and remove this line"
        raise UserError(problem, f"{path}:1", hint, "incomplete")


def read_any(
    path: Path, overrides: Sequence[str] = (), accelerate: AccelerateFile | None = None
) -> Loaded | LoadedScript:
    """Read a run file of either kind. Raises a UserError with every problem, each with its place and a hint.
    `accelerate`: its settings become the run file's where that sets nothing."""
    _refuse_incomplete(Path(path))
    document = load_document(Path(path))
    tree = document.value
    problems = document.problems
    if not isinstance(tree, dict) or not tree:
        hint = "it needs sections such as `model:`, `data:`, `train:`; `windlass init > run.yaml` writes one"
        raise_all([*problems, Problem("contains no sections", document.file, hint, "no-sections")])
    places = {join_steps(steps): document.place(line, steps) for steps, line in document.lines.items() if steps}
    root = _find_root(tree, overrides)
    notes = _rename(tree, places, problems) if root is RunFile else []
    for text in overrides:
        try:
            _apply_override(tree, places, text, root)
        except UserError as error:
            problems += error.problems
    if isinstance(tree.get("layout"), str):
        places["layout.name"] = places["layout"]
    # A header may have nothing under it.
    tree.update({name: {} for name in SECTIONS if name in tree and tree[name] is None})
    cluster = tree.get("cluster")
    if isinstance(cluster, dict):
        cluster.update({name: {} for name in PLATFORM_SECTIONS.values() if name in cluster and cluster[name] is None})
    file_notes = _apply_accelerate(tree, places, accelerate, root, problems) if accelerate else []

    swept = copy.deepcopy(tree)
    run, found = _check(tree, root, places, document.file)
    problems += found
    line = partial(_find_line, document.file)
    raise_all(sorted(problems, key=line))
    assert run is not None
    where = LoadedFile(Path(path), (), places).where
    given = [*notes, *file_notes]
    notes += [*list_remarks(run, where), *file_notes]
    if isinstance(run, ScriptRun):
        return LoadedScript(Path(path), tuple(notes), places, run)
    loaded = Loaded(Path(path), tuple(notes), places, run)
    without = swept.get("sweep") == {} and loaded.where("sweep").startswith("--override")
    if "sweep" in swept and not without:
        trials, problems = _read_trials(loaded, swept, document.file, given)
        raise_all(sorted(problems, key=line))
        loaded = replace(loaded, trials=tuple(trials))
    return loaded


def _find_line(file: str, problem: Problem) -> int:
    match = re.match(re.escape(file) + r":(\d+)", problem.where)
    return int(match[1]) if match else 0


def _check(
    tree: dict[str, Any], root: type[RunFile | ScriptRun], places: dict[str, str], file: str
) -> tuple[RunFile | ScriptRun | None, list[Problem]]:
    """Return the run of a tree, and everything wrong with it. Faulty values are taken out of the tree."""
    run, faults = _validate(tree, root, lambda steps: _nearest_place(places, steps, file))
    problems = [*faults.values()]
    wrong = [join_steps(steps) for steps in faults]

    def is_valid(path: str) -> bool:
        return not any(path == bad or path.startswith((f"{bad}.", f"{bad}[")) for bad in wrong)

    if run is not None:
        problems += find_contradictions(run, LoadedFile(Path(file), (), places).where, is_valid)
    return run, problems


def _read_trials(
    loaded: Loaded, tree: dict[str, Any], file: str, notes: Sequence[str]
) -> tuple[list[Loaded], list[Problem]]:
    """Return the trials of a sweep, each with the run file that it is, and everything wrong with them. `notes`: about
    all of them."""
    where = loaded.where
    named, problems = list_trials(tree.pop("sweep"), lambda path: _nearest_place(loaded.places, (path,), file))
    lora = loaded.run.lora
    for key, is_set in {"lora.modules_to_save": bool(lora.modules_to_save), "lora.bias": lora.bias != "none"}.items():
        if is_set:
            hint = "leave it out, or leave `sweep` out and start separate runs"
            problems.append(Problem(f"in a sweep: {why_shared(key)}", where(key), hint, "sweep-trains-base"))
    trials: list[Loaded] = []
    for trial in named:
        own = copy.deepcopy(tree)
        places = dict(loaded.places)
        found = [*_set_values(own, places, trial)]
        folder = f"{loaded.run.folder}/{TRIALS}/{trial.name}"
        _put(own, places, ("train", "output_dir"), folder, where("train.output_dir"))
        if loaded.run.train.report_to != "none":
            run_name = "-".join(filter(None, (loaded.run.train.run_name, trial.name)))
            _put(own, places, ("train", "run_name"), run_name, where("train.run_name"))
        written = copy.deepcopy(own)
        run, wrong = _check(own, RunFile, places, file)
        found += wrong
        problems += [replace(problem, problem=f"trial {trial.name}: {problem.problem}") for problem in found]
        if not isinstance(run, RunFile) or found:
            continue
        one = Loaded(loaded.path, (), places, run, trial=replace(trial, tree=written))
        remarks = [f"trial {trial.name}: {note}" for note in list_remarks(run, one.where)]
        one = replace(one, notes=(*notes, *remarks))
        twins = [other.trial.name for other in trials if other.trial and is_same_run(other.run, run)]
        trials.append(one)
        if twins:
            place = next(iter(trial.places.values()), where("sweep"))
            what = f"trial {trial.name} is the same run as trial {twins[0]}"
            problems.append(Problem(what, place, "remove one of them", "alike-trials"))
    if not problems:
        problems += find_halving_problems({one.trial.name: one.run for one in trials if one.trial}, loaded.run, where)
    return trials, problems


def _set_values(tree: dict[str, Any], places: dict[str, str], trial: Trial) -> Iterator[Problem]:
    """Set a trial's values in the tree; yield what is wrong with their keys."""
    for key, value in trial.settings.items():
        steps = tuple(key.split("."))
        place = trial.places[key]
        if find_annotation(steps) is None:
            yield Problem(f"the run file has no {key}", place, _explain_unknown(steps, RunFile)[1], "unknown-key")
        elif places.get(key, "").startswith("--override"):
            hint = f"leave that out, or `{key}` out of `sweep`"
            yield Problem(f"{key} has a value for all trials ({places[key]})", place, hint, "set-twice")
        else:
            _put(tree, places, steps, copy.deepcopy(value), place)


def is_same_run(one: RunFile, other: RunFile) -> bool:
    ours, theirs = (
        run.model_copy(update={"train": run.train.model_copy(update={"output_dir": "", "run_name": None})})
        for run in (one, other)
    )
    return ours == theirs


def _validate(
    tree: dict[str, Any], root: type[RunFile | ScriptRun], where: Callable[[Steps], str]
) -> tuple[RunFile | ScriptRun | None, dict[Steps, Problem]]:
    """Return the run and a problem for each faulty path, which is taken out of the tree: to find contradictions among
    the others. No run if that leaves none in eight rounds."""
    faults: dict[Steps, Problem] = {}
    for _ in range(8):
        try:
            return root.model_validate(tree), faults
        except ValidationError as error:
            found = _explain_validation(error, tree, where, root)
        faults |= found
        for steps in found:  # a list or free mapping goes as a whole
            top = tree.get(str(steps[0])) if len(steps) > 1 else None
            if isinstance(top, dict):
                top.pop(str(steps[1]), None)
            elif steps:
                tree.pop(str(steps[0]), None)
    return None, faults


def _rename(tree: dict[str, Any], places: dict[str, str], problems: list[Problem]) -> list[str]:
    """Move old spellings to where they belong, values and places alike."""
    notes: list[str] = []
    for old, new in RENAMED.items():
        (old_section, _, old_key), (new_section, _, new_key) = old.partition("."), new.partition(".")
        source = tree.get(old_section)
        if not isinstance(source, dict) or old_key not in source:
            continue
        target = tree[new_section] = {} if tree.get(new_section) is None else tree[new_section]
        value = source.pop(old_key)
        if isinstance(target, dict) and new_key in target:
            what = f"is another name of {new}, which is set too ({places.get(new, new)})"
            problems.append(Problem(what, places.get(old, old), "remove one of them", "duplicate-key"))
        elif isinstance(target, dict):  # else reported as a section that isn't one
            target[new_key] = value
            places[new] = places.get(old, old)
            notes.append(f"{places[new]} is read as {new}")
    return notes


def _apply_override(tree: dict[str, Any], places: dict[str, str], text: str, root: Root) -> None:
    place = f"--override {text}"
    if find_unprintable(text):
        raise UserError("contains a character that can't be printed", ascii(place)[1:-1], "remove it", "unprintable")
    path, equals, value_text = text.partition("=")
    path = path.strip()
    if not equals or not path:
        hint = "such as --override train.learning_rate=1e-4"
        raise UserError("is not of the form a.b=value", place, hint, "not-an-assignment")
    steps: tuple[str, ...] = tuple((RENAMED.get(path, path) if root is RunFile else path).split("."))
    for depth in range(1, len(steps)):
        is_mapping = find_item_annotation(find_annotation(steps[:depth], root), dict) is not None
        if is_mapping:  # its keys may contain dots
            steps = (*steps[:depth], ".".join(steps[depth:]))
            break
    annotation = find_annotation(steps, root)
    if annotation is None:
        hint = "give the whole list: KEY=[a, b]" if "[" in path else _explain_unknown(steps, root)[1]
        raise UserError(f"the run file has no {path}", place, hint, "unknown-key")
    try:
        value = _convert_value(value_text, annotation)
    except UserError as error:
        raise UserError.of([replace(error.problems[0], where=place)]) from None
    _put(tree, places, steps, value, place)


def _apply_accelerate(
    tree: dict[str, Any], places: dict[str, str], file: AccelerateFile, root: Root, problems: list[Problem]
) -> list[str]:
    """Put the settings of an Accelerate file into the tree. Return notes on those that the command line sets."""
    if root is ScriptRun:
        what = "sets how a language model is sharded, but this run is of kind: script"
        hint = "leave --accelerate out: a script shards by itself"
        problems.append(Problem(what, str(file.path), hint, "not-for-scripts"))
        return []
    run, faults = _validate(copy.deepcopy(tree), RunFile, str)
    if faults or not isinstance(run, RunFile):
        return []  # they are reported first
    settings, notes, disagreements = translate(file, run, LoadedFile(Path(), (), places).where)
    problems += disagreements
    for key, setting in settings.items():
        _put(tree, places, tuple(key.split(".")), setting.value, setting.where)
    return notes


def _put(tree: dict[str, Any], places: dict[str, str], steps: tuple[str, ...], value: Any, place: str) -> None:
    """Set one value of the tree, and where it was set."""
    current = tree
    for step in steps[:-1]:
        inner = current.get(step)
        if not isinstance(inner, dict):
            if step == "layout" and isinstance(inner, str):
                places["layout.name"] = places["layout"]
                inner = {"name": inner}
            elif inner is not None and current is tree:
                return  # no section: refused as it is
            else:
                inner = {}
        current[step] = current = inner
    current[steps[-1]] = value
    path = join_steps(steps)
    for known in [known for known in places if known.startswith((f"{path}.", f"{path}["))]:
        del places[known]
    _set_places(places, path, value, place)


def _convert_value(text: str, annotation: Any) -> Any:
    """Convert the value to the key's type: parsed as YAML if that is valid, else as text."""
    failure: UserError | None = None
    value = parse_scalar(text)
    if text.startswith(("[", "{", '"', "'")):
        try:
            document = parse_document(text, "--override")
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


def _set_places(places: dict[str, str], path: str, value: Any, place: str) -> None:
    """Make an override the place of its key and of every key inside its value."""
    places[path] = place
    if isinstance(value, dict):
        for key, inner in value.items():
            _set_places(places, f"{path}.{key}", inner, place)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _set_places(places, f"{path}[{index}]", inner, place)


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
    "a whole number or a number": "a number",
    "true or false or": "true, false or",
}


def _nearest_place(places: dict[str, str], steps: Steps, file: str) -> str:
    """Return where a path, or what contains it, is set."""
    path = join_steps(steps)
    for outer in (join_steps(steps[:length]) for length in range(len(steps), 0, -1)):
        if place := places.get(outer):
            return place if outer == path or place.startswith("--") else place.removesuffix(outer) + path
    return f"{file}: {path}" if path else file


def _explain_validation(
    error: ValidationError, tree: dict[str, Any], where: Callable[[Steps], str], root: Root
) -> dict[Steps, Problem]:
    grouped: dict[Steps, list[Any]] = {}
    for item in error.errors(include_url=False):
        value: Any = tree
        steps: list[str | int] = []  # pydantic's location without its names of alternatives
        part: Any
        for part in item["loc"]:
            if part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int):
                value = value[part]
                steps.append(part)
        if item["type"] == "missing":
            steps.append(item["loc"][-1])
        grouped.setdefault(tuple(steps), []).append({**item, "value": value})
    problems = {}
    for path, found in grouped.items():
        # For "a list or text", a wrong item of the list is also "not text": only the deeper problem is the user's.
        if any(len(other) > len(path) and other[: len(path)] == path for other in grouped):
            continue
        if any(item["type"] == "extra_forbidden" for item in found):
            code = "unknown-key"
            what, hint = _explain_unknown(path, root, tree)
        else:
            code = "wrong-value"
            what, hint = _explain_wrong(path, found, root)
        problems[path] = Problem(what, where(path), hint, code)
    return problems


def _documented_key(steps: Steps, root: Root) -> str:
    """Return the path as `windlass explain` knows it: without names and numbers of entries."""
    key = ""
    for step in steps:
        inner = f"{key}.{step}".lstrip(".")
        key = inner if inner in list_keys(root) else key
    return key


def _explain_wrong(steps: Steps, found: list[Any], root: Root) -> tuple[str, str]:
    key = _documented_key(steps, root)
    types = {item["type"] for item in found}
    value = found[0]["value"]
    explain = f"see `windlass explain {key}`"
    messages = dict.fromkeys(item["msg"] for item in found)
    own = [message.removeprefix("Value error, ") for message in messages if message.startswith("Value error, ")]
    if "missing" in types:
        return "is missing", explain
    if own:
        return own[0], explain
    if types & {"string_too_short", "too_short"}:
        return "must not be empty", explain
    wanted = " or ".join(message.removeprefix("Input should be ") for message in messages)
    wanted = re.sub(r"a valid dictionary or instance of \w+", "a section", wanted)
    for upstream, plain in WORDS.items():
        wanted = wanted.replace(upstream, plain)
    if key == "kind":
        wanted = "'lora' or 'script'"
    hint = explain
    named = (key, str(value).lower())
    near = find_close_names(value, re.findall(r"'([^']+)'", wanted), 1) if isinstance(value, str) else []
    inner = find_section(find_annotation(steps, root))
    if named in NOT_VALUES:
        hint = NOT_VALUES[named]
    elif value is None:
        hint = "write a value, or remove the line"
    elif near:
        hint = f"did you mean {near[0]}?"
    elif inner and "'" not in wanted:
        hint = f"indent its keys below it: {', '.join(list(inner.model_fields)[:6])} …"
    elif isinstance(value, str) and "bool_type" in types and value.lower() in ("true", "false"):
        hint = f"write {value.lower()} without quotes"
    elif isinstance(value, str) and types & {"int_type", "float_type"} and re.fullmatch(r"[-+0-9._eE]+", value):
        hint = "write the number without quotes and without leading zeros"
    elif "string_type" in types and not isinstance(value, str | dict | list):
        hint = f'write it in quotes: "{format_value(value)}"'
    return f"must be {wanted}, not {_shorten(value)}", hint


def _explain_unknown(steps: Steps, root: Root, tree: dict[str, Any] | None = None) -> tuple[str, str]:
    """Return what is wrong with a key that doesn't exist, and which key may have been meant."""
    key = str(steps[-1])
    path = join_steps(steps)
    parent = join_steps(steps[:-1])
    what = f"`{parent}` has no such key" if parent else "a run file has no such section"
    there = find_section(find_annotation(steps[:-1], root))
    own = list(there.model_fields) if there else []
    own += [old.rpartition(".")[2] for old in RENAMED if old.rpartition(".")[0] == parent]
    others = {name: target for name, target in OTHER_NAMES.items() if target.rpartition(".")[0] == parent}
    close = find_close_names(key, own) or find_close_names(key, others if parent else ())
    near = list(dict.fromkeys(others.get(name, name) for name in close))
    elsewhere = find_owners(key, root)
    other = next((name for name in [OTHER_NAMES.get(key.lower())] if name in list_keys(root)), "")
    if root is RunFile and path == "script":
        return "is a section of `kind: script` runs", "write `kind: script` above it"
    if root is ScriptRun and path in list_keys(RunFile):
        return "is not for `kind: script` runs", "remove it: the script has its own settings"
    if parent.startswith("cluster.") and (parent.removeprefix("cluster."), key) in INSTEAD:
        return what, INSTEAD[parent.removeprefix("cluster."), key]
    if key in NOT_TAKEN:
        return what, NOT_TAKEN[key]
    if elsewhere and not parent and tree is not None:
        header = elsewhere[0].partition(".")[0]
        missing = "" if header in tree else f"; the line `{header}:` is missing"
        return f"belongs to `{header}`", f"indent it under `{header}:`{missing}"
    if "." in key and key in list_keys(root):
        header, _, inner = key.partition(".")
        return what, f"write `{inner}:` indented below `{header}:`, or give --override {key}=VALUE"
    if other and (other.rpartition(".")[0] == parent or not (elsewhere or (near and parent))):
        return what, f"write {other}"
    if elsewhere:
        return f"{what}; it belongs to `{elsewhere[0].rpartition('.')[0] or 'the top'}`", f"write {elsewhere[0]}"
    if near:
        return what, f"did you mean {', '.join(near)}?"
    if far := find_close_names(key, [path.rpartition(".")[2] for path in list_keys(root)], 1):
        return what, f"did you mean {find_owners(far[0], root)[0]}?"
    if len(own) > 12:
        return what, f"see `windlass explain {_documented_key(steps[:-1], root)}`"
    return what, f"its keys are {', '.join(own)}" if own else "remove it"


def _shorten(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = repr(value) if isinstance(value, str) else format_value(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
