"""Checks of a run of kind: script: the file, torch, the run folder. Model, adapter and data are the script's matter."""

from __future__ import annotations

import ast
from pathlib import Path

from windlass.errors import UserError
from windlass.launch.check import folders, versions
from windlass.launch.check.result import Result, failed, passed, refused, unseen
from windlass.plan.script import ScriptPlan, make_script
from windlass.runfile import LoadedScript

IN_POD = "`windlass check RUN --in-pod` looks, where the run starts"
OWN = "model, data and optimizer"


def static(
    loaded: LoadedScript, have: versions.Installed, *, elsewhere: bool
) -> tuple[ScriptPlan | None, list[Result]]:
    """All that can be said before any machine is looked at."""
    try:
        plan = make_script(loaded)
    except UserError as error:
        return None, refused("plan", error.problems)
    return plan, [
        passed(
            "layout", f"{plan.layout.ranks} ranks, {plan.layout.gpus_per_node} on each of {plan.layout.nodes} nodes"
        ),
        file(loaded, elsewhere=elsewhere),
        torch(have, elsewhere=elsewhere),
        folders.output(loaded, elsewhere=elsewhere),
        unseen(OWN, "they are the script's own, and what it needs of memory and time is not known"),
    ]


def file(loaded: LoadedScript, *, elsewhere: bool) -> Result:
    """That the script is here, and is Python."""
    script = loaded.run.script
    if script.module:
        return unseen("script", f"module {script.module}: importing it would run the packages around it")
    path, place = Path(str(script.path)), loaded.where("script.path")
    if elsewhere and not path.is_file():
        return unseen("script", f"{path} is not on this machine", IN_POD)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        hint = f"a path is looked for from the folder that the run is started in, here {Path.cwd()}"
        return failed("script", f"{path} can't be read: {error.strerror}", hint, place)
    except (SyntaxError, ValueError) as error:
        at = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        return failed("script", f"{path}{at} is not Python: {said}", "fix it, or name another file", place)
    return passed("script", f"{path}, {len(tree.body)} statements")


def torch(have: versions.Installed, *, elsewhere: bool) -> Result:
    if "torch" in have:
        return passed("library torch", have["torch"])
    if elsewhere:
        return unseen("library torch", "that of the image counts, not this machine's", IN_POD)
    return failed("library torch", "not installed", "pip install torch, or use an image that has it")
