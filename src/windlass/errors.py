"""Errors that are printed without a traceback, with place and hint; exit codes; libraries that are not installed."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

# Exit codes of every command and rank; 0 is success.
FAILED = 1  # a check or run failed
USER_INPUT = 2  # the input is wrong
RANK_USER_INPUT = 13  # the same from a rank or node, which schedulers are configured not to retry
SAVED = 75  # EX_TEMPFAIL: stopped by a signal, and everything is saved; start again with --resume


class SlowerWarning(UserWarning):
    """Something is computed right, and in another way that takes longer. A run prints these, and no others."""


Where = Callable[[str], str]  # a key of the run file -> its place: run.yaml:12: lora.r
DEFAULT = "default: "  # begins the place of a key that is not written

LOST_RANK = "lost-rank"  # code of a problem that another rank's end caused

# What the `train` extra installs.
TRAINING = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "numpy", "huggingface_hub")


def is_written(where: Where, key: str) -> bool:
    """Return whether the run file, another file that it names or an option has this key."""
    return not where(key).startswith(DEFAULT)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `where` is a place that the user can open: `run.yaml:12: lora.r`.

    `code` is a name that stays when the words change: `unknown-key`. Tests and readers of `--json` compare it.
    """

    problem: str
    where: str = ""
    hint: str = ""
    code: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{head}\n\nhint: {self.hint}" if self.hint else head

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


GIVEN: dict[str, str] = {}  # what this command was given as RUN or RUN_DIR


def make_pasteable(hint: str, **known: str) -> str:
    """A hint with the run file or folder that this command was given, so that it works as it is printed."""
    names = {**known, **GIVEN}
    return re.sub(
        r"(?<=`)(windlass [a-z-]+ )(RUN_DIR|RUN)\b", lambda m: m[1] + shlex.quote(names.get(m[2], m[2])), hint
    )


class UserError(Exception):
    """The only exception that is printed without a traceback. It may contain several problems."""

    exit_code = USER_INPUT

    def __init__(self, problem: str, where: str = "", hint: str = "", code: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(problem, where, hint, code),)
        super().__init__(str(self))

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Self:
        """One error with all problems, in order."""
        error = cls("")
        error.problems = tuple(problems)
        error.args = (str(error),)
        return error

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.problems))


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise all problems as one error, if there are any."""
    if problems:
        raise UserError.of(problems)


class RunError(UserError):
    """A run that stopped itself although its input was right. Exits with 1, a `UserError` with 2."""

    exit_code = FAILED


@contextmanager
def require_writable(path: Path, hint: str) -> Iterator[None]:
    """Refuse a file that can't be written, with what the system says."""
    try:
        yield
    except OSError as error:
        raise UserError(f"can't be written: {error.strerror}", str(path), hint, "unwritable") from None


def print_error(error: UserError) -> None:
    """All problems of an error, on stderr."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for number, problem in enumerate(error.problems):
        where = Text(f"{problem.where}: " if problem.where else "", style="bold")
        console.print(Text("\n" if number else "") + Text("error: ", style="bold red") + where + Text(problem.problem))
        if problem.hint:
            console.print(Text("\nhint: ", style="cyan") + Text(make_pasteable(problem.hint)))


def find_install_command() -> str:
    """Return how to install the `train` extra from where pip had windlass from: it is on no index."""
    from importlib.metadata import PackageNotFoundError, distribution

    source = Path(__file__).parents[2].as_uri()
    with suppress(PackageNotFoundError):
        source = json.loads(distribution("windlass").read_text("direct_url.json") or "{}").get("url", source)
    return f"pip install 'windlass[train] @ {source}'"


def missing_extra_error(names: str | None, command: str) -> UserError:
    """windlass is installed without its `train` extra, as on a login node."""
    verb = "are" if "," in str(names) else "is"
    return UserError(f"{names} {verb} not installed", f"windlass {command}", find_install_command(), "not-installed")
