"""Who may do what: everybody everything, since the simulation has no users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simcluster.cluster.body import read_object
from simcluster.cluster.request import Object, Request, Response, json_response
from simcluster.cluster.route import Target

if TYPE_CHECKING:
    from simcluster.cluster.cluster import Cluster

_USER: Object = {"username": "system:admin", "groups": ["system:masters", "system:authenticated"]}
_ALLOWED: Object = {"allowed": True, "reason": "the simulated API server allows everything"}
_ALL_RULES: Object = {
    "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}],
    "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
    "incomplete": False,
}
_ANSWERS: dict[str, Object] = {
    "SelfSubjectRulesReview": _ALL_RULES,
    "SelfSubjectReview": {"userInfo": _USER},
    "TokenReview": {"authenticated": True, "user": _USER},
}


def answer(cluster: Cluster, target: Target, request: Request) -> Response:
    body = read_object(cluster.schema, target.resource, request)
    head = {"kind": target.resource.kind, "apiVersion": target.resource.api_version}
    status = _ANSWERS.get(target.resource.kind, _ALLOWED)
    return json_response(head | body.obj | {"status": status}, 201)
