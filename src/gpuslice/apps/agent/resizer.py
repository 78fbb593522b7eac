"""Brings in force what running pods are granted, and takes back what their authors do not want any more.

More is in force once ids are set aside for it and the container's limits file says so. Less is taken back
only when the container uses no more: the file says so first, then the use is read again, and only then is
the pod's record changed, by which others get the rest. So the record is never below what may be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuslice.adapters.kube.errors import ConflictError, KubeError
from gpuslice.adapters.region.limits import LimitsEntry, LimitsError, parse_limits
from gpuslice.adapters.region.reader import RegionError, read_region
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.owner import Owner
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.grant import GrantError, grant_to
from gpuslice.core.model import ContainerKind, ContainerRequest, Request
from gpuslice.core.resize import less
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

EVERY_S = 0.2
LOOKED_S = 0.3
"""After that each process of a container has seen its limits file (native/src/policy/cards.c)."""


class Resizer:
    """`used_bytes`: what the driver last reported of a container on a card, 0 if nothing."""

    def __init__(
        self,
        state: AllocationState,
        folders: Folders,
        writer: Writer,
        used_bytes: Callable[[str, str, str], int],
        wake: Callable[[], None],
    ) -> None:
        self._state = state
        self._folders = folders
        self._writer = writer
        self._used_bytes = used_bytes
        self._wake = wake
        self._told: dict[str, str] = {}  # by pod uid, why it waits

    async def run(self) -> None:
        """For ever."""
        while True:
            with contextlib.suppress(OSError):  # of a failing disk, which the upkeep reports
                await self.check()
            await asyncio.sleep(EVERY_S)

    async def check(self) -> None:
        """Look at each pod that was ever resized. Raises OSError."""
        resized = [pod for pod in self._state.pods() if pod.view.wanted is not None and pod.holds_slices]
        self._told = {uid: why for uid, why in self._told.items() if self._state.pod(uid) is not None}
        for pod in resized:
            uid, request = pod.view.uid, pod.view.request
            assert request is not None
            smaller = less(pod.view)
            problem = self._raise(pod, request) if smaller is None else await self._take_back(pod, smaller)
            if problem and problem != self._told.get(uid):
                self._writer.pod_event(pod.view, "GPUResizeWaits", problem)
            self._told[uid] = problem

    def _raise(self, pod: NodePod, request: Request) -> str:
        """Let the pod's containers have what they hold; why that is not possible yet, "" if they have it."""
        if any(each.added for each in request.containers) and not self._state.aside.is_in_force(pod):
            return "its card has no device left that kubelet could be kept from giving to others"
        for each, limits in self._limits(pod, request).items():
            if limits != self._recorded(pod, each):
                self._folders.change_limits(self._folder(pod, each), limits)
                _log.info("limits changed", extra={"pod": pod.view.key, "container": each})
                self._wake()  # so that the annotations say so
        return ""

    async def _take_back(self, pod: NodePod, smaller: Request) -> str:
        """Let the pod's containers have no more than in `smaller`; why they still need more."""
        before = {each: self._recorded(pod, each) for each in self._limits(pod, smaller)}
        limits = self._limits(pod, smaller)
        if problem := self._too_much(pod, limits):
            return problem
        lowered = [each for each in limits if limits[each] != before[each]]
        for each in lowered:
            self._folders.change_limits(self._folder(pod, each), limits[each])
        if lowered:
            await asyncio.sleep(LOOKED_S)
        if problem := self._too_much(pod, limits):
            for each in lowered:
                self._folders.change_limits(self._folder(pod, each), before[each])
            return problem
        try:
            await self._state_written(pod, smaller)
        except KubeError as error:
            if not isinstance(error, ConflictError):  # else it has changed: look at it again
                _log.warning("resize not written", extra={"pod": pod.view.key, "error": str(error)})
        return ""

    async def _state_written(self, pod: NodePod, smaller: Request) -> None:
        if (found := await self._writer.granted(pod.view, smaller)) is not None:
            self._state.written(found)
            self._wake()
            _log.info("taken back", extra={"pod": pod.view.key, "units": smaller.units})

    # -- one container ----------------------------------------------------------------------------------

    def _limits(self, pod: NodePod, request: Request) -> dict[str, list[LimitsEntry]]:
        """By container with a folder, what its file is to say; those that have not started are left out."""
        found = {}
        for each in request.containers:
            recorded = self._recorded(pod, each.name)
            if each.kind is ContainerKind.INIT or not recorded:
                continue
            memory = self._memory(pod, each)
            found[each.name] = [
                replace(one, memory_bytes=memory.get(one.uuid, one.memory_bytes))
                if one.memory_bytes is not None
                else one
                for one in recorded
            ]
        return found

    def _memory(self, pod: NodePod, container: ContainerRequest) -> Mapping[str, int]:
        """By card uuid, the bytes that this is."""
        ids = self._state.listed_ids(pod.view.uid, container.name)
        with contextlib.suppress(GrantError):
            limits = grant_to(container, ids, self._state.node).limits if ids else ()
            return {limit.card.uuid: limit.memory_mib * MIB for limit in limits}
        return {}

    def _folder(self, pod: NodePod, container: str) -> str:
        """The folder of the container's device ids, "" if it is another's or nobody's."""
        ids = self._state.listed_ids(pod.view.uid, container)
        name = self._folders.current(ids) if ids else ""
        mine = Owner([], uid=pod.view.uid, container=container)
        return name if name and self._folders.owner(name).is_of(mine) else ""

    def _recorded(self, pod: NodePod, container: str) -> list[LimitsEntry]:
        name = self._folder(pod, container)
        with contextlib.suppress(LimitsError):
            return list(parse_limits(self._folders.owner(name).limits)) if name else []
        return []

    def _too_much(self, pod: NodePod, limits: Mapping[str, list[LimitsEntry]]) -> str:
        """Which container uses more than it is to have, in a sentence; "" if none does."""
        for container, entries in limits.items():
            most = {each.uuid: each.memory_bytes for each in entries if each.memory_bytes is not None}
            used = dict.fromkeys(most, 0)
            with contextlib.suppress(RegionError, KeyError):
                folder = self._folders.of_containers()[pod.view.uid, container]
                reading = read_region(folder / "var" / "region", most)
                used |= {each.uuid: each.used_bytes for each in (reading.cards if reading else ())}
            for uuid, limit_bytes in most.items():
                uses = max(used[uuid], self._used_bytes(pod.view.uid, container, uuid))
                if uses > limit_bytes:
                    return (
                        f"container {container} uses {uses // MIB} MiB of card {uuid}, more than the "
                        f"{limit_bytes // MIB} MiB that are wanted for it: it keeps what it has until it "
                        f"uses less"
                    )
        return ""
