"""Makes kube-scheduler retry waiting pods when cards become free without an event that it would notice.

kube-scheduler retries a pod that only an extender refused at any event that it watches, otherwise after 5
minutes. A changed ConfigMap is no such event; a changed node annotation is one, for all pods (1.36,
framework/events.go). So each node is annotated with its cards that are out of use. The annotation is written
after the ledger knows, so that kube-scheduler does not ask too early. When cards that were kept for a
nominated pod become free because that pod never took them, there is no event either, and they are shown for a
moment.

kube-scheduler before 1.30 ignores node annotations and only notices labels, and it retries only pods that fit
that node by its own sums. For those versions a label is added and removed as well, on every node concerned.
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

HEEDS_ANNOTATIONS = 31
"""From this minor version of the API server on, kube-scheduler notices annotations. 1.30 does, but while a
cluster is upgraded, kube-scheduler may be one version older than the API server."""
NODES_AT_ONCE = 16  # at most, if one node is not enough
RETRY_EVERY_S = 5.0  # what could not be written, or was not ours to write while another replica led


class Waker:
    """What each node's annotation should show, and what it shows."""

    def __init__(
        self,
        client: KubeClient,
        leadership: Leadership,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.kubernetes = 0  # the API server's minor version; 0 if unknown, which counts as new
        self._client = client
        self._leadership = leadership
        self._sleep = sleep
        self._wanted: dict[str, str] = {}  # node → "0,2"; nodes without cards out of use are absent
        self._shown: dict[str, str] = {}  # the same, as the annotation is now
        self._unshown: dict[str, str] = {}  # changes that caused refusals and ended before they were written
        self._changed = asyncio.Event()

    def set_out_of_use(self, node: str, cards: frozenset[int]) -> None:
        """The node's ConfigMap takes these cards out of use; empty for none."""
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
        """How many nodes must change so that every pod that fits one of them is retried."""
        return NODES_AT_ONCE if self.by_labels else 1

    async def learn_version(self) -> None:
        """Read the cluster's version as soon as it is available."""
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
        """Cards whose use caused refusals are free again, and no event in the cluster shows it."""
        if not self._leadership.may_bind:
            return
        for placement in placements[: self.nodes_at_once]:
            node = placement.node
            out_of_use = {int(card) for card in self._wanted.get(node, "").split(",") if card}
            self._unshown[node] = _text({part.card for part in placement.slices} | out_of_use)
            self._changed.set()

    def wake(self) -> None:
        """This replica leads now."""
        self._changed.set()

    def see(self, node: str, text: str) -> None:
        """The node's annotation as read; "" if there is none or no such node."""
        if self._shown.get(node, "") != text:
            _put(self._shown, node, text)
            self._changed.set()

    async def run(self) -> None:
        """Keep the nodes' annotations up to date, for ever. The ConfigMaps and nodes must have been read."""
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
        """Write all that differs. Raises `KubeError` for a node that failed, after all others."""
        refused: KubeError | None = None
        for node in [*(self._wanted | self._shown | self._unshown)]:
            if node not in self._unshown and self._wanted.get(node) == self._shown.get(node):
                continue
            try:
                # what ended before it was written is shown first: kube-scheduler notices its removal
                if node in self._unshown:
                    await self._show(node, self._unshown[node])
                    self._unshown.pop(node, None)
                await self._show(node, self._wanted.get(node, ""))
                for value in ("", None) if self.by_labels else ():
                    await self._patch(node, {"labels": {NODE_OUT_OF_USE: value}})
            except KubeError as error:
                refused = error
        if refused is not None:
            raise refused

    async def _show(self, node: str, text: str) -> None:
        await self._patch(node, {"annotations": {NODE_OUT_OF_USE: text or None}})
        _put(self._shown, node, text)

    async def _patch(self, node: str, metadata: dict[str, Any]) -> None:
        with contextlib.suppress(NotFoundError):  # a ConfigMap may outlive its node
            await self._client.merge_patch(SLIM_NODES, node, {"metadata": metadata})
            _log.info("cards out of use shown on the node", extra={"node": node, **metadata})


def _text(cards: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cards)))


def _put(memory: dict[str, str], node: str, text: str) -> None:
    if text:
        memory[node] = text
    else:
        memory.pop(node, None)
