"""What all tests share."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import settings

from tests.costs import Costs
from tests.speedups import ABOUT_SPEEDUPS, VARIABLE, with_speedups

# What stands between a change and its landing depends neither on luck nor on what else the machine does.
# New examples are looked for by `GPUSLICE_SEARCH=1 make test` and by `make chaos`, which may take their time.
settings.register_profile("same", deadline=None, derandomize=True, database=None, max_examples=50)
settings.register_profile("search", deadline=None, max_examples=400)
settings.load_profile("search" if os.environ.get("GPUSLICE_SEARCH") else "same")

# What a shell runs in the background ignores Ctrl-C, and so would all that a test starts and stops by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "test_sim_driver_gpu_cases",
    "test_share_control",
    "test_isolation_share",
    "test_exporter_dropin",
    "test_demo",
    "test_interleavings",
    "test_isolation_run",
    "test_exporter_load",
    "test_console_browser",
    "test_sequences",
    "test_isolation_entry",
    "test_console_prometheus",
    "test_extender_hostile",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-speedups", action="store_true", help="see tests/speedups.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("without_speedups"):
        os.environ[VARIABLE] = "1"
    config.pluginmanager.register(Costs())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: at the end no worker is alone with one, and the others idle."""
    if not with_speedups():
        items[:] = [item for item in items if item.path.stem not in ABOUT_SPEEDUPS]
    last = len(LONGEST)
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else last)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """What was skipped, a line for each reason."""
    reasons = Counter(str(each.longrepr[2]) for each in terminalreporter.getreports("skipped"))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def luck() -> None:
    """What a test draws by `random`, such as when a lease is tried again, is the same in each run."""
    random.seed(0)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: a unix socket's path may have 107 bytes, pytest's own folders leave few."""
    with tempfile.TemporaryDirectory(prefix="gs-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
