"""The way of a claim on a real control plane and kubelet; only the cards are simulated.

The tests share one node and run in order; each leaves it empty.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kubelet.podresources import PodResources
from gpuslice.apps.exporter.device_grants import claim_records, claimed_parts
from gpuslice.apps.exporter.node_pods import NodePods, known_pod
from gpuslice.core.contract import LABEL_CLAIMED, LABEL_CLAIMS, VENDOR_NAMES
from gpuslice.core.units import limit_bytes
from tests.e2e import control_plane, node
from tests.e2e.claims_rig import (
    CLAIMS,
    HEALTH_SINCE,
    LABELS,
    SETTINGS,
    claim,
    claiming,
    claims_cluster,
    devices,
    leave_no_claims,
    missing,
    prepared,
    request,
    translate,
    using,
)
from tests.e2e.kubelet_rig import (
    CARD_MIB,
    GPUSLICE,
    NODE,
    STAY,
    UNITS,
    Cluster,
    container,
    cuda_container,
    cuda_files,
    limits_of,
    pod,
    variables,
)
from tests.e2e.node import until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(missing()), reason=missing())]

GPU_MEM, GPU_CORE, GPU_COUNT = VENDOR_NAMES.memory, VENDOR_NAMES.compute, VENDOR_NAMES.cards


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with claims_cluster() as found:
        yield found


@pytest.fixture(autouse=True)
def leave_nothing(cluster: Cluster) -> Iterator[None]:
    yield
    leave_no_claims(cluster)


# -- tests -----------------------------------------------------------------------------------------------


def test_the_node_publishes_its_cards_and_no_extended_resource(cluster: Cluster) -> None:
    until(lambda: len(devices(cluster)) == 2, "two devices")
    assert {each["capacity"]["memory"]["value"] for each in devices(cluster)} == {f"{UNITS}Gi"}
    assert cluster.allocatable() == (None, None)
    until(lambda: "registered with kubelet" in cluster.agent.log(), "kubelet takes the driver")


TRY = "nvidia-smi; cuda_malloc -size=3000; echo under=$?; cuda_malloc -size=4400 2>&1; echo over=$?; "
TRY += "echo complete; " + STAY


def test_a_container_sees_its_share_and_gets_no_more(cluster: Cluster) -> None:
    claim(cluster, "c", request("gpu", "4Gi"))
    volume = {"name": "gpus", "hostPath": {"path": str(cluster.places.folder / "gpus")}}
    main = cuda_container(0, TRY, resources={"claims": [{"name": "gpu"}]})
    cluster.create(claiming("cuda", "c", main, volumes=[volume]))
    cluster.running("cuda")
    lines = cluster.said("cuda")
    assert any("4301MiB" in line for line in lines), lines
    assert "under=0" in lines
    assert "over=0" not in lines
    told = cluster.api.get(f"{CLAIMS}/c")["status"]["devices"][0]
    assert told["data"]["memoryLimitBytes"] == limit_bytes(CARD_MIB, 4, UNITS)


def test_two_containers_have_a_limit_each_on_one_card(cluster: Cluster) -> None:
    claim(cluster, "c", request("a", "4Gi"), request("b", "2Gi"))
    cluster.create(claiming("p", "c", using("a", name="one"), using("b", name="two")))
    cluster.running("p")
    for name, units in (("one", 4), ("two", 2)):
        lines = cluster.said("p", name)
        seen = variables(lines)
        assert limits_of(lines) == {seen["NVIDIA_VISIBLE_DEVICES"]: limit_bytes(CARD_MIB, units, UNITS)}
    listed = asyncio.run(PodResources(cluster.places.pod_resources).read(lambda _: False)).claims
    pods = NodePods()
    pods.put(known_pod(msgspec.convert(cluster.pod("p"), objects.Pod)))
    parts = claimed_parts(listed, claim_records(cluster.places.folder / "gpuslice"), pods)
    assert {key.container: units for (key, _), (units, _) in parts.items()} == {"one": 4, "two": 2}


def test_cards_are_filled_and_the_next_pod_waits(cluster: Cluster) -> None:
    for number in range(7):
        claim(cluster, f"c{number}", request("gpu", "5Gi"))
        cluster.create(claiming(f"p{number}", f"c{number}", using()))
    until(
        lambda: sum(cluster.bound(f"p{number}") for number in range(7)) == 6, "six of seven fit on two cards"
    )
    bound = [f"p{number}" for number in range(7) if cluster.bound(f"p{number}")]
    cards = [
        variables(cluster.said(name))["ALIYUN_COM_GPU_MEM_IDX"] for name in bound if cluster.running(name)
    ]
    assert sorted(cards) == ["0"] * 3 + ["1"] * 3


def test_restarts_of_driver_and_kubelet_leave_pods_as_they_are(cluster: Cluster) -> None:
    claim(cluster, "c", request("gpu", "4Gi"))
    cluster.create(claiming("p", "c", using()))
    cluster.running("p")
    (spec,) = prepared(cluster)
    before = json.loads(spec.read_text())
    cluster.agent.stop()
    cluster.kubelet.stop()
    cluster.kubelet.start()
    cluster.agent.start()
    until(lambda: "registered with kubelet" in cluster.agent.log(), "kubelet takes the driver again")
    until(lambda: len(devices(cluster)) == 2, "the slices that kubelet wiped are back")
    claim(cluster, "d", request("gpu", "4Gi"))
    cluster.create(claiming("q", "d", using()))
    cluster.running("q")
    assert cluster.running("p")["status"]["containerStatuses"][0]["restartCount"] == 0
    assert json.loads(spec.read_text()) == before


def test_a_sick_card_is_not_allocated_and_its_pod_is_told(cluster: Cluster) -> None:
    claim(cluster, "c", request("gpu", "4Gi"))
    cluster.create(claiming("p", "c", using()))
    cluster.running("p")
    if control_plane.minor_version("kubelet") < HEALTH_SINCE:
        pytest.skip(f"before Kubernetes 1.{HEALTH_SINCE} the pod's status does not tell of health")

    def told() -> list[dict[str, Any]]:
        statuses = cluster.pod("p")["status"]["containerStatuses"]
        return [each for one in statuses for each in one.get("allocatedResourcesStatus", ())]

    found = until(told, "the pod's status tells of its device")
    assert found[0]["resources"][0]["health"] == "Healthy"


# -- unchanged manifests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translating(cluster: Cluster) -> Iterator[Cluster]:
    """With the chart's policy and the controller of templates; namespace default is labelled."""
    if control_plane.minor_version() < 36:
        pytest.skip("before Kubernetes 1.36 the webhook does it: test_older_claims.py")
    translate(cluster.api)
    cluster.api.patch("namespaces/default", {"metadata": {"labels": {LABEL_CLAIMS: "true"}}})
    claims = [*GPUSLICE, "claims", f"--kubeconfig={cluster.plane.kubeconfig}", "--port=0", "--host=127.0.0.1"]
    with control_plane.process("claims", cluster.plane.folder, claims):
        until(lambda: is_translated(cluster), "the API server follows the policy")
        yield cluster
    cluster.api.patch("namespaces/default", {"metadata": {"labels": {LABEL_CLAIMS: None}}})


def is_translated(cluster: Cluster) -> bool:
    made = cluster.api.create("namespaces/default/pods?dryRun=All", pod("probe", container(1)))
    return "resourceClaims" in made["spec"]


def test_unchanged_manifests_become_claims(translating: Cluster) -> None:
    """The seeds' story: two pods of 4 units on one card, a third that is too much waits."""
    cluster = translating
    volume = {"name": "gpus", "hostPath": {"path": str(cluster.places.folder / "gpus")}}
    cluster.create(pod("binpack-0", cuda_container(4, TRY), volumes=[volume]))
    lines = cluster.said("binpack-0") if cluster.running("binpack-0") else []
    assert any("4301MiB" in line for line in lines), lines
    assert "over=0" not in lines
    found = cluster.pod("binpack-0")
    assert found["metadata"]["labels"][LABEL_CLAIMED] == "true"
    assert (
        "limits" not in found["spec"]["containers"][0]["resources"]
        or not (found["spec"]["containers"][0]["resources"]["limits"])
    )
    cluster.create(pod("two", container(6, name="a"), container(5, name="b")))
    cluster.running("two")
    cards = {variables(cluster.said("two", name))["ALIYUN_COM_GPU_MEM_IDX"] for name in ("a", "b")}
    assert len(cards) == 1  # the containers of a pod share its card
    cluster.create(pod("core", container(0, resources={"limits": {GPU_MEM: "2", GPU_CORE: "25"}})))
    cluster.running("core")
    assert any("share=25" in line for line in cluster.said("core"))
    cluster.create(pod("large", container(14)))
    until(lambda: refusal(cluster, "large"), "kube-scheduler says why")
    assert "cannot allocate all claims" in refusal(cluster, "large")


STATEFUL_SETS = "/apis/apps/v1/namespaces/default/statefulsets"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "sharing"
IMAGES = "registry.cn-shanghai.aliyuncs.com/tensorflow-samples/cuda-malloc"


def test_the_vendors_manifests_run_as_they_are(translating: Cluster) -> None:
    """Two programs on one card, and a third that takes 6 GiB of its 4: the files, not a word changed."""
    cluster = translating
    for tag, mib in (("3G", 3000), ("6G", 6000)):
        script = f"nvidia-smi; cuda_malloc -size={mib} 2>&1; code=$?; echo complete; "
        script += f"[ $code = 0 ] || exit $code; {STAY}"
        node.load_image(cluster.places, f"{IMAGES}:{tag}", ["sh", "-c", script], cuda_files())
    documents = [yaml.safe_load((EXAMPLES / f"app-{name}-v1.yaml").read_text()) for name in ("3g", "6g")]
    for each in documents:
        cluster.api.create(STATEFUL_SETS, each)
    try:
        names = ("app-3g-v1-0", "app-3g-v1-1")
        until(lambda: all(map(partial(there, cluster), (*names, "app-6g-v1-0"))), "the pods are made")
        said = {name: cluster.said(name, "app-3g-v1") for name in names if cluster.running(name)}
        assert all(any("4301MiB" in line for line in lines) for lines in said.values()), said
        until(lambda: restarts(cluster, "app-6g-v1-0") > 0, "the third program is started again")
        refused = cluster.said("app-6g-v1-0", "app-6g-v1")
        assert any("code=2(cudaErrorMemoryAllocation)" in line for line in refused), refused
        assert [restarts(cluster, name) for name in names] == [0, 0], "its neighbours go on"
        given = [each["status"]["allocation"]["devices"] for each in cluster.api.get(CLAIMS)["items"]]
        assert len(given) == 3
        assert len({result["device"] for each in given for result in each["results"]}) == 1
    finally:
        for each in documents:
            cluster.api.delete(f"{STATEFUL_SETS}/{each['metadata']['name']}")


def there(cluster: Cluster, name: str) -> bool:
    return name in {each["metadata"]["name"] for each in cluster.api.get("namespaces/default/pods")["items"]}


def restarts(cluster: Cluster, name: str) -> int:
    return sum(each["restartCount"] for each in cluster.pod(name)["status"].get("containerStatuses", ()))


def refusal(cluster: Cluster, name: str) -> str:
    conditions = cluster.pod(name)["status"].get("conditions", [])
    return next((each.get("message", "") for each in conditions if each["type"] == "PodScheduled"), "")


def test_what_can_never_be_given_is_said_on_the_pod(translating: Cluster) -> None:
    odd = pod("odd", container(5))
    odd["metadata"]["labels"] = {GPU_COUNT: "2"}
    translating.create(odd)

    def told() -> list[str]:
        events = translating.api.get("namespaces/default/events")["items"]
        return [each["message"] for each in events if each["reason"] == "GPUClaimImpossible"]

    (message,) = until(told, "an event")
    assert "must be a multiple of 2" in message


def test_a_pod_may_stay_as_it_is(translating: Cluster) -> None:
    old = pod("old", container(4))
    old["metadata"]["labels"] = {LABEL_CLAIMS: "false"}
    translating.create(old)
    found = translating.pod("old")
    assert "resourceClaims" not in found["spec"]
    assert found["spec"]["containers"][0]["resources"]["limits"] == {GPU_MEM: "4"}


# -- the last one: the node is gone afterwards -------------------------------------------------------------


def test_a_reboot_loses_no_pod(cluster: Cluster) -> None:
    """Every container ends at once, /var/run is emptied, and all pods come back with what they had."""
    names = [f"p{number}" for number in range(4)]
    for name in names:
        claim(cluster, name, request("gpu", "5Gi"))
        cluster.create(claiming(name, name, using(), restartPolicy="Always"))
    before = {name: limits_of(cluster.said(name)) for name in names if cluster.running(name)}
    cluster.agent.stop()
    cluster.kubelet.stop()
    os.kill(cluster.containerd, signal.SIGKILL)
    for file in prepared(cluster):
        file.unlink()
    with ExitStack() as stack:
        pid = stack.enter_context(node.containerd(cluster.places))
        cluster.containerd = pid
        flags = control_plane.claim_flags()
        cluster.kubelet = node.kubelet(
            cluster.plane, cluster.places, pid, NODE, LABELS, settings=SETTINGS, flags=flags
        )
        stack.callback(cluster.kubelet.stop)
        cluster.kubelet.start()
        time.sleep(2)  # kubelet is up first, as it is after a reboot, and has no driver to ask
        cluster.agent.start()
        for name in names:
            until(partial(restarted, cluster, name), f"{name} runs again")
            assert cluster.pod(name)["status"]["phase"] == "Running"
        uids = {name: cluster.pod(name)["metadata"]["uid"] for name in names}
        for name in names:
            log = cluster.places.folder / "logs" / f"default_{name}_{uids[name]}" / "main" / "1.log"
            lines = until(partial(finished, log), f"{name} says what it has")
            assert limits_of(lines) == before[name]
        leave_no_claims(cluster)


def restarted(cluster: Cluster, name: str) -> bool:
    statuses = cluster.pod(name)["status"].get("containerStatuses", [])
    return bool(statuses) and all(
        each["restartCount"] == 1 and "running" in each["state"] for each in statuses
    )


def finished(log: Path) -> list[str]:
    text = log.read_text() if log.exists() else ""
    lines = [line.split(" ", 3)[-1] for line in text.splitlines()]
    return lines if "complete" in lines else []
