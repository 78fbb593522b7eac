"""What a pod's owner must know becomes a Kubernetes Event on the pod, written without delaying requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.objects import ObjectReference
from gpuslice.core.model import Pod

REPEAT_AFTER_S = 60.0
REMEMBERED = 10_000


class PodEvents:
    """Writes Events on pods in the background, the same text about one pod at most once a minute."""

    def __init__(self, recorder: EventRecorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._written: OrderedDict[tuple[str, str], float] = OrderedDict()

    def warn(self, pod: Pod, reason: str, message: str) -> None:
        """Tell the owner of this pod what is wrong. `reason` is one CamelCase word."""
        self._put(pod, reason, message, "Warning")

    def note(self, pod: Pod, reason: str, message: str) -> None:
        """Tell the owner of this pod what was done."""
        self._put(pod, reason, message, "Normal")

    def about(self, what: ObjectReference, reason: str, message: str) -> None:
        """A warning about another object than a pod."""
        self._recorder.add(what, reason, message, type="Warning")

    def _put(self, pod: Pod, reason: str, message: str, kind: str) -> None:
        key, now = (pod.uid or pod.key, message), self._clock()
        if now - self._written.get(key, float("-inf")) < REPEAT_AFTER_S:
            return
        self._written[key] = now
        self._written.move_to_end(key)
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        self._recorder.add(pod_reference(pod.namespace, pod.name, pod.uid), reason, message, type=kind)

    async def run(self) -> None:
        """Write events as they come, until cancelled."""
        await self._recorder.run()
