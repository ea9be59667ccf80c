"""The first half: the user's own run file through the commands that hold no GPU, and the material for the second."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from windlass.errors import USER_INPUT, Problem
from windlass.hardware import this_machine
from windlass.observe import steps
from windlass.rehearse import process
from windlass.rehearse.derived import EVERY, Derived, Material, derive, sequences
from windlass.rehearse.record import Failed
from windlass.rehearse.spread import Spread, nodes, spread
from windlass.rehearse.stage import Stage, faults, require
from windlass.runfile import Loaded, LoadedScript, read, read_any


def plan(stage: Stage) -> Loaded:
    """The run file against the model's config and headers: keys, targets, layout, shards, scales."""
    with stage.phase("plan") as phase:
        ended = stage.call("plan", process.windlass("plan", str(stage.run), *stage.options, "--json"))
        made = stage.plan = json.loads(ended.out)
        modules = sum(target["modules"] for target in made["adapter"]["targets"])
        layout, memory = made["layout"], made["memory"]
        phase.proved += [
            f"{made['model']['class']}: {modules} modules are adapted, {made['adapter']['trainable']:,} parameters",
            f"{layout['name']} on {layout['ranks']} ranks takes {memory['gpu_gib']:.1f} of "
            f"{memory['gpu_memory_gib']:.1f} GiB on each",
        ]
        if made["model"]["path"]:
            phase.proved.append("every weight of the checkpoint is there, with its scale")
        return read(stage.run, overrides_of(stage.options))


def overrides_of(options: list[str]) -> list[str]:
    return [value for name, value in itertools.pairwise(options) if name == "--override"]


def elsewhere(loaded: Loaded, made: dict[str, Any]) -> bool:
    """Whether the run is for other machines than this one, whose folders and libraries are then not here."""
    cluster = loaded.run.cluster
    if cluster.platform != "local" or cluster.nodes > 1:
        return True
    return cluster.gpu != "cpu" and len(this_machine().gpus) < made["layout"]["gpus_per_node"]


def check(stage: Stage, loaded: Loaded) -> None:
    """What `windlass check` finds from here, and that the run folder is free."""
    with stage.phase("check") as phase:
        free(Path(loaded.run.train.output_dir), loaded.where("train.output_dir"))
        # `local` would have the folders and libraries of other machines be on this one.
        local = elsewhere(loaded, stage.plan) and loaded.run.cluster.platform == "local"
        more = ["--override", "cluster.platform=script"] if local else []
        command = process.windlass("check", str(stage.run), *stage.options, *more, "--json")
        with stage.started("check", command) as running:
            ended = running.ended(stage.tick)
        try:
            results = json.loads(ended.out)["results"]
        except (ValueError, KeyError):
            require(ended)
            raise
        if text := faults(results):
            raise Failed(text, ended.code, ended.log.with_suffix(".out"))
        require(ended)
        names = {kind: [r["name"] for r in results if r["verdict"] == kind] for kind in ("pass", "warn")}
        phase.proved.append(f"pass: {', '.join(names['pass'])}")
        phase.proved += [f"warning: {r['name']}: {r['seen']}" for r in results if r["verdict"] == "warn"]
        for result in results:
            if result["elsewhere"]:
                stage.record.not_proved.append({"what": result["name"], "why": result["seen"]})


def free(folder: Path, place: str) -> None:
    """That the run could take its folder: what only training itself would find, hours later."""
    standing = next(path for path in (folder, *folder.parents) if path.exists())
    if not standing.is_dir():
        raise Failed(f"error: {place}: {standing} is a file\n\nhint: name another train.output_dir", USER_INPUT)
    if finished(folder):
        problem = Problem(f"{folder} holds a finished run", place, "name another train.output_dir, or remove it")
        raise Failed(f"error: {problem}", USER_INPUT)


def finished(folder: Path) -> bool:
    return steps.read(folder / steps.MANIFEST).get("state") == "finished"


def script(stage: Stage) -> None:
    """A run of a script: what windlass knows of it, which is not how to make it small."""
    loaded = read_any(stage.run, overrides_of(stage.options))
    with stage.phase("plan") as phase:
        made = stage.plan = stage.windlass("plan", "plan", str(stage.run), *stage.options)
        ranks = made["layout"]["ranks"]
        phase.proved.append(f"{ranks} ranks: {' '.join(made['script']['command'])}")
    stage.record.ranks = {
        "yours": ranks,
        "here": 0,
        "nodes": 0,
        "layout": "script",
        "why": "a script is not made small",
    }
    submit(stage, loaded)
    why = (
        "windlass can't make it small; with few data, `windlass train RUN --ranks 2 --override script.args=…` tries it"
    )
    stage.record.not_proved.append({"what": "the script itself", "why": why})


def submit(stage: Stage, loaded: Loaded | LoadedScript) -> None:
    """The job as the user's platform would get it, written and looked at."""
    platform = loaded.run.cluster.platform
    to = "script" if platform == "local" else platform
    with stage.phase("submit") as phase:
        out = stage.folder / "submit"
        command = ("submit", str(stage.run), *stage.options, "--to", to, "--dry-run", "--out", str(out))
        told = stage.call("submit", process.windlass(*command)).log.read_text(encoding="utf-8").splitlines()
        written = sorted(path.name for path in out.iterdir())
        phase.proved.append(
            f"rendered for {platform}{' as a script' if platform == 'local' else ''}: " + ", ".join(written)
        )
        if (out / "launch.sh").exists():
            stage.call("submit-bash", ["bash", "-n", str(out / "launch.sh")])
            phase.proved.append("bash reads launch.sh")
        phase.proved += [line for line in told if line.startswith("note: ")]


def material(stage: Stage, spread_here: Spread) -> Material:
    """The user's first rows and the twin. One process makes both: importing torch twice would take longer."""
    micro, passes = sequences(stage.plan["batch"])
    request = stage.folder / "request.json"
    asked = {
        "run": str(stage.run),
        "overrides": overrides_of(stage.options),
        "folder": str(stage.folder),
        "experts_over": spread_here.expert_parallel,
        "sequences": EVERY * micro * passes * spread_here.ranks,
    }
    request.write_text(json.dumps(asked))
    with stage.started("make", [sys.executable, "-m", "windlass.rehearse.make", str(request)]) as running:
        with stage.phase("data") as phase:
            rows = told(stage, running, "data")
            stage.record.stand_ins += rows["stand_ins"]
            phase.proved += [
                f"{rows['rows_seen']} rows read: {rows['shape']}; {rows['supervised_share']:.0%} of the tokens learnt",
                rows["end"],
            ]
        with stage.phase("twin") as phase:
            twin = told(stage, running, "twin")
            running.ended(stage.tick)
            stage.record.twin = {key: twin[key] for key in twin if key not in ("part", "seconds")}
            within = f" in {twin['wrapper']}" if twin["wrapper"] else ""
            coded = f", {twin['quantization']}" if twin["quantization"] else ""
            phase.proved.append(
                f"{twin['class']}{within}{coded}: {twin['parameters']:,} parameters for {twin['yours']:,}, on disk"
            )
    return Material(
        stage.folder / "model",
        stage.folder / "data",
        rows["validation"],
        rows["length"],
        rows["rows"],
        twin["sizes"]["layers"][1],
    )


def told(stage: Stage, running: process.Running, part: str) -> dict[str, Any]:
    """What the process says of a part once it is done; or the fault that it found."""
    out = stage.logs / "make.out"
    running.until(lambda: part_of(out, part) is not None or part_of(out, "problems") is not None, stage.tick)
    if wrong := part_of(out, "problems"):
        problems = (Problem(**problem) for problem in wrong["problems"])
        raise Failed("\n\n".join(f"{process.ERROR}{problem}" for problem in problems), USER_INPUT, running.log)
    found = part_of(out, part)
    if found is None:
        require(running.ended(stage.tick))
        raise Failed(f"it ended without making the {part}", 1, running.log)
    return found


def part_of(out: Path, part: str) -> dict[str, Any] | None:
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # not written to its end yet
        if found.get("part") == part or part in found:
            return found
    return None


def small(stage: Stage, loaded: Loaded, made: Material, spread_here: Spread) -> Path:
    """The run file of the rehearsal."""
    derived: Derived = derive(loaded.run, stage.plan, spread_here, made, stage.rehearsal, stage.record.ranks["nodes"])
    stage.record.changes = derived.changes
    path = stage.folder / "rehearsal.yaml"
    path.write_text(derived.text(), encoding="utf-8")
    return path


def chosen_spread(stage: Stage) -> Spread:
    layout = stage.plan["layout"]
    here, why = spread(layout, this_machine())
    stage.record.ranks = {"yours": layout["ranks"], "here": here.ranks, "layout": layout["name"], "why": why}
    stage.record.ranks["nodes"] = nodes(layout["nodes"], here.ranks)
    return here
