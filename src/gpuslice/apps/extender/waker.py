"""Makes kube-scheduler try waiting pods again when cards come free that no event of its own tells of.

kube-scheduler tries a pod that only an extender refused again at any event of its own, else after 5 minutes.
A ConfigMap is no such event; a changed annotation of a node is one, for all pods (1.36, framework/events.go).
So nodes show which of their cards are out of use, written once the ledger knows, so that kube-scheduler
cannot come too early. Cards that were kept for a nominated pod that never took them are no event either; they
are shown for a moment when they come free.

kube-scheduler before 1.30 heeds no annotation of a node but its labels, and tries those pods alone that fit
that node by its own sums. There a label comes and goes as well, on every node that is meant.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.slim import SLIM_NODES
from gpuslice.apps.extender.leadership import Leadership
from gpuslice.core.contract import NODE_OUT_OF_USE
from gpuslice.core.model import Placement

_log = logging.getLogger(__name__)

HEEDS_ANNOTATIONS = 30  # kube-scheduler from this minor version on
NODES_AT_ONCE = 16  # at the most, where one is not enough
RETRY_EVERY_S = 5.0  # what could not be written, or not by us while another led


class Waker:
    """What the nodes should show and what they do."""

    def __init__(
        self,
        client: KubeClient,
        leadership: Leadership,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.kubernetes = 0  # minor version; 0: not known, taken for new
        self._client = client
        self._leadership = leadership
        self._sleep = sleep
        self._wanted: dict[str, str] = {}  # node → "0,2"; those without a card out of use are absent
        self._shown: dict[str, str] = {}  # the same, as its annotation says
        self._unshown: dict[str, str] = {}  # what had pods refused and was over before it was written
        self._changed = asyncio.Event()

    def set_out_of_use(self, node: str, cards: frozenset[int]) -> None:
        """The node's ConfigMap takes these cards out of use, or none."""
        before, now = self._wanted.get(node, ""), _text(cards)
        if before not in {now, self._shown.get(node, "")}:
            self._unshown[node] = before
        _put(self._wanted, node, now)
        self._changed.set()

    @property
    def by_labels(self) -> bool:
        return 0 < self.kubernetes < HEEDS_ANNOTATIONS

    @property
    def nodes_at_once(self) -> int:
        """So many have to change that every pod is tried that fits one of them."""
        return NODES_AT_ONCE if self.by_labels else 1

    async def learn_version(self) -> None:
        """Of the cluster, whenever it can be had."""
        problem = ""
        while not self.kubernetes:
            try:
                self.kubernetes = await self._client.minor_version()
            except KubeError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("version of the cluster not read, will retry", extra={"error": problem})
            else:
                return
            await self._sleep(RETRY_EVERY_S)

    def free_again(self, *placements: Placement) -> None:
        """Cards that had pods refused are free, and nothing that happened in the cluster says so."""
        if not self._leadership.may_bind:
            return
        for placement in placements[: self.nodes_at_once]:
            node = placement.node
            out_of_use = {int(card) for card in self._wanted.get(node, "").split(",") if card}
            self._unshown[node] = _text({part.card for part in placement.slices} | out_of_use)
            self._changed.set()

    def wake(self) -> None:
        """We lead now."""
        self._changed.set()

    def see(self, node: str, text: str) -> None:
        """The node's annotation as it came; "" when there is none, or no such node."""
        if self._shown.get(node, "") != text:
            _put(self._shown, node, text)
            self._changed.set()

    async def run(self) -> None:
        """Bring the nodes' annotations in line, for ever. Both sides must have been read."""
        problem = ""
        while True:
            self._changed.clear()
            if self._leadership.may_bind:
                try:
                    await self._write()
                    problem = ""
                except KubeError as error:
                    if str(error) != problem:
                        _log.warning("cards out of use not shown on the node", extra={"error": str(error)})
                    problem = str(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_EVERY_S):
                    await self._changed.wait()

    async def _write(self) -> None:
        """All that differs. Raises `KubeError` for a node that may not be changed, after all others were."""
        refused: KubeError | None = None
        for node in [*(self._wanted | self._shown | self._unshown)]:
            try:
                await self._write_node(node)
            except KubeError as error:
                refused = error
        if refused is not None:
            raise refused

    async def _write_node(self, node: str) -> None:
        """What is over by now is shown first: taking it off is what is heard of."""
        if node in self._unshown:
            await self._show(node, self._unshown[node])
            self._unshown.pop(node, None)
            await self._show(node, self._wanted.get(node, ""))
        elif self._wanted.get(node) != self._shown.get(node):
            await self._show(node, self._wanted.get(node, ""))
        else:
            return
        if self.by_labels:
            for value in ("", None):
                await self._patch(node, {"labels": {NODE_OUT_OF_USE: value}})

    async def _show(self, node: str, text: str) -> None:
        await self._patch(node, {"annotations": {NODE_OUT_OF_USE: text or None}})
        _put(self._shown, node, text)

    async def _patch(self, node: str, metadata: dict[str, Any]) -> None:
        with contextlib.suppress(NotFoundError):  # of a node that is gone a ConfigMap may stay
            await self._client.merge_patch(SLIM_NODES, node, {"metadata": metadata})
            _log.info("cards out of use shown on the node", extra={"node": node, **metadata})


def _text(cards: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cards)))


def _put(memory: dict[str, str], node: str, text: str) -> None:
    if text:
        memory[node] = text
    else:
        memory.pop(node, None)
