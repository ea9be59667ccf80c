"""Every check has failed in its tests: each place in `windlass.launch.check` that reports fail or warn was reached."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from windlass.launch.check import result
from windlass.launch.check.result import FAIL, WARN, Result

SAYING = ("failed", "warned", "refused")
Place = tuple[str, int]  # file, line


def places(modules: list[ModuleType]) -> dict[Place, str]:
    """Every call in these modules that says fail or warn, as it is written."""
    return {place: text for module in modules for place, text in places_of(Path(str(module.__file__))).items()}


def places_of(path: Path) -> dict[Place, str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {
        (str(path), call.lineno): ast.unparse(call)[:80]
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in SAYING
    }


@contextmanager
def watched() -> Iterator[set[Place | str]]:
    """What is said while this lasts: by which lines, and under which titles."""
    said: set[Place | str] = set()
    made = Result.__init__

    def making(self: Result, *args: Any, **words: Any) -> None:
        made(self, *args, **words)
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename in (__file__, result.__file__):
            frame = frame.f_back
        if self.verdict in (FAIL, WARN) and frame is not None:
            said.update({(frame.f_code.co_filename, frame.f_lineno), self.name})

    Result.__init__ = making  # type: ignore[method-assign]
    try:
        yield said
    finally:
        Result.__init__ = made  # type: ignore[method-assign]


def require_all(request: pytest.FixtureRequest, modules: list[ModuleType], said: set[Place | str]) -> None:
    """The last test of a file: nothing that these modules can say was left unsaid by the tests before."""
    here = sys.modules[request.module.__name__]
    every = {name for name in vars(here) if name.startswith("test_") and not _prove(getattr(here, name))}
    run = {getattr(item, "originalname", "") for item in request.session.items if item.fspath == request.node.fspath}
    if left := every - run:
        pytest.skip(f"only the whole file can tell; left out: {', '.join(sorted(left)[:3])}")
    silent = {place: text for place, text in places(modules).items() if place not in said}
    assert not silent, "\n".join(f"{Path(path).name}:{line}: {text}" for (path, line), text in silent.items())


def _prove(test: Any) -> bool:
    return any(mark.name == "prove" for mark in getattr(test, "pytestmark", ()))
