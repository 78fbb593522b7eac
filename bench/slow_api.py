"""What a slow or busy API server does to binds while a long queue waits: extender and simulated API server.

    python bench/slow_api.py --pods 10000 --binds 1000 --json

Requests are like kube-scheduler's: one filter after another, and each bind concurrently with the next
filters; `--pods` wait in total. Prints one line for each behaviour of the API server, which delays only
Bindings:

    pods_per_s       bound, from the first question to the last answer
    bind_p50_ms, bind_p99_ms, most_at_once
    refused          binds that were answered with an error
    requests_per_pod Bindings that reached the API server, with those that it answered 429
    rss_mib          of the process of both
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "simulator" / "src")]

from tests.integration.extender_rig import Rig, cluster, rig  # noqa: E402 - after the path to it

from simcluster.cluster.faults import Fault  # noqa: E402

CARDS, UNITS = 8, 16
OFTEN = 1 << 30


def run(nodes: int, pods: int, binds: int, delay_s: float, busy: int) -> dict[str, Any]:
    return asyncio.run(measure(nodes, pods, binds, delay_s, busy))


async def measure(nodes: int, pods: int, binds: int, delay_s: float, busy: int) -> dict[str, Any]:
    """One behaviour: each Binding takes `delay_s` longer, and the first `busy` are answered with 429."""
    api = cluster(**{f"n{number}": (CARDS * UNITS, CARDS) for number in range(nodes)})
    names = [f"n{number}" for number in range(nodes)]
    waiting = [api.add_pod(f"p{number:05}", "4") for number in range(pods)]
    async with rig(api, nominate=False) as extender:
        await extender.caught_up()
        counted = Fault(method="POST", path=".*/binding", times=OFTEN, delay_s=max(delay_s, 0.0001))
        if busy:
            refused = Fault(method="POST", path=".*/binding", times=busy, code=429, retry_after_s=1)
            api.cluster.add_fault(refused)
        api.cluster.add_fault(counted)
        began = time.perf_counter()
        answers, took_s, most = await bind_all(extender, waiting[:binds], names)
        seconds = time.perf_counter() - began
    return {
        "delay_ms": delay_s * 1000,
        "answered_429": busy,
        "pods_per_s": round(binds / seconds, 1),
        "bind_p50_ms": round(statistics.median(took_s) * 1000, 1),
        "bind_p99_ms": round(statistics.quantiles(took_s, n=100)[98] * 1000, 1),
        "most_at_once": most,
        "refused": sum(bool(answer) for answer in answers),
        "requests_per_pod": round((OFTEN - (counted.times or 0) + busy) / binds, 3),
        "rss_mib": resident_mib(),
    }


async def bind_all(
    extender: Rig, pods: list[dict[str, Any]], names: list[str]
) -> tuple[list[str], list[float], int]:
    """The answers to the binds, how long each took, and the most that were in flight at once."""
    took_s: list[float] = []
    under_way = most = 0

    async def bind(pod: dict[str, Any], node: str) -> str:
        nonlocal under_way
        began = time.perf_counter()
        under_way += 1
        try:
            return await extender.bind_unasked(pod, node)
        finally:
            under_way -= 1
            took_s.append(time.perf_counter() - began)

    calls = []
    for pod in pods:
        (node,) = (await extender.filter(pod, *names))["NodeNames"][:1]
        calls.append(asyncio.create_task(bind(pod, node)))
        most = max(most, under_way)
    return list(await asyncio.gather(*calls)), took_s, most


def resident_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--pods", type=int, default=10_000, help="that wait")
    parser.add_argument("--binds", type=int, default=1000, help="of these are bound")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    behaviours = [(0.0, 0), (0.005, 0), (0.05, 0), (0.5, 0), (0.005, asked.binds // 10)]
    found = []
    for delay_s, busy in behaviours:
        sizes = (asked.nodes, asked.pods, asked.binds)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:  # its memory is its own
            found.append(fresh.submit(run, *sizes, delay_s, busy).result())
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps(found) if asked.json else "\n".join(map(str, found)))


if __name__ == "__main__":
    main()
