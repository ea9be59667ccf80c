"""Every command: parse, call one function, print. Results go to stdout, everything else to stderr.

This is the only place that reads the environment. Imports are inside the commands, which keeps `--help` fast.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from windlass.cli import after, before, during  # noqa: F401  # each registers its commands
from windlass.cli.options import app as app
from windlass.errors import TRAINING, USER_INPUT, UserError, missing_extra_error, print_error

USAGE: Any = typer.BadParameter.__base__  # click's UsageError, of the click that typer has


def find_example(context: Any) -> str:
    """Return the first example in a command's help."""
    lines = (line.strip() for line in context.command.epilog.splitlines())
    return str(next(line for line in lines if line.startswith("windlass ")))


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Only a `UserError` is printed without a traceback."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    try:
        if sys.flags.optimize > 1:
            what = "Python runs without docstrings, and transformers can't be imported without them"
            raise UserError(what, "PYTHONOPTIMIZE", "unset PYTHONOPTIMIZE, and leave out python's -OO", "no-docstrings")
        sys.exit(app(args=words, standalone_mode=False) or 0)
    except USAGE as error:
        if not words:
            error.show()  # the help
        else:
            command = error.ctx.command_path if error.ctx else f"windlass {words[0]}"
            message = error.format_message().rstrip(".")
            hint = f"see `{command} -h`"
            if message.startswith("Missing"):
                hint = f"such as `{find_example(error.ctx)}`; {hint}"
            print_error(UserError(message[:1].lower() + message[1:], command, hint, "wrong-arguments"))
        sys.exit(error.exit_code)
    except UserError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING:
            raise
        print_error(missing_extra_error(error.name, next(iter(words), "")))
        sys.exit(USER_INPUT)
    except BrokenPipeError:  # `windlass plan … | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
