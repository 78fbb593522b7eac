"""What tests cost, by what they need: processor time for each kind, held to a budget where CI runs them.

Processor time and not time: it is the same however busy the machine is.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

BUDGETS_S = {"pure": 450.0, "process": 1300.0, "cluster": 900.0}
"""Processor seconds of a whole run, of the tests and of what they start.

pure: functions and values in one process. process: sockets, our processes, native programs, simulation.
cluster: programs of others, a real control plane, a card.
"""
FOLDERS = {
    "tests/unit": "pure",
    "tests/scenarios": "pure",
    "tests/golden": "pure",
    "tests/chaos": "pure",
    "tests/e2e": "cluster",
    "tests/gpu": "cluster",
}
"""All others are of kind process."""
HELD = "GPUSLICE_BUDGETS"
"""The variable that makes a run fail which costs more."""
_BEGAN = pytest.StashKey[float]()
_COST = "cpu_s"


def kind_of(path: str) -> str:
    """Of a test's file, relative to the repository."""
    return FOLDERS.get("/".join(Path(path).parts[:2]), "process")


def over_budget(spent_s: dict[str, float]) -> list[str]:
    """A sentence for each kind that costs more than it may."""
    return [
        f"the tests of kind {kind} took {spent:.0f} s of processor time, and may take {BUDGETS_S[kind]:.0f}"
        for kind, spent in spent_s.items()
        if spent > BUDGETS_S[kind]
    ]


class Costs:
    """A plug-in of pytest; with several workers each tells the first process by the reports of its tests."""

    def __init__(self) -> None:
        self._spent_s: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> object:
        item.stash[_BEGAN] = _processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> object:
        try:
            return (yield)
        finally:
            item.user_properties.append((_COST, _processor_s() - item.stash[_BEGAN]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            kind = kind_of(report.nodeid.partition("::")[0])
            self._spent_s[kind] += sum(
                float(str(value)) for name, value in report.user_properties if name == _COST
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if HELD in os.environ and over_budget(self._spent_s) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        parts = (f"{kind} {spent:.0f} of {BUDGETS_S[kind]:.0f}" for kind, spent in self._spent_s.items())
        terminalreporter.write_line(f"processor time in s: {', '.join(parts)}")
        for each in over_budget(self._spent_s):
            terminalreporter.write_line(each, red=True)


def _processor_s() -> float:
    """Of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
