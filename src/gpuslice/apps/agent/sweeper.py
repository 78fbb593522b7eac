"""Goes through the folders: notes whose they are where a start could not tell, removes those of containers
that are gone, off the event loop and a little at a time.

A tenant writes in its folder what it likes, so nothing that is found there may stop the agent or hold it up.
"""

from __future__ import annotations

import asyncio
import logging

from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders, Owner
from gpuslice.apps.agent.reconciler import Reconciler

_log = logging.getLogger(__name__)

BUDGET_S = 1.0
"""Of each round: the disk is the node's, and others use it."""


class Sweeper:
    """Removes what neither kubelet nor a living pod knows any more, once it is `after_s` old."""

    def __init__(
        self,
        state: AllocationState,
        reconciler: Reconciler,
        folders: Folders,
        *,
        every_s: float = 5.0,
        after_s: float = 120.0,
    ) -> None:
        self._state = state
        self._reconciler = reconciler
        self._folders = folders
        self._every_s = every_s
        self._after_s = after_s
        self._problem = ""

    async def run(self) -> None:
        """Sweep for ever. Whatever goes wrong is logged once and tried again."""
        while True:
            await asyncio.sleep(self._every_s)
            if self._reconciler.problem:
                continue  # what kubelet lists is not known
            problem = ""
            try:
                await self.sweep()
            except Exception as error:  # whatever a tenant has thought of
                problem = f"{type(error).__name__}: {error}"
                if problem != self._problem:
                    _log.warning("folders not swept, will try again", exc_info=error)
            self._problem = problem

    async def sweep(self) -> None:
        """One round. Raises OSError for what cannot be removed, after everything else was."""
        failure: OSError | None = None
        for name, _, age_s in await asyncio.to_thread(lambda: list(self._folders.owners())):
            try:
                self._look_at(name, age_s)
            except OSError as error:
                failure = error
        await asyncio.to_thread(self._folders.sweep_libraries, self._after_s)
        await asyncio.to_thread(self._folders.empty_trash, BUDGET_S)
        if failure is not None:
            raise failure

    def _look_at(self, name: str, age_s: float) -> None:
        """Note whose a folder is, and discard it if it is nobody's. At once: kubelet may ask for the same ids
        any moment. Raises OSError."""
        owner = self._identified(name, self._folders.owner(name))
        if age_s <= self._after_s:
            return
        if self._folders.unidentified(owner) and not owner.pod:
            return  # whoever was started there may run: it stays until the machine starts anew
        last = name == self._folders.current(owner.ids)
        if self._state.alive(owner.uid):  # used by its pod; of several for the same ids the last is
            ids = self._state.listed_ids(owner.uid, owner.container)
            used = ids is None or (ids == frozenset(owner.ids) and last)
        else:  # or by the one with its ids now, or by one that only kubelet knew
            used = last and not self._state.held_ids().isdisjoint(owner.ids)
            used |= any(each.folder == name for each in self._state.maybe_forgotten())
        if not used:
            self._folders.discard(name)
            _log.info("folder removed", extra={"token": name, "pod": f"{owner.namespace}/{owner.pod}"})

    def _identified(self, name: str, owner: Owner) -> Owner:
        """As it is once somebody can tell whose container was started there when nobody could. It is noted:
        kubelet may forget the container (`forgotten`)."""
        if not self._folders.unidentified(owner) or name != self._folders.current(owner.ids):
            return owner
        found = self._state.owner(frozenset(owner.ids))
        if not found.pod:
            return owner
        self._folders.identify(name, owner, found)
        return self._folders.owner(name)
