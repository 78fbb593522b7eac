"""Binding a pod to a node: the result of a scheduler's decision."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from simcluster.cluster.admission import WebhookAnswer, WebhookCall, validate_admission
from simcluster.cluster.body import parse_body
from simcluster.cluster.errors import Cause, conflict, invalid
from simcluster.cluster.moment import format_time
from simcluster.cluster.reads import find
from simcluster.cluster.request import Object, Request, Response, json_response
from simcluster.cluster.review import Review
from simcluster.cluster.route import Target
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Entry
from simcluster.cluster.users import user_of

BindingSteps = Generator[WebhookCall, WebhookAnswer, Response]

_BOUND: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def bind(api: ApiState, target: Target, request: Request) -> BindingSteps:
    """Sets the node once; ApiError 409 if it is set, or if the pod is being deleted or has another uid."""
    body = parse_body(api.schema, request)
    metadata: Object = body.get("metadata") or {}
    node = (body.get("target") or {}).get("name", "")
    name = target.name or metadata.get("name", "")
    if not node:
        raise invalid("Binding", "", name, [Cause("target.name", "FieldValueRequired", "Required value")])
    pods = api.catalog.find("", "v1", "pods")
    assert pods is not None
    entry = find(api.store, Target(pods, target.namespace, name))
    # reviewed as pods/binding or as bindings, whichever was asked for
    resource = replace(target.resource, kind="Binding")
    reviewed = {
        "metadata": {"name": name, "namespace": target.namespace, **metadata},
        "target": body["target"],
    }
    part = "binding" if target.name else ""
    review = Review(resource, "CREATE", None, reviewed, user_of(request), subresource=part)
    yield from validate_admission(api.store, api.identities, review)
    _check(entry, name, metadata)
    if "All" not in request.query.get("dryRun", ""):
        pod = entry.copy()
        pod["spec"]["nodeName"] = node
        pod["status"].pop("nominatedNodeName", None)  # ClearingNominatedNodeNameAfterBinding, on since 1.35
        for part in ("annotations", "labels"):
            if metadata.get(part):
                pod["metadata"][part] = (pod["metadata"].get(part) or {}) | metadata[part]
        conditions = [c for c in pod["status"].get("conditions") or [] if c["type"] != "PodScheduled"]
        scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
        pod["status"]["conditions"] = [
            *conditions,
            scheduled | {"lastTransitionTime": format_time(api.now_s())},
        ]
        api.store.put("pods", pod)
    return json_response(_BOUND, 201)


def _check(entry: Entry, name: str, metadata: Object) -> None:
    held, spec = entry.obj["metadata"], entry.obj["spec"]
    why = ""
    if metadata.get("uid") and metadata["uid"] != held["uid"]:
        why = (
            f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {held['uid']}"
        )
    elif metadata.get("resourceVersion") and metadata["resourceVersion"] != held["resourceVersion"]:
        why = (
            f"Precondition failed: ResourceVersion in precondition: {metadata['resourceVersion']},"
            f" ResourceVersion in object meta: {held['resourceVersion']}"
        )
    elif held.get("deletionTimestamp"):
        why = f"pod {name} is being deleted, cannot be assigned to a host"
    elif spec.get("nodeName"):
        why = f'pod {name} is already assigned to node "{spec["nodeName"]}"'
    elif spec.get("schedulingGates"):
        why = f"pod {name} has non-empty .spec.schedulingGates"
    if why:
        raise conflict("pods/binding", "", name, why)
