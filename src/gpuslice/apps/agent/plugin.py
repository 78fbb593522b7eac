"""From kubelet's question to a granted container: its device ids, what comes with them, and a last check.

kubelet asks three times for each container: GetPreferredAllocation when it admits the pod, Allocate right
after that, and PreStartContainer before each start. Only at the last one is it certain whose ids these are,
so limits are written there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from grpclib import GRPCError, Status

from gpuslice.adapters.kubelet.podresources import PodResourcesError
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import DevicePluginService
from gpuslice.adapters.region.limits import LimitsEntry, LimitsError
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.device_list import DeviceList
from gpuslice.apps.agent.driver_limits import DriverLimits
from gpuslice.apps.agent.folders import Folders, HostMount, refusal_of
from gpuslice.apps.agent.lender import Lender
from gpuslice.apps.agent.library import IsolationMissingError
from gpuslice.apps.agent.limit_entries import entries
from gpuslice.apps.agent.pending import Proposal, Recipient
from gpuslice.apps.agent.pods import Holder
from gpuslice.apps.agent.reconciler import Reconciler
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.status import Counters
from gpuslice.core.contract import (
    ENV_CARD_UNITS,
    ENV_CONTAINER_UNITS,
    ENV_INDEX,
    ENV_POD_UNITS,
    ENV_VISIBLE,
    LABEL_MIN_TIER,
)
from gpuslice.core.grant import GrantError, container_grant, grant_to, units_per_card
from gpuslice.core.model import Refusal, Tier

T = TypeVar("T")
_log = logging.getLogger(__name__)

IDENTIFY_S = 3.0
"""kubelet waits 30 s for PreStartContainer and retries after an error, so this may take its time."""

ANNOTATE_S = 3.0
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """The settings that affect the answers to kubelet."""

    match_wait_s: float = 1.0
    memory_unit: str = "GiB"
    legacy_poison_env: bool = False
    cdi_kind: str = ""
    allow_cgpu_disable: bool = False


def plugin_options(settings: AgentSettings, memory_unit: str) -> PluginOptions:
    return PluginOptions(
        settings.match_wait_s,
        memory_unit,
        settings.legacy_poison_env,
        settings.cdi_kind,
        settings.allow_cgpu_disable,
    )


class GpuMemoryPlugin(DevicePluginService):
    """The device plugin of ``aliyun.com/gpu-mem``."""

    def __init__(
        self,
        state: AllocationState,
        devices: DeviceList,
        folders: Folders,
        reconciler: Reconciler,
        *,
        limits: DriverLimits,
        lender: Lender,
        counters: Counters,
        ask_for_news: Callable[[], None],
        options: PluginOptions = PluginOptions(),
    ) -> None:
        self._state = state
        self._devices = devices
        self._folders = folders
        self._reconciler = reconciler
        self._driver_limits = limits
        self._lender = lender
        self._counters = counters
        self._ask_for_news = ask_for_news  # kubelet may know a pod that our watch has not shown
        self._options = options
        self._in_vain: dict[int, float] = {}  # size → until when waiting for it again is pointless

    async def get_device_plugin_options(self, request: dp.Empty) -> dp.DevicePluginOptions:
        return dp.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    def list_and_watch(self, request: dp.Empty) -> AsyncGenerator[dp.ListAndWatchResponse]:
        self._state.kubelet_came(self._folders.running(), self._folders.granted())
        self._reconciler.wake()
        return self._devices.messages()

    # -- which ids ------------------------------------------------------------------------------------

    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest
    ) -> dp.PreferredAllocationResponse:
        answers = [await self._propose(each) for each in request.container_requests]
        return dp.PreferredAllocationResponse(container_responses=answers)

    async def _propose(
        self, request: dp.ContainerPreferredAllocationRequest
    ) -> dp.ContainerPreferredAllocationResponse:
        """Ids on the card where the extender placed the pod that kubelet is probably asking for."""
        state, size = self._state, request.allocation_size

        def expected() -> bool:
            """Whether a container of that size waits and is not running. Irrelevant with one card."""
            runs = {each.name for each in state.maybe_forgotten()}
            return state.places_unplaced or any(
                each.units == size and (each.pod.view.uid, each.container.name) not in runs
                for each in state.acceptable()
            )

        def proposed() -> Proposal | Refusal:
            return state.propose(request.available_deviceIDs, request.must_include_deviceIDs, size)

        def final(answer: Proposal | Refusal) -> bool:
            """A container that kubelet seems to have forgotten may just have ended: the API server knows."""
            return isinstance(answer, Proposal) or not state.maybe_forgotten()

        await self._until(size, expected, bool)
        proposal = await self._until(size, proposed, final)
        if isinstance(proposal, Refusal):
            self._counters.refused["no room"] += 1
            raise GRPCError(Status.FAILED_PRECONDITION, proposal.reason)
        return dp.ContainerPreferredAllocationResponse(deviceIDs=proposal.ids)

    # -- what comes with them -------------------------------------------------------------------------

    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse:
        answers = [await self._grant(frozenset(each.devices_ids)) for each in request.container_requests]
        return dp.AllocateResponse(container_responses=answers)

    async def _grant(self, ids: frozenset[str]) -> dp.ContainerAllocateResponse:
        """Environment, mounts and CDI devices for the container that `ids` are for, or why not."""
        state = self._state
        if not state.rules.shared and not ids <= state.ids_of_living():  # a holder may just have ended
            reason = f"node {state.node.name} does not share its cards any more: its labels say so"
            return self._refuse("no match", reason, len(ids))
        try:
            recipient = await self._until(
                len(ids), lambda: state.recipient(ids), lambda answer: isinstance(answer, Recipient)
            )
            if isinstance(recipient, Refusal):
                return self._refuse("no match", recipient.reason, len(ids))
            isolation, pod = state.rules.isolation, state.pod(recipient.uid)
            pod_units = pod.view.request.units if pod and pod.view.request else None
            grant = container_grant(ids, state.node, pod_units=pod_units, isolation=isolation)
            occupied = {each.folder for each in (*state.maybe_forgotten(), *state.orphans)}
            mounts: tuple[HostMount, ...] = ()
            kind = self._options.cdi_kind
            devices = [f"{kind}={limit.card.uuid}" for limit in grant.limits if kind]
            if isolation:
                by_driver, to = state.by_driver.holds(ids), recipient.pending
                receiver = to.container if to else None
                mounts = self._folders.grant(
                    ids,
                    occupied,
                    limits_compute=state.rules.limits_compute,
                    preloaded=not by_driver or self._driver_limits.needs_library(receiver),
                    hooked=by_driver,
                )
                if by_driver:
                    self._driver_limits.hook.write()
                    # the last: its hook comes after that of NVIDIA's toolkit
                    devices.append(self._driver_limits.hook.device(self._folders.current(ids)))
        except GrantError as error:
            return self._refuse("foreign device", str(error), len(ids))
        except (IsolationMissingError, OSError) as error:
            return self._refuse("host", refusal_of(error), len(ids))
        state.granted(ids, recipient)
        self._counters.granted += 1
        self._reconciler.wake()
        probably_for = recipient.pending.pod.view.key if recipient.pending else ""
        cards = grant.environment[ENV_INDEX]
        _log.info("granted", extra={"cards": cards, "units": len(ids), "probably_for": probably_for})
        return dp.ContainerAllocateResponse(
            envs=grant.environment,
            mounts=[
                dp.Mount(
                    container_path=each.container_path, host_path=each.host_path, read_only=each.read_only
                )
                for each in mounts
            ],
            cdi_devices=[dp.CDIDevice(name=each) for each in devices],
        )

    def _refuse(self, why: str, reason: str, units: int) -> dp.ContainerAllocateResponse:
        """An error, so that a controller recreates the pod; optionally what the vendor's plugin answers."""
        self._counters.refused[why] += 1
        _log.warning("refused", extra={"reason": reason, "units": units})
        if self._options.legacy_poison_env:
            return dp.ContainerAllocateResponse(envs=poison(units, self._options.memory_unit))
        raise GRPCError(Status.FAILED_PRECONDITION, reason)

    # -- the last moment before the container's first instruction ---------------------------------------

    async def pre_start_container(self, request: dp.PreStartContainerRequest) -> dp.PreStartContainerResponse:
        """Find out whose ids these are, write the limits and a fresh region, and correct the annotations.

        The memory limit follows from the ids alone, so a container that cannot be identified still gets its
        own. A share of compute does not: where compute is divided, an unidentified container may not start
        yet.
        """
        ids, state = frozenset(request.devices_ids), self._state
        holder = await self._identify(ids)
        container = holder.container if holder else None
        if state.rules.divides_compute and (container is None or self._reconciler.problem):
            raise GRPCError(Status.UNAVAILABLE, "kubelet does not list this container yet; try again")
        try:
            if refusal := state.crowded(ids, holder.pod.view.uid if holder else ""):
                self._counters.refused["crowded"] += 1
                raise GRPCError(Status.FAILED_PRECONDITION, refusal.reason)
            if holder and (reason := self._unheld(ids, holder)):
                self._counters.refused["tier"] += 1
                raise GRPCError(Status.FAILED_PRECONDITION, reason)
            self._lender.starts(ids)
            if not await self._lender.make_room(
                units_per_card(ids), holder.pod.view if holder else None, container.name if container else ""
            ):
                raise GRPCError(Status.UNAVAILABLE, "what others borrowed of its card is being called back")
            identified = "no" if holder is None else "exactly" if holder.exact else "by its pod"
            self._counters.started[identified] += 1
            if state.rules.isolation or self._folders.exists(ids):
                self._write_limits(ids, holder)
        except (GrantError, LimitsError, OSError) as error:
            self._counters.refused["foreign device" if isinstance(error, GrantError) else "host"] += 1
            _log.warning("start refused", extra={"reason": refusal_of(error), "units": len(ids)})
            raise GRPCError(Status.FAILED_PRECONDITION, refusal_of(error)) from error
        if holder is None:
            return dp.PreStartContainerResponse()

        uid = holder.pod.view.uid
        try:  # before the container can read its annotations, if the API server answers; otherwise soon after
            async with asyncio.timeout(ANNOTATE_S):
                await self._reconciler.write(uid)
        except TimeoutError:
            _log.warning("container start: API server too slow", extra={"pod": holder.pod.view.key})
            self._reconciler.wake()
        # kubelet reads annotations for the environment when it begins to sync the pod: its next attempt uses
        # the corrected ones
        reads = container is not None and container.name in holder.pod.reading
        if reads and self._reconciler.take_corrected(uid):
            raise GRPCError(
                Status.UNAVAILABLE, "the pod's annotations were corrected to its card; try again with them"
            )
        return dp.PreStartContainerResponse()

    def _unheld(self, ids: frozenset[str], holder: Holder) -> str:
        """Why the container may not start: nothing would enforce its limits as it must be; "" if it may."""
        pod, name = holder.pod, holder.container.name if holder.container else ""
        rules, allowed = self._state.rules, self._options.allow_cgpu_disable
        owner = self._folders.owner(self._folders.current(ids))
        for each, wrong in pod.hiding.items():
            # if kubelet does not say which one it is, it may be this one, without which the pod is not whole
            meant = owner.preloaded and (each == name or not holder.exact)
            if meant and pod.tier(each, rules, allow_cgpu_disable=allowed) is Tier.LIBRARY:
                return f"pod {pod.view.key}: {wrong}"
        tier = pod.tier(name, rules, allow_cgpu_disable=allowed)
        by_driver = tier is Tier.LIBRARY and owner.hooked and self._state.by_driver.holds(ids)
        if not (owner.preloaded or by_driver):
            gone = "its limits were left to the driver, which is not relied on any more: delete the pod"
            return f"pod {pod.view.key}: {gone}"
        tier = Tier.DRIVER if by_driver else tier
        wanted = pod.view.request.min_tier if pod.view.request else Tier.NONE
        if tier >= wanted:
            return ""
        asked = f"{LABEL_MIN_TIER}={wanted.word}"
        return f"pod {pod.view.key} asks for {asked}, its limits would be held by {tier.word}"

    async def _identify(self, ids: frozenset[str]) -> Holder | None:
        """By kubelet's assignments, read again; by the grants if kubelet does not list the ids.

        If a kubelet connected meanwhile, it may have forgotten others: then they are read once more.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + IDENTIFY_S
        while True:
            readable = True
            try:
                async with asyncio.timeout(IDENTIFY_S):
                    await self._reconciler.read()
            except (PodResourcesError, TimeoutError) as error:
                readable = False
                _log.warning("container start: kubelet's assignments not read", extra={"error": str(error)})
            holder = self._state.holder(ids)
            is_certain = self._state.forgotten() == self._state.maybe_forgotten() or not readable
            if is_certain and (holder is not None or now() >= deadline):
                return holder
            await asyncio.sleep(RETRY_S)

    def _write_limits(self, ids: frozenset[str], holder: Holder | None) -> None:
        unlisted = (*self._state.forgotten(), *self._state.orphans) if holder else ()
        occupied = frozenset(each.folder for each in unlisted)
        self._folders.start(ids, self._limits(ids, holder), self._state.owner(ids), occupied=occupied)
        if self._folders.records[self._folders.current(ids)].hooked:
            self._driver_limits.hook.write()

    def _limits(self, ids: frozenset[str], holder: Holder | None) -> list[LimitsEntry]:
        """What the container may have. Raises `GrantError`."""
        container, rules = holder.container if holder else None, self._state.rules
        if holder and container and not self._state.aside.is_in_force(holder.pod):
            container = replace(container, units=container.devices, added=0)
        grant = grant_to(container, ids, self._state.node)
        name = container.name if container else ""
        exempt = holder and self._options.allow_cgpu_disable and name in holder.pod.unlimited
        return entries(
            grant.limits,
            limited=not exempt,
            policy=rules.compute_policy,
            interactive=holder is not None and holder.pod.interactive,
        )

    def recover(self) -> None:
        """Know again what running containers were given whose folders are lost, or somebody else's."""
        if not self._state.rules.isolation or self._reconciler.problem:
            return
        for each in self._state.assignments or ():
            holder = self._state.holder(each.ids)
            if holder is None or holder.container is None or not holder.exact:
                continue
            if holder.container.name in holder.pod.running:
                with contextlib.suppress(GrantError, LimitsError):
                    limits = self._limits(each.ids, holder)
                    self._folders.recover(each.ids, limits, self._state.owner(each.ids))

    # -- waiting --------------------------------------------------------------------------------------

    async def _until(self, size: int, ask: Callable[[], T], good: Callable[[T], bool]) -> T:
        """The answer as soon as it is good, otherwise the last one after waiting a moment for news.

        kubelet is blocked meanwhile, so nobody waits twice in vain for the same amount.
        """
        now = asyncio.get_running_loop().time
        in_vain = self._in_vain.get(size, 0) > now()
        deadline = now() + self._options.match_wait_s
        while not good(answer := ask()) and not in_vain:
            if now() >= deadline:
                self._in_vain[size] = now() + self._options.match_wait_s
                break
            self._reconciler.wake()
            self._ask_for_news()
            self._state.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._state.changed.wait()
        return answer


def poison(units: int, unit: str) -> dict[str, str]:
    """The environment with which the vendor's plugin refuses: a card name that no runtime knows."""
    return {
        ENV_VISIBLE: f"no-gpu-has-{units}{unit}-to-run",
        ENV_INDEX: "-1",
        ENV_POD_UNITS: str(units),
        ENV_CONTAINER_UNITS: str(units),
        ENV_CARD_UNITS: "0",
    }
