"""Requests to the API and the meaning of their answers, without the wire.

Shared by the asynchronous and the blocking client.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar, cast

import msgspec

from gpuslice.adapters.kube.errors import (
    UNREADABLE,
    InvalidError,
    KubeError,
    decode_status,
    error_of,
    error_of_status,
    no_answer,
)
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.objects import Metadata
from gpuslice.adapters.kube.resources import PODS, Resource

T = TypeVar("T")

PAGE = 500
JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
DEEPEST = 100
"""How many arrays and objects in one another are read; no field that we know is half as deep."""
_NESTING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
"""A bracket, or a string, even one that does not end: to look for its end from each quote could take hours.
"""
_ESCAPES = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
"""A pair of surrogates, a lone one (the group), or any other escape of a JSON string."""


class ListMetadata(msgspec.Struct, gc=False, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Listing(msgspec.Struct, Generic[T]):
    """A list answer: all items, or one page of them when `metadata.continue_` is not empty."""

    metadata: ListMetadata = msgspec.field(default_factory=ListMetadata)
    items: list[T] | None = None


class WatchEvent(msgspec.Struct, Generic[T], gc=False):
    """One line of a watch: ADDED, MODIFIED, DELETED or BOOKMARK, and the object."""

    type: str
    object: T


class _Hollow(msgspec.Struct, gc=False):
    """Of a bookmark's object, what it is sent for."""

    metadata: Metadata


_EVENTS = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK"})


@lru_cache(maxsize=256)
def decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    """One decoder for each type: making one costs more than a small decode."""
    return msgspec.json.Decoder(cast(Any, kind))


def _read(read: msgspec.json.Decoder[T], data: bytes) -> T:
    """Decode, also where an object holds JSON that the decoder does not take but the API server does.

    A claim may hold 10 KiB of any JSON for another driver (``opaque.parameters``). That must not make the
    list of all unreadable.
    """
    try:
        return read.decode(data)
    except UNREADABLE:
        return read.decode(_readable(data))


def _readable(data: bytes) -> bytes:
    """With U+FFFD for what is no UTF-8 and for lone surrogates, and null for what is nested too deep.

    Decoders go 1,000 deep before Python 3.13.
    """
    data = data.decode(errors="replace").encode()
    data = _ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], data)
    kept, depth, start = [], 0, 0
    for part in _NESTING.finditer(data):
        if part[0] in b"[{":
            depth += 1
            if depth == DEEPEST:
                kept += [data[start : part.start()], b"null"]
        elif part[0] in b"]}":
            if depth == DEEPEST:
                start = part.end()
            depth -= 1
    return b"".join([*kept, data[start:]])


def decode(kind: type[T], response: ApiResponse, request: ApiRequest) -> T:
    """The answer as a `kind`; the KubeError it means when it is not a 2xx."""
    expect_object(response, request)
    try:
        return cast(T, _read(decoder(cast(Hashable, kind)), response.body))
    except UNREADABLE as error:
        raise InvalidError(f"{request}: the answer is not what the API promises: {error}") from error


def watch_event(read: msgspec.json.Decoder[WatchEvent[T]], line: bytes, what: str) -> WatchEvent[T]:
    """A line of a watch; the KubeError that it is when it is none of these.

    A bookmark's object is hollow and need not be one of its kind: pods come with `containers: null`.
    """
    try:
        event = _read(read, line)
    except UNREADABLE as error:
        unread = _opened(line, what)
        if unread.type == "BOOKMARK":
            with contextlib.suppress(*UNREADABLE):
                hollow = cast(_Hollow, decoder(_Hollow).decode(unread.object))
                return cast(WatchEvent[T], WatchEvent(unread.type, hollow))
        raise _no_event(unread, what, error) from error
    if event.type in _EVENTS:
        return event
    raise _no_event(_opened(line, what), what)


def _opened(line: bytes, what: str) -> WatchEvent[msgspec.Raw]:
    """The line with its object as it came. Raises `InvalidError` when it is no line of a watch."""
    try:
        return cast(WatchEvent[msgspec.Raw], _read(decoder(WatchEvent[msgspec.Raw]), line))
    except UNREADABLE as error:
        raise InvalidError(f"{what}: a line is not JSON: {error}") from error


def _no_event(event: WatchEvent[msgspec.Raw], what: str, cause: Exception | None = None) -> KubeError:
    if event.type in _EVENTS:
        return InvalidError(f"{what}: an object is not what the API promises: {cause}")
    return error_of_status(decode_status(bytes(event.object)), what=what)


def expect_success(response: ApiResponse, request: ApiRequest) -> None:
    if not 200 <= response.status < 300:
        raise error_of(response.status, response.body, response.headers, what=str(request))


def expect_object(response: ApiResponse, request: ApiRequest) -> None:
    """What the API server itself answers to every success is an object, also to a Binding or a deletion."""
    expect_success(response, request)
    if not response.body[:100].lstrip().startswith(b"{"):
        raise no_answer(response.body, str(request))


def list_page(
    resource: Resource[Any],
    namespace: str,
    labels: str,
    fields: str,
    *,
    limit: int,
    token: str,
    version: str = "",
) -> ApiRequest:
    """One page of a list; `limit` 0 asks for all at once."""
    query = {
        "resourceVersion": version,
        "labelSelector": labels,
        "fieldSelector": fields,
        "limit": str(limit) if limit else "",
        "continue": token,
    }
    return ApiRequest("GET", resource.path(namespace), _given(query))


def watch_query(resource_version: str, labels: str, fields: str, timeout_s: int) -> dict[str, str]:
    query = {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": resource_version,
        "labelSelector": labels,
        "fieldSelector": fields,
        "timeoutSeconds": str(timeout_s),
    }
    return _given(query)


def write(
    method: str, path: str, document: Any, content_type: str = JSON, query: Mapping[str, str] | None = None
) -> ApiRequest:
    return ApiRequest(
        method, path, query or {}, {"Content-Type": content_type}, msgspec.json.encode(document)
    )


def deletion(
    path: str, uid: str, resource_version: str, *, grace_s: int | None, propagation: str, dry_run: bool
) -> ApiRequest:
    preconditions = _given({"uid": uid, "resourceVersion": resource_version})
    options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
    if preconditions:
        options["preconditions"] = preconditions
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    if propagation:
        options["propagationPolicy"] = propagation
    return write("DELETE", path, options, query={"dryRun": "All"} if dry_run else None)


def with_preconditions(patch: Mapping[str, Any], uid: str, resource_version: str) -> dict[str, Any]:
    """A merge patch that applies only to the object meant: the server compares what no patch may change."""
    guards = _given({"uid": uid, "resourceVersion": resource_version})
    if not guards:
        return dict(patch)
    return {**patch, "metadata": {**patch.get("metadata", {}), **guards}}


def guarded_operations(
    operations: Sequence[Mapping[str, Any]], uid: str, resource_version: str
) -> list[Mapping[str, Any]]:
    """A JSON patch that applies only to the object meant.

    By `replace`, not `test`: the server answers a failed test with a 422 that does not say what failed, while
    another uid or version gets its own answer.
    """
    guards = _given({"uid": uid, "resourceVersion": resource_version})
    checks = [
        {"op": "replace", "path": f"/metadata/{name}", "value": value} for name, value in guards.items()
    ]
    return [*checks, *operations]


def binding(
    namespace: str,
    name: str,
    uid: str,
    node: str,
    *,
    resource_version: str = "",
    annotations: Mapping[str, str] | None = None,
) -> ApiRequest:
    metadata: dict[str, Any] = _given(
        {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": resource_version}
    )
    if annotations:
        metadata["annotations"] = dict(annotations)
    document = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": metadata,
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    return write("POST", PODS.path(namespace, name, "binding"), document)


def named(resource: Resource[Any], document: Any) -> tuple[str, str, Any]:
    """(namespace, name, document with apiVersion and kind) of a struct or dict to be written."""
    document = msgspec.to_builtins(document)
    metadata = document.get("metadata", {})
    whole = {"apiVersion": resource.api_version, "kind": resource.kind, **document}
    return metadata.get("namespace", ""), metadata.get("name", ""), whole


def _given(query: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in query.items() if value}
