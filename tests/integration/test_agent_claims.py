"""The agent as a driver of claims: what a claim is given, and what survives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import NODES, PODS, RESOURCE_CLAIMS
from gpuslice.adapters.region.limits import read_limits
from gpuslice.core.contract import LABEL_MODE
from gpuslice.core.units import MIB
from tests.integration.agent_bench import NODE, eventually, uuid
from tests.integration.claims_rig import ClaimBench, claim_node, result

TWO = {0: 16130, 1: 15079}


def cdi(bench: ClaimBench, claim: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Device name → its edits, as the container runtime reads them."""
    (file,) = bench.cdi.glob(f"*{claim['metadata']['uid']}.json")
    document = json.loads(file.read_bytes())
    assert document["kind"] == "gpuslice.io/claim"
    return {each["name"]: each["containerEdits"] for each in document["devices"]}


def mounted(edits: dict[str, Any], path: str) -> Path:
    (mount,) = [each for each in edits["mounts"] if each["containerPath"] == path]
    return Path(mount["hostPath"])


async def test_a_claim_gets_what_the_device_plugin_gives_for_the_same_amount(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        claim = await bench.claim("c", result("4Gi"))
        answer = await bench.prepare(claim)
        assert not answer.error
        (device,) = answer.devices
        assert (list(device.request_names), device.pool_name, device.device_name) == (["gpu"], NODE, "gpu-0")
        assert device.share_id == "s1"
        (name,) = device.cdi_device_ids
        edits = cdi(bench, claim)[name.removeprefix("gpuslice.io/claim=")]
        assert set(edits["env"]) == {
            f"NVIDIA_VISIBLE_DEVICES={uuid(0)}",
            "ALIYUN_COM_GPU_MEM_IDX=0",
            "ALIYUN_COM_GPU_MEM_POD=4",
            "ALIYUN_COM_GPU_MEM_CONTAINER=4",
            "ALIYUN_COM_GPU_MEM_DEV=15",
        }
        limits = read_limits(mounted(edits, "/etc/gpuslice") / "limits")
        assert limits is not None
        assert [(each.uuid, each.memory_bytes) for each in limits] == [(uuid(0), 4301 * MIB)]
        assert mounted(edits, "/etc/ld.so.preload").read_text() == "/usr/lib/gpuslice/libgpuslice.so\n"
        assert (mounted(edits, "/usr/lib/gpuslice") / "libgpuslice.so").is_file()
        told = await bench.node.client.get(RESOURCE_CLAIMS.as_dict(), "c", "default")
        (status,) = told["status"]["devices"]
        assert status["data"] == {
            "tier": "library",
            "units": 4,
            "memoryLimitBytes": 4301 * MIB,
            "computePercent": 0,
        }
        assert status["conditions"][0]["status"] == "True"


async def test_each_container_of_a_pod_has_the_limit_of_its_own_request(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        pod = await bench.pod("p", "c", ("train", "c0"), ("serve", "c1"))
        parts = (result("4Gi", request="c0"), result("2Gi", request="c1", compute="25", share="s2"))
        claim = await bench.claim("c", *parts, pod=pod)
        answer = await bench.prepare(claim)
        assert not answer.error
        found = cdi(bench, claim)
        assert len(found) == 2
        texts = [(mounted(edits, "/etc/gpuslice") / "limits").read_text() for edits in found.values()]
        assert f"memory={4301 * MIB} share=-" in texts[0]
        assert f"memory={2150 * MIB} share=25" in texts[1]
        owners = [
            json.loads((mounted(edits, "/etc/gpuslice").parent / "owner.json").read_bytes())
            for edits in found.values()
        ]
        assert [each["container"] for each in owners] == ["train", "serve"]


async def test_a_request_of_two_cards_is_one_grant_of_both(tmp_path: Path) -> None:
    async with claim_node(tmp_path, cards=TWO) as bench:
        await bench.offered("gpu-1", "gpu-0")
        claim = await bench.claim("c", result("4Gi"), result("4Gi", card=1, share="s2"))
        answer = await bench.prepare(claim)
        assert [len(each.cdi_device_ids) for each in answer.devices] == [1, 0]
        ((edits),) = cdi(bench, claim).values()
        limits = read_limits(mounted(edits, "/etc/gpuslice") / "limits")
        assert limits is not None
        assert [each.memory_bytes for each in limits] == [4301 * MIB, 4308 * MIB]


async def test_two_shares_of_one_card_are_one_limit_of_their_sum(tmp_path: Path) -> None:
    """kube-scheduler 1.34 gives a request of two cards the same one twice, where no constraint forbids it."""
    async with claim_node(tmp_path) as bench:
        shares = [result("4Gi", compute="30", share=each) for each in ("s1", "s2")]
        claim = await bench.claim("c", *shares)
        answer = await bench.prepare(claim)
        assert [(each.device_name, each.share_id) for each in answer.devices] == [
            ("gpu-0", "s1"),
            ("gpu-0", "s2"),
        ]
        ((edits),) = cdi(bench, claim).values()
        assert {"ALIYUN_COM_GPU_MEM_CONTAINER=8", "ALIYUN_COM_GPU_MEM_POD=8"} <= set(edits["env"])
        (limit,) = read_limits(mounted(edits, "/etc/gpuslice") / "limits") or ()
        assert (limit.memory_bytes, limit.compute_percent) == (8602 * MIB, 60)


async def test_a_container_that_uses_two_requests_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        pod = await bench.pod("p", "c", ("main", ""))
        claim = await bench.claim("c", result("4Gi", request="a"), result("2Gi", request="b"), pod=pod)
        answer = await bench.prepare(claim)
        assert (
            "container main of pod default/p uses the requests a, b of shared cards at once" in answer.error
        )


async def test_a_container_that_uses_two_claims_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        pod = await bench.pod("p", "c", ("main", ""))
        pod["spec"]["resourceClaims"].append({"name": "more", "resourceClaimName": "d"})
        first = await bench.claim("c", result(), pod=pod)
        assert not (await bench.prepare(first)).error
        assert bench.node.agent.folders.claim_limits() == {
            (pod["metadata"]["uid"], "main"): {uuid(0): 4301 * MIB}
        }
        document = pod["spec"]["containers"][0]["resources"]["claims"]
        document.append({"name": "more"})
        await bench.node.client.delete(PODS, "p", "default", grace_s=0)
        del pod["metadata"]["resourceVersion"]
        again = await bench.node.client.create(PODS.as_dict(), pod)
        uid = again["metadata"]["uid"]
        (folder,) = (tmp_path / "host" / "containers").glob("claim-*")
        owner = json.loads((folder / "owner.json").read_bytes())
        (folder / "owner.json").write_text(json.dumps({**owner, "uid": uid}))
        second = await bench.claim("d", result(share="s2"), pod=again)
        assert "uses a second claim of shared cards" in (await bench.prepare(second)).error


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
async def test_claims_that_kube_scheduler_made_have_owners_like_others(tmp_path: Path, kind: str) -> None:
    """KEP-5004: the pod asks for an extended resource of a device class, and its status names the claim."""
    async with claim_node(tmp_path, cards={0: 16130, 1: 16130}) as bench:
        await bench.offered("gpu-0", "gpu-1")
        pod = await bench.pod_of_extended_resource("p", "made", "first", "second", kind=kind)
        of_first = result("4Gi", card=1, request="container-0-request-0")
        of_second = result("15Gi", request="container-1-request-0", share="s2")
        claim = await bench.claim("made", of_first, of_second, pod=pod)
        assert not (await bench.prepare(claim)).error
        uid = pod["metadata"]["uid"]
        assert bench.node.agent.folders.claim_limits() == {
            (uid, "first"): {uuid(1): 4301 * MIB},
            (uid, "second"): {uuid(0): 16130 * MIB},
        }


@pytest.mark.parametrize("hidden", ["/etc/gpuslice", "/etc/ld.so.preload", "/run/gpuslice/x"])
async def test_claims_that_kube_scheduler_made_need_unhidden_limits(tmp_path: Path, hidden: str) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        mounts = [{"name": "v", "mountPath": hidden}]
        pod = await bench.pod_of_extended_resource("p", "made", "main", volumeMounts=mounts)
        claim = await bench.claim("made", result(request="container-0-request-0"), pod=pod)
        answer = await bench.prepare(claim)
        assert f'pod default/p: container "main": volumeMounts[0].mountPath is "{hidden}"' in answer.error


async def test_monitoring_sees_the_card_and_holds_nothing(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        claim = await bench.claim("c", result("15Gi", adminAccess=True))
        full = await bench.claim("full", result("15Gi", share="s2"))
        assert not (await bench.prepare(claim)).error
        assert not (await bench.prepare(full)).error
        ((edits),) = cdi(bench, claim).values()
        assert edits == {"env": [f"NVIDIA_VISIBLE_DEVICES={uuid(0)}"], "mounts": []}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"uid": "another"}, "is another one now"),
        ({"results": [result("1500Mi")]}, "must be a multiple of 1Gi, which is one unit of this node"),
        ({"results": [result("0")]}, "must be a multiple of 1Gi"),
        ({"results": [{**result(), "consumedCapacity": {"slots": "0"}}]}, 'slots is "0", must be 1 or more'),
        ({"results": [result(card=7)]}, 'device is "gpu-7", must be one of gpu-0'),
        ({"results": [result("16Gi")]}, "card 0 of node n1 has 15 units"),
        ({"results": [{**result(), "pool": "n2"}]}, "was given nothing of driver gpu.gpuslice.io on node n1"),
        ({"results": None}, "is not allocated"),
    ],
    ids=["other", "odd", "nothing", "no-slot", "unknown", "too-much", "elsewhere", "unallocated"],
)
async def test_what_cannot_be_prepared_is_said(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        results = change.get("results", [result()])
        claim = await bench.claim("c", *(results or []))
        if results is None:
            await bench.node.client.patch_status(
                RESOURCE_CLAIMS.as_dict(), "c", {"allocation": None}, "default"
            )
        if "uid" in change:
            claim["metadata"]["uid"] = change["uid"]
        assert words in (await bench.prepare(claim)).error
        assert not list(bench.cdi.glob("*"))


async def test_both_versions_of_the_service_answer_alike(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        info = await bench.register()
        assert (info.type, info.name) == ("DRAPlugin", "gpu.gpuslice.io")
        assert list(info.supported_versions) == [
            "v1.DRAPlugin",
            "v1beta1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth",
        ]
        await bench.offered("gpu-0")
        claim = await bench.claim("c", result())
        assert await bench.prepare(claim, "v1") == await bench.prepare(claim, "v1beta1")


# -- life ------------------------------------------------------------------------------------------------


async def test_preparing_again_changes_nothing_and_letting_go_leaves_nothing(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        claim = await bench.claim("c", result())
        first = await bench.prepare(claim)
        ((edits),) = cdi(bench, claim).values()
        region = mounted(edits, "/var/lib/gpuslice") / "region"
        region.write_bytes(b"in use")  # by a container that runs
        await bench.node.restart_agent()
        await bench.offered("gpu-0")
        assert await bench.prepare(claim) == first
        assert region.read_bytes() == b"in use"
        for _ in range(2):  # kubelet asks until it hears a yes
            assert not (await bench.unprepare(claim)).error
        assert not list(bench.cdi.glob("*"))
        assert not list((tmp_path / "host" / "containers").glob("claim-*"))
        assert not list((tmp_path / "host" / "claims").glob("*"))


async def test_after_a_reboot_every_claim_is_prepared_again(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        claims = [await bench.claim(f"c{number}", result("5Gi", share=f"s{number}")) for number in range(3)]
        before = [await bench.prepare(each) for each in claims]
        await bench.node.kill_agent()
        for file in bench.cdi.iterdir():  # /var/run is emptied
            file.unlink()
        bench.node.boot = "next"
        await bench.node.start_agent()
        assert [await bench.prepare(each) for each in claims] == before
        assert len(list(bench.cdi.iterdir())) == 3


async def test_what_was_prepared_for_claims_that_vanished_is_let_go(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        claim = await bench.claim("c", result())
        await bench.prepare(claim)
        await bench.node.client.delete(RESOURCE_CLAIMS, "c", "default")
        await bench.node.agent.claims.driver.forget_vanished()
        assert not list(bench.cdi.glob("*"))


# -- one kind of pods ------------------------------------------------------------------------------------


async def relabel(bench: ClaimBench, mode: str | None) -> None:
    """As the operator does: the label, and the agent anew."""
    await bench.node.stop_agent()
    await bench.node.client.merge_patch(NODES, NODE, {"metadata": {"labels": {LABEL_MODE: mode}}})
    await bench.node.start_agent()


async def test_claims_wait_until_no_pod_holds_a_part_by_the_device_plugin(tmp_path: Path) -> None:
    async with claim_node(tmp_path, labels={"cgpu": "true"}) as bench:
        node = bench.node
        await eventually(node.registered, "the device plugin")
        pod = await node.place("old", 4, 0)
        await node.kubelet.admit(pod)
        await relabel(bench, "claims")
        await eventually(lambda: "1 pods hold parts of its cards" in node.agent.not_ready(), "it waits")
        assert await bench.slices() == []
        claim = await bench.claim("c", result())
        assert "1 pods hold parts of its cards by the device plugin" in (await bench.prepare(claim)).error
        await node.client.delete(PODS, "old", "default", grace_s=0)
        node.kubelet.remove(pod)
        await bench.offered("gpu-0")
        assert not (await bench.prepare(claim)).error


async def test_the_device_plugin_waits_until_no_claim_holds_a_part(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        node = bench.node
        await bench.offered("gpu-0")
        claim = await bench.claim("c", result())
        await bench.prepare(claim)
        await relabel(bench, None)
        await eventually(lambda: "1 claims still hold parts" in node.agent.not_ready(), "it waits")
        assert not node.agent.server.registered

        async def withdrawn() -> bool:
            return not await bench.slices()

        await eventually(withdrawn, "nothing is offered any more")
        assert not (await bench.prepare(claim)).error  # its pod starts again
        await bench.unprepare(claim)
        await node.client.delete(RESOURCE_CLAIMS, "c", "default")
        await eventually(node.registered, "the device plugin")
        assert not (tmp_path / "host" / "claims").exists()


async def test_a_claim_that_is_allocated_and_not_yet_prepared_counts_as_well(tmp_path: Path) -> None:
    async with claim_node(tmp_path) as bench:
        node = bench.node
        await bench.offered("gpu-0")
        await bench.claim("c", result())  # its pod is on the way
        await relabel(bench, None)
        await eventually(lambda: "not known yet" in node.agent.not_ready(), "it waits")
        await node.client.delete(RESOURCE_CLAIMS, "c", "default")
        await eventually(node.registered, "the device plugin")


async def test_a_node_that_never_served_claims_asks_nothing_about_them(tmp_path: Path) -> None:
    async with claim_node(tmp_path, labels={"cgpu": "true"}) as bench:
        await eventually(bench.node.registered, "the device plugin")
        assert not bench.address.registration.exists()
