"""Containers that hold a part of a card although their pod is gone from the API server.

A pod that is deleted with force disappears at once, and its containers may live on: a process that waits for
the driver and cannot be killed, a runtime that hangs. Nobody who looks at pods knows what they hold. kubelet
may count it until they have ended or give it out again (kubernetes 104824), and then refuses pods that were
sent to the room, or starts them beside a process that still has the memory. So they are found by what kubelet
lists and by the processes in their cgroups, the extender is told in an annotation of the node, and nothing is
granted beside what kubelet does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from gpuslice.adapters.cgroup.container import parse_cgroup
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.forgotten import RunningContainer
from gpuslice.apps.agent.node_reconciler import NodeReconciler
from gpuslice.apps.agent.reconciler import Reconciler
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import units_per_card
from gpuslice.core.model import CardSlice, Orphan
from gpuslice.core.words import counted

_log = logging.getLogger(__name__)

LONGEST_S = 2.0  # between two rounds


class Orphans:
    """Looks for them, and keeps the node's annotation as it should be."""

    def __init__(
        self,
        state: AllocationState,
        reconciler: Reconciler,
        folders: Folders,
        node: NodeReconciler,
        writer: Writer,
        *,
        every_s: float,
        proc: Path,
    ) -> None:
        self._state = state
        self._reconciler = reconciler
        self._folders = folders
        self._node = node
        self._writer = writer
        self._every_s = min(every_s, LONGEST_S)
        self._proc = proc
        self._listed: frozenset[DeviceAssignment] | None = None  # of the last round; only two in a row count
        self._ended: set[tuple[str, str]] = set()  # folders whose container has no process left, with its uid

    async def run(self) -> None:
        """For ever. What cannot be read leaves everything as it was."""
        while True:
            if not self._reconciler.problem:
                with contextlib.suppress(KubeError, OSError):
                    await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """One round. Raises `KubeError` and OSError."""
        named, state = {pod.view.key for pod in self._state.pods()}, self._state
        found = frozenset(
            each
            for each in state.assignments or ()
            if each.pod_key not in named or state.owner_is_gone(each.ids)
        )
        is_first, before = self._listed is None, self._listed or frozenset[DeviceAssignment]()
        self._listed = found
        if found - before:
            self._reconciler.wake()  # kubelet may just not have heard of the end: it is asked again
        if is_first and found:  # what an earlier agent has shown stays until they are seen twice
            return
        listed = [each for each in found & before if await self._is_gone(each)]
        known = {(each.pod_key, each.ids) for each in found}
        running = [
            each
            for each in await self._unlisted()
            if (each.assignment.pod_key, each.assignment.ids) not in known
        ]
        self._state.orphans = tuple(running)
        self._publish([*listed, *(each.assignment for each in running)])

    async def _is_gone(self, assignment: DeviceAssignment) -> bool:
        """The watch may be late, and the pod new."""
        if not any(pod.view.key == assignment.pod_key for pod in self._state.pods()):
            return not await self._writer.lives(assignment.namespace, assignment.pod)
        return True  # it is an earlier pod of that name

    async def _unlisted(self) -> list[RunningContainer]:
        """Containers with a process and without a pod that kubelet does not list any more."""
        folders = await asyncio.to_thread(lambda: list(self._folders.running()))
        there = {(each.folder, each.uid) for each in folders}
        self._ended &= there
        gone = [
            each
            for each in folders
            if each.uid and self._state.pod(each.uid) is None and (each.folder, each.uid) not in self._ended
        ]
        if not gone:
            return []
        running = await asyncio.to_thread(pods_with_processes, self._proc, {each.uid for each in gone})
        self._ended |= {(each.folder, each.uid) for each in gone if each.uid not in running}
        return [each for each in gone if each.uid in running]

    def _publish(self, held: list[DeviceAssignment]) -> None:
        indices = {card.uuid: card.index for card in self._state.node.cards}
        ids = defaultdict[str, set[str]](set)  # an init container's may be its pod's app container's too
        for each in held:
            ids[each.pod_key] |= each.ids
        orphans = []
        for pod, its in sorted(ids.items()):
            units = units_per_card(its)
            slices = [CardSlice(indices[uuid], amount) for uuid, amount in units.items() if uuid in indices]
            if slices:
                orphans.append(Orphan(pod, tuple(sorted(slices, key=lambda part: part.card))))
        before = self._node.orphans
        self._node.orphans = tuple(orphans)
        if self._node.orphans == before:
            return
        self._node.wake()
        for orphan in orphans:
            if orphan not in (before or ()):
                what = ", ".join(
                    f"{counted(part.units, 'unit')} of card {part.card}" for part in orphan.slices
                )
                text = f"pod {orphan.pod} is gone, and containers of it still hold {what}"
                _log.warning("containers without their pod", extra={"pod": orphan.pod, "holds": what})
                self._writer.node_event("GPUOrphans", text, warning=True)


def pods_with_processes(proc: Path, uids: Collection[str]) -> set[str]:
    """Those of these pods in whose containers a process runs."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(proc):
            if name.isdecimal():
                with contextlib.suppress(OSError):  # it has ended
                    container = parse_cgroup((proc / name / "cgroup").read_text(errors="replace"))
                    if container is not None and container.pod_uid in uids:
                        found.add(container.pod_uid)
    return found
