"""create, update and patch: one pipeline from a decoded body to a stored object."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import msgspec

from simcluster.cluster import apply, managed, metadata
from simcluster.cluster.admission import WebhookAnswer, WebhookCall, admit, validate_admission
from simcluster.cluster.body import (
    Body,
    check_type,
    decode_object,
    read_object,
    with_warnings,
)
from simcluster.cluster.builtin import admit_builtin
from simcluster.cluster.decode import parse_json
from simcluster.cluster.defaulting import apply_defaults
from simcluster.cluster.errors import (
    MODIFIED,
    ApiError,
    already_exists,
    bad_request,
    conflict,
    not_found,
    unsupported_media_type,
)
from simcluster.cluster.events_view import to_events_group
from simcluster.cluster.limit_range import check_limit_ranges
from simcluster.cluster.managed import APPLY, WriteOptions, options_of
from simcluster.cluster.patch import json_patch, merge_patch
from simcluster.cluster.policies import check_expressions
from simcluster.cluster.quota import check_quotas
from simcluster.cluster.reads import find
from simcluster.cluster.render import renderer_for
from simcluster.cluster.request import Object, Request, Response
from simcluster.cluster.review import Review
from simcluster.cluster.route import Target
from simcluster.cluster.scope import keep_other_parts, without_client_status
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Entry, with_version
from simcluster.cluster.strategic import StrategicMerge
from simcluster.cluster.validation import validate_create, validate_update

Steps = Generator[WebhookCall, WebhookAnswer, Response]
EntrySteps = Generator[WebhookCall, WebhookAnswer, Entry]

_PATCH_ATTEMPTS = 5


def answer(
    api: ApiState,
    target: Target,
    request: Request,
    entry: Entry,
    *,
    status: int,
    warnings: tuple[str, ...] = (),
) -> Response:
    renderer = renderer_for(target.resource, request, api.now_s())
    response = Response(status, renderer.one(entry), {"content-type": renderer.content_type})
    return with_warnings(response, warnings)


def create(api: ApiState, target: Target, request: Request) -> Steps:
    """POST to a collection."""
    body = read_object(api.schema, target.resource, request)
    entry = yield from create_object(api, target, body.obj, options_of(request))
    return answer(api, target, request, entry, status=201, warnings=body.warnings)


def create_object(api: ApiState, target: Target, obj: Object, options: WriteOptions) -> EntrySteps:
    """The steps for a new object: identity, defaults, admission, validation, store."""
    resource = target.resource
    metadata.begin_metadata(api, resource, target.namespace, obj)
    without_client_status(resource, obj)
    apply_defaults(resource.store, obj)
    admit_builtin(api, resource, obj)
    review = Review(resource, "CREATE", None, obj, options.user, options.dry_run)
    obj = yield from admit(api.store, api.schema, api.identities, review)
    apply_defaults(resource.store, obj)
    validate_create(resource, obj)
    check_expressions(resource, obj)
    if resource.store == "pods":
        check_limit_ranges(api.store, obj)
    yield from validate_admission(api.store, api.identities, replace(review, obj=obj))
    key = (obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
    if api.store.get(resource.store, key) is not None:
        raise already_exists(resource.plural, resource.group, key[1])
    check_quotas(api.store, resource, obj)
    managed.record(api, resource, None, obj, options)
    if options.dry_run:
        return with_version(obj, api.store.version)
    return api.store.put(resource.store, obj)


def update(api: ApiState, target: Target, request: Request) -> Steps:
    """PUT of an object or of its status."""
    body = read_object(api.schema, target.resource, request)
    obj = body.obj
    given = obj["metadata"].get("name", "")
    if given and given != target.name:
        raise bad_request(
            f"the name of the object ({given}) does not match the name on the URL ({target.name})"
        )
    current = api.store.get(target.resource.store, (target.namespace, target.name))
    options = options_of(request, target.subresource)
    if current is None and target.resource.create_on_update and not target.subresource:
        entry = yield from create_object(api, target, body.obj, options)
        return answer(api, target, request, entry, status=201, warnings=body.warnings)
    entry = yield from update_object(api, target, find(api.store, target), body.obj, options)
    return answer(api, target, request, entry, status=200, warnings=body.warnings)


def update_object(
    api: ApiState, target: Target, current: Entry, obj: Object, options: WriteOptions
) -> EntrySteps:
    """The steps for a changed object; nothing is stored if nothing changed."""
    resource, old = target.resource, current.obj
    metadata.carry_metadata(resource, current, obj)
    keep_other_parts(resource, options.subresource, old, obj)
    apply_defaults(resource.store, obj)
    review = Review(resource, "UPDATE", old, obj, options.user, options.dry_run, options.subresource)
    obj = yield from admit(api.store, api.schema, api.identities, review)
    apply_defaults(resource.store, obj)
    metadata.count_generation(resource, old, obj)
    validate_update(resource, old, obj, options.subresource)
    if options.subresource == "resize":
        check_limit_ranges(api.store, obj)
    check_expressions(resource, obj)
    yield from validate_admission(api.store, api.identities, replace(review, obj=obj))
    if api.store.get(resource.store, current.key) is not current:
        raise conflict(resource.plural, resource.group, current.key[1], MODIFIED)
    managed.record(api, resource, old, obj, options)
    if managed.same(current.obj, obj):
        return current
    if options.dry_run:
        return with_version(obj, current.version)
    entry = api.store.put(resource.store, obj)
    # the deletion was only waiting for finalizers, and the last one has been removed
    meta = obj["metadata"]
    waits = meta.get("finalizers") or (obj.get("spec") or {}).get("finalizers")
    if bool(meta.get("deletionTimestamp")) and not waits and not meta.get("deletionGracePeriodSeconds"):
        return api.store.remove(resource.store, entry.key)
    return entry


Change = Callable[[Entry], Object]


def patch(api: ApiState, target: Target, request: Request) -> Steps:
    """PATCH in any of the four forms; server-side apply creates what is missing."""
    if request.content_type == APPLY:
        return (yield from _apply(api, target, request))
    changer = patch_function(api, target.resource.schema, request)
    validation = request.query.get("fieldValidation", "Warn")

    def changed(current: Entry) -> Body:
        known = current.copy()
        if target.resource.group == "events.k8s.io":
            known = to_events_group(known)
        about = {"apiVersion": target.resource.api_version, "kind": target.resource.kind}
        patched = changer(about | known)
        check_type(target.resource, patched)
        return decode_object(api.schema, target.resource, patched, validation)

    options = options_of(request, target.subresource)
    for attempt in range(_PATCH_ATTEMPTS):
        current = find(api.store, target)
        body = changed(current)
        try:
            entry = yield from update_object(api, target, current, body.obj, options)
            return answer(api, target, request, entry, status=200, warnings=body.warnings)
        except ApiError as error:
            moved = api.store.get(target.resource.store, current.key) is not current
            if error.code != 409 or not moved or attempt == _PATCH_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _apply(api: ApiState, target: Target, request: Request) -> Steps:
    """Server-side apply, which creates a missing object."""
    resource = target.resource
    body = apply.read_configuration(api, resource, request)
    options = options_of(request, target.subresource)
    current = api.store.get(resource.store, (target.namespace, target.name))
    if current is not None:
        obj = apply.merged(api, resource, current, body.obj, options)
        entry = yield from update_object(api, target, current, obj, options)
        return answer(api, target, request, entry, status=200, warnings=body.warnings)
    if target.subresource:
        raise not_found(resource.plural, resource.group, target.name)
    body.obj["metadata"].setdefault("name", target.name)
    obj = apply.begun(api, resource, body.obj, options)
    entry = yield from create_object(api, target, obj, options)
    return answer(api, target, request, entry, status=201, warnings=body.warnings)


def patch_function(api: ApiState, schema_name: str, request: Request) -> Callable[[Object], Any]:
    """What the body does to an object, by its content type."""
    match request.content_type:
        case "application/json-patch+json":
            try:
                operations = msgspec.json.decode(request.body)
            except msgspec.DecodeError as error:
                raise bad_request(f"the body of the request is not JSON: {error}") from error
            return lambda obj: json_patch(obj, operations)
        case "application/merge-patch+json":
            merged = parse_json(request.body)
            return lambda obj: merge_patch(obj, merged)
        case "application/strategic-merge-patch+json":
            strategic = parse_json(request.body)
            return lambda obj: StrategicMerge(api.schema).merge(schema_name, obj, strategic)
    raise unsupported_media_type(request.content_type)
