"""The cards that an agent publishes for claims, and when it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpuslice.adapters.kube.resources import RESOURCE_SLICES
from tests.integration.agent_bench import NODE, eventually, uuid
from tests.integration.claims_rig import claim_node, result

TWO = {0: 16130, 1: 15079}


async def test_the_cards_are_published_as_devices_that_many_may_share(tmp_path: Path) -> None:
    async with claim_node(tmp_path, cards=TWO) as bench:
        first, second = await bench.offered("gpu-1", "gpu-0")  # the smaller is the fuller
        assert first["allowMultipleAllocations"] is True
        assert first["attributes"]["uuid"] == {"string": uuid(1)}
        assert first["attributes"]["model"] == {"string": "Tesla V100-SXM2-16GB"}
        assert first["attributes"]["driverVersion"] == {"version": "418.87.0"}
        assert second["capacity"]["memory"] == {
            "value": "15Gi",
            "requestPolicy": {"default": "15Gi", "validRange": {"min": "0", "max": "15Gi", "step": "1Gi"}},
        }
        (found,) = await bench.slices()
        assert found["spec"]["nodeName"] == NODE
        assert found["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
        assert found["metadata"]["ownerReferences"][0]["kind"] == "Node"


async def test_a_kubelet_that_does_not_know_claims_is_sent_no_pod_with_one(tmp_path: Path) -> None:
    """Before Kubernetes 1.34 it starts such a pod without its card, and so without a limit."""
    async with claim_node(tmp_path, kubelet_knows_claims=False) as bench:
        await eventually(bench.address.registration.exists, "the driver serves")
        await asyncio.sleep(1.0)
        assert await bench.slices() == []
        assert bench.node.agent.claims.not_ready() == "kubelet has not registered us yet"
        await bench.register()
        await bench.offered("gpu-0")


async def test_cards_are_withdrawn_when_kubelet_refuses_the_driver(tmp_path: Path) -> None:
    """They may have been published beside a newer kubelet, or by an agent that did not ask."""
    async with claim_node(tmp_path, kubelet_knows_claims=False) as bench:
        await bench.register()
        await bench.offered("gpu-0")
        refusal = f"no handler registered for plugin type: DRAPlugin at socket {bench.address.registration}"
        await bench.register(refusal)
        await eventually(lambda: bench.node.agent.claims.publisher.withdrawn, "the slices are withdrawn")
        assert await bench.slices() == []
        assert bench.node.agent.claims.not_ready() == f"kubelet did not register the driver: {refusal}"
        await bench.register()
        await bench.offered("gpu-0")


async def test_slices_that_somebody_deletes_or_changes_come_back(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        (found,) = await bench.slices()
        await bench.node.client.delete(
            RESOURCE_SLICES, found["metadata"]["name"]
        )  # as kubelet does at its start
        await bench.offered("gpu-0")
        (found,) = await bench.slices()
        found["spec"]["devices"][0]["capacity"]["memory"]["value"] = "99Gi"
        await bench.node.client.replace(RESOURCE_SLICES, found)

        async def mended() -> bool:
            (device,) = await bench.devices()
            return bool(device["capacity"]["memory"]["value"] == "15Gi")

        await eventually(mended, "the slice is as it was")
        (found,) = await bench.slices()
        del found["spec"]["devices"]  # as the API server leaves out an empty list
        await bench.node.client.replace(RESOURCE_SLICES, found)
        await bench.offered("gpu-0")


async def test_the_fullest_card_comes_first(tmp_path: Path) -> None:
    async with claim_node(tmp_path, cards={0: 16130, 1: 16130, 2: 16130}) as bench:
        await bench.offered("gpu-0", "gpu-1", "gpu-2")
        claim = await bench.claim("c", result("4Gi", card=1))
        await bench.prepare(claim)
        await bench.offered("gpu-1", "gpu-0", "gpu-2")
        await bench.unprepare(claim)
        await bench.offered("gpu-0", "gpu-1", "gpu-2")


async def test_cards_say_which_others_they_reach_by_nvlink(tmp_path: Path) -> None:
    """With themselves, so that `matchAttribute` keeps a claim on cards of which each reaches each."""
    four = dict.fromkeys(range(4), 16130)
    kinds = {(0, 1): 3, (0, 2): 1, (1, 2): 2}  # NVLink, one CPU, a switch; nothing is told of card 3
    links = [{"uuid": uuid(one), "other": uuid(other), "link": kind} for (one, other), kind in kinds.items()]
    async with claim_node(tmp_path, cards=four) as bench:
        offered = await bench.offered("gpu-0", "gpu-1", "gpu-2", "gpu-3")
        assert not [each for each in offered if "nvlinkPeers" in each["attributes"]]
        bench.node.record(four, links=links)

        async def told() -> bool:
            said = [each["attributes"].get("nvlinkPeers") for each in await bench.devices()]
            return said == [{"string": "0,1"}, {"string": "0,1"}, None, None]

        await eventually(told, "the first two name each other")


async def test_a_sick_card_is_tainted_and_pods_hear_of_it(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        (tmp_path / "unhealthyDevices.json").write_text('{"index": [0], "uuid": []}')

        async def tainted() -> bool:
            (device,) = await bench.devices()
            return bool(device.get("taints"))

        await eventually(tainted, "a taint")
        (device,) = await bench.devices()
        (taint,) = device["taints"]
        assert (taint["key"], taint["value"], taint["effect"]) == (
            "gpu.gpuslice.io/unhealthy",
            "excluded-by-the-operator",
            "NoSchedule",
        )
        async with bench.kubelet() as kubelet:
            stream = kubelet.health()
            told = await anext(stream)
            await stream.aclose()
        (one,) = told.devices
        assert (one.device.device_name, one.health, one.message) == ("gpu-0", 2, "excluded by the operator")
