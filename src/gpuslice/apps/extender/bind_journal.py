"""The pods for which a Binding may be in flight, written down before any is sent: a write-ahead log.

A Binding carries the annotations, so that one write binds a pod. But a new leader must know the pods for
which a Binding of an earlier leader may still arrive, and change the version of each before it gives their
cards to others. The journal names these pods: it is a Lease whose holder alone may send Bindings, with the
pods' uids in an annotation.

One write of the journal covers many Bindings (group commit): besides the pods that are being bound and those
that filter has let pass, it names the next pods of the queue. Every write is conditional on the version of
the previous one, so that an earlier holder can add nothing once a new holder has claimed the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from uuid import uuid4

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.lease import LeaseSettings
from gpuslice.adapters.kube.objects import Lease, LeaseSpec, Metadata
from gpuslice.adapters.kube.resources import LEASES
from gpuslice.apps.extender.subscriber import FilterVerdict, Subscriber
from gpuslice.core.contract import ANN_BINDS

_log = logging.getLogger(__name__)

AHEAD = 256  # pods named before kube-scheduler gets to them; each costs a new leader at most two requests
RETRY_S = 0.5


class BindJournal(Subscriber):
    """The journal next to the leader's `lease`, as one process keeps it.

    `ahead` returns the pods that follow a given one in the queue; `taken` is called if another replica has
    claimed the journal.
    """

    def __init__(
        self,
        client: KubeClient,
        lease: LeaseSettings,
        ahead: Callable[[str], Iterable[str]],
        taken: Callable[[], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._lease_name = f"{lease.name}-binds"
        self._namespace = lease.namespace
        self._holder = f"{lease.identity}_{uuid4()}"  # distinguishes us from an earlier process of this pod
        self._ahead = ahead
        self._taken = taken
        self._sleep = sleep
        self._version = ""  # of the last write that we know of
        self._named: frozenset[str] = frozenset()  # uids in the journal, whatever a write in flight does
        self._open: set[str] = set()  # uids of pods for which a Binding may be in flight
        self._wanted: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._news = asyncio.Event()

    async def claim(self) -> frozenset[str]:
        """Make the journal ours; returns the uids of pods that must be fenced before any other write.

        They stay in the journal meanwhile, in case another replica takes over before that is done. Raises
        `KubeError`.
        """
        try:
            before = await self._client.get(LEASES, self._lease_name, self._namespace)
        except NotFoundError:
            left: list[str] = []
            written = await self._client.create(LEASES, self._lease("", left))
        else:
            left = lease_uids(before)
            written = await self._client.replace(LEASES, self._lease(before.metadata.resource_version, left))
        self._version, self._named = written.metadata.resource_version, frozenset(left)
        return self._named

    def decided(self, verdict: FilterVerdict) -> None:
        """A pod that passes will be bound soon: name it now, so that its bind need not wait."""
        if len(verdict.passed) and verdict.is_known and verdict.pod.request is not None:
            self._name(verdict.pod.uid)

    def _name(self, uid: str) -> None:
        if uid not in self._named:
            self._wanted[uid] = None
            self._wake.set()

    async def enter(self, uid: str) -> bool:
        """True once the pod is named and a Binding may be sent; call `leave` when its outcome is known.

        False if this replica no longer leads.
        """
        while uid not in self._named:
            if not self.leads:
                return False
            self._name(uid)
            await self._news.wait()
        self._open.add(uid)
        return True

    def stopped_leading(self) -> None:
        """Wake those who wait for a journal that is no longer ours to write."""
        super().stopped_leading()
        self._wake.set()

    def leave(self, uid: str) -> None:
        """No Binding of the pod is in flight any more."""
        self._open.discard(uid)

    async def run(self) -> None:
        """Write the journal whenever a pod is missing in it, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self.leads:
                self._wanted.clear()
                self._tell()
            if not self._wanted:
                continue
            try:
                await self._write()
            except KubeError as error:
                _log.warning("journal of binds not written, will retry", extra={"error": str(error)})
                await self._sleep(RETRY_S)
                await self._look()
                self._wake.set()

    async def _write(self) -> None:
        names = dict.fromkeys([*self._open, *self._wanted])
        names.update(dict.fromkeys(islice(self._ahead(next(reversed(self._wanted))), AHEAD)))
        wanted, self._wanted = self._wanted, {}
        # the content is this or the previous one until the write is answered
        self._named = self._named.intersection(names)
        try:
            written = await self._client.replace(LEASES, self._lease(self._version, names))
        except KubeError:
            self._wanted = wanted | self._wanted  # those who wait keep waiting until a write has succeeded
            raise
        self._version, self._named = written.metadata.resource_version, frozenset(names)
        self._tell()

    async def _look(self) -> None:
        """After a write that failed or may have: read the journal, and see whether it is still ours."""
        try:
            lease = await self._client.get(LEASES, self._lease_name, self._namespace)
        except NotFoundError:
            lease = Lease()
        except KubeError:
            return
        if lease.spec.holder_identity == self._holder:
            self._version = lease.metadata.resource_version
            return
        _log.warning("journal of binds taken by another", extra={"holder": lease.spec.holder_identity or ""})
        self._named = frozenset()
        self.stopped_leading()
        self._taken()

    def _lease(self, version: str, uids: Iterable[str]) -> Lease:
        metadata = Metadata(
            name=self._lease_name,
            namespace=self._namespace,
            resource_version=version,
            annotations={ANN_BINDS: ",".join(uids)},
        )
        return Lease(metadata=metadata, spec=LeaseSpec(holder_identity=self._holder))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def lease_uids(lease: Lease) -> list[str]:
    """The uids that a journal names."""
    text = (lease.metadata.annotations or {}).get(ANN_BINDS, "")
    return [uid for uid in text.split(",") if uid]
