"""Reads kubelet's book, and makes the rest of the world agree with it: annotations, folders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from typing import Protocol

from gpuslice.adapters.kube.errors import ConflictError, KubeError, UnavailableError
from gpuslice.adapters.kubelet.podresources import PodResourcesError
from gpuslice.apps.agent.desk import Desk
from gpuslice.apps.agent.folders import Folders, Owner
from gpuslice.apps.agent.metrics import Counters
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.repair import Repair
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.contract import GPU_MEM
from gpuslice.core.device_assignment import DeviceAssignment

_log = logging.getLogger(__name__)

SOON_S = 0.2
"""After Allocate kubelet still has to enter the ids in its book; asking in that moment shows nothing."""
MOST_TRIES = 5
"""Writes of one pod in one round: off its card, on the other, and whatever changed in between."""

REMEMBERED_MOVED = 1000
_WITHOUT = (
    f"container {{}} runs without the {GPU_MEM} it asks for, and without a limit: kubelet started it while "
    "it knew no device plugin for it; delete the pod, so that it is made anew"
)


class KubeletBook(Protocol):
    """Who holds which devices, by kubelet: its pod-resources socket, or a kubelet in memory."""

    async def assignments(self, resource: str) -> tuple[DeviceAssignment, ...]:
        """Raises `PodResourcesError` when kubelet does not answer."""
        ...


class Bookkeeper:
    """The reconciler. It reads at least each `every_s` seconds and soon after `look`."""

    def __init__(
        self,
        desk: Desk,
        book: KubeletBook,
        writer: Writer,
        folders: Folders,
        counters: Counters,
        *,
        every_s: float = 5.0,
        sweep_after_s: float = 120.0,
    ) -> None:
        self.problem = "kubelet's book has not been read yet"  # "" while it can be read
        self._desk = desk
        self._book = book
        self._writer = writer
        self._folders = folders
        self._counters = counters
        self._every_s = every_s
        self._sweep_after_s = sweep_after_s
        self._wanted = asyncio.Event()
        self._writing = asyncio.Lock()
        self._moved: OrderedDict[str, None] = OrderedDict()  # uids whose annotated card was another
        self._bare: frozenset[str] = frozenset()  # at the last look; twice in a row is no coincidence
        self._told: frozenset[str] = frozenset()
        self._unswept = ""  # why folders could not be swept at the last look

    def look(self) -> None:
        """Read the book soon, because something probably changed in it."""
        self._wanted.set()

    async def run(self) -> None:
        """Reconcile for ever. Whatever fails is tried again at the next round."""
        while True:
            with contextlib.suppress(PodResourcesError):
                await self.read()
                await self.write()
                await self._tell_bare()
                self._try_to_sweep()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._wanted.wait()
                await asyncio.sleep(SOON_S)
            self._wanted.clear()

    async def read(self) -> None:
        """Take kubelet's book over. Raises `PodResourcesError`; what was known before then stays."""
        asked_at_s = time.monotonic()
        try:
            assignments = await self._book.assignments(GPU_MEM)
        except PodResourcesError as error:
            if str(error) != self.problem:
                _log.warning("kubelet's book cannot be read", extra={"error": str(error)})
            self.problem = str(error)
            raise
        self.problem = ""
        self._desk.book_read(assignments, asked_at_s)

    async def write(self, uid: str = "") -> None:
        """Write what has to be written, or what leads to that of one pod. Never raises for the API server."""
        tries: Counter[str] = Counter()
        while await self._write_next(uid, tries):
            pass

    async def _write_next(self, uid: str, tries: Counter[str]) -> bool:
        """One step, planned when its turn has come; False when none is left that is worth a try."""
        async with self._writing:
            steps = (each for each in self._desk.steps(uid) if tries[each.pod.view.uid] < MOST_TRIES)
            step = next(steps, None)
            if step is None:
                return False
            worth_more = await self._write(step)
            tries[step.pod.view.uid] += 1 if worth_more else MOST_TRIES
            if uid and step.pod.view.uid != uid:
                self.look()  # others wait for their next step
            return True

    async def _write(self, repair: Repair) -> bool:
        """Whether another write of this pod may do better in this round."""
        in_doubt = self._desk.sent(repair)
        try:
            pod = await self._written(repair)
        except KubeError as error:
            if not (in_doubt or (isinstance(error, UnavailableError) and error.outcome_unknown)):
                self._desk.answered(repair)
            self._counters.repaired("failed")
            key = repair.pod.view.key
            _log.warning("annotations not written, will try again", extra={"pod": key, "error": str(error)})
            return False
        if pod is None:
            self._counters.repaired("gone")
            return False
        self._desk.written(pod)
        return True

    async def _written(self, repair: Repair) -> NodePod | None:
        """The pod with the repair, or as it is where it has changed since; None when it is gone."""
        try:
            pod = await self._writer.repair(repair)
        except ConflictError:
            self._desk.answered(repair)
            return await self._writer.pod(repair.pod.view)
        self._desk.answered(repair)
        if pod is not None:
            self._counters.repaired("written")
            self._note_moved(repair)
        return pod

    def _note_moved(self, repair: Repair) -> None:
        if not repair.of_cards:
            return
        self._moved[repair.pod.view.uid] = None
        while len(self._moved) > REMEMBERED_MOVED:
            self._moved.popitem(last=False)

    def take_moved(self, uid: str) -> bool:
        """Whether the pod's annotated card was corrected; told once for each correction."""
        moved = uid in self._moved
        self._moved.pop(uid, None)
        return moved

    async def _tell_bare(self) -> None:
        """Tell of pods that run without devices, once. A pod may be news to us before kubelet's book."""
        found = self._desk.bare()
        for uid in found.keys() & self._bare - self._told:
            pod, containers = found[uid]
            _log.warning("runs without devices", extra={"pod": pod.key, "containers": containers})
            await self._writer.tell_pod(pod, "RunsWithoutDevices", _WITHOUT.format(", ".join(containers)))
        self._told = (self._told | self._bare) & found.keys()
        self._bare = frozenset(found)

    @property
    def bare(self) -> int:
        """How many pods run without the devices that they ask for."""
        return len(self._told)

    def _try_to_sweep(self) -> None:
        """A disk that fails is no reason to leave kubelet and the API server without us."""
        try:
            self._sweep()
        except OSError as error:
            if str(error) != self._unswept:
                _log.warning("folders not swept, will try again", extra={"error": str(error)})
            self._unswept = str(error)
        else:
            self._unswept = ""

    def _sweep(self) -> None:
        """Remove folders that neither kubelet's book nor a living pod knows any more."""
        held = self._desk.held_ids()
        for name, owner, age_s in list(self._folders.owners()):
            if age_s > self._sweep_after_s and not self._in_use(name, owner, held):
                _log.info("folder removed", extra={"token": name, "pod": f"{owner.namespace}/{owner.pod}"})
                self._folders.remove(name)
        self._folders.sweep_libraries(self._sweep_after_s)

    def _in_use(self, name: str, owner: Owner, held: frozenset[str]) -> bool:
        """By its pod, or by whoever has its ids now; of several folders for the same ids by the last one."""
        last = name == self._folders.current(owner.ids)
        if self._desk.alive(owner.uid):
            ids = self._desk.held_by(owner.uid, owner.container)
            return ids is None or (ids == frozenset(owner.ids) and last)
        return last and not held.isdisjoint(owner.ids)
