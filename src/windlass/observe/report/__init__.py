"""Run folders -> report.json and report.html. Reads files alone: no torch, from any machine that sees the folder."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from windlass import __version__
from windlass.errors import UserError
from windlass.files import write_atomic
from windlass.observe.report.charts import charts, points
from windlass.observe.report.facts import Facts, facts
from windlass.observe.report.read import read

SCHEMA: Final = 1  # raised when a key changes its meaning or goes; new keys may come at any time


@dataclass(frozen=True, slots=True)
class Report:
    runs: list[Facts]
    json: Path
    html: Path

    def as_dict(self) -> dict[str, Any]:
        """What report.json holds."""
        made = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return {"schema": SCHEMA, "windlass": __version__, "made": made, "runs": self.runs}


def make(run_dirs: Sequence[Path], out: Path | None = None) -> Report:
    """Write the report of one run into its folder, of several into `out` or the current directory."""
    from windlass.observe.report.page import page  # its template engine is of no use to the terminal

    if not run_dirs:
        raise UserError("no run folder was named", "windlass report", "windlass report RUN_DIR")
    made: list[Facts] = []
    for folder in run_dirs:
        run = read(Path(folder), points(len(run_dirs)))
        made.append(plain(facts(run) | {"charts": charts(run)}))
    names = [run["name"] for run in made]
    for number, entry in enumerate(made, 1):
        if names.count(entry["name"]) > 1:
            entry["name"] += f" ({number})"
    folder = out if out is not None else Path(run_dirs[0]) if len(made) == 1 else Path.cwd()
    report = Report(made, folder / "report.json", folder / "report.html")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(report.json, json.dumps(report.as_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        write_atomic(report.html, page(made))
    except OSError as error:
        raise UserError(f"can't write there: {error.strerror}", str(folder), "name another folder with --out") from None
    return report


def plain(value: Any) -> Any:
    """What strict JSON can hold: NaN and infinity become null, lone surrogates become visible."""
    if isinstance(value, dict):
        return {plain(str(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
