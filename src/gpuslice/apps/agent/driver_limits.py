"""Leaves limits to the driver where it was proved to enforce them, and checks that each container has them.

A limit is set on the container's own cgroup: on its pod's, programs would see the whole card. It is there
before the container's first instruction (`limit_hook`); after that it is read back again and again, since
whoever is root on the node can change it, and a container is only said to be held by the driver while its
limits read as they ought to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpuslice.adapters.cgroup.tree import CgroupTree
from gpuslice.adapters.gpu.memory_limits import LimitRefusedError, MemoryLimiter, MemoryLimits
from gpuslice.adapters.gpu.source import GpuUnavailableError
from gpuslice.adapters.region.limits import LimitsEntry, LimitsError, parse_limits
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.cards import CardMonitor
from gpuslice.apps.agent.driver_probe import DriverProbe
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.limit_hook import HookError, LimitHook
from gpuslice.apps.agent.node_reconciler import NodeReconciler
from gpuslice.apps.agent.owner import Owner
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.model import ContainerRequest
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

EVERY_S = 1.0
CHANGED = "GPUDriverLimitChanged"
NOT_HELD = "GPULimitNotHeldByDriver"
NO_HOOK = "GPULimitHookNotRun"
HOOK_RAN = "hook-ran"


class DriverLimits:
    """One node's; does nothing without a `limiter`."""

    def __init__(
        self,
        state: AllocationState,
        folders: Folders,
        cards: CardMonitor,
        node: NodeReconciler,
        writer: Writer,
        *,
        limiter: MemoryLimiter | None,
        settings: AgentSettings,
        proc: Path = Path("/proc"),
    ) -> None:
        limiter = limiter if settings.driver_limits else None
        root = Path(settings.root)
        self._tree = CgroupTree(Path(settings.cgroup_folder))
        self.probe = DriverProbe(limiter, self._tree, root, boot=folders.boot, library=settings.nvml_library)
        self.hook = LimitHook(root, Path(settings.cdi_folder), folders, self.fence)
        self._state = state
        self._folders = folders
        self._writer = writer
        self._limiter = limiter
        self._soft = settings.driver_soft_limit
        self._beside = settings.library_beside_driver
        self._cards = cards
        self._node = node
        self._proc = proc
        self._ran = root / "driver" / HOOK_RAN  # it contains the run of the machine
        self._no_hook = False  # a container started whose hook the runtime did not run
        self._hook_ran = False
        self._told: dict[tuple[str, str], str] = {}  # by pod uid and container, why it is not held

    @property
    def hook_ran(self) -> bool:
        """Whether the runtime is known to run hooks of CDI devices: else a container may start unfenced."""
        with contextlib.suppress(OSError):
            self._hook_ran = self._hook_ran or self._ran.read_text() == self._folders.boot
        return self._hook_ran

    def problem(self, uuid: str) -> str:
        """Why the card's limits are not left to the driver; "" if they are."""
        if uuid in self._state.by_driver.cards:
            return ""
        if self._no_hook:
            return "the container runtime does not run hooks of CDI devices"
        return self.probe.problems.get(uuid, "not tried yet")

    def needs_library(self, container: ContainerRequest | None) -> bool:
        """Whether it is needed although the driver enforces the limits: for a share of compute, or because
        a container borrows, and the library's programs hear when memory is called back."""
        borrows = container is None or container.borrowable > 0
        return self._beside or borrows or self._state.rules.limits_compute or not self.hook_ran

    async def run(self) -> None:
        """Prove cards, answer hooks and check containers, for ever."""
        if self._limiter is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.hook.serve())
            while True:
                await self.prove()
                await self.check()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._state.by_driver.limits_changed.wait()
                self._state.by_driver.limits_changed.clear()

    async def prove(self) -> None:
        """Which cards' limits are left to the driver from now on."""
        found = frozenset[str]()
        if self._state.node.cards and self._folders.library.has_hook:
            found = await self.probe.proved(self._state.node.cards, self._cards.driver_version)
        self._use(frozenset() if self._no_hook else found)

    def _use(self, cards: frozenset[str]) -> None:
        if cards != self._state.by_driver.cards:
            self._state.by_driver.cards = cards
            self._node.wake()

    # -- before a container's first instruction -----------------------------------------------------------

    async def fence(self, name: str, pid: int) -> None:
        """Set the limits of the folder's container, whose first process is `pid`. Raises `HookError`."""
        owner = self._folders.records.get(name)
        cgroup = self._tree.of_process(pid, self._proc)
        if owner is None or not owner.limits:
            raise HookError(f"there is no container with the folder {name}")
        if cgroup is None:
            raise HookError(f"process {pid} is in no cgroup below {self._tree.root}")
        for entry in _entries(owner):
            wanted = self._wanted(entry, ends=False)
            try:
                await self._set(entry.uuid, cgroup, wanted)
                found = await self._read(entry.uuid, cgroup)
            except (LimitRefusedError, GpuUnavailableError, OSError) as error:
                raise HookError(f"card {entry.uuid}: {error}") from error
            if (found.soft, found.hard) != (wanted.soft, wanted.hard):
                raise HookError(f"card {entry.uuid}: {wanted} was set, and the driver reads {found}")
        self._state.by_driver.containers |= {(owner.uid, owner.container)}
        if not self.hook_ran:
            self._ran.write_text(self._folders.boot)
            self._no_hook = False

    async def _set(self, uuid: str, cgroup: Path, limits: MemoryLimits) -> None:
        assert self._limiter is not None
        try:
            await self._limiter.set_memory_limits(uuid, cgroup, limits)
        except LimitRefusedError as error:
            if not error.missing:
                raise
            self._tree.count_device_memory(cgroup)
            await self._limiter.set_memory_limits(uuid, cgroup, limits)

    async def _read(self, uuid: str, cgroup: Path) -> MemoryLimits:
        assert self._limiter is not None
        return await self._limiter.memory_limits(uuid, cgroup)

    def _wanted(self, entry: LimitsEntry, *, ends: bool) -> MemoryLimits:
        """A soft limit is taken back before its cgroup goes: with dmem it would stay on those above."""
        soft = (entry.memory_bytes or 0) if self._soft and not ends else 0
        return MemoryLimits(soft, entry.memory_bytes)

    # -- while containers run -----------------------------------------------------------------------------

    async def check(self) -> None:
        """Read every container's limits back, and set right what differs."""
        containers = list(self._containers()) if self._state.by_driver.cards else []
        places = self._tree.of_containers({identity for identity, *_ in containers})
        held = set()
        for identity, pod, owner in containers:
            if identity not in places:
                continue
            problem = await self._checked(pod, owner, places[identity])
            key = (owner.uid, owner.container)
            if not problem:
                held.add(key)
            elif self._told.get(key) != problem:
                _log.warning("not held by the driver", extra={"pod": pod.view.key, "reason": problem})
                self._writer.pod_event(pod.view, NOT_HELD, f"container {owner.container}: {problem}")
            self._told[key] = problem
            self._state.by_driver.applied[key] = owner.limits
        living = {pod.view.uid for pod in self._state.pods()}
        self._told = {key: problem for key, problem in self._told.items() if key[0] in living}
        applied = self._state.by_driver.applied
        self._state.by_driver.applied = {key: limits for key, limits in applied.items() if key[0] in living}
        running = {(owner.uid, owner.container) for _, _, owner in containers}
        starting = {key for key in self._state.by_driver.containers - running if key[0] in living}
        self._state.by_driver.containers = frozenset(held | starting)

    def _containers(self) -> Iterator[tuple[str, NodePod, Owner]]:
        """Those that run with limits: the runtime's id, the pod and the owner of the folder."""
        owners = {(each.uid, each.container): each for each in self._folders.records.values() if each.limits}
        for pod in self._state.pods():
            for identity, name in pod.container_ids.items():
                owner = owners.get((pod.view.uid, name))
                if owner is not None and name in pod.running and _limited(_entries(owner)):
                    yield identity, pod, owner

    async def _checked(self, pod: NodePod, owner: Owner, cgroup: Path) -> str:
        """Why the container is not held by the driver; "" if it is now."""
        changed = []
        known = self._state.by_driver.applied.get((owner.uid, owner.container))  # others were changed by us
        try:
            for entry in _entries(owner):
                if entry.uuid not in self._state.by_driver.cards:
                    return f"the limits of card {entry.uuid} are not left to the driver"
                wanted = self._wanted(entry, ends=pod.view.terminating)
                found = await self._read(entry.uuid, cgroup)
                if (found.soft, found.hard) == (wanted.soft, wanted.hard):
                    continue
                await self._set(entry.uuid, cgroup, wanted)
                if found.hard != wanted.hard and known in (None, owner.limits):
                    was = "none" if found.hard is None else f"{found.hard // MIB} MiB"
                    changed.append(f"card {entry.uuid}: it was {was}")
        except (LimitRefusedError, GpuUnavailableError, OSError) as error:
            return str(error)
        if changed:
            self._tell(pod, owner, "; ".join(changed))
        return ""

    def _tell(self, pod: NodePod, owner: Owner, what: str) -> None:
        """The limits were not as they ought to be, and are again."""
        if (owner.uid, owner.container) in self._state.by_driver.applied:
            _log.warning("driver's limits changed by somebody", extra={"pod": pod.view.key, "what": what})
            text = f"somebody changed the driver's limit, which is set again: {what}"
            self._writer.pod_event(pod.view, CHANGED, f"container {owner.container}: {text}")
        elif owner.hooked and not self.hook_ran:
            self._no_hook = True
            reason = (
                f"container {owner.container} of pod {pod.view.key} started before the driver had its limit: "
                "the container runtime does not run hooks of CDI devices; enable CDI there (containerd 1.7 "
                "or later: enable_cdi)"
            )
            _log.warning("hook not run", extra={"reason": reason})
            self._writer.node_event(NO_HOOK, reason, warning=True)
            self._use(frozenset())


def _entries(owner: Owner) -> tuple[LimitsEntry, ...]:
    with contextlib.suppress(LimitsError):
        return parse_limits(owner.limits)
    return ()


def _limited(entries: Iterable[LimitsEntry]) -> bool:
    """Whether there are limits at all: some containers are exempt."""
    found = [each.memory_bytes for each in entries]
    return bool(found) and None not in found
