"""A cluster too big to simulate: an API server with just enough for an extender, in its own process.

It lists nodes and pods of realistic size in pages, patches and binds pods, and reports changes to watches.
Run by ``bench/extender.py``; prints its port.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from gpuslice.core.contract import ANN_INDEX, ANN_POD_UNITS, GPU_COUNT, GPU_MEM

UNITS = 16  # of a card
PAGE = 500
KIND = {"kind": "Pod", "apiVersion": "v1"}  # only for a single object, not for each in a list
MANAGED = {  # what a real object carries and nobody reads: a third of its bytes
    "manager": "kube-controller-manager",
    "operation": "Update",
    "apiVersion": "v1",
    "time": "2026-01-01T00:00:00Z",
    "fieldsType": "FieldsV1",
    "fieldsV1": {f"f:part-{number}": {f"f:field-{each}": {} for each in range(6)} for number in range(12)},
}


def node(name: str, cards: int) -> dict[str, Any]:
    amounts = {
        "cpu": "96",
        "memory": "1056Gi",
        "ephemeral-storage": "3Ti",
        "pods": "250",
        GPU_MEM: str(UNITS * cards),
        GPU_COUNT: str(cards),
    }
    images = [{"names": [f"registry.example/{n}@sha256:{n:064d}"], "sizeBytes": 10**9 + n} for n in range(25)]
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": {"kubernetes.io/hostname": name, "cgpu": "true", "topology.kubernetes.io/zone": "a"},
            "managedFields": [MANAGED],
        },
        "spec": {"podCIDR": "10.0.0.0/24"},
        "status": {"capacity": amounts, "allocatable": amounts, "images": images, "conditions": []},
    }


def pod(name: str, units: int, cards: int = 1, *, on: str = "", at: str = "") -> dict[str, Any]:
    """A pod as the API server shows it; if placed, `on` that node and `at` these card indices."""
    meta: dict[str, Any] = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "resourceVersion": "2",
        "labels": {"app": "bench", **({GPU_COUNT: str(cards)} if cards > 1 else {})},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "bench", "uid": "r"}],
        "managedFields": [MANAGED],
    }
    if on:
        meta["annotations"] = {ANN_INDEX: at, ANN_POD_UNITS: str(units)}
    limits = {"cpu": "4", "memory": "16Gi", GPU_MEM: str(units)}
    container = {
        "name": "main",
        "image": "registry.example/train:1",
        "resources": {"limits": limits, "requests": limits},
        "env": [{"name": f"VARIABLE_{number}", "value": "value" * 4} for number in range(12)],
    }
    spec: dict[str, Any] = {"containers": [container], "serviceAccountName": "default"}
    if on:
        spec["nodeName"] = on
    status = {"phase": "Running" if on else "Pending", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": meta, "spec": spec, "status": status}


def fill(name: str, dice: random.Random) -> Iterator[dict[str, Any]]:
    """Half a node: one pod on two whole cards, three pods on parts of three cards."""
    yield pod(f"{name}-a", 2 * UNITS, 2, on=name, at="0,1")
    for card, letter in zip((2, 3, 4), "bcd", strict=True):
        yield pod(f"{name}-{letter}", dice.randint(UNITS // 2, UNITS - 3), on=name, at=str(card))


class BigApi:
    """Nodes and pods as prepared pages, and the pods to be scheduled one by one."""

    def __init__(self, nodes: int, cards: int, pods: int, seed: int) -> None:
        dice = random.Random(seed)
        names = [f"node-{number:05d}" for number in range(nodes)]
        self.pending = {each["metadata"]["name"]: each for each in pending_pods(pods, seed)}
        self.version = 10
        self.watchers: list[asyncio.Queue[bytes]] = []
        placed = [each for name in names for each in fill(name, dice)]
        self.objects = {
            "nodes": [node(name, cards) for name in names],
            "pods": [*placed, *self.pending.values()],
            "configmaps": [],
        }
        self.pages = {kind: pages(objects) for kind, objects in self.objects.items()}

    async def list(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if request.query.get("watch"):
            return await self._watch(request, kind)
        found = self.pages.get(kind) or pages([])
        if selector := request.query.get("labelSelector"):
            wanted = dict(each.split("=", 1) for each in selector.split(",")).items()
            objects = self.objects.get(kind, [])
            found = pages([each for each in objects if wanted <= each["metadata"].get("labels", {}).items()])
        return web.Response(
            body=found[int(request.query.get("continue") or 0)], content_type="application/json"
        )

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        if kind == "pods":
            self.watchers.append(queue)
        while True:
            await answer.write(await queue.get())

    async def get(self, request: web.Request) -> web.Response:
        return answer_with(self.pending[request.match_info["name"]])

    async def patch(self, request: web.Request) -> web.Response:
        found = self.pending[request.match_info["name"]]
        patch = msgspec.json.decode(await request.read())
        annotations = found["metadata"].get("annotations", {}) | patch["metadata"]["annotations"]
        found["metadata"]["annotations"] = {
            name: text for name, text in annotations.items() if text is not None
        }
        self._changed(found)
        return answer_with(found)

    async def bind(self, request: web.Request) -> web.Response:
        found = self.pending[request.match_info["name"]]
        binding = msgspec.json.decode(await request.read())
        found["spec"]["nodeName"] = binding["target"]["name"]
        found["metadata"].setdefault("annotations", {}).update(binding["metadata"].get("annotations", {}))
        self._changed(found)
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def create(self, request: web.Request) -> web.Response:
        return web.Response(body=await request.read(), status=201, content_type="application/json")

    async def lease(self, request: web.Request) -> web.Response:
        """The leader's lease: it does not exist at first, and has only one writer."""
        if request.method == "GET":
            return web.json_response({"kind": "Status", "reason": "NotFound", "code": 404}, status=404)
        written = msgspec.json.decode(await request.read())
        self.version += 1
        written["metadata"]["resourceVersion"] = str(self.version)
        return web.json_response(written, status=201 if request.method == "POST" else 200)

    def _changed(self, found: dict[str, Any]) -> None:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        line = msgspec.json.encode({"type": "MODIFIED", "object": KIND | found}) + b"\n"
        for queue in self.watchers:
            queue.put_nowait(line)

    def app(self) -> web.Application:
        app = web.Application()
        one = "/api/v1/namespaces/{namespace}/pods/{name}"
        leases = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        app.add_routes(
            [
                web.get("/api/v1/{kind}", self.list),
                web.get("/api/v1/namespaces/{namespace}/{kind}", self.list),
                web.get(one, self.get),
                web.patch(one, self.patch),
                web.post(one + "/binding", self.bind),
                web.post("/api/v1/namespaces/{namespace}/events", self.create),
                web.post(leases, self.lease),
                web.get(leases + "/{name}", self.lease),
                web.put(leases + "/{name}", self.lease),
            ]
        )
        return app


def pending_pods(count: int, seed: int) -> list[dict[str, Any]]:
    """The pods to schedule, the same for every run with this seed."""
    dice = random.Random(seed + 1)
    sizes = [(1, 1), (2, 1), (4, 1), (4, 1), (8, 1), (8, 1), (12, 1), (16, 1), (32, 2)]
    return [pod(f"pending-{number:05d}", *dice.choice(sizes)) for number in range(count)]


def pages(items: list[dict[str, Any]]) -> list[bytes]:
    starts = range(0, max(1, len(items)), PAGE)
    return [
        msgspec.json.encode(
            {
                "metadata": {
                    "resourceVersion": "10",
                    "continue": str(start // PAGE + 1) if start + PAGE < len(items) else "",
                },
                "items": items[start : start + PAGE],
            }
        )
        for start in starts
    ]


def answer_with(found: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(KIND | found), content_type="application/json")


async def main(nodes: int, cards: int, pods: int, seed: int) -> None:
    runner = web.AppRunner(BigApi(nodes, cards, pods, seed).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:5])))
