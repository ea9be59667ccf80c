"""Arguments and options that commands share, how one is declared, and the groups of the help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from windlass.errors import GIVEN, pasteable

BEFORE, DURING, AFTER, HELP = "Before a run", "During a run", "After a run", "If something is wrong"


class Groups(TyperGroup):
    """Lists the commands in the order in which a run meets them."""

    def format_commands(self, _context: Any, formatter: Any) -> None:
        for title in (BEFORE, DURING, AFTER, HELP):
            commands = [each for each in self.commands.values() if getattr(each, "rich_help_panel", None) == title]
            with formatter.section(title):
                formatter.write_dl([(each.name or "", each.get_short_help_str(limit=200)) for each in commands])


def remember(parameter: typer.CallbackParam, run: Path | None) -> Path | None:
    """For hints, which name it."""
    GIVEN.clear()
    if run is not None and run.is_dir() == (parameter.metavar == "RUN_DIR"):
        GIVEN[str(parameter.metavar)] = str(run)
    return run


def say(text: str) -> None:
    print(pasteable(text), file=sys.stderr, flush=True)


def words(option: str, value: object) -> list[str]:
    """An option of the ranks' command line, if it was given."""
    return [] if value is None else [option, str(value)]


def arg(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


def opt(name: str, metavar: str, help: str, **more: Any) -> Any:
    return typer.Option(*name.split(), metavar=metavar, help=help, show_default=False, **more)


def flag(name: str, help: str, **more: Any) -> Any:
    return typer.Option(*name.split(), help=help, show_default=False, **more)


Run = Annotated[Path, arg("RUN", "The run file (YAML).", callback=remember)]
RunDir = Annotated[Path, arg("RUN_DIR", "The run folder: train.output_dir.", callback=remember)]
Overrides = Annotated[list[str] | None, opt("--override", "KEY=VALUE", "Set one key of the run file; repeatable.")]
Accelerate = Annotated[Path | None, opt("--accelerate", "FILE", "Take the layout from an Accelerate FSDP YAML.")]
Json = Annotated[bool, flag("--json", "Print one JSON object instead of tables.")]
JobDir = Annotated[Path | None, opt("--out", "DIR", "Folder of the job's files. Default: the run folder.")]
Follow = Annotated[bool, flag("--follow -f", "Keep printing the log as lines arrive.")]
Ranks = Annotated[int | None, opt("--ranks", "N", "Run N workers, on this machine only.", min=1)]
Base = Annotated[str | None, opt("--base", "DIR", "Folder of the base model.")]

BaseDtypes = Annotated[
    str | None, opt("--base-dtype", "DTYPES", "Also evaluate the base, and the best adapter on it, stored so.")
]
OtherBase = Annotated[
    bool, flag("--allow-other-base", "Accept a base model whose weights are not those the adapter was trained on.")
]
Kustomize = Annotated[
    Path | None, opt("--kustomize", "DIR", "With --dry-run: write a kustomize base for Kubernetes there.")
]
