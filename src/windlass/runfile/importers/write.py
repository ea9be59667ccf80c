"""Write the imported run file, and what of the other tool's configuration has no effect."""

import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

from windlass.errors import Problem, UserError
from windlass.runfile.importers.imported import ImportedRun
from windlass.runfile.names import TOOLS
from windlass.runfile.read import INCOMPLETE, read_run_file
from windlass.runfile.reference import render_settings


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
    """Return their keys that have no effect here, by reason."""
    by_reason: dict[str, list[str]] = {}
    for key, why in imported.no_effect.items():
        by_reason.setdefault(why, []).append(key)
    wrap = textwrap.TextWrapper(78, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    paragraphs = [f"  {why}:\n{wrap.fill(', '.join(names))}" for why, names in by_reason.items()]
    count = len(imported.no_effect) or "none"
    return "\n".join([f"keys of {imported.file} without effect here: {count}", *paragraphs])


def validate(imported: ImportedRun) -> None:
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
