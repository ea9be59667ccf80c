"""Prints the fault matrix at the end of a test run: which planted faults were reported, and which were not."""

import gc
import os
from collections.abc import Iterator

import pytest
import times
import warm
from near import LONGEST

from windlass.errors import GIVEN

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, and a fork inherits no OpenMP threads


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="print seconds by file and fixture: see tests/times.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("times"):
        config.pluginmanager.register(times.Times())
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[warm.SHARED] = warm.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before they are chosen by their marks, and shuffled
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        item.user_properties += [("fault", mark.args) for mark in item.iter_markers("fault")]
        item.user_properties += [("takes", mark.args[0]) for mark in item.iter_markers("takes")]
    yield
    # No worker is left alone with a file that takes long.
    order = {name: place for place, name in enumerate(LONGEST)} if hasattr(config, "workerinput") else {}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # libraries, and a thousand tests: not looked through again while tests run


@pytest.fixture(autouse=True)
def no_run_given() -> None:
    """A command that ran in this process gave it a run, which hints would name."""
    GIVEN.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[tuple[str, str, str], set[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            for name, row in getattr(report, "user_properties", ()):  # a file that can't be collected has none
                if name == "fault" and (report.when == "call" or outcome != "passed"):
                    rows.setdefault(tuple(row), set()).add(outcome)
    if rows:
        terminalreporter.section(f"{len(rows)} planted faults")
    for (what, by, says), outcomes in rows.items():
        verdict = "named" if outcomes == {"passed"} else ", ".join(sorted(outcomes - {"passed"}))
        terminalreporter.write_line(f"{verdict:8} {what:50} {by[:30]:30} {says}")
    warn_of_slow_tests(terminalreporter)


def warn_of_slow_tests(terminalreporter: pytest.TerminalReporter) -> None:
    """List tests of `make test` that take more than 2 seconds of a quiet machine and don't say why."""
    most = 2 * max(times.measure_slowness(), 1.0)
    listed = {
        report.nodeid: report.duration
        for report in terminalreporter.getreports("passed")
        if report.when == "call" and report.duration > most
        if not {"long", "prove"} & report.keywords.keys() and "takes" not in dict(report.user_properties)
    }
    if listed:
        terminalreporter.section(f"{len(listed)} tests above {most:.1f} s without pytest.mark.takes(why)")
    for name, seconds in sorted(listed.items(), key=lambda each: -each[1]):
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
