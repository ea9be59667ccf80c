"""Format numbers for display, with a dash for anything unknown."""

from collections.abc import Mapping
from typing import Any, Final

from windlass.observe.reader import NAN, as_number, read_kept

NONE: Final = "–"
SERVED: Final = 0.95  # share of an adapter that a server in bfloat16 computes, below which the user is warned
SPACE: Final = "\N{NO-BREAK SPACE}"


def _is_number(value: Any) -> bool:
    return as_number(value) == as_number(value)


def format_figure(value: Any, unit: str = "", digits: int = 3) -> str:
    """Format as 12,345 or 1.23 or 4.2e-05."""
    if not _is_number(value):
        return NONE
    size = abs(value)
    if isinstance(value, int) or size >= 100:
        shown = f"{value:,.0f}"
    elif size >= 0.0001 or value == 0:
        shown = f"{value:.{digits}g}"
    else:
        shown = f"{value:.1e}"
    return f"{shown}{SPACE}{unit}" if unit else shown


def describe_kept(evaluation: Mapping[str, Any]) -> str:
    """Say which kept set got worse most in an evaluation, and how far its predictions are from the base's."""
    worse = read_kept(evaluation, "worse")
    if not worse:
        return ""
    name = max(worse, key=lambda name: worse[name])
    return f"kept {name} {worse[name]:+.4f}, KL {read_kept(evaluation, 'kl').get(name, NAN):.4f}"


def describe_gain(gain: Any) -> str:
    """Say how far a loss is below that of the base without its adapter."""
    if not _is_number(gain):
        return ""
    return f"{abs(gain):.4f} {'below' if gain >= 0 else 'above'} the base" if round(gain, 4) else "as the base"


def describe_served(share: float, error: float = 0.0) -> str:
    """Return a warning if a server in bfloat16 loses a part of an adapter; empty if not, or if that can't be told.
    error: the share's standard error."""
    if not share + 2 * error < SERVED:
        return ""
    return (
        f"bfloat16 keeps {100 * max(0.0, share):.0f} % of this adapter's effect when it is served unmerged: "
        "serve it merged, or in float32"
    )


def format_percent(share: Any, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}{SPACE}%" if _is_number(share) else NONE


def format_count(value: Any) -> str:
    """Shorten millions and more: 27.5 M."""
    if not _is_number(value):
        return NONE
    for scale, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{SPACE}{name}"
    return f"{value:,.0f}"


def format_duration(seconds: Any) -> str:
    if not _is_number(seconds) or seconds < 0:
        return NONE
    if seconds < 1:
        return f"{1000 * seconds:.3g}{SPACE}ms"
    if seconds < 90:
        return f"{seconds:.3g}{SPACE}s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f}{SPACE}min"
    return f"{int(minutes // 60):,}{SPACE}h {int(minutes % 60):02d}"


def shorten(text: str, most: int) -> str:
    """Shorten to `most` characters: a path to its end, other text to its beginning."""
    if len(text) <= most:
        return text
    return f"…{text[1 - most :]}" if "/" in text else f"{text[: most - 1]}…"


def format_plural(how_many: int, noun: str) -> str:
    return f"{how_many:,} {noun}{'' if how_many == 1 else 's'}"


def format_are(how_many: int, noun: str) -> str:
    return f"{format_plural(how_many, noun)} {'is' if how_many == 1 else 'are'}"
