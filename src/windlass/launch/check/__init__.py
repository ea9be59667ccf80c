"""`windlass check`: everything that can be known to be wrong before the model is loaded.

results    what one check found, and the table of all
inputs     plan, weights, tokenizer, data, script, libraries
machine    GPUs, InfiniBand, memory, limits, folders
nodes      between nodes: who is there, who reaches whom, same files, one volume
bandwidth  how fast the nodes exchange data

Three depths. Alone: run file, checkpoint and data. `here`: this machine too, as one of the run's. `in-pod`: the run's
nodes meet, agree on one verdict, and each exits with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.launch.check import inputs, machine
from windlass.launch.check.results import ALONE, HERE, IN_POD, Report, Result, show, skipped
from windlass.runfile import Loaded, LoadedScript

if TYPE_CHECKING:
    from windlass.plan.accelerate import AccelerateFile
    from windlass.plan.script import AnyPlan

__all__ = ["ALONE", "HERE", "IN_POD", "Report", "Result", "run", "show"]

JOIN_SECONDS = 300.0  # how long a node waits for the others: image pulls differ by minutes


def run(
    loaded: Loaded | LoadedScript,
    accelerate: Callable[[], AccelerateFile | None] = lambda: None,
    *,
    depth: str = ALONE,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    patience_seconds: float = JOIN_SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Every check of this depth. Nothing is raised for what is wrong with the run: it is a failed check."""
    began = time.monotonic()
    environ = dict(os.environ if environ is None else environ)  # as it was: importing torch adds to it
    # A run for another platform finds its libraries and volumes there, not on the machine that plans it.
    elsewhere = depth == ALONE and loaded.run.cluster.platform != "local"
    have = inputs.installed()
    plan: AnyPlan | None
    folder = machine.check_run_folder(loaded, elsewhere=elsewhere)
    if isinstance(loaded, LoadedScript):
        plan, results = inputs.check_script(loaded, have, folder, elsewhere=elsewhere)
    else:
        plan, results = inputs.check_run(
            loaded,
            accelerate,
            have,
            depth,
            lambda plan: [folder, machine.check_disk_space(plan, elsewhere=elsewhere)],
            elsewhere=elsewhere,
        )
    if depth == ALONE:
        results += [skipped("machine", "--here checks this machine, --in-pod each of the run's")]
    else:
        results += machine.check_machine(plan, have, environ, root)
    if depth == IN_POD:
        from windlass.launch.check import nodes

        found, is_leader = nodes.check_nodes(loaded, plan, results, have, environ, root, patience_seconds, say)
        return Report(depth, tuple(found), is_leader, time.monotonic() - began)
    results += [skipped("between nodes", "--in-pod checks it, from all nodes of the run at once")]
    return Report(depth, tuple(results), True, time.monotonic() - began)
