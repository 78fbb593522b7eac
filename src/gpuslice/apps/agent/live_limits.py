"""The memory limits of containers that run: what their files say, what they use, and how that is changed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuslice.adapters.region.limits import LimitsEntry, LimitsError, parse_limits
from gpuslice.adapters.region.reader import CardUsage, RegionError, read_region
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


class LiveLimits:
    """`reported`: by pod uid, container and card uuid, the bytes that the driver last reported. `lent` tells
    for the same what it may have beyond its request.

    A changed limit is in force in each of a container's processes at once: whoever allocates looks after it
    has accounted for that (native/src/policy/cards.c). The driver, where it enforces limits, is told next.

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
        entries = self.entries(pod, container)
        return {each.uuid: each.memory_bytes for each in entries if each.memory_bytes is not None}

    def entries(self, pod: NodePod, container: str) -> list[LimitsEntry]:
        """All that its file says."""
        return self._entries(self._folder(pod, container))

    def change(self, pod: NodePod, container: ContainerRequest, amounts: Amounts) -> bool:
        """Write other limits; whether they differ. Raises OSError."""
        name, uid = self._folder(pod, container.name), pod.view.uid
        before = self._entries(name)
        after = []
        for each in before:
            most = amounts.get(each.uuid, each.memory_bytes)
            lent = self._lent(uid, container.name, each.uuid)
            if most is None or each.memory_bytes is None:
                after.append(each)
                continue
            own = most - lent if lent or container.borrowable else None
            shown = own is not None and pod.shows_request
            after.append(replace(each, memory_bytes=most, request_bytes=own, shows_request=shown))
        if before == after:
            return False
        self._folders.change_limits(name, after)
        self._state.by_driver.limits_changed.set()
        _log.info("limits changed", extra={"pod": pod.view.key, "container": container.name})
        return True

    def driver_knows(self, pod: NodePod, container: str) -> bool:
        """Whether the driver, if it enforces the container's limits, has been told those of its file."""
        name, by_driver = (pod.view.uid, container), self._state.by_driver
        limits = self._folders.owner(self._folder(pod, container)).limits
        return name not in by_driver.containers or by_driver.applied.get(name) == limits

    def ask_back(self, pod: NodePod, container: str) -> Amounts:
        """What its programs hold beyond their limits, by card; they are asked to give that back. Raises
        OSError.
        """
        used, limits = self.used(pod, container), self.in_force(pod, container)
        excesses = {card: max(0, used.get(card, 0) - limit_bytes) for card, limit_bytes in limits.items()}
        if name := self._folder(pod, container):
            self._folders.ask_back(name, excesses)
        return excesses

    def used(self, pod: NodePod, container: str) -> Amounts:
        """What its programs account for or the driver reports, whichever is more."""
        accounts, uid = self.accounts(pod, container), pod.view.uid
        return {
            card: max(
                self.reported.get((uid, container, card), 0),
                accounts[card].used_bytes if card in accounts else 0,
            )
            for card in self.in_force(pod, container)
        }

    def accounts(self, pod: NodePod, container: str) -> Mapping[str, CardUsage]:
        """What its programs account for, by card; nothing that cannot be read."""
        cards = self.in_force(pod, container).keys()
        with contextlib.suppress(RegionError, OSError):
            reading = (
                read_region(self._folders.region(self._folder(pod, container)), cards) if cards else None
            )
            return {each.uuid: each for each in (reading.cards if reading else ())}
        return {}

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
