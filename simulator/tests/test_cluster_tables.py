"""What `kubectl get` prints: status words of pods, ages, the odd columns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster_wire import PODS, Wire, make_pod

from simcluster.cluster.moment import human_duration
from simcluster.cluster.protobuf import decode_envelope
from simcluster.cluster.request import Request
from simcluster.cluster.schema import standard_schema
from simcluster.cluster.tables.pods import pod_row
from simcluster.cluster.tables.workloads import WORKLOADS

_NOW_S = 1_700_000_000.0
_CREATED = "2023-11-14T22:12:20Z"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (176, "2m56s"),
        (195, "3m15s"),
        (600, "10m"),
        (7 * 3600 + 35 * 60, "7h35m"),
        (8 * 3600 + 59, "8h"),
        (48 * 3600, "2d"),
        (50 * 3600, "2d2h"),
        (11 * 86400, "11d"),
        (800 * 86400, "2y70d"),
        (-0.5, "0s"),
        (-5, "<invalid>"),
    ],
)
def test_ages_read_as_kubectl_prints_them(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def _container(**state: Any) -> dict[str, Any]:
    return {"name": "c", "state": state, "restartCount": 0, "ready": "running" in state}


@pytest.mark.parametrize(
    ("status", "ready", "shown"),
    [
        ({"phase": "Pending"}, "0/1", "Pending"),
        ({"phase": "Running", "containerStatuses": [_container(running={})]}, "1/1", "Running"),
        (
            {"phase": "Running", "containerStatuses": [_container(waiting={"reason": "CrashLoopBackOff"})]},
            "0/1",
            "CrashLoopBackOff",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [_container(terminated={"exitCode": 1, "reason": "Error"})],
            },
            "0/1",
            "Error",
        ),
        (
            {"phase": "Failed", "containerStatuses": [_container(terminated={"exitCode": 3})]},
            "0/1",
            "ExitCode:3",
        ),
        ({"phase": "Failed", "reason": "Evicted"}, "0/1", "Evicted"),
        (
            {"phase": "Failed", "reason": "UnexpectedAdmissionError"},
            "0/1",
            "UnexpectedAdmissionError",
        ),
    ],
)
def test_the_status_of_a_pod(status: dict[str, Any], ready: str, shown: str) -> None:
    pod = make_pod("a") | {"status": status}
    pod["metadata"]["creationTimestamp"] = _CREATED
    assert pod_row(pod, _NOW_S)[:5] == ["a", ready, shown, "0", "60s"]


def test_a_pod_being_deleted_is_terminating() -> None:
    pod = make_pod("a") | {"status": {"phase": "Running", "containerStatuses": [_container(running={})]}}
    pod["metadata"] |= {"creationTimestamp": _CREATED, "deletionTimestamp": _CREATED}
    assert pod_row(pod, _NOW_S)[2] == "Terminating"


def test_restarts_say_how_long_ago() -> None:
    state = _container(running={}) | {"restartCount": 5}
    state["lastState"] = {"terminated": {"finishedAt": "2023-11-14T22:10:20Z"}}
    pod = make_pod("a") | {"status": {"phase": "Running", "containerStatuses": [state]}}
    pod["metadata"]["creationTimestamp"] = _CREATED
    assert pod_row(pod, _NOW_S)[3] == "5 (3m ago)"


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ({"completions": 3, "parallelism": 1}, "1/3"),
        ({"parallelism": 3}, "1/1 of 3"),
        ({"parallelism": 1}, "1/1"),
    ],
)
def test_completions_of_a_job(spec: dict[str, Any], shown: str) -> None:
    job = {
        "metadata": {"name": "j", "creationTimestamp": _CREATED},
        "spec": {"template": {"spec": {"containers": []}}, **spec},
        "status": {"succeeded": 1},
    }
    assert WORKLOADS["jobs.batch"].row(job, _NOW_S)[2] == shown


def test_a_table_has_the_columns_kubectl_prints() -> None:
    wire = Wire()
    wire.make(PODS, make_pod("a"))
    accept = {"accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
    table = json.loads(wire.cluster.handle(Request("GET", PODS, {}, accept)).body)
    assert table["kind"] == "Table"
    assert [column["name"] for column in table["columnDefinitions"]][:5] == [
        "Name",
        "Ready",
        "Status",
        "Restarts",
        "Age",
    ]
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


def test_a_protobuf_envelope_is_read_as_its_json_form() -> None:
    """A ConfigMap as kubectl's generators post it: metadata (1), data (2) as map entries."""
    entry = _field(1, b"a") + _field(2, b"b")
    config_map = _field(1, _field(1, b"c")) + _field(2, entry)
    type_meta = _field(1, b"v1") + _field(2, b"ConfigMap")
    envelope = b"k8s\x00" + _field(1, type_meta) + _field(2, config_map)
    assert decode_envelope(standard_schema(), envelope) == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c"},
        "data": {"a": "b"},
    }
