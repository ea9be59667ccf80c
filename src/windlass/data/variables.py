"""What a chat template reads: the variables of its Jinja."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError, Where

if TYPE_CHECKING:
    from jinja2 import nodes

GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def parse_template(template: str) -> nodes.Template:
    from jinja2 import Environment

    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))


def read_variables(template: str) -> list[str]:
    """Return the variables that the template reads and doesn't set itself."""
    from jinja2 import meta

    return sorted(meta.find_undeclared_variables(parse_template(template)))


def require_variables(template: str, kwargs: Mapping[str, Any], where: Where) -> None:
    """Refuse variables that the template doesn't read: they would silently have no effect."""
    from jinja2 import TemplateError

    try:
        known = read_variables(template)
    except TemplateError as error:
        hint = "fix its Jinja, or name another data.chat_template"
        raise UserError(f"not a chat template: {error}", where("data.chat_template"), hint, "template-syntax") from None
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"remove it; the template uses {', '.join(known)}"
            raise UserError(
                f"the chat template doesn't use a variable {name!r}",
                where("data.template_kwargs"),
                hint,
                "unused-variable",
            )
