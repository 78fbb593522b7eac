"""Explains why each waiting pod waits, in the words of ``gpuslice explain``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from gpuslice.apps.console.cluster_state import ClusterState
from gpuslice.diagnosis.explain.rule import explained, kind_of, sentences_of
from gpuslice.diagnosis.usage import ContainerUsage

REST = 4
"""The pause between two passes, as a multiple of the time that a pass took, and at least a second."""


class WaitingPods:
    """Equal requests in equal circumstances are explained once: a queue consists mostly of equal pods."""

    def __init__(
        self, state: ClusterState, usage: Callable[[], Mapping[str, Sequence[ContainerUsage]]]
    ) -> None:
        self._state = state
        self._usage = usage
        self.pass_s = 0.0  # how long the last pass took
        self._never: set[str] = set()  # those that fit on no node

    async def run(self) -> None:
        """Explain again whenever something has changed, until cancelled."""
        while True:
            await self._state.work.wait()
            self._state.work.clear()
            began_s = time.monotonic()
            await self.explain_all()
            self.pass_s = time.monotonic() - began_s
            await asyncio.sleep(max(1.0, REST * self.pass_s))

    def counts(self) -> dict[str, int]:
        """Number of pods by reason for waiting; all reasons are present, even with 0."""
        found = {"never fits": 0, "no room": 0, "not started": 0}
        for key, view in self._state.waiting.items():
            found["not started" if view.node else "never fits" if key in self._never else "no room"] += 1
        return found

    async def explain_all(self) -> None:
        """Update the rows of all waiting pods, yielding to other tasks between two kinds of pods."""
        state = self._state
        self._never &= state.waiting.keys()
        kinds: dict[bytes, list[str]] = {}
        for key, view in state.waiting.items():
            pod = state.pods[key]
            kinds.setdefault(kind_of(pod, view, state.claims.of(pod)), []).append(key)
        for keys in kinds.values():
            await asyncio.sleep(0)
            found = state.pods.get(keys[0])
            if found is None:  # it has gone in the meantime, and another pass follows
                continue
            explanation = explained(found, state.cluster(self._usage()))
            sentences = sentences_of(explanation)
            classes = explanation.explanation.classes if explanation.explanation is not None else ()
            never = bool(classes) and all(each.never for each in classes)
            for key in (key for key in keys if key in state.waiting):
                namespace, _, name = key.partition("/")
                row = {"namespace": namespace, "name": name, "never": never}
                row |= {"why": sentences[0] if sentences else "", "help": sentences[1:]}
                (self._never.add if never else self._never.discard)(key)
                state.rows.put("waiting", key, row, namespace)
