"""kubelet's questions about devices, answered from what the agent knows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeVar

from grpclib import GRPCError, Status

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import DevicePluginService
from gpuslice.apps.agent.desk import Desk
from gpuslice.apps.agent.devices import DeviceList
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.library import IsolationMissingError
from gpuslice.apps.agent.metrics import Counters
from gpuslice.apps.agent.offer import Offer
from gpuslice.apps.agent.preference import Claim, Proposal
from gpuslice.apps.agent.start import Starter
from gpuslice.core.contract import (
    ENV_CARD_UNITS,
    ENV_CONTAINER_UNITS,
    ENV_INDEX,
    ENV_POD_UNITS,
    ENV_VISIBLE,
)
from gpuslice.core.grant import Grant, GrantError, container_grant
from gpuslice.core.mode import Rules
from gpuslice.core.model import Refusal

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """What of the settings concerns the answers to kubelet."""

    match_wait_s: float = 1.0
    memory_unit: str = "GiB"
    legacy_poison_env: bool = False
    cdi_kind: str = ""


class GpuMemoryPlugin(DevicePluginService):
    """The device plugin of ``aliyun.com/gpu-mem``. `look` asks for kubelet's book to be read soon."""

    def __init__(
        self,
        desk: Desk,
        devices: DeviceList,
        *,
        folders: Folders,
        starter: Starter,
        offer: Offer,
        rules: Callable[[], Rules],
        look: Callable[[], None],
        counters: Counters,
        options: PluginOptions = PluginOptions(),
    ) -> None:
        self._desk = desk
        self._devices = devices
        self._folders = folders
        self._starter = starter
        self._offer = offer
        self._rules = rules
        self._look = look
        self._counters = counters
        self._options = options
        self._in_vain: dict[int, float] = {}  # size → until when waiting for it again is pointless

    async def get_device_plugin_options(self, request: dp.Empty) -> dp.DevicePluginOptions:
        return dp.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    def list_and_watch(self, request: dp.Empty) -> AsyncGenerator[dp.ListAndWatchResponse]:
        self._desk.kubelet_came(self._folders.inhabited())
        self._look()
        return self._devices.messages()

    # -- which ids ------------------------------------------------------------------------------------

    async def get_preferred_allocation(
        self, request: dp.PreferredAllocationRequest
    ) -> dp.PreferredAllocationResponse:
        answers = [await self._preferred(each) for each in request.container_requests]
        return dp.PreferredAllocationResponse(container_responses=answers)

    async def _preferred(
        self, request: dp.ContainerPreferredAllocationRequest
    ) -> dp.ContainerPreferredAllocationResponse:
        size = request.allocation_size
        await self._until(size, lambda: self._expected(size), bool)

        def ask() -> Proposal | Refusal:
            return self._desk.propose(request.available_deviceIDs, request.must_include_deviceIDs, size)

        # Whoever kubelet seems to have forgotten may just have ended: then the API server tells at once.
        proposal = await self._until(size, ask, lambda got: not (self._desk.inhabited() and _refused(got)))
        if isinstance(proposal, Refusal):
            self._counters.refused("no room")
            raise GRPCError(Status.FAILED_PRECONDITION, proposal.reason)
        return dp.ContainerPreferredAllocationResponse(deviceIDs=proposal.ids)

    def _expected(self, size: int) -> bool:
        """Whether somebody waits for that much. With one card it makes no difference."""
        return self._desk.places_unplaced or any(want.units == size for want in self._desk.acceptable())

    # -- what comes with them -------------------------------------------------------------------------

    async def allocate(self, request: dp.AllocateRequest) -> dp.AllocateResponse:
        began = time.perf_counter()
        answers = [await self._allocated(frozenset(each.devices_ids)) for each in request.container_requests]
        self._counters.answered(time.perf_counter() - began)
        return dp.AllocateResponse(container_responses=answers)

    async def _allocated(self, ids: frozenset[str]) -> dp.ContainerAllocateResponse:
        try:
            claimed = await self._claim(ids)
            if isinstance(claimed, Refusal):
                return self._refused("no match", claimed.reason, len(ids))
            return self._grant(ids, claimed)
        except GrantError as error:
            return self._refused("foreign device", str(error), len(ids))
        except (IsolationMissingError, OSError) as error:
            return self._refused("host", str(error), len(ids))

    async def _claim(self, ids: frozenset[str]) -> Claim | Refusal:
        if (refusal := self._offer.refusal(ids)) is not None:
            return refusal

        def ask() -> Claim | Refusal:
            return self._desk.claim(ids)

        return await self._until(len(ids), ask, lambda answer: isinstance(answer, Claim))

    def _grant(self, ids: frozenset[str], claimed: Claim) -> dp.ContainerAllocateResponse:
        isolation = self._rules().isolation
        grant = container_grant(
            ids, self._desk.node, pod_units=self._desk.pod_units(claimed), isolation=isolation
        )
        mounts = self._mounts(ids) if isolation else []
        self._desk.granted(ids, claimed)
        self._counters.granted()
        self._look()
        pod = claimed.want.pod.view.key if claimed.want else ""
        _log.info(
            "granted", extra={"cards": grant.environment[ENV_INDEX], "units": len(ids), "probably_for": pod}
        )
        return dp.ContainerAllocateResponse(
            envs=grant.environment, mounts=mounts, cdi_devices=self._cdi_devices(grant)
        )

    def _mounts(self, ids: frozenset[str]) -> list[dp.Mount]:
        kept = {each.folder for each in self._desk.inhabited()}
        return [
            dp.Mount(container_path=each.container_path, host_path=each.host_path, read_only=each.read_only)
            for each in self._folders.grant(ids, kept, limits_compute=self._rules().limits_compute)
        ]

    def _cdi_devices(self, grant: Grant) -> list[dp.CDIDevice]:
        kind = self._options.cdi_kind
        return [dp.CDIDevice(name=f"{kind}={limit.gpu.uuid}") for limit in grant.limits] if kind else []

    def _refused(self, why: str, reason: str, units: int) -> dp.ContainerAllocateResponse:
        """An error, so that a controller makes the pod anew; as an option what the vendor's plugin says."""
        self._counters.refused(why)
        _log.warning("refused", extra={"reason": reason, "units": units})
        if self._options.legacy_poison_env:
            return dp.ContainerAllocateResponse(envs=poison(units, self._options.memory_unit))
        raise GRPCError(Status.FAILED_PRECONDITION, reason)

    # -- starting -------------------------------------------------------------------------------------

    async def pre_start_container(self, request: dp.PreStartContainerRequest) -> dp.PreStartContainerResponse:
        await self._starter.start(frozenset(request.devices_ids))
        return dp.PreStartContainerResponse()

    # -- waiting --------------------------------------------------------------------------------------

    async def _until(self, size: int, ask: Callable[[], T], good: Callable[[T], bool]) -> T:
        """The answer once it is good, else the last one after a moment of waiting for news.

        kubelet stands still meanwhile, so nobody waits twice in vain for the same amount.
        """
        now = asyncio.get_running_loop().time
        in_vain = self._in_vain.get(size, 0) > now()
        deadline = now() + self._options.match_wait_s
        while not good(answer := ask()) and not in_vain:
            if now() >= deadline:
                self._in_vain[size] = now() + self._options.match_wait_s
                break
            self._look()
            self._desk.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._desk.changed.wait()
        return answer


def _refused(answer: object) -> bool:
    return isinstance(answer, Refusal)


def poison(units: int, unit: str) -> dict[str, str]:
    """The environment with which the vendor's plugin says no: a card's name that no runtime knows."""
    return {
        ENV_VISIBLE: f"no-gpu-has-{units}{unit}-to-run",
        ENV_INDEX: "-1",
        ENV_POD_UNITS: str(units),
        ENV_CONTAINER_UNITS: str(units),
        ENV_CARD_UNITS: "0",
    }
