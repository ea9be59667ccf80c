"""The stages of a rehearsal in their order: what each starts, what it compares, and what that proves. No torch.

Each stage runs the command that a user would, and yields what it proved in sentences; a fault is a `Failed`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from windlass.errors import SAVED, USER_INPUT, Problem, RunError
from windlass.files import read_json, read_json_lines, write_json
from windlass.hardware import this_machine
from windlass.rehearse.process import ERROR, Command, Ended, node_variables
from windlass.rehearse.record import Failed, Phase, Record
from windlass.rehearse.scale import (
    EVERY,
    STEPS,
    STOP_AT,
    Material,
    Spread,
    micro_batches,
    scale_nodes,
    scale_ranks,
    scale_run,
)
from windlass.run_folder import DATA, EVENTS, LOAD, MANIFEST, is_finished
from windlass.run_folder import STEPS as STEP_FILE
from windlass.runfile import Loaded, LoadedScript, read_any


class Screen(Protocol):
    """Who watches."""

    def begin(self, name: str) -> None: ...
    def tick(self, doing: str) -> None: ...
    def end(self, phase: Phase) -> None: ...


@dataclass
class Rehearsal:
    """One rehearsal as it goes on: its folder, its record, and the commands that it starts."""

    run: Path
    options: list[str]  # --override and --accelerate, as they were given
    folder: Path
    environ: dict[str, str]
    record: Record
    screen: Screen
    processes: contextlib.ExitStack
    doing: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    spread: Spread = field(default_factory=lambda: Spread(1, 1, 1))
    job: Command | None = None  # the launch script of the run scaled down, as it runs

    @property
    def run_folder(self) -> Path:
        """Of the run scaled down."""
        return self.folder / "run"

    @property
    def overrides(self) -> list[str]:
        return [value for name, value in itertools.pairwise(self.options) if name == "--override"]

    def load(self) -> Loaded | LoadedScript:
        return read_any(self.run, self.overrides)

    def stage(self, stage: Stage) -> None:
        """Timed, shown, recorded; a fault ends the rehearsal."""
        phase, began, self.doing = Phase(stage.name), time.monotonic(), stage.doing
        self.record.phases.append(phase)
        self.screen.begin(stage.name)
        try:
            for sentence in stage.prove(self):
                phase.proved.append(sentence)
            phase.passed = True
        except (Failed, RunError) as error:  # RunError: a command that does not end
            failed = error if isinstance(error, Failed) else Failed(str(error), 1)
            self.record.fail(phase, failed)
            raise failed from None
        finally:
            phase.seconds = round(time.monotonic() - began, 2)
            self.screen.end(phase)

    def tick(self) -> None:
        self.screen.tick(self.doing)

    def start(
        self, name: str, command: Sequence[str], nodes: Sequence[Mapping[str, str]] = ({},), ranks: int = 1
    ) -> Command:
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        environ = {"OMP_NUM_THREADS": str(threads), **self.environ}
        started = Command(name, command, self.folder / "logs", environ, nodes)
        self.processes.callback(started.stop)
        return started

    def launch(self, name: str, **more: str) -> Command:
        """The launch script of the run scaled down, on every node that this machine plays."""
        nodes = [{**variables, **more} for variables in node_variables(self.record.ranks["nodes"])]
        self.job = self.start(name, ["bash", str(self.run_folder / "launch.sh")], nodes, self.record.ranks["here"])
        return self.job

    def call(self, name: str, command: Sequence[str]) -> Ended:
        """Run a command to its end; a failure is a `Failed` with the command's own words."""
        ended = self.start(name, command).wait(self.tick)
        require(ended)
        return ended

    def windlass(self, name: str, *arguments: str) -> Any:
        """One of windlass's commands with --json: what it printed."""
        return json.loads(self.call(name, windlass(*arguments, "--json")).out)

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait for something in the run folder; a launch script that ends before it has failed."""
        assert self.job is not None
        if not self.job.wait_until(done, self.tick):
            ended = self.job.wait(self.tick)
            if ended.code and (text := failed_checks(read_json(self.run_folder / "check.json").get("results", []))):
                raise Failed(text, ended.code, ended.log)
            require(ended)
            raise Failed("it ended with 0 too soon", 1, ended.log)

    def steps(self) -> list[dict[str, Any]]:
        path = self.run_folder / STEP_FILE.format(rank=0)
        return list(read_json_lines(path)) if path.exists() else []

    def checkpoints(self) -> list[int]:
        found = (self.run_folder / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in found)


def windlass(*arguments: str) -> list[str]:
    """A command as a user would type it, with this Python."""
    return [sys.executable, "-m", "windlass", *arguments]


def require(ended: Ended, code: int = 0) -> None:
    if ended.code != code:
        raise Failed(ended.explain(), ended.code, ended.log)


def failed_checks(results: Sequence[Mapping[str, Any]]) -> str:
    """Failed checks as errors: what `windlass check` shows as a table."""
    failed = [Problem(each["seen"], each["where"] or each["name"], each["hint"]) for each in results
              if each["verdict"] == "fail"]  # fmt: skip
    return errors(failed)


def errors(problems: Sequence[Problem]) -> str:
    return "\n\n".join(f"{ERROR}{problem}" for problem in problems)


# --- the user's own run file, through what uses no GPU ---


def plan(r: Rehearsal) -> Iterator[str]:
    made = r.plan = r.windlass("plan", "plan", str(r.run), *r.options)
    layout, memory, model = made["layout"], made["memory"], made["model"]
    modules = sum(target["modules"] for target in made["adapter"]["targets"])
    yield f"{model['class']}: {modules} modules are adapted, {made['adapter']['trainable']:,} parameters"
    fits = f"{memory['gpu_gib']:.1f} of {memory['gpu_memory_gib']:.1f} GiB on each"
    yield f"{layout['name']} on {layout['ranks']} ranks takes {fits}"
    if model["path"]:
        yield "every weight of the checkpoint is there, with its scale"
    here = this_machine()
    r.spread, why = scale_ranks(layout, here)
    nodes = scale_nodes(layout["nodes"], r.spread.ranks)
    r.record.ranks = {
        "yours": layout["ranks"], "here": r.spread.ranks, "nodes": nodes, "layout": layout["name"], "why": why
    }  # fmt: skip


def plan_script(r: Rehearsal) -> Iterator[str]:
    """What windlass knows of a script, which is not how to scale it down."""
    made = r.windlass("plan", "plan", str(r.run), *r.options)
    ranks = made["layout"]["ranks"]
    yield f"{ranks} ranks: {' '.join(made['script']['command'])}"
    why = "a script is not scaled down"
    r.record.ranks = {"yours": ranks, "here": 0, "nodes": 0, "layout": "script", "why": why}
    why = "windlass can't scale it down; try it on few data: `windlass train RUN --ranks 2 --override script.args=…`"
    r.record.not_proved.append({"what": "the script itself", "why": why})


def check(r: Rehearsal) -> Iterator[str]:
    """What `windlass check` finds from here, and that the run could take its folder."""
    loaded = r.load()
    cluster, folder, place = loaded.run.cluster, Path(loaded.run.folder), loaded.where("train.output_dir")
    standing = next(path for path in (folder, *folder.parents) if path.exists())
    if not standing.is_dir():
        raise Failed(errors([Problem(f"{standing} is a file", place, "name another train.output_dir")]), USER_INPUT)
    if is_finished(folder):
        problem = Problem(f"{folder} holds a finished run", place, "name another train.output_dir, or remove it")
        raise Failed(errors([problem]), USER_INPUT)
    # `local` would have the folders and libraries of other machines be on this one.
    missing = cluster.gpu != "cpu" and len(this_machine().gpus) < r.plan["layout"]["gpus_per_node"]
    elsewhere = cluster.platform == "local" and (cluster.nodes > 1 or missing)
    more = ["--override", "cluster.platform=script"] if elsewhere else []
    ended = r.start("check", windlass("check", str(r.run), *r.options, *more, "--json")).wait(r.tick)
    try:
        results = json.loads(ended.out)["results"]
    except (ValueError, KeyError):
        require(ended)
        raise
    if text := failed_checks(results):
        raise Failed(text, ended.code, ended.log.with_suffix(".out"))
    require(ended)
    yield f"pass: {', '.join(each['name'] for each in results if each['verdict'] == 'pass')}"
    yield from (f"warning: {each['name']}: {each['seen']}" for each in results if each["verdict"] == "warn")
    unseen = [{"what": each["name"], "why": each["seen"]} for each in results if each.get("elsewhere")]
    r.record.not_proved += unseen


def submit(r: Rehearsal) -> Iterator[str]:
    """The job as the user's platform would get it, rendered and read."""
    platform, out = r.load().run.cluster.platform, r.folder / "submit"
    to = "script" if platform == "local" else platform
    ended = r.call("submit", windlass("submit", str(r.run), *r.options, "--to", to, "--dry-run", "--out", str(out)))
    files = ", ".join(sorted(path.name for path in out.iterdir()))
    yield f"rendered for {platform}{' as a script' if platform == 'local' else ''}: {files}"
    if (out / "launch.sh").exists():
        r.call("submit-bash", ["bash", "-n", str(out / "launch.sh")])
        yield "bash reads launch.sh"
    yield from (line for line in ended.log.read_text(encoding="utf-8").splitlines() if line.startswith("note: "))


# --- the material: one process makes it, because importing torch twice would take longer ---


def data(r: Rehearsal) -> Iterator[str]:
    micro, accumulation = micro_batches(r.plan["batch"])
    request = {
        "run": str(r.run),
        "overrides": r.overrides,
        "folder": str(r.folder),
        "experts_over": r.spread.expert_parallel,
        "sequences": EVERY * micro * accumulation * r.spread.ranks,
    }
    write_json(r.folder / "request.json", request)
    command = [sys.executable, "-m", "windlass.rehearse.material", str(r.folder / "request.json")]
    r.job = r.start("material", command)
    rows = part_of_material(r, "data")
    r.record.stand_ins += rows["stand_ins"]
    yield f"{rows['rows_seen']} rows read: {rows['format']}; {rows['supervised_share']:.0%} of the tokens supervised"
    yield rows["end"]


def replica(r: Rehearsal) -> Iterator[str]:
    """The model scaled down and on disk; then the run file for it and the rows."""
    made, rows = part_of_material(r, "replica"), part_of_material(r, "data")
    assert r.job is not None
    require(r.job.wait(r.tick))
    r.record.twin = {key: value for key, value in made.items() if key != "part"}
    within = f" in {made['wrapper']}" if made["wrapper"] else ""
    coded = f", {made['quantization']}" if made["quantization"] else ""
    yield f"{made['class']}{within}{coded}: {made['parameters']:,} parameters for {made['yours']:,}, on disk"
    layers = made["sizes"]["layers"][1]
    material = Material(r.folder / "model", r.folder / "data", rows["validation"], rows["length"], rows["rows"], layers)
    loaded = r.load()
    assert isinstance(loaded, Loaded)
    text, r.record.changes = scale_run(loaded.run, r.plan, r.spread, material, r.run_folder, r.record.ranks["nodes"])
    (r.folder / "rehearsal.yaml").write_text(text, encoding="utf-8")


def part_of_material(r: Rehearsal, part: str) -> dict[str, Any]:
    """What the process prints of a part once it is done; or the fault that it found."""
    job, out, parts = r.job, r.folder / "logs" / "material.out", dict[str, dict[str, Any]]()
    assert job is not None

    def done() -> bool:
        parts.update({found.get("part", ""): found for found in read_json_lines(out)})
        return part in parts or "problems" in parts

    job.wait_until(done, r.tick)
    if "problems" in parts:
        problems = [Problem(**problem) for problem in parts["problems"]["problems"]]
        raise Failed(errors(problems), USER_INPUT, job.log)
    if part not in parts:
        require(job.wait(r.tick))
        raise Failed(f"it ended without making the {part}", 1, job.log)
    return parts[part]


# --- the run scaled down, through its launch script: stopped, resumed, finished ---


def launch(r: Rehearsal) -> Iterator[str]:
    """Rendered as for a cluster, run here: it checks the machine, and starts the ranks."""
    ranks, nodes = r.record.ranks["here"], r.record.ranks["nodes"]
    run, out = str(r.folder / "rehearsal.yaml"), str(r.run_folder)
    r.call("launch-submit", windlass("submit", run, "--to", "script", "--dry-run", "--out", out))
    r.doing = f"the script checks {nodes} node{'s' * (nodes > 1)} and starts {ranks} ranks"
    r.launch("launch")
    r.wait_for((r.run_folder / MANIFEST).exists)
    verdicts = [result["verdict"] for result in read_json(r.run_folder / "check.json")["results"]]
    yield f"launch.sh checked this machine: {verdicts.count('pass')} passed, none failed"
    yield f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)} met through accelerate launch"


def load(r: Rehearsal) -> Iterator[str]:
    r.wait_for((r.run_folder / LOAD).exists)
    certificate = read_json(r.run_folder / LOAD)
    elements, each = certificate["checked"]["elements"], [rank["bytes_read"] for rank in certificate["ranks"]]
    loaded = f"all {certificate['loaded']} parameters loaded"
    yield f"{certificate['layout']}: {loaded}, {elements:,} values read again by another way are equal"
    yield f"each rank read {min(each) / 1e6:.1f} to {max(each) / 1e6:.1f} MB"


def train(r: Rehearsal) -> Iterator[str]:
    """Until the run has evaluated and saved."""

    def far_enough() -> bool:
        done = len(r.steps())
        r.doing = f"step {done} of {STEPS}"
        return done >= STOP_AT

    r.wait_for(far_enough)
    steps = r.steps()
    yield f"{len(steps)} steps, loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}, all finite"
    yield "every part of the adapter has a gradient and moves"  # else the first steps stop the run
    events = list(read_json_lines(r.run_folder / EVENTS))
    for kind, what in (("eval", "evaluated"), ("save", "saved and read back")):
        if after := sorted({event["step"] for event in events if event.get("kind") == kind}):
            yield f"{what} after step {', '.join(map(str, after))}"


def stop(r: Rehearsal) -> Iterator[str]:
    """SIGTERM to the script of one node, as a scheduler sends it."""
    assert r.job is not None
    began = time.monotonic()
    r.job.processes[-1].send_signal(signal.SIGTERM)
    ended = r.job.wait(r.tick)
    require(ended, SAVED)
    if not r.checkpoints():
        raise Failed("it ended with 75, and no checkpoint is there", 1, ended.log)
    whom = "one node" if len(r.job.processes) > 1 else "the script"
    seconds = time.monotonic() - began
    yield f"SIGTERM to {whom}: step {r.checkpoints()[-1]} saved, exit code 75 after {seconds:.1f} s"


def resume(r: Rehearsal) -> Iterator[str]:
    stopped_at = r.checkpoints()[-1]
    job = r.launch("resume", WINDLASS_CHECK="no")
    r.wait_for(lambda: len(r.steps()) > stopped_at)
    found = [line["step"] for line in r.steps()]
    if found[: stopped_at + 1] != [*range(1, stopped_at + 2)]:
        raise Failed(f"steps {found} were written: it did not resume at step {stopped_at + 1}", 1, job.log)
    yield f"the same script again resumed at step {stopped_at + 1}"


def finish(r: Rehearsal) -> Iterator[str]:
    assert r.job is not None
    job = r.job

    def ended() -> bool:
        r.doing = f"step {len(r.steps())} of {STEPS}"
        return job.has_ended

    job.wait_until(ended, r.tick)
    require(job.wait(r.tick))
    found = [line["step"] for line in r.steps()]
    if found != [*range(1, STEPS + 1)]:
        raise Failed(f"steps {found} were written, not 1 to {STEPS}, each once", 1, job.log)
    kept = ", ".join(f"step-{step}" for step in r.checkpoints())
    yield f"{STEPS} steps, each once; kept {kept or 'no checkpoint'}, and the final adapter"


# --- evaluated, exported, merged, and opened by other libraries ---


def best(r: Rehearsal) -> Iterator[str]:
    ranking = r.windlass("best", "best", str(r.run_folder), "--ranks", "1")
    order = ", ".join(f"{each['name']} {each['loss']:.4f}" for each in ranking["best"])
    yield f"ranked on {ranking['rows']} rows: {order}"


def comparable(r: Rehearsal) -> bool:
    """Whether there are checkpoints and rows to compare them on."""
    splits = read_json(r.run_folder / DATA)["splits"]
    found = bool(r.checkpoints()) and splits.get("validation", {}).get("documents", 0) > 1
    if not found:
        r.record.not_proved.append({"what": "best", "why": "the run saves nothing, or has no rows to compare on"})
    return found


def export(r: Rehearsal) -> Iterator[str]:
    made = r.windlass("export", "export", str(r.run_folder), "--to", str(r.folder / "adapter"))
    yield f"{made['adapter']} in PEFT's format, opened again, every tensor byte-equal"


def merge(r: Rehearsal) -> Iterator[str]:
    """In 16 bits where the base is quantized: plain transformers can't open fused experts in FP8."""
    dtype = ("--dtype", "bf16") if r.record.twin.get("quantization") else ()
    made = r.windlass("merge", "export", str(r.run_folder), "--to", str(r.folder / "merged"), "--merge", *dtype)
    logits = made["logits"]
    yield f"{made['touched']} tensors merged and computed again, {made['untouched']} byte-equal to the base"
    if "kl" in logits:
        yield f"base + adapter to merged: KL {logits['kl']:.1e} nats a token, bound {logits['bound_kl']:.1e}"


def reload(r: Rehearsal) -> Iterator[str]:
    """Plain transformers and PEFT, without a line of windlass between them and the files."""
    ended = r.start("reload", [sys.executable, "-m", "windlass.rehearse.reload", str(r.folder)]).wait(r.tick)
    found = json.loads((ended.out.strip().splitlines() or ["{}"])[-1])
    if "problem" in found:
        raise Failed(f"{ERROR}{found['problem']}", 1, ended.log)
    require(ended)
    yield from found["proved"]


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    doing: str  # what is shown while it goes on, until it knows better
    prove: Callable[[Rehearsal], Iterator[str]]
    needed: Callable[[Rehearsal], bool] = lambda _: True


SUBMIT = Stage("submit", "your job, rendered", submit)
STAGES = (
    Stage("plan", "your run file against the model's config and headers", plan),
    Stage("check", "windlass check, on this machine", check),
    SUBMIT,
    Stage("data", "your first rows, tokenized", data),
    Stage("replica", "the model scaled down, onto disk", replica),
    Stage("launch", "the launch script, rendered and started", launch),
    Stage("load", "preparing the data, loading the model", load),
    Stage("train", "the first steps", train),
    Stage("stop", "SIGTERM was sent, the ranks save", stop),
    Stage("resume", "the same script again", resume),
    Stage("finish", "the last steps", finish),
    Stage("best", "every saved adapter, evaluated again", best, comparable),
    Stage("export", "the best adapter, in PEFT's format", export),
    Stage("merge", "the adapter merged into the replica", merge),
    Stage("reload", "plain transformers and PEFT open both", reload),
)
SCRIPT_STAGES = (Stage("plan", "your run file", plan_script), SUBMIT)
# Their faults are printed in full: no log says more.
SELF_EXPLAINED = ("plan", "check", "submit", "data")
