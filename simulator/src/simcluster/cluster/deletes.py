"""delete and deletecollection: grace periods, finalizers, propagation, preconditions."""

from __future__ import annotations

import math

import msgspec

from simcluster.cluster.body import parse_body
from simcluster.cluster.errors import bad_request, conflict
from simcluster.cluster.moment import format_time, parse_time
from simcluster.cluster.reads import find, selected
from simcluster.cluster.render import renderer_for
from simcluster.cluster.request import Object, Request, Response, json_response
from simcluster.cluster.resources import Resource
from simcluster.cluster.route import Target
from simcluster.cluster.selector import build_matcher
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Entry

_ANSWERED_WITH_OBJECT = frozenset(
    {"pods", "services", "persistentvolumes", "persistentvolumeclaims", "serviceaccounts", "resourcequotas"}
)
_FINALIZERS = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}


class Preconditions(msgspec.Struct, rename="camel"):
    uid: str | None = None
    resource_version: str | None = None


class DeleteOptions(msgspec.Struct, rename="camel"):
    """How to delete; ``grace_period_seconds`` None is the object's own choice."""

    grace_period_seconds: int | None = None
    preconditions: Preconditions | None = None
    propagation_policy: str | None = None
    orphan_dependents: bool | None = None
    dry_run: list[str] | None = None

    @property
    def finalizer(self) -> str:
        """The finalizer that makes the garbage collector do what was requested, if one is needed."""
        if self.orphan_dependents:
            return "orphan"
        return _FINALIZERS.get(self.propagation_policy or "", "")


def read_options(api: ApiState, request: Request) -> DeleteOptions:
    """From the body, or from the query if there is none."""
    raw: Object = parse_body(api.schema, request) if request.body.strip() else {}
    query = request.query
    if "gracePeriodSeconds" in query:
        raw.setdefault("gracePeriodSeconds", int(query["gracePeriodSeconds"]))
    if "propagationPolicy" in query:
        raw.setdefault("propagationPolicy", query["propagationPolicy"])
    if "dryRun" in query:
        raw.setdefault("dryRun", [query["dryRun"]])
    return parse_options(raw)


def parse_options(raw: Object) -> DeleteOptions:
    try:
        options = msgspec.convert(raw, DeleteOptions)
    except msgspec.ValidationError as error:
        raise bad_request(f"DeleteOptions: {error}") from error
    if options.propagation_policy not in (None, "Background", "Foreground", "Orphan"):
        raise bad_request(
            f'DeleteOptions.propagationPolicy is "{options.propagation_policy}", must be Background, '
            "Foreground or Orphan"
        )
    return options


def delete(api: ApiState, target: Target, request: Request) -> Response:
    entry = find(api.store, target)
    left = delete_entry(api, target.resource, entry, read_options(api, request))
    if left is not None or target.resource.store in _ANSWERED_WITH_OBJECT:
        renderer = renderer_for(target.resource, request, api.now_s())
        return Response(200, renderer.one(left or entry), {"content-type": renderer.content_type})
    resource = target.resource
    details = {"name": entry.key[1], "group": resource.group, "kind": resource.plural}
    details["uid"] = entry.obj["metadata"]["uid"]
    return json_response(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Success",
            "details": {key: value for key, value in details.items() if value},
        }
    )


def delete_collection(api: ApiState, target: Target, request: Request) -> Response:
    options = read_options(api, request)
    matches = build_matcher(target.resource.store, request.query)
    entries = selected(api.store.shelf(target.resource.store).items, target.namespace, matches)
    for entry in entries:
        delete_entry(api, target.resource, entry, options)
    renderer = renderer_for(target.resource, request, api.now_s())
    metadata = {"resourceVersion": str(api.store.version)}
    return Response(200, renderer.many(entries, metadata), {"content-type": renderer.content_type})


def delete_entry(api: ApiState, resource: Resource, entry: Entry, options: DeleteOptions) -> Entry | None:
    """Removes the object (None), or marks it when somebody has to finish something first (what is left)."""
    _check_preconditions(resource, entry, options.preconditions)
    # only pods that may be running somewhere get a grace period
    if resource.store != "pods":
        grace_s = 0
    else:
        spec, status = entry.obj["spec"], entry.obj.get("status") or {}
        if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
            grace_s = 0
        else:
            asked = options.grace_period_seconds
            grace = spec.get("terminationGracePeriodSeconds", 30) if asked is None else asked
            grace_s = max(int(grace), 1) if grace else 0
    finalizers = list(entry.obj["metadata"].get("finalizers") or [])
    if options.propagation_policy is not None or options.orphan_dependents:
        finalizers = [item for item in finalizers if item not in _FINALIZERS.values()]
    if options.finalizer:
        finalizers.append(options.finalizer)
    # A namespace is removed when its controller has emptied it
    waits = (
        bool(finalizers)
        or grace_s > 0
        or (resource.store == "namespaces" and bool((entry.obj.get("spec") or {}).get("finalizers")))
    )
    if options.dry_run:
        return entry if waits else None
    if not waits:
        api.store.remove(resource.store, entry.key)
        return None
    return _mark(api, resource, entry, grace_s, finalizers)


def _check_preconditions(resource: Resource, entry: Entry, wanted: Preconditions | None) -> None:
    meta = entry.obj["metadata"]
    if wanted is None:
        return
    for label, asked, held in (
        ("UID", wanted.uid, meta["uid"]),
        ("ResourceVersion", wanted.resource_version, meta["resourceVersion"]),
    ):
        if asked is not None and asked != held:
            where = "UID in object meta" if label == "UID" else "ResourceVersion in object meta"
            why = f"Precondition failed: {label} in precondition: {asked}, {where}: {held}"
            raise conflict(resource.plural, resource.group, entry.key[1], why)


def _mark(api: ApiState, resource: Resource, entry: Entry, grace_s: int, finalizers: list[str]) -> Entry:
    obj = entry.copy()
    meta = obj["metadata"]
    if finalizers:
        meta["finalizers"] = finalizers
    now_s = api.now_s()
    ends_s = now_s + grace_s
    earlier = meta.get("deletionTimestamp")
    if earlier is None or math.floor(ends_s) < parse_time(earlier):
        meta["deletionTimestamp"] = format_time(ends_s)
        meta["deletionGracePeriodSeconds"] = grace_s
        if earlier is None and "generation" in meta:
            meta["generation"] += 1
    if resource.store == "namespaces":
        obj["status"]["phase"] = "Terminating"
    return api.store.put(resource.store, obj) if obj != entry.obj else entry
