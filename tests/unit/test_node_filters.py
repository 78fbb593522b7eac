"""What keeps a pod from a node, cards aside, as kube-scheduler's filters find it: several inputs for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube import objects
from gpuslice.core.host_resources import HostResources
from gpuslice.core.node_filters import NodeFilters, Shortage, Volume
from gpuslice.diagnosis.places import place_of, places_of, wish_of
from tests.builders import make_request

Object = dict[str, Any]
PRESSED = "Taint node.kubernetes.io/disk-pressure:NoSchedule is not tolerated"
ZONE = "topology.kubernetes.io/zone"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
FPGA, DISK = "example.com/fpga", "ephemeral-storage"
WEB = {"matchLabels": {"app": "web"}}


def api_node(name: str, zone: str = "a", **allocatable: str) -> Object:
    amounts = {
        "cpu": "8",
        "memory": "8Gi",
        "pods": "110",
        **{k.replace("__", "/"): v for k, v in allocatable.items()},
    }
    labels = {ZONE: zone, "kubernetes.io/hostname": name}
    return {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": amounts}}


def api_pod(
    name: str = "p", node: str = "", labels: Object | None = None, namespace: str = "default", **spec: Any
) -> Object:
    resources, ports = spec.pop("resources", {}), spec.pop("ports", [])
    containers = spec.pop("containers", [{"name": "c", "resources": resources, "ports": ports}])
    metadata = {"name": name, "namespace": namespace, "labels": labels or {}}
    return {"metadata": metadata, "spec": {"containers": containers, "nodeName": node, **spec}}


def limits(name: str, amount: str) -> Object:
    return {"limits": {name: amount}}


def requests(name: str, amount: str) -> Object:
    return {"requests": {name: amount}}


def filters(pod: Object, nodes: list[Object], *there: Object, volumes: Sequence[Volume] = ()) -> NodeFilters:
    found = msgspec.convert(pod, objects.Pod)
    pods = msgspec.convert(list(there), list[objects.Pod])
    places = places_of(msgspec.convert(nodes, list[objects.Node]), pods)
    return NodeFilters(places, wish_of(found, make_request(), volumes=volumes))


def obstacles(made: NodeFilters) -> list[str]:
    return [made.obstacle(place) for place in made.places]


def shortages(made: NodeFilters) -> list[Shortage | None]:
    return [made.shortage(place, HostResources()) for place in made.places]


# -- NodeResourcesFit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "allocatable", "taken", "what", "never"),
    [
        (limits(FPGA, "1"), {}, {}, FPGA, True),
        (limits(FPGA, "1"), {FPGA: "1"}, limits(FPGA, "1"), FPGA, False),
        (limits(FPGA, "1"), {FPGA: "1"}, {}, "", False),
        (limits("hugepages-2Mi", "4Mi"), {"hugepages-2Mi": "2Mi"}, {}, "hugepages-2Mi", True),
        (limits("hugepages-1Gi", "1Gi"), {"hugepages-2Mi": "2Gi"}, {}, "hugepages-1Gi", True),
        (requests(DISK, "6Gi"), {DISK: "10Gi"}, requests(DISK, "5Gi"), DISK, False),
        (requests("cpu", "500m"), {"cpu": "1"}, requests("cpu", "501m"), "cpu", False),
        (requests("cpu", "500"), {}, {}, "cpu", True),
        (requests("memory", "1Gi"), {"memory": "1Gi"}, requests("memory", "1"), "memory", False),
        (limits("nvidia.com/gpu", "1"), {"nvidia.com/gpu": "0"}, {}, "nvidia.com/gpu", True),
        (limits(FPGA, "0"), {}, {}, "", False),
        (limits("aliyun.com/gpu-mem", "4"), {}, {}, "", False),
        ({}, {"pods": "1"}, requests("cpu", "0"), "pods", False),
        ({}, {"pods": "0"}, {}, "pods", True),
        ({}, {"pods": "2"}, requests("cpu", "0"), "", False),
    ],
)
def test_what_a_node_has_too_little_of_is_named(
    asked: Object, allocatable: Object, taken: Object, what: str, never: bool
) -> None:
    there = [api_pod("other", "n1", resources=taken)] if taken else []
    (found,) = shortages(filters(api_pod(resources=asked), [api_node("n1", **allocatable)], *there))
    reason = "Too many pods" if what == "pods" else f"Insufficient {what}"
    assert (found.reason, found.never) == (reason, never) if found else what == ""
    assert found is None or "n1" in found.detail


def test_a_pods_peak_is_counted_as_kube_scheduler_does() -> None:
    """Sidecars stay beside the apps, an init container runs beside those before it; overhead comes on top."""

    def asking(name: str, amount: str, **more: str) -> Object:
        return {"name": name, "resources": {"limits": {FPGA: amount}}, **more}

    inits = [asking("s", "1", restartPolicy="Always"), asking("i", "4")]
    pod = api_pod(containers=[asking("a", "1"), asking("b", "1")], initContainers=inits)
    whole = api_pod(resources={"requests": {"cpu": "1"}}, overhead={"cpu": "250m"})
    for made, least in ((pod, {FPGA: "5"}), (whole, {"cpu": "1250m"})):
        name, amount = next(iter(least.items()))
        assert shortages(filters(made, [api_node("n1", **{name: amount})])) == [None]
        less = "4" if amount == "5" else "1249m"
        assert shortages(filters(made, [api_node("n1", **{name: less})])) != [None]
    of_pod = api_pod(resources={"requests": {"cpu": "1"}})
    of_pod["spec"]["resources"] = {"requests": {"cpu": "9"}}
    assert shortages(filters(of_pod, [api_node("n1")])) != [None]


# -- NodePorts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "taken", "clash"),
    [
        ({"hostPort": 80}, {"hostPort": 80}, True),
        ({"hostPort": 80}, {"hostPort": 81}, False),
        ({"hostPort": 80}, {"containerPort": 80}, False),
        ({"hostPort": 80, "protocol": "UDP"}, {"hostPort": 80}, False),
        ({"hostPort": 80, "hostIP": "127.0.0.1"}, {"hostPort": 80}, True),
        ({"hostPort": 80, "hostIP": "0.0.0.0"}, {"hostPort": 80, "hostIP": "10.0.0.1"}, True),
        ({"hostPort": 80, "hostIP": "127.0.0.1"}, {"hostPort": 80, "hostIP": "10.0.0.1"}, False),
    ],
)
def test_a_host_port_that_is_taken(wanted: Object, taken: Object, clash: bool) -> None:
    there = [api_pod("other", "n1", ports=[taken])]
    made = filters(api_pod(ports=[wanted]), [api_node("n1"), api_node("n2")], *there)
    assert obstacles(made) == ["Host port 80 (TCP) is taken by default/other" if clash else "", ""]


def test_a_sidecars_host_port_counts_and_an_init_containers_does_not() -> None:
    init = {"name": "i", "ports": [{"hostPort": 80}]}
    for kind, free in (({"restartPolicy": "Always"}, False), ({}, True)):
        there = [api_pod("other", "n1", initContainers=[init | kind])]
        assert (
            obstacles(filters(api_pod(ports=[{"hostPort": 80}]), [api_node("n1")], *there)) == [""]
        ) is free


# -- NodeUnschedulable, TaintToleration ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toleration", "cordoned", "tainted"),
    [
        ([], "Cordoned", PRESSED),
        ([{"operator": "Exists"}], "", ""),
        (
            [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}],
            "",
            PRESSED,
        ),
        ([{"key": "node.kubernetes.io/disk-pressure", "operator": "Exists"}], "Cordoned", ""),
        ([{"operator": "Exists", "effect": "NoExecute"}], "Cordoned", PRESSED),
    ],
)
def test_cordons_and_taints_are_tolerated_alike(
    toleration: list[Object], cordoned: str, tainted: str
) -> None:
    one, two = api_node("n1"), api_node("n2")
    one["spec"] = {"unschedulable": True}
    two["spec"] = {"taints": [{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]}
    assert obstacles(filters(api_pod(tolerations=toleration), [one, two])) == [cordoned, tainted]


# -- VolumeBinding, VolumeZone ---------------------------------------------------------------------------


ON_B = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}


def in_zone(*zones: str) -> Object:
    return {"matchExpressions": [{"key": ZONE, "operator": "In", "values": list(zones)}]}


@pytest.mark.parametrize(
    ("volume", "a", "b"),
    [
        (Volume("data", "does not exist"), "PersistentVolumeClaim", "PersistentVolumeClaim"),
        (Volume("data"), "", ""),
        (Volume("data", terms=([in_zone("a")],)), "", f"Is not {ZONE} In (a)"),
        (Volume("data", terms=([in_zone("a"), in_zone("b")],)), "", ""),
        (Volume("data", terms=([in_zone("a", "b")], [in_zone("b")])), f"Is not {ZONE} In (b)", ""),
        (Volume("data", terms=([ON_B],)), "Is not metadata.name In (b)", ""),
    ],
)
def test_a_volume_that_is_elsewhere(volume: Volume, a: str, b: str) -> None:
    made = filters(api_pod(), [api_node("a", "a"), api_node("b", "b")], volumes=[volume])
    for found, expected in zip(obstacles(made), (a, b), strict=True):
        assert found.startswith(expected)
        assert bool(found) is bool(expected)
        assert not expected or '"data"' in found


# -- InterPodAffinity ------------------------------------------------------------------------------------


NO_APP = {"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}


def affinity(kind: str, selector: Object | None, key: str = ZONE, **more: Any) -> Object:
    return {kind: {REQUIRED: [{"topologyKey": key, "labelSelector": selector, **more}]}}


@pytest.mark.parametrize(
    ("kind", "term", "other", "kept"),
    [
        ("podAntiAffinity", {"selector": WEB}, {}, "a"),
        ("podAntiAffinity", {"selector": WEB, "key": "kubernetes.io/hostname"}, {}, "n1"),
        (
            "podAntiAffinity",
            {"selector": NO_APP},
            {},
            "",
        ),
        ("podAntiAffinity", {"selector": {}}, {}, "a"),
        ("podAntiAffinity", {"selector": None}, {}, ""),
        ("podAntiAffinity", {"selector": WEB}, {"namespace": "team"}, ""),
        ("podAntiAffinity", {"selector": WEB, "namespaces": ["team"]}, {"namespace": "team"}, "a"),
        ("podAntiAffinity", {"selector": WEB, "namespaceSelector": {}}, {"namespace": "team"}, "a"),
        ("podAffinity", {"selector": WEB}, {}, "b"),
        ("podAffinity", {"selector": {"matchLabels": {"app": "db"}}}, {}, "ab"),
        ("podAffinity", {"selector": WEB, "key": "no-such-label"}, {}, "ab"),
    ],
)
def test_pods_that_must_or_must_not_be_near(kind: str, term: Object, other: Object, kept: str) -> None:
    """`kept`: the zones whose nodes are out, or the one node."""
    there = [api_pod("web", "n1", {"app": "web"}, **other)]
    asks = api_pod(affinity=affinity(kind, **term))
    made = filters(asks, [api_node("n1"), api_node("n2"), api_node("n3", "b")], *there)
    out = [bool(found) for found in obstacles(made)]
    assert out == ([True, False, False] if kept == "n1" else ["a" in kept, "a" in kept, "b" in kept])


def test_whoever_is_there_may_keep_others_away() -> None:
    there = [api_pod("web", "n1", affinity=affinity("podAntiAffinity", {"matchLabels": {"app": "noisy"}}))]
    nodes = [api_node("n1"), api_node("n2", "b")]
    found = obstacles(filters(api_pod(labels={"app": "noisy"}), nodes, *there))
    assert found == [f"Is near default/web, whose anti-affinity avoids it ({ZONE}=a)", ""]
    assert obstacles(filters(api_pod(), nodes, *there)) == ["", ""]


def test_the_first_of_pods_that_belong_together_may_be_anywhere() -> None:
    own = affinity("podAffinity", WEB)
    nodes = [api_node("n1"), api_node("n2", "b")]
    first = api_pod(labels={"app": "web"}, affinity=own)
    assert obstacles(filters(first, nodes)) == ["", ""]
    assert obstacles(filters(first, nodes, api_pod("w", "n2", {"app": "web"}))) != ["", ""]


# -- PodTopologySpread -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "out"),
    [
        ({}, "a"),
        ({"maxSkew": 2}, ""),
        ({"whenUnsatisfiable": "ScheduleAnyway"}, ""),
        ({"labelSelector": {"matchLabels": {"app": "db"}}}, ""),
        ({"topologyKey": "no-such-label"}, "ab"),
        ({"minDomains": 3, "maxSkew": 1}, "a"),
        ({"matchLabelKeys": ["version"]}, ""),
    ],
)
def test_pods_are_spread_as_they_ask(constraint: Object, out: str) -> None:
    whole = {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": WEB}
    there = [api_pod(f"w{number}", "n1", {"app": "web", "version": "1"}) for number in range(1)]
    pod = api_pod(labels={"app": "web", "version": "2"}, topologySpreadConstraints=[whole | constraint])
    made = filters(pod, [api_node("n1"), api_node("n2", "b")], *there)
    assert [bool(found) for found in obstacles(made)] == ["a" in out, "b" in out]


def test_what_nobody_knows_of_a_nodes_pods_keeps_nobody_out() -> None:
    """The console keeps only the pods that share cards."""
    nodes = msgspec.convert([api_node("n1", pods="0")], list[objects.Node])
    pod = msgspec.convert(
        api_pod(ports=[{"hostPort": 80}], affinity=affinity("podAffinity", WEB)), objects.Pod
    )
    made = NodeFilters([place_of(nodes[0])], wish_of(pod, make_request()))
    assert obstacles(made) == [""]
    assert shortages(made) == [None]
