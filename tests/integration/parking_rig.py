"""A node whose cards are simulated, with containers that really use them: what is parked leaves the card."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.gpu.source import DriverCard, GpuUnavailableError, Inventory, XidEvent
from gpuslice.adapters.kube.resources import EVENTS, PODS
from gpuslice.apps.agent.parking.idle_times import Use
from gpuslice.core.attribution import ProcessReading
from gpuslice.core.contract import ANN_LIMIT, ANN_PARK, CONDITION_PARKED
from simcluster import gpu
from simcluster.cgroups import Cgroups, join

from .agent_bench import Bench, Pod, container, eventually, uuid
from .sim_driver_client import BUILD, MIB, DriverProcess

V100_MIB = 16130
GIB = 1024
SETTINGS: dict[str, Any] = {"watchdog": "stop", "parking_host_mib": 64 * GIB}


class SimulatedCards:
    """`GpuSource` over the driver's own books. `busy`: processes that compute."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.busy: set[int] = set()

    async def inventory(self) -> Inventory:
        with gpu.Machine(self.state) as machine:
            cards = tuple(
                DriverCard(each.index, each.uuid, each.total_mib, each.name) for each in machine.cards()
            )
            return Inventory(cards, driver_version=machine.driver_version)

    async def processes(self) -> tuple[ProcessReading, ...]:
        with gpu.Machine(self.state) as machine:
            uuids = [each.uuid for each in machine.cards()]
            sums: dict[tuple[int, int], int] = {}
            for each in machine.holdings():
                sums[each.pid, each.card] = sums.get((each.pid, each.card), 0) + each.bytes
        return tuple(
            ProcessReading(pid, uuids[card], held, float(pid in self.busy))
            for (pid, card), held in sums.items()
        )

    async def free_bytes(self, uuid: str) -> int:
        with gpu.Machine(self.state) as machine:
            card = next(each for each in machine.cards() if each.uuid == uuid)
            return (card.total_mib - card.idle_mib) * MIB - card.used_bytes

    async def events(self) -> AsyncGenerator[XidEvent]:
        raise GpuUnavailableError("none are told")
        yield XidEvent(0)

    async def close(self) -> None:
        return None


@dataclass
class Tenant:
    """A pod with one container, whose program has memory of its card."""

    node: ParkingNode
    name: str
    pod: Pod
    process: DriverProcess
    cgroup: Path

    @property
    def place(self) -> tuple[str, str]:
        return self.pod["metadata"]["uid"], "main"

    async def order(self, what: str) -> None:
        patch = {"metadata": {"annotations": {ANN_PARK: what}}}
        await self.node.bench.client.merge_patch(PODS, self.name, patch, "default")

    async def condition(self) -> str:
        found = await self.node.bench.client.get(PODS, self.name, "default")
        conditions = found.status.conditions or []
        return next((each.status for each in conditions if each.type == CONDITION_PARKED), "")

    async def is_parked(self) -> None:
        async def ask() -> bool:
            return await self.condition() == "True"

        await eventually(ask, f"{self.name} is parked")
        assert self.held_mib() == 0

    async def runs(self) -> None:
        async def ask() -> bool:
            return await self.condition() == "False"

        await eventually(ask, f"{self.name} runs")
        assert self.held_mib() > 0

    def end(self) -> None:
        """Its program ends, as when it crashes or is killed."""
        self.process.kill()
        shutil.rmtree(self.node.bench.folder / "proc" / str(self.process.pid))

    def node_tool(self) -> DriverProcess:
        """A program of the host."""
        return DriverProcess(self.node.state)

    def held_mib(self) -> int:
        with gpu.Machine(self.node.state) as machine:
            return machine.used_bytes(pid=self.process.pid) // MIB

    async def warnings(self) -> list[str]:
        found = (await self.node.bench.client.list(EVENTS)).items or ()
        return [each.message for each in found if each.involved_object.name == self.name]

    async def warned(self, words: str) -> None:
        async def ask() -> bool:
            return any(words in each for each in await self.warnings())

        await eventually(ask, f"{self.name} is told: {words}")


@dataclass
class ParkingNode:
    """The node, and what container runtime and kernel do there."""

    bench: Bench
    state: Path
    source: SimulatedCards
    cgroups: Cgroups
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    async def tenant(
        self,
        name: str,
        units: int = 4,
        holds_mib: int = 1000,
        *,
        limit: str = "",
        memory_max: str = "max",
        annotations: dict[str, str] | None = None,
    ) -> Tenant:
        """A running pod of so many units. `limit`: what it may borrow up to; `memory_max`: of its cgroup."""
        pod = await self.bench.place(name, 0, 0, containers=[container(units)])
        await self.bench.kubelet.admit(pod)
        await self.bench.kubelet.start_container(pod)
        process = DriverProcess(self.state)
        self._stack.callback(process.kill)
        identifier = name.encode().hex().ljust(64, "0")
        uid = pod["metadata"]["uid"].replace("-", "_")
        cgroup = self.cgroups.make(
            f"kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{identifier}.scope"
        )
        for place in (cgroup, *cgroup.parents[:2]):
            (place / "memory.max").write_text("max\n")
            (place / "memory.current").write_text("0\n")
        (cgroup / "memory.max").write_text(f"{memory_max}\n")
        join(cgroup, process.pid)
        proc = self.bench.folder / "proc" / str(process.pid)
        proc.parent.mkdir(parents=True, exist_ok=True)
        proc.mkdir()
        for file in ("task", "maps", "mem", "stat", "status"):
            (proc / file).symlink_to(f"/proc/{process.pid}/{file}")
        (proc / "cgroup").write_text(f"0::/{cgroup.relative_to(self.cgroups.root)}\n")
        if holds_mib:
            process.start().alloc(holds_mib * MIB)
        more = {ANN_LIMIT: limit} if limit else {}
        patch = {"metadata": {"annotations": {**(annotations or {}), **more}}}
        await self.bench.client.merge_patch(PODS, name, patch, "default")
        status = {
            "phase": "Running",
            "containerStatuses": [
                {"name": "main", "containerID": f"containerd://{identifier}", "state": {"running": {}}}
            ],
        }
        await self.bench.client.patch_status(PODS, name, status, "default")
        tenant = Tenant(self, name, pod, process, cgroup)

        def known() -> bool:
            found = self.bench.agent.state.pod(tenant.place[0])
            held = self.bench.agent.watchdog.held
            return (
                found is not None
                and "main" in found.running
                and any(each.uid == tenant.place[0] for each in held) == bool(holds_mib)
            )

        await eventually(known, f"{name} runs")
        return tenant

    def later(self, seconds: float) -> None:
        """So much time has passed since anybody used a card."""
        idle = self.bench.agent.parker.idle
        idle.uses = {name: Use(use.last_s - seconds, use.held) for name, use in idle.uses.items()}

    async def lends(self, tenant: Tenant, mib: int) -> None:
        """Wait until a borrower may have so much beyond its request, or within a step of that."""

        def ask() -> bool:
            lease = self.bench.agent.lender.lease_bytes(*tenant.place, uuid(0)) // MIB
            return abs(lease - mib) <= 64

        await eventually(ask, f"{mib} MiB are lent")


@contextlib.asynccontextmanager
async def parking_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, driver: str = "580", **settings: Any
) -> AsyncIterator[ParkingNode]:
    state = gpu.create(
        folder / "state", [gpu.CardSpec("V100-SXM2-16GB", uuid=uuid(0))], driver=driver, seed="park"
    )
    for name, value in gpu.environment(state, BUILD, base={"PATH": os.environ["PATH"]}).items():
        monkeypatch.setenv(name, value)
    cgroups, source = Cgroups(folder / "cgroup"), SimulatedCards(state)
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").symlink_to("/proc/meminfo")
    own = {**SETTINGS, "cgroup_folder": str(cgroups.root), **settings}
    async with Bench(folder, cards={0: V100_MIB}, source=source, settings=own).running() as bench:
        node = ParkingNode(bench, state, source, cgroups)
        with node._stack:
            yield node
        await asyncio.sleep(0)
