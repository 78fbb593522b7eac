"""Wrong objects are refused in the API server's words, every fault at once."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_wire import PODS, SETS, STRATEGIC, Wire, make_pod, make_set

from simcluster.cluster.quantity import canonical_quantity

_MEM = "aliyun.com/gpu-mem"


@pytest.fixture
def wire() -> Wire:
    return Wire()


def _resources(**resources: Any) -> dict[str, Any]:
    return make_pod("a", containers=[{"name": "c", "image": "x", "resources": resources}])


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"limits": {_MEM: "4.5"}}, f'limits[{_MEM}]: Invalid value: "4500m": must be an integer'),
        ({"limits": {_MEM: -1}}, f'limits[{_MEM}]: Invalid value: "-1": must be greater than or equal to 0'),
        (
            {"limits": {_MEM: 4}, "requests": {_MEM: 3}},
            f'resources.requests: Invalid value: "3": must be equal to {_MEM} limit of 4',
        ),
        (
            {"requests": {_MEM: 3}},
            "resources.limits: Required value: Limit must be set for non overcommitable resources",
        ),
        (
            {"limits": {"cpu": 1}, "requests": {"cpu": 2}},
            'resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1',
        ),
        ({"limits": {"gpu": 1}}, 'Invalid value: "gpu": must be a standard resource type or fully qualified'),
    ],
)
def test_resources(wire: Wire, resources: dict[str, Any], words: str) -> None:
    status, answer = wire.call("POST", PODS, _resources(**resources))
    assert (status, answer["reason"]) == (422, "Invalid")
    assert words in answer["message"]
    assert answer["details"]["causes"]


@pytest.mark.parametrize("quantity", ["abc", "", "4 GiB", "1e", "٤"])
def test_what_is_no_quantity_is_a_bad_request(wire: Wire, quantity: str) -> None:
    status, answer = wire.call("POST", PODS, _resources(limits={_MEM: quantity}))
    assert status == 400
    assert "quantities must match the regular expression" in answer["message"]


@pytest.mark.parametrize("amount", [0, 10**12, "1k"])
def test_what_is_a_whole_quantity_is_accepted(wire: Wire, amount: int | str) -> None:
    assert wire.call("POST", PODS, _resources(limits={_MEM: amount}))[0] == 201


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("1024Mi", "1Gi"),
        ("1025Mi", "1025Mi"),
        ("0.5", "500m"),
        ("1000", "1k"),
        ("1e3", "1e3"),
        ("100m", "100m"),
        ("1500m", "1500m"),
        ("0", "0"),
        ("-1", "-1"),
        ("12345", "12345"),
        ("1.5Gi", "1536Mi"),
    ],
)
def test_quantities_become_canonical(written: str, canonical: str) -> None:
    assert canonical_quantity(written) == canonical


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "a" * 254, "dot..dot"])
def test_a_bad_name_is_refused(wire: Wire, name: str) -> None:
    status, answer = wire.call("POST", PODS, make_pod(name))
    assert status == 422
    assert "metadata.name: Invalid value" in answer["message"]


def test_every_fault_is_told_at_once(wire: Wire) -> None:
    body = make_pod("a", containers=[{"name": "c"}, {"name": "c", "image": "x"}], restartPolicy="Sometimes")
    _, answer = wire.call("POST", PODS, body)
    fields = {cause["field"] for cause in answer["details"]["causes"]}
    assert fields == {"spec.containers[0].image", "spec.containers[1].name", "spec.restartPolicy"}


@pytest.mark.parametrize(("validation", "status"), [("Strict", 400), ("Warn", 201), ("Ignore", 201)])
def test_unknown_fields_are_an_error_a_warning_or_nothing(wire: Wire, validation: str, status: int) -> None:
    response = wire.send("POST", PODS, make_pod("a", colour="red"), fieldValidation=validation)
    assert response.status == status
    warned = 'unknown field \\"spec.colour\\"' in response.headers.get("warning", "")
    assert warned is (validation == "Warn")


def test_a_wrong_type_names_its_path(wire: Wire) -> None:
    status, answer = wire.call("POST", SETS, make_set("s", replicas="three"))  # type: ignore[arg-type]
    assert status == 400
    assert "cannot unmarshal string into Go struct field spec.replicas of type int32" in answer["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"", b"\xff\xfe", b"k8s\x00\x0a\xff"])
def test_a_body_that_is_no_object_is_a_bad_request(wire: Wire, body: bytes) -> None:
    status, answer = wire.call("POST", PODS, body)
    assert (status, answer["kind"]) == (400, "Status")


def test_a_stateful_sets_identity_cannot_change(wire: Wire) -> None:
    wire.make(SETS, make_set("s"))
    status, answer = wire.patch(f"{SETS}/s", {"spec": {"serviceName": "other"}})
    assert status == 422
    assert "updates to statefulset spec for fields other than" in answer["message"]


def test_a_selector_must_select_the_template(wire: Wire) -> None:
    status, answer = wire.call("POST", SETS, make_set("s", selector={"matchLabels": {"app": "other"}}))
    assert status == 422
    assert "`selector` does not match template `labels`" in answer["message"]


def test_a_running_pods_resources_cannot_change_but_its_image_can(wire: Wire) -> None:
    wire.make(PODS, _resources(limits={_MEM: 4}))
    bigger = {
        "spec": {"containers": [{"name": "c", "resources": {"limits": {_MEM: 8}, "requests": {_MEM: 8}}}]}
    }
    status, answer = wire.patch(f"{PODS}/a", bigger, STRATEGIC)
    assert status == 422
    assert "pod updates may not change fields other than" in answer["message"]
    other = {"spec": {"containers": [{"name": "c", "image": "y"}]}}
    assert wire.patch(f"{PODS}/a", other, STRATEGIC)[0] == 200


def test_a_job_must_say_that_its_pods_may_end(wire: Wire) -> None:
    template = {"spec": {"containers": [{"name": "c", "image": "x"}]}}
    body = {"metadata": {"name": "j"}, "spec": {"template": template}}
    status, answer = wire.call("POST", "/apis/batch/v1/namespaces/default/jobs", body)
    assert status == 422
    assert 'valid values: "OnFailure", "Never"' in answer["message"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/namespaces/default/nothings", 404),
        ("/apis/nothing/v1/things", 404),
        ("/api/v1/namespaces/default/pods/a/nothing", 404),
        ("/api/v1/pods/a", 404),
        ("/nothing", 404),
        ("/apis", 200),
    ],
)
def test_paths_that_lead_nowhere(wire: Wire, path: str, status: int) -> None:
    assert wire.call("GET", path)[0] == status
