"""A page of sampled rows, with what is trained on marked: one file that fetches nothing, in the report's look."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.data.show import FIGURES, explain_held_out
from windlass.errors import require_writable
from windlass.files import write_atomic
from windlass.observe.report.page import render_template

SAMPLED_ROWS = 12  # of every set


def write_rows_page(path: Path, audit: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the audit's figures and notes, and the rows."""
    figures = [
        (name, [format(split[key], spec) if key in split else "" for split in audit["splits"].values()])
        for key, (name, spec) in FIGURES.items()
        if any(split.get(key) for split in audit["splits"].values())
    ]
    page = render_template(
        "rows.html.j2",
        scripts=("scheme.js",),
        styles=("page.css", "rows.css"),
        audit=audit,
        train=audit["splits"]["train"],
        figures=figures,
        held_out=explain_held_out(audit),
        rows=rows,
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    with require_writable(path, "name another file with --html"):
        write_atomic(path, page)
