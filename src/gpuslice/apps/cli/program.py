"""Where the programs begin: Ctrl-C ends them quietly, also while Python still imports the rest."""

from __future__ import annotations

import importlib
import os
import signal
from typing import NoReturn


def end_quietly_on_interrupt() -> None:
    """Before our code can handle an interrupt, and after it. Who was started to ignore it still does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_interrupt() -> None:
    """As Python itself has it, for code that handles an interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_standard_files() -> None:
    """Where somebody closed them: else sockets get their numbers, and what is meant for the terminal."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _begin(name: str) -> NoReturn:
    end_quietly_on_interrupt()
    open_standard_files()
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
