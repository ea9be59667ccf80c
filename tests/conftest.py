"""Prints the fault matrix at the end of a test run: which planted faults were reported, and which were not."""

from __future__ import annotations

import os
from typing import Final

import pytest
import warm

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, and a fork inherits no OpenMP threads

# Marked `long`: what begins so. Each has a shorter relative among the other tests, or is about a part of its own.
LONG: Final = (
    *("test_checkpoint_kills.py", "test_cost_against_torch.py", "test_families.py", "test_launch_rendezvous.py"),
    *("test_launch_script.py", "test_one_gpu.py", "test_samples.py"),
    *("test_report_page.py", "test_retinanet.py", "test_script_run.py", "test_watch_run.py"),
    "test_data.py::test_no_deadlock_in_forked_workers",
    "test_fetch.py::test_headers_alone_are_enough_for_the_plan",
    "test_importing.py::test_a_value_of_another_kind_is_refused_or_taken",
    "test_launch_hosts.py::test_nodes_that_never_meet",
    "test_quantized.py::test_kernel_equals_torch_bit_for_bit",
    "test_rehearse.py::test_every_data_format_is_rehearsed",
    "test_train_loop.py::test_without_a_compiler",
    "test_train.py::test_full_disk_does_not_stop_training",
)


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[warm.SHARED] = warm.start()


@pytest.hookimpl(tryfirst=True)  # before they are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(LONG):
            item.add_marker(pytest.mark.long)
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
