"""Serves a driver of dynamic resource allocation to kubelet, on two sockets.

kubelet finds the registration socket in its folder of plugins by file events, asks there who we are, and
dials the other one, for the claims of pods and the health of devices. It forgets a driver whose registration
socket goes, and deletes its ResourceSlices half a minute later; so both are looked after.

Source of the services: k8s.io/kubelet ``pluginregistration/v1``, ``dra/v1``, ``dra/v1beta1``,
``dra-health/v1alpha1`` and (Kubernetes 1.37) ``dra-health/v1``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuslice.adapters.kubelet.deviceplugin import socket_identity
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as dra
from gpuslice.adapters.kubelet.rpc import Server, server_stream, unary

_log = logging.getLogger(__name__)

REGISTRATION = "/pluginregistration.Registration"
DRA = "/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin"
HEALTH = "/{version}.DRAResourceHealth"
DRA_VERSIONS = ("v1", "v1beta1")
HEALTH_VERSIONS = ("v1", "v1alpha1")
SUPPORTED = (
    *(f"{version}.DRAPlugin" for version in DRA_VERSIONS),
    *(f"{version}.DRAResourceHealth" for version in HEALTH_VERSIONS),
)
POLL_S = 0.3


@dataclass(frozen=True, slots=True)
class DraAddress:
    """Where driver `name` lives: its folder below kubelet's ``plugins``, and ``plugins_registry``."""

    name: str
    plugins: Path
    registry: Path

    @property
    def socket(self) -> Path:
        return self.plugins / self.name / "dra.sock"

    @property
    def registration(self) -> Path:
        return self.registry / f"{self.name}-reg.sock"


class DraService(ABC):
    """What a driver answers kubelet. Each answer has an entry for every claim that was asked about."""

    @abstractmethod
    async def node_prepare_resources(
        self, request: dra.NodePrepareResourcesRequest
    ) -> dra.NodePrepareResourcesResponse: ...

    @abstractmethod
    async def node_unprepare_resources(
        self, request: dra.NodeUnprepareResourcesRequest
    ) -> dra.NodeUnprepareResourcesResponse: ...

    @abstractmethod
    def node_watch_resources(
        self, request: dra.NodeWatchResourcesRequest
    ) -> AsyncGenerator[dra.NodeWatchResourcesResponse]:
        """Yields the health of all devices at once, after every change, and before it grows too old."""

    def __mapping__(self) -> dict[str, Any]:
        prepare = unary(
            self.node_prepare_resources, dra.NodePrepareResourcesRequest, dra.NodePrepareResourcesResponse
        )
        unprepare = unary(
            self.node_unprepare_resources,
            dra.NodeUnprepareResourcesRequest,
            dra.NodeUnprepareResourcesResponse,
        )
        watch = server_stream(
            self.node_watch_resources, dra.NodeWatchResourcesRequest, dra.NodeWatchResourcesResponse
        )
        paths = [DRA.format(version=version) for version in DRA_VERSIONS]
        return {
            **{f"{path}/NodePrepareResources": prepare for path in paths},
            **{f"{path}/NodeUnprepareResources": unprepare for path in paths},
            **{f"{HEALTH.format(version=version)}/NodeWatchResources": watch for version in HEALTH_VERSIONS},
        }


class _Registration:
    """Tells kubelet who we are, and hears whether it took us."""

    def __init__(self, address: DraAddress) -> None:
        self.registered = False
        self.registrations = 0
        self.refusal = ""
        self._info = dra.PluginInfo(
            type="DRAPlugin", name=address.name, endpoint=str(address.socket), supported_versions=SUPPORTED
        )

    async def _get_info(self, _: dra.InfoRequest) -> dra.PluginInfo:
        return self._info

    async def _notify(self, status: dra.RegistrationStatus) -> dra.RegistrationStatusResponse:
        self.registered = status.plugin_registered
        self.refusal = "" if status.plugin_registered else status.error or "it does not say why"
        if status.plugin_registered:
            self.registrations += 1
            _log.info("registered with kubelet", extra={"driver": self._info.name})
        else:
            _log.warning("kubelet did not register the driver", extra={"error": status.error})
        return dra.RegistrationStatusResponse()

    def __mapping__(self) -> dict[str, Any]:
        return {
            f"{REGISTRATION}/GetInfo": unary(self._get_info, dra.InfoRequest, dra.PluginInfo),
            f"{REGISTRATION}/NotifyRegistrationStatus": unary(
                self._notify, dra.RegistrationStatus, dra.RegistrationStatusResponse
            ),
        }


class DraServer:
    """Runs `service` at `address` until cancelled."""

    def __init__(self, service: DraService, address: DraAddress) -> None:
        self._service = service
        self._address = address
        self._registration = _Registration(address)

    @property
    def registered(self) -> bool:
        """Whether kubelet said so of the sockets that are there now."""
        return self._registration.registered

    @property
    def refusal(self) -> str:
        """Why kubelet did not register the driver when it was last asked; "" if it did, or was not asked."""
        return self._registration.refusal

    @property
    def registrations(self) -> int:
        return self._registration.registrations

    async def run(self) -> None:
        """Serve for ever; a failed step is logged and tried again."""
        problem = ""
        while True:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    stack.callback(setattr, self._registration, "registered", False)
                    sockets = {}
                    for path, served in (  # the one that kubelet looks for comes last
                        (self._address.socket, self._service),
                        (self._address.registration, self._registration),
                    ):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.unlink(missing_ok=True)
                        server = Server([served])
                        await server.start(path=str(path))
                        stack.push_async_callback(_end, server, path, socket_identity(path))
                        sockets[path] = socket_identity(path)
                    # until one was deleted or replaced
                    while all(socket_identity(path) == identity for path, identity in sockets.items()):  # noqa: ASYNC110
                        await asyncio.sleep(POLL_S)
            except OSError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("cannot serve kubelet's claims", extra={"error": problem})
            await asyncio.sleep(POLL_S)


async def _end(server: Server, path: Path, identity: object) -> None:
    if identity is not None and socket_identity(path) == identity:
        os.unlink(path)
    server.close()
    await server.wait_closed()
