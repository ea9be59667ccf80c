"""What becomes of one key of an Accelerate file: the types that the tables of keys are written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HONOURED = "honoured"
TRANSLATED = "translated"
NO_EFFECT = "no effect"
REFUSED = "refused"

AS_READ = object()  # in Fate.sets: the value that stands in the file
ANY = "*"  # in Key.fates: every value without a row of its own


@dataclass(frozen=True, slots=True)
class Fate:
    """`because` completes the sentence: honoured: …, translated to …, no effect: …, refused: …"""

    verdict: str
    because: str
    sets: tuple[tuple[str, object], ...] = ()  # fields of the demand, with their value
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} {self.because}" if self.verdict == TRANSLATED else f"{self.verdict}: {self.because}"


def honoured(because: str, **sets: object) -> Fate:
    return Fate(HONOURED, because, tuple(sets.items()))


def translated(because: str, **sets: object) -> Fate:
    return Fate(TRANSLATED, because, tuple(sets.items()))


def no_effect(because: str) -> Fate:
    return Fate(NO_EFFECT, because)


def refused(because: str, hint: str) -> Fate:
    return Fate(REFUSED, because, hint=hint)


NOT_GIVEN = no_effect("null is the same as leaving the key out")


@dataclass(frozen=True, slots=True)
class Key:
    """One key that Accelerate knows, or that is often written although it does not."""

    name: str  # fsdp_offload_params
    about: str  # what it asks for
    kind: str  # bool, int, word, text, names, section, any
    fates: Mapping[str, Fate]  # by value, in upper case: TRUE, FULL_SHARD, 2; ANY for the others
    section: str = ""  # the mapping that it stands in: fsdp_config; empty at the top
    spellings: tuple[str, ...] = field(default=())  # other names that Accelerate takes for it

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    def fate(self, value: object) -> Fate | None:
        """None: the value is none of those that the key takes."""
        if value is None:
            return NOT_GIVEN
        return self.fates.get(normal(value)) or self.fates.get(ANY)


def normal(value: object) -> str:
    """The spelling under which `Key.fates` lists a value."""
    return str(value).strip().upper()
