"""The stages of a rehearsal in their order: what each starts, what it compares, and what that proves. No torch.

Each stage runs the command that a user would, and yields what it proved in sentences; a fault is a `Failed`.
"""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from windlass.errors import SAVED, USER_INPUT, Problem
from windlass.files import read_json, read_json_lines, write_json
from windlass.hardware import count_usable_cpus, read_this_machine
from windlass.observe.format import format_are, format_plural
from windlass.plan import fill_in_choices
from windlass.plan.layout import Layout
from windlass.rehearse.process import ERROR, RunningCommand, node_variables
from windlass.rehearse.record import Failed, Phase, RehearsalRecord
from windlass.rehearse.scale import EVERY, STEPS, STOP_AT, Material, limit_batch, scale_ranks, scale_run
from windlass.run_folder import DATA, EVENTS, LOAD, MANIFEST, is_finished
from windlass.run_folder import STEPS as STEP_FILE
from windlass.runfile import Loaded, LoadedScript, read_any
from windlass.runfile.accelerate import load_accelerate

SLOW_SECONDS = 10.0  # between lines of one stage


@dataclass
class Rehearsal:
    """A running rehearsal: its folder, its record, and the commands that it starts."""

    run: Path
    overrides: list[str]
    folder: Path
    environ: dict[str, str]
    record: RehearsalRecord
    say: Callable[[str], None]
    processes: contextlib.ExitStack
    name: str = ""  # name of the current stage
    doing: str = ""
    began: float = 0.0
    reported: float = 0.0  # what it does
    plan: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None  # the run's, scaled down
    job: RunningCommand | None = None  # a job that several stages watch: the material's, then the launch script's
    accelerate: Path | None = None  # Accelerate's file

    @property
    def run_folder(self) -> Path:
        """Return the folder of the scaled-down run."""
        return self.folder / "run"

    @property
    def options(self) -> list[str]:
        words = [word for override in self.overrides for word in ("--override", override)]
        return [*words, "--accelerate", str(self.accelerate)] if self.accelerate else words

    def load(self) -> Loaded | LoadedScript:
        return read_any(self.run, self.overrides, load_accelerate(self.accelerate))

    def stage(self, name: str, doing: str, prove: Callable[[Self], Iterator[str]]) -> None:
        """Run a stage: timed, shown, recorded; a fault ends the rehearsal."""
        phase = Phase(name)
        self.name = name
        self.doing = doing
        self.began = time.monotonic()
        self.record.phases.append(phase)
        self.reported = self.began
        try:
            for sentence in prove(self):
                phase.proved.append(sentence)
            phase.passed = True
        except Failed as error:
            log = str(error.log) if error.log else None
            self.record.failure = {"phase": name, "exit_code": error.code, "text": error.text, "log": log}
            raise
        finally:
            phase.seconds = round(time.monotonic() - self.began, 2)
            self.say(f"{name:8} {phase.seconds:5.1f} s  {'passed' if phase.passed else 'failed'}")

    def tick(self) -> None:
        """Print now and then what a running command does."""
        now = time.monotonic()
        if now - self.reported > SLOW_SECONDS:
            self.reported = now
            self.say(f"{self.name:8} {now - self.began:5.1f} s  {self.doing} …")

    def start(
        self, name: str, command: Sequence[str], nodes: Sequence[Mapping[str, str]] = ({},), ranks: int = 1
    ) -> RunningCommand:
        threads = max(1, count_usable_cpus() // ranks)
        environ = {"OMP_NUM_THREADS": str(threads), **self.environ}
        started = RunningCommand(name, command, self.folder / "logs", environ, nodes, self.tick)
        self.processes.callback(started.stop)
        return started

    def launch(self, name: str, **more: str) -> RunningCommand:
        """Start the scaled-down run's launch script on every node that this machine plays."""
        nodes = [{**variables, **more} for variables in node_variables(self.record.ranks["nodes"])]
        self.job = self.start(name, ["bash", str(self.run_folder / "launch.sh")], nodes, self.record.ranks["here"])
        return self.job

    def windlass(self, name: str, *arguments: str) -> Any:
        """Run one of windlass's commands with --json, and return what it printed."""
        return json.loads(self.start(name, command_line(*arguments, "--json")).finish().out)

    def wait_for(self, done: Callable[[], bool]) -> RunningCommand:
        """Wait for something that the job writes; a job that ends before has failed."""
        assert self.job is not None
        if not self.job.wait_until(done):
            failed = format_failed_checks(read_json(self.run_folder / "check.json").get("results", []))
            if self.job.code and failed:
                raise Failed(failed, self.job.code, self.job.log)
            self.job.finish()
            raise Failed("it ended with 0 too soon", 1, self.job.log)
        return self.job

    def steps(self) -> list[dict[str, Any]]:
        path = self.run_folder / STEP_FILE.format(rank=0)
        return list(read_json_lines(path)) if path.exists() else []

    def checkpoints(self) -> list[int]:
        found = (self.run_folder / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in found)


def command_line(*arguments: str) -> list[str]:
    """Return a command as a user would type it, with this Python."""
    return [sys.executable, "-m", "windlass", *arguments]


def format_failed_checks(results: Sequence[Mapping[str, Any]]) -> str:
    """Return failed checks as errors, instead of `windlass check`'s table."""
    failed = [each for each in results if each["verdict"] == "fail"]
    return format_errors(
        Problem(each["seen"], each["where"] or each["name"], each["hint"], "failed-check") for each in failed
    )


def format_errors(problems: Iterable[Problem]) -> str:
    return "\n\n".join(f"{ERROR}{problem}" for problem in problems)


# --- the user's own run file, through what uses no GPU ---


def plan(r: Rehearsal) -> Iterator[str]:
    made = r.plan = r.windlass("plan", "plan", str(r.run), *r.options)
    layout = made["layout"]
    memory = made["memory"]
    if made.get("kind") == "script":  # a script can't be scaled down
        yield f"{format_plural(layout['ranks'], 'rank')}: {' '.join(made['script']['command'])}"
        why = "a script is not scaled down"
        r.record.ranks = {"yours": layout["ranks"], "here": 0, "nodes": 0, "layout": "script", "why": why}
        hint = "try it on few data: `windlass train RUN --ranks 2 --override script.args=[…]`"
        r.record.not_proved.append({"what": "the script itself", "why": f"windlass can't scale it down; {hint}"})
        return
    model = made["model"]
    modules = sum(target["modules"] for target in made["adapter"]["targets"])
    yield f"{model['class']}: {format_are(modules, 'module')} adapted, {made['adapter']['trainable']:,} parameters"
    fits = f"{memory['gpu_gib']:.1f} of {memory['gpu_memory_gib']:.1f} GiB on each"
    yield f"{layout['name']} on {format_plural(layout['ranks'], 'rank')} takes {fits}"
    if model["path"]:
        yield "every weight of the checkpoint is there, with its scale"
    own = Layout(**{key: value for key, value in layout.items() if key != "ranks"})
    r.layout, why = scale_ranks(own, read_this_machine())
    ranks = {"yours": own.ranks, "here": r.layout.ranks, "nodes": r.layout.nodes}
    r.record.ranks = {**ranks, "layout": layout["name"], "why": why}


def check(r: Rehearsal) -> Iterator[str]:
    """Run `windlass check` from here, and check that the run could claim its folder."""
    loaded = r.load()
    cluster = loaded.run.cluster
    folder = Path(loaded.run.folder)
    if is_finished(folder):
        hint = "name another train.output_dir, or remove it"
        problem = Problem(f"{folder} contains a finished run", loaded.where("train.output_dir"), hint, "finished-run")
        raise Failed(format_errors([problem]), USER_INPUT)
    # `local` would expect the folders and libraries of other machines on this one.
    missing = cluster.gpu != "cpu" and len(read_this_machine().gpus) < r.plan["layout"]["gpus_per_node"]
    elsewhere = cluster.platform == "local" and (cluster.size[0] > 1 or missing)
    more = ["--override", "cluster.platform=script"] if elsewhere else []
    ended = r.start("check", command_line("check", str(r.run), *r.options, *more, "--json")).finish(0, 1)
    if not ended.out:
        ended.finish()
    results = json.loads(ended.out)["results"]
    text = format_failed_checks(results)
    if text:
        raise Failed(text, ended.code, ended.log.with_suffix(".out"))
    yield f"pass: {', '.join(each['name'] for each in results if each['verdict'] == 'pass')}"
    yield from (f"warning: {each['name']}: {each['seen']}" for each in results if each["verdict"] == "warn")
    r.record.not_proved += [{"what": each["name"], "why": each["seen"]} for each in results if each["elsewhere"]]


def submit(r: Rehearsal) -> Iterator[str]:
    """Render the job for the user's platform, and read it."""
    platform = r.load().run.cluster.platform
    out = r.folder / "submit"
    to = "script" if platform == "local" else platform
    command = command_line("submit", str(r.run), *r.options, "--to", to, "--dry-run", "--out", str(out))
    ended = r.start("submit", command).finish()
    files = ", ".join(sorted(path.name for path in out.iterdir()))
    yield f"rendered for {platform}{' as a script' if platform == 'local' else ''}: {files}"
    if (out / "launch.sh").exists():
        r.start("submit-bash", ["bash", "-n", str(out / "launch.sh")]).finish()
        yield "bash reads launch.sh"
    yield from (line for line in ended.log.read_text(encoding="utf-8").splitlines() if line.startswith("note: "))


# --- the material: one process makes it, because importing torch twice would take longer ---


def data(r: Rehearsal) -> Iterator[str]:
    assert r.layout is not None
    micro, accumulation = limit_batch(r.plan["batch"])
    request = {
        "run": str(r.run),
        "overrides": r.overrides,
        "accelerate": r.accelerate and str(r.accelerate),
        "folder": str(r.folder),
        "experts_over": r.layout.expert_parallel,
        "sequences": EVERY * micro * accumulation * r.layout.readers,
    }
    write_json(r.folder / "request.json", request)
    command = [sys.executable, "-m", "windlass.rehearse.material", str(r.folder / "request.json")]
    r.job = r.start("material", command)
    rows = make_material(r, "data")
    r.record.stand_ins += rows["stand_ins"]
    yield f"{rows['rows_seen']} rows read: {rows['format']}; {rows['supervised_share']:.0%} of the tokens supervised"
    yield rows["end"]


def replica(r: Rehearsal) -> Iterator[str]:
    """Write the scaled-down model; then its run file and the rows."""
    made = make_material(r, "replica")
    rows = make_material(r, "data")
    r.record.replica = {key: value for key, value in made.items() if key != "part"}
    within = f" in {made['wrapper']}" if made["wrapper"] else ""
    coded = f", {made['quantization']}" if made["quantization"] else ""
    yield f"{made['class']}{within}{coded}: {made['parameters']:,} parameters for {made['yours']:,}, on disk"
    layers = made["sizes"]["layers"][1]
    material = Material(r.folder / "model", r.folder / "data", rows["validation"], rows["length"], rows["rows"], layers)
    loaded = r.load()
    assert isinstance(loaded, Loaded)
    assert r.layout is not None
    filled = fill_in_choices(loaded).run
    packs = filled.data.packs
    run = loaded.run.model_copy(update={"lora": filled.lora})
    text, r.record.changes = scale_run(run, r.plan, r.layout, material, r.run_folder, packs=packs)
    (r.folder / "rehearsal.yaml").write_text(text, encoding="utf-8")


def make_material(r: Rehearsal, part: str) -> dict[str, Any]:
    """Return what the process prints about a part when it is done, or raise the fault that it found."""
    parts: dict[str, dict[str, Any]] = {}

    def done() -> bool:
        parts.update((each["part"], each) for each in read_json_lines(r.folder / "logs" / "material.out"))
        return part in parts or "problems" in parts

    job = r.wait_for(done)
    if "problems" in parts:
        problems = [Problem(**problem) for problem in parts["problems"]["problems"]]
        raise Failed(format_errors(problems), USER_INPUT, job.log)
    return parts[part]


# --- the run scaled down, through its launch script: stopped, resumed, finished ---


def launch(r: Rehearsal) -> Iterator[str]:
    """Render as for a cluster and run here: the script checks the machine and starts the ranks."""
    ranks = r.record.ranks["here"]
    nodes = r.record.ranks["nodes"]
    run = str(r.folder / "rehearsal.yaml")
    out = str(r.run_folder)
    r.start("launch-submit", command_line("submit", run, "--to", "script", "--dry-run", "--out", out)).finish()
    r.doing = f"the script checks {format_plural(nodes, 'node')} and starts {format_plural(ranks, 'rank')}"
    r.launch("launch")
    r.wait_for((r.run_folder / MANIFEST).exists)
    verdicts = [result["verdict"] for result in read_json(r.run_folder / "check.json")["results"]]
    yield f"launch.sh checked this machine: {verdicts.count('pass')} passed, none failed"
    yield f"{format_plural(ranks, 'rank')} on {format_plural(nodes, 'node')} have met"


def load(r: Rehearsal) -> Iterator[str]:
    r.wait_for((r.run_folder / LOAD).exists)
    certificate = read_json(r.run_folder / LOAD)
    elements = certificate["checked"]["elements"]
    bytes_read = [rank["bytes_read"] for rank in certificate["ranks"]]
    loaded = f"all {certificate['loaded']} parameters loaded"
    yield f"{certificate['layout']}: {loaded}, {elements:,} values read again by another way are equal"
    yield f"each rank read {min(bytes_read) / 1e6:.1f} to {max(bytes_read) / 1e6:.1f} MB"


def train(r: Rehearsal) -> Iterator[str]:
    """Wait until the run has evaluated and saved."""

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
        after = sorted({event["step"] for event in events if event.get("kind") == kind})
        if after:
            yield f"{what} after step {', '.join(map(str, after))}"


def stop(r: Rehearsal) -> Iterator[str]:
    """Send SIGTERM to one node's script, as a scheduler does."""
    assert r.job is not None
    began = time.monotonic()
    r.job.processes[-1].send_signal(signal.SIGTERM)
    r.job.finish(SAVED)
    if not r.checkpoints():
        raise Failed("it ended with 75, and no checkpoint is there", 1, r.job.log)
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
    r.job.finish()
    found = [line["step"] for line in r.steps()]
    if found != [*range(1, STEPS + 1)]:
        raise Failed(f"steps {found} were written, not 1 to {STEPS}, each once", 1, r.job.log)
    kept = ", ".join(f"step-{step}" for step in r.checkpoints())
    yield f"{STEPS} steps, each once; kept {kept or 'no checkpoint'}, and the final adapter"


# --- evaluated, exported, merged, and opened by other libraries ---


def best(r: Rehearsal) -> Iterator[str]:
    if not r.checkpoints() or read_json(r.run_folder / DATA)["splits"].get("validation", {}).get("documents", 0) < 2:
        why = "the run saves nothing, or has no rows to compare on"
        r.record.not_proved.append({"what": "best", "why": why})
        yield f"nothing: {why}"
        return
    ranking = r.windlass("best", "best", str(r.run_folder), "--ranks", "1")
    order = ", ".join(f"{each['name']} {each['loss']:.4f}" for each in ranking["best"])
    yield f"ranked on {ranking['rows']} rows: {order}"


def export(r: Rehearsal) -> Iterator[str]:
    made = r.windlass("export", "export", str(r.run_folder), "--to", str(r.folder / "adapter"))
    yield f"{made['adapter']} in PEFT's format, opened again, every tensor byte-equal"


def merge(r: Rehearsal) -> Iterator[str]:
    """Merge in 16 bits if the base is quantized: plain transformers can't open fused experts in FP8."""
    dtype = ("--dtype", "bf16") if r.record.replica.get("quantization") else ()
    made = r.windlass("merge", "export", str(r.run_folder), "--to", str(r.folder / "merged"), "--merge", *dtype)
    logits = made["logits"]
    touched = format_plural(made["touched"], "tensor")
    yield f"{touched} merged and computed again, {made['untouched']} byte-equal to the base"
    if "kl" in logits:
        kl = logits["kl" if logits["judged"] == "largest" else "median_kl"]
        yield f"base + adapter to merged: KL {kl:.1e} nats a token, bound {logits['bound_kl']:.1e}"


def reload(r: Rehearsal) -> Iterator[str]:
    ended = r.start("reload", [sys.executable, "-m", "windlass.rehearse.reload", str(r.folder)]).finish()
    found = json.loads(ended.out.strip().splitlines()[-1])
    if "problem" in found:
        raise Failed(f"{ERROR}{found['problem']}", 1, ended.log)
    yield from found["proved"]


# What each is called, what is shown while it goes on until it knows better, and what it does.
STAGES = (
    ("plan", "your run file against the model's config and headers", plan),
    ("check", "windlass check, on this machine", check),
    ("submit", "your job, rendered", submit),
    ("data", "your first rows, tokenized", data),
    ("replica", "the model scaled down, onto disk", replica),
    ("launch", "the launch script, rendered and started", launch),
    ("load", "preparing the data, loading the model", load),
    ("train", "the first steps", train),
    ("stop", "SIGTERM was sent, the ranks save", stop),
    ("resume", "the same script again", resume),
    ("finish", "the last steps", finish),
    ("best", "every saved adapter, evaluated again", best),
    ("export", "the best adapter, in PEFT's format", export),
    ("merge", "the adapter merged into the replica", merge),
    ("reload", "plain transformers and PEFT open both", reload),
)
SCRIPT_STAGES = ("plan", "submit")
# Their faults are printed in full: no log says more.
SELF_EXPLAINED = ("plan", "check", "submit", "data")
