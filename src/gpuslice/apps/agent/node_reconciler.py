"""The node object: its labels say how cards are given out, its status and an annotation say what there is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.objects import Node
from gpuslice.adapters.kube.resources import NODES
from gpuslice.adapters.kube.watch import PER_NODE, Change, ChangeKind, Reflector
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.upkeep import Owned, Upkeep
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.annotations import encode_cards, encode_orphans
from gpuslice.core.card_links import CardLinks, encode_links
from gpuslice.core.contract import (
    EXCLUSIVE_GPU,
    LABEL_PLACEMENT,
    LABEL_SCHEDULE,
    NAME_SETS,
    NODE_GPUS,
    NODE_KUBELET_AWAY,
    NODE_LINKS,
    NODE_ORPHANS,
    NODE_TIER,
    VENDOR_NAMES,
    ResourceNames,
)
from gpuslice.core.mode import Rules, rules_of, wants_agent
from gpuslice.core.model import NodeMode, Orphan, Tier
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import WHOLE_CORE_PERCENT

_log = logging.getLogger(__name__)

LEAVE_S = 3.0


class NodeReconciler:
    """Watches the node and writes what kubelet does not keep: kubelet zeroes it after losing its checkpoint.

    The rules from the start stay in force until the agent is restarted, unless `hot`.
    """

    def __init__(
        self,
        client: KubeClient,
        writer: Writer,
        state: AllocationState,
        settings: AgentSettings,
        isolation_missing: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.read = asyncio.Event()
        self.seen: Node | None = None
        self.links: CardLinks = ()  # between the cards
        self.orphans: tuple[Orphan, ...] | None = None  # what containers hold whose pods are gone, once known
        self._client = client
        self._writer = writer
        self._state = state
        self._hot = settings.hot_reload_isolation
        self._new_pods = settings.new_pods
        self._isolation_missing = isolation_missing
        self._kubelet_away = False
        self._waits = ""  # what the node's labels say that is not in force yet
        self._reported = ""
        self.upkeep = Upkeep(self._owned, writer.not_repaired)
        name = state.node.name
        self._reflector = Reflector(
            client, NODES, self._changed, fields=f"metadata.name={name}", pace=PER_NODE, clock=clock
        )

    async def watch(self) -> None:
        await self._reflector.run()

    def wake(self) -> None:
        """The cards changed: check soon whether the node says so."""
        self.upkeep.wake()

    def kubelet_answers(self, answers: bool) -> None:
        """Record whether kubelet answers. While it does not, the node offers nothing.

        A kubelet that starts admits the pods bound to it before it knows any device plugin, and fails them
        for good.
        """
        self._kubelet_away = not answers
        self.wake()

    @property
    def packing(self) -> str:
        """The packing that the node's label asks for; "" if it has none."""
        return ((self.seen and self.seen.metadata.labels) or {}).get(LABEL_PLACEMENT, "")

    def offered_whole(self) -> int:
        """How many whole cards another device plugin gives out on this node."""
        status = self.seen.status if self.seen else None
        return whole_number(((status and status.allocatable) or {}).get(EXCLUSIVE_GPU)) or 0

    def _changed(self, change: Change[Node]) -> None:
        if change.object is None:
            return
        if change.kind is ChangeKind.DELETED:
            self.seen = None  # there is nothing to write; a recreated node is a new one
            return
        self.seen = change.object
        rules = rules_of(self.seen.metadata.labels or {}) if self._new_pods else Rules(NodeMode.EXCLUSIVE)
        if rules == self._state.rules:
            self._waits = ""
        elif self.read.is_set() and not self._hot:
            self._waits = (
                f"its labels say {rules.mode} now; new containers follow them once the pod of the device "
                "plugin on this node has been replaced or removed"
            )
            _log.warning("node labels changed; the agent follows them after its restart")
        else:
            self._state.rules = rules
            _log.info("node rules", extra={"mode": str(rules.mode), "divides_compute": rules.divides_compute})
        self.wake()
        self.read.set()

    def _owned(self) -> Iterator[Owned]:
        yield Owned("event on labels that are not in force", self._reported, self._waits, self._report)
        cards, rules = self._state.node.cards, self._state.rules
        if self.seen is None or (rules.shared and not cards):
            return
        amounts = amounts_to_write(self.seen, wanted_amounts(len(cards), rules, self._state.node.names))
        yield Owned("amounts in the node's status", amounts, {}, partial(self._writer.node_status, amounts))
        said = self.seen.metadata.annotations or {}
        wanted: dict[str, str | None] = {NODE_KUBELET_AWAY: "true" if self._kubelet_away else None}
        if rules.shared or (rules.claims and cards):
            tier = (
                Tier.NONE
                if self._isolation_missing()
                else self._state.by_driver.tier(self._state.rules, self._state.node.cards)
            )
            wanted |= {NODE_GPUS: encode_cards(cards), NODE_TIER: tier.word}
            if self.links or NODE_LINKS in said:
                wanted[NODE_LINKS] = encode_links(self.links)
        if self.orphans is not None:
            wanted[NODE_ORPHANS] = encode_orphans(self.orphans)
        for name, text in wanted.items():
            write = partial(self._writer.node_annotation, name, text)
            yield Owned(f"annotation {name} of the node", said.get(name), text, write)

    async def _report(self) -> None:
        if self._waits:
            self._writer.node_event("GPUModeWaits", self._waits, warning=True)
        self._reported = self._waits

    async def leave(self, label: str, holders: list[str]) -> None:
        """At the agent's end: if the node no longer shares cards, nothing may say that it does."""
        try:
            async with asyncio.timeout(LEAVE_S):
                node = await self._client.get(NODES, self._state.node.name)
                labels = node.metadata.labels or {}
                if wants_agent(labels, label):
                    return
                value = labels.get(label)
                if value is None and labels.get(LABEL_SCHEDULE) == "default":
                    label, value = LABEL_SCHEDULE, "default"
                _log.info(
                    "the node is not to share its cards any more", extra={"label": label, "value": value}
                )
                await self._writer.node_status(wanted_amounts(0, Rules(NodeMode.EXCLUSIVE)))
                self._writer.node_event("GPUSharingEnds", farewell(label, value, holders), warning=True)
                await self._writer.events.write_waiting()
        except (KubeError, TimeoutError) as error:
            _log.warning("node not tidied", extra={"error": str(error)})


def farewell(label: str, value: str | None, holders: list[str]) -> str:
    """What happens to the node and to the pods that hold slices of its cards, now that it has no agent."""
    whole = value in ("false", "default")
    if whole:
        said = f"label {label} is {value}: parts of cards are not given out any more"
    else:
        said = (
            f"label {label} is {'gone' if value is None else value}: nobody gives its cards out now, neither "
            f"shared nor whole; label it {label}=false for whole cards, {label}=true to share them"
        )
    if not holders:
        return said
    # kubelet asks the device plugin before each start
    again = "only where device-plugin-recover-ds runs" if whole else "by nobody"
    return (
        f"{said}; {len(holders)} pods keep what they hold until they end: {', '.join(holders[:5])}; a "
        f"container of theirs that ends meanwhile is started again {again}"
    )


def wanted_amounts(
    card_count: int, rules: Rules, offered: ResourceNames = VENDOR_NAMES
) -> dict[str, str | None]:
    """What the node status must say besides kubelet's devices; None for what it must no longer say.

    kubelet keeps resources that it does not know. What the node offered under other labels or names stays
    until somebody removes it, and pods that ask for it are sent there.
    """
    wanted: dict[str, str | None] = {}
    for names in NAME_SETS.values():
        shared = rules.shared and names == offered
        divided = shared and rules.divides_compute
        wanted[names.cards] = str(card_count) if shared else None
        wanted[names.compute] = str(card_count * WHOLE_CORE_PERCENT) if divided else None
    return wanted


def amounts_to_write(node: Node, wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    """Those of `wanted` that differ in capacity or allocatable."""
    sides = (node.status.capacity or {}, node.status.allocatable or {})
    return {
        name: amount
        for name, amount in wanted.items()
        if any(whole_number(side.get(name)) != whole_number(amount) for side in sides)
    }
