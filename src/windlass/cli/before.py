"""Commands before a run."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.options import (
    BEFORE,
    Accelerate,
    Force,
    Json,
    OutFile,
    Overrides,
    RunPath,
    arg,
    command,
    flag,
    make_plan,
    opt,
    option_words,
    remember_run_file,
    require_new,
    say,
    write_json,
    write_result,
    write_run_file,
)
from windlass.errors import RANK_USER_INPUT, TRAINING, UserError, print_error, raise_all
from windlass.versions import require_libraries


@command(
    BEFORE,
    "init --model ./Qwen3-8B --data chats.jsonl --gpus 8xh100 --out run.yaml",
    "init mistral-small-4 --out run.yaml",
    "init --list",
)
def init(
    preset: Annotated[str | None, arg("PRESET", "Which run file; see --list. Default: mistral-small-4.")] = None,
    model: Annotated[str | None, opt("--model", "DIR", "Write one for this model; needs --data.")] = None,
    data: Annotated[str | None, opt("--data", "PATH", "The rows to train on.")] = None,
    columns: Annotated[
        str | None, opt("--columns", "MAP", "What the rows call a format's columns: '{prompt: question, …}'.")
    ] = None,
    gpus: Annotated[str | None, opt("--gpus", "N", "8xh200, or 2x8xh200 for two nodes. Default: this machine.")] = None,
    override: Overrides = None,
    out: OutFile = None,
    force: Force = False,
    names: Annotated[bool, flag("--list", "List the presets.")] = False,
) -> None:
    """Print a run file to start from: a commented preset, or one made for your model and data.

    With --out it is written in full or not at all: `> run.yaml` leaves an empty file if something is wrong.
    """
    from windlass.init import draft_run
    from windlass.runfile import read_preset, read_presets

    require_new(out, force)
    text = ""
    if model or data or gpus or columns or override:
        if preset:
            what = f"takes either a preset or --model, not {preset} too"
            raise UserError(what, "windlass init", "leave one out", "preset-and-model")
        if not (model and data):
            hint = "`windlass init --model DIR --data PATH --out run.yaml`"
            raise UserError("needs both --model and --data", "windlass init", hint, "missing-option")
        draft = draft_run(model, data, gpus, say, columns, override or ())
        for warning in draft.warnings:
            say(f"warning: {warning}")
        text = draft.text
    elif names:
        for name, preset_text in read_presets().items():
            summary = preset_text.splitlines()[0].removeprefix("# ")
            print(f"{name}\n  {summary}")
    else:
        text = read_preset(preset or "mistral-small-4")
    write_run_file(text, out)


@command(BEFORE, "import axolotl.yml --gpus 8xh100 --out run.yaml", "import sft.sh --from swift > run.yaml")
def import_(
    file: Annotated[Path, arg("FILE", "Configuration (YAML, JSON), or shell script that starts the tool.")],
    tool: Annotated[
        str | None, opt("--from", "TOOL", "axolotl, llamafactory, trl or swift. Default: recognized.")
    ] = None,
    gpus: Annotated[str | None, opt("--gpus", "N", "The run's GPUs: 8xh200, or 2x8xh200 for two nodes.")] = None,
    override: Overrides = None,
    out: OutFile = None,
    force: Force = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of a run file.")] = False,
) -> None:
    """Print a run file made from another tool's configuration.

    Every key is carried over, translated, or listed on stderr with the reason why it has no effect.
    A key that changes training and has no counterpart is an error; --out then writes nothing.
    """
    from windlass.runfile.importers import import_file, list_no_effect, render_run_file

    require_new(out, force)
    imported = import_file(file, tool or "", gpus, override or ())
    if as_json:
        write_json(imported.as_dict())
    else:
        say(list_no_effect(imported))
    if out is not None:
        raise_all(imported.problems)
    if out is not None or not as_json:
        write_run_file(render_run_file(imported), out)
    raise_all(imported.problems)


@command(BEFORE, "schema > windlass.schema.json")
def schema() -> None:
    """Print the run file's JSON Schema, for editors that complete and check.

    `# yaml-language-server: $schema=windlass.schema.json` as the first line of run.yaml names it to most editors.
    """
    from windlass.runfile import make_schema

    write_json(make_schema())


@command(
    BEFORE,
    "plan run.yaml",
    "plan run.yaml --compare",
    "plan run.yaml --accelerate fsdp.yaml --json | jq .estimate",
    "plan Qwen/Qwen3-30B-A3B --gpus 4xl40s",
    "plan Qwen/Qwen3-30B-A3B --gpus all --prices prices.yaml",
    "plan ./Qwen3-8B --gpus 2xh100 --data chats.jsonl --save run.yaml",
)
def plan(
    run: Annotated[
        Path,
        arg("RUN", "The run file (YAML), or a model: its name, folder or config.json.", callback=remember_run_file),
    ],
    override: Overrides = None,
    accelerate: Accelerate = None,
    gpus: Annotated[
        str | None, opt("--gpus", "N", "Plan for 8xh200, or 2x8xh200 for two nodes; all: compare every kind.")
    ] = None,
    prices: Annotated[
        Path | None, opt("--prices", "FILE", "With --gpus all: prices per GPU-hour, `h100: 2.5` (YAML, JSON, TOML).")
    ] = None,
    data: Annotated[str | None, opt("--data", "PATH", "Of a model: the rows to train on.")] = None,
    tokens: Annotated[int | None, opt("--tokens", "N", "Of a model: tokens of a row. Default: 512.", min=1)] = None,
    save: Annotated[Path | None, opt("--save", "FILE", "Of a model with --data: write the run file there.")] = None,
    longest: Annotated[bool, flag("--longest", "Show the longest row that fits, by layout.")] = False,
    compare: Annotated[bool, flag("--compare", "Show the same run under other layouts and numbers of nodes.")] = False,
    details: Annotated[bool, flag("--details", "Show the tables and notes behind it.")] = False,
    explain: Annotated[bool, flag("--explain", "Show every row of the tables, with its formula.")] = False,
    out: Annotated[Path | None, opt("--out", "DIR", "Write plan.json to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Estimate memory, network traffic and time, without a GPU.

    Reads the run file, config.json and the safetensors headers; needs neither the weights nor torch. Of a model alone
    it plans the run that `windlass init` would write. The exit code is 0 whether or not the run fits; `memory.fits` in
    the JSON says which.
    """
    from windlass.plan import write_plan
    from windlass.plan.longest import find_longest_rows
    from windlass.plan.show import print_plan
    from windlass.sizing import ALL, compare_gpus, open_subject, print_comparison, print_longest, read_prices

    chosen = {
        "--prices": prices,
        "--data": data,
        "--tokens": tokens,
        "--save": save,
        "--longest": longest,
        "--compare": compare,
        "--details": details,
        "--explain": explain,
        "--out": out,
    }
    options = {name: value for name, value in chosen.items() if value}
    subject = open_subject(str(run), gpus, options, override or (), accelerate, say)
    if gpus == ALL and subject:
        write_result(compare_gpus(subject, read_prices(prices) if prices else None), as_json, print_comparison)
        return
    if longest and subject:
        rows = find_longest_rows(subject.plan())
        given = [word for text in override or () for word in ("--override", text)]
        given += option_words({"--accelerate": accelerate})
        write_result([asdict(row) for row in rows], as_json, lambda _: print_longest(rows, subject, gpus, given))
        return
    planned = subject.plan() if subject else make_plan(run, override, accelerate)
    written = None
    try:
        if out is not None or not (subject and subject.draft):  # a model's run has no folder yet
            written = write_plan(planned, out)
    except UserError as error:
        if out is not None:
            raise
        say(f"note: {error.problems[0].where}: {error.problems[0].problem}")
    if as_json:
        write_json(planned.as_dict())
    else:
        print_plan(planned, details=details, formulas=explain, compare=compare)
    if written:
        say(f"plan written to {written}")
    if save and subject and subject.draft:
        write_run_file(subject.draft.text, save)


@command(
    BEFORE, "explain lora.r", "explain lora.r --run run.yaml", "explain NCCL_IB_HCA", "explain --accelerate fsdp.yaml"
)
def explain(
    topic: Annotated[str | None, arg("KEY", "Key of a run file or Accelerate file, variable, or layout.")] = None,
    run: Annotated[Path | None, opt("--run", "RUN", "Also show where this run file sets it, and to what.")] = None,
    accelerate: Annotated[
        Path | None, opt("--accelerate", "FILE", "Explain every key of an Accelerate FSDP YAML.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a setting: what it means and what windlass does with it."""
    from windlass.explain import explain_file, explain_topic, print_rows

    rows = [*(explain_topic(topic, run) if topic else ()), *(explain_file(accelerate) if accelerate else ())]
    if not rows:
        what = "nothing to explain"
        raise UserError(what, "windlass explain", "give a key, or a file with --accelerate FILE", "nothing-to-explain")
    if as_json:
        write_json([asdict(row) for row in rows])
    else:
        print_rows(rows)


@command(BEFORE, "data run.yaml", "data run.yaml --row 1", "data run.yaml --html rows.html")
def data(
    run: RunPath,
    override: Overrides = None,
    sample: Annotated[int | None, opt("--sample", "N", "Show N rows of every set.", min=1)] = None,
    row: Annotated[int | None, opt("--row", "K", "Show row K, counted from 1.")] = None,
    prepared: Annotated[int | None, opt("--prepared-row", "K", "Show prepared row K, from 0 as in alarms.")] = None,
    source: Annotated[str | None, opt("--source", "NAME", "Only rows of this data set of a mix.")] = None,
    tokens: Annotated[bool, flag("--tokens", "Show rows token by token instead of as text.")] = False,
    html: Annotated[Path | None, opt("--html", "FILE", "Write a page with the figures and sampled rows.")] = None,
    as_json: Json = False,
) -> None:
    """Tokenize the data and show what the model will be trained on.

    Prints rows, tokens, how many of them the loss is computed on, what is cut off, and what packing would gain; of a
    mix, for each of its sets. With --sample or --row only those rows as text, and where loss is computed on them. The
    report links to a page data.html in the run folder.
    """
    from windlass.data.prepare import audit_data
    from windlass.data.show import (
        SAMPLED_ROWS,
        print_audit,
        print_rows,
        print_tokens,
        sample_token_rows,
        write_rows_page,
    )
    from windlass.plan import fill_in_choices
    from windlass.runfile import read_run_file

    if row is not None and row < 1:
        raise UserError("rows are counted from 1", f"--row {row}", "the first is --row 1", "no-such-row")
    if prepared is not None and (sample or row is not None or source):
        problem = "a prepared row is chosen by its number alone"
        hint = "leave --sample, --row and --source out"
        raise UserError(problem, f"--prepared-row {prepared}", hint, "chosen-twice")
    chosen = bool(sample) or row is not None or prepared is not None
    if (source or tokens) and not chosen and not html:
        name = "--source" if source else "--tokens"
        what = "it changes how rows are printed, and none is"
        raise UserError(what, name, "add --row K or --sample N", "no-rows-shown")
    read = read_run_file(run, override or ())
    if any(trial.run.data != read.run.data for trial in read.trials):
        say("note: trials of this sweep have other data, which are not shown: --override KEY=VALUE shows one's")
    loaded = fill_in_choices(replace(read, trials=()), say)
    if not chosen and not html:
        audit_data(loaded, say=say, audited=write_json if as_json else print_audit)
        return
    rows = sample_token_rows(loaded, say=say, sample=sample or SAMPLED_ROWS, row=row, source=source, prepared=prepared)
    if html:
        audit_data(loaded, say=say, audited=lambda audit: write_rows_page(html, audit, rows))
        say(f"written to {html}")
    if chosen or as_json:
        write_result(rows, as_json, print_tokens if tokens else print_rows)


@command(BEFORE, "fetch run.yaml")
def fetch(
    run: RunPath,
    override: Overrides = None,
    headers_only: Annotated[bool, flag("--headers-only", "Only what `plan` needs of the model, a few MB.")] = False,
) -> None:
    """Download the run's model and data set from the Hugging Face Hub.

    They go into the hub's cache (HF_HOME), where a run file that names them by their hub id finds them. An interrupted
    download is resumed.
    """
    from windlass.fetch import fetch_run
    from windlass.runfile import read_run_file

    loaded = read_run_file(run, override or ())
    found: dict[tuple[str, Path], None] = {}
    for each in {each.run.data.model_dump_json(): each for each in loaded.runs}.values():
        folders = fetch_run(each.run, each.where, say, headers_only=headers_only)
        found |= dict.fromkeys(folders.items())
    for name, folder in found:
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

    On GPUs: products, memory, the host, FP8 decoding, collectives between real ranks, and storage; under torchrun over
    several nodes the network too. On a CPU: a short training run, whose steps give one factor for the plan's times.
    The plan takes the file that cluster.machine names, or on one node the one found for this host.
    """
    from windlass.calibrate import calibrate, print_rates

    require_libraries(TRAINING, "calibrate")
    measured = calibrate(ranks, out, os.environ, say)
    if measured is None:  # one rank prints
        return
    path, rates = measured
    write_result(rates, as_json, print_rates)
    say(f"written to {path}")


@command(BEFORE, "check run.yaml", "check run.yaml --here", "check run.yaml --in-pod --json", "check --self-test")
def check(
    run: Annotated[
        Path | None, arg("RUN", "The run file (YAML). None with --self-test.", callback=remember_run_file)
    ] = None,
    override: Overrides = None,
    accelerate: Accelerate = None,
    here: Annotated[bool, flag("--here", "Check this machine too: the run will use it.")] = False,
    in_pod: Annotated[bool, flag("--in-pod", "Run on every node: checks the nodes and their network.")] = False,
    wait: Annotated[float, opt("--wait", "SECONDS", "How long nodes wait for others. Default: 300.", min=1)] = 300.0,
    self_test: Annotated[bool, flag("--self-test", "Test kernels and training on this machine, in 3 minutes.")] = False,
    as_json: Json = False,
) -> None:
    """Check what would stop the run: files, libraries, GPUs, network.

    Writes check.json into the run folder if it exists and no run has begun there. Exits with 1 if a check fails. With
    --in-pod all nodes agree on one verdict and exit with 13, or with 1 if the only problem is that nodes are missing.
    """
    from windlass.launch.check import ALONE, HERE, IN_POD, print_report, run_checks, write_error
    from windlass.runfile import read_any
    from windlass.runfile.accelerate import load_accelerate

    if (run is None) != self_test or (self_test and (override or accelerate or here or in_pod)):
        what = "give a run file, or --self-test alone"
        raise UserError(what, "windlass check", "`windlass check run.yaml`", "no-run-file")
    if run is None:
        from windlass.self_test import run as run_self_test

        report = run_self_test(os.environ, Path("self-test.json"), say)
        write_result(report, as_json, print_report)
        raise typer.Exit(report.exit_code)
    try:
        loaded = read_any(run, override or (), load_accelerate(accelerate))
    except UserError as error:
        if not in_pod:
            raise
        print_error(error)
        raise typer.Exit(RANK_USER_INPUT) from None
    depth = HERE if here else ALONE
    if in_pod:
        depth = IN_POD
    report = run_checks(loaded, depth=depth, environ=os.environ, patience_seconds=wait, say=say)
    if report.is_leader:
        written = report.write(Path(loaded.run.folder))
        write_result(report, as_json, print_report)
        if written:
            say(f"checks written to {written}")
    else:  # whoever reads this node's log alone
        for result in report.failures:
            say(f"check failed: {result.title}: {result.seen}")
    write_error(report, os.environ)
    raise typer.Exit(report.exit_code)


@command(BEFORE, "rehearse run.yaml", "rehearse run.yaml --keep rehearsal --override cluster.nodes=2")
def rehearse(
    run: RunPath,
    override: Overrides = None,
    accelerate: Accelerate = None,
    keep: Annotated[Path | None, opt("--keep", "DIR", "Keep all files there. Default: those of a failure.")] = None,
    as_json: Json = False,
) -> None:
    """Run everything with a tiny replica of the model on this CPU.

    Takes minutes: your first rows, your launch script and as many ranks as the run has go through plan, check, train,
    stop, resume, export, merge and reload. Exits with 1 if a stage fails and 2 if the input is wrong.
    """
    from windlass.rehearse import print_record, rehearse

    require_libraries(TRAINING, "rehearse")
    record = rehearse(run, overrides=override or (), accelerate=accelerate, keep=keep, environ=os.environ, say=say)
    write_result(record, as_json, print_record)
    raise typer.Exit(record.exit_code)
