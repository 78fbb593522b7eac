"""Server-side apply, field ownership, strategic merge and admission webhooks."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cluster_wire import APPLY, PODS, SETS, Wire, make_pod, make_set

from simcluster.cluster.admission import WebhookAnswer
from simcluster.cluster.fieldset import decode, encode, path_text
from simcluster.cluster.schema import standard_schema
from simcluster.cluster.strategic import StrategicMerge


@pytest.fixture
def wire() -> Wire:
    return Wire()


def _apply(wire: Wire, manager: str, spec: dict[str, Any], **query: str) -> tuple[int, Any]:
    body = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s"}, "spec": spec}
    return wire.patch(f"{SETS}/s", body, APPLY, fieldManager=manager, **query)


def _spec(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = make_set("s")["spec"]
    return spec | changes


def test_apply_creates_and_then_changes(wire: Wire) -> None:
    assert _apply(wire, "one", _spec(replicas=1))[0] == 201
    status, changed = _apply(wire, "one", _spec(replicas=2))
    assert (status, changed["spec"]["replicas"]) == (200, 2)
    owners = [(item["manager"], item["operation"]) for item in changed["metadata"]["managedFields"]]
    assert owners == [("one", "Apply")]


def test_applying_the_same_again_changes_nothing(wire: Wire) -> None:
    _, first = _apply(wire, "one", _spec())
    _, second = _apply(wire, "one", _spec())
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


def test_two_managers_who_want_different_values_conflict(wire: Wire) -> None:
    _apply(wire, "one", _spec(replicas=1))
    status, answer = _apply(wire, "two", {"replicas": 2})
    assert (status, answer["reason"]) == (409, "Conflict")
    assert answer["message"] == (
        'Apply failed with 1 conflict: conflict with "one" using apps/v1: .spec.replicas'
    )
    assert answer["details"]["causes"][0]["reason"] == "FieldManagerConflict"


def test_two_managers_who_want_the_same_value_share_the_field(wire: Wire) -> None:
    _apply(wire, "one", _spec(replicas=2))
    assert _apply(wire, "two", {"replicas": 2})[0] == 200


def test_force_takes_the_field_over(wire: Wire) -> None:
    _apply(wire, "one", _spec(replicas=1))
    status, taken = _apply(wire, "two", {"replicas": 2}, force="true")
    assert (status, taken["spec"]["replicas"]) == (200, 2)
    assert _apply(wire, "one", _spec(replicas=1))[0] == 409


def test_what_a_manager_no_longer_applies_is_removed_unless_another_owns_it(wire: Wire) -> None:
    _apply(wire, "one", _spec(minReadySeconds=5, revisionHistoryLimit=3))
    _apply(wire, "two", {"revisionHistoryLimit": 3})
    _, left = _apply(wire, "one", _spec())
    assert "minReadySeconds" not in left["spec"]
    assert left["spec"]["revisionHistoryLimit"] == 3


def test_an_applied_container_is_merged_by_name_and_removed_by_name(wire: Wire) -> None:
    template = {"metadata": {"labels": {"app": "s"}}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    both = json.loads(json.dumps(template))
    both["spec"]["containers"].append({"name": "d", "image": "y"})
    _, made = _apply(wire, "one", _spec(template=both))
    assert [item["name"] for item in made["spec"]["template"]["spec"]["containers"]] == ["c", "d"]
    _, left = _apply(wire, "one", _spec(template=template))
    assert [item["name"] for item in left["spec"]["template"]["spec"]["containers"]] == ["c"]


def test_an_ordinary_update_takes_fields_from_who_applied_them(wire: Wire) -> None:
    _apply(wire, "one", _spec(replicas=1))
    wire.patch(f"{SETS}/s", {"spec": {"replicas": 4}}, fieldManager="scaler")
    _, answer = _apply(wire, "one", _spec(replicas=1))
    assert 'conflict with "scaler" using apps/v1: .spec.replicas' in answer["message"]


def test_apply_wants_a_manager(wire: Wire) -> None:
    body = {"apiVersion": "v1", "kind": "Pod", **make_pod("a")}
    status, answer = wire.patch(f"{PODS}/a", body, APPLY)
    assert (status, "fieldManager: Required value" in answer["message"]) == (400, True)


def test_apply_reads_yaml(wire: Wire) -> None:
    body = b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: b}\n"
    path = "/api/v1/namespaces/default/configmaps/c"
    status, made = wire.patch(path, body, APPLY, fieldManager="one")
    assert (status, made["data"]) == (201, {"a": "b"})


def test_a_set_of_fields_survives_writing_and_reading() -> None:
    paths = {
        ("f:spec", "f:replicas"),
        ("f:spec", 'k:{"name":"c"}'),
        ("f:spec", 'k:{"name":"c"}', "f:image"),
        ("f:metadata", "f:finalizers", 'v:"x"'),
    }
    assert decode(encode(paths)) == paths
    assert path_text(("f:spec", 'k:{"name":"c"}', "f:image")) == '.spec[name="c"].image'


# -- strategic merge ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "names"),
    [
        ({"containers": [{"name": "b", "$patch": "delete"}]}, ["a"]),
        ({"containers": [{"$patch": "replace"}, {"name": "z"}]}, ["z"]),
        ({"containers": [{"name": "z"}]}, ["a", "b", "z"]),
        ({"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}, ["b", "a"]),
        ({"containers": [{"name": "a", "image": None}]}, ["a", "b"]),
    ],
)
def test_directives_of_strategic_merge(patch: dict[str, Any], names: list[str]) -> None:
    target = {"containers": [{"name": "a", "image": "x"}, {"name": "b"}]}
    merged = StrategicMerge(standard_schema()).merge("core.v1.PodSpec", target, patch)
    assert [item["name"] for item in merged["containers"]] == names
    assert target == {"containers": [{"name": "a", "image": "x"}, {"name": "b"}]}


def test_retained_keys_drop_a_unions_other_member() -> None:
    target = {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}
    patch = {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}
    merged = StrategicMerge(standard_schema()).merge("apps.v1.DeploymentSpec", target, patch)
    assert merged == {"strategy": {"type": "Recreate"}}


def test_values_of_a_set_are_added_and_deleted() -> None:
    merge = StrategicMerge(standard_schema()).merge
    added = merge("meta.v1.ObjectMeta", {"finalizers": ["a"]}, {"finalizers": ["b"]})
    assert added == {"finalizers": ["a", "b"]}
    left = merge("meta.v1.ObjectMeta", added, {"$deleteFromPrimitiveList/finalizers": ["a"]})
    assert left == {"finalizers": ["b"]}


# -- webhooks -----------------------------------------------------------------------------------------


def _hook(wire: Wire, kind: str, **changes: Any) -> None:
    rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
    hook = {"name": "h.example.com", "clientConfig": {"url": "https://h"}, "rules": [rule]}
    hook |= {"sideEffects": "None", "admissionReviewVersions": ["v1"], **changes}
    path = f"/apis/admissionregistration.k8s.io/v1/{kind.lower()}s"
    wire.make(path, {"metadata": {"name": "h"}, "webhooks": [hook]})


def test_a_mutating_webhook_changes_the_object_before_it_is_validated(wire: Wire) -> None:
    _hook(wire, "MutatingWebhookConfiguration")
    steps = [{"op": "add", "path": "/metadata/labels/seen", "value": "yes"}]
    patch = base64.b64encode(json.dumps(steps).encode()).decode()
    wire.webhook_answers.append(WebhookAnswer({"allowed": True, "patchType": "JSONPatch", "patch": patch}))
    assert wire.make(PODS, make_pod("a", labels={"x": "y"}))["metadata"]["labels"] == {
        "x": "y",
        "seen": "yes",
    }
    request = wire.webhook_calls[0].review["request"]
    assert (request["operation"], request["object"]["kind"]) == ("CREATE", "Pod")


def test_a_validating_webhook_denies_with_its_own_words(wire: Wire) -> None:
    _hook(wire, "ValidatingWebhookConfiguration")
    wire.webhook_answers.append(WebhookAnswer({"allowed": False, "status": {"message": "no", "code": 403}}))
    status, answer = wire.call("POST", PODS, make_pod("a"))
    assert status == 403
    assert answer["message"] == 'admission webhook "h.example.com" denied the request: no'


@pytest.mark.parametrize("allowed", [True, False])
def test_what_a_webhook_warns_of_reaches_the_client(wire: Wire, allowed: bool) -> None:
    _hook(wire, "MutatingWebhookConfiguration")
    _hook(wire, "ValidatingWebhookConfiguration")
    said = {"allowed": True, "warnings": ['is "gpu-mem" meant?']}
    wire.webhook_answers += [WebhookAnswer(said), WebhookAnswer({"allowed": allowed, "warnings": ["two"]})]
    response = wire.send("POST", PODS, make_pod("a"))
    assert response.status == (201 if allowed else 400)
    assert response.headers["warning"] == '299 - "is \\"gpu-mem\\" meant?", 299 - "two"'


@pytest.mark.parametrize(("policy", "status"), [("Fail", 500), ("Ignore", 201)])
def test_a_webhook_that_cannot_be_reached(wire: Wire, policy: str, status: int) -> None:
    _hook(wire, "ValidatingWebhookConfiguration", failurePolicy=policy)
    wire.webhook_answers.append(WebhookAnswer(error="connection refused"))
    assert wire.call("POST", PODS, make_pod("a"))[0] == status


def test_selectors_spare_objects_and_namespaces_from_a_webhook(wire: Wire) -> None:
    unlabelled = {"matchExpressions": [{"key": "skip", "operator": "DoesNotExist"}]}
    _hook(wire, "ValidatingWebhookConfiguration", objectSelector=unlabelled)
    wire.make(PODS, make_pod("a", labels={"skip": "me"}))
    wire.make("/api/v1/namespaces/default/configmaps", {"metadata": {"name": "c"}})
    assert wire.webhook_calls == []
