"""`windlass check`: find everything that can be known to be wrong before the model is loaded.

results    the result of one check, and the table of all
inputs     plan, weights, tokenizer, data, script, libraries
machine    GPUs, InfiniBand, memory, limits, folders
nodes      between nodes: presence, connections, same files, shared volume
bandwidth  how fast each GPU is, and how fast the nodes exchange data

Three depths. Alone: run file, checkpoint and data. `here`: this machine too, as one of the run's. `in-pod`: the run's
nodes connect, agree on one verdict, and each exits with it.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from windlass.launch.check import bandwidth, inputs, machine
from windlass.launch.check.results import (
    ALONE,
    HERE,
    IN_POD,
    CheckReport,
    Context,
    Result,
    print_report,
    skipped,
    write_error,
)
from windlass.runfile import Loaded, LoadedScript

__all__ = ["ALONE", "HERE", "IN_POD", "CheckReport", "Result", "print_report", "run_checks", "write_error"]

JOIN_SECONDS = 300.0  # how long a node waits for the others: image pulls differ by minutes


def run_checks(
    loaded: Loaded | LoadedScript,
    *,
    depth: str = ALONE,
    environ: Mapping[str, str] | None = None,
    patience_seconds: float = JOIN_SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Run every check of this depth. Errors of the run are not raised: they are failed checks."""
    began = time.monotonic()
    is_leader = True
    environ = dict(os.environ if environ is None else environ)  # a copy: importing torch adds to it
    plan, results = inputs.check_plan(loaded)
    c = Context(loaded, plan, inputs.list_distributions(), environ, Path("/"), depth == ALONE)
    results += [*inputs.check_inputs(c), machine.check_run_folder(c), machine.check_disk_space(c)]
    results += machine.check_run_variables(c)
    if depth == ALONE:
        results.append(skipped("machine", "--here checks this machine, --in-pod each of the run's"))
    else:
        results += machine.check_machine(c)
    if depth == IN_POD:
        from windlass.launch.check import nodes

        results, is_leader = nodes.check_nodes(c, results, patience_seconds, say)
    else:
        results += bandwidth.check_here(c) if depth == HERE else []
        results.append(skipped("between nodes", "--in-pod checks it, from all nodes of the run at once"))
    return CheckReport(depth, tuple(results), is_leader, time.monotonic() - began)
