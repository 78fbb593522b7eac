"""`kubectl exec`: a WebSocket with numbered channels (v4 and v5.channel.k8s.io) around one process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import termios
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from simcluster.kubelet.runtime import Container, StartError, spawn

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
_CHUNK_BYTES = 32 * 1024
_DRAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class ExecRequest:
    command: tuple[str, ...]
    stdin: bool = False
    terminal: bool = False


async def serve(request: web.Request, container: Container, wanted: ExecRequest) -> web.StreamResponse:
    """Run it; the last message on the error channel says how it ended."""
    socket = web.WebSocketResponse(protocols=PROTOCOLS)
    await socket.prepare(request)
    try:
        session = await (_start_terminal if wanted.terminal else _start_plain)(container, wanted)
    except StartError as error:
        # it could not even be started, which is a kubelet error, not an exit status
        message = str(error)
        words = f"Internal error occurred: error executing command in container: {message}"
        await _send(
            socket,
            ERROR,
            json.dumps(
                {
                    "metadata": {},
                    "status": "Failure",
                    "reason": "InternalError",
                    "message": words,
                    "code": 500,
                }
            ).encode(),
        )
        await socket.close()
        return socket
    await session.attend(socket)
    return socket


class Session:
    """One process and the ends of its streams."""

    def __init__(self, process: asyncio.subprocess.Process, terminal: int | None = None) -> None:
        self._process = process
        self._terminal = terminal

    async def attend(self, socket: web.WebSocketResponse) -> None:
        """Carry bytes both ways until the process ends or the client goes away."""
        outputs = [asyncio.create_task(one, name="exec output") for one in self._outputs(socket)]
        inputs = asyncio.create_task(self._take_input(socket), name="exec input")
        ended = asyncio.create_task(self._process.wait(), name="exec process")
        try:
            await asyncio.wait({inputs, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await asyncio.wait(outputs, timeout=_DRAIN_S)
                with contextlib.suppress(ConnectionError):
                    status = ended.result()
                    if status == 0:
                        outcome = json.dumps({"metadata": {}, "status": "Success"}).encode()
                    else:
                        code = status if status > 0 else 128 - status
                        outcome = _failure(
                            f"command terminated with non-zero exit code: exit status {code}", code
                        )
                    await _send(socket, ERROR, outcome)
        finally:
            # processes started by exec end with their client
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            for task in (inputs, ended, *outputs):
                task.cancel()
            await asyncio.gather(inputs, ended, *outputs, return_exceptions=True)
            if self._terminal is not None:
                os.close(self._terminal)
            await socket.close()

    def _outputs(self, socket: web.WebSocketResponse) -> list[Any]:
        if self._terminal is not None:
            return [_copy_terminal(self._terminal, socket)]
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return [
            _copy(self._process.stdout, socket, STDOUT),
            _copy(self._process.stderr, socket, STDERR),
        ]

    async def _take_input(self, socket: web.WebSocketResponse) -> None:
        async for message in socket:
            if message.type != aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == STDIN:
                with contextlib.suppress(ConnectionError, OSError):
                    if self._terminal is not None:
                        os.write(self._terminal, data)
                    elif self._process.stdin is not None:
                        self._process.stdin.write(data)
                        await self._process.stdin.drain()
            elif channel == RESIZE and self._terminal is not None:
                terminal = self._terminal
                with contextlib.suppress(ValueError, KeyError, OSError):
                    size = json.loads(data)
                    packed = struct.pack("HHHH", size["Height"], size["Width"], 0, 0)
                    fcntl.ioctl(terminal, termios.TIOCSWINSZ, packed)
            elif channel == CLOSE and data[:1] == bytes([STDIN]) and self._process.stdin is not None:
                self._process.stdin.close()


async def _start_plain(container: Container, wanted: ExecRequest) -> Session:
    stdin = asyncio.subprocess.PIPE if wanted.stdin else asyncio.subprocess.DEVNULL
    return Session(await spawn(container.spec, wanted.command, stdin=stdin))


async def _start_terminal(container: Container, wanted: ExecRequest) -> Session:
    master, slave = pty.openpty()
    try:
        process = await spawn(container.spec, wanted.command, stdin=slave, stdout=slave, terminal=True)
    except StartError:
        os.close(master)
        raise
    finally:
        os.close(slave)
    os.set_blocking(master, False)
    return Session(process, master)


async def _copy(stream: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await stream.read(_CHUNK_BYTES):
            await _send(socket, channel, data)


async def _copy_terminal(terminal: int, socket: web.WebSocketResponse) -> None:
    """Until the last process on the terminal has ended, which the read reports as an error."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(terminal, readable.set)
    try:
        while True:
            await readable.wait()
            readable.clear()
            with contextlib.suppress(BlockingIOError):
                data = os.read(terminal, _CHUNK_BYTES)
                if not data:
                    return
                await _send(socket, STDOUT, data)
    except (OSError, ConnectionError):
        return
    finally:
        loop.remove_reader(terminal)


async def _send(socket: web.WebSocketResponse, channel: int, data: bytes) -> None:
    await socket.send_bytes(bytes([channel]) + data)


def _failure(message: str, code: int) -> bytes:
    cause = {"reason": "ExitCode", "message": str(code)}
    return json.dumps(
        {
            "metadata": {},
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": message,
            "details": {"causes": [cause]},
        }
    ).encode()
