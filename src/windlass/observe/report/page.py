"""The page: one file with nothing to fetch, readable without scripts; scripts only draw the curves."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import json
import re
import time
from collections.abc import Sequence
from typing import Any, Final

import yaml
from jinja2 import ChainableUndefined, Environment, PackageLoader, Template
from markupsafe import Markup

from windlass import __version__
from windlass.observe.report import format as formats
from windlass.observe.report.charts import PHASES, Chart, compared, comparison
from windlass.observe.report.facts import Facts, peak_gib
from windlass.observe.report.read import ask, listed
from windlass.observe.watch.detectors import BY_KIND

ASSETS: Final = importlib.resources.files("windlass.observe.report") / "assets"
MAX_MARKS: Final = 200  # alarms that are drawn on the time axis
SAMPLE_LENGTH: Final = 1200  # characters of a sample that are shown
# Control characters, and those that turn the direction of writing.
HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
IN_SCRIPT: Final = re.compile(f"[<>&\u2028\u2029]|{HIDDEN.pattern}")


def page(runs: Sequence[Facts]) -> str:
    """The document for one run, or for several with a comparison on top."""
    overlays = compared(runs) if len(runs) > 1 else []
    data: dict[str, Any] = {"charts": {f"all-{chart['id']}": chart for chart in overlays}, "marks": {}}
    for i, facts in enumerate(runs):
        data["charts"] |= {f"r{i}-{chart['id']}": chart for chart in facts["charts"]}
        # Only whole steps: the page computes with them.
        alarms = [alarm for alarm in facts["alarms"] if isinstance(alarm.get("step"), int)][:MAX_MARKS]
        marks = [{"step": alarm["step"], "kind": str(alarm.get("kind", ""))[:80]} for alarm in alarms]
        data["marks"][f"r{i}-"] = marks
    scripts = [_asset("uplot.min.js"), _asset("page.js")]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return _template().render(
        runs=runs,
        overlays=overlays,
        figures=comparison(runs),
        data=Markup(_script_json(data)),
        style=Markup(_asset("uplot.min.css") + _asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        # Only these two scripts may run, whatever the data says; nothing may be fetched at all.
        allowed=" ".join(f"'sha256-{digest}'" for digest in digests),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
        phases=PHASES,
        hints={kind: detector.hint for kind, detector in BY_KIND.items()},
        peak_gib=peak_gib,
        NONE=formats.NONE,
    )


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("windlass.observe.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=ChainableUndefined,  # files may lack anything
        finalize=_visible,
    )
    environment.filters |= {
        **{each.__name__: each for each in (formats.figure, formats.percent, formats.count, formats.size)},
        **{each.__name__: each for each in (formats.duration, formats.count_of, ask, listed)},
        "yaml": lambda value: str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)),
        "fields": lambda value: list(value.items()) if isinstance(value, dict) else [],
        "parts": _sample_parts,
        "plots": _plots,
    }
    return environment.get_template("page.html.j2")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8").strip()


def _visible(value: Any) -> Any:
    """No control characters, which hide or reorder what is read; nothing for None."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else HIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))


def _script_json(value: Any) -> str:
    """JSON that can stand inside <script>: no tag can begin in it, and nothing hides in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return IN_SCRIPT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _plots(charts: Sequence[Chart], names: str) -> list[tuple[Chart, str]]:
    """The named charts with their CSS class. In two columns; the loss, or the first of an odd number, takes both."""
    chosen = [chart for name in names.split() for chart in charts if chart["id"] == name]
    others = [chart["id"] for chart in chosen if chart["id"] != "loss"]
    wide = {"loss", *others[: len(others) % 2]}
    return [
        (chart, f"{'wide' if chart['id'] in wide else ''} {'tall' if chart['id'] == 'loss' else ''}".strip())
        for chart in chosen
    ]


def _sample_parts(sample: Any) -> list[tuple[str, bool]]:
    """A decoded row of the data set in pieces, and whether the loss is computed on each; not longer than is shown."""
    left, parts = SAMPLE_LENGTH, []
    for part in listed(ask(sample, "parts")):
        text = str(ask(part, "text") or "")[:left]
        left -= len(text)
        trained = ask(part, "trained")
        parts.append((text, bool(ask(part, "learnt") if trained is None else trained)))
    return parts if left > 0 or not parts else [*parts, (" …", False)]
