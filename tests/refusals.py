"""Errors by code and place, because their words may change. One test of each command compares a whole message."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from windlass.errors import Problem, UserError


@contextmanager
def refused(code: str, where: str = "", error: type[UserError] = UserError) -> Iterator[list[Problem]]:
    """Expect an error with a problem of this code, at a place that ends so; all of them are in the list afterwards."""
    problems: list[Problem] = []
    with pytest.raises(error) as caught:
        yield problems
    problems += caught.value.problems
    assert [problem for problem in problems if problem.code == code and problem.where.endswith(where)], problems
