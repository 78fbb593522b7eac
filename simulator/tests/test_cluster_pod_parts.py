"""What of a pod may change, and what its namespace and its size forbid, in the API server's words."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_wire import JSON_PATCH, PODS, STRATEGIC, Wire, make_pod

MEM = "aliyun.com/gpu-mem"
RANGES = "/api/v1/namespaces/default/limitranges"
QUOTAS = "/api/v1/namespaces/default/resourcequotas"
MOST_BYTES = 262_144
Object = dict[str, Any]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def container(name: str = "c", /, **limits: Any) -> Object:
    return {"name": name, "image": "x", "resources": {"limits": limits}}


def limits_of(pod: Object) -> list[Object]:
    return [each["resources"].get("limits", {}) for each in pod["spec"]["containers"]]


# -- resize --------------------------------------------------------------------------------------------------


def resized(wire: Wire, limits: Object, part: str = "containers") -> tuple[int, Object]:
    patch = {"spec": {part: [{"name": "c", "resources": {"limits": limits, "requests": limits}}]}}
    return wire.patch(f"{PODS}/p/resize", patch, STRATEGIC)


def test_a_resize_changes_cpu_and_memory_and_nothing_else(wire: Wire) -> None:
    wire.make(PODS, make_pod(containers=[container(**{MEM: 4, "cpu": "1", "memory": "1Gi"})]))
    patch = {
        "metadata": {"labels": {"x": "y"}, "annotations": {"x": "y"}},
        "spec": {
            "nodeName": "n1",
            "containers": [
                {
                    "name": "c",
                    "image": "other",
                    "resources": {"limits": {"cpu": "500m"}, "requests": {"cpu": "500m"}},
                }
            ],
        },
    }
    status, pod = wire.patch(f"{PODS}/p/resize", patch, STRATEGIC)
    assert status == 200
    assert limits_of(pod) == [{MEM: "4", "cpu": "500m", "memory": "1Gi"}]
    assert pod["spec"]["containers"][0]["image"] == "x"
    assert "nodeName" not in pod["spec"]
    assert not {"labels", "annotations"} & pod["metadata"].keys()
    assert pod["metadata"]["generation"] == 2


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({MEM: 8}, "only cpu and memory resources are mutable"),
        ({MEM: 2}, "only cpu and memory resources are mutable"),
        ({MEM: None}, "resource limits cannot be removed"),
        ({"gpuslice.io/memory": 1}, "only cpu and memory resources are mutable"),
        ({"hugepages-2Mi": "2Mi"}, "only cpu and memory resources are mutable"),
        ({"cpu": None}, "resource limits cannot be removed"),
        ({"cpu": "2", "memory": "0"}, "Pod QOS Class may not change"),
    ],
)
def test_a_resize_of_what_a_device_plugin_gave_is_forbidden(wire: Wire, limits: Object, words: str) -> None:
    given = {MEM: 4, "cpu": "1", "memory": "1Gi"}
    wire.make(PODS, make_pod(containers=[container(**given)]))
    if "memory" in limits:
        limits = {"cpu": "2"}
        patch = {"spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]}}
        status, answer = wire.patch(f"{PODS}/p/resize", patch, STRATEGIC)
    else:
        status, answer = resized(wire, limits)
    assert (status, answer["reason"]) == (422, "Invalid")
    assert words in answer["message"]


def test_containers_keep_their_names_and_places_and_init_containers_their_amounts(wire: Wire) -> None:
    inits = [container("i", cpu="1"), {**container("s", cpu="1"), "restartPolicy": "Always"}]
    wire.make(PODS, make_pod(containers=[container(cpu="1")], initContainers=inits))
    path = f"{PODS}/p/resize"
    renamed = [{"op": "replace", "path": "/spec/containers/0/name", "value": "other"}]
    assert "may not be renamed or reordered" in wire.patch(path, renamed, JSON_PATCH)[1]["message"]
    for index, words in ((0, "non-sidecar init containers are immutable"), (1, "")):
        more = [
            {"op": "replace", "path": f"/spec/initContainers/{index}/resources/{part}/cpu", "value": "2"}
            for part in ("limits", "requests")
        ]
        status, answer = wire.patch(path, more, JSON_PATCH)
        assert status == (422 if words else 200), answer
        assert words in answer.get("message", "")


# -- ephemeral containers ------------------------------------------------------------------------------------


def debugged(wire: Wire, **fields: Any) -> tuple[int, Object]:
    patch = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "busybox", **fields}]}}
    return wire.patch(f"{PODS}/p/ephemeralcontainers", patch, STRATEGIC)


def test_an_ephemeral_container_is_added_and_stays_as_it_is(wire: Wire) -> None:
    wire.make(PODS, make_pod(containers=[container(**{MEM: 4})]))
    status, pod = debugged(wire, targetContainerName="c")
    assert status == 200
    (added,) = pod["spec"]["ephemeralContainers"]
    assert added["terminationMessagePolicy"] == "File"
    assert limits_of(pod) == [{MEM: "4"}]
    assert (
        'existing ephemeral containers "debug" may not be changed' in debugged(wire, image="x")[1]["message"]
    )
    gone = [{"op": "remove", "path": "/spec/ephemeralContainers"}]
    status, answer = wire.patch(f"{PODS}/p/ephemeralcontainers", gone, JSON_PATCH)
    assert "may not be removed" in answer["message"]
    assert wire.patch(f"{PODS}/p", gone, JSON_PATCH)[0] == 422


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"resources": {"limits": {MEM: 1}}},
            "resources: Forbidden: cannot be set for an Ephemeral Container",
        ),
        ({"ports": [{"containerPort": 80}]}, "ports: Forbidden: cannot be set"),
        ({"name": "c"}, 'name: Duplicate value: "c"'),
        ({"targetContainerName": "nobody"}, 'targetContainerName: Not found: "nobody"'),
        ({"image": ""}, "image: Required value"),
    ],
)
def test_an_ephemeral_container_asks_for_nothing(wire: Wire, fields: Object, words: str) -> None:
    wire.make(PODS, make_pod())
    status, answer = debugged(wire, **fields)
    assert status == 422
    assert words in answer["message"]


def test_no_pod_begins_with_one(wire: Wire) -> None:
    status, answer = wire.call("POST", PODS, make_pod(ephemeralContainers=[{"name": "d", "image": "x"}]))
    assert status == 422
    assert "spec.ephemeralContainers: Forbidden: cannot be set on create" in answer["message"]


def test_a_pod_with_gates_has_no_node(wire: Wire) -> None:
    status, answer = wire.call("POST", PODS, make_pod(nodeName="n1", schedulingGates=[{"name": "a/b"}]))
    assert status == 422
    assert "spec.nodeName: Forbidden: cannot be set until all schedulingGates" in answer["message"]


def test_a_whole_pod_asks_for_no_devices(wire: Wire) -> None:
    wire.make(PODS, make_pod("a", resources={"limits": {"cpu": "1", "hugepages-2Mi": "2Mi"}}))
    status, answer = wire.call("POST", PODS, make_pod("b", resources={"limits": {MEM: "4"}}))
    assert status == 422
    assert f'spec.resources.limits[{MEM}]: Unsupported value: "{MEM}"' in answer["message"]


# -- LimitRange ----------------------------------------------------------------------------------------------


def ranged(wire: Wire, kind: str = "Container", **limits: Object) -> None:
    wire.make(RANGES, {"metadata": {"name": "r"}, "spec": {"limits": [{"type": kind, **limits}]}})


def test_a_range_gives_each_container_what_it_leaves_open(wire: Wire) -> None:
    ranged(wire, default={"cpu": "1"}, defaultRequest={"cpu": "500m"})
    pod = wire.make(PODS, make_pod(containers=[container("c"), container("d", cpu="2")]))
    assert limits_of(pod) == [{"cpu": "1"}, {"cpu": "2"}]
    asked = [each["resources"]["requests"] for each in pod["spec"]["containers"]]
    assert asked == [{"cpu": "500m"}, {"cpu": "2"}], "a limit is a request before"
    said = pod["metadata"]["annotations"]["kubernetes.io/limit-ranger"]
    assert said.startswith("LimitRanger plugin set: ")
    assert "cpu limit for container c" in said


def test_a_maximum_alone_is_what_every_container_gets(wire: Wire) -> None:
    """Also one that wanted no part of a card."""
    ranged(wire, max={MEM: "8"})
    pod = wire.make(PODS, make_pod(containers=[container("c", **{MEM: 2}), container("d")]))
    assert limits_of(pod) == [{MEM: "2"}, {MEM: "8"}]


@pytest.mark.parametrize(
    ("kind", "limits", "containers", "words"),
    [
        (
            "Container",
            {"max": {MEM: "8"}},
            [{MEM: 9}],
            f"maximum {MEM} usage per Container is 8, but limit is 9",
        ),
        (
            "Container",
            {"min": {MEM: "2"}},
            [{MEM: 1}],
            f"minimum {MEM} usage per Container is 2, but request is 1",
        ),
        (
            "Container",
            {"max": {"cpu": "1"}},
            [{"cpu": "1500m"}],
            "maximum cpu usage per Container is 1, but limit is 1500m",
        ),
        (
            "Pod",
            {"max": {MEM: "8"}},
            [{MEM: 4}, {MEM: 5}],
            f"maximum {MEM} usage per Pod is 8, but limit is 9",
        ),
        ("Pod", {"max": {MEM: "8"}}, [{}], f"maximum {MEM} usage per Pod is 8.  No limit is specified"),
        ("Pod", {"min": {MEM: "2"}}, [{}], f"minimum {MEM} usage per Pod is 2.  No request is specified"),
        (
            "Container",
            {"maxLimitRequestRatio": {"memory": "2"}},
            [{MEM: 1}],
            "memory max limit to request ratio per Container is 2, but no request is specified",
        ),
    ],
)
def test_what_is_outside_a_range_is_forbidden(
    wire: Wire, kind: str, limits: Object, containers: list[Object], words: str
) -> None:
    ranged(wire, kind, **limits)
    made = [container(f"c{index}", **each) for index, each in enumerate(containers)]
    status, answer = wire.call("POST", PODS, make_pod(containers=made))
    assert (status, answer["reason"]) == (403, "Forbidden")
    assert words in answer["message"]


def test_a_minimum_of_devices_without_a_limit_can_not_be_met(wire: Wire) -> None:
    """It becomes a request alone, which no device plugin's resource may have."""
    ranged(wire, min={MEM: "2"})
    status, answer = wire.call("POST", PODS, make_pod())
    assert status == 422
    assert "Limit must be set for non overcommitable resources" in answer["message"]


def test_a_range_holds_for_a_resize_and_for_no_other_change(wire: Wire) -> None:
    wire.make(PODS, make_pod(containers=[container(cpu="1")]))
    ranged(wire, max={"cpu": "1"})
    status, answer = resized(wire, {"cpu": "2"})
    assert "maximum cpu usage per Container is 1, but limit is 2" in answer["message"]
    assert status == 403
    assert wire.patch(f"{PODS}/p", {"metadata": {"labels": {"a": "b"}}})[0] == 200


# -- quotas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [MEM, f"limits.{MEM}", f"count/{MEM}"])
def test_a_quota_of_devices_counts_under_one_name_alone(wire: Wire, name: str) -> None:
    for each in (name, f"requests.{MEM}"):
        wire.call("DELETE", f"{QUOTAS}/q")
        wire.make(QUOTAS, {"metadata": {"name": "q"}, "spec": {"hard": {each: "2"}}})
        status, answer = wire.call(
            "POST", PODS, make_pod(f"p-{len(each)}", containers=[container(**{MEM: 3})])
        )
        assert status == (201 if each == name else 403), answer


def test_a_quota_of_cpu_wants_every_container_to_say_how_much(wire: Wire) -> None:
    wire.make(QUOTAS, {"metadata": {"name": "q"}, "spec": {"hard": {"limits.cpu": "2"}}})
    status, answer = wire.call(
        "POST", PODS, make_pod(containers=[container(**{MEM: 1}), container("d", cpu="1")])
    )
    assert status == 403
    assert "failed quota: q: must specify limits.cpu for: c" in answer["message"]
    status, answer = wire.call("POST", PODS, make_pod(containers=[container(cpu="3")]))
    assert (
        "exceeded quota: q, requested: limits.cpu=3, used: limits.cpu=0, limited: limits.cpu=2"
        in answer["message"]
    )


# -- size ----------------------------------------------------------------------------------------------------


def test_annotations_are_too_long_together_at_every_write_but_a_binding(wire: Wire) -> None:
    def noted(size: int) -> Object:
        pod = make_pod()
        pod["metadata"]["annotations"] = {"a": "ü" * ((size - 1) // 2)}
        return pod

    too_long = f"metadata.annotations: Too long: may not be more than {MOST_BYTES} bytes"
    assert too_long in wire.call("POST", PODS, noted(MOST_BYTES + 3))[1]["message"]
    wire.make(PODS, noted(MOST_BYTES - 10))
    more = {"metadata": {"annotations": {"b": "x" * 20}}}
    assert too_long in wire.patch(f"{PODS}/p", more)[1]["message"]
    binding = {"metadata": {"name": "p", "annotations": {"b": "x" * 20}}, "target": {"name": "n1"}}
    assert wire.call("POST", f"{PODS}/p/binding", binding)[0] == 201
    status, answer = wire.patch(f"{PODS}/p/status", {"status": {"phase": "Running"}})
    assert status == 422
    assert too_long in answer["message"], "kubelet cannot say what becomes of it"
