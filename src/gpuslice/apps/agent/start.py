"""The last moment before a container's first instruction: whose ids are these, and what is it allowed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from grpclib import GRPCError, Status

from gpuslice.adapters.kubelet.podresources import PodResourcesError
from gpuslice.adapters.region.limits import LimitsError
from gpuslice.apps.agent.bookkeeper import Bookkeeper
from gpuslice.apps.agent.desk import Desk, Holder
from gpuslice.apps.agent.folders import Folders, Owner
from gpuslice.apps.agent.metrics import Counters
from gpuslice.core.grant import GrantError, container_grant
from gpuslice.core.mode import Rules

_log = logging.getLogger(__name__)

IDENTIFY_S = 3.0
"""kubelet waits 30 s for PreStartContainer and tries again after an error, so this may take its time."""

ANNOTATE_S = 3.0
RETRY_S = 0.1


class Starter:
    """Answers PreStartContainer: limits for exactly this container, a fresh region, true annotations."""

    def __init__(
        self,
        desk: Desk,
        bookkeeper: Bookkeeper,
        folders: Folders,
        rules: Callable[[], Rules],
        counters: Counters,
    ) -> None:
        self._desk = desk
        self._bookkeeper = bookkeeper
        self._folders = folders
        self._rules = rules
        self._counters = counters

    async def start(self, ids: frozenset[str]) -> None:
        """Prepare the start of the container with these ids. GRPCError when it must not start yet.

        The limit of memory follows from the ids alone, so a container that cannot be told from others still
        gets its own. A share of compute does not: where compute is divided, unknown means not yet.
        """
        holder = await self._identify(ids)
        told = holder is not None and holder.container is not None and not self._bookkeeper.problem
        if self._rules().divides_compute and not told:
            raise GRPCError(
                Status.UNAVAILABLE, "kubelet's book does not tell yet which container this is; try again"
            )
        try:
            self._check_room(ids, holder)
            self._prepare(ids, holder)
        except (GrantError, LimitsError, OSError) as error:
            raise GRPCError(Status.FAILED_PRECONDITION, str(error)) from error
        await self._annotate(holder)
        self._check_reading(holder)

    def _check_reading(self, holder: Holder | None) -> None:
        """Put the start off when the environment was made of annotations that have been corrected since.

        kubelet reads them when it begins to sync the pod; its next try begins with the new ones.
        """
        if holder is None or holder.container is None or holder.container.name not in holder.pod.reading:
            return
        if self._bookkeeper.take_moved(holder.pod.view.uid):
            raise GRPCError(
                Status.UNAVAILABLE, "the pod's annotations were corrected to its card; try again with them"
            )

    async def _identify(self, ids: frozenset[str]) -> Holder | None:
        """By kubelet's book, read anew; by what was granted when the book does not show it."""
        deadline = asyncio.get_running_loop().time() + IDENTIFY_S
        while True:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + IDENTIFY_S):
                    await self._bookkeeper.read()
            except (PodResourcesError, TimeoutError) as error:
                _log.warning("container start: kubelet's book not read", extra={"error": str(error)})
            holder = self._desk.holder(ids)
            if holder is not None or asyncio.get_running_loop().time() >= deadline:
                return holder
            await asyncio.sleep(RETRY_S)

    def _check_room(self, ids: frozenset[str], holder: Holder | None) -> None:
        """The last word on a card where kubelet gave away what a container that it forgot still uses."""
        refusal = self._desk.crowded(ids, holder.pod.view.uid) if holder else None
        if refusal is not None:
            self._counters.refused("crowded")
            raise GRPCError(Status.FAILED_PRECONDITION, refusal.reason)

    def _prepare(self, ids: frozenset[str], holder: Holder | None) -> None:
        self._counters.started("no" if holder is None else "exactly" if holder.exact else "by its pod")
        if not (self._rules().isolation or self._folders.exists(ids)):
            return
        container = holder.container if holder else None
        percent = container.compute_percent if container else 0
        grant = container_grant(ids, self._desk.node, compute_percent=percent)
        exempt = holder is not None and container is not None and container.name in holder.pod.unlimited
        kept = {each.folder for each in self._desk.forgotten()} if holder else ()
        self._folders.start(
            ids,
            grant.limits,
            _owner(ids, holder),
            limited=not exempt,
            policy=self._rules().compute_policy,
            interactive=holder is not None and holder.pod.interactive,
            kept=kept,
        )

    async def _annotate(self, holder: Holder | None) -> None:
        """Before the container can read its annotations, if the API server answers; else soon after."""
        if holder is None:
            return
        try:
            async with asyncio.timeout(ANNOTATE_S):
                await self._bookkeeper.write(holder.pod.view.uid)
        except TimeoutError:
            _log.warning("container start: API server too slow", extra={"pod": holder.pod.view.key})
            self._bookkeeper.look()


def _owner(ids: frozenset[str], holder: Holder | None) -> Owner:
    if holder is None:
        return Owner(sorted(ids))
    pod = holder.pod.view
    name = holder.container.name if holder.container else ""
    return Owner(sorted(ids), pod.uid, pod.namespace, pod.name, name)
