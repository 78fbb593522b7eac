"""`gpuslice` in a process of its own that need not import it again: forked from one that has.

An import is most of what a short command costs, and hundreds of tests run one. What belongs to the start, and
what the interpreter makes of its environment, a test sees only in a process that starts from nothing.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import HANG_S

CLI = ("inspect", "top", "explain", "doctor", "migrate", "simulate", "cluster", "top_print", "doctor_answers")
MODULES = (
    *(f"apps.cli.{name}" for name in CLI),
    *(f"diagnosis.{name}" for name in ("explain.words", "doctor.checks", "simulate.words", "waste")),
    "migration.plan",
)
ORDER_BYTES = 1 << 16
MOST_FILES = 4096


def run(
    arguments: Sequence[str], environ: Mapping[str, str], function: str = "main"
) -> subprocess.CompletedProcess[str]:
    """What `function` of gpuslice.apps.cli.main comes to, as a program with these arguments and variables."""
    order = json.dumps([[function, *arguments], dict(environ), os.getcwd()]).encode()
    ended, tells = os.pipe()
    with (
        Path(os.devnull).open("rb") as nothing,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        os.fdopen(ended, "rb") as status,
    ):
        files = [nothing.fileno(), out.fileno(), err.fileno(), tells]
        socket.send_fds(_server(os.getpid()), [order], files)
        os.close(tells)
        assert select.select([status], [], [], HANG_S)[0], f"{arguments} has not ended"
        code = int(status.read())
        out.seek(0)
        err.seek(0)
        printed, told = out.read().decode(), err.read().decode()
    return subprocess.CompletedProcess(list(arguments), code, printed, told)


@functools.cache
def _server(pid: int) -> socket.socket:
    """Where this process sends its orders; with it ends the server, and all that still run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_start", str(theirs.fileno())],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # who forks must have no other threads
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        if os.getpid() == pid:
            server.wait()

    atexit.register(end)
    return ours


def serve(orders: socket.socket) -> None:
    """Fork for each order; returns in the child, to become the program."""
    for name in MODULES:
        importlib.import_module(f"gpuslice.{name}")
    gc.freeze()  # what is collected nowhere is copied nowhere
    running: dict[int, tuple[int, int]] = {}  # pid and where to tell its end, by pidfd
    while True:
        for ready in select.select([orders.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, tells = running.pop(ready)
                os.write(tells, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(tells)
                os.close(ready)
                continue
            order, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, 4)
            if not order:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            pid = os.fork()
            if pid == 0:
                arguments, environ, folder = json.loads(order)
                become(arguments, environ, folder, files)
                return
            running[os.pidfd_open(pid)] = pid, files.pop()
            for file in files:
                os.close(file)


def become(arguments: list[str], environ: dict[str, str], folder: str, files: list[int]) -> None:
    """Surroundings as those of a program that was started with them."""
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    os.closerange(3, MOST_FILES)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = arguments


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    from gpuslice.apps.cli import main

    getattr(main, sys.argv[0])()
