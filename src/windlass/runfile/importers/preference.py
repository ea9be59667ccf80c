"""Preference objectives as the tools name them, with the numbers of their losses."""

from collections.abc import Sequence
from typing import Any, Final

from windlass.runfile.importers.imported import ImportedRun, as_list
from windlass.runfile.names import TOOLS

# Their names of DPO's loss, and keys of `dpo` that make it.
LOSSES: Final[dict[str, dict[str, Any]]] = {
    "sigmoid": {},
    "robust": {},
    "sigmoid_norm": {"length_normalized": True},
    "ipo": {"loss": "ipo"},
}


def set_objective(
    imported: ImportedRun, key: str, objective: str, *, loss: str = "", betas: Sequence[str], smoothing: str = ""
) -> None:
    """Set the objective that `key` chooses. The others are their keys: of the loss, of beta, and of the share of labels
    that are wrong, which only one loss counts as windlass does."""
    imported.set("train.objective", objective, key)
    given = [name for name in betas if imported.theirs.get(name) is not None]
    for name in given or [f"{TOOLS[imported.tool]}'s default"]:
        imported.set(f"{objective}.beta", float(imported.take(name, 0.1, int | float)), name)
    if objective == "orpo":
        return
    names = as_list(imported.take(loss, "sigmoid"))
    named = str(names[0]) if len(names) == 1 else ""
    if named not in LOSSES:
        problem = f"is {', '.join(map(str, names))}: windlass has {', '.join(LOSSES)}"
        imported.refuse(loss, problem, f"train this with {TOOLS[imported.tool]}: here it would be another run")
    for name, value in LOSSES.get(named, {}).items():
        imported.set(f"dpo.{name}", value, loss)
    if share := imported.take(smoothing):
        imported.set("dpo.label_smoothing", share, smoothing)
        if named != "robust":
            problem = f"goes with a loss {named} there: windlass has it as the loss `robust` of TRL does, which differs"
            imported.refuse(smoothing, problem, "remove it, or train this with the other tool")
