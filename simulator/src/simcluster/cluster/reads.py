"""get, list and watch."""

from __future__ import annotations

import base64

import msgspec

from simcluster.cluster.errors import ApiError, Cause, bad_request, not_found
from simcluster.cluster.render import renderer_for
from simcluster.cluster.request import Object, Request, Response
from simcluster.cluster.route import Target
from simcluster.cluster.selector import Matcher, build_matcher
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Entry, Key, Store
from simcluster.cluster.watch import Watch


class _Continue(msgspec.Struct):
    """Where a paged list goes on: after ``key``, in the state of ``version``."""

    version: int
    key: Key


def get(api: ApiState, target: Target, request: Request) -> Response:
    entry = find(api.store, target)
    renderer = renderer_for(target.resource, request, api.now_s())
    return Response(200, renderer.one(entry), {"content-type": renderer.content_type})


def find(store: Store, target: Target) -> Entry:
    """The object addressed; ApiError 404 if there is none."""
    entry = store.get(target.resource.store, (target.namespace, target.name))
    if entry is None:
        raise not_found(target.resource.plural, target.resource.group, target.name)
    return entry


def list_objects(api: ApiState, target: Target, request: Request) -> Response:
    """A list at one version, whole or in pages of ``limit``."""
    version, after = _list_position(api, request)
    items = api.store.items_at(target.resource.store, version)
    entries = selected(items, target.namespace, build_matcher(target.resource.store, request.query))
    if after is not None:
        entries = [entry for entry in entries if entry.key > after]
    limit = int(request.query.get("limit") or 0)
    page, rest = (entries[:limit], entries[limit:]) if limit else (entries, [])
    metadata: Object = {"resourceVersion": str(version)}
    if rest:
        metadata["continue"] = base64.urlsafe_b64encode(
            msgspec.json.encode(_Continue(version, page[-1].key))
        ).decode()
        metadata["remainingItemCount"] = len(rest)
    renderer = renderer_for(target.resource, request, api.now_s())
    return Response(200, renderer.many(page, metadata), {"content-type": renderer.content_type})


def selected(items: dict[Key, Entry], namespace: str, matches: Matcher | None) -> list[Entry]:
    """Entries in key order."""
    found = [
        entry
        for key, entry in items.items()
        if (not namespace or key[0] == namespace) and (matches is None or matches(entry.obj))
    ]
    return sorted(found, key=lambda entry: entry.key)


def _list_position(api: ApiState, request: Request) -> tuple[int, Key | None]:
    token = request.query.get("continue", "")
    wanted = request.query.get("resourceVersion", "")
    match = request.query.get("resourceVersionMatch", "")
    if token:
        try:
            position = msgspec.json.decode(base64.urlsafe_b64decode(token), type=_Continue)
        except (ValueError, msgspec.DecodeError) as error:
            raise bad_request("continue key is not valid") from error
        return position.version, position.key
    if match and not wanted:
        raise bad_request("resourceVersionMatch is forbidden unless resourceVersion is provided")
    version = parse_version(wanted)
    if version > api.store.version:
        current = api.store.version
        message = f"Too large resource version: {version}, current: {current}"
        cause = Cause("", "ResourceVersionTooLarge", "Too large resource version").to_dict()
        raise ApiError(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})
    return (version if match == "Exact" else api.store.version), None


def parse_version(text: str) -> int:
    """A resourceVersion parameter; empty and ``0`` are 0."""
    try:
        return int(text or 0)
    except ValueError as error:
        raise bad_request(f"Invalid value: {text!r}: resourceVersion must be a number") from error


def watch(api: ApiState, target: Target, request: Request) -> Response:
    """Changes from a version on, from the present state on, or the state first and then changes."""
    query = dict(request.query)
    if target.name:
        query["fieldSelector"] = f"metadata.name={target.name}"
    matches = build_matcher(target.resource.store, query)
    renderer = renderer_for(target.resource, request, api.now_s())
    subscription = Watch(
        api.store,
        target.resource.store,
        namespace=target.namespace,
        matches=matches,
        render=renderer.watched,
        bookmark_type=renderer.bookmark_type,
        wants_bookmarks=request.flag("allowWatchBookmarks"),
        timeout_s=float(query["timeoutSeconds"]) if query.get("timeoutSeconds") else None,
    )
    _begin(api, target, request, subscription, matches)
    return Response(200, headers={"content-type": renderer.content_type}, watch=subscription)


def _begin(
    api: ApiState, target: Target, request: Request, subscription: Watch, matches: Matcher | None
) -> None:
    shelf = target.resource.store
    version = parse_version(request.query.get("resourceVersion", ""))
    initial = request.query.get("sendInitialEvents")
    if initial is not None and request.query.get("resourceVersionMatch") != "NotOlderThan":
        cause = Cause(
            "resourceVersionMatch",
            "FieldValueForbidden",
            "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
        )
        message = f"ListOptions.meta.k8s.io is invalid: {cause.field}: Forbidden: {cause.message}"
        raise ApiError(422, "Invalid", message, {"causes": [cause.to_dict()]})
    if initial in ("true", "1") or (initial is None and version == 0):
        subscription.show(selected(api.store.shelf(shelf).items, target.namespace, matches))
        if initial and subscription.wants_bookmarks:
            subscription.bookmark(initial_end=True)
        subscription.start()
        return
    subscription.start()
    try:
        for change in api.store.since(shelf, version or api.store.version):
            subscription.offer(change)
    except ApiError as error:
        subscription.fail(error)
