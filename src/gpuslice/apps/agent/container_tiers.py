"""What enforces each container's limits: the driver, or the library in every process that the driver reports.

Where only the library does, a program into which it was not loaded gets its memory all the same, and only the
driver's figures show it. Then only the watchdog enforces the limit, and the pod is annotated with that.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.region.figures import Figure, write_figures
from gpuslice.adapters.region.living import Identity
from gpuslice.adapters.region.reader import RegionError, read_region
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.contract import LABEL_MIN_TIER
from gpuslice.core.model import Tier
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

REASON = "GPULimitHeldByWatchdog"

KEPT_S = 60.0
"""How long a container counts as having a process without the library after that was last seen.

The region is the tenant's: accounts that come and go there would cause a write each time.
"""

ContainerName = tuple[str, str]
"""The pod's uid and the container's name."""


class ContainerTiers:
    """Compares the driver's list of processes with the region, and annotates pods with the result."""

    def __init__(
        self, state: AllocationState, folders: Folders, writer: Writer, *, allow_cgpu_disable: bool
    ) -> None:
        self._state = state
        self._folders = folders
        self._writer = writer
        self._allow_cgpu_disable = allow_cgpu_disable
        self._without: frozenset[tuple[ContainerName, Figure]] = frozenset()  # processes, at the last check
        self.kept_s = KEPT_S
        self._loose: dict[ContainerName, float] = {}  # when a process without it was last seen

    def tiers(self) -> Iterator[tuple[NodePod, str, Tier]]:
        """Of each container that asks for a part of a card."""
        rules, allowed = self._state.rules, self._allow_cgpu_disable
        bare = {(each.uid, each.container) for each in self._folders.records.values() if not each.preloaded}
        for pod in self._state.pods():
            for container in pod.view.request.containers if pod.view.request and pod.holds_slices else ():
                tier = pod.tier(container.name, rules, allow_cgpu_disable=allowed)
                name = pod.view.uid, container.name
                if tier is Tier.LIBRARY:
                    if name in self._state.by_driver.containers:
                        tier = Tier.DRIVER
                    elif container.name not in pod.running:
                        tier = self._state.by_driver.tier(rules, self._state.node.cards)  # as it will start
                    elif name in self._loose or name in bare:
                        tier = Tier.WATCHDOG
                yield pod, container.name, tier

    async def judge(self, figures: Mapping[ContainerName, Sequence[Figure]]) -> None:
        """One check, with what the driver reports of each container's processes.

        A process counts as one without the library if two checks in a row find no account of it, since it may
        be starting. What cannot be written to the API server is retried with the next check.
        """
        with_account = counted(self._folders, figures)
        without = {
            (place, each._replace(memory_bytes=0)): each
            for place, processes in figures.items()
            for each in processes
            if place in with_account and (each.pid, each.start_time) not in with_account[place]
        }
        loose = {place: without[place, each] for place, each in without if (place, each) in self._without}
        now_s = time.monotonic()
        kept = {place: seen_s for place, seen_s in self._loose.items() if now_s - seen_s < self.kept_s}
        new = loose.keys() - kept.keys()
        self._without, self._loose = frozenset(without), kept | dict.fromkeys(loose, now_s)
        node_tier = self._state.by_driver.tier(self._state.rules, self._state.node.cards)
        said: dict[str, tuple[NodePod, dict[str, Tier]]] = {}
        for pod, name, tier in self.tiers():
            _, tiers = said.setdefault(pod.view.uid, (pod, {}))
            if tier is not node_tier:
                tiers[name] = tier
            if (pod.view.uid, name) in new and tier is Tier.WATCHDOG:
                self._warn(pod, name, loose[pod.view.uid, name])
        for pod, tiers in said.values():
            if tiers == pod.tiers:
                continue
            try:
                await self._writer.tiers(pod.view, tiers)
            except KubeError as error:
                _log.warning("tiers not written", extra={"pod": pod.view.key, "error": str(error)})

    def _warn(self, pod: NodePod, container: str, process: Figure) -> None:
        wanted = pod.view.request.min_tier if pod.view.request else Tier.NONE
        asked = f"; the pod asks for {LABEL_MIN_TIER}={wanted.word}" if wanted > Tier.WATCHDOG else ""
        what = (
            f"container {container}: process {process.pid} holds {process.memory_bytes // MIB} MiB of card "
            f"{process.uuid} without libgpuslice in it, so only the watchdog holds its limit{asked}"
        )
        _log.warning("process without the library", extra={"pod": pod.view.key, "pid": process.pid})
        self._writer.pod_event(pod.view, REASON, what)


def publish(folders: Folders, figures: Mapping[ContainerName, Sequence[Figure]], at_ns: int) -> None:
    """Publish what the driver reports of each container's processes, at monotonic `at_ns`.

    Raises OSError.
    """
    for place, folder in folders.of_containers().items() if figures else ():
        if own := figures.get(place):
            write_figures(folder / "etc" / "figures", own, at_ns)


def counted(
    folders: Folders, figures: Mapping[ContainerName, Sequence[Figure]]
) -> dict[ContainerName, frozenset[Identity]]:
    """The processes that have accounts in the region, on the cards of `figures`.

    A container whose region cannot be read is left out, since nothing is known of it.
    """
    known, found = folders.of_containers(), {}
    for name, own in figures.items():
        with contextlib.suppress(RegionError, OSError, KeyError):
            reading = read_region(known[name] / "var" / "region", {each.uuid for each in own})
            processes = (each for card in (reading.cards if reading else ()) for each in card.processes)
            found[name] = frozenset(Identity(each.pid, each.start_time) for each in processes)
    return found
