"""Limits that the driver enforces: a real containerd and runc run the hook before a container's program.

The driver is simulated; the cgroups are the kernel's. The programs in the pods are static and bring their own
way to the driver, so that no library could be in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gpuslice.core.contract import LABEL_MIN_TIER, NODE_TIER
from simcluster import gpu
from tests.e2e import control_plane, node
from tests.e2e.kubelet_rig import (
    STAY,
    Cluster,
    cuda_container,
    pod,
    start,
    variables,
)
from tests.e2e.node import until

MISSING = node.missing() or node.why_no_cdi()
CDI_SINCE = 29  # kubelet passes on what a device plugin names, by default
if not MISSING and control_plane.minor_version("kubelet") < CDI_SINCE:
    MISSING = f"a device plugin's CDI devices need kubelet 1.{CDI_SINCE}"
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

LIMIT_MIB = 4301  # of 4 units
PAST = "cuda_malloc_static -size=4301; echo past $?"
WITHIN = "cuda_malloc_static -size=2000; echo within $?"
SHOW = f"{PAST}; {WITHIN}; nvidia-smi; env; ls /etc/ld.so.preload /etc/gpuslice; echo complete; {STAY}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with node.own_folder("gs-limits-") as folder, ExitStack() as stack:
        yield start(folder, stack, driver="615", cgroups=True)


@pytest.fixture(autouse=True)
def leave_no_pods(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.clear()


def tier(cluster: Cluster) -> str:
    return str(cluster.node()["metadata"]["annotations"].get(NODE_TIER, ""))


def tenant(cluster: Cluster, name: str) -> dict[str, Any]:
    gpus = {"name": "gpus", "hostPath": {"path": str(cluster.places.folder / "gpus")}}
    return pod(name, cuda_container(4, SHOW), volumes=[gpus])


def test_a_static_program_is_refused_past_its_limit_from_its_first_instruction(cluster: Cluster) -> None:
    until(lambda: tier(cluster) == "driver", f"the node says driver: {cluster.agent.log()[-2000:]}")
    for name in ("first", "second"):
        document = tenant(cluster, name)
        document["metadata"]["labels"] = {LABEL_MIN_TIER: "driver"}
        cluster.create(document)
        said = cluster.said(name)
        assert "past 1" in said
        assert "within 0" in said
    assert "/etc/ld.so.preload" not in said, "the second: it was seen that the runtime runs hooks"
    assert any(f"{LIMIT_MIB}MiB" in line for line in said), "what nvidia-smi shows"
    found = variables(said)
    assert (found["NVIDIA_GPU_MEMORY_REQUEST"], found["NVIDIA_GPU_MEMORY_LIMIT"]) == ("0", str(LIMIT_MIB))


def test_what_a_pod_says_of_its_limit_is_not_believed(cluster: Cluster) -> None:
    document = tenant(cluster, "liar")
    document["spec"]["containers"][0]["env"] += [
        {"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "16000"},
        {"name": "NVIDIA_GPU_MEMORY_REQUEST", "value": "16000"},
    ]
    cluster.create(document)
    said = cluster.said("liar")
    assert "past 1" in said
    assert variables(said)["NVIDIA_GPU_MEMORY_LIMIT"] == str(LIMIT_MIB)


def test_a_container_whose_limit_cannot_be_set_does_not_start(cluster: Cluster) -> None:
    with gpu.Machine(cluster.places.folder / "gpus" / "machine") as machine:
        for card in range(2):
            machine.refuse(card, "nvmlDeviceSetMemoryLimits", 17)
        cluster.create(tenant(cluster, "unfenced"))

        def why() -> str:
            (status,) = cluster.pod("unfenced")["status"].get("containerStatuses", [{"state": {}}])
            return json.dumps(status["state"])

        until(lambda: "the GPU limits are not set" in why(), f"it does not start: {why()}")
        for card in range(2):
            machine.refuse(card, "", 0)
