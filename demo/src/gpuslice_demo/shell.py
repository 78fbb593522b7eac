"""Types commands as a person would, in a shell, with a terminal if one is requested."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
from collections.abc import Mapping
from pathlib import Path

_CHUNK_BYTES = 65536
_COMMAND_LIMIT_S = 600.0  # a command that hangs, however busy the machine is


async def run(command: str, environ: Mapping[str, str], folder: Path) -> str:
    """Everything that the command printed."""
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        command,
        env=environ,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _COMMAND_LIMIT_S)
    finally:
        _kill(process)
    return output.decode(errors="replace")


async def run_in_terminal(command: str, environ: Mapping[str, str], folder: Path, typed: str = "") -> str:
    """The same in a terminal; `typed` is what the person types, line by line."""
    master, slave = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, env=environ, cwd=folder,
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(slave)
    try:
        async with asyncio.timeout(_COMMAND_LIMIT_S):
            return await _converse(master, typed)
    finally:
        _kill(process)
        await process.wait()
        os.close(master)


async def _converse(master: int, typed: str) -> str:
    """Type each line at a prompt, and collect what is shown until the terminal closes."""
    os.set_blocking(master, False)
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(master, readable.set)
    shown, lines = b"", typed.splitlines()
    try:
        while True:
            await readable.wait()
            readable.clear()
            try:
                data = os.read(master, _CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError:  # its last process has ended
                break
            if not data:
                break
            shown += data
            if lines and shown.rstrip(b"\r\n").endswith((b"# ", b"$ ")):
                os.write(master, lines.pop(0).encode() + b"\n")
    finally:
        loop.remove_reader(master)
    return shown.decode(errors="replace").replace("\r\n", "\n")


def _kill(process: asyncio.subprocess.Process) -> None:
    """Not with `process.kill`, which would reap a child that has just ended and that asyncio waits for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
