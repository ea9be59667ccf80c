"""Chat templates by name: windlass's own, the tokenizer's, those in files."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.runfile.rows import is_template

TEMPLATES = Path(__file__).parent / "templates"
CONTROL = re.compile(r"<\|[a-z_]+\|>|\[/?[A-Z_]+\]")  # how templates write control tokens


def require_tokens(name: str, tokenizer: Any, place: str) -> None:
    """Refuse a fallback whose control tokens would be spelt out: the model knows none of them."""
    vocabulary = tokenizer.get_vocab()
    absent = {other: {*CONTROL.findall(read_template(other))} - {*vocabulary} for other in (name, "chatml", "llama3")}
    if absent[name]:
        fitting = next((other for other, tokens in absent.items() if not tokens), "alpaca")
        problem = (
            f"the tokenizer has no chat template, and no {', '.join(sorted(absent[name]))} for {name.capitalize()}'s"
        )
        hint = f"set data.chat_template: {fitting}, or the template that the model was trained with"
        raise UserError(problem, place, hint, "no-chat-template")


def read_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def find_template(asked: str, own: Any, place: str) -> tuple[str, str]:
    """Find a template by name, in the tokenizer or here; or take the template itself, or a file."""
    names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    if isinstance(own, dict) and asked in own:
        return own[asked], f"the tokenizer's chat template {asked!r}"
    if asked in names:
        return read_template(asked), f"the chat template {asked!r}"
    if is_template(asked):
        return asked, "data.chat_template"
    try:
        text = Path(asked).expanduser().read_text(encoding="utf-8")
        return (json.loads(text)["chat_template"] if asked.endswith(".json") else text), asked
    except OSError as error:
        close = difflib.get_close_matches(asked, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"write one of {', '.join(names)}, a file, or the template"
        raise UserError(f"no chat template {asked!r}: {error.strerror}", place, hint, "no-such-template") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{asked} is not a chat template: {error}", place, "name a .jinja file", "not-a-template"
        ) from None
