"""Why a container cannot be parked, found out before anything of it is touched."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from gpuslice.adapters.cgroup.readings import headroom_bytes, machine_memory_bytes
from gpuslice.adapters.cgroup.tree import CgroupTree
from gpuslice.adapters.gpu.source import GpuSource
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.cards import CardMonitor
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.core.units import MIB

FIRST_BRANCH = 570
MARGIN_BYTES = 64 * MIB
"""Of host memory, beside what is copied."""


class Obstacles:
    """One node's rules."""

    def __init__(
        self,
        tree: CgroupTree,
        source: GpuSource,
        state: AllocationState,
        cards: CardMonitor,
        *,
        settings: AgentSettings,
        proc: Path,
    ) -> None:
        self._tree = tree
        self._source = source
        self._state = state
        self._bound_bytes = settings.parking_host_mib * MIB
        self._watchdog = settings.watchdog
        self._monitor = cards
        self._proc = proc

    async def why_not(
        self, pod: NodePod, container: str, cgroup: Path | None, amounts: Mapping[str, int], parked_bytes: int
    ) -> str:
        """A sentence; "" if it can be tried. `amounts`: bytes by card that it holds. Raises
        `GpuUnavailableError`."""
        version = self._monitor.driver_version
        branch = version.partition(".")[0]
        if not branch.isdecimal() or int(branch) < FIRST_BRANCH:
            return (
                f"driver {version or 'unknown'}: {FIRST_BRANCH} is the first that takes processes off cards"
            )
        if platform.machine() != "x86_64":
            return f"the driver does it on x86-64 only, and this node is {platform.machine()}"
        if self._watchdog != "stop":
            return (
                "its node lends nothing to others (devicePlugin.watchdog is not stop): so nothing is gained"
            )
        if not self._tree.available or cgroup is None:
            return (
                f"its memory limit is not known: {self._tree.root} is not the machine's cgroups of version 2"
            )
        if not amounts:
            return "it holds nothing of its card"
        return await self._card(pod, container, amounts) or self._host(
            cgroup, sum(amounts.values()), parked_bytes
        )

    async def _card(self, pod: NodePod, container: str, amounts: Mapping[str, int]) -> str:
        """Others may grow to all that they requested, and the driver needs some for itself: it fits again
        only if its own request leaves that much."""
        limits = self._state.limits(pod.view.uid, container) or {}
        for uuid, amount in amounts.items():
            own = limits[uuid].memory_mib * MIB if uuid in limits else 0
            if amount > own:
                return f"it uses {amount // MIB} MiB of card {uuid}, more than its own {own // MIB} MiB"
            card = next(each for each in self._state.node.cards if each.uuid == uuid)
            drivers = await self._drivers_own(uuid, card.memory_mib * MIB)
            if amount + drivers > own:
                return (
                    f"it uses {amount // MIB} of its {own // MIB} MiB: to be sure of its return it must "
                    f"leave the {drivers // MIB} MiB that the driver takes of the card for itself"
                )
        return ""

    async def _drivers_own(self, uuid: str, total_bytes: int) -> int:
        held = sum(each.memory_bytes or 0 for each in await self._source.processes() if each.uuid == uuid)
        return max(0, total_bytes - await self._source.free_bytes(uuid) - held)

    def _host(self, cgroup: Path, needed: int, parked_bytes: int) -> str:
        try:
            headroom = headroom_bytes(cgroup, self._tree.root)
            available, total = machine_memory_bytes(self._proc)
        except (OSError, ValueError) as error:
            return f"its memory limit cannot be read: {error}"
        if headroom is not None and needed + MARGIN_BYTES > headroom:
            return (
                f"its {needed // MIB} MiB would lie in its own host memory, and its limit leaves "
                f"{max(0, headroom) // MIB} MiB: ask for more resources.limits.memory"
            )
        if parked_bytes + needed > self._bound_bytes:
            return (
                f"parked containers have {parked_bytes // MIB} of the {self._bound_bytes // MIB} MiB of host "
                f"memory that this node gives them (parkingHostMemoryMiB)"
            )
        if available - needed < total // 10:
            return (
                f"the node has {available // MIB} MiB of host memory left, of which a tenth of all stays free"
            )
        return ""
