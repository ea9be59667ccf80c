"""`sweep:` of the run file: its trials, their names, the keys that they may differ in, and successive halving."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from windlass.errors import Problem, Where
from windlass.run_folder import TRIALS
from windlass.runfile.fields import RunFile, Sweep
from windlass.runfile.names import RENAMED
from windlass.runfile.recorded import FREE
from windlass.runfile.reference import find_annotation, format_yaml

NAME: Final = "name"  # of a trial, in such a mapping
OPTIONS: Final = frozenset(Sweep.model_fields) - {TRIALS}  # of a sweep; its other keys are those of the run file

# What all trials share though a resumed run compares it, and why: sections, and keys of others.
SHARED: Final[dict[str, str]] = {
    "sweep": "a trial has no trials",
    "model": "all trials train on one base, which is loaded once",
    "export": "it changes no step",
    "lora.modules_to_save": "it trains weights of the base, which all trials share",
    "lora.bias": "it trains biases of the base, which all trials share",
    "data.val_split": "trials are compared on the same rows",
    "data.val_fraction": "trials are compared on the same rows",
    "data.eval": "trials are compared on the same rows",
    "data.keep": "trials are compared on the same rows",
    "train.objective": "losses of different objectives can't be compared",
    "train.bf16": "it decides in which dtype a sharded base is gathered",
    "train.fp16": "it must be false",
    "train.output_dir": "every trial has a folder of its own below it",
    "train.run_name": "every trial's name is added to it",
}
# Keys that change what is trained though a resumed run may change them.
CHANGE_STEPS: Final = (
    "lora.adapter",
    "data.dataset_name_or_path",
    "train.num_train_epochs",
    "train.max_steps",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.global_batch_size",
)
SHORT: Final = {
    "train.learning_rate": "lr",
    "train.num_train_epochs": "epochs",
    "train.max_steps": "steps",
    "train.global_batch_size": "batch",
    "train.warmup_ratio": "warmup",
    "train.weight_decay": "decay",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "dropout",
    "lora.target_modules": "targets",
    "lora.experts.r": "experts-r",
    "data.dataset_name_or_path": "data",
}
LONGEST: Final = 64  # letters of a trial's name
NAME_PATTERN: Final = re.compile(rf"[A-Za-z0-9][-+.\w]{{0,{LONGEST - 1}}}", re.ASCII)
MOST: Final = 200  # trials of a sweep


@dataclass(frozen=True, slots=True)
class Trial:
    name: str
    settings: Mapping[str, Any]  # key -> value, where it differs from the run file without `sweep`
    places: Mapping[str, str]  # key -> where that value is written
    tree: Mapping[str, Any] = field(default_factory=dict)  # its run file

    @property
    def file(self) -> str:
        """Return the text of its run file: the sweep's with this trial's values, and without `sweep`."""
        lines = [f"# Trial {self.name} of a sweep. It can be resumed and run like any other run file."]
        for section, values in self.tree.items():
            if isinstance(values, dict) and values:
                lines += ["", f"{section}:"]
                lines += [f"  {format_yaml(key)}: {format_yaml(value)}" for key, value in values.items()]
            else:
                lines += ["", f"{section}: {format_yaml(values)}"]
        return "\n".join([*lines, ""])


def why_shared(key: str) -> str:
    """Return why trials may not differ in this key; empty if they may."""
    names = [key, ".".join(key.split(".")[:2]), key.partition(".")[0]]
    if names[1] in CHANGE_STEPS:
        return ""
    return next((table[name] for name in names for table in (SHARED, FREE) if name in table), "")


def list_trials(sweep: Mapping[str, Any], where: Where) -> tuple[list[Trial], list[Problem]]:
    """Return the trials of a sweep, or what is wrong with its keys. `where`: the place of a path of the run file."""
    sweep = {name: values for name, values in sweep.items() if name not in OPTIONS}
    keys: dict[str, str] = {}  # path of each key -> key
    for name, value in sweep.items():
        if name != TRIALS:
            keys[f"sweep.{name}"] = name
            continue
        for number, settings in enumerate(value):
            for key in settings if isinstance(settings, dict) else ():
                keys[f"sweep.{TRIALS}[{number}].{key}"] = key
    problems = [Problem(what, where(path), hint, code) for path, what, hint, code in _check_shape(sweep)]
    for path, key in keys.items():
        problem = None if key == NAME and TRIALS in path else _check_key(key, where(path))
        problems += [problem] if problem else []
    if problems:
        return [], problems
    combinations: list[tuple[str, TrialSettings]] = []
    for number, listed in enumerate(sweep.get(TRIALS, ())):
        path = f"sweep.{TRIALS}[{number}]"
        settings = {key: (f"{path}.{key}", value) for key, value in listed.items() if key != NAME}
        combinations.append((str(listed.get(NAME, "")), settings))
    if TRIALS not in sweep:
        choices = [[(f"sweep.{key}[{i}]", value) for i, value in enumerate(values)] for key, values in sweep.items()]
        combinations = [("", dict(zip(sweep, chosen, strict=True))) for chosen in itertools.product(*choices)]
    trials: list[Trial] = []
    for number, (name, settings) in enumerate(combinations):
        name = name or choose_name(settings, sweep) or f"trial-{number + 1}"
        taken = {trial.name.lower() for trial in trials}  # some file systems ignore case
        free = (f"{name[: LONGEST - 4]}-{more}" for more in itertools.count(2))
        name = name if name.lower() not in taken else next(other for other in free if other.lower() not in taken)
        values = {RENAMED.get(key, key): value for key, (_, value) in settings.items()}
        places = {RENAMED.get(key, key): where(path) for key, (path, _) in settings.items()}
        trials.append(Trial(name, values, places))
    return trials, []


TrialSettings = Mapping[str, tuple[str, Any]]  # key -> path in the run file, and value


def _check_shape(sweep: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the path, the problem, and hint and code of whatever makes no trials."""
    example = "such as `train.learning_rate: [1e-4, 2e-4]`"
    if not sweep:
        yield "sweep", "has no trials", f"list values of a key, {example}", "empty-sweep"
    if TRIALS in sweep and len(sweep) > 1:
        other = next(name for name in sweep if name != TRIALS)
        hint = f"write all trials into `{TRIALS}`, or all keys with lists"
        yield f"sweep.{other}", f"is next to `{TRIALS}`, which lists all trials", hint, "trials-and-lists"
    for name, values in sweep.items():
        path = f"sweep.{name}"
        alike = [number for number, value in enumerate(values) if values.index(value) < number]
        if len(values) < 2:
            count = "one value" if values else "no value"
            problem = "one trial" if name == TRIALS and values else count
            hint = f"list two or more, or take `{name}` out of `sweep`"
            yield path, f"has {problem}: nothing is compared", hint, "one-value"
        if alike:
            first = values.index(values[alike[0]]) + 1
            yield f"{path}[{alike[0]}]", f"is the same as number {first}", "remove one of them", "alike-trials"
        for number, value in enumerate(values if name == TRIALS else ()):
            if not isinstance(value, dict):
                hint = "write `- {train.learning_rate: 2e-4, lora.r: 32}`"
                yield f"{path}[{number}]", "is no mapping of keys to values", hint, "not-a-trial"
            elif NAME in value and not NAME_PATTERN.fullmatch(str(value[NAME])):
                hint = f"at most {LONGEST} letters, digits, dashes, dots and underscores; it names a folder"
                yield f"{path}[{number}].{NAME}", f"can't be a trial's name: {value[NAME]}", hint, "trial-name"
    names = [str(value[NAME]) for value in sweep.get(TRIALS, ()) if isinstance(value, dict) and NAME in value]
    for twice in {name for name in names if names.count(name) > 1}:
        yield f"sweep.{TRIALS}", f"two trials are named {twice}", "give them different names", "alike-trials"
    trials = len(sweep[TRIALS]) if TRIALS in sweep else math.prod(len(values) for values in sweep.values())
    if trials > MOST:
        yield "sweep", f"has {trials:,} trials", f"at most {MOST}: list fewer values", "many-trials"


def _check_key(key: str, place: str) -> Problem | None:
    key = RENAMED.get(key, key)
    if "." not in key and find_annotation((key,)) is not None and not why_shared(key):
        hint = f"write keys in full: `{key}.KEY: [A, B]`"
        return Problem(f"{key} is a section, and trials differ in keys", place, hint, "section-in-sweep")
    reason = why_shared(key)
    if reason and find_annotation(tuple(key.split("."))) is not None:
        hint = f"set `{key}` outside of `sweep`, or start separate runs"
        return Problem(f"trials can't differ in {key}: {reason}", place, hint, "shared-key")
    return None  # an unknown one is refused where the value is set


def choose_name(settings: TrialSettings, sweep: Mapping[str, Any]) -> str:
    """Return a trial's name: its settings, shortened. Empty if they make none."""
    parts = []
    for key, (_, value) in settings.items():
        key = RENAMED.get(key, key)
        short = SHORT.get(key) or key.rpartition(".")[2].removesuffix("_type")
        if isinstance(value, bool) or value is None:
            text = f"{short}-{json.dumps(value)}"
        elif isinstance(value, int | float):
            text = f"{short}{format_number(value)}"
        elif isinstance(value, str):
            text = Path(value).stem
        else:
            values = sweep.get(key)
            text = f"{short}{values.index(value) + 1}" if values else short
        parts.append(re.sub(r"[^-+.\w]+", "-", text, flags=re.ASCII).strip("-"))
    name = "-".join(parts)
    return name if NAME_PATTERN.fullmatch(name) else ""


def format_number(value: float) -> str:
    """Return a number in as few letters as possible: 1e-4, 0.05, 32."""
    plain = f"{value:g}" if isinstance(value, float) else str(value)
    scientific = re.sub(r"\.?0*e([+-])0*", lambda found: f"e{found[1].replace('+', '')}", f"{value:e}")
    if not math.isclose(float(plain), value, rel_tol=1e-12):
        return repr(value)
    return scientific if len(scientific) < len(plain) else plain


# --- successive halving ------------------

# Of rows that are held out of these a trial that differs in them has others.
SOURCES: Final = ("dataset_name_or_path", "dataset_config_name", "train_split", "mix")


class Halving(NamedTuple):
    """After this step so many trials go on."""

    step: int
    trials: int


def list_halvings(sweep: Sweep, trials: int) -> tuple[Halving, ...]:
    """Return the steps that drop trials: each leaves half, rounded up, but `keep` at least, and the last one `keep`."""
    keep = sweep.keep or trials
    halvings = []
    for step in sweep.at:
        left = keep if step == sweep.at[-1] else max(keep, math.ceil(trials / 2))
        if left < trials:
            halvings.append(Halving(step, left))
        trials = left
    return tuple(halvings)


def find_halving_problems(trials: Mapping[str, RunFile], run: RunFile, where: Where) -> Iterator[Problem]:
    """Yield why these trials can't be halved as `keep` and `at` say."""
    keep = run.sweep.keep
    at = run.sweep.at
    if keep is None or not at:
        if keep or at:
            given, missing = ("keep", "at") if keep else ("at", "keep")
            hint = "set both, such as `keep: 2` and `at: [50, 100]`, or neither"
            yield Problem(f"halving needs `{missing}`, too", where(f"sweep.{given}"), hint, "half-a-halving")
        return
    if at != sorted(set(at)):
        yield Problem("the steps must ascend", where("sweep.at"), f"write `at: {sorted(set(at))}`", "halving-order")
    if keep >= len(trials):
        problem = f"{keep} of {len(trials)} trials are kept: none is dropped"
        yield Problem(problem, where("sweep.keep"), "keep fewer, or leave out `keep` and `at`", "halving-keeps-all")
    if run.train.evaluation == "no":
        hint = "set train.eval_strategy: steps, or leave out `keep` and `at`"
        yield Problem("halving compares evaluations, and there are none", where("sweep.at"), hint, "not-evaluated")
    shortest = min(trials, key=lambda name: trials[name].train.max_steps)
    total = trials[shortest].train.max_steps  # negative where epochs count
    every = run.train.eval_steps if run.train.evaluation == "steps" else None
    yield from find_step_problems(at, shortest, total if total > 0 else None, every, where)
    losses = [getattr(trial, run.train.objective, None) for trial in trials.values()]
    if any(loss != losses[0] for loss in losses):
        problem = f"trials differ in {run.train.objective}, where another value is another loss: none is the better one"
        hint = "leave out `keep` and `at`; `windlass best RUN_DIR --by accuracy` compares such trials"
        yield Problem(problem, where("sweep.keep"), hint, "not-comparable")
    sources = [[getattr(trial.data, key) for key in SOURCES] for trial in trials.values()]
    if run.data.val_fraction is not None and any(source != sources[0] for source in sources):
        yield describe_other_rows(where)


def find_step_problems(
    at: Sequence[int], trial: str, total: int | None, every: int | None, where: Where
) -> Iterator[Problem]:
    """Yield which steps have no evaluation, or are not before the end of a trial that has `total` steps. `every`: the
    steps from one evaluation to the next. None: not known yet."""
    late = [step for step in at if total is not None and step >= total]
    between = [step for step in at if every and step % every]
    if not late and not between:
        return
    every = every or 1
    last = None if total is None else (total - 1) // every * every
    near = {max(every, round(step / every) * every) for step in at}
    near = {step if last is None else min(step, last) for step in near} - {0}
    hint = f"write `at: {sorted(near)}`" if near else "make the trials longer"
    if between:
        hint += f", or set train.eval_steps: {math.gcd(*at)}"
        problem = f"no evaluation at step {between[0]}: trials are evaluated every {every} steps"
        yield Problem(problem, where("sweep.at"), hint, "between-evaluations")
    else:
        problem = f"trial {trial} ends with step {total}, so nothing is saved by halving at step {late[0]}"
        yield Problem(problem, where("sweep.at"), hint, "halving-at-end")


def describe_other_rows(where: Where) -> Problem:
    problem = "trials would be compared on different validation rows: those held out of their own data"
    hint = "name rows for all with data.eval or data.val_split, or leave out `keep` and `at`"
    return Problem(problem, where("sweep.keep"), hint, "not-comparable")


def share_of_steps(halvings: Sequence[Halving], trials: int, total: int) -> float:
    """Return the share of its steps that a trial is trained for, if each is as likely to go on."""
    edges = [0, *(min(halving.step, total) for halving in halvings), total]
    going = [trials, *(halving.trials for halving in halvings)]
    return sum(count * (edges[i + 1] - edges[i]) for i, count in enumerate(going)) / (trials * total)
