"""A machine whose driver enforces limits by cgroup, and root who sets them, each by NVML's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gpuslice.adapters.gpu.memory_limits import LimitRefusedError, MemoryLimits
from simcluster import gpu
from simcluster.cgroups import Cgroups, join

from .sim_driver_client import MIB, DriverProcess, Reply, out

NO_LIMIT: Final = 2**64 - 1
SUCCESS, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 0, 2, 3, 4, 6
FUNCTION_NOT_FOUND, OPERATING_SYSTEM = 13, 17


class Host:
    """A machine of these cards, and its cgroups."""

    def __init__(
        self,
        folder: Path,
        accounting: str = "misc",
        driver: str = "615",
        cards: tuple[gpu.CardSpec, ...] = (gpu.CardSpec("H200"),),
        kernels: bool = False,
    ) -> None:
        """`kernels`: the cgroups are the kernel's own, not folders."""
        self.cgroups = Cgroups(folder / "cgroup", dmem=accounting == "dmem")
        self.state = gpu.create(
            folder / "state",
            cards,
            seed="host",
            driver=driver,
            accounting=accounting,
            cgroup_root="" if kernels else self.cgroups.root,
        )

    @property
    def uuids(self) -> list[str]:
        with gpu.Machine(self.state) as machine:
            return [each.uuid for each in machine.cards()]

    @contextmanager
    def program(self, cgroup: Path, **env: str) -> Iterator[DriverProcess]:
        """A program of a container in that cgroup."""
        with DriverProcess(self.state, visible="0", **env) as process:
            join(cgroup, process.pid)
            yield process

    def set(self, cgroup: Path, soft_mib: int, hard_mib: int, visible: str | None = None, **env: str) -> int:
        """NVML's answer. A hard limit below 0 is none."""
        hard = NO_LIMIT if hard_mib < 0 else hard_mib * MIB
        with DriverProcess(self.state, visible, **env) as process:
            return ask(process, "Set", self.uuids[0], [str(cgroup), soft_mib * MIB, hard]).result

    def get(self, cgroup: Path, visible: str | None = None) -> tuple[int, ...]:
        """The answer; if it is a good one, soft, hard and used MiB."""
        with DriverProcess(self.state, visible) as process:
            reply = ask(process, "Get", self.uuids[0], [str(cgroup), 0, 0, 0])
        if reply.result:
            return (reply.result,)
        return (reply.result, *(-1 if each == NO_LIMIT else each // MIB for each in _numbers(reply)))


def ask(process: DriverProcess, verb: str, uuid: str, fields: list[str | int]) -> Reply:
    process.cu("nvmlInit_v2")
    handle = process.cu("nvmlDeviceGetHandleByUUID", uuid, out()).number()
    return process.call(f"nvmlDevice{verb}MemoryLimits_v1", handle, {"fields": fields})


def _numbers(reply: Reply) -> list[int]:
    return [int.from_bytes(reply.bytes[0][at : at + 8], "little") for at in (8, 16, 24)]


class Root:
    """`MemoryLimiter` over NVML in a process of its own: one process can know one simulated machine only."""

    def __init__(self, host: Host) -> None:
        self._process = DriverProcess(host.state)

    def close(self) -> None:
        self._process.kill()

    async def memory_limits(self, uuid: str, cgroup: Path) -> MemoryLimits:
        reply = ask(self._process, "Get", uuid, [str(cgroup), 0, 0, 0])
        if reply.result in (NOT_SUPPORTED, NOT_FOUND) and cgroup.is_dir():
            return MemoryLimits(0, None)
        self._check(reply.result)
        soft, hard, used = _numbers(reply)
        return MemoryLimits(soft, None if hard == NO_LIMIT else hard, used)

    async def set_memory_limits(self, uuid: str, cgroup: Path, limits: MemoryLimits) -> None:
        hard = NO_LIMIT if limits.hard is None else limits.hard
        self._check(ask(self._process, "Set", uuid, [str(cgroup), limits.soft, hard]).result)

    def _check(self, result: int) -> None:
        if result:
            raise LimitRefusedError(f"NVML {result}", missing=result in (NOT_SUPPORTED, NOT_FOUND))
