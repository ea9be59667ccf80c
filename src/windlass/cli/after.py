"""Commands after a run, and if something is wrong."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.options import (
    AFTER,
    HELP,
    BaseDtypeList,
    BaseFolder,
    Json,
    OtherBase,
    RankCount,
    RunDir,
    arg,
    command,
    flag,
    opt,
    option_words,
    say,
    write_json,
    write_result,
)
from windlass.errors import FAILED, TRAINING, print_error
from windlass.versions import require_libraries


@command(AFTER, "report run", "report run-a run-b --out compared")
def report(
    folders: Annotated[list[Path], arg("RUN_DIR", "One run folder, or several to compare.")],
    out: Annotated[Path | None, opt("--out", "DIR", "Folder to write the report to.")] = None,
    as_json: Json = False,
) -> None:
    """Write report.html and report.json for one run, or compare several."""
    from windlass.observe.report import make_report, print_report

    write_result(make_report(folders, out), as_json, print_report)


@command(
    AFTER,
    "best run",
    "best run --eval-data held-out.jsonl --ranks 1",
    "best run --base-dtype bf16,nf4",
    "best run --by accuracy",
    "best run --keep 0.02",
)
def best(
    folder: RunDir,
    eval_data: Annotated[Path | None, opt("--eval-data", "PATH", "Rows to evaluate on, instead of the run's.")] = None,
    ranks: RankCount = None,
    base_dtype: BaseDtypeList = None,
    by: Annotated[
        str, opt("--by", "loss|accuracy", "Rank pairs by how often the chosen answer is preferred.")
    ] = "loss",
    keep: Annotated[
        float | None, opt("--keep", "LOSS", "Most that the loss of a kept set may be above the base's.")
    ] = None,
    allow_other_base: OtherBase = False,
    as_json: Json = False,
) -> None:
    """Evaluate all saved adapters on the same rows and rank them.

    The base model is loaded once. Differences come with a paired 95 % confidence interval, which shows which adapters
    are significantly worse.
    """
    require_libraries(TRAINING, "best")
    from windlass.plan.finished import plan_finished_run
    from windlass.start import RankCommand, best, compute_fingerprint

    def show(ranking: Any) -> None:
        from windlass.ranking import print_ranking

        write_result(ranking, as_json, print_ranking)

    dtypes = base_dtype.split(",") if base_dtype else []
    options = {"--eval-data": eval_data, "--ranks": ranks, "--base-dtype": base_dtype, "--by": by, "--keep": keep}
    options |= {"--json": as_json, "--allow-other-base": allow_other_base}
    arguments = ["best", str(folder), *option_words(options)]
    code = best(
        lambda: plan_finished_run(folder, eval_data=eval_data, ranks=ranks, base_dtypes=dtypes),
        folder,
        RankCommand(arguments, os.environ, print_error, fingerprint=compute_fingerprint([], arguments)),
        base_dtypes=dtypes,
        allow_other_base=allow_other_base,
        by=by,
        keep=keep,
        show=show,
    )
    raise typer.Exit(code)


@command(
    AFTER,
    "export run --to my-adapter",
    "export run --to my-adapter --for vllm",
    "export run --to my-model --merge --dtype bf16",
)
def export(
    source: Annotated[Path, arg("RUN_DIR|CHECKPOINT", "A run folder, or a folder with an adapter.")],
    to: Annotated[Path, opt("--to", "DIR", "Folder to write to.")],
    merge: Annotated[bool, flag("--merge/--adapter", "Merge the adapter into its base model.")] = False,
    dtype: Annotated[str | None, opt("--dtype", "DTYPE", "bf16, float32; merged also fp8. Default: unchanged.")] = None,
    base: BaseFolder = None,
    base_name: Annotated[str | None, opt("--base-name", "NAME", "Name of the base model in the model card.")] = None,
    reader: Annotated[
        str | None, opt("--for", "SERVER", "Who reads it: vllm, sglang, llama.cpp, peft, or a model class.")
    ] = None,
    layout: Annotated[
        str | None, opt("--layout", "LAYOUT", "With --merge: hf, or mistral for both. Default: as the base.")
    ] = None,
    workers: Annotated[int | None, opt("--workers", "N", "Write N files at a time.", min=1)] = None,
    no_probe: Annotated[bool, flag("--no-probe", "Don't compute probe.json, which servers are compared with.")] = False,
    push: Annotated[str | None, opt("--push", "ORG/NAME", "Upload it to a private Hub repository.")] = None,
    allow_other_base: OtherBase = False,
    as_json: Json = False,
) -> None:
    """Write the best adapter, alone or merged, and verify the files.

    Exits with 1 if the verification finds a deviation; nothing is deleted then.
    """
    require_libraries(TRAINING, "export")
    from windlass.export import export, push_to_hub
    from windlass.export.screen import print_line
    from windlass.serve.servers import SERVERS

    record = export(
        source,
        to,
        merge=merge,
        dtype=dtype,
        base=base,
        called=base_name,
        model_class=None if reader in SERVERS else reader,
        server=reader if reader in SERVERS else None,
        environment=os.environ,
        layout=layout,
        workers=workers,
        allow_other_base=allow_other_base,
        probes=not no_probe,
        say=print_line,
    )
    address = push_to_hub(to, push, say=print_line) if push else None
    if as_json:
        write_json({**record, "pushed": address})
    else:
        print(to)


@command(AFTER, "verify http://127.0.0.1:8000 my-adapter --model NAME")
def verify(
    url: Annotated[str, arg("URL", "Address of an OpenAI-compatible server: vLLM, SGLang, llama.cpp.")],
    folder: Annotated[Path, arg("EXPORT", "An exported folder.")],
    model: Annotated[str | None, opt("--model", "NAME", "The model's name there. Default: the only one.")] = None,
    key_variable: Annotated[
        str, opt("--api-key-env", "NAME", "Variable with the server's key. Default: OPENAI_API_KEY.")
    ] = "OPENAI_API_KEY",
    as_json: Json = False,
) -> None:
    """Check that a server answers with the exported adapter.

    Compares log-probabilities, decoded tokens and the chat template with those of the export. Exits with 1 if the
    adapter is not applied, or not all of it.
    """
    from windlass.serve.verify import print_verdict, verify

    verdict = verify(url, folder, model, os.environ.get(key_variable), key_variable, say)
    write_result(verdict, as_json, print_verdict)
    raise typer.Exit(0 if verdict.passed else FAILED)


@command(AFTER, "generate my-model --prompt 'Once upon a time'")
def generate(
    folder: Annotated[Path, arg("DIR", "A merged model, an adapter, or a run folder.")],
    prompt: Annotated[str, opt("--prompt", "TEXT", "The text to continue.")],
    tokens: Annotated[int, opt("--tokens", "N", "Maximum number of new tokens. Default: 64.", min=1)] = 64,
    temperature: Annotated[float, opt("--temperature", "T", "Default: 0, always the likeliest token.", min=0)] = 0.0,
    seed: Annotated[int, opt("--seed", "N", "Seed for sampling.")] = 0,
    chat: Annotated[
        bool | None,
        flag("--chat/--raw", "The prompt is a turn of a chat, or a text to continue. Default: as in training."),
    ] = None,
    base: BaseFolder = None,
    allow_other_base: OtherBase = False,
) -> None:
    """Generate text with a model on this machine, as a quick check."""
    require_libraries(TRAINING, "generate")
    from windlass.export.generate import generate
    from windlass.export.screen import print_line

    generate(
        folder,
        prompt,
        base=base,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        allow_other_base=allow_other_base,
        say=print_line,
        write=lambda text: print(text, end="", flush=True),
    )


@command(HELP, "version", "version --json")
def version(as_json: Json = False) -> None:
    """Print the versions that matter for a bug report: libraries, CUDA, driver, GPUs, system."""
    from windlass.support import print_versions, read_versions

    write_result(read_versions(), as_json, print_versions)


@command(HELP, "bug-report run", "bug-report run.yaml --out bug-report.tar.gz")
def bug_report(
    run: Annotated[Path, arg("RUN", "The run folder, or the run file.")],
    out: Annotated[Path | None, opt("--out", "FILE", "Archive to write. Default: bug-report-RUN.tar.gz, here.")] = None,
) -> None:
    """Collect what explains a run into one archive, without data or secrets, and print what is in it.

    Versions, the resolved run with secrets masked, plan, loading certificate, counts of the data audit, and the last
    lines of logs and events. No rows, no weights, no samples. Read it before you send it.
    """
    from windlass.support import bug_report

    print(bug_report(run, out, os.environ, say))
