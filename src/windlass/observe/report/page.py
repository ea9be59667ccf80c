"""The page: one file, nothing to fetch, readable without scripts; scripts only draw the curves."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import time
from collections.abc import Sequence
from typing import Any

import yaml

from windlass import __version__
from windlass.observe.report import sections as parts
from windlass.observe.report.charts import BUDGET, POINTS, Chart
from windlass.observe.report.compare import comparison
from windlass.observe.report.data_audit import data_audit
from windlass.observe.report.facts import Facts
from windlass.observe.report.html import Html, join, script_json, tag, text

ASSETS = importlib.resources.files("windlass.observe.report") / "assets"
MARKS = 200  # alarms that are drawn on the time axis


def page(runs: Sequence[Facts], overlays: Sequence[Chart]) -> str:
    """The whole document for one run, or for several with a comparison on top."""
    data: dict[str, Any] = {"charts": {}, "marks": {}}
    body = []
    if len(runs) > 1:
        data["charts"] |= {f"all-{chart['id']}": chart for chart in overlays}
        body.append(comparison(runs, overlays))
    for i, facts in enumerate(runs):
        prefix = f"r{i}-"
        data["charts"] |= {f"{prefix}{chart['id']}": chart for chart in facts["charts"]}
        data["marks"][prefix] = marks(facts)
        body.append(one_run(facts, prefix, alone=len(runs) == 1))
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    return document(title, join(body), data)


def points(runs: int, charts: int) -> int:
    """Points of each curve, so that all of them stay within the page's size."""
    return max(100, min(POINTS, BUDGET // max(1, runs * charts * 3)))


def marks(facts: Facts) -> list[dict[str, Any]]:
    """Alarms on the time axis. Only whole steps: the page puts them into arithmetic."""
    found = [alarm for alarm in facts["alarms"] if isinstance(alarm.get("step"), int)]
    return [{"step": alarm["step"], "kind": str(alarm.get("kind", ""))[:80]} for alarm in found[:MARKS]]


def one_run(facts: Facts, prefix: str, *, alone: bool) -> Html:
    charts = facts["charts"]
    head = tag(
        "header", tag("h1" if alone else "h2", facts["name"]), tag("p", _about(facts), class_="about"), class_="run"
    )
    body = [
        _part("", parts.verdict(facts), parts.headline(facts)),
        _part("Learning", parts.plots(charts, ("loss", "grad_norm", "learning_rate"), prefix), parts.marked(facts)),
        _part("Speed", parts.plots(charts, ("rate", "mfu", "time", "slowest"), prefix), parts.phases(facts)),
        _part("Planned and measured", parts.planned(facts)),
        _part("Memory", parts.memory(facts), parts.plots(charts, ("memory",), prefix)),
        _part("GPUs", parts.plots(charts, ("utilization", "power"), prefix)),
        _part("Tokens", parts.tokens(facts)),
        _part("Experts", parts.plots(charts, ("experts",), prefix), parts.experts(facts)),
        _part("Alarms", parts.alarms(facts)),
        _part("Checkpoints", parts.saves(facts)),
        _part("Ranks", parts.ranks(facts)),
        _part("Adapter", parts.adapter(facts)),
        _part("Loading", parts.certificate(facts)),
        _part("Data", data_audit(facts["data"])),
        _part("Hardware", parts.hardware(facts)),
        _part("Run file and versions", settings(facts)),
        _part("Not in this report", missing(facts)),
    ]
    inside = join(body)
    if alone:
        return join([head, inside])
    return tag("details", tag("summary", facts["name"]), head, inside, class_="one")


def _part(title: str, *children: Html | None) -> Html | None:
    shown = [child for child in children if child]
    if not shown:
        return None
    return tag("section", tag("h2", title) if title else None, *shown)


def _about(facts: Facts) -> str:
    layout = facts["layout"] if isinstance(facts["layout"], dict) else {}
    said = [facts["script_name"], facts["folder"], layout.get("name"), _ranks(facts["headline"]["ranks"])]
    return " · ".join(str(part) for part in said if part)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def settings(facts: Facts) -> Html | None:
    """The resolved run file as the manifest has it, what the script told of itself, and the versions."""
    made = []
    if facts["run"]:
        made.append(tag("details", tag("summary", "resolved run file"), tag("pre", _yaml(facts["run"]))))
    if facts["report_meta"]:
        made.append(
            tag("details", tag("summary", "what the script tells of itself"), tag("pre", _yaml(facts["report_meta"])))
        )
    if isinstance(facts["versions"], dict) and facts["versions"]:
        pairs = [tag("span", tag("b", name), f" {version}") for name, version in facts["versions"].items()]
        made.append(tag("p", join(pairs, " · "), class_="note"))
    if facts["git"]:
        made.append(tag("p", f"git: {_yaml(facts['git']).strip()}", class_="note"))
    return join(made) if made else None


def _yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110))


def missing(facts: Facts) -> Html | None:
    """What is absent is said, never left for the reader to find out."""
    said = [*facts["absent"]]
    if isinstance(facts["unmeasured"], dict):
        said += [f"{name}: {why}" for name, why in facts["unmeasured"].items()]
    return tag("ul", *(tag("li", line) for line in said), class_="notes") if said else None


def document(title: str, body: Html, data: Any) -> str:
    style = asset("uplot.min.css") + asset("page.css")
    scripts = [asset("uplot.min.js"), asset("page.js")]
    island = script_json(data)
    # Only these two scripts may run, whatever the data says; nothing may be fetched at all.
    allowed = " ".join(f"'sha256-{digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:; base-uri 'none'"
    made = time.strftime("%Y-%m-%d %H:%M")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{text(title)} · windlass</title>",
            f"<style>{style}</style></head>",
            '<body><div class="top"><span class="word">windlass</span><span class="tools">'
            '<button type="button" id="reset" disabled>reset zoom</button>'
            '<button type="button" id="scheme">colours: auto</button></span></div>',
            f"<main>{body}</main>",
            f"<footer>windlass {text(__version__)} · {made} · drag to zoom, double-click to reset; "
            "curves are drawn with uPlot (MIT licence, Leon Sorokin)</footer>",
            f'<script type="application/json" id="data">{island}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>",
        ]
    )


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8").strip()


def digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
