"""Events are counted, not repeated, and one object cannot flood the cluster with them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import UnavailableError
from gpuslice.adapters.kube.events import EventRecorder, Quota, node_reference, pod_reference
from tests.unit.kube_wire import ScriptedTransport, VirtualTime, answer, failure

POD = pod_reference("ns", "a", "u")
NOW_NS = int(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()) * 10**9


def recorder(
    *script: Any, time: VirtualTime | None = None, **quota: Any
) -> tuple[EventRecorder, ScriptedTransport]:
    transport = ScriptedTransport(*script)
    clock = (time or VirtualTime()).clock
    made = EventRecorder(
        KubeClient(transport),
        "gpuslice-agent",
        host="n",
        quota=Quota(**quota),
        clock=clock,
        now_ns=lambda: NOW_NS,
    )
    return made, transport


async def test_an_event_is_what_kubectl_describe_looks_for() -> None:
    events, transport = recorder(answer({}))
    await events.create_event(POD, "FailedShare", "no card", type="Warning")
    (request,) = transport.requests
    document = json.loads(request.body)
    assert (request.method, request.path) == ("POST", "/api/v1/namespaces/ns/events")
    assert document["metadata"].pop("name").startswith("a.")
    assert document == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "ns"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "ns", "name": "a", "uid": "u"},
        "reason": "FailedShare",
        "message": "no card",
        "type": "Warning",
        "count": 1,
        "source": {"component": "gpuslice-agent", "host": "n"},
        "firstTimestamp": "2026-01-02T03:04:05Z",
        "lastTimestamp": "2026-01-02T03:04:05Z",
    }


@pytest.mark.parametrize("name", ["a" * 253, "a" * 229 + "-" + "c" * 23])
async def test_an_event_about_a_long_name_has_a_valid_one_of_its_own(name: str) -> None:
    """It is a DNS subdomain of 253 characters at most, as the object's own."""
    events, transport = recorder(answer({}))
    await events.create_event(pod_reference("ns", name, "u"), "FailedShare", "no card")
    document = json.loads(transport.requests[0].body)
    assert document["involvedObject"]["name"] == name
    own = document["metadata"]["name"]
    assert len(own) <= 253
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", part) for part in own.split("."))


async def test_the_same_event_again_raises_its_count() -> None:
    events, transport = recorder(answer({}), answer({}), answer({}))
    for _ in range(3):
        await events.create_event(POD, "FailedShare", "no card")
    assert [request.method for request in transport.requests] == ["POST", "PATCH", "PATCH"]
    assert json.loads(transport.requests[-1].body) == {"count": 3, "lastTimestamp": "2026-01-02T03:04:05Z"}


async def test_an_event_the_server_forgot_is_told_anew() -> None:
    events, transport = recorder(answer({}), failure(404, "NotFound"), answer({}))
    await events.create_event(POD, "FailedShare", "no card")
    await events.create_event(POD, "FailedShare", "no card")
    assert [request.method for request in transport.requests] == ["POST", "PATCH", "POST"]


async def test_a_talkative_object_is_cut_off_and_others_are_not() -> None:
    time = VirtualTime()
    events, transport = recorder(*[answer({})] * 20, time=time, burst=3, refill_s=10)
    for number in range(10):
        await events.create_event(POD, "Reason", f"message {number}")
    assert len(transport.requests) == 3
    await events.create_event(node_reference("n"), "Reason", "other")
    assert len(transport.requests) == 4
    time.now_s += 10
    await events.create_event(POD, "Reason", "later")
    assert len(transport.requests) == 5


async def test_an_event_that_cannot_be_written_harms_nobody() -> None:
    events, transport = recorder(UnavailableError("down"), answer({}))
    await events.create_event(POD, "Reason", "text")
    await events.create_event(POD, "Reason", "text")
    assert [request.method for request in transport.requests] == ["POST", "POST"]


async def test_a_node_is_referred_to_by_name_in_the_default_namespace() -> None:
    events, transport = recorder(answer({}))
    await events.create_event(node_reference("n"), "Reason", "text")
    document = json.loads(transport.requests[0].body)
    assert transport.requests[0].path == "/api/v1/namespaces/default/events"
    assert document["involvedObject"]["uid"] == "n"


async def test_memory_is_bounded() -> None:
    events, _ = recorder(*[answer({})] * 50, remembered=5)
    for number in range(50):
        about = pod_reference("ns", f"p{number}", str(number))
        await events.create_event(about, "Reason", "text")
    assert len(events._sent) == len(events._buckets) == 5
