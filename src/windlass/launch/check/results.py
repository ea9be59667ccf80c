"""The input of checks, the result of one, the report of all, and the table that shows it."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from windlass import __version__
from windlass.errors import FAILED, RANK_USER_INPUT, Problem, make_pasteable
from windlass.files import write_atomic, write_json
from windlass.plan.script import AnyPlan
from windlass.run_folder import is_free
from windlass.runfile import Loaded, LoadedScript

PASS = "pass"
WARN = "warn"
FAIL = "fail"
SKIPPED = "skipped"
STYLES = {SKIPPED: "dim", PASS: "green", WARN: "yellow", FAIL: "bold red"}  # from the mildest to the gravest
NODES = "nodes"  # whether all nodes joined and stayed: the only check that a retry may pass
ALONE = "alone"
HERE = "here"
IN_POD = "in-pod"
NO_PLAN = "there is no plan"


@dataclass(frozen=True, slots=True)
class Context:
    loaded: Loaded | LoadedScript
    plan: AnyPlan | None
    have: Mapping[str, str]  # installed distribution -> version
    environ: Mapping[str, str]
    root: Path  # of /sys, /proc and /dev
    alone: bool  # this machine is not one that the run will use

    @property
    def elsewhere(self) -> bool:
        """Return whether libraries and volumes are elsewhere: a run for another platform is only planned here."""
        return self.alone and self.loaded.run.cluster.platform != "local"


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    verdict: str
    seen: str  # what was found, with figures if there are any; why it was skipped
    hint: str = ""
    where: str = ""  # the place in the run file that requires it
    node: str = ""  # the node, if several were checked
    elsewhere: bool = False  # skipped because only the machines of the run can tell

    @property
    def title(self) -> str:
        return f"{self.name} on {self.node}" if self.node else self.name


def passed(name: str, seen: str) -> Result:
    return Result(name, PASS, seen)


def warned(name: str, seen: str, hint: str, where: str = "") -> Result:
    return Result(name, WARN, seen, hint, where)


def failed(name: str, seen: str, hint: str, where: str = "") -> Result:
    return Result(name, FAIL, seen, hint, where)


def skipped(name: str, why: str, hint: str = "") -> Result:
    return Result(name, SKIPPED, why, hint)


def skipped_elsewhere(name: str, what: str) -> Result:
    hint = "`windlass check RUN --in-pod` checks it where the run starts"
    return Result(name, SKIPPED, f"{what} is not on this machine", hint, elsewhere=True)


def problems_to_results(name: str, problems: Iterable[Problem]) -> list[Result]:
    return [failed(name, problem.problem, problem.hint, problem.where) for problem in problems]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All results; the same on every node if the nodes connected."""

    depth: str
    results: tuple[Result, ...]
    is_leader: bool = True  # one node prints for all
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """Return the worst result. Skipped checks don't count as passed: if nothing was checked, it is `skipped`."""
        return max((result.verdict for result in self.results), key=list(STYLES).index, default=SKIPPED)

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.verdict == FAIL]

    @property
    def exit_code(self) -> int:
        failures = {result.name for result in self.failures}
        if not failures:
            return 0
        return RANK_USER_INPUT if self.depth == IN_POD and failures != {NODES} else FAILED

    def as_dict(self) -> dict[str, Any]:
        head = {"windlass": __version__, "depth": self.depth, "verdict": self.verdict}
        return {**head, "seconds": round(self.seconds, 3), "results": list(map(asdict, self.results))}

    def write(self, folder: Path) -> Path | None:
        """Write check.json to the run folder, if it exists and no run has begun there or this is the run's own check.
        A folder that can't be written is a check's result."""
        with suppress(OSError):
            if is_free(folder) or (self.depth == IN_POD and folder.is_dir()):
                write_json(folder / "check.json", self.as_dict())
                return folder / "check.json"
        return None


def write_error(report: CheckReport, environ: Mapping[str, str]) -> None:
    """Leave the error, as ranks do, for the process next to this one that sends it to the other nodes."""
    status_dir = environ.get("WINDLASS_STATUS_DIR")
    seen = "; ".join(f"{result.title}: {result.seen}" for result in report.failures)
    if status_dir and seen:
        text = json.dumps({"problems": [{"where": "windlass check", "problem": seen}], "time": time.monotonic()})
        with suppress(OSError):
            write_atomic(Path(status_dir) / "error-check", text)


def print_report(report: CheckReport) -> None:
    """Print each check with its finding and a hint, then the verdict. Long words such as paths are not cut."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    indent = " " * 9
    wrap = TextWrapper(console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    for result in report.results:
        place = f"{result.where}: " if result.where and result.verdict in (WARN, FAIL) else ""
        text = wrap.fill(f"{result.verdict:9}{result.title}: {place}{result.seen}")
        if result.hint:
            text += f"\n{wrap.fill(f'{indent}hint: {make_pasteable(result.hint)}')}"
        line = Text(text, "dim" if result.verdict == SKIPPED else "")
        line.stylize(STYLES[result.verdict], 0, len(result.verdict))
        console.print(line)
    counts = Counter(result.verdict for result in report.results)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(STYLES) if counts[verdict])
    failing = ", ".join(dict.fromkeys(result.title for result in report.failures))
    names = f"; failing: {failing}" if failing else ""
    line = Text(wrap.fill(f"{report.verdict}: {summary}{names} ({report.seconds:.1f} s)"))
    line.stylize(STYLES[report.verdict], 0, len(report.verdict) + 1)
    console.print(line)
