"""Goes through the folders: records owners that could not be identified at the start, and removes folders of
containers that are gone, off the event loop and a little at a time.

A tenant writes what it likes in its folder, so nothing found there may stop or delay the agent.
"""

from __future__ import annotations

import asyncio
import logging

from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.reconciler import Reconciler

_log = logging.getLogger(__name__)

BUDGET_S = 1.0
"""For each round: the disk is the node's, and others use it."""


class Sweeper:
    """Removes folders that neither kubelet nor a living pod knows any more, once they are `after_s` old."""

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
        """Sweep for ever. A failure is logged once and retried."""
        while True:
            await asyncio.sleep(self._every_s)
            if self._reconciler.problem:
                continue  # what kubelet lists is not known
            problem = ""
            try:
                await self.sweep()
            except Exception as error:  # a tenant can provoke anything
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
        """Record whose a folder is, and discard it if it is nobody's. Raises OSError.

        Discarded at once, since kubelet may reuse the ids at any moment.
        """
        owner = self._folders.owner(name)
        if self._folders.unidentified(owner) and name == self._folders.current(owner.ids):
            found = self._state.owner(frozenset(owner.ids))
            if found.pod:  # known by now, and recorded, since kubelet may forget it (`forgotten`)
                self._folders.identify(name, owner, found)
                owner = self._folders.owner(name)
        if age_s <= self._after_s:
            return
        if self._folders.unidentified(owner) and not owner.pod:
            return  # its unknown container may be running: it stays until the machine restarts
        last = name == self._folders.current(owner.ids)
        if self._state.living(owner.uid):  # used by its pod; of several folders for the same ids, the last is
            ids = self._state.listed_ids(owner.uid, owner.container)
            used = ids is None or (ids == frozenset(owner.ids) and last)
        else:  # or by the container that has its ids now, or by one that only kubelet knew
            used = last and not self._state.held_ids().isdisjoint(owner.ids)
            unlisted = (*self._state.maybe_forgotten(), *self._state.orphans)
            used |= any(each.folder == name for each in unlisted)
        if not used:
            self._folders.discard(name)
            _log.info("folder removed", extra={"token": name, "pod": f"{owner.namespace}/{owner.pod}"})
