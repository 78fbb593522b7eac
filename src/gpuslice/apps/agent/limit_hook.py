"""How a container's limits are set before its first instruction: a CDI file for the runtime, and a socket.

Each container whose limits the driver enforces is given a CDI device of its own, named after its folder. Its
OCI hook (`native/hook`) runs once the container's cgroup exists and before its program does; it hands the
container's state to the agent over a socket that only root reaches, and fails the start unless the agent says
``ok``. The device also sets the two variables that the hook of NVIDIA's container toolkit (1.20.1 and later)
reads, over whatever the pod said: where that toolkit serves the card, it sets the same limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.adapters.region.limits import LimitsError, parse_limits
from gpuslice.adapters.region.plain import read_plain
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.library import HOOK, make_folder, replace_file
from gpuslice.apps.agent.owner import CLAIM_PREFIX, MOST_BYTES, Owner
from gpuslice.apps.agent.upkeep import Owned
from gpuslice.core.contract import ENV_DRIVER_LIMIT, ENV_DRIVER_REQUEST, LIMITS_CDI_KIND
from gpuslice.core.errors import GpusliceError
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

CDI_VERSION = "0.6.0"
SOCKET = "driver/hook.sock"
"""Below the agent's root."""
RUNTIME_S = 30
"""How long the runtime waits for the hook, which gives up earlier."""
ASK_S = 15.0


class HookError(GpusliceError):
    """A container's limits cannot be set, so it must not start."""


class _State(msgspec.Struct, frozen=True):
    """What the runtime tells a hook (OCI runtime specification, State)."""

    pid: int
    id: str = ""


class LimitHook:
    """Keeps the CDI file and answers the hooks. `apply`: sets the limits of folder and pid, or raises."""

    def __init__(
        self,
        root: Path,
        cdi: Path,
        folders: Folders,
        apply: Callable[[str, int], Awaitable[None]],
    ) -> None:
        self._socket = root / SOCKET
        self._file = cdi / f"{LIMITS_CDI_KIND.replace('/', '-')}.json"
        self._folders = folders
        self._apply = apply

    # -- what the runtime reads ---------------------------------------------------------------------------

    def device(self, name: str) -> str:
        """The CDI device of a container's folder."""
        return f"{LIMITS_CDI_KIND}={name}"

    def write(self) -> None:
        """Raises OSError."""
        make_folder(self._file.parent, 0o755)
        replace_file(self._file, self._wanted(), 0o644)

    def owned(self) -> Iterator[Owned]:
        """The CDI file, once a container needs it; a reboot empties its folder."""
        if not self._containers():
            return
        found = b""
        with contextlib.suppress(OSError):
            found = read_plain(self._file, MOST_BYTES)
        yield Owned(f"CDI file {self._file}", found, self._wanted(), partial(self.write))

    def _containers(self) -> list[tuple[str, Owner]]:
        """Those of the device plugin: a claim has a CDI file of its own."""
        owners = sorted(self._folders.records.items())
        return [(name, each) for name, each in owners if each.hooked and not name.startswith(CLAIM_PREFIX)]

    def _wanted(self) -> bytes:
        devices = [
            {"name": name, "containerEdits": hook_edits(self._folders, name, owner)}
            for name, owner in self._containers()
        ]
        return msgspec.json.encode({"cdiVersion": CDI_VERSION, "kind": LIMITS_CDI_KIND, "devices": devices})

    # -- what the hooks ask -------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Answer for ever."""
        make_folder(self._socket.parent, 0o700)
        self._socket.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._answer, str(self._socket), limit=1 << 17)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, reason = "", ""
        try:
            async with asyncio.timeout(ASK_S):
                name = (await reader.readline()).decode().strip()
                state = msgspec.json.decode(await reader.read(1 << 17), type=_State)
                await self._apply(name, state.pid)
        except TimeoutError:
            reason = f"the driver did not answer within {ASK_S:g} s"
        except (GpusliceError, ValueError, OSError) as error:
            reason = str(error)
        if reason:
            _log.warning("container start refused", extra={"folder": name, "reason": reason})
        with contextlib.suppress(ConnectionError):
            writer.write(f"{reason[:1000] or 'ok'}\n".encode())
            await writer.drain()
        writer.close()


def hook_edits(folders: Folders, name: str, owner: Owner) -> dict[str, Any]:
    """What a CDI device adds to the container with that folder."""
    command = str(folders.host_root / "lib" / HOOK)
    hook = {
        "hookName": "createRuntime",
        "path": command,
        "args": [command, str(folders.host_root / SOCKET), name],
        "timeout": RUNTIME_S,
    }
    return {"env": _variables(owner.limits), "hooks": [hook]}


def _variables(limits: str) -> list[str]:
    """For the hook of NVIDIA's toolkit, which takes one value for all cards: the smallest here."""
    with contextlib.suppress(LimitsError):
        memory = [each.memory_bytes for each in parse_limits(limits)]
        known = [each for each in memory if each is not None]
        if known and len(known) == len(memory):
            return [f"{ENV_DRIVER_REQUEST}=0", f"{ENV_DRIVER_LIMIT}={min(known) // MIB}"]
    return []
