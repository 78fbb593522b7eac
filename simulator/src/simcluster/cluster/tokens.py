"""Tokens of service accounts: opaque strings, since nobody is authenticated here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simcluster.cluster.body import parse_body
from simcluster.cluster.moment import format_time
from simcluster.cluster.reads import find
from simcluster.cluster.request import Request, Response, json_response
from simcluster.cluster.route import Target

if TYPE_CHECKING:
    from simcluster.cluster.cluster import Cluster


def issue(cluster: Cluster, target: Target, request: Request) -> Response:
    account = find(cluster.store, target).obj["metadata"]
    body = parse_body(cluster.schema, request)
    lifetime_s = (body.get("spec") or {}).get("expirationSeconds") or 3600
    status = {
        "token": f"simulated-{account['uid']}",
        "expirationTimestamp": format_time(cluster.now_s() + lifetime_s),
    }
    return json_response(body | {"status": status}, 201)
