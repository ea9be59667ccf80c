"""Every command: parse, call one function, print. Results go to stdout, everything else to stderr.

This is the only place that reads the environment. Imports are inside the commands, which keeps `--help` fast.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from windlass import __version__
from windlass.errors import (
    RANK_USER_INPUT,
    TRAINING,
    USER_INPUT,
    UserError,
    not_installed,
    print_error,
    raise_all,
    require,
)
from windlass.options import (
    AFTER,
    BEFORE,
    DURING,
    HELP,
    Accelerate,
    Base,
    BaseDtypes,
    Follow,
    Groups,
    JobDir,
    Json,
    Kustomize,
    OtherBase,
    Overrides,
    Ranks,
    Run,
    RunDir,
    arg,
    flag,
    opt,
    remember,
    say,
    words,
)

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan

Command = TypeVar("Command", bound=Callable[..., None])

app = typer.Typer(
    name="windlass",
    cls=Groups,
    help="Multi-GPU LoRA fine-tuning that fails loudly instead of training the wrong thing.\n\n"
    "Start with `windlass init > run.yaml`, then `windlass plan run.yaml`.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich's takes longer to import than all the rest of `--help`
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Only a `UserError` is printed without a traceback."""
    try:
        app(args=None if arguments is None else list(arguments))
    except UserError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING:
            raise
        print_error(not_installed(error.name, next(iter(sys.argv[1:] if arguments is None else arguments), "")))
        sys.exit(USER_INPUT)
    except BrokenPipeError:  # `windlass plan … | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- what commands share --------------------------------------------------------------------------------------------


def command(group: str, *examples: str) -> Callable[[Command], Command]:
    """Register a command, with examples below its help; their first word is its name."""
    lines = "".join(f"  windlass {example}\n" for example in examples)
    return app.command(
        examples[0].split()[0], rich_help_panel=group, epilog=f"Example{'s' * (len(examples) > 1)}:\n\n\b\n{lines}"
    )


def write_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_result(value: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    write_json(value.as_dict()) if as_json else show(value)


def make_plan(run: Path, override: list[str] | None, accelerate: Path | None) -> AnyPlan:
    from windlass.plan.accelerate import read_accelerate
    from windlass.plan.script import make_any
    from windlass.runfile import read_any

    return make_any(read_any(run, override or ()), read_accelerate(accelerate) if accelerate else None)


def print_version(requested: bool) -> None:
    if requested:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def windlass(
    _v: Annotated[bool, flag("--version", "Print the version.", callback=print_version, is_eager=True)] = False,
) -> None: ...


# --- before a run ---------------------------------------------------------------------------------------------------


@command(
    BEFORE, "init > run.yaml", "init --model ./Qwen3-8B --data chats.jsonl --gpus 8xh100 > run.yaml", "init --list"
)
def init(
    preset: Annotated[str | None, arg("PRESET", "Which run file; see --list. Default: mistral-small-4.")] = None,
    model: Annotated[str | None, opt("--model", "DIR", "Write one for this model; needs --data.")] = None,
    data: Annotated[str | None, opt("--data", "PATH", "The rows to train on.")] = None,
    columns: Annotated[
        str | None, opt("--columns", "MAP", "What the rows call a format's columns: '{prompt: question, …}'.")
    ] = None,
    gpus: Annotated[str | None, opt("--gpus", "N", "8xh200, or 2x8xh200 for two nodes. Default: this machine.")] = None,
    names: Annotated[bool, flag("--list", "List the presets.")] = False,
) -> None:
    """Print a run file to start from: a commented preset, or one made for your model and data."""
    from windlass import runfile

    if model or data or gpus or columns:
        from windlass import draft

        if preset:
            raise UserError(f"takes either a preset or --model, not {preset} too", "windlass init", "leave one out")
        if not (model and data):
            hint = "`windlass init --model DIR --data PATH > run.yaml`"
            raise UserError("needs both --model and --data", "windlass init", hint)
        made = draft.draft(model, data, gpus, say, columns)
        for warning in made.warnings:
            say(f"warning: {warning}")
        print(made.text, end="")
        return
    if names:
        for name, text in runfile.presets().items():
            print(f"{name}\n  {text.splitlines()[0].removeprefix('# ')}")
    else:
        print(runfile.init(preset or "mistral-small-4"), end="")


@command(BEFORE, "import axolotl.yml > run.yaml", "import sft.sh --from swift > run.yaml")
def import_(
    file: Annotated[Path, arg("FILE", "Configuration (YAML, JSON), or shell script that starts the tool.")],
    tool: Annotated[
        str | None, opt("--from", "TOOL", "axolotl, llamafactory, trl or swift. Default: recognised.")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of a run file.")] = False,
) -> None:
    """Print a run file made from another tool's configuration.

    Every key is carried over, translated, or listed on stderr with the reason why it has no effect.
    A key that changes training and has no counterpart is an error.
    """
    from windlass.runfile import importing

    made = importing.import_file(file, tool or "")
    write_json(made.as_dict()) if as_json else print(importing.run_file(made), end="", flush=True)
    if not as_json:
        say(importing.list_no_effect(made))
    raise_all(made.problems)


@command(BEFORE, "schema > windlass.schema.json")
def schema() -> None:
    """Print the run file's JSON Schema, for editors that complete and check.

    `# yaml-language-server: $schema=windlass.schema.json` as the first line of run.yaml names it to most editors.
    """
    from windlass import runfile

    write_json(runfile.schema())


@command(
    BEFORE, "plan run.yaml", "plan run.yaml --compare", "plan run.yaml --accelerate fsdp.yaml --json | jq .estimate"
)
def plan(
    run: Run,
    override: Overrides = None,
    accelerate: Accelerate = None,
    compare: Annotated[bool, flag("--compare", "Show the same run under other layouts and numbers of nodes.")] = False,
    details: Annotated[bool, flag("--details", "Show the tables and notes behind it.")] = False,
    explain: Annotated[bool, flag("--explain", "Show every row of the tables, with its formula.")] = False,
    out: Annotated[Path | None, opt("--out", "DIR", "Write plan.json to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Estimate memory, network traffic and time, without a GPU.

    Reads the run file, config.json and the safetensors headers; needs neither the weights nor torch.
    The exit code is 0 whether or not the run fits; `memory.fits` in the JSON says which.
    """
    from windlass.plan import write
    from windlass.plan.show import show

    made = make_plan(run, override, accelerate)
    written = write(made, out)
    write_result(made, as_json, lambda made: show(made, details=details, formulas=explain, compare=compare))
    if written:
        say(f"plan written to {written}")


@command(
    BEFORE, "explain lora.r", "explain lora.r --run run.yaml", "explain NCCL_IB_HCA", "explain --accelerate fsdp.yaml"
)
def explain(
    topic: Annotated[str | None, arg("KEY", "Key of a run file or Accelerate file, variable, or layout.")] = None,
    run: Annotated[Path | None, opt("--run", "RUN", "Also show where this run file sets it, and to what.")] = None,
    accelerate: Accelerate = None,
    as_json: Json = False,
) -> None:
    """Explain a setting: what it means and what windlass does with it."""
    from windlass import explain as explaining

    rows = [*(explaining.topic(topic, run) if topic else ()), *(explaining.file(accelerate) if accelerate else ())]
    if not rows:
        raise UserError("nothing to explain", "windlass explain", "give a key, or a file with --accelerate FILE")
    if as_json:
        write_json([asdict(row) for row in rows])
    else:
        explaining.show(rows)


@command(BEFORE, "data run.yaml", "data run.yaml --override data.packing=true")
def data(
    run: Run,
    override: Overrides = None,
    sample: Annotated[int | None, opt("--sample", "N", "Show N rows of every set token by token.", min=1)] = None,
    row: Annotated[int | None, opt("--row", "K", "Show row K, counted from 0, token by token.", min=0)] = None,
    source: Annotated[str | None, opt("--source", "NAME", "Of this set of a mix.")] = None,
    as_json: Json = False,
) -> None:
    """Tokenize the data and show what the model will be trained on.

    Prints rows, tokens, how many of them the loss is computed on, what is cut off, and what packing would gain; of a
    mix, for each of its sets. With --sample or --row only those rows, and where loss is computed on them.
    """
    from windlass import plan as planning
    from windlass.data.prepare import audit_data, token_rows
    from windlass.data.show import show, show_rows
    from windlass.runfile import read

    loaded = planning.with_choices(read(run, override or ()), say)
    if sample or row is not None:
        (write_json if as_json else show_rows)(token_rows(loaded, say=say, sample=sample, row=row, source=source))
        return
    audit_data(loaded, say=say, audited=write_json if as_json else show)


@command(BEFORE, "fetch run.yaml")
def fetch(
    run: Run,
    override: Overrides = None,
    headers_only: Annotated[bool, flag("--headers-only", "Only what `plan` needs of the model, a few MB.")] = False,
) -> None:
    """Download the run's model and data set from the Hugging Face Hub.

    They go into the hub's cache (HF_HOME), where a run file that names them by their hub id finds them. An interrupted
    download is resumed.
    """
    from windlass import fetch as fetching
    from windlass.runfile import read

    loaded = read(run, override or ())
    for name, folder in fetching.fetch_run(loaded.run, loaded.where, say, headers_only=headers_only).items():
        print(f"{name}\t{folder}")


@command(
    BEFORE,
    "calibrate",
    "calibrate --ranks 2 --out machine.json",
    "plan run.yaml --override cluster.machine=machine.json",
)
def calibrate(
    ranks: Annotated[
        int | None, opt("--ranks", "N", "Ranks that measure together. Default: one per GPU.", min=1)
    ] = None,
    out: Annotated[
        Path | None, opt("--out", "FILE", "Machine file. Default: where `plan` finds it on this host.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine for the plan, in about a minute.

    Products, memory, the host, FP8 decoding, collectives between real ranks, and storage. The plan takes the file that
    cluster.machine names, or on one node the one found for this host. Under torchrun over several nodes it measures
    the network too.
    """
    from windlass import calibrate as calibrating

    require(TRAINING, "calibrate")
    if measured := calibrating.calibrate(ranks, out, os.environ, say):
        path, content = measured
        write_json(content) if as_json else calibrating.show(content)
        say(f"written to {path}")


@command(BEFORE, "check run.yaml", "check run.yaml --here", "check run.yaml --in-pod --json", "check --self-test")
def check(
    run: Annotated[Path | None, arg("RUN", "The run file (YAML). None with --self-test.", callback=remember)] = None,
    override: Overrides = None,
    accelerate: Accelerate = None,
    here: Annotated[bool, flag("--here", "Check this machine too: the run will use it.")] = False,
    in_pod: Annotated[bool, flag("--in-pod", "Run on every node: checks the nodes and their network.")] = False,
    wait: Annotated[float, opt("--wait", "SECONDS", "How long nodes wait for others. Default: 300.", min=1)] = 300.0,
    self_test: Annotated[bool, flag("--self-test", "Test kernels and training on this machine, in 3 minutes.")] = False,
    as_json: Json = False,
) -> None:
    """Check what would stop the run: files, libraries, GPUs, network.

    Writes check.json into the run folder if it exists. Exits with 1 if a check fails. With --in-pod all nodes agree on
    one verdict and exit with 13, or with 1 if the only problem is that nodes are missing.
    """
    from windlass.launch import check as checking
    from windlass.plan.accelerate import read_accelerate
    from windlass.plan.script import refuse_accelerate
    from windlass.runfile import LoadedScript, read_any

    if (run is None) != self_test or (self_test and (override or accelerate or here or in_pod)):
        raise UserError("give a run file, or --self-test alone", "windlass check", "`windlass check run.yaml`")
    if run is None:
        from windlass import self_test as testing

        report = testing.run(os.environ, Path("self-test.json"), say)
        write_result(report, as_json, checking.show)
        raise typer.Exit(report.exit_code)
    try:
        loaded = read_any(run, override or ())
        if isinstance(loaded, LoadedScript):
            refuse_accelerate(accelerate)
    except UserError as error:
        if not in_pod:
            raise
        print_error(error)
        raise typer.Exit(RANK_USER_INPUT) from None
    report = checking.run(
        loaded,
        lambda: read_accelerate(accelerate) if accelerate else None,
        depth=checking.IN_POD if in_pod else checking.HERE if here else checking.ALONE,
        environ=os.environ,
        patience_seconds=wait,
        say=say,
    )
    if report.is_leader:
        written = report.write(Path(loaded.run.folder))
        write_result(report, as_json, checking.show)
        if written:
            say(f"checks written to {written}")
    else:  # whoever reads this node's log alone
        for result in report.failures:
            say(f"check failed: {result.title}: {result.seen}")
    checking.leave_error(report, os.environ)
    raise typer.Exit(report.exit_code)


@command(BEFORE, "rehearse run.yaml", "rehearse run.yaml --keep rehearsal --override cluster.nodes=2")
def rehearse(
    run: Run,
    override: Overrides = None,
    accelerate: Accelerate = None,
    keep: Annotated[Path | None, opt("--keep", "DIR", "Keep all files there. Default: those of a failure.")] = None,
    as_json: Json = False,
) -> None:
    """Run everything with a tiny replica of the model on this CPU.

    Takes minutes: your first rows, your launch script and as many workers as the run has go through plan, check, train,
    stop, resume, export, merge and reload. Exits with 1 if a stage fails and 2 if the input is wrong.
    """
    from windlass import rehearse as rehearsing

    require(TRAINING, "rehearse")
    record = rehearsing.rehearse(
        run, overrides=override or (), accelerate=accelerate, keep=keep, environ=os.environ, say=say
    )
    write_result(record, as_json, rehearsing.show)
    raise typer.Exit(record.exit_code)


# --- during a run ---------------------------------------------------------------------------------------------------


@command(DURING, "train run.yaml", "train run.yaml --ranks 2 --override train.max_steps=20")
def train(
    run: Run,
    override: Overrides = None,
    accelerate: Accelerate = None,
    ranks: Ranks = None,
    resume: Annotated[bool, flag("--resume", "Resume the unfinished run in the run folder.")] = False,
    debug_freq: Annotated[int | None, opt("--debug-freq", "N", "Measure GPUs every N steps; 0: never.", min=0)] = None,
    allow_other_base: OtherBase = False,
) -> None:
    """Start training. Under torchrun or accelerate, runs as one worker.

    Such as: accelerate launch --config_file fsdp.yaml -m windlass train run.yaml

    Exits with 0 when finished, 1 if the run failed, 2 if the input is wrong (13 from a worker), and 75 if a signal
    stopped it and everything was saved.
    """
    from windlass import train as training
    from windlass.runfile import kind
    from windlass.train import script

    overrides = [*(override or ()), *([] if ranks is None else ["cluster.nodes=1", f"cluster.gpus_per_node={ranks}"])]
    is_script = kind(run, overrides) == "script"
    overrides += ["layout.ranks=null"] if is_script and ranks is not None else []
    require(("torch",) if is_script else TRAINING, "train")

    def planned() -> Any:
        """On the machines that a launcher started, or on this one, unless the files say which."""
        from windlass.hardware import this_machine
        from windlass.plan.accelerate import accelerate_file
        from windlass.plan.script import make_any, refuse_accelerate
        from windlass.runfile import read_any
        from windlass.train.ranks import started_on

        if is_script and debug_freq is not None:
            hint = "pass it to the meter inside your script"
            raise UserError("has no effect on a script, which measures itself", "--debug-freq", hint)
        if is_script:
            refuse_accelerate(accelerate)
        loaded, file = read_any(run, overrides), None if is_script else accelerate_file(accelerate, os.environ)
        sized = file is not None and not file.wishes.keys().isdisjoint(("nodes", "ranks"))
        if not sized and (found := started_on(loaded, os.environ, len(this_machine().gpus))):
            loaded = read_any(run, [*overrides, *found])
        return make_any(loaded, file)

    if is_script:
        raise typer.Exit(script.train(planned, environ=os.environ, resume=resume, say=print_error))
    arguments = ["train", str(run), *(word for each in overrides for word in ("--override", each))]
    arguments += words("--accelerate", accelerate) + words("--debug-freq", debug_freq) + ["--resume"] * resume
    arguments += ["--allow-other-base"] * allow_other_base
    code = training.train(
        planned,
        arguments=arguments,
        environ=os.environ,
        resume=resume,
        debug_freq=debug_freq,
        allow_other_base=allow_other_base,
        say=print_error,
    )
    raise typer.Exit(code)


@command(DURING, "demo --dir demo-run", "report demo-run/run")
def demo(
    directory: Annotated[Path, opt("--dir", "DIR", "Folder to create it in. Default: demo-run.")] = Path("demo-run"),
    make_only: Annotated[bool, flag("--make-only", "Create model, data and run file, but don't train.")] = False,
) -> None:
    """Create a tiny Mistral 4 and train it on this CPU with two workers."""
    from windlass import demo as demonstration

    run = demonstration.make(directory)
    say(f"created {directory / 'model'}, {directory / 'data'} and {run}")
    if not make_only:
        train(run)


@command(DURING, "submit run.yaml --to kubernetes --dry-run", "submit run.yaml --to runai --follow")
def submit(
    run: Run,
    to: Annotated[str | None, opt("--to", "PLATFORM", "local, script, slurm, kubernetes, openshift or runai.")] = None,
    override: Overrides = None,
    accelerate: Accelerate = None,
    dry_run: Annotated[bool, flag("--dry-run", "Write the files, start nothing.")] = False,
    follow: Annotated[bool, flag("--follow", "Print the run's log until it ends.")] = False,
    out: JobDir = None,
    kustomize: Kustomize = None,
) -> None:
    """Write the job's files for a platform and submit it.

    local trains here, in the foreground. script writes launch.sh, to be run on every node by hand. slurm, kubernetes,
    openshift and runai use the commands sbatch, kubectl (or oc) and runai; without them, only the files are written.
    Submit an interrupted run again to resume it.
    """
    from windlass.launch import submit as submitting

    submitting.require_platform(to)
    plan = make_plan(run, override, accelerate)
    code = submitting.submit(
        plan,
        to or plan.loaded.run.cluster.platform,
        overrides=override or (),
        accelerate=accelerate,
        out=out,
        dry_run=dry_run,
        follow=follow,
        kustomize=kustomize,
        say=say,
    )
    raise typer.Exit(code)


@command(DURING, "status run.yaml")
def status(run: Run, override: Overrides = None, out: JobDir = None) -> None:
    """Show the state of a submitted run, as its platform reports it."""
    from windlass.launch.submit import submitted

    platform, record = submitted(run, override or (), out, say)
    raise typer.Exit(platform.status(record))


@command(DURING, "logs run.yaml --follow")
def logs(run: Run, override: Overrides = None, follow: Follow = False, out: JobDir = None) -> None:
    """Show the output of a submitted run's nodes."""
    from windlass.launch.submit import submitted

    platform, record = submitted(run, override or (), out, say)
    raise typer.Exit(platform.logs(record, follow=follow))


@command(DURING, "stop run.yaml", "submit run.yaml    # resumes it")
def stop(run: Run, override: Overrides = None, out: JobDir = None) -> None:
    """Stop a submitted run after it has saved a checkpoint."""
    from windlass.launch.submit import submitted

    platform, record = submitted(run, override or (), out, say)
    raise typer.Exit(platform.stop(record))


@command(DURING, "watch run", "watch run --once")
def watch(folder: RunDir, once: Annotated[bool, flag("--once", "Print the current state and exit.")] = False) -> None:
    """Watch a run: curves, workers, alarms.

    Reads only the files in the run folder, so it also works on a finished run or from another machine.
    """
    from rich.console import Console

    from windlass.observe.watch import live

    live.watch(folder, once=once, console=Console(highlight=False))


# --- after a run ----------------------------------------------------------------------------------------------------


@command(AFTER, "report run", "report run-a run-b --out compared")
def report(
    folders: Annotated[list[Path], arg("RUN_DIR", "One run folder, or several to compare.")],
    out: Annotated[Path | None, opt("--out", "DIR", "Folder to write the report to.")] = None,
    as_json: Json = False,
) -> None:
    """Write report.html and report.json for one run, or compare several."""
    from windlass.observe import report as reporting
    from windlass.observe.report import show

    write_result(reporting.make(folders, out), as_json, show)


@command(AFTER, "best run", "best run --eval-data held-out.jsonl --ranks 1", "best run --base-dtype bf16,nf4")
def best(
    folder: RunDir,
    eval_data: Annotated[Path | None, opt("--eval-data", "PATH", "Rows to evaluate on, instead of the run's.")] = None,
    ranks: Ranks = None,
    base_dtype: BaseDtypes = None,
    allow_other_base: OtherBase = False,
    as_json: Json = False,
) -> None:
    """Evaluate all saved adapters on the same rows and rank them.

    The base model is loaded once. Differences come with a paired 95 % confidence interval, which shows which adapters
    are significantly worse.
    """
    from windlass import train as training

    def show(ranking: Any) -> None:
        from windlass.train.best import show as show_table

        write_result(ranking, as_json, show_table)

    dtypes = base_dtype.split(",") if base_dtype else []
    arguments = ["best", str(folder), *words("--eval-data", eval_data), *words("--ranks", ranks), *["--json"] * as_json]
    arguments += [*words("--base-dtype", base_dtype), *["--allow-other-base"] * allow_other_base]
    code = training.best(
        lambda: training.plan_finished_run(folder, eval_data=eval_data, ranks=ranks, base_dtypes=dtypes),
        folder,
        arguments=arguments,
        environ=os.environ,
        base_dtypes=dtypes,
        allow_other_base=allow_other_base,
        show=show,
        say=print_error,
    )
    raise typer.Exit(code)


@command(AFTER, "export run --to my-adapter", "export run --to my-model --merge --dtype bf16")
def export(
    source: Annotated[Path, arg("RUN_DIR|CHECKPOINT", "A run folder, or a folder with an adapter.")],
    to: Annotated[Path, opt("--to", "DIR", "Folder to write to.")],
    merge: Annotated[bool, flag("--merge/--adapter", "Merge the adapter into its base model.")] = False,
    dtype: Annotated[str | None, opt("--dtype", "DTYPE", "bf16; a merged model also fp8. Default: unchanged.")] = None,
    base: Base = None,
    base_name: Annotated[str | None, opt("--base-name", "NAME", "Name of the base model in the model card.")] = None,
    model_class: Annotated[str | None, opt("--for", "CLASS", "Model class that opens it, if the base has two.")] = None,
    workers: Annotated[int | None, opt("--workers", "N", "Write N files at a time.", min=1)] = None,
    push: Annotated[str | None, opt("--push", "ORG/NAME", "Upload it to a private Hub repository.")] = None,
    allow_other_base: OtherBase = False,
    as_json: Json = False,
) -> None:
    """Write the best adapter, alone or merged, and verify the files.

    Exits with 1 if the verification finds a deviation; nothing is deleted then.
    """
    from windlass import export as exporting
    from windlass.export import screen

    made = exporting.export(
        source,
        to,
        merge=merge,
        dtype=dtype,
        base=base,
        called=base_name,
        model_class=model_class,
        workers=workers,
        allow_other_base=allow_other_base,
        say=screen.say,
    )
    address = exporting.push(to, push, say=screen.say) if push else None
    if as_json:
        write_json({**made.record, "pushed": address})
    else:
        print(to)


@command(AFTER, "generate my-model --prompt 'Once upon a time'")
def generate(
    folder: Annotated[Path, arg("DIR", "A merged model, an adapter, or a run folder.")],
    prompt: Annotated[str, opt("--prompt", "TEXT", "The text to continue.")],
    tokens: Annotated[int, opt("--tokens", "N", "Maximum number of new tokens. Default: 64.", min=1)] = 64,
    temperature: Annotated[float, opt("--temperature", "T", "Default: 0, always the likeliest token.", min=0)] = 0.0,
    seed: Annotated[int, opt("--seed", "N", "Seed for sampling.")] = 0,
    chat: Annotated[bool, flag("--chat", "Apply the model's chat template to the prompt.")] = False,
    base: Base = None,
    allow_other_base: OtherBase = False,
) -> None:
    """Generate text with a model on this machine, as a quick check."""
    from windlass.export import screen
    from windlass.export.generate import generate as generating

    generating(
        folder,
        prompt,
        base=base,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        allow_other_base=allow_other_base,
        say=screen.say,
        write=lambda text: print(text, end="", flush=True),
    )


@command(HELP, "version", "version --json")
def version(as_json: Json = False) -> None:
    """Print the versions that matter for a bug report: libraries, CUDA, driver, GPUs, system."""
    from windlass import support

    (write_json if as_json else support.show)(support.versions())


@command(HELP, "bug-report run", "bug-report run.yaml --out bug-report.tar.gz")
def bug_report(
    run: Annotated[Path, arg("RUN", "The run folder, or the run file.")],
    out: Annotated[Path | None, opt("--out", "FILE", "Archive to write. Default: bug-report-RUN.tar.gz, here.")] = None,
) -> None:
    """Collect what explains a run into one archive, without data or secrets, and print what is in it.

    Versions, the resolved run with secrets masked, plan, loading certificate, counts of the data audit, and the last
    lines of logs and events. No rows, no weights, no samples. Read it before you send it.
    """
    from windlass import support

    print(support.bug_report(run, out, os.environ, say))
