"""The page's part on the data, from the audit that tokenising wrote."""

from __future__ import annotations

from typing import Any

from windlass.observe.report.html import Html, count, figure, join, percent, table, tag
from windlass.observe.report.read import ask

LONGEST = 1200  # characters of a sample that are shown
SAMPLES = 6


def data_audit(audit: Any) -> Html | None:
    if not isinstance(audit, dict):
        return None
    return join([_source(audit), _splits(audit), _notes(audit), _samples(audit)])


def _source(audit: dict[str, Any]) -> Html | None:
    name, shape, way = ask(audit, "source", "name"), ask(audit, "shape", "name"), ask(audit, "batching", "configured")
    waste = ask(audit, "batching", "padding_waste")
    said = [str(part) for part in (name, shape, way) if part]
    if isinstance(waste, int | float):
        said.append(f"{percent(waste, 1)} padding")
    return tag("p", " · ".join(said)) if said else None


def _splits(audit: dict[str, Any]) -> Html | None:
    splits = audit.get("splits")
    if not isinstance(splits, dict):
        return None
    rows = [
        (
            name,
            count(ask(split, "documents")),
            count(ask(split, "tokens")),
            percent(ask(split, "supervised_fraction"), 1),
            percent(ask(split, "truncated_share"), 1),
            figure(ask(split, "dropped")),
            figure(ask(split, "duplicates")),
            figure(ask(split, "lengths", "median")),
            figure(ask(split, "lengths", "percentile_95")),
            figure(ask(split, "lengths", "most")),
        )
        for name, split in splits.items()
    ]
    head = ("split", "documents", "tokens", "learned", "cut", "dropped", "duplicates", "median", "95 %", "longest")
    return table(head, rows)


def _notes(audit: dict[str, Any]) -> Html | None:
    notes = audit.get("notes")
    return (
        tag("ul", *(tag("li", note) for note in notes), class_="notes") if isinstance(notes, list) and notes else None
    )


def _samples(audit: dict[str, Any]) -> Html | None:
    """Decoded rows; what is learned is marked."""
    samples = audit.get("samples")
    shown = [_sample(sample) for sample in (samples if isinstance(samples, list) else [])[:SAMPLES]]
    shown = [each for each in shown if each]
    if not shown:
        return None
    return tag("details", tag("summary", "Rows as the model sees them; what it learns is marked"), *shown)


def _sample(sample: Any) -> Html | None:
    parts = ask(sample, "parts")
    if not isinstance(parts, list):
        return None
    left, made = LONGEST, []
    for part in parts:
        words = str(ask(part, "text") or "")[:left]
        left -= len(words)
        made.append(tag("mark", words) if ask(part, "learnt") else words)
    where = f"{ask(sample, 'split') or ''}, document {figure(ask(sample, 'document'))}"
    title = f"{where}, {figure(ask(sample, 'tokens'))} tokens"
    return join([tag("h4", title), tag("pre", *made, "" if left > 0 else " …")])
