"""Pods through the webhook's decisions, as the API server would send them."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from gpuslice.adapters.wire.review import decode_review
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.core.admission import AdmissionRules
from gpuslice.core.hami import HamiRules
from gpuslice.core.kai import KaiRules
from simcluster.cluster.patch import json_patch
from tests.builders import api_container, api_pod

Object = dict[str, Any]
PLAIN = AdmissionRules()
HAMI = HamiRules(card_units=80, models=("NVIDIA-A100-SXM4-80GB", "Tesla-T4"))


def review(
    pod: Object,
    operation: str = "CREATE",
    old: Object | None = None,
    user: str = "alice",
    groups: tuple[str, ...] = (),
    *,
    part: str = "",
) -> bytes:
    request = {
        "uid": "u1",
        "operation": operation,
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "subResource": part,
        "namespace": "default",
        "userInfo": {"username": user, "groups": list(groups)},
        "object": pod,
        "oldObject": old,
    }
    return msgspec.json.encode(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    )


def mutated(
    pod: Object,
    rules: AdmissionRules = PLAIN,
    hami: HamiRules | None = None,
    kai: KaiRules | None = None,
    **update: Any,
) -> Object:
    """The pod after its patch; AssertionError with the sentence when it is denied."""
    response = Reviewer(rules, hami, kai).mutate(decode_review(review(pod, **update)))["response"]
    assert response["allowed"], response["status"]["message"]
    if "patch" not in response:
        return pod
    changed: Object = json_patch(
        msgspec.json.decode(msgspec.json.encode(pod)),
        msgspec.json.decode(base64.b64decode(response["patch"])),
    )
    return changed


def denial(pod: Object, rules: AdmissionRules = PLAIN, hami: HamiRules | None = None) -> str:
    response = Reviewer(rules, hami).mutate(decode_review(review(pod)))["response"]
    assert not response["allowed"]
    return str(response["status"]["message"])


def invalid(pod: Object, rules: AdmissionRules = PLAIN, **update: Any) -> str:
    """The sentence of the validating webhook, "" when it lets the pod pass."""
    response = Reviewer(rules).validate(decode_review(review(pod, **update)))["response"]
    return str(response["status"]["message"]) if not response["allowed"] else ""


def with_env(*env: Object, **fields: Any) -> Object:
    """A pod whose one container has this environment, and more fields."""
    return api_pod(containers=[api_container("4") | {"env": list(env)} | fields])


def env_of(pod: Object, container: int = 0) -> dict[str, Any]:
    entries = pod["spec"]["containers"][container].get("env") or []
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in entries}
