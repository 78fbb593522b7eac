"""Admission: policies, then webhooks. Which webhooks are called, what they are sent, what their answer does.

There is no network here: a call is yielded to whatever runs the request, and its answer is sent back.
"""

from __future__ import annotations

import base64
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from simcluster.cluster.cel import CelError
from simcluster.cluster.decode import Decoder
from simcluster.cluster.errors import ApiError, forbidden
from simcluster.cluster.identities import Identities
from simcluster.cluster.patch import json_patch
from simcluster.cluster.policies import (
    GROUP,
    conditions_hold,
    mutate_by_policies,
    under_review,
    validate_by_policies,
)
from simcluster.cluster.request import Object
from simcluster.cluster.review import Review, matches
from simcluster.cluster.schema import Schema
from simcluster.cluster.store import Store

_MUTATING = f"mutatingwebhookconfigurations.{GROUP}"
_VALIDATING = f"validatingwebhookconfigurations.{GROUP}"


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


ObjectSteps = Generator[WebhookCall, WebhookAnswer, Object]
VoidSteps = Generator[WebhookCall, WebhookAnswer, None]


def admit(store: Store, schema: Schema, identities: Identities, review: Review) -> ObjectSteps:
    """The object after all mutating policies and webhooks; ApiError if one denies or fails."""
    review = mutate_by_policies(store, schema, review)
    for hook in _hooks(store, _MUTATING, review):
        answer = yield _call(identities, hook, review)
        response = _allowed(hook, answer)
        if response.get("patch"):
            try:
                operations: Any = msgspec.json.decode(base64.b64decode(response["patch"]))
                changed = json_patch(review.typed(review.obj), operations)
            except (ValueError, msgspec.DecodeError, ApiError) as error:
                message = (
                    f'Internal error occurred: admission webhook "{hook["name"]}" sent a bad patch: {error}'
                )
                raise ApiError(500, "InternalError", message) from error
            bare = {key: value for key, value in changed.items() if key not in ("apiVersion", "kind")}
            review = replace(review, obj=Decoder(schema).object(review.resource.schema, bare))
    return review.obj


def validate_admission(store: Store, identities: Identities, review: Review) -> VoidSteps:
    """ApiError if a validating policy or webhook denies or fails."""
    validate_by_policies(store, review)
    for hook in _hooks(store, _VALIDATING, review):
        answer = yield _call(identities, hook, review)
        _allowed(hook, answer)


def _hooks(store: Store, shelf: str, review: Review) -> list[Object]:
    """The webhooks that match, in the order of their configurations' names."""
    if review.resource.group == GROUP:
        return []
    configurations = sorted(store.shelf(shelf).items.values(), key=lambda entry: entry.key)
    hooks = [hook for entry in configurations for hook in entry.obj.get("webhooks") or []]
    hooks = [hook for hook in hooks if matches(hook.get("rules") or (), hook, review, store)]
    return [hook for hook in hooks if _concerned(hook, review)]


def _concerned(hook: Object, review: Review) -> bool:
    try:
        return conditions_hold(hook, under_review(review))
    except CelError as error:
        if hook.get("failurePolicy") == "Ignore":
            return False
        resource, name = review.resource, str(review.obj["metadata"].get("name", ""))
        raise forbidden(resource.plural, resource.group, name, str(error)) from error


def _call(identities: Identities, hook: Object, review: Review) -> WebhookCall:
    request: Object = {
        "uid": identities.new_uid(),
        **review.request(),
        "object": review.typed(review.obj),
        "oldObject": review.typed(review.old) if review.old else None,
    }
    body = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}
    return WebhookCall(hook["name"], hook["clientConfig"], float(hook.get("timeoutSeconds", 10)), body)


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
