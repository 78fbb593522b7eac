"""A cluster in memory with its own clock, spoken to as over HTTP but without sockets."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from simcluster.cluster.admission import WebhookAnswer, WebhookCall
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.request import Request, Response
from simcluster.cluster.watch import Watch

PODS = "/api/v1/namespaces/default/pods"
SETS = "/apis/apps/v1/namespaces/default/statefulsets"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"


def make_pod(name: str = "p", **spec: Any) -> dict[str, Any]:
    containers = spec.pop("containers", [{"name": "c", "image": "x:1"}])
    labels = spec.pop("labels", {})
    return {"metadata": {"name": name, "labels": labels}, "spec": {"containers": containers, **spec}}


def make_set(name: str = "s", replicas: int = 1, **spec: Any) -> dict[str, Any]:
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "x:1"}]}}
    body = {
        "replicas": replicas,
        "serviceName": name,
        "selector": {"matchLabels": labels},
        "template": template,
    }
    return {"metadata": {"name": name}, "spec": {**body, **spec}}


@dataclass
class Wire:
    """Requests by method; `call` answers status and decoded body."""

    now_s: float = 1_700_000_000.0
    webhook_calls: list[WebhookCall] = field(default_factory=list)
    webhook_answers: list[WebhookAnswer] = field(default_factory=list)
    history_limit: int = 10_000

    def __post_init__(self) -> None:
        dice = random.Random(1)
        self.cluster = Cluster(
            lambda: self.now_s, dice, webhook=self._webhook, history_limit=self.history_limit
        )

    def _webhook(self, call: WebhookCall) -> WebhookAnswer:
        self.webhook_calls.append(call)
        return self.webhook_answers.pop(0)

    def send(self, method: str, path: str, body: Any = None, *, kind: str = "", **query: str) -> Response:
        headers = {"user-agent": "test/1"} | ({"content-type": kind} if kind else {})
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.cluster.handle(Request(method, path, query, headers, raw))

    def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "", **query: str
    ) -> tuple[int, Any]:
        response = self.send(method, path, body, kind=kind, **query)
        return response.status, json.loads(response.body)

    def get(self, path: str, **query: str) -> Any:
        return self.call("GET", path, **query)[1]

    def make(self, path: str, body: Any) -> Any:
        status, made = self.call("POST", path, body)
        assert status == 201, made
        return made

    def patch(self, path: str, body: Any, kind: str = MERGE, **query: str) -> tuple[int, Any]:
        return self.call("PATCH", path, body, kind=kind, **query)

    def watch(self, path: str, **query: str) -> Watch:
        response = self.send("GET", path, watch="1", **query)
        assert response.watch is not None
        return response.watch


def lines(watch: Watch) -> list[Any]:
    """What the client of a watch has been sent since the last look."""
    return [json.loads(line) for line in watch.take().splitlines()]


def kinds(watch: Watch) -> list[tuple[str, str]]:
    """Event types and names since the last look."""
    return [(line["type"], line["object"]["metadata"].get("name", "")) for line in lines(watch)]
