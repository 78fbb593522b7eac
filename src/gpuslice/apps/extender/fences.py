"""Shows on the node which of its cards are not to be had: then kube-scheduler looks again when they are.

kube-scheduler tries a pod that only an extender refused again at any event of its own, else after 5 minutes.
A ConfigMap is no such event; a changed annotation of a node is one, for all pods (1.36, framework/events.go).
It is written once the ledger knows, so that kube-scheduler cannot come too early. Cards that were kept for a
nominated pod that never took them are no event either; they are shown for a moment when they come free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.slim import SLIM_NODES
from gpuslice.core.contract import NODE_OUT_OF_USE

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0  # for what could not be written, or not by us while another led


class Fences:
    """What the nodes should show and what they do. `leading` is asked before each write."""

    def __init__(self, client: KubeClient, leading: Callable[[], bool]) -> None:
        self._client = client
        self._leading = leading
        self._wanted: dict[str, str] = {}  # node → "0,2"; those without a card out of use are absent
        self._shown: dict[str, str] = {}  # the same, as its annotation says
        self._unshown: dict[str, str] = {}  # what had pods refused and was over before it was written
        self._changed = asyncio.Event()
        self._problem = ""

    def set(self, node: str, cards: frozenset[int]) -> None:
        """The node's ConfigMap takes these cards out of use, or none."""
        before, now = self._wanted.get(node, ""), _text(cards)
        if before not in {now, self._shown.get(node, "")}:
            self._unshown[node] = before
        _put(self._wanted, node, now)
        self._changed.set()

    def free_again(self, node: str, cards: Iterable[int]) -> None:
        """Cards that had pods refused are free, and nothing that happened in the cluster says so."""
        if self._leading():
            self._unshown[node] = _text({*cards, *_cards(self._wanted.get(node, ""))})
            self._changed.set()

    def look(self) -> None:
        """We lead now."""
        self._changed.set()

    def seen(self, node: str, text: str) -> None:
        """The node's annotation as it came; "" when there is none, or no such node."""
        if self._shown.get(node, "") != text:
            _put(self._shown, node, text)
            self._changed.set()

    async def run(self) -> None:
        """Bring the nodes' annotations in line, for ever. Both sides must have been read."""
        while True:
            self._changed.clear()
            if self._leading():
                await self._write_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()

    async def _write_all(self) -> None:
        known = self._wanted | self._shown | self._unshown
        differing = [node for node in known if self._differs(node)]
        try:
            for node in differing:
                await self._write(node)
        except KubeError as error:
            if str(error) != self._problem:
                _log.warning("cards out of use not shown on the node", extra={"error": str(error)})
            self._problem = str(error)
        else:
            self._problem = ""

    def _differs(self, node: str) -> bool:
        return node in self._unshown or self._wanted.get(node) != self._shown.get(node)

    async def _write(self, node: str) -> None:
        """A fence that is gone is written first: to take it off is the change that is heard of."""
        if node in self._unshown:
            await self._show(node, self._unshown[node])
            self._unshown.pop(node, None)
        await self._show(node, self._wanted.get(node, ""))

    async def _show(self, node: str, text: str) -> None:
        patch = {"metadata": {"annotations": {NODE_OUT_OF_USE: text or None}}}
        with contextlib.suppress(NotFoundError):  # of a node that is gone a ConfigMap may stay
            await self._client.merge_patch(SLIM_NODES, node, patch)
            _log.info("cards out of use shown on the node", extra={"node": node, "cards": text})
        _put(self._shown, node, text)


def _text(cards: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cards)))


def _cards(text: str) -> set[int]:
    return {int(card) for card in text.split(",") if card}


def _put(memory: dict[str, str], node: str, text: str) -> None:
    if text:
        memory[node] = text
    else:
        memory.pop(node, None)
