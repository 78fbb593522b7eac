"""What the client sends: paths, preconditions, content types; and how answers to them are told apart."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import AlreadyExistsError, ConflictError, InvalidError, UnavailableError
from gpuslice.adapters.kube.http import ApiResponse
from gpuslice.adapters.kube.objects import ResourceClaim
from gpuslice.adapters.kube.requests import WatchEvent, decoder, watch_event
from gpuslice.adapters.kube.resources import NODES, PODS, RESOURCE_CLAIMS, Resource
from tests.unit.kube_wire import ScriptedTransport, answer, failure, pod

WIDGETS = Resource("example.com/v1", "widgets", "Widget", dict)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (PODS.path(), "/api/v1/pods"),
        (PODS.path("ns"), "/api/v1/namespaces/ns/pods"),
        (PODS.path("ns", "a", "binding"), "/api/v1/namespaces/ns/pods/a/binding"),
        (NODES.path("", "n", "status"), "/api/v1/nodes/n/status"),
        (NODES.path("ignored", "n"), "/api/v1/nodes/n"),
        (WIDGETS.path("ns", "a b"), "/apis/example.com/v1/namespaces/ns/widgets/a%20b"),
        (WIDGETS.path("ns", "a", "scale"), "/apis/example.com/v1/namespaces/ns/widgets/a/scale"),
    ],
)
def test_paths(path: str, wanted: str) -> None:
    assert path == wanted


def test_one_object_of_a_namespace_needs_the_namespace() -> None:
    with pytest.raises(ValueError, match="which namespace"):
        PODS.path("", "a")


async def sent(act: Any, reply: Any = None) -> tuple[str, str, dict[str, str], dict[str, str], Any]:
    """What `act` puts on the wire: method, path, query, headers, document."""
    transport = ScriptedTransport(reply or answer(pod("a", "1")))
    await act(KubeClient(transport))
    (request,) = transport.requests
    headers = {name: value for name, value in request.headers.items() if name != "Accept"}
    document = json.loads(request.body) if request.body else None
    return request.method, request.path, dict(request.query), headers, document


async def test_a_merge_patch_names_the_object_it_means() -> None:
    method, path, query, headers, document = await sent(
        lambda c: c.merge_patch(PODS, "a", {"metadata": {"annotations": {"x": None}}}, "ns", uid="u-1")
    )
    assert (method, path) == ("PATCH", "/api/v1/namespaces/ns/pods/a")
    assert headers == {"Content-Type": "application/merge-patch+json"}
    assert query == {"fieldManager": "gpuslice"}
    assert document == {"metadata": {"annotations": {"x": None}, "uid": "u-1"}}


async def test_a_json_patch_checks_first() -> None:
    operation = {"op": "add", "path": "/spec/x", "value": 1}
    *_, headers, document = await sent(
        lambda c: c.json_patch(PODS, "a", [operation], "ns", uid="u", resource_version="5")
    )
    assert headers == {"Content-Type": "application/json-patch+json"}
    assert document == [
        {"op": "replace", "path": "/metadata/uid", "value": "u"},
        {"op": "replace", "path": "/metadata/resourceVersion", "value": "5"},
        operation,
    ]


async def test_status_has_its_own_path() -> None:
    reply = answer({"metadata": {"name": "n"}})
    _, path, _, _, document = await sent(
        lambda c: c.patch_status(NODES, "n", {"capacity": {"x": "1"}}), reply
    )
    assert path == "/api/v1/nodes/n/status"
    assert document == {"status": {"capacity": {"x": "1"}}}


async def test_apply_says_who_we_are() -> None:
    method, path, query, headers, document = await sent(
        lambda c: c.apply(WIDGETS, {"metadata": {"name": "w", "namespace": "ns"}}, force=True)
    )
    assert (method, path) == ("PATCH", "/apis/example.com/v1/namespaces/ns/widgets/w")
    assert headers == {"Content-Type": "application/apply-patch+yaml"}
    assert query == {"fieldManager": "gpuslice", "force": "true"}
    assert document["kind"] == "Widget"
    assert document["apiVersion"] == "example.com/v1"


async def test_delete_carries_preconditions_and_grace() -> None:
    method, _, _, _, document = await sent(
        lambda c: c.delete(PODS, "a", "ns", uid="u", grace_s=0, propagation="Background")
    )
    assert method == "DELETE"
    assert document == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": "u"},
        "gracePeriodSeconds": 0,
        "propagationPolicy": "Background",
    }


async def test_a_binding_names_pod_uid_and_node() -> None:
    _, path, _, _, document = await sent(lambda c: c.bind("ns", "a", "node-1", uid="u"))
    assert path == "/api/v1/namespaces/ns/pods/a/binding"
    assert document["target"] == {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    assert document["metadata"] == {"name": "a", "namespace": "ns", "uid": "u"}


async def test_a_pod_that_has_its_node_is_told_apart_from_a_conflict() -> None:
    taken = failure(409, "Conflict", 'Operation cannot be fulfilled: pod a is already assigned to node "n"')
    stale = failure(409, "Conflict", "Precondition failed: UID in precondition: u, UID in object meta: v")
    with pytest.raises(AlreadyExistsError):
        await KubeClient(ScriptedTransport(taken)).bind("ns", "a", "n")
    with pytest.raises(ConflictError):
        await KubeClient(ScriptedTransport(stale)).bind("ns", "a", "n", uid="u")


async def test_another_uid_is_a_conflict_also_where_the_server_says_invalid() -> None:
    immutable = [{"reason": "FieldValueInvalid", "message": "field is immutable", "field": "metadata.uid"}]
    refused = failure(422, "Invalid", "Pod is invalid", causes=immutable)
    with pytest.raises(ConflictError):
        await KubeClient(ScriptedTransport(refused)).merge_patch(PODS, "a", {}, "ns", uid="u")


async def test_another_invalid_field_stays_invalid() -> None:
    refused = failure(422, "Invalid", "Pod is invalid", causes=[{"message": "no", "field": "spec.nodeName"}])
    with pytest.raises(InvalidError):
        await KubeClient(ScriptedTransport(refused)).merge_patch(PODS, "a", {}, "ns", uid="u")


async def test_an_answer_of_another_shape_is_told_with_its_place() -> None:
    odd = answer({"metadata": {"name": 5}})
    with pytest.raises(InvalidError, match=r"Expected `str`, got `int` - at `\$.metadata.name`"):
        await KubeClient(ScriptedTransport(odd)).get(PODS, "a", "ns")


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"\n<html><b>Please\nlog in</b></html>", "Please log in"), (b"", "nothing"), (b'"ok"', '"ok"')],
)
async def test_what_is_no_object_is_no_answer_of_the_api_server(body: bytes, said: str) -> None:
    """It comes from a proxy or a login page between, and whether the server was asked is not known."""
    client = KubeClient(ScriptedTransport(*[ApiResponse(200, {}, body)] * 3))
    for call in (client.get(PODS, "a", "ns"), client.delete(PODS, "a", "ns"), client.bind("ns", "a", "n")):
        with pytest.raises(UnavailableError, match=f"answered no object of its API but: {said}$") as caught:
            await call
        assert caught.value.outcome_unknown


async def test_a_null_list_is_an_empty_list() -> None:
    listing = await KubeClient(ScriptedTransport(answer({"metadata": {}, "items": None}))).list(PODS)
    assert listing.items == []


def claim_with(parameters: bytes) -> bytes:
    """A ResourceClaim as its author wrote it; the API server takes 10 KiB of any JSON there."""
    config = b'[{"opaque": {"driver": "example.com", "parameters": %b}}]' % parameters
    metadata = rb'{"name": "c", "labels": {"a": "]}\"[[", "b": "\\ud800\ud83d\ude00"}}'
    spec, status = b'{"devices": {"config": %b}}' % config, b'{"allocation": {}}'
    return b'{"metadata": %b, "spec": %b, "status": %b}' % (metadata, spec, status)


ODD = {
    "arrays": b"[" * 5000 + b"]" * 5000,
    "objects": rb'{"a\\\"]": ' * 1000 + b'"}"' + b"}" * 1000,
    "high surrogate": rb'{"a": "\ud800"}',
    "low surrogate": rb'["\udfFFx", "\ud83d\\ude00"]',
    "no UTF-8": b'{"a\xff": "\xed\xa0\x80"}',
}
"""kube-apiserver 1.36.2 stores each of these, and gives it back as it was."""


@pytest.mark.parametrize("parameters", ODD.values(), ids=ODD)
async def test_no_claim_makes_the_list_of_all_unreadable(parameters: bytes) -> None:
    claim = claim_with(parameters)
    body = b'{"metadata": {}, "items": [%b, {"metadata": {"name": "next"}}]}' % claim
    answers = [ApiResponse(200, {}, body)] * 2
    listing = await KubeClient(ScriptedTransport(*answers)).list(RESOURCE_CLAIMS)
    first, second = listing.items or []
    assert first.metadata.labels == {"a": ']}"[[', "b": "\\ud800\N{GRINNING FACE}"}
    assert first.status.allocation is not None
    assert second.metadata.name == "next"
    line = b'{"type": "ADDED", "object": %b}' % claim
    assert watch_event(decoder(WatchEvent[ResourceClaim]), line, "watch").object == first
    plain = await KubeClient(ScriptedTransport(*answers)).list(RESOURCE_CLAIMS.as_dict())
    assert [each["metadata"]["name"] for each in plain.items or ()] == ["c", "next"]


def test_a_line_that_a_proxy_cut_off_is_refused_soon() -> None:
    """Its last string has no end. A search for it from each of the quotes in it would take a minute."""
    applied = rb"{\"kind\":\"Pod\"}" * 5_000
    line = b'{"type": "ADDED", "object": {"metadata": {"annotations": {"applied": "%b' % applied
    began_s = time.process_time()
    with pytest.raises(InvalidError, match="a line is not JSON"):
        watch_event(decoder(WatchEvent[ResourceClaim]), line, "watch")
    assert time.process_time() - began_s < 5
