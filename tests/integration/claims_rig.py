"""The agent's bench as a node of claims: what kube-scheduler allocates, and kubelet's side of the driver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.resources import PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from gpuslice.adapters.kubelet.deviceplugin import socket_identity
from gpuslice.adapters.kubelet.draplugin import DraAddress
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as pb
from gpuslice.adapters.kubelet.rpc import unix_channel
from gpuslice.core.contract import CLAIM_CLASS, CLAIM_DRIVER, LABEL_MODE
from simcluster.kubelet.rpc import DraClient, DriverRegistrationClient
from tests import HANG_S
from tests.builders import api_pod
from tests.integration.agent_bench import NODE, Bench, eventually

CLAIMS = {LABEL_MODE: "claims"}


class ClaimBench:
    """A node of claims, its agent running."""

    def __init__(self, node: Bench, sockets: Path) -> None:
        self.node = node
        self.address = DraAddress(CLAIM_DRIVER, sockets / "plugins", sockets / "plugins_registry")
        self.cdi = node.folder / "cdi"

    # -- kubelet's side -------------------------------------------------------------------------------

    async def watch_for_drivers(self) -> None:
        """Register the driver whenever its socket is a new one, for ever."""
        known: object = None
        while True:
            found = socket_identity(self.address.registration)
            if found is not None and found != known:
                with contextlib.suppress(OSError):  # it is not served yet, or not any more
                    await self.register()
                    known = found
            await asyncio.sleep(0.02)

    async def register(self, refusal: str = "") -> pb.PluginInfo:
        """Register the driver, or refuse it with kubelet's words."""
        await eventually(self.address.registration.exists, "the registration socket")
        async with unix_channel(self.address.registration) as channel:
            reader = DriverRegistrationClient(channel)
            info = await reader.get_info(HANG_S)
            answer = pb.RegistrationStatus(plugin_registered=not refusal, error=refusal)
            await reader.notify(answer, HANG_S)
        return info

    @contextlib.asynccontextmanager
    async def kubelet(self, version: str = "v1") -> AsyncIterator[DraClient]:
        await eventually(self.address.socket.exists, "the driver's socket")
        async with unix_channel(self.address.socket) as channel:
            yield DraClient(channel, version)

    async def prepare(self, claim: dict[str, Any], version: str = "v1") -> pb.NodePrepareResourceResponse:
        uid = claim["metadata"]["uid"]
        async with self.kubelet(version) as kubelet:
            return (await kubelet.prepare([_named(claim)], HANG_S)).claims[uid]

    async def unprepare(self, claim: dict[str, Any]) -> pb.NodeUnprepareResourceResponse:
        uid = claim["metadata"]["uid"]
        async with self.kubelet() as kubelet:
            return (await kubelet.unprepare([_named(claim)], HANG_S)).claims[uid]

    # -- what others do ---------------------------------------------------------------------------------

    async def slices(self) -> list[dict[str, Any]]:
        return (await self.node.client.list(RESOURCE_SLICES)).items or []

    async def devices(self) -> list[dict[str, Any]]:
        return [device for each in await self.slices() for device in each["spec"].get("devices") or ()]

    async def offered(self, *names: str) -> list[dict[str, Any]]:
        """The devices once they are these, in this order."""

        async def ask() -> list[dict[str, Any]]:
            found = await self.devices()
            return found if [each["name"] for each in found] == list(names) else []

        found: list[dict[str, Any]] = await eventually(ask, f"devices {names}")
        return found

    async def claim(
        self, name: str, *results: dict[str, Any], pod: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """A claim as kube-scheduler leaves it."""
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpuslice.io"}}]}}
        document = {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
        await self.node.client.create(RESOURCE_CLAIMS.as_dict(), document)
        status: dict[str, Any] = {"allocation": {"devices": {"results": list(results)}}}
        if pod is not None:
            meta = pod["metadata"]
            status["reservedFor"] = [{"resource": "pods", "name": meta["name"], "uid": meta["uid"]}]
        return await self.node.client.patch_status(RESOURCE_CLAIMS.as_dict(), name, status, "default")

    async def pod(self, name: str, claim: str, *uses: tuple[str, str]) -> dict[str, Any]:
        """A pod of one container for each of `uses`: its name and the request it names."""
        document = api_pod(name, "0", node=NODE)
        del document["metadata"]["uid"]
        document["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claim}]
        document["spec"]["containers"] = [
            {"name": each, "image": "i", "resources": {"claims": [{"name": "gpu", **_request(request)}]}}
            for each, request in uses
        ]
        return await self.node.client.create(PODS.as_dict(), document)

    async def pod_of_extended_resource(
        self, name: str, claim: str, *containers: str, kind: str = "containers", **fields: Any
    ) -> dict[str, Any]:
        """A pod as kube-scheduler leaves it after it made a claim of the containers' extended resources."""
        document = api_pod(name, "0", node=NODE)
        del document["metadata"]["uid"]
        resource = f"deviceclass.resource.kubernetes.io/{CLAIM_CLASS}"
        document["spec"]["volumes"] = [{"name": "v", "emptyDir": {}}]
        document["spec"][kind] = [
            {
                "name": each,
                "image": "i",
                "resources": {"limits": {resource: "1"}, "requests": {resource: "1"}},
            }
            | fields
            for each in containers
        ]
        await self.node.client.create(PODS.as_dict(), document)
        mappings = [
            {"containerName": each, "resourceName": resource, "requestName": f"container-{place}-request-0"}
            for place, each in enumerate(containers)
        ]
        status = {"resourceClaimName": claim, "requestMappings": mappings}
        patch = {"extendedResourceClaimStatus": status}
        return await self.node.client.patch_status(PODS.as_dict(), name, patch, "default")


def _request(name: str) -> dict[str, str]:
    return {"request": name} if name else {}


def _named(claim: dict[str, Any]) -> pb.Claim:
    meta = claim["metadata"]
    return pb.Claim(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"])


def result(
    memory: str = "4Gi",
    card: int = 0,
    request: str = "gpu",
    compute: str = "0",
    share: str = "s1",
    **more: Any,
) -> dict[str, Any]:
    """One device of an allocation."""
    consumed = {"memory": memory, "compute": compute, "slots": "1"}
    return {
        "request": request,
        "driver": CLAIM_DRIVER,
        "pool": NODE,
        "device": f"gpu-{card}",
        "shareID": share,
        "consumedCapacity": consumed,
        **more,
    }


@contextlib.asynccontextmanager
async def claim_node(
    folder: Path, *, kubelet_knows_claims: bool = True, **fields: Any
) -> AsyncIterator[ClaimBench]:
    """A node whose label says claims; `fields` are those of `Bench`."""
    node = Bench(folder, **{"labels": CLAIMS, "ready": False, **fields})
    sockets = Path(node._sockets.name)
    node.settings = {
        "dra_plugins": str(sockets / "plugins"),
        "dra_registry": str(sockets / "plugins_registry"),
        "cdi_folder": str(folder / "cdi"),
        **node.settings,
    }
    async with node.running():
        bench = ClaimBench(node, sockets)
        watching = asyncio.create_task(bench.watch_for_drivers()) if kubelet_knows_claims else None
        try:
            yield bench
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
