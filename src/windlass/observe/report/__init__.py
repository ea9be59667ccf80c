"""Write report.json and report.html from run folders. Reads only files: needs no torch, works from any machine.

The page is one file that fetches nothing and is readable without scripts; scripts only draw the curves.
"""

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass import __version__
from windlass.errors import UserError
from windlass.files import write_atomic
from windlass.observe.format import NONE, format_duration, format_figure, format_percent
from windlass.observe.report import charts
from windlass.observe.report.facts import Facts, collect_facts, highest_peak_gib
from windlass.observe.report.page import HIDDEN, render_template
from windlass.observe.report.read import read_run
from windlass.observe.report.trials import SweepResult, collect_trials
from windlass.observe.watch.detectors import make_hint
from windlass.run_folder import TRIALS, find_step_files, list_trials

SCHEMA: Final = 1  # increased when a key changes its meaning or goes; new keys may come at any time
MAX_MARKS: Final = 200  # alarms that are drawn on the time axis
IN_SCRIPT: Final = re.compile(f"[<>&\u2028\u2029]|{HIDDEN.pattern}")


@dataclass(frozen=True, slots=True)
class Report:
    runs: list[Facts]
    json: Path
    html: Path
    sweep: SweepResult | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the content of report.json."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        sweep = {} if self.sweep is None else {"sweep": to_strict_json(self.sweep.as_dict())}
        return {"schema": SCHEMA, "windlass": __version__, "made": now, "runs": self.runs, **sweep}


def make_report(run_dirs: Sequence[Path], out: Path | None = None) -> Report:
    """Write the report of one run or sweep to its folder, of several to `out` or the current directory."""
    begun = [path for folder in run_dirs for path in list_begun(folder)]
    runs = collect_runs(begun)
    if len(run_dirs) != 1 or not list_trials(run_dirs[0]):
        return write_report(runs, run_dirs, out)
    folder = run_dirs[0]  # of a sweep: its trials are compared, the lowest evaluation loss first
    by_path = dict(zip(begun, runs, strict=True))
    sweep = collect_trials(folder, by_path)
    paths = [folder / TRIALS / trial.name for trial in sweep.trials]
    return write_report([by_path[path] for path in paths if path in by_path], run_dirs, out or folder, sweep)


def list_begun(folder: Path) -> list[Path]:
    """Return the trials of a sweep that have begun; the folder itself if it is a run's."""
    trials = list_trials(folder)
    begun = [path for path in trials if find_step_files(path)]
    if trials and not begun:
        raise UserError("no trial of this sweep has begun", str(folder), "wait for its first step", "not-begun")
    return begun or [folder]


def collect_runs(folders: Sequence[Path]) -> list[Facts]:
    runs: list[Facts] = []
    for folder in folders:
        run = read_run(Path(folder), charts.choose_points(len(folders)))
        drawn = {"charts": charts.make_charts(run), "axes": charts.make_axes(run)}
        runs.append(to_strict_json(collect_facts(run) | drawn))
    return runs


def write_report(
    runs: list[Facts], run_dirs: Sequence[Path], out: Path | None, sweep: SweepResult | None = None
) -> Report:
    names = [run["name"] for run in runs]
    for number, entry in enumerate(runs, 1):
        if names.count(entry["name"]) > 1:
            entry["name"] += f" ({number})"
    folder = out or (Path(run_dirs[0]) if len(runs) == 1 else Path.cwd())
    if len(runs) == 1 and folder != Path(runs[0]["folder"]):
        runs[0]["data_page"] = None  # the link is relative
    report = Report(runs, folder / "report.json", folder / "report.html", sweep)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(report.json, json.dumps(report.as_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        write_atomic(report.html, render_page(runs, sweep))
    except OSError as error:
        problem = f"can't write there: {error.strerror}"
        raise UserError(problem, str(folder), "name another folder with --out", "unwritable") from None
    return report


def to_strict_json(value: Any) -> Any:
    """Convert to strict JSON: NaN and infinity become null, lone surrogates become visible."""
    if isinstance(value, dict):
        return {to_strict_json(str(key)): to_strict_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def render_page(runs: Sequence[Facts], sweep: SweepResult | None = None) -> str:
    """Render the page for one run, or for several with a comparison on top."""
    overlays = charts.make_comparison_charts(runs) if len(runs) > 1 else []
    data: dict[str, Any] = {"charts": {f"all-{chart['id']}": chart for chart in overlays}, "marks": {}, "axes": {}}
    for i, run in enumerate(runs):
        data["charts"] |= {f"r{i}-{chart['id']}": chart for chart in run["charts"]}
        data["axes"][f"r{i}-"] = run["axes"]
        # Only whole steps: the page computes with them.
        alarms = [alarm for alarm in run["alarms"] if isinstance(alarm.get("step"), int)][:MAX_MARKS]
        data["marks"][f"r{i}-"] = [{"step": alarm["step"], "kind": str(alarm.get("kind", ""))[:80]} for alarm in alarms]
    # JSON that is safe inside <script>: no tag can begin in it, and nothing hides in it.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    island = IN_SCRIPT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return render_template(
        "page.html.j2",
        scripts=("uplot.min.js", "scheme.js", "page.js"),
        styles=("uplot.min.css", "page.css"),
        runs=runs,
        trials=sweep.trial_rows(wide=True) if sweep else [],
        effects=sweep.effect_rows() if sweep else [],
        caution=sweep.caution if sweep else "",
        overlays=overlays,
        figures=charts.compare_figures(runs),
        differences=charts.compare_run_files(runs) if len(runs) > 1 else [],
        data=Markup(island),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
        phases=charts.PHASES,
        hint_for=lambda kind, folder: make_hint(kind, Path(folder)),
        peak_gib=highest_peak_gib,
        NONE=NONE,
    )


STYLES = {"good": "green", "warn": "yellow", "bad": "bold red"}


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the figures, one column per run."""
    console = console or Console(highlight=False)
    if report.sweep:
        print_sweep(report.sweep, console)
        console.print(Text(f"{report.html}\n{report.json}"), soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, show_header=len(report.runs) > 1)
    table.add_column("")
    for run in report.runs:
        verdict = run["verdict"]
        style = STYLES[verdict["level"]]
        console.print(Text(f"{run['name']}: ", style="bold") + Text(verdict["text"], style=style))
        for reason in verdict["against"]:
            console.print(Text(f"  {reason}", style=style))
        table.add_column(Text(run["name"]), justify="right")
    times = [run["step_time"] for run in report.runs]
    rows = charts.compare_figures(report.runs)
    for phase, label in charts.PHASES.items():
        if any(time["shares"].get(phase) for time in times):
            cells = [
                f"{format_duration(t['seconds'].get(phase))} {format_percent(t['shares'].get(phase)):>6}" for t in times
            ]
            rows.append((f"  {label}", cells))
    for name, values in rows:
        table.add_row(Text(name), *map(Text, values))
    console.print(table)
    for run in report.runs:
        head = f"{run['name']}: " if len(report.runs) > 1 else ""
        for row in run["planned"]:
            if row["ratio"] is not None:
                ratio = f"{row['ratio']:.2f} x the planned {format_figure(row['planned'])}"
                ratio += f" ({' to '.join(map(format_figure, row['range']))})" if row["range"] else ""
                console.print(Text(f"{head}{row['what']}: {format_figure(row['measured'])}, {ratio}"))
    console.print(Text(f"{report.html}\n{report.json}"), soft_wrap=True)


def print_sweep(sweep: SweepResult, console: Console) -> None:
    """Print the trials, the best first, and what each setting did."""
    for rows in filter(None, (sweep.trial_rows(wide=False), sweep.effect_rows())):
        table = Table(box=None, pad_edge=False)
        for name, *cells in zip(*rows, strict=True):
            longest = max(len(line) for text in cells for line in text.splitlines())
            table.add_column(
                name.replace(" loss", "\nloss"), no_wrap=name != "state" and longest <= 36, overflow="fold"
            )
        for row in rows[1:]:
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()
    if sweep.caution:
        console.print(Text(f"{sweep.caution}\n"), style="yellow")
