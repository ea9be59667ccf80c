"""The second half: the run in small, through its rendered launch script, stopped in the middle and resumed."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.errors import SAVED
from windlass.observe import steps
from windlass.rehearse import process
from windlass.rehearse.derived import STEPS, STOP_AT
from windlass.rehearse.process import Running
from windlass.rehearse.record import Failed
from windlass.rehearse.stage import Stage, faults, require


def train(stage: Stage, run: Path) -> None:
    """Two starts of the same script: one is stopped after its first save, the other goes on to the end."""
    folder = stage.rehearsal
    with contextlib.ExitStack() as stack:
        running = launch(stage, run, stack)
        load(stage, running, folder)
        learn(stage, running, folder)
        stopped_at = stop(stage, running, folder)
    with stage.launched("resume", WINDLASS_CHECK="no") as running:
        resume(stage, running, folder, stopped_at)
        finish(stage, running, folder)


def until(stage: Stage, running: Running, done: Callable[[], bool]) -> None:
    """Wait for a trace in the run folder; a script that ends before it has failed."""
    if not running.until(done, stage.tick):
        ended = running.ended(stage.tick)
        try:
            results = json.loads((stage.rehearsal / "check.json").read_text())["results"]
        except (OSError, ValueError):
            results = []
        if ended.code and (text := faults(results)):
            raise Failed(text, ended.code, ended.log)
        require(ended)
        raise Failed("it ended with 0 too soon", 1, ended.log)


def launch(stage: Stage, run: Path, stack: contextlib.ExitStack) -> Running:
    """Rendered as for a cluster, run here: it checks the machine, meets, and starts the ranks."""
    folder, ranks, nodes = stage.rehearsal, stage.record.ranks["here"], stage.record.ranks["nodes"]
    with stage.phase("launch") as phase:
        command = ("submit", str(run), "--to", "script", "--dry-run", "--out", str(folder))
        stage.call("launch-submit", process.windlass(*command))
        stage.doing = f"the script checks {nodes} node{'s' * (nodes > 1)} and starts {ranks} ranks"
        running = stack.enter_context(stage.launched("launch"))
        until(stage, running, (folder / steps.MANIFEST).exists)
        verdicts = [result["verdict"] for result in json.loads((folder / "check.json").read_text())["results"]]
        phase.proved += [
            f"launch.sh checked this machine: {verdicts.count('pass')} passed, none failed",
            f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)} met through accelerate launch",
        ]
    return running


def load(stage: Stage, running: Running, folder: Path) -> None:
    with stage.phase("load") as phase:
        until(stage, running, (folder / "load.json").exists)
        certificate = json.loads((folder / "load.json").read_text())
        checked, each = certificate["checked"], [rank["bytes_read"] for rank in certificate["ranks"]]
        phase.proved += [
            f"{certificate['layout']}: all {certificate['loaded']} parameters loaded, "
            f"{checked['elements']:,} values read again by another way are equal",
            f"each rank read {min(each) / 1e6:.1f} to {max(each) / 1e6:.1f} MB",
        ]


def learn(stage: Stage, running: Running, folder: Path) -> None:
    """Until the run has evaluated and saved."""
    with stage.phase("train") as phase:

        def far_enough() -> bool:
            done = len(lines(folder))
            stage.doing = f"step {done} of {STEPS}"
            return done >= STOP_AT

        until(stage, running, far_enough)
        told, happened = lines(folder), events(folder)
        phase.proved.append(f"{len(told)} steps, loss {told[0]['loss']:.4f} to {told[-1]['loss']:.4f}, all finite")
        phase.proved.append("every part of the adapter has a gradient and moves")  # else the first steps stop the run
        evaluated, saved = (sorted({event["step"] for event in happened.get(kind, [])}) for kind in ("eval", "save"))
        if evaluated:
            phase.proved.append(f"evaluated after step {', '.join(map(str, evaluated))}")
        if saved:
            phase.proved.append(f"saved and read back after step {', '.join(map(str, saved))}")


def stop(stage: Stage, running: Running, folder: Path) -> int:
    """SIGTERM to the script of one node, as a scheduler sends it. Returns the step that was saved."""
    with stage.phase("stop") as phase:
        began = time.monotonic()
        running.processes[-1].send_signal(signal.SIGTERM)
        ended = running.ended(stage.tick)
        require(ended, SAVED)
        saved = sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
        if not saved:
            raise Failed("it ended with 75, and no checkpoint is there", 1, ended.log)
        told, seconds = "one node" if len(running.processes) > 1 else "the script", time.monotonic() - began
        phase.proved.append(f"SIGTERM to {told}: step {saved[-1]} saved, exit code 75 after {seconds:.1f} s")
        return saved[-1]


def resume(stage: Stage, running: Running, folder: Path, stopped_at: int) -> None:
    with stage.phase("resume") as phase:
        until(stage, running, lambda: len(lines(folder)) > stopped_at)
        found = [line["step"] for line in lines(folder)]
        if found[: stopped_at + 1] != list(range(1, stopped_at + 2)):
            raise Failed(f"steps {found} were written: it did not resume at step {stopped_at + 1}", 1, running.log)
        phase.proved.append(f"the same script again resumed at step {stopped_at + 1}")


def finish(stage: Stage, running: Running, folder: Path) -> None:
    with stage.phase("finish") as phase:

        def ended() -> bool:
            stage.doing = f"step {len(lines(folder))} of {STEPS}"
            return running.has_ended

        running.until(ended, stage.tick)
        require(running.ended(stage.tick))
        found = [line["step"] for line in lines(folder)]
        if found != list(range(1, STEPS + 1)):
            raise Failed(f"steps {found} were written, not 1 to {STEPS}, each once", 1, running.log)
        kept = sorted((path.name for path in (folder / "checkpoints").glob("step-*")), key=lambda name: int(name[5:]))
        phase.proved.append(
            f"{STEPS} steps, each once; kept {', '.join(kept) or 'no checkpoint'}, and the final adapter"
        )


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / steps.STEPS.format(rank=0)
    return list(steps.lines(path)) if path.exists() else []


def events(folder: Path) -> dict[str, list[dict[str, Any]]]:
    path = folder / steps.EVENTS
    found: dict[str, list[dict[str, Any]]] = {}
    for event in steps.lines(path) if path.exists() else ():
        found.setdefault(event.get("kind", ""), []).append(event)
    return found
