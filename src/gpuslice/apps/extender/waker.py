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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError, ToldOnce
from gpuslice.adapters.kube.slim import SLIM_NODES, SlimNode
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.subscriber import FilterVerdict, Subscriber
from gpuslice.core.contract import NODE_OUT_OF_USE
from gpuslice.core.ledger import shape_of
from gpuslice.core.model import Placement
from gpuslice.core.policy import NEVER
from gpuslice.core.policy.fleet import Shape

_log = logging.getLogger(__name__)

NOTICES_ANNOTATIONS = 31
"""From this minor version of the API server on, kube-scheduler notices annotations. 1.30 does, but while a
cluster is upgraded, kube-scheduler may be one version older than the API server."""
NODES_AT_ONCE = 16  # at most, if one node is not enough
RETRY_EVERY_S = 5.0  # what could not be written, or was not ours to write while another replica led


class Waker(Subscriber):
    """What each node's annotation should show, and what it shows."""

    def __init__(
        self,
        client: KubeClient,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.kubernetes = 0  # the API server's minor version; 0 if unknown, which counts as new
        self._client = client
        self._sleep = sleep
        self._wanted: dict[str, str] = {}  # node → "0,2"; nodes without cards out of use are absent
        self._shown: dict[str, str] = {}  # the same, as the annotation is now
        self._unshown: dict[str, str] = {}  # changes that caused refusals and ended before they were written
        self._changed = asyncio.Event()

    def cards_out_of_use(self, node: str, cards: frozenset[int]) -> None:
        before, now = self._wanted.get(node, ""), _text(cards)
        if before not in {now, self._shown.get(node, "")}:
            self._unshown[node] = before
        _put(self._wanted, node, now)
        self._changed.set()

    @property
    def by_labels(self) -> bool:
        return 0 < self.kubernetes < NOTICES_ANNOTATIONS

    @property
    def nodes_at_once(self) -> int:
        """How many nodes must change so that every pod that fits one of them is retried."""
        return NODES_AT_ONCE if self.by_labels else 1

    async def learn_version(self) -> None:
        """Read the cluster's version as soon as it is available."""
        told_once = ToldOnce(_log, "version of the cluster not read, will try again")
        while not self.kubernetes:
            with told_once:
                self.kubernetes = await self._client.minor_version()
                return
            await self._sleep(RETRY_EVERY_S)

    def free_again(self, *placements: Placement) -> None:
        """Cards whose use caused refusals are free again, and no event in the cluster shows it."""
        if not self.leads:
            return
        for placement in placements[: self.nodes_at_once]:
            node = placement.node
            out_of_use = {int(card) for card in self._wanted.get(node, "").split(",") if card}
            self._unshown[node] = _text({part.card for part in placement.slices} | out_of_use)
            self._changed.set()

    def started_leading(self) -> None:
        super().started_leading()
        self._changed.set()

    def node_changed(self, node: SlimNode) -> None:
        self._see(node.metadata.name, (node.metadata.annotations or {}).get(NODE_OUT_OF_USE, ""))

    def node_gone(self, name: str) -> None:
        self._see(name, "")

    def _see(self, node: str, text: str) -> None:
        if self._shown.get(node, "") != text:
            _put(self._shown, node, text)
            self._changed.set()

    async def run(self) -> None:
        """Keep the nodes' annotations up to date, for ever. The ConfigMaps and nodes must have been read."""
        told_once = ToldOnce(_log, "cards out of use not shown on the node, will try again")
        while True:
            self._changed.clear()
            with told_once:
                if self.leads:
                    await self._write()
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


CHECK_EVERY_S = 0.5
STRANDED_AFTER_S = 1.0  # of fitting; kube-scheduler reacts within milliseconds to what it sees itself
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0  # between two wake-ups of all pods
LONGEST_FOR_NEW_S = 10.0  # the same for a pod that nobody was woken for yet
REMEMBERED = 1000  # pods; the oldest are left to kube-scheduler
LOOKED_AT = 50  # pods in one check for which a node is chosen
UNKNOWN_FOR_S = 30.0  # if the watch has not shown a pod by then, there is none
ASKS_AGAIN = 29
"""From this minor version of the API server on, kube-scheduler asks again about pods whose question got no
answer. 1.28 does, but it may be one version older than the API server (`waker`)."""
UNANSWERED_FOR_S = 30.0  # after a takeover, until the Service leads to us


NEVER_ASKED = -1


@dataclass(slots=True)
class _Refused:
    """A pod refused on `rows` of the fleet as of `version`; NEVER_ASKED if nobody has asked."""

    rows: npt.NDArray[np.int32]
    version: int
    at_s: float
    fits_since_s: float = inf
    woken_for: bool = False


class StrandedPods(Subscriber):
    """Wakes kube-scheduler for pods that were refused and would fit by now, while this replica leads.

    kube-scheduler may see before us that a pod is gone. It then asks at once, is answered from what we know,
    and retries the waiting pod only at its next event, otherwise after five minutes. So refused pods are
    remembered, and when one would fit and nobody has asked for a moment, a change of a node is shown. That
    wakes all waiting pods, so it is done rarely: once for all of them, and ever more rarely as long as it
    helps none of them.

    kube-scheduler before 1.28 leaves a pod alone for as long if its question got no answer. So after a
    takeover all waiting pods count as refused.
    """

    def __init__(
        self,
        placer: Placer,
        waker: Waker,
        *,
        clock: Callable[[], float] = loop_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.woken = 0
        self._placer = placer
        self._ledger = placer.ledger
        self._waker = waker
        self._clock = clock
        self._sleep = sleep
        self._refused: OrderedDict[str, _Refused] = OrderedDict()  # by uid, the oldest first
        self._pause_s = FIRST_PAUSE_S
        self._woken_at_s = -inf
        self._quiet_until_s = 0.0
        self._unanswered_until_s = 0.0

    def decided(self, verdict: FilterVerdict) -> None:
        uid, rows = verdict.pod.uid, verdict.asked
        if len(verdict.passed):
            self._note_passed(uid)
        elif verdict.is_refusal:
            before = self._refused.pop(uid, None)
            known_rows = rows[rows >= 0].astype(np.int32)
            refused = _Refused(known_rows, self._ledger.fleet.cards_version, self._clock())
            refused.woken_for = before is not None and before.woken_for
            self._refused[uid] = refused
            if len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)

    def started_leading(self) -> None:
        """Questions of kube-scheduler may have got no answer, and may for a while."""
        super().started_leading()
        self._unanswered_until_s = self._clock() + UNANSWERED_FOR_S

    def stopped_leading(self) -> None:
        super().stopped_leading()
        self._refused.clear()
        self._unanswered_until_s = 0.0

    def _note_passed(self, uid: str) -> None:
        """The pod fits, and kube-scheduler knows. If it was woken for that, others may be soon too."""
        refused = self._refused.pop(uid, None)
        if refused is not None and refused.woken_for:
            self._pause_s = FIRST_PAUSE_S
            self._quiet_until_s = min(self._quiet_until_s, self._clock() + FIRST_PAUSE_S)

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._sleep(CHECK_EVERY_S)
            self.check()

    def check(self) -> None:
        """Wake kube-scheduler if a pod has fitted for a while and nobody has asked about it."""
        now_s = self._clock()
        if 0 < self._waker.kubernetes < ASKS_AGAIN and now_s < self._unanswered_until_s:
            for uid, pod in self._ledger.pods.items():
                if len(self._refused) >= REMEMBERED:
                    break
                if not pod.node and pod.request is not None and uid not in self._refused:
                    self._refused[uid] = _Refused(np.empty(0, np.int32), NEVER_ASKED, now_s)
        stranded = self._stranded() if self._refused else {}
        if not stranded:
            if now_s >= self._quiet_until_s + self._pause_s:
                self._pause_s = FIRST_PAUSE_S
            return
        quiet_until_s = self._quiet_until_s
        if not all(self._refused[uid].woken_for for uid in stranded):
            quiet_until_s = min(quiet_until_s, self._woken_at_s + LONGEST_FOR_NEW_S)
        if now_s < quiet_until_s:
            return
        self.woken += 1
        self._woken_at_s, self._quiet_until_s = now_s, now_s + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        for uid in stranded:
            self._refused[uid].woken_for = True
        self._waker.free_again(*{placement.node: placement for placement in stranded.values()}.values())

    def _stranded(self) -> dict[str, Placement]:
        """By uid, where each of the first few pods would go."""
        fleet, now_s = self._ledger.flush(), self._clock()
        fits: dict[Shape, bool] = {}
        found: dict[str, Placement] = {}
        looked_at = 0
        for uid, refused in tuple(self._refused.items()):
            pod = self._ledger.pods.get(uid)
            if pod is None:
                if now_s > refused.at_s + UNKNOWN_FOR_S:
                    del self._refused[uid]
                continue
            late = refused.version == NEVER_ASKED and now_s > refused.at_s + UNANSWERED_FOR_S  # e.g. gated
            if pod.node or self._ledger.holds.of(uid) is not None:
                self._note_passed(uid)
                continue
            if pod.request is None or late:
                del self._refused[uid]
                continue
            shape = shape_of(pod.request)
            if shape not in fits:
                fits[shape] = bool((self._placer.policy.keys(shape) != NEVER).any())
            placement = None
            if fits[shape] and looked_at < LOOKED_AT:
                looked_at += 1
                open_rows = np.full(fleet.rows, refused.version != fleet.cards_version)
                if refused.version == fleet.cards_version:  # otherwise rows may be those of other nodes
                    open_rows[refused.rows] = True
                placement = self._placer.choose_node(pod, open_rows, 1)
            refused.fits_since_s = min(refused.fits_since_s, now_s) if placement is not None else inf
            if placement is not None and now_s >= refused.fits_since_s + STRANDED_AFTER_S:
                found[uid] = placement
        return found
