"""What one check found, and what many of them come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from windlass.errors import Problem

PASS, WARN, FAIL, UNSEEN = "pass", "warn", "fail", "not looked at"
MEETING = "nodes"  # whether all came and stayed: the one check that another try may pass
VERDICTS = (UNSEEN, PASS, WARN, FAIL)  # from the mildest to the gravest


@dataclass(frozen=True, slots=True)
class Result:
    """`seen` is what was found, in figures where there are any; `not looked at` says there why not."""

    name: str
    verdict: str
    seen: str
    hint: str = ""
    where: str = ""  # the place in the run file that asks for it
    node: str = ""  # which node, where several were checked

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def passed(name: str, seen: str) -> Result:
    return Result(name, PASS, seen)


def warned(name: str, seen: str, hint: str, where: str = "") -> Result:
    return Result(name, WARN, seen, hint, where)


def failed(name: str, seen: str, hint: str, where: str = "") -> Result:
    return Result(name, FAIL, seen, hint, where)


def unseen(name: str, why: str, hint: str = "") -> Result:
    return Result(name, UNSEEN, why, hint)


def refused(name: str, problems: Iterable[Problem]) -> list[Result]:
    """What another part of windlass refuses, as failed checks."""
    return [failed(name, problem.problem, problem.hint, problem.where) for problem in problems]


def worst(results: Iterable[Result]) -> str:
    """The gravest verdict. Checks that did not look don't make a good one: nothing seen is `not looked at`."""
    return max((result.verdict for result in results), key=VERDICTS.index, default=UNSEEN)


def on(node: str, results: Iterable[Result]) -> list[Result]:
    return [replace(result, node=node) for result in results]
