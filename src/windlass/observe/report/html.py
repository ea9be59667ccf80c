"""HTML from values. Whatever comes from outside goes through `text`, which escapes; only this module joins tags."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

WIDE = 5  # columns from which a table takes the whole width

# Control characters, and those that turn the direction of writing.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")

IN_SCRIPT = re.compile(f"[<>&\u2028\u2029]|{HIDDEN.pattern}")


class Html(str):
    """Text that is markup already. Everything else is escaped where it is put in."""

    __slots__ = ()


def text(value: Any) -> Html:
    """Escaped, and without the control characters that hide or reorder what is read."""
    if isinstance(value, Html):
        return value
    shown = HIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))
    return Html(html.escape(shown, quote=True))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """`tag("td", "a<b", class_="n")`; an attribute that is None or False is left out, True stands alone."""
    parts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{text(value)}"')
    inside = "".join(text(child) for child in children if child is not None)
    return Html(f"<{name}{''.join(parts)}>{inside}</{name}>")


def join(parts: Iterable[Any], between: str = "") -> Html:
    return Html(text(between).join(text(part) for part in parts if part is not None))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], *, left: int = 1) -> Html:
    """The first `left` columns hold names, the others numbers. Wide ones scroll inside their own box."""
    kind = [None if i < left else "n" for i in range(len(head))]
    top = tag("tr", *(tag("th", cell, class_=kind[i], scope="col") for i, cell in enumerate(head)))
    body = [tag("tr", *(tag("td", cell, class_=kind[i]) for i, cell in enumerate(row))) for row in rows]
    made = tag("table", tag("thead", top), tag("tbody", *body), class_="wide" if len(head) > WIDE else None)
    return tag("div", made, class_="scroll", tabindex="0", role="region", aria_label="table")


def script_json(value: Any) -> Html:
    """JSON that can stand inside <script>: no tag can begin in it, and nothing hides in it."""
    dumped = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    dumped = IN_SCRIPT.sub(lambda found: f"\\u{ord(found[0]):04x}", dumped)
    return Html(dumped)


def figure(value: Any, unit: str = "", digits: int = 3) -> str:
    """A number for reading: 12,345 or 1.23 or 4.2e-05; a dash for none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    size = abs(value)
    if isinstance(value, int) or size >= 1000:
        shown = f"{value:,.0f}"
    elif size >= 100:
        shown = f"{value:.0f}"
    elif size >= 0.001 or value == 0:
        shown = f"{value:.{digits}g}"
    else:
        shown = f"{value:.1e}"
    return f"{shown}\N{NO-BREAK SPACE}{unit}" if unit else shown


def percent(share: Any, digits: int = 0) -> str:
    if isinstance(share, bool) or not isinstance(share, int | float) or not math.isfinite(share):
        return "–"
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def count(value: Any) -> str:
    """Large whole numbers short: 27.5 M."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            return f"{value / (1e3 if unit == 'k' else scale):.3g}\N{NO-BREAK SPACE}{unit}"
    return f"{value:,.0f}"


def size(count_: Any) -> str:
    """Bytes for reading."""
    if isinstance(count_, bool) or not isinstance(count_, int | float) or not math.isfinite(count_):
        return "–"
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count_) >= scale:
            return f"{count_ / scale:.3g}\N{NO-BREAK SPACE}{unit}"
    return f"{count_:.0f}\N{NO-BREAK SPACE}B"


def duration(seconds: Any) -> str:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 0:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.3g}\N{NO-BREAK SPACE}ms"
    if seconds < 90:
        return f"{seconds:.3g}\N{NO-BREAK SPACE}s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f}\N{NO-BREAK SPACE}min"
    return f"{int(minutes // 60):,}\N{NO-BREAK SPACE}h {int(minutes % 60):02d}"
