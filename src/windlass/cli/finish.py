"""Commands for after the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.options import (
    Json,
    app,
    print_error,
    write_json,
)

if TYPE_CHECKING:
    from windlass.plan import Plan
    from windlass.train.best import Ranking


@app.command(epilog="**Examples**\n\n`windlass report run`\n\n`windlass report run-a run-b --out compared`")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR…", help="One run folder, or several to compare.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write the report.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's report: report.html, report.json, and a summary here."""
    from windlass.observe import report as reporting

    made = reporting.make(folders, out)
    if as_json:
        write_json(made.as_dict())
        return
    from windlass.observe.report.show import show

    show(made)


@app.command(epilog="**Examples**\n\n`windlass best run`\n\n`windlass best run --eval-data held-out.jsonl --ranks 1`")
def best(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")],
    eval_data: Annotated[
        Path | None,
        typer.Option(
            "--eval-data", metavar="PATH", help="Rows to compare on; default: the run's own.", show_default=False
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", min=1, help="Number of ranks, on this machine only.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate every saved adapter on the same rows and rank them, with what is significantly worse.

    The base model is loaded once. Differences come with a paired 95 % confidence interval.
    """
    from windlass import train as training

    def planned() -> Plan:
        from windlass import plan as planning
        from windlass.train.again import again

        return planning.make(again(folder, eval_data=eval_data, ranks=ranks), None)

    def show(ranking: Ranking) -> None:
        from windlass.train.best import show as show_table

        write_json(ranking.as_dict()) if as_json else show_table(ranking)

    arguments = ["best", str(folder), *(["--eval-data", str(eval_data)] if eval_data else [])]
    arguments += [*(["--ranks", str(ranks)] if ranks else []), *(["--json"] if as_json else [])]
    code = training.best(planned, folder, arguments=arguments, environ=os.environ, show=show, say=print_error)
    raise typer.Exit(code)


@app.command(
    epilog="**Examples**\n\n"
    "`windlass export run --to my-adapter`\n\n"
    "`windlass export run --to my-model --merge --dtype bf16`\n\n"
    "`windlass export run --to my-adapter --serve-check --push org/my-adapter`"
)
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", help="A run folder, or an adapter's.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Where to write it.")],
    merge: Annotated[
        bool, typer.Option("--merge/--adapter", help="Merge it into its base, or write the adapter alone.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Merged: bf16 or fp8; adapter: bf16. Default: as it is.", show_default=False),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="DIR", help="The base model's folder.", show_default=False)
    ] = None,
    base_name: Annotated[
        str | None,
        typer.Option("--base-name", metavar="NAME", help="What the card calls the base.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Files written at a time.", show_default=False)
    ] = None,
    serve_check: Annotated[
        bool, typer.Option("--serve-check", help="Say what servers do with it, and how to start one.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="ORG/NAME", help="Upload it to a private hub repository.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's best adapter, alone or merged into its base, and prove what was written.

    Exits with 1 when the proof finds a deviation; nothing is deleted then.
    """
    from windlass import export as exporting
    from windlass.export import screen

    names = exporting.Names(base, base_name)
    made = exporting.export(
        source, to, merge=merge, dtype=dtype, names=names, workers=workers, say=screen.say, progress=screen.progress
    )
    served = exporting.served(source, made, base) if serve_check else None
    if served and not as_json:
        screen.served(served)
    address = exporting.push(to, push, say=screen.say) if push else None
    if as_json:
        write_json({**made.record, "served": served.as_dict() if served else None, "pushed": address})
    else:
        print(to)


@app.command(epilog="**Example**\n\n`windlass generate my-model --prompt 'Once upon a time'`")
def generate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A merged model, an adapter, or a run folder.")],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    base: Annotated[
        str | None, typer.Option("--base", metavar="DIR", help="The adapter's base model.", show_default=False)
    ] = None,
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
        say=screen.say,
        write=lambda text: print(text, end="", flush=True),
    )
