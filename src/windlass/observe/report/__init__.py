"""Run folders -> report.json and report.html. Reads files alone: no torch, from any machine that sees the folder."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import UserError
from windlass.observe.report.charts import charts
from windlass.observe.report.compare import overlay
from windlass.observe.report.facts import Facts, facts
from windlass.observe.report.page import page, points
from windlass.observe.report.read import read

SCHEMA = 1  # raised when a key changes its meaning or goes; new keys may come at any time
CHARTS = 11  # curves of one run, about


@dataclass(frozen=True, slots=True)
class Report:
    runs: list[Facts]
    json: Path
    html: Path

    def as_dict(self) -> dict[str, Any]:
        """The JSON of report.json."""
        return {
            "schema": SCHEMA,
            "windlass": __version__,
            "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "runs": self.runs,
        }


def make(run_dirs: Sequence[Path], out: Path | None = None) -> Report:
    """Write the report of one run into its folder, of several into `out` or the current directory."""
    if not run_dirs:
        raise UserError("no run folder was named", "windlass report", "windlass report RUN_DIR")
    runs = [read(Path(folder)) for folder in run_dirs]
    each = points(len(runs), CHARTS)
    made: list[Facts] = [plain(facts(run) | {"charts": charts(run, each)}) for run in runs]
    _tell_apart(made)
    folder = out if out is not None else Path(run_dirs[0]) if len(made) == 1 else Path.cwd()
    report = Report(made, folder / "report.json", folder / "report.html")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(report.json, json.dumps(report.as_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        _replace(report.html, page(made, overlay(made) if len(made) > 1 else []))
    except OSError as error:
        raise UserError(f"can't write there: {error.strerror}", str(folder), "name another folder with --out") from None
    return report


def _tell_apart(runs: list[Facts]) -> None:
    """Folders of one name get their number."""
    names = [run["name"] for run in runs]
    for i, run in enumerate(runs):
        if names.count(names[i]) > 1:
            run["name"] = f"{names[i]} ({i + 1})"


def plain(value: Any) -> Any:
    """What strict JSON can hold: a number that is none becomes null, lone surrogates become visible."""
    if isinstance(value, dict):
        return {_text(str(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode("utf-8")


def _replace(path: Path, text: str) -> None:
    """All at once: a reader never sees half a page."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
