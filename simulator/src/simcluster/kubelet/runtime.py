"""The container runtime: containers are local processes, each the leader of its own session.

Like containerd, it is separate from the kubelet: containers continue when the kubelet stops, and a new
kubelet finds them here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from simcluster.kubelet.logs import LogWriter
from simcluster.kubelet.rootfs import Rootfs

NOT_FOUND_EXIT = 127
NOT_EXECUTABLE_EXIT = 126
_PR_SET_PDEATHSIG = 1
_FAILED = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: "
    "runc create failed: "
)
KILL_AGAIN_S = 1.0  # what is stuck ends once it is not any more
_DRAIN_ROUNDS, _DRAIN_ROUND_S = 10, 0.05  # how long to wait for the output of a dead container's orphans


class StartError(Exception):
    """The container could not be started: its program is missing or not executable."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Hook:
    """A createRuntime hook of the OCI: a program of the host. Its first argument is its name."""

    path: str
    args: tuple[str, ...] = ()
    timeout_s: float = 0


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What to run. `environ` is complete: nothing of our own environment is added except the root's paths."""

    pod_uid: str
    name: str
    attempt: int
    image: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    rootfs: Rootfs
    log: Path
    working_dir: str = ""
    driver: Path | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[Hook, ...] = ()


@dataclass(slots=True, eq=False)
class Container:
    """One started container; `exit_code` is None while it runs.

    `stuck`: its processes wait for a device in the kernel (state D), and no signal reaches them.
    """

    spec: ContainerSpec
    id: str
    started_at: datetime
    process: asyncio.subprocess.Process
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    finished_at: datetime | None = None
    exit_code: int | None = None
    stuck: bool = False

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def signal(self, number: int) -> None:
        """To every process of the container."""
        if self.stuck:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class Runtime:
    """All containers of one node, the latest attempt of each container by (pod uid, name)."""

    def __init__(self) -> None:
        self._containers: dict[tuple[str, str], Container] = {}
        self._waits: set[asyncio.Task[None]] = set()
        self.on_created: Callable[[], None] = lambda: None  # its cgroup is there, its program is not started

    def find(self, pod_uid: str, name: str) -> Container | None:
        return self._containers.get((pod_uid, name))

    def of_pod(self, pod_uid: str) -> list[Container]:
        return [one for (uid, _), one in self._containers.items() if uid == pod_uid]

    def running(self) -> list[Container]:
        return [one for one in self._containers.values() if one.running]

    async def start(self, spec: ContainerSpec) -> Container:
        """Start it; its output goes to `spec.log`. Raises StartError."""
        log = LogWriter(spec.log)
        opens, gate = os.pipe() if spec.hooks else (None, None)
        try:
            process = await spawn(spec, spec.argv, stdout=asyncio.subprocess.PIPE, gate=opens)
        except BaseException:  # also if a kubelet is killed in the meantime
            log.close()
            raise
        finally:
            if opens is not None:
                os.close(opens)
        container = Container(spec, uuid.uuid4().hex * 2, datetime.now(UTC), process)
        self._containers[spec.pod_uid, spec.name] = container
        task = asyncio.create_task(self._wait(container, log), name=f"container {spec.name}")
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)
        if gate is not None:
            self.on_created()
            try:
                for number, hook in enumerate(spec.hooks):
                    await _run_hook(hook, number, container)
                with contextlib.suppress(BrokenPipeError):  # it was killed meanwhile
                    os.write(gate, b"\n")
            except StartError:
                container.signal(signal.SIGKILL)
                await container.exited.wait()
                raise
            finally:
                os.close(gate)
        return container

    async def stop(self, container: Container, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`; returns when the container is gone."""
        if container.running and grace_s > 0:
            container.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):  # wait_for of 3.11 may lose a cancellation
                    await container.exited.wait()
        while container.running:
            container.signal(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_AGAIN_S):
                    await container.exited.wait()

    def forget(self, pod_uid: str) -> None:
        for key in [key for key in self._containers if key[0] == pod_uid]:
            del self._containers[key]

    async def close(self) -> None:
        """Kill everything, as when the machine is switched off."""
        for container in self._containers.values():
            container.stuck = False
            container.signal(signal.SIGKILL)
        await asyncio.gather(*self._waits, return_exceptions=True)

    async def _wait(self, container: Container, log: LogWriter) -> None:
        process = container.process
        assert process.stdout is not None
        assert process.stderr is not None
        copies = asyncio.gather(log.copy(process.stdout, "stdout"), log.copy(process.stderr, "stderr"))
        try:
            status = await process.wait()
            container.signal(signal.SIGKILL)  # no process of a container outlives its first one
            for _ in range(
                _DRAIN_ROUNDS
            ):  # not one timeout: while this loop is blocked, output is still waiting
                if copies.done():
                    break
                await asyncio.wait({copies}, timeout=_DRAIN_ROUND_S)
        finally:
            copies.cancel()
            log.close()
        container.exit_code = status if status >= 0 else 128 - status
        container.finished_at = datetime.now(UTC)
        container.exited.set()


async def _run_hook(hook: Hook, number: int, container: Container) -> None:
    """As runc does: the container's state on stdin, and no container if it fails. Raises StartError."""
    state = {"ociVersion": "1.2.0", "id": container.id, "status": "creating", "pid": container.process.pid}
    pipe = asyncio.subprocess.PIPE
    said, result = b"", "timeout"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(hook.timeout_s or None):
            process = await asyncio.create_subprocess_exec(
                hook.path, *hook.args[1:], stdin=pipe, stdout=pipe, stderr=pipe, env={}
            )
            _, said = await process.communicate(json.dumps(state | {"bundle": "/"}).encode())
            result = f"exit status {process.returncode}" if process.returncode else ""
    if result:
        why = f"error running createRuntime hook #{number}: {result}, stdout: , stderr: {said.decode()}"
        raise StartError(f"{_FAILED}error during container init: {why}", NOT_EXECUTABLE_EXIT)


async def spawn(
    spec: ContainerSpec,
    argv: tuple[str, ...],
    *,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int = asyncio.subprocess.PIPE,
    terminal: bool = False,
    gate: int | None = None,
) -> asyncio.subprocess.Process:
    """A process in the container's environment; with `terminal`, stdin becomes its controlling terminal.

    With `gate`, its program starts once a line can be read there.
    """
    environ = {**spec.environ, **spec.rootfs.environment(spec.driver)}
    program = _program(argv, environ["PATH"], spec.rootfs)
    folder = spec.rootfs.inside(spec.working_dir or "/")
    try:
        # runs in the child before exec: die with us, and take the terminal
        prctl = ctypes.CDLL(None).prctl

        def prepare() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if terminal:
                os.close(os.open(os.ttyname(0), os.O_RDWR))  # opening it makes it the controlling terminal

        wait = ("/bin/sh", "-c", 'read _ && exec "$0" "$@" </dev/null') if gate is not None else ()
        return await asyncio.create_subprocess_exec(
            *wait,
            program,
            *(spec.rootfs.translate(one) for one in argv[1:]),
            env=environ,
            cwd=folder if folder.is_dir() else spec.rootfs.path,
            stdin=stdin if gate is None else gate,
            stdout=stdout,
            stderr=stdout,
            start_new_session=True,
            preexec_fn=prepare,
        )
    except OSError as error:
        raise StartError(_words(argv[0], "permission denied"), NOT_EXECUTABLE_EXIT) from error


def _program(argv: tuple[str, ...], path: str, rootfs: Rootfs) -> str:
    if not argv:
        raise StartError("no command specified", NOT_FOUND_EXIT)
    if "/" in argv[0]:
        program = rootfs.translate(argv[0])
        if os.path.exists(program):
            return program
        raise StartError(_words(argv[0], "no such file or directory"), NOT_FOUND_EXIT)
    for folder in path.split(":"):
        candidate = os.path.join(folder, argv[0])
        if os.access(candidate, os.X_OK):
            return candidate
    raise StartError(_words(argv[0], "executable file not found in $PATH"), NOT_FOUND_EXIT)


def _words(program: str, why: str) -> str:
    """As runc says it."""
    where = "stat" if "/" in program else "exec:"
    shown = program if "/" in program else f'"{program}"'
    return f"{_FAILED}unable to start container process: error during container init: {where} {shown}: {why}"
