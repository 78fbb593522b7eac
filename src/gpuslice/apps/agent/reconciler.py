"""Reads from kubelet which pods hold which devices, and corrects the pods' annotations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

from gpuslice.adapters.kube.errors import ConflictError, KubeError, UnavailableError
from gpuslice.adapters.kubelet.podresources import PodResourcesError
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.repair import Repair
from gpuslice.apps.agent.status import Counters
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.model import Pod

_log = logging.getLogger(__name__)

SOON_S = 0.2
"""After Allocate kubelet still has to record the ids; a read at that moment would not show them."""
MOST_TRIES = 5
"""Writes of one pod in one round: off its card, onto the other, and for changes in between."""
REMEMBERED_CORRECTIONS = 1000
UNSERVED = {
    "RunsWithoutDevices": "container {containers} runs without the {resource} it asks for, and without a "
    "limit: kubelet started it while it knew no device plugin for it; delete the pod, so that it is "
    "recreated",
    "ForgottenByKubelet": "kubelet has lost its record of container {containers}, which keeps running with "
    "its {resource} and limit but cannot be started again in this pod; delete the pod when convenient, so "
    "that it is recreated",
}
"""The texts of events, by their reason."""
_Unserved = tuple[str, str]  # reason, uid


class AssignmentSource(Protocol):
    """Who holds which devices according to kubelet: its pod-resources socket, or a kubelet in memory."""

    async def assignments(self, resource: str) -> tuple[DeviceAssignment, ...]:
        """Raises `PodResourcesError` if kubelet does not answer."""
        ...


class Reconciler:
    """Reads at least every `every_s` seconds, and soon after `wake`."""

    def __init__(
        self,
        state: AllocationState,
        kubelet: AssignmentSource,
        writer: Writer,
        counters: Counters,
        *,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = "kubelet's device assignments have not been read yet"  # "" while they can be read
        self._state = state
        self._kubelet = kubelet
        self._writer = writer
        self._counters = counters
        self._every_s = every_s
        self._clock = clock
        self._woken = asyncio.Event()
        self._writing = asyncio.Lock()
        self._corrected: OrderedDict[str, None] = OrderedDict()  # uids of pods whose annotated card was wrong
        self.without_devices: tuple[Pod, ...] = ()  # that run nevertheless, as reported
        self._unserved: frozenset[_Unserved] = frozenset()  # of the last round; only two in a row count
        self._reported: frozenset[_Unserved] = frozenset()

    def wake(self) -> None:
        """Read soon, because something has probably changed."""
        self._woken.set()

    async def run(self) -> None:
        """Reconcile for ever. Whatever fails is retried in the next round."""
        while True:
            with contextlib.suppress(PodResourcesError):
                await self.read()
                await self._look_for_unknown_pods()
                await self.write()
                self._report_unserved()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._woken.wait()
                await asyncio.sleep(SOON_S)
            self._woken.clear()

    async def read(self) -> None:
        """Read from kubelet. Raises `PodResourcesError`; the state then stays as it was."""
        asked_at_s = self._clock()
        try:
            assignments = await self._kubelet.assignments(self._state.node.names.memory)
        except PodResourcesError as error:
            if str(error) != self.problem:
                _log.warning("kubelet's device assignments cannot be read", extra={"error": str(error)})
            self.problem = str(error)
            raise
        if self.problem:
            _log.info("kubelet's device assignments are read")
        self.problem = ""
        self._state.assignments_read(assignments, asked_at_s)

    async def _look_for_unknown_pods(self) -> None:
        """Find out which pods of running containers are gone. The watch will show those that are not."""
        for each in self._state.of_unknown_pods():
            with contextlib.suppress(KubeError):
                if not await self._writer.lives(each.assignment.namespace, each.assignment.pod):
                    self._state.pod_is_gone(each)

    # -- annotations ----------------------------------------------------------------------------------

    async def write(self, uid: str = "") -> None:
        """Write what has to be written, or what is needed for one pod. Never raises for the API server."""
        tries: Counter[str] = Counter()
        while True:
            async with self._writing:  # the next step is planned only when the last one was answered
                due = self._state.due_repairs(uid)
                step = next((each for each in due if tries[each.pod.view.uid] < MOST_TRIES), None)
                if step is None:
                    return
                tries[step.pod.view.uid] += 1 if await self._write_step(step) else MOST_TRIES
                if uid and step.pod.view.uid != uid:
                    self.wake()  # others wait for their next step

    async def _write_step(self, repair: Repair) -> bool:
        """Whether another write of this pod may do better in this round."""
        unanswered = self._state.sent(repair)
        pod = repair.pod.view
        try:
            try:
                found = await self._writer.repair(repair)
            except ConflictError:  # it has changed since: plan again from its current state
                self._state.answered(repair)
                found = await self._writer.pod(pod)
            else:
                self._state.answered(repair)
                if found is not None:
                    self._counters.repaired["written"] += 1
                    if repair.of_cards:
                        self._corrected[pod.uid] = None
                        while len(self._corrected) > REMEMBERED_CORRECTIONS:
                            self._corrected.popitem(last=False)
        except KubeError as error:
            if not (unanswered or (isinstance(error, UnavailableError) and error.outcome_unknown)):
                self._state.answered(repair)
            self._counters.repaired["failed"] += 1
            _log.warning(
                "annotations not written, will try again", extra={"pod": pod.key, "error": str(error)}
            )
            return False
        if found is None:
            self._counters.repaired["gone"] += 1
            return False
        self._state.written(found)
        return True

    def take_corrected(self, uid: str) -> bool:
        """Whether the pod's annotated card was corrected; true once for each correction."""
        corrected = uid in self._corrected
        self._corrected.pop(uid, None)
        return corrected

    # -- pods that kubelet does not serve as they ask -----------------------------------------------------

    def _report_unserved(self) -> None:
        """One event for each. kubelet's assignments may show a pod later than the API server does."""
        bare = self._state.without_devices()
        found = {("RunsWithoutDevices", uid): each for uid, each in bare.items()}
        for each in self._state.forgotten():
            if (pod := self._state.living(each.uid)) is not None:
                found.setdefault(("ForgottenByKubelet", each.uid), (pod, []))[1].append(
                    each.assignment.container
                )
        for reason, uid in found.keys() & self._unserved - self._reported:
            pod, containers = found[reason, uid]
            _log.warning(
                "kubelet does not serve", extra={"pod": pod.key, "reason": reason, "containers": containers}
            )
            names, resource = ", ".join(containers), self._state.node.names.memory
            text = UNSERVED[reason].format(containers=names, resource=resource)
            self._writer.pod_event(pod, reason, text)
        self._reported = (self._reported | self._unserved) & found.keys()
        self._unserved = frozenset(found)
        self.without_devices = tuple(
            pod for uid, (pod, _) in bare.items() if ("RunsWithoutDevices", uid) in self._reported
        )
