"""Creating, changing, binding, evicting and deleting objects, with every precondition."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_wire import (
    JSON_PATCH,
    PODS,
    SETS,
    STRATEGIC,
    Wire,
    kinds,
    make_pod,
    make_set,
)

from simcluster.cluster.faults import Fault


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_a_new_object_gets_identity_and_defaults(wire: Wire) -> None:
    pod = wire.make(PODS, make_pod("a"))
    metadata, spec = pod["metadata"], pod["spec"]
    assert metadata["creationTimestamp"] == "2023-11-14T22:13:20Z"
    assert metadata["uid"]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Always", 30)
    assert (pod["status"]["phase"], pod["status"]["qosClass"]) == ("Pending", "BestEffort")


def test_requests_follow_limits_and_whole_quantities_become_canonical(wire: Wire) -> None:
    limits = {"aliyun.com/gpu-mem": 4, "memory": "1024Mi", "cpu": "0.5"}
    container = {"name": "c", "image": "x", "resources": {"limits": limits}}
    pod = wire.make(PODS, make_pod("a", containers=[container]))
    expected = {"aliyun.com/gpu-mem": "4", "memory": "1Gi", "cpu": "500m"}
    assert pod["spec"]["containers"][0]["resources"] == {"limits": expected, "requests": expected}
    assert pod["status"]["qosClass"] == "Guaranteed"


def test_a_generated_name_is_the_prefix_and_five_letters(wire: Wire) -> None:
    body = make_pod()
    body["metadata"] = {"generateName": "a-"}
    first, second = wire.make(PODS, body), wire.make(PODS, body)
    assert first["metadata"]["name"] != second["metadata"]["name"]
    assert len(first["metadata"]["name"]) == len("a-") + 5


def test_a_name_that_is_taken_is_a_conflict_that_says_so(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    status, answer = wire.call("POST", PODS, make_pod("a"))
    assert (status, answer["reason"], answer["message"]) == (409, "AlreadyExists", 'pods "a" already exists')
    assert answer["details"] == {"name": "a", "kind": "pods"}


def units(name: str, amount: int, **spec: Any) -> dict[str, Any]:
    limits = {"aliyun.com/gpu-mem": str(amount), "cpu": "500m"}
    return make_pod(name, containers=[{"name": "c", "image": "x", "resources": {"limits": limits}}], **spec)


def test_what_a_quota_leaves_is_all_that_new_pods_get(wire: Wire) -> None:
    hard = {"requests.aliyun.com/gpu-mem": "8", "cpu": "2", "pods": "10", "count/secrets": "1"}
    for name, more in (("cards", {}), ("scoped", {"scopes": ["BestEffort"]})):
        spec = {"hard": hard if not more else {"pods": "0"}, **more}
        wire.make("/api/v1/namespaces/default/resourcequotas", {"metadata": {"name": name}, "spec": spec})
    wire.make(PODS, units("a", 4))
    wire.make(PODS, units("b", 3))
    status, answer = wire.call("POST", PODS, units("c", 4))
    assert (status, answer["reason"]) == (403, "Forbidden")
    assert answer["message"] == (
        'pods "c" is forbidden: exceeded quota: cards, requested: requests.aliyun.com/gpu-mem=4, '
        "used: requests.aliyun.com/gpu-mem=7, limited: requests.aliyun.com/gpu-mem=8"
    )
    nothing = {"name": "c", "image": "x", "resources": {"limits": {"cpu": "0"}}}
    wire.make(PODS, make_pod("asks-for-nothing", containers=[nothing]))
    wire.patch(f"{PODS}/a/status", {"status": {"phase": "Succeeded"}})
    wire.make(PODS, units("c", 4))  # who has ended has nothing any more
    status, answer = wire.call("POST", PODS, units("d", 1, overhead={"cpu": "1"}))
    assert status == 403
    assert answer["message"].endswith("requested: cpu=1500m, used: cpu=1, limited: cpu=2")


def test_nothing_is_created_in_a_namespace_that_is_not_there(wire: Wire) -> None:
    status, answer = wire.call("POST", "/api/v1/namespaces/nope/pods", make_pod("a"))
    assert (status, answer["message"]) == (404, 'namespaces "nope" not found')


def test_a_put_with_an_old_version_is_a_conflict(wire: Wire) -> None:
    old = wire.make(SETS, make_set("s"))
    wire.patch(f"{SETS}/s", {"spec": {"replicas": 2}})
    status, answer = wire.call("PUT", f"{SETS}/s", old)
    assert (status, answer["reason"]) == (409, "Conflict")
    assert answer["message"].startswith('Operation cannot be fulfilled on statefulsets.apps "s"')


def test_a_patch_for_another_uid_is_a_conflict(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    status, answer = wire.patch(f"{PODS}/a", {"metadata": {"uid": "other", "labels": {"x": "y"}}})
    assert status == 409
    assert "Precondition failed: UID in precondition: other" in answer["message"]


def test_a_write_that_changes_nothing_makes_no_version_and_no_event(wire: Wire) -> None:
    made = wire.make(PODS, make_pod("a", labels={"x": "y"}))
    watch = wire.watch(PODS, resourceVersion=made["metadata"]["resourceVersion"])
    _, same = wire.patch(f"{PODS}/a", {"metadata": {"labels": {"x": "y"}}})
    assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert kinds(watch) == []


def test_a_new_spec_is_a_new_generation_and_a_new_status_is_not(wire: Wire) -> None:
    wire.make(SETS, make_set("s"))
    _, scaled = wire.patch(f"{SETS}/s", {"spec": {"replicas": 2}})
    _, reported = wire.patch(f"{SETS}/s/status", {"status": {"readyReplicas": 1}, "spec": {"replicas": 9}})
    assert (scaled["metadata"]["generation"], reported["metadata"]["generation"]) == (2, 2)
    assert (reported["spec"]["replicas"], reported["status"]["readyReplicas"]) == (2, 1)


def test_the_main_resource_cannot_write_the_status(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    _, pod = wire.patch(f"{PODS}/a", {"status": {"phase": "Running"}})
    assert pod["status"]["phase"] == "Pending"


def test_dry_run_shows_what_would_be_and_stores_nothing(wire: Wire) -> None:
    status, pod = wire.call("POST", PODS, make_pod("a"), dryRun="All")
    assert (status, pod["spec"]["restartPolicy"]) == (201, "Always")
    assert wire.call("GET", f"{PODS}/a")[0] == 404


def test_a_strategic_patch_merges_containers_by_name(wire: Wire) -> None:
    containers = [{"name": "c", "image": "x:1"}, {"name": "d", "image": "y:1"}]
    wire.make(PODS, make_pod("a", containers=containers))
    change = {"spec": {"containers": [{"name": "d", "image": "y:2"}]}}
    _, pod = wire.patch(f"{PODS}/a", change, STRATEGIC)
    assert [item["image"] for item in pod["spec"]["containers"]] == ["x:1", "y:2"]


def test_a_json_patch_tests_before_it_changes(wire: Wire) -> None:
    wire.make(PODS, make_pod("a", labels={"x": "y"}))
    steps = [
        {"op": "test", "path": "/metadata/labels/x", "value": "z"},
        {"op": "remove", "path": "/metadata/labels/x"},
    ]
    status, _ = wire.patch(f"{PODS}/a", steps, JSON_PATCH)
    assert status == 422
    steps[0]["value"] = "y"
    status, pod = wire.patch(f"{PODS}/a", steps, JSON_PATCH)
    assert status == 200
    assert "labels" not in pod["metadata"]


@pytest.mark.parametrize(
    "step",
    [
        {"op": "add", "path": "/metadata/name/0", "value": "x"},
        {"op": "replace", "path": "/spec/containers/01/image", "value": "x"},
        {"op": "remove", "path": "/metadata/labels/absent"},
        {"op": "replace", "path": "", "value": 1},
        {"op": "swap", "path": "/spec"},
        {"op": "add", "value": 1},
        {"path": "/spec", "value": 1},
        "remove",
    ],
    ids=str,
)
def test_a_json_patch_that_cannot_be_is_422(wire: Wire, step: object) -> None:
    wire.make(PODS, make_pod("a", labels={"x": "y"}))
    before = wire.call("GET", f"{PODS}/a")
    assert wire.patch(f"{PODS}/a", [step], JSON_PATCH)[0] == 422
    assert wire.call("GET", f"{PODS}/a") == before


def test_scale_reads_and_writes_replicas(wire: Wire) -> None:
    wire.make(SETS, make_set("s", replicas=3))
    scale = wire.get(f"{SETS}/s/scale")
    assert (scale["kind"], scale["spec"]["replicas"], scale["status"]["selector"]) == ("Scale", 3, "app=s")
    _, answer = wire.patch(f"{SETS}/s/scale", {"spec": {"replicas": 5}})
    assert answer["spec"]["replicas"] == 5
    assert wire.get(f"{SETS}/s")["spec"]["replicas"] == 5


# -- binding ------------------------------------------------------------------------------------------


def test_binding_sets_the_node_and_says_scheduled(wire: Wire) -> None:
    uid = wire.make(PODS, make_pod("a"))["metadata"]["uid"]
    status, _ = wire.call("POST", f"{PODS}/a/binding", {"metadata": {"uid": uid}, "target": {"name": "n1"}})
    pod = wire.get(f"{PODS}/a")
    assert status == 201
    assert pod["spec"]["nodeName"] == "n1"
    assert [(c["type"], c["status"]) for c in pod["status"]["conditions"]] == [("PodScheduled", "True")]


@pytest.mark.parametrize(
    ("metadata", "target", "code", "words"),
    [
        ({"uid": "other"}, "n1", 409, "Precondition failed: UID"),
        ({}, "", 422, "target.name"),
    ],
)
def test_a_binding_that_does_not_fit_is_refused(
    wire: Wire, metadata: dict[str, str], target: str, code: int, words: str
) -> None:
    wire.make(PODS, make_pod("a"))
    status, answer = wire.call(
        "POST", f"{PODS}/a/binding", {"metadata": metadata, "target": {"name": target}}
    )
    assert status == code
    assert words in answer["message"]


def test_a_bound_pod_cannot_be_bound_again(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    wire.call("POST", f"{PODS}/a/binding", {"target": {"name": "n1"}})
    status, answer = wire.call("POST", f"{PODS}/a/binding", {"target": {"name": "n2"}})
    assert status == 409
    assert answer["message"].endswith('pod a is already assigned to node "n1"')


# -- deletion -----------------------------------------------------------------------------------------


def test_a_pod_that_runs_nowhere_vanishes_at_once(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    wire.call("DELETE", f"{PODS}/a")
    assert wire.call("GET", f"{PODS}/a")[0] == 404


def test_a_bound_pod_stays_until_its_kubelet_deletes_it_with_grace_zero(wire: Wire) -> None:
    _bound_pod(wire)
    _, going = wire.call("DELETE", f"{PODS}/a")
    assert going["metadata"]["deletionTimestamp"] == "2023-11-14T22:13:50Z"
    assert going["metadata"]["deletionGracePeriodSeconds"] == 30
    wire.call("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 0})
    assert wire.call("GET", f"{PODS}/a")[0] == 404


def test_a_second_deletion_can_only_shorten_the_grace(wire: Wire) -> None:
    _bound_pod(wire)
    wire.call("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 10})
    wire.call("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 20})
    assert wire.get(f"{PODS}/a")["metadata"]["deletionGracePeriodSeconds"] == 10
    wire.call("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 5})
    assert wire.get(f"{PODS}/a")["metadata"]["deletionGracePeriodSeconds"] == 5


def test_a_finalizer_holds_the_object_and_its_removal_lets_it_go(wire: Wire) -> None:
    body = make_set("s")
    body["metadata"]["finalizers"] = ["example.com/hold"]
    wire.make(SETS, body)
    wire.call("DELETE", f"{SETS}/s")
    assert wire.get(f"{SETS}/s")["metadata"]["deletionTimestamp"]
    status, answer = wire.patch(
        f"{SETS}/s", {"metadata": {"finalizers": ["example.com/hold", "example.com/more"]}}
    )
    assert (status, "no new finalizers" in answer["message"]) == (422, True)
    wire.patch(f"{SETS}/s", {"metadata": {"finalizers": None}})
    assert wire.call("GET", f"{SETS}/s")[0] == 404


def test_a_deletion_for_another_uid_is_a_conflict(wire: Wire) -> None:
    wire.make(PODS, make_pod("a"))
    status, _ = wire.call("DELETE", f"{PODS}/a", {"preconditions": {"uid": "other"}})
    assert status == 409
    assert wire.call("GET", f"{PODS}/a")[0] == 200


def test_a_collection_is_deleted_by_selector(wire: Wire) -> None:
    wire.make(PODS, make_pod("a", labels={"x": "y"}))
    wire.make(PODS, make_pod("b"))
    wire.call("DELETE", PODS, labelSelector="x=y")
    assert [item["metadata"]["name"] for item in wire.get(PODS)["items"]] == ["b"]


def test_a_namespace_waits_for_its_controller(wire: Wire) -> None:
    wire.make("/api/v1/namespaces", {"metadata": {"name": "ns"}})
    wire.call("DELETE", "/api/v1/namespaces/ns")
    namespace = wire.get("/api/v1/namespaces/ns")
    assert namespace["status"]["phase"] == "Terminating"
    status, answer = wire.call("POST", "/api/v1/namespaces/ns/pods", make_pod("a"))
    assert (status, "being terminated" in answer["message"]) == (403, True)
    wire.call("PUT", "/api/v1/namespaces/ns/finalize", namespace | {"spec": {"finalizers": []}})
    assert wire.call("GET", "/api/v1/namespaces/ns")[0] == 404


def test_an_eviction_asks_the_disruption_budget(wire: Wire) -> None:
    _bound_pod(wire, labels={"x": "y"})
    wire.patch(f"{PODS}/a/status", {"status": {"phase": "Running", "conditions": [_READY]}})
    budget = {"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"x": "y"}}}}
    path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    wire.make(path, budget)
    status, answer = wire.call("POST", f"{PODS}/a/eviction", {"metadata": {"name": "a"}})
    assert (status, answer["reason"]) == (429, "TooManyRequests")
    wire.call("DELETE", f"{path}/b")
    assert wire.call("POST", f"{PODS}/a/eviction", {"metadata": {"name": "a"}})[0] == 201
    assert wire.get(f"{PODS}/a")["metadata"]["deletionTimestamp"]


# -- faults -------------------------------------------------------------------------------------------


def test_a_fault_strikes_as_often_as_it_was_told_to(wire: Wire) -> None:
    wire.cluster.add_fault(Fault(method="POST", path=f"{PODS}.*", code=503, times=1))
    assert wire.call("POST", PODS, make_pod("a"))[0] == 503
    assert wire.call("POST", PODS, make_pod("a"))[0] == 201


def test_a_lost_answer_leaves_its_effect(wire: Wire) -> None:
    wire.cluster.add_fault(Fault(method="POST", code=504, times=1, after=True))
    assert wire.call("POST", PODS, make_pod("a"))[0] == 504
    assert wire.call("GET", f"{PODS}/a")[0] == 200


_READY = {"type": "Ready", "status": "True"}


def _bound_pod(wire: Wire, **spec: Any) -> None:
    wire.make(PODS, make_pod("a", **spec))
    wire.call("POST", f"{PODS}/a/binding", {"target": {"name": "n1"}})
