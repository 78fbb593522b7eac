"""A Prometheus with the usage of the cards and containers of ``bench/big_api.py``, in its own process.

Run by ``bench/console.py`` with numbers of nodes and cards; prints its port. No value repeats.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from collections.abc import Iterator

import msgspec
from aiohttp import web

VALUES = {
    "gpuslice_gpu_up": 1.0,
    "gpuslice_container_info": 1.0,
    "gpuslice_container_memory_refused_total": 0.0,
}


def containers(nodes: int) -> Iterator[dict[str, str]]:
    """Placed as by ``big_api.fill``: one pod on two cards, three on one each."""
    for number in range(nodes):
        name = f"node-{number:05d}"
        for letter, card in (("a", 0), ("a", 1), ("b", 2), ("c", 3), ("d", 4)):
            where = {"node": name, "gpu": str(card), "gpu_uuid": f"GPU-{number:032d}-{card}"}
            yield where | {"namespace": "default", "pod": f"{name}-{letter}", "container": "main"}


def cards(nodes: int, count: int) -> Iterator[dict[str, str]]:
    for number, card in itertools.product(range(nodes), range(count)):
        yield {"node": f"node-{number:05d}", "gpu": str(card), "gpu_uuid": f"GPU-{number:032d}-{card}"}


def answer(name: str, labels: list[dict[str, str]], asked: int) -> bytes:
    rows = []
    for number, metric in enumerate(labels):
        part = (number * 7919 + asked * 104_729) % 1000 / 1000
        value = VALUES.get(name, part * (8 << 30) if name.endswith("bytes") else part)
        rows.append({"metric": metric, "value": [0.0, f"{value:g}"]})
    return msgspec.json.encode({"status": "success", "data": {"resultType": "vector", "result": rows}})


async def main(nodes: int, count: int) -> None:
    known = {"gpu": list(cards(nodes, count)), "container": list(containers(nodes))}
    asked = itertools.count()

    async def query(request: web.Request) -> web.Response:
        found = re.search(r"gpuslice_(gpu|container)_\w+", request.query["query"])
        labels = known[found[1]] if found else []
        return web.Response(body=answer(found[0] if found else "", labels, next(asked)))

    app = web.Application()
    app.router.add_get("/api/v1/query", query)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
