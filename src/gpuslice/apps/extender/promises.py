"""Cards for which kube-scheduler was told whom to evict, until the API server shows that it does so.

It evicts and nominates a moment after our answer, and asks about the next pod in between. Two pods that were
told to make room on the same card would both find it taken by the other, and others evicted in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement
from gpuslice.core.nomination import Nomination

PROMISED_S = 10.0  # kube-scheduler evicts within milliseconds, if the API server lets it


@dataclass(frozen=True, slots=True)
class _Promise:
    """What one pod was told for each node that would do; it takes one of them."""

    by_node: Mapping[str, Nomination]
    until_s: float


class Promises:
    """The answers that nothing is known of yet, beside the nominations that the ledger has."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._by_uid: dict[str, _Promise] = {}

    def note(self, uid: str, priority: int, placements: Iterable[Placement]) -> None:
        """kube-scheduler was told how this pod gets one of these placements."""
        by_node = {each.node: Nomination(uid, priority, each) for each in placements}
        self._by_uid[uid] = _Promise(by_node, self._clock() + PROMISED_S)

    def on(self, node: str, uid: str, priority: int) -> list[Nomination]:
        """What a pod must leave alone of one node: nominations, and promises that may become some."""
        every = [*self._ledger.nominations, *self._open(node)]
        return [each for each in every if each.placement.node == node and each.weighs_on(uid, priority)]

    def _open(self, node: str) -> Iterator[Nomination]:
        self._forget()
        for uid, promise in self._by_uid.items():
            if node in promise.by_node and self._ledger.nominated.get(uid, node) == node:
                yield promise.by_node[node]

    def _forget(self) -> None:
        """Those that came true, and those that nobody has heard of for a while."""
        ledger, now = self._ledger, self._clock()
        self._by_uid = {
            uid: promise
            for uid, promise in self._by_uid.items()
            if promise.until_s > now and ledger.allocation(uid) is None and ledger.nominations.of(uid) is None
        }
