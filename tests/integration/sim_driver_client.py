"""A process that calls the simulated driver as it is told: one JSON line a call, one a reply.

Arguments are integers (any width, as the ABI passes them), `None`, strings, `{"out": n}` for a pointer to n
bytes that come back, `{"in": hex}` for one to bytes that go in and come back. So a test can call any entry
point of either library, in a process of its own that may be killed, forked or replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import pytest

from simcluster import gpu
from tests import HANG_S

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "native" / os.environ.get("NATIVE_BUILD", "build") / "sim"
"""NATIVE_BUILD=build/sanitize with LD_PRELOAD=libasan.so runs all of this under the sanitizers."""
MIB: Final = 1 << 20


def require_driver() -> Path:
    """The folder with the built driver; skips the calling test where there is none."""
    if not (BUILD / "libcuda.so.1").exists():
        pytest.skip("the simulated driver is not built: run `make native`")
    return BUILD


def run(
    program: str, *arguments: str, state: Path, visible: str | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs one of the driver's programs to its end."""
    variables = gpu.environment(state, require_driver(), visible) | env
    return subprocess.run(
        [str(BUILD / program), *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def out(count: int = 8) -> dict[str, int]:
    return {"out": count}


def given(data: bytes) -> dict[str, str]:
    return {"in": data.hex()}


class Reply:
    """What a call returned, and the bytes of its pointers in order."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.result: int = answer["result"]
        self.bytes = [bytes.fromhex(each) for each in answer["out"]]

    def number(self, place: int = 0, size: int = 8) -> int:
        return int.from_bytes(self.bytes[place][:size], "little")

    def signed(self, place: int = 0) -> int:
        return int.from_bytes(self.bytes[place][:4], "little", signed=True)

    def text(self, place: int = 0) -> str:
        return self.bytes[place].split(b"\0")[0].decode()


class DriverProcess:
    """A process that uses the driver. `call` answers any result, `cu` insists on success.

    `within` is a command that starts it, for example one that makes a namespace.
    """

    def __init__(
        self, state: Path, visible: str | None = None, *, within: Sequence[str] = (), **env: str
    ) -> None:
        variables = gpu.environment(state, require_driver(), visible) | env
        self.process = subprocess.Popen(
            [*within, sys.executable, str(Path(__file__).with_name("sim_driver_worker.py"))],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and waits until the kernel has taken everything back."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def call(self, name: str, *arguments: Any) -> Reply:
        return Reply(self.ask({"call": name, "arguments": arguments}))

    def cu(self, name: str, *arguments: Any) -> Reply:
        reply = self.call(name, *arguments)
        assert reply.result == 0, f"{name}{arguments} answered {reply.result}"
        return reply

    def in_thread(self, name: str, *arguments: Any) -> Reply:
        """The call in a new thread, in this one's context."""
        return Reply(self.ask({"in_thread": name, "arguments": arguments}))

    def start(self, device: int = 0) -> Self:
        """cuInit and the device's primary context, current."""
        self.cu("cuInit", 0)
        context = self.cu("cuDevicePrimaryCtxRetain", out(), device).number()
        self.cu("cuCtxSetCurrent", context)
        return self

    def memory(self) -> tuple[int, int]:
        """cuMemGetInfo: free and total bytes."""
        reply = self.cu("cuMemGetInfo_v2", out(), out())
        return reply.number(0), reply.number(1)

    def alloc(self, size: int) -> int:
        return self.cu("cuMemAlloc_v2", out(), size).number()

    def kernel(self, name: str = "gpusim_busy_ns") -> int:
        image = f".version 7.0\n.target sm_70\n.visible .entry {name}(.param .u64 ns) {{ ret; }}\n"
        module = self.cu("cuModuleLoadData", out(), image).number()
        return self.cu("cuModuleGetFunction", out(), module, name).number()

    def launch(
        self, function: int, duration_ns: int = 0, stream: int = 0, name: str = "cuLaunchKernel"
    ) -> Reply:
        parameter = {"pointers": [duration_ns.to_bytes(8, "little").hex()]}
        return self.cu(name, function, 1, 1, 1, 1, 1, 1, 0, stream, parameter, 0)


def pinned_on_device(device: int = 0, handle_types: int = 0) -> dict[str, str]:
    """CUmemAllocationProp of pinned device memory."""
    return given(
        (1).to_bytes(4, "little")
        + handle_types.to_bytes(4, "little")
        + (1).to_bytes(4, "little")
        + device.to_bytes(4, "little")
        + bytes(16)
    )


def pool_on_device(device: int = 0, max_bytes: int = 0, handle_types: int = 0) -> dict[str, str]:
    """CUmemPoolProps of a device's pool."""
    head = (
        (1).to_bytes(4, "little")
        + handle_types.to_bytes(4, "little")
        + (1).to_bytes(4, "little")
        + device.to_bytes(4, "little")
    )
    return given(head + bytes(8) + max_bytes.to_bytes(8, "little") + bytes(56))


def python(code: str, *, state: Path, visible: str | None = None, **env: str) -> str:
    """Runs Python code against the driver and returns what it printed."""
    variables = gpu.environment(state, require_driver(), visible) | {"PYTHONPATH": str(ROOT / "src")} | env
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
