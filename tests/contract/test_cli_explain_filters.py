"""What ``gpuslice explain`` says of a pod that kube-scheduler refuses for something other than cards."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.diagnosis.places import PERSISTENT_CLAIMS, PERSISTENT_VOLUMES, STORAGE_CLASSES
from tests.builders import api_container, api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed

__all__ = ["shell"]

Object = dict[str, Any]
ZONE = "topology.kubernetes.io/zone"
FITS = "it fits"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def in_zone(name: str, zone: str, **more: str) -> Object:
    made = node(name, 8, labels={ZONE: zone})
    amounts = {"cpu": "8", "memory": "16Gi", "pods": "110", **more}
    for part in ("capacity", "allocatable"):
        made["status"][part] = {**made["status"]["capacity"], **amounts}
    return made


def asking(**spec: Any) -> Object:
    pod = api_pod("p", "4")
    pod["spec"] |= spec
    return pod


def volume(name: str, **spec: Any) -> Object:
    metadata = {"name": name, "labels": spec.pop("labels", {})}
    return {"metadata": metadata, "spec": {"storageClassName": "local", **spec}}


def only_in(zone: str) -> Object:
    terms = [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}]
    return {"required": {"nodeSelectorTerms": terms}}


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        (
            asking(containers=[api_container("4", **{"example.com/fpga": "1"})]),
            "1 example.com/fpga are wanted, a has 0 of 0 left",
        ),
        (asking(containers=[api_container("4", **{"hugepages-2Mi": "2Mi"})]), "Insufficient hugepages-2Mi"),
        (
            asking(containers=[api_container("4") | {"ports": [{"containerPort": 80, "hostPort": 80}]}]),
            "Host port 80 (TCP) is taken by default/other",
        ),
        (
            asking(
                affinity={
                    "podAntiAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"topologyKey": ZONE, "labelSelector": {}}
                        ]
                    }
                }
            ),
            "Is near default/other, which its anti-affinity avoids",
        ),
        (asking(nodeSelector={ZONE: "c"}), f"Is not {ZONE}=c, as the pod's nodeSelector requires"),
    ],
)
async def test_what_a_node_lacks_beside_cards_is_named(shell: Shell, pod: Object, said: str) -> None:
    other = placed("other", 1, "a", "0")
    other["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": 80}]
    await shell.has([in_zone("a", "a")], [other, pod])
    told = await shell("gpuslice", "explain", "p")
    assert told.code == 0, told.err
    assert said in told.out
    assert FITS not in told.out
    assert "There is room" not in told.out


async def test_a_full_node_takes_no_pod(shell: Shell) -> None:
    await shell.has([in_zone("a", "a", pods="1")], [placed("other", 1, "a", "0"), asking()])
    told = await shell("gpuslice", "explain", "p")
    assert "Too many pods" in told.out
    assert "a takes 1 pods and has 1" in told.out


@pytest.mark.parametrize(
    ("claim", "others", "out", "said"),
    [
        (None, [], "ab", 'PersistentVolumeClaim "data" does not exist'),
        ({"volumeName": "gone"}, [], "ab", "is bound to gone, which does not exist"),
        ({"volumeName": "v"}, [volume("v", nodeAffinity=only_in("b"))], "a", f"Is not {ZONE} In (b)"),
        ({"volumeName": "v"}, [volume("v", labels={ZONE: "b"})], "a", f"Is not {ZONE} In (b)"),
        ({"volumeName": "v"}, [volume("v", labels={ZONE: "b__c"})], "a", f"Is not {ZONE} In (b, c)"),
        ({"volumeName": "v"}, [volume("v")], "", ""),
        ({"storageClassName": "none"}, [], "ab", "names StorageClass none, which does not exist"),
        (
            {"storageClassName": "now"},
            [],
            "ab",
            "is not bound to a volume, and does not wait for a pod to be",
        ),
        ({"storageClassName": "local"}, [], "ab", "finds no free volume of StorageClass local"),
        (
            {"storageClassName": "local"},
            [volume("v", nodeAffinity=only_in("b"))],
            "a",
            f"Is not {ZONE} In (b)",
        ),
        ({"storageClassName": "later"}, [], "", ""),
        ({"storageClassName": "zonal"}, [], "b", f"Is not {ZONE} In (a)"),
    ],
)
async def test_a_volume_decides_where_its_pod_may_be(
    shell: Shell, claim: Object | None, others: list[Object], out: str, said: str
) -> None:
    pod = asking(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}])
    await shell.has([in_zone("a", "a"), in_zone("b", "b")], [pod])
    async with HttpTransport(Connection(shell.server.url)) as transport:
        await store(KubeClient(transport), claim, others)
    told = await shell("gpuslice", "explain", "p")
    assert told.code == 0, told.err
    assert said in told.out
    assert (FITS in told.out) is (out != "ab")
    if len(out) == 1:
        refused = next(line for line in told.out.splitlines() if said in line)
        assert refused.endswith(f"  {out}")


async def store(client: KubeClient, claim: Object | None, volumes: list[Object]) -> None:
    """StorageClasses of every kind, volumes, and the pod's claim."""
    zonal = {"allowedTopologies": [{"matchLabelExpressions": [{"key": ZONE, "values": ["a"]}]}]}
    for name, provisioner, mode, more in (
        ("local", "kubernetes.io/no-provisioner", "WaitForFirstConsumer", {}),
        ("later", "disk.example.com", "WaitForFirstConsumer", {}),
        ("now", "disk.example.com", "Immediate", {}),
        ("zonal", "disk.example.com", "WaitForFirstConsumer", zonal),
    ):
        document = {"metadata": {"name": name}, "provisioner": provisioner, "volumeBindingMode": mode}
        await client.create(STORAGE_CLASSES, document | more)
    for each in volumes:
        await client.create(PERSISTENT_VOLUMES, each)
        await client.patch_status(PERSISTENT_VOLUMES, each["metadata"]["name"], {"phase": "Available"})
    if claim is not None:
        metadata = {"name": "data", "namespace": "default"}
        await client.create(PERSISTENT_CLAIMS, {"metadata": metadata, "spec": claim})


async def test_what_kube_scheduler_said_goes_with_a_room_that_it_did_not_find(shell: Shell) -> None:
    pod = asking()
    why = "0/1 nodes are available: 1 node(s) exceed max volume count."
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
    pod["status"] = {"conditions": [refused]}
    await shell.has([in_zone("a", "a")], [pod])
    told = await shell("gpuslice", "explain", "p")
    assert f"kube-scheduler's last answer was: {why}" in told.out
    assert "There is room: if the pod still waits" not in told.out
