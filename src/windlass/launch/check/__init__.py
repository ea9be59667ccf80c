"""`windlass check`: everything that can be known to be wrong before the model is loaded.

result     what one check found
script     the same for runs of kind: script
static     the plan, weights, tokenizer, data        versions   libraries, model class, attention
folders    where the run writes                      machine    memory, limits, account
gpus, nvml  what NVIDIA's library sees of them      fabric     InfiniBand, interfaces
nodes      between nodes: meeting (who is there), doors (who reaches whom), shared (one volume), pairs (how fast)
show       the table

Three depths. Alone: run file, checkpoint and data. `here`: this machine too, as one of the run's. `in-pod`: the run's
nodes meet, agree on one verdict, and each exits with it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import __version__, hardware
from windlass.errors import FAILED, RANK_USER_INPUT
from windlass.launch.check import fabric, folders, gpus, machine, nvml, script, static, versions
from windlass.launch.check.result import FAIL, MEETING, Result, unseen, worst
from windlass.runfile import Loaded, LoadedScript

if TYPE_CHECKING:
    from windlass.plan import Plan
    from windlass.plan.layout import AccelerateFile
    from windlass.plan.script import AnyPlan

__all__ = ["ALONE", "HERE", "IN_POD", "Report", "Result", "run"]

ALONE, HERE, IN_POD = "alone", "here", "in-pod"
PATIENCE_SECONDS = 300.0  # how long a node waits for the others: image pulls differ by minutes


@dataclass(frozen=True, slots=True)
class Report:
    """All results; the same on every node where nodes met."""

    depth: str
    results: tuple[Result, ...]
    speaks: bool = True  # one node prints for all
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return worst(self.results)

    @property
    def exit_code(self) -> int:
        failures = {result.name for result in self.results if result.verdict == FAIL}
        if not failures:
            return 0
        return RANK_USER_INPUT if self.depth == IN_POD and failures != {MEETING} else FAILED

    def as_dict(self) -> dict[str, Any]:
        return {
            "windlass": __version__,
            "depth": self.depth,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "results": [result.as_dict() for result in self.results],
        }

    def write(self, folder: Path) -> Path | None:
        """check.json into the run folder where that exists; a folder that refuses it was reported as a check."""
        path = folder / "check.json"
        try:
            if not folder.is_dir():
                return None
            path.write_text(json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError:
            return None
        return path


def run(
    loaded: Loaded | LoadedScript,
    accelerate: Callable[[], AccelerateFile | None] = lambda: None,
    *,
    depth: str = ALONE,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    patience_seconds: float = PATIENCE_SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Every check of this depth. Nothing is raised for what is wrong with the run: it is a failed check."""
    began = time.monotonic()
    environ = dict(os.environ if environ is None else environ)  # as it was: importing torch adds to it
    # A run for another platform finds its libraries and volumes there, not on the machine that plans it.
    elsewhere = depth == ALONE and loaded.run.cluster.platform != "local"
    have = versions.installed()
    plan: AnyPlan | None
    if isinstance(loaded, LoadedScript):
        plan, results = script.static(loaded, have, elsewhere=elsewhere)
    else:
        plan, results = whole(loaded, accelerate, have, depth, elsewhere=elsewhere)
    if depth == ALONE:
        results += [unseen("machine", "--here looks at this machine, --in-pod at each of the run's")]
    else:
        results += this_machine(plan, have, environ, root)
    if depth == IN_POD:
        from windlass.launch.check import nodes

        met = nodes.check(loaded, plan, results, have, environ, root, patience_seconds, say)
        return Report(depth, met.results, met.speaks, time.monotonic() - began)
    results += [unseen("between nodes", "--in-pod looks, from all nodes of the run at once")]
    return Report(depth, tuple(results), True, time.monotonic() - began)


def whole(
    loaded: Loaded,
    accelerate: Callable[[], AccelerateFile | None],
    have: versions.Installed,
    depth: str,
    *,
    elsewhere: bool,
) -> tuple[Plan | None, list[Result]]:
    """Of a language model's run: all that can be said before any machine is looked at."""
    plan, results = static.planned(loaded, accelerate)
    return plan, [*results, *libraries(loaded, plan, have, depth), *storage(loaded, plan, elsewhere=elsewhere)]


def libraries(loaded: Loaded, plan: Plan | None, have: versions.Installed, depth: str) -> list[Result]:
    """On a machine that only plans, libraries that lack are no fault."""
    if depth == ALONE and loaded.run.cluster.platform != "local":
        return [unseen("libraries", "those of the image count, not this machine's", static.IN_POD)]
    if depth == ALONE and "torch" not in have:
        return [unseen("libraries", "torch is not installed on this machine", "`--here`, where the run will be")]
    found = [*versions.libraries(have), versions.torchao(have), *versions.trackers(loaded)]
    if plan is None:
        return [*found, unseen("model class", "there is no plan"), unseen("attention", "there is no plan")]
    place = loaded.where("model.model_name_or_path")
    model, looked = versions.model_class(plan.base.family.causal_lm, have, place)
    return [*found, *looked, versions.attention(loaded, model, have)]


def storage(loaded: Loaded, plan: Plan | None, *, elsewhere: bool) -> list[Result]:
    found = [folders.output(loaded, elsewhere=elsewhere)]
    if plan is None:
        lost = [unseen(name, "there is no plan") for name in ("disk space", "weights", "tokenizer")]
        return [*found, *lost, static.data(loaded, None, elsewhere=elsewhere)]
    opened, tokenizer = static.tokenizer(plan)
    return [
        *found,
        folders.room(plan, elsewhere=elsewhere),
        static.weights(plan, elsewhere=elsewhere),
        tokenizer,
        static.data(loaded, opened, elsewhere=elsewhere),
    ]


def this_machine(
    plan: AnyPlan | None, have: versions.Installed, environ: Mapping[str, str], root: Path
) -> list[Result]:
    """What needs no plan is looked at without one."""
    found = [
        machine.open_files(root),
        machine.processes(root),
        machine.account(root, os.getuid(), environ),
        *folders.caches(environ),
        *fabric.interface(environ, root),
    ]
    seen = nvml.look()
    found.append(cuda(have, seen))
    if plan is None:
        return [*found, unseen("this machine", "there is no plan to hold it against")]
    here = hardware.this_machine()
    return [
        *found,
        *gpus.check(plan, seen, root),
        machine.host_memory(plan, here),
        machine.processors(plan, here),
        machine.shared_memory(plan, root / "dev/shm"),
        machine.locked_memory(plan, root),
        fabric.infiniband(plan, root, environ),
        fabric.peer_memory(plan, root),
    ]


def cuda(have: versions.Installed, seen: nvml.Seen) -> Result:
    if "torch" not in have:
        return unseen("CUDA", "torch is not installed")
    try:
        import torch.cuda
        from torch.version import cuda as built_for
    except (ImportError, OSError) as error:
        return unseen("CUDA", f"torch cannot be imported: {str(error).splitlines()[0]}")
    return versions.cuda(built_for, seen.driver, len(seen.cards), torch.cuda.is_available)
