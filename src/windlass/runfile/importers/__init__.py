"""Make run files from the configurations of other tools: Axolotl, LLaMA-Factory, TRL, ms-swift.

Each key of the other tool is carried over, translated, or listed with the reason why it has no effect; one that changes
training and has no counterpart is an error. The tool's defaults are written out, because windlass's differ.

To add a tool, add it to `TOOLS` in runfile/names.py, write `<tool>.toml` and `<tool>.py` here, and add its `translate`
to `TRANSLATE` below. `<tool>.py` translates what depends on several keys. `<tool>.toml` has the rest:

- `command`: the pattern of what starts the tool on a command line. `marks`: keys by which its files are recognised.
- `keys`: their key = windlass's, the value carried over. A key of transformers' TrainingArguments that `train` has too
  needs no line. `values`: of one of windlass's keys, their value = windlass's.
- `defaults`: what the tool does when its file is silent.
- `no_effect`, `refused`: by the reason, their keys. A refused key at a value that switches it off is no problem, nor is
  one at a value listed in `same`. all_tools.toml has those of several tools.
- `needs`: the values that a key must have, and its value when absent. `if_set`: what a key that is on sets.
- `held_out`: the key of the validation share. `experts`: that of adapted expert parameters.
"""

import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from windlass.errors import Problem, UserError
from windlass.hardware import parse_gpus
from windlass.runfile.fields import Train
from windlass.runfile.importers import axolotl, llamafactory, swift, trl
from windlass.runfile.importers.imported import ImportedRun, as_list
from windlass.runfile.importers.keys import resolve_conflicts, translate_common
from windlass.runfile.importers.read import read_configuration
from windlass.runfile.names import IMPORTED, TOOLS
from windlass.runfile.read import INCOMPLETE, parse_settings, read_run_file
from windlass.runfile.reference import render_settings

TRANSLATE: Final[dict[str, Callable[[ImportedRun], None]]] = {
    "axolotl": axolotl.translate,
    "llamafactory": llamafactory.translate,
    "trl": trl.translate,
    "swift": swift.translate,
}
NOT_TRANSFORMERS: Final = ("warmup_ratio", "global_batch_size", "resume")  # keys of `train` of windlass's own


def import_file(path: Path, tool: str = "", gpus: str | None = None, overrides: Sequence[str] = ()) -> ImportedRun:
    """Translate another tool's configuration, a YAML or JSON file or a shell script that starts the tool."""
    if tool and tool not in TOOLS:
        what = f"windlass imports from {', '.join(TOOLS)}, not from {tool!r}"
        raise UserError(what, "--from", "choose one of them", "no-such-tool")
    named, theirs, lines = read_configuration(path)
    tool = tool or named or _recognise(theirs)
    if not tool:
        hint = f"name it: `windlass import {path} --from axolotl`, or another: {', '.join(TOOLS)}"
        raise UserError("is not clearly a configuration of one tool", str(path), hint, "no-tool")
    imported = ImportedRun(tool, str(path), dict(theirs), lines)
    translate_common(imported)
    _apply_table(imported)
    TRANSLATE[tool](imported)
    _carry_over(imported)
    resolve_conflicts(imported)
    if gpus is not None:
        set_machine(imported, gpus)
    for key, value in parse_settings(overrides).items():
        imported.settings[key] = value
        imported.remarks[key] = "--override"
    _validate(imported)
    return imported


def set_machine(imported: ImportedRun, gpus: str) -> None:
    nodes, per_node, gpu = parse_gpus(gpus, "--gpus")
    settings = {"cluster.nodes": nodes, "cluster.gpus_per_node": per_node, "cluster.gpu": gpu}
    imported.settings |= settings
    if nodes > 1:
        imported.settings["cluster.network"] = "infiniband-400"
        imported.remarks["cluster.network"] = "between nodes: put in what you have"


def _recognise(theirs: dict[str, object]) -> str:
    """Return the tool that most of the marks belong to, or nothing if it is not one alone."""
    marks = {tool: sum(key in theirs for key in IMPORTED[tool]["marks"].split()) for tool in TOOLS}
    likely = [tool for tool in TOOLS if marks[tool] == max(marks.values())]
    return likely[0] if len(likely) == 1 else ""


def _apply_table(imported: ImportedRun) -> None:
    """Handle the keys under `needs`, `if_set`, `experts` and `held_out`."""
    table = IMPORTED[imported.tool]
    for key, rule in table.get("needs", {}).items():
        value = imported.take(key, rule["without"])
        if value not in rule["is"]:
            imported.refuse(key, f"is {value!r}: windlass trains LoRA adapters", f"write {rule['write']}")
    for key, settings in table.get("if_set", {}).items():
        if imported.take(key):
            for name, value in settings.items():
                imported.set(name, value, key)
    key = table.get("experts", "")
    names = [str(name).rpartition(".")[2] for name in as_list(imported.take(key))]
    if names:
        imported.set("lora.experts", {"targets": names}, key)
    if key := table.get("held_out"):
        share = imported.take(key, kind=int | float) or 0
        if not share:
            imported.set("data.val_split", None, f"{key}: 0")
        elif share < 1:
            imported.set("data.val_fraction", share, key)
        else:
            problem = f"{share} rows: windlass holds out a share of the rows"
            imported.refuse(key, problem, f"write {key}: 0.01 or the like")


def _carry_over(imported: ImportedRun) -> None:
    """Handle the keys that are left, then add the tool's defaults."""
    table = IMPORTED[imported.tool]
    for key, value in imported.theirs.items():
        setting = table["keys"].get(key, "")
        if not setting and key in Train.model_fields and key not in NOT_TRANSFORMERS:
            setting = f"train.{key}"
        if setting and value is not None:
            imported.set(setting, value, key)
        else:
            imported.judge(key, value)
    for key, value in table["defaults"].items():
        if key not in imported.settings:
            imported.settings[key] = None if value == "null" else value
            imported.remarks[key] = f"{TOOLS[imported.tool]}'s default"


def render_run_file(imported: ImportedRun) -> str:
    """Return the run file's text, each line with the key it comes from."""
    source = f"{Path(imported.file).name} of {TOOLS[imported.tool]}"
    head = f"From {source}. Next step: windlass plan run.yaml"
    if "cluster.gpu" not in imported.settings:
        head += "\n# No machine is set: the run takes the one it is on. `windlass import … --gpus 8xh100` sets one."
    if imported.problems:
        keys = ", ".join(dict.fromkeys(problem.where.rpartition(": ")[2] for problem in imported.problems))
        head = f"{INCOMPLETE}from {source}, without a counterpart of: {keys}"
    settings = {**imported.settings, "layout.name": "auto"}
    remarks = {**imported.remarks, "layout.name": "the fastest that fits"}
    return render_settings(settings, remarks, head)


def list_no_effect(imported: ImportedRun) -> str:
    by_reason: dict[str, list[str]] = {}
    for key, why in imported.no_effect.items():
        by_reason.setdefault(why, []).append(key)
    wrap = textwrap.TextWrapper(78, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    paragraphs = [f"  {why}:\n{wrap.fill(', '.join(names))}" for why, names in by_reason.items()]
    count = len(imported.no_effect) or "none"
    return "\n".join([f"keys of {imported.file} without effect here: {count}", *paragraphs])


def _validate(imported: ImportedRun) -> None:
    """Check the values with the run file's own rules; problems name the other tool's key."""
    complete = replace(imported, problems=[])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(render_run_file(complete), encoding="utf-8")
        try:
            read_run_file(path)
        except UserError as error:
            for problem in error.problems:
                key = problem.where.rpartition(": ")[2]
                theirs = imported.remarks.get(key, "")
                line = f":{imported.lines[theirs]}" if theirs in imported.lines else ""
                where = f"{imported.file}{line}: {theirs or key}"
                what = f"as {key}: {problem.problem}"
                imported.problems.append(Problem(what, where, problem.hint, problem.code))
