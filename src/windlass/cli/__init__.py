"""Every command: parse, call one function, print. Data goes to stdout, everything said about it to stderr.

before    before a GPU is reserved: init, schema, plan, explain, data, fetch, check, rehearse
during    while it runs: train, demo, submit, status, logs, stop, watch
finish    after it: report, best, export, generate
options   the app, what commands have in common, how they print
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from windlass import __version__
from windlass.cli import before, during, finish
from windlass.cli.options import TRAINING, app, print_error, without
from windlass.errors import FAILED, USER_INPUT, RunError, UserError

__all__ = ["app", "before", "during", "finish", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Only a `UserError` is printed without a traceback."""
    try:
        app(args=None if arguments is None else list(arguments))
    except UserError as error:
        print_error(error)
        sys.exit(FAILED if isinstance(error, RunError) else USER_INPUT)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING:
            raise
        print_error(without(error.name, next(iter(sys.argv[1:] if arguments is None else arguments), "")))
        sys.exit(USER_INPUT)
    except BrokenPipeError:  # `windlass plan … | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def version(asked: bool) -> None:
    if asked:
        print(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def windlass(
    _version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...
