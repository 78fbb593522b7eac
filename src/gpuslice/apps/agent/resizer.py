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

from gpuslice.adapters.kube.errors import ConflictError, KubeError
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.lender import Lender
from gpuslice.apps.agent.live_limits import Amounts
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.model import ContainerKind, ContainerRequest, Request
from gpuslice.core.resize import less
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

EVERY_S = 0.2


def _named(request: Request, name: str) -> ContainerRequest:
    return next(each for each in request.containers if each.name == name)


class Resizer:
    """The pods of this node that were ever resized."""

    def __init__(
        self,
        state: AllocationState,
        lender: Lender,
        writer: Writer,
        wake: Callable[[], None],
    ) -> None:
        self._state = state
        self._live = lender.live
        self._lender = lender
        self._writer = writer
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
        cards = {card for amounts in self._limits(pod, request).values() for card in amounts}
        if not self._lender.is_settled(cards, pod.view):
            return ""  # what others borrowed is being called back
        for each, limits in self._limits(pod, request).items():
            if self._live.change(pod, _named(request, each), limits):
                self._wake()  # so that the annotations say so
        return ""

    async def _take_back(self, pod: NodePod, smaller: Request) -> str:
        """Let the pod's containers have no more than in `smaller`; why they still need more."""
        limits = self._limits(pod, smaller)
        if problem := self._too_much(pod, limits):
            return problem
        before = {each: self._live.in_force(pod, each) for each in limits}
        for each, amounts in limits.items():
            self._live.change(pod, _named(smaller, each), amounts)
        if problem := self._too_much(pod, limits):
            for each, amounts in before.items():
                self._live.change(pod, _named(smaller, each), amounts)
            return problem
        if not all(self._live.driver_knows(pod, each) for each in limits):
            return ""  # the next round looks again
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

    def _limits(self, pod: NodePod, request: Request) -> dict[str, Amounts]:
        """By container that has started, the bytes by card uuid that its file is to say."""
        asking = [each for each in request.containers if each.kind is not ContainerKind.INIT]
        return {
            each.name: self._live.of_request(pod, each)
            for each in asking
            if self._live.in_force(pod, each.name)
        }

    def _too_much(self, pod: NodePod, limits: Mapping[str, Amounts]) -> str:
        """Which container uses more than it is to have, in a sentence; "" if none does."""
        for container, amounts in limits.items():
            used = self._live.used(pod, container)
            for uuid, limit_bytes in amounts.items():
                if used.get(uuid, 0) > limit_bytes:
                    return (
                        f"container {container} uses {used[uuid] // MIB} MiB of card {uuid}, more than the "
                        f"{limit_bytes // MIB} MiB that are wanted for it: it keeps what it has until it "
                        f"uses less"
                    )
        return ""
