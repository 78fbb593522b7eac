"""The simulated allocator of claims beside kube-scheduler's own: the same devices, or none by both.

Claims of every shape that the simulation knows are drawn at random. Each is given to the real scheduler, and
to the simulated one on what the real one had given out by then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from simcluster.cluster.quantity import parse_quantity
from simcluster.scheduler.allocator import allocate, devices_of
from tests.builders import api_node
from tests.e2e import control_plane
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api, until

CLAIMS_SINCE = 36  # consumable capacity and taints of devices are on by default
pytestmark = [
    *ON_A_CONTROL_PLANE,
    pytest.mark.skipif(
        control_plane.missing() == "" and control_plane.minor_version() < CLAIMS_SINCE,
        reason=f"claims of parts of devices need Kubernetes 1.{CLAIMS_SINCE}",
    ),
]
DRA = "/apis/resource.k8s.io/v1"
CLAIMS = f"{DRA}/namespaces/default/resourceclaims"
MOST = 30  # claims that are drawn
Object = dict[str, Any]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane.api_server(tmp_path_factory.mktemp("plane")))
        stack.enter_context(control_plane.scheduler(plane, []))
        api = stack.enter_context(closing(Api(plane)))
        api.create("namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
        watched = {"resource.kubernetes.io/admin-access": "true"}
        api.patch("namespaces/default", {"metadata": {"labels": watched}})
        yield api


class Draw:
    """Devices and claims of one node, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.node = self.device_class = f"n{seed}"
        self.driver = f"{self.node}.example.com"

    def device(self, index: int) -> Object:
        size = self.rng.choice([8, 12, 16])
        made: Object = {"name": f"d{index}", "attributes": {"uuid": {"string": f"u{index}"}}}
        made["attributes"]["rack"] = {"string": self.rng.choice(["r1", "r2"])}
        memory: Object = {"value": f"{size}Gi"}
        if self.rng.random() < 0.85:
            made["allowMultipleAllocations"] = True
            valid: list[Object] = [
                {"validRange": {"min": "1Gi", "max": f"{size}Gi", "step": "1Gi"}},
                {"validValues": ["2Gi", "4Gi", f"{size}Gi"]},
                {},
            ]
            if policy := self.rng.choice(valid):
                memory["requestPolicy"] = {"default": f"{size}Gi", **policy}
        made["capacity"] = {"memory": memory}
        if self.rng.random() < 0.25:
            made["taints"] = [{"key": "sick", "value": "xid", "effect": "NoSchedule"}]
        return made

    def wish(self) -> Object:
        made: Object = {"deviceClassName": self.device_class}
        if self.rng.random() < 0.85:
            memory = self.rng.choice(["512Mi", "1Gi", "1Gi", "1500Mi", "3Gi", "9Gi", "20Gi"])
            made["capacity"] = {"requests": {"memory": memory}}
        if self.rng.random() < 0.25:
            made["count"] = 2
        if self.rng.random() < 0.3:
            made["tolerations"] = [{"key": "sick", "operator": "Exists"}]
        if self.rng.random() < 0.15:
            made["adminAccess"] = True
        return made

    def claim(self) -> Object:
        requests: list[Object] = []
        for name in ("a", "b")[: self.rng.choice([1, 1, 2])]:
            if self.rng.random() < 0.2:
                choices = [{"name": each, **self.wish()} for each in ("first", "second")]
                requests.append({"name": name, "firstAvailable": choices})
            else:
                requests.append({"name": name, "exactly": self.wish()})
        devices: Object = {"requests": requests}
        if self.rng.random() < 0.4:
            rule = self.rng.choice(["matchAttribute", "distinctAttribute"])
            attribute = f"{self.driver}/{self.rng.choice(['uuid', 'rack'])}"
            devices["constraints"] = [{rule: attribute}]
        return {"spec": {"devices": devices}}


def settled(api: Api, name: str) -> Object:
    """The pod once kube-scheduler has said yes or no."""

    def said() -> Object | None:
        pod = api.get(f"namespaces/default/pods/{name}")
        conditions = pod["status"].get("conditions") or ()
        found = [each for each in conditions if each["type"] == "PodScheduled"]
        return (
            pod if found and (found[0]["status"] == "True" or found[0]["reason"] == "Unschedulable") else None
        )

    until(lambda: said() is not None, f"{name} is looked at")
    found = said()
    assert found is not None
    return found


def plain(results: list[Object]) -> list[tuple[Any, ...]]:
    """What of an allocation must be the same."""
    return sorted(
        (
            each["request"],
            each["device"],
            each.get("adminAccess", False),
            tuple(
                (name, parse_quantity(str(amount)))
                for name, amount in (each.get("consumedCapacity") or {}).items()
            ),
        )
        for each in results
    )


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_both_give_the_same_devices(api: Api, seed: int) -> None:
    draw = Draw(seed)
    node = api_node(draw.node, 0, 0, labels={"seed": draw.node})
    api.create("nodes", node)
    amounts = {"cpu": "64", "memory": "64Gi", "pods": "110"}
    ready = [{"type": "Ready", "status": "True"}]
    api.patch(
        f"nodes/{draw.node}/status",
        {"status": {"capacity": amounts, "allocatable": amounts, "conditions": ready}},
    )
    api.patch(f"nodes/{draw.node}", {"spec": {"taints": None}})  # no node controller runs that would
    selector = {"cel": {"expression": f'device.driver == "{draw.driver}"'}}
    api.create(
        f"{DRA}/deviceclasses", {"metadata": {"name": draw.device_class}, "spec": {"selectors": [selector]}}
    )
    pool = {"name": draw.node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": draw.driver, "nodeName": draw.node, "pool": pool}
    devices = [draw.device(index) for index in range(4)]
    published = api.create(
        f"{DRA}/resourceslices", {"metadata": {"name": draw.node}, "spec": {**spec, "devices": devices}}
    )
    classes = {draw.device_class: api.get(f"{DRA}/deviceclasses/{draw.device_class}")}

    given: list[Object] = []
    outcomes = set()
    for number in range(MOST):
        name = f"{draw.node}-{number}"
        claim = api.create(CLAIMS, {"metadata": {"name": name}, **draw.claim()})
        wants = {
            "resourceClaims": [{"name": "devices", "resourceClaimName": name}],
            "nodeSelector": {"seed": draw.node},
        }
        main = {"name": "main", "image": "none", "resources": {"claims": [{"name": "devices"}]}}
        api.create(
            "namespaces/default/pods", {"metadata": {"name": name}, "spec": {"containers": [main], **wants}}
        )
        bound = bool(settled(api, name)["spec"].get("nodeName"))
        simulated = allocate([claim], devices_of([published], draw.node), classes, given)
        real = api.get(f"{CLAIMS}/{name}")["status"]["allocation"]["devices"]["results"] if bound else None
        why = f"seed {seed}, claim {number}: {claim['spec']}"
        assert (simulated is None) == (real is None), why
        if simulated is not None and real is not None:
            assert plain(simulated[0]) == plain(real), why
            given += real
        else:
            api.delete(f"namespaces/default/pods/{name}?gracePeriodSeconds=0")
        outcomes.add(bound)
    assert outcomes == {True, False}
