"""What ``gpuslice simulate --from-cluster`` says about waiting pods: would placing everything again help?"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from gpuslice.apps.console.cluster_state import ClusterState

if TYPE_CHECKING:  # NumPy, which nothing else here needs, takes 16 MiB: it is imported on request
    from gpuslice.diagnosis.simulate.facts import Start

HOLDS_S = 60.0
MOST_PODS = 2000
"""With more pods it would take minutes of CPU time: the page names the command instead."""


class WhatIf:
    """The answer, at most a minute old, computed on a thread on request."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._document: dict[str, Any] = {}
        self._at_s = -HOLDS_S
        self._number = -1
        self._working = asyncio.Lock()

    async def document(self) -> dict[str, Any]:
        """Empty if nothing is waiting; `tooMany` if there are too many pods to compute it here."""
        async with self._working:
            number = self._state.rows.number
            if self._number != number and time.monotonic() - self._at_s >= HOLDS_S:
                pods = len(self._state.pods)
                if all(view.node for view in self._state.waiting.values()):
                    self._document = {}
                elif pods > MOST_PODS:
                    self._document = {"tooMany": pods}
                else:
                    self._document = await self._place_anew()
                    self._at_s = time.monotonic()
                self._number = number
            return self._document

    async def _place_anew(self) -> dict[str, Any]:
        from gpuslice.diagnosis.simulate.facts import of_cluster

        start = of_cluster(self._state.cluster({}))
        return await asyncio.to_thread(_try, start) if start.nodes and start.waiting else {}


def _try(start: Start) -> dict[str, Any]:
    from gpuslice.core.policy import DEFAULT_POLICY
    from gpuslice.core.simulation.capacity import cards_needed, place_all

    outcome = place_all(start.nodes, start.pods, DEFAULT_POLICY)
    needed = cards_needed(start.nodes, start.pods, DEFAULT_POLICY)
    return {
        "pods": len(start.pods),
        "waiting": start.waiting,
        "placed": outcome.placed,
        "never": sum(each.pods for each in outcome.unplaced if each.never),
        "addedNodes": None if needed is None else needed.added,
    }
