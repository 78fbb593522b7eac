"""The memory limits of containers that run: what their files say, what they use, and how that is changed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuslice.adapters.region.limits import LimitsEntry, LimitsError, parse_limits
from gpuslice.adapters.region.reader import RegionError, read_region
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.owner import Owner
from gpuslice.apps.agent.pods import NodePod
from gpuslice.core.grant import GrantError, grant_to
from gpuslice.core.model import ContainerRequest
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

Amounts = Mapping[str, int]
"""Bytes by card uuid."""
LOOKED_S = 1.5
"""After that a smaller limit is in force: each process has seen the file within 0.1 s of its next call
(native/src/policy/cards.c), and the driver was told where it enforces limits (`driver_limits`)."""


class LiveLimits:
    """`reported`: by pod uid, container and card uuid, the bytes that the driver last reported. `lent` tells
    for the same what it may have beyond its request.

    A container is left out whose folder is another's by now, or that has not started.
    """

    def __init__(
        self, state: AllocationState, folders: Folders, lent: Callable[[str, str, str], int]
    ) -> None:
        self._state = state
        self._folders = folders
        self.reported: Mapping[tuple[str, str, str], int] = {}
        self._lent = lent

    def of_request(self, pod: NodePod, container: ContainerRequest) -> Amounts:
        """What the container holds, and what is lent to it."""
        uid, name = pod.view.uid, container.name
        ids = self._state.listed_ids(uid, name)
        with contextlib.suppress(GrantError):
            limits = grant_to(container, ids, self._state.node).limits if ids else ()
            cards = {limit.card.uuid: limit.memory_mib * MIB for limit in limits}
            return {card: own + self._lent(uid, name, card) for card, own in cards.items()}
        return {}

    def in_force(self, pod: NodePod, container: str) -> Amounts:
        """What its file says; nothing for cards without a limit."""
        entries = self._entries(self._folder(pod, container))
        return {each.uuid: each.memory_bytes for each in entries if each.memory_bytes is not None}

    def change(self, pod: NodePod, container: str, amounts: Amounts) -> bool:
        """Write other limits; whether they differ. Raises OSError."""
        name = self._folder(pod, container)
        before = self._entries(name)
        after = [
            replace(each, memory_bytes=amounts.get(each.uuid, each.memory_bytes))
            if each.memory_bytes is not None
            else each
            for each in before
        ]
        if before == after:
            return False
        self._folders.change_limits(name, after)
        _log.info("limits changed", extra={"pod": pod.view.key, "container": container})
        return True

    def used(self, pod: NodePod, container: str) -> Amounts:
        """What its programs account for or the driver reports, whichever is more."""
        uid, cards = pod.view.uid, self.in_force(pod, container).keys()
        if not cards:
            return {}
        found = {card: self.reported.get((uid, container, card), 0) for card in cards}
        with contextlib.suppress(RegionError):
            reading = read_region(self._folders.region(self._folder(pod, container)), cards)
            for each in reading.cards if reading else ():
                found[each.uuid] = max(found[each.uuid], each.used_bytes)
        return found

    def _folder(self, pod: NodePod, container: str) -> str:
        """The folder of the container's device ids, "" if it is another's or nobody's."""
        ids = self._state.listed_ids(pod.view.uid, container)
        name = self._folders.current(ids) if ids else ""
        mine = Owner([], uid=pod.view.uid, container=container)
        return name if name and self._folders.owner(name).is_of(mine) else ""

    def _entries(self, folder: str) -> list[LimitsEntry]:
        with contextlib.suppress(LimitsError):
            return list(parse_limits(self._folders.owner(folder).limits)) if folder else []
        return []
