"""Admission webhooks: which ones are called for a write, what they are sent, what their answer does.

There is no network here: a call is yielded to whatever runs the request, and its answer is sent back.
"""

from __future__ import annotations

import base64
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from simcluster.cluster.decode import Decoder
from simcluster.cluster.errors import ApiError
from simcluster.cluster.patch import json_patch
from simcluster.cluster.request import Object
from simcluster.cluster.resources import Resource
from simcluster.cluster.selector import selects

if TYPE_CHECKING:
    from simcluster.cluster.cluster import Cluster

_GROUP = "admissionregistration.k8s.io"
_MUTATING = f"mutatingwebhookconfigurations.{_GROUP}"
_VALIDATING = f"validatingwebhookconfigurations.{_GROUP}"


@dataclass(frozen=True, slots=True)
class WebhookCall:
    """One AdmissionReview to be posted; ``client_config`` says where to (url or service, caBundle)."""

    name: str
    client_config: Object
    timeout_s: float
    review: Object


@dataclass(frozen=True, slots=True)
class WebhookAnswer:
    """The ``response`` of the AdmissionReview that was returned, or why there is none."""

    response: Object | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Review:
    """One write under review; ``old`` is None for a creation."""

    resource: Resource
    operation: str
    old: Object | None
    obj: Object
    dry_run: bool = False
    subresource: str = ""

    @property
    def namespace(self) -> str:
        return str(self.obj["metadata"].get("namespace", ""))


ObjectSteps = Generator[WebhookCall, WebhookAnswer, Object]
VoidSteps = Generator[WebhookCall, WebhookAnswer, None]


def admit(cluster: Cluster, review: Review) -> ObjectSteps:
    """The object after all mutating webhooks; ApiError if one denies or fails."""
    for hook in _hooks(cluster, _MUTATING, review):
        answer = yield _call(cluster, hook, review)
        response = _allowed(hook, answer)
        if response.get("patch"):
            try:
                operations: Any = msgspec.json.decode(base64.b64decode(response["patch"]))
                changed = json_patch(_typed(review, review.obj), operations)
            except (ValueError, msgspec.DecodeError, ApiError) as error:
                message = (
                    f'Internal error occurred: admission webhook "{hook["name"]}" sent a bad patch: {error}'
                )
                raise ApiError(500, "InternalError", message) from error
            bare = {key: value for key, value in changed.items() if key not in ("apiVersion", "kind")}
            review = replace(review, obj=Decoder(cluster.schema).object(review.resource.schema, bare))
    return review.obj


def validate_by_webhooks(cluster: Cluster, review: Review) -> VoidSteps:
    """ApiError if a validating webhook denies or fails."""
    for hook in _hooks(cluster, _VALIDATING, review):
        answer = yield _call(cluster, hook, review)
        _allowed(hook, answer)


def _hooks(cluster: Cluster, shelf: str, review: Review) -> list[Object]:
    """The webhooks that match, in the order of their configurations' names."""
    if review.resource.group == _GROUP:
        return []
    configurations = sorted(cluster.store.shelf(shelf).items.values(), key=lambda entry: entry.key)
    hooks = [hook for entry in configurations for hook in entry.obj.get("webhooks") or []]
    return [hook for hook in hooks if _wants(cluster, hook, review)]


def _wants(cluster: Cluster, hook: Object, review: Review) -> bool:
    if not any(_rule_matches(rule, review) for rule in hook.get("rules") or []):
        return False
    if not selects(hook.get("namespaceSelector") or {}, _namespace_labels(cluster, review)):
        return False
    objects = [item for item in (review.obj, review.old) if item is not None]
    return any(selects(hook.get("objectSelector") or {}, _labels(item)) for item in objects)


def _rule_matches(rule: Object, review: Review) -> bool:
    resource = review.resource
    scope = "Namespaced" if resource.namespaced else "Cluster"
    name = f"{resource.plural}/{review.subresource}" if review.subresource else resource.plural
    wanted = {name, "*/*", f"*/{review.subresource}" if review.subresource else "*"}
    return (
        not {review.operation, "*"}.isdisjoint(rule.get("operations") or [])
        and not {resource.group, "*"}.isdisjoint(rule.get("apiGroups") or [""])
        and not {resource.version, "*"}.isdisjoint(rule.get("apiVersions") or [])
        and not wanted.isdisjoint(rule.get("resources") or [])
        and rule.get("scope", "*") in ("*", scope)
    )


def _labels(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


def _namespace_labels(cluster: Cluster, review: Review) -> dict[str, str]:
    if review.resource.store == "namespaces":
        return _labels(review.obj)
    entry = cluster.store.get("namespaces", ("", review.namespace))
    return _labels(entry.obj) if entry else {}


def _call(cluster: Cluster, hook: Object, review: Review) -> WebhookCall:
    resource = review.resource
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    where = {"group": resource.group, "version": resource.version, "resource": resource.plural}
    part = {"subResource": review.subresource} if review.subresource else {}
    request: Object = {
        "uid": cluster.identities.new_uid(),
        "kind": kind,
        "resource": where,
        **part,
        "requestKind": kind,
        "requestResource": where,
        "name": review.obj["metadata"]["name"],
        "namespace": review.namespace,
        "operation": review.operation,
        "userInfo": {"username": "system:admin", "groups": ["system:masters", "system:authenticated"]},
        "object": _typed(review, review.obj),
        "oldObject": _typed(review, review.old) if review.old else None,
        "dryRun": review.dry_run,
        "options": {},
    }
    body = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}
    return WebhookCall(hook["name"], hook["clientConfig"], float(hook.get("timeoutSeconds", 10)), body)


def _typed(review: Review, obj: Object) -> Object:
    return {"kind": review.resource.kind, "apiVersion": review.resource.api_version} | obj


def _allowed(hook: Object, answer: WebhookAnswer) -> Object:
    """The response of a webhook that says yes, or of one that may fail and did; ApiError otherwise."""
    name, response = hook["name"], answer.response
    if response is None:
        if hook.get("failurePolicy") == "Ignore":
            return {}
        why = f'failed calling webhook "{name}": failed to call webhook: {answer.error}'
        raise ApiError(500, "InternalError", f"Internal error occurred: {why}")
    if response.get("allowed"):
        return response
    status = response.get("status") or {}
    text = status.get("message") or status.get("reason")
    said = f"denied the request: {text}" if text else "denied the request without explanation"
    message = f'admission webhook "{name}" {said}'
    raise ApiError(max(int(status.get("code", 0)), 400), str(status.get("reason", "")), message)
