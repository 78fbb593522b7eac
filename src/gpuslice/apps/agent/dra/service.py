"""Whether this node serves claims: if its label says so, and nobody holds its cards in another way.

After the label changes, claims are still served until the last one has ended; only then are the cards given
out in another way. So no card ever holds both kinds of pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from gpuslice.adapters.gpu.location import location
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import RESOURCE_CLAIMS
from gpuslice.adapters.kubelet.draplugin import DraAddress, DraServer
from gpuslice.adapters.web.serve import work_until
from gpuslice.apps.agent.active_lock import ActiveLock
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.cards import CardMonitor
from gpuslice.apps.agent.dra.driver import ClaimDriver
from gpuslice.apps.agent.dra.prepared import PreparedClaims
from gpuslice.apps.agent.dra.publisher import Devices, SlicePublisher
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.node_reconciler import NodeReconciler
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.units_in_force import UnitsInForce
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.claims import Pool, units_held
from gpuslice.core.contract import CLAIM_DRIVER
from gpuslice.core.placement import SPREAD

_log = logging.getLogger(__name__)

LOOK_S = 0.5
LOOKS_ON = 36
"""From this minor version of the API server on, kube-scheduler tries a node's next card if the first has too
little room. 1.35 does (kubernetes/kubernetes#133706), but while a cluster is upgraded, kube-scheduler may be
one version older than the API server, and 1.34 does not."""
SWEEP_S = 30.0
"""How often to look for claims that ended without kubelet reporting it."""


class ClaimService:
    """Registers with kubelet, publishes cards, prepares claims. `obstacle`: why nothing may be given out."""

    def __init__(
        self,
        client: KubeClient,
        state: AllocationState,
        folders: Folders,
        cards: CardMonitor,
        node: NodeReconciler,
        *,
        writer: Writer,
        units: UnitsInForce,
        lock: ActiveLock,
        settings: AgentSettings,
        obstacle: Callable[[], str],
    ) -> None:
        name = settings.node_name
        self.prepared = PreparedClaims(Path(settings.root), Path(settings.cdi_folder), folders)
        self.driver = ClaimDriver(
            client,
            state,
            folders,
            self.prepared,
            unit=lambda: units.unit,
            cdi_kind=settings.cdi_kind,
            obstacle=self._why_not,
            unhealthy=cards.reasons,
        )
        self.publisher = SlicePublisher(client, name, self._devices, self._node_uid, writer.not_repaired)
        self.server = DraServer(
            self.driver, DraAddress(CLAIM_DRIVER, Path(settings.dra_plugins), Path(settings.dra_registry))
        )
        self._client = client
        self._state = state
        self._cards = cards
        self._node = node
        self._lock = lock
        self._obstacle = obstacle
        self._units = units
        self._slots = settings.claim_slots
        self._first_card_only = False  # kube-scheduler looks at no other card of a node
        self._may_be_allocated = True  # claims that kubelet has not asked for yet; asked when switched away

    # -- whether it is open -----------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether kubelet needs this driver."""
        return self._state.rules.claims or self.prepared.ever

    def holders(self) -> str:
        """Why cards may not be given out in another way yet; "" if no claim holds one."""
        if not self.prepared.ever:
            return ""
        held = sorted(each.allocation.key for each in self.prepared.all())
        if held:
            return f"{len(held)} claims still hold parts of its cards ({', '.join(held[:5])})"
        return (
            "whether claims still hold parts of its cards is not known yet" if self._may_be_allocated else ""
        )

    def _why_not(self) -> str:
        if not self._state.rules.claims and not self.prepared.ever:
            return f"node {self._state.node.name} does not give out its cards by claims: its labels say so"
        return self._obstacle()

    def not_ready(self) -> str:
        if reason := self._why_not():
            return reason
        if self.publisher.problem or self.server.registered:
            return self.publisher.problem
        if self.server.refusal:
            return f"kubelet did not register the driver: {self.server.refusal}"
        return "kubelet has not registered us yet"

    # -- what is published --------------------------------------------------------------------------------

    def _devices(self) -> Devices:
        if not self._state.rules.claims or self._obstacle():
            return []
        if not self.server.registered and (self.publisher.withdrawn or self.server.refusal):
            return []  # a kubelet that knows no claims would start their pods without a card and a limit
        pool = Pool(
            self._state.node.name,
            self._state.node.cards,
            unit=self._units.unit,
            divides_compute=self._state.rules.divides_compute,
            by_driver=self._state.by_driver.cards,
            driver_version=self._cards.driver_version,
            slots=self._slots,
            unhealthy=self._cards.reasons(),
            locations={index: location(bus_id) for index, bus_id in self._cards.bus_ids.items()},
            links=self._cards.links,
        )
        held = units_held(each.allocation for each in self.prepared.all())
        return pool.devices(held, spread=self._node.packing == SPREAD or self._first_card_only)

    def _node_uid(self) -> str:
        return self._node.seen.metadata.uid if self._node.seen else ""

    # -- running ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve for ever, while wanted. The lock is held."""
        while True:
            while not self.wanted:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            self._may_be_allocated = True
            self.prepared.begin()
            tasks = {
                "claims": self.server.run(),
                "resource slices": self.publisher.run(),
                "what others change": self._look_after(),
            }
            with self._lock.serving():
                await work_until(self._until_left(), tasks)
            _log.info("leaving claims: the node's labels say so, and none holds a part of its cards")

    async def _look_after(self) -> None:
        """Release claims that vanished, and follow the cluster's version."""
        while True:
            try:
                await self.driver.forget_vanished()
                self._first_card_only = 0 < await self._client.minor_version() < LOOKS_ON
            except (KubeError, OSError) as error:
                _log.warning("ended claims not looked for, will try again", extra={"error": str(error)})
            await asyncio.sleep(SWEEP_S)

    async def _until_left(self) -> None:
        """Wait until the node is switched away and no claim is allocated here any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._state.rules.claims:
                self._may_be_allocated = True
                continue
            if self.prepared.all() or not (self.publisher.withdrawn or self.publisher.problem):
                continue
            try:
                found = (await self._client.list(RESOURCE_CLAIMS)).items
            except NotFoundError:  # the cluster has no claims at all
                self._may_be_allocated = False
            except KubeError as error:
                _log.warning("claims not read, will try again", extra={"error": str(error)})
            else:
                self._may_be_allocated = any(
                    result.driver == CLAIM_DRIVER and result.pool == self._state.node.name
                    for each in found or ()
                    if each.status.allocation is not None
                    for result in each.status.allocation.devices.results or ()
                )
            if not self._may_be_allocated and not self.prepared.all():
                with contextlib.suppress(OSError):
                    self.prepared.end()
                    return
