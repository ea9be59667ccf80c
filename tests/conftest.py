"""The fault matrix at the end of a run of the tests: which planted faults were named, and which were not."""

from __future__ import annotations

import os

import pytest
import warm


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[warm.SHARED] = warm.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties += [("fault", mark.args) for mark in item.iter_markers("fault")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[tuple[str, str, str], set[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            for name, row in report.user_properties:
                if name == "fault" and (report.when == "call" or outcome != "passed"):
                    rows.setdefault(tuple(row), set()).add(outcome)
    if rows:
        terminalreporter.section(f"{len(rows)} planted faults")
    for (what, by, says), outcomes in rows.items():
        verdict = "named" if outcomes == {"passed"} else ", ".join(sorted(outcomes - {"passed"}))
        terminalreporter.write_line(f"{verdict:8} {what:50} {by[:30]:30} {says}")
