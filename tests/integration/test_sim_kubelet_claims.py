"""The simulated kubelet's manager of claims over restarts, a reboot and its driver's health stream.

What the real one does is judged in tests/e2e/test_claim_driver.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import PODS, RESOURCE_CLAIMS
from gpuslice.adapters.kubelet.draplugin import DraAddress, DraServer, DraService
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as dra
from simcluster.kubelet.claim_checkpoint import FILE_NAME, CorruptClaimsError
from tests import HANG_S
from tests.integration.sim_node import Node, make_pod, restarts_of, simulated_node, state_of

NAME = "cards.example.com"


class Driver(DraService):
    """Remembers what kubelet asks, and tells of one device's health whenever a test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.healths: asyncio.Queue[dra.HealthStatus | None] = asyncio.Queue()

    async def node_prepare_resources(
        self, request: dra.NodePrepareResourcesRequest
    ) -> dra.NodePrepareResourcesResponse:
        self.calls += [("prepare", each.name) for each in request.claims]
        device = dra.Device(request_names=["gpu"], pool_name="n1", device_name="gpu-0", share_id="s")
        prepared = dra.NodePrepareResourceResponse(devices=[device])
        return dra.NodePrepareResourcesResponse(claims={each.uid: prepared for each in request.claims})

    async def node_unprepare_resources(
        self, request: dra.NodeUnprepareResourcesRequest
    ) -> dra.NodeUnprepareResourcesResponse:
        self.calls += [("unprepare", each.name) for each in request.claims]
        gone = dra.NodeUnprepareResourceResponse()
        return dra.NodeUnprepareResourcesResponse(claims={each.uid: gone for each in request.claims})

    async def node_watch_resources(
        self, request: dra.NodeWatchResourcesRequest
    ) -> AsyncGenerator[dra.NodeWatchResourcesResponse]:
        while (health := await self.healths.get()) is not None:
            device = dra.DeviceIdentifier(pool_name="n1", device_name="gpu-0")
            told = dra.DeviceHealth(device=device, health=health, message="so it is")
            yield dra.NodeWatchResourcesResponse(devices=[told])

    async def asked(self, *calls: tuple[str, str]) -> None:
        """Once these are all that kubelet has asked."""
        async with asyncio.timeout(HANG_S):
            while self.calls != list(calls):  # noqa: ASYNC110 - kubelet is beside us
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(node: Node, driver: Driver) -> AsyncIterator[None]:
    address = DraAddress(NAME, node.settings.root / "plugins", node.settings.plugin_registry)
    server = DraServer(driver, address)
    task = asyncio.create_task(server.run())
    try:
        async with asyncio.timeout(HANG_S):
            while not server.registered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield
    finally:
        driver.healths.put_nowait(None)
        task.cancel()
        await asyncio.wait([task])


async def claiming(node: Node, name: str) -> None:
    """A pod on the node, and its claim as kube-scheduler leaves it."""
    claim: dict[str, Any] = {"metadata": {"name": name, "namespace": "default"}}
    claim["spec"] = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "any"}}]}}
    await node.client.create(RESOURCE_CLAIMS.as_dict(), claim)
    result = {"request": "gpu", "driver": NAME, "pool": "n1", "device": "gpu-0"}
    uses = {"resources": {"claims": [{"name": "gpu"}]}}
    references = [{"name": "gpu", "resourceClaimName": name}]
    made = await node.create(make_pod(name, container=uses, resourceClaims=references))
    users = [{"resource": "pods", "name": name, "uid": made["metadata"]["uid"]}]
    status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": users}
    await node.client.patch_status(RESOURCE_CLAIMS.as_dict(), name, status, "default")


def runs(pod: dict[str, Any]) -> bool:
    return state_of(pod) == "running"


def health(pod: dict[str, Any]) -> tuple[str, str]:
    """Of its only device, as kubectl shows it."""
    statuses = pod["status"]["containerStatuses"][0].get("allocatedResourcesStatus") or []
    if not statuses:
        return "", ""
    ((name, (resource,)),) = [(each["name"], each["resources"]) for each in statuses]
    assert (name, resource["resourceID"]) == ("claim:gpu", f"{NAME}/n1/gpu-0")
    return resource["health"], resource.get("message", "")


def has_health(word: str, pod: dict[str, Any]) -> bool:
    return health(pod) == (word, "so it is")


async def test_a_kubelet_that_finds_containers_running_asks_nobody_and_remembers(tmp_path: Path) -> None:
    driver = Driver()
    async with simulated_node(tmp_path) as node:
        async with served(node, driver):
            await claiming(node, "one")
            await node.wait_pod("one", runs)
        await node.crash()
        await node.start()  # without a driver: nobody needs it to go on
        await node.create(make_pod("two"))
        await node.wait_pod("two", runs)
        assert not [each for each in await node.events("one") if each[0] == "FailedPrepareDynamicResources"]
        async with served(node, driver):
            await node.client.delete(PODS, "one", "default")
            await node.wait_gone("one")
        assert driver.calls == [("prepare", "one"), ("unprepare", "one")]


async def test_claims_of_pods_that_went_meanwhile_are_let_go(tmp_path: Path) -> None:
    driver = Driver()
    async with simulated_node(tmp_path) as node, served(node, driver):
        await claiming(node, "one")
        await node.wait_pod("one", runs)
        await node.crash()
        await node.client.delete(PODS, "one", "default", grace_s=0)
        await node.start()
        await driver.asked(("prepare", "one"), ("unprepare", "one"))


async def test_after_a_reboot_every_claim_is_prepared_again(tmp_path: Path) -> None:
    """No container runs then, and nothing is left in /var/run."""
    driver = Driver()
    async with simulated_node(tmp_path) as node:
        async with served(node, driver):
            for name in ("one", "two"):
                await claiming(node, name)
                await node.wait_pod(name, runs)
        await node.crash()
        await node.runtime.close()
        await node.start()
        async with served(node, driver):
            for name in ("one", "two"):
                await node.wait_pod(name, lambda pod: runs(pod) and restarts_of(pod) == 1)
        assert sorted(driver.calls) == [("prepare", name) for name in ("one", "one", "two", "two")]


async def test_the_status_of_a_pod_tells_of_its_devices_health(tmp_path: Path) -> None:
    driver = Driver()
    async with simulated_node(tmp_path) as node:
        async with served(node, driver):
            await claiming(node, "one")
            await node.wait_pod("one", lambda pod: runs(pod) and health(pod) == ("Unknown", ""))
            for said, word in ((dra.HEALTHY, "Healthy"), (dra.UNHEALTHY, "Unhealthy")):
                driver.healths.put_nowait(said)
                await node.wait_pod("one", partial(has_health, word))
            driver.healths.put_nowait(None)  # the stream ends, and the driver stays
            await node.wait_pod("one", lambda pod: health(pod) == ("Unknown", ""))
            driver.healths.put_nowait(dra.HEALTHY)
            await node.wait_pod("one", partial(has_health, "Healthy"))
        await node.wait_pod("one", lambda pod: health(pod) == ("Unknown", ""))


async def test_a_broken_memory_of_claims_stops_kubelet(tmp_path: Path) -> None:
    async with simulated_node(tmp_path) as node:
        async with served(node, Driver()):
            await claiming(node, "one")
            await node.wait_pod("one", runs)
        await node.crash()
        file = node.settings.root / FILE_NAME
        file.write_text(file.read_text().replace("gpu-0", "gpu-1"))
        with pytest.raises(CorruptClaimsError, match="checksum"):
            await node.kubelet.run()
