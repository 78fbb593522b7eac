"""The entry points of the programs: Ctrl-C ends them quietly, even while Python still imports the rest."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from typing import NoReturn

GARBAGE = 20_000
"""Objects between two collections: what a program imports stays, and is not looked at after each 700."""


def end_quietly_on_interrupt() -> None:
    """For the time before our code can handle an interrupt, and after it. An inherited "ignore" stays."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_interrupt() -> None:
    """Python's default, for code that handles an interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_standard_files() -> None:
    """Reopen standard files that are closed: otherwise sockets get their numbers, and receive what is
    printed. Python has no stream for a file that was closed when it started.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _begin(name: str) -> NoReturn:
    end_quietly_on_interrupt()
    open_standard_files()
    gc.set_threshold(GARBAGE)
    importlib.import_module("gpuslice.apps.cli.main").__dict__[name]()
    raise SystemExit(0)


def main() -> NoReturn:
    """The program ``gpuslice``."""
    _begin("main")


def main_by_name() -> NoReturn:
    _begin("main_by_name")


def inspect_main() -> NoReturn:
    """The programs ``kubectl-inspect-cgpu`` and ``kubectl-inspect-gpushare``."""
    _begin("inspect_main")


def complete_main() -> NoReturn:
    """The program ``kubectl_complete-inspect-cgpu``."""
    _begin("complete_main")
