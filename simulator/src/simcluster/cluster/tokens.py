"""Tokens of service accounts, as ``kubectl create token`` asks for them."""

from __future__ import annotations

from collections.abc import Callable

from simcluster.cluster.body import parse_body
from simcluster.cluster.moment import format_time
from simcluster.cluster.reads import find
from simcluster.cluster.request import Request, Response, json_response
from simcluster.cluster.route import Target
from simcluster.cluster.schema import Schema
from simcluster.cluster.store import Store
from simcluster.cluster.users import token_of


def issue(
    store: Store, schema: Schema, now_s: Callable[[], float], target: Target, request: Request
) -> Response:
    account = find(store, target).obj["metadata"]
    body = parse_body(schema, request)
    lifetime_s = (body.get("spec") or {}).get("expirationSeconds") or 3600
    status = {
        "token": token_of(account["namespace"], account["name"]),
        "expirationTimestamp": format_time(now_s() + lifetime_s),
    }
    return json_response(body | {"status": status}, 201)
