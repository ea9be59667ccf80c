"""Pages that fetch nothing: a template, the look that they share, and only the scripts that they name."""

import base64
import functools
import hashlib
import importlib.resources
import re
from collections.abc import Sequence
from typing import Any, Final

import yaml
from markupsafe import Markup

from windlass.observe.format import format_count, format_duration, format_figure, format_percent, format_plural
from windlass.observe.reader import as_list, get_path

ASSETS: Final = importlib.resources.files("windlass.observe.report") / "assets"
# Control characters, and those that change the direction of writing.
HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
FILTERS: Final[dict[str, Any]] = {
    "figure": format_figure,
    "percent": format_percent,
    "count": format_count,
    "duration": format_duration,
    "plural": format_plural,
    "get_path": get_path,
    "as_list": as_list,
    "fields": lambda value: list(value.items()) if isinstance(value, dict) else [],
    "yaml": lambda value: str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)),
}


def _visible(value: Any) -> Any:
    """Replace control characters, which hide or reorder text; None becomes empty."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else HIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))


@functools.cache
def _environment() -> Any:
    # Only here: `plan` imports this package for its formats, and writes no page.
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("windlass.observe.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=ChainableUndefined,  # any value may be missing
        finalize=_visible,
    )
    environment.filters |= FILTERS
    return environment


def render_template(template: str, *, scripts: Sequence[str], styles: Sequence[str], **values: Any) -> str:
    """Render a page with these of our scripts and styles.

    Only these scripts may run, whatever the values hold; nothing may be fetched at all.
    """
    texts = [_read_asset(name) for name in scripts]
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    style = Markup("".join(map(_read_asset, styles)))
    page = _environment().get_template(template)
    return str(page.render(values, style=style, scripts=list(map(Markup, texts)), allowed=allowed))


def _read_asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8").strip()
