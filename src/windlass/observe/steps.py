"""The format of the step files' lines: fields (steps.toml) and phases."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

KEPT: Final = "eval_keep/"  # before what an evaluation says of a kept set: NAME/loss, NAME/worse and NAME/kl
IGNORED: Final = -100  # label of a token on which no loss is computed
TOKENS: Final = "tokens"  # the counted unit of a language model's steps
RATE: Final = "_per_second"  # the suffix of its rate

# The phases of an optimizer step's wall time. They add up to step_seconds.
PHASES: Final = ("data", "forward", "backward", "optimizer", "communication", "other")

# name -> unit and meaning
FIELDS: Final[dict[str, list[str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def unit_fields(unit: str) -> tuple[str, str]:
    """Return the fields that replace those for tokens if a loop counts another unit: images, images_per_second."""
    return unit, f"{unit}{RATE}"


def derived_fields(unit: str) -> dict[str, tuple[str, ...]]:
    """Return the fields that the step files omit, and the fields they are computed from."""
    return {
        "step_seconds": ("+", *(f"{phase}_seconds" for phase in PHASES)),
        "masked_tokens": ("-", TOKENS, "supervised_tokens"),
        f"{unit}{RATE}": ("/", unit, "step_seconds"),
    }


def read_unit(names: Iterable[str]) -> str:
    """Return the unit that a line with these fields counts."""
    fields = set(names)
    units = {name.removesuffix(RATE) for name in fields if name.endswith(RATE)}
    return next(iter(units & fields), TOKENS)


def format_clock(seconds: float) -> str:
    """Format a duration for display next to a step."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
