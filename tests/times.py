"""`make test-times`: where the seconds of the tests go, by file and by fixture, and the speed of the machine.

With several workers the seconds are those of all of them. CPU seconds hardly depend on what else the machine does;
without workers they have those of warm processes too.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

SHOWN = 25
SIZE = 512  # of the square matrices whose product says how fast a core of the machine is


class Times:
    """Measures in the processes that run tests, and tells the one that prints by properties of the tests."""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        self.cpu = measure_cpu()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.item = item
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            if self.item is not None:
                spent = f"{fixturedef.baseid} {fixturedef.argname}", time.perf_counter() - began
                self.item.user_properties.append(("fixture", spent))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        before, self.cpu = self.cpu, measure_cpu()
        item.user_properties.append(("cpu", self.cpu - before))
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        # Of a file: seconds, seconds of CPU, and tests. Of a fixture: seconds.
        files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        fixtures: dict[str, float] = defaultdict(float)
        groups = ("passed", "failed", "error", "skipped", "")
        every = [report for group in groups for report in terminalreporter.stats.get(group, [])]
        for report in (report for report in every if isinstance(report, pytest.TestReport)):
            file = files[Path(report.nodeid.partition("::")[0]).stem]
            file[0] += report.duration
            if report.when != "teardown":
                continue
            file[2] += 1
            properties: Any = report.user_properties
            for key, value in properties:
                if key == "cpu":
                    file[1] += float(value)
                elif key == "fixture":
                    fixtures[value[0]] += value[1]
        show = terminalreporter.write_line
        terminalreporter.section("seconds by file")
        files["all"] = [sum(column) for column in zip(*files.values(), strict=True)]
        for name, (spent, cpu, tests) in sorted(files.items(), key=lambda each: -each[1][0])[:SHOWN]:
            show(f"{name:32} {tests:5.0f} tests {spent:7.0f} s, {cpu:7.1f} of CPU")
        terminalreporter.section("seconds by fixture")
        for name, spent in sorted(fixtures.items(), key=lambda each: -each[1])[:SHOWN]:
            show(f"{name:60} {spent:7.1f} s")
        show(f"\na core multiplies {SIZE} x {SIZE} matrices in float32 at {measure_core():.0f} GFLOP/s")


def measure_cpu() -> float:
    """Return CPU seconds of this process, of those that it has waited for, and of a warm interpreter's."""
    here = psutil.Process()
    with suppress(psutil.NoSuchProcess):
        return sum(sum(each.cpu_times()[:4]) for each in (here, *here.children()))
    return 0.0


def measure_slowness() -> float:
    """Return how much longer a loop takes here than on the quiet machine whose times the README gives."""
    began = time.perf_counter()
    for _ in range(1_000_000):
        pass
    return (time.perf_counter() - began) / 0.03


def measure_core() -> float:
    matrix, count = torch.randn(SIZE, SIZE), 20
    matrix @ matrix
    began = time.perf_counter()
    for _ in range(count):
        matrix @ matrix
    return count * 2 * SIZE**3 / (time.perf_counter() - began) / 1e9
