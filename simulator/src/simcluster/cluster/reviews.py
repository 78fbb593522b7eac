"""Who may do what: everybody everything, since the simulation refuses nobody."""

from __future__ import annotations

from simcluster.cluster.body import read_object
from simcluster.cluster.request import Object, Request, Response, json_response
from simcluster.cluster.route import Target
from simcluster.cluster.schema import Schema
from simcluster.cluster.users import user_of, user_of_token

_ALLOWED: Object = {"allowed": True, "reason": "the simulated API server allows everything"}
_ALL_RULES: Object = {
    "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}],
    "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
    "incomplete": False,
}


def answer(schema: Schema, target: Target, request: Request) -> Response:
    body = read_object(schema, target.resource, request)
    head = {"kind": target.resource.kind, "apiVersion": target.resource.api_version}
    match target.resource.kind:
        case "SelfSubjectRulesReview":
            status = _ALL_RULES
        case "SelfSubjectReview":
            status = {"userInfo": user_of(request)}
        case "TokenReview":
            token = (body.obj.get("spec") or {}).get("token", "")
            status = {"authenticated": True, "user": user_of_token(token)}
        case _:
            status = _ALLOWED
    return json_response(head | body.obj | {"status": status}, 201)
