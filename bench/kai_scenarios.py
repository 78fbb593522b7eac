"""The scenarios that KAI-Scheduler publishes times for, with a real kube-scheduler and our extender.

    KUBEBUILDER_ASSETS=/path/to/binaries python bench/kai_scenarios.py --nodes 500 --json

Nodes and pods are API objects without kubelets, as theirs are (KWOK). Figures ending in _s are seconds:

    fill_s             a pod of one whole card for every card of the cluster, created before
                       kube-scheduler starts
    fill_submitting_s  the same while they are being created; from the first creation to the last binding
    reclaim_one_s      a more important pod on the full cluster, from its creation to its binding
    gang_verdict_s     a gang of 10 pods of 8 cards each on the full cluster, from its creation until all say
                       that they cannot be scheduled (Kubernetes 1.36, behind its gates)
    reclaim_many_s     a more important pod for every second card of the full cluster, all created at once,
                       from the first creation to the last binding
    evicted            pods that left for these: as many as there are of them, where nobody left in vain
    extender_mib       resident memory of the extender at the end
    load               of the machine at the end

Each figure is printed as soon as it is known. Theirs, of July 2026 on 3 to 5 cores, for 500 nodes with 8
cards: 397.8, 460.5, 13.9, 249.5 and 102 s, and 7 GiB.
Not the same: their pods are Jobs and go through queues with quotas, ours are bare, and an evicted one is gone
at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.big_api import UNITS, pod  # noqa: E402 - after the path to it
from bench.end_to_end import api_node  # noqa: E402
from tests.e2e import control_plane  # noqa: E402
from tests.e2e.cluster import (  # noqa: E402
    Cluster,
    cluster,
    extender,
    scheduler_arguments,
    shipped_configuration,
)
from tests.e2e.pod_groups import FIRST, api_flags, gates, group, groups_path  # noqa: E402

from gpuslice.adapters.kube.errors import ConflictError, NotFoundError  # noqa: E402
from gpuslice.adapters.kube.http import ApiRequest  # noqa: E402
from gpuslice.adapters.kube.resources import PODS  # noqa: E402
from gpuslice.adapters.kube.slim import SLIM_PODS  # noqa: E402

LONGEST_S = 1800.0
MEMBERS = 10
IMPORTANT = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "important"},
    "value": 1000,
}


def api_pod(name: str, cards: int = 1, **spec: Any) -> dict[str, Any]:
    """A pod of whole cards."""
    made = pod(name, cards * UNITS, cards)
    meta = {key: made["metadata"][key] for key in ("name", "labels")}
    made["spec"] |= {"schedulerName": "gpuslice-scheduler", **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": made["spec"]}


async def measure(nodes: int, cards: int) -> dict[str, Any]:
    """Run all scenarios one after the other on one control plane."""
    found: dict[str, Any] = {"nodes": nodes, "cards": cards}
    gangs = control_plane.minor_version() >= FIRST
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as processes:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuslice-kai-")))
        plane = stack.enter_context(
            control_plane.api_server(
                folder, without=("TaintNodesByCondition",), flags=api_flags() if gangs else ()
            )
        )
        async with cluster(plane, UNITS) as made, stand_in_for_kubelets(made):
            await made.add_nodes([api_node(f"node-{number:05d}", cards) for number in range(nodes)])
            path = "/apis/scheduling.k8s.io/v1/priorityclasses"
            headers = {"Content-Type": "application/json"}
            body = json.dumps(IMPORTANT).encode()
            answer = await made.transport.request(ApiRequest("POST", path, headers=headers, body=body))
            assert answer.status == 201, answer.body
            ours = await asyncio.to_thread(processes.enter_context, extender(plane))
            pods = [api_pod(f"job-{number:05d}") for number in range(nodes * cards)]
            arguments = scheduler_arguments(shipped_configuration(ours.url))
            flags = (gates(),) if gangs else ()

            await made.add_pods(pods)
            context = control_plane.scheduler(plane, flags=flags, **arguments)
            await asyncio.to_thread(processes.enter_context, context)
            found["fill_s"] = await until_bound(made, len(pods), time.perf_counter())
            await made.remove_all_pods()
            began = time.perf_counter()
            await made.add_pods(pods)
            found["fill_submitting_s"] = await until_bound(made, len(pods), began)
            print(found, file=sys.stderr, flush=True)
            if gangs:
                found["gang_verdict_s"] = await gang_verdict(made, cards)
            print(found, file=sys.stderr, flush=True)
            bound, began = made.log.bindings, time.perf_counter()
            await made.add_pods([api_pod("important", priorityClassName="important")])
            found["reclaim_one_s"] = await until_bindings(made, bound + 1, began)
            print(found, file=sys.stderr, flush=True)
            many = nodes * cards // 2
            jobs = await jobs_left(made)
            bound, began = made.log.bindings, time.perf_counter()
            names = [f"important-{number:05d}" for number in range(many)]
            await made.add_pods([api_pod(name, priorityClassName="important") for name in names])
            found["reclaim_many_s"] = await until_bindings(made, bound + many, began)
            found["evicted"] = jobs - await jobs_left(made)
            found |= {"extender_mib": resident_mib(ours.process.pid), "violations": made.log.wrong}
            found["load"] = round(os.getloadavg()[0], 1)
            await asyncio.to_thread(processes.close)
    return found


async def jobs_left(made: Cluster) -> int:
    return sum(pod.metadata.name.startswith("job-") for pod in await made.pods())


def resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024


async def until_bound(made: Cluster, count: int, began: float) -> float:
    await made.until(lambda: len(made.log.bound_at) >= count, LONGEST_S)
    return round(max(made.log.bound_at.values()) - began, 2)


async def until_bindings(made: Cluster, count: int, began: float) -> float:
    await made.until(lambda: made.log.bindings >= count, LONGEST_S)
    return round(max(made.log.bound_at.values()) - began, 2)


async def gang_verdict(made: Cluster, cards: int) -> float:
    began = time.perf_counter()
    answer = await made.transport.request(
        ApiRequest(
            "POST",
            groups_path(),
            headers={"Content-Type": "application/json"},
            body=json.dumps(group("gang", MEMBERS)).encode(),
        )
    )
    assert answer.status == 201, answer.body
    names = [f"gang-{number}" for number in range(MEMBERS)]
    in_group = {"schedulingGroup": {"podGroupName": "gang"}}
    await made.add_pods([api_pod(name, cards, **in_group) for name in names])
    told: set[str] = set()
    while told != set(names):
        for name in names:
            seen = await made.client.get(PODS, name, "default")
            conditions = seen.status.conditions or ()
            if any(each.type == "PodScheduled" and each.status == "False" for each in conditions):
                told.add(name)
    took_s = round(time.perf_counter() - began, 2)
    for name in names:
        await made.remove_pod(name)
    return took_s


@contextlib.asynccontextmanager
async def stand_in_for_kubelets(made: Cluster) -> AsyncIterator[None]:
    """Removes every pod that is to be deleted."""

    async def bury(name: str, uid: str) -> None:
        with contextlib.suppress(NotFoundError, ConflictError):  # it may have been removed immediately
            await made.client.delete(SLIM_PODS, name, "default", uid=uid, grace_s=0)

    async def watch(tasks: asyncio.TaskGroup) -> None:
        listing, buried = await made.client.list(SLIM_PODS, "default"), set[str]()
        version = listing.metadata.resource_version
        while True:  # a busy API server ends a watch that is read too slowly
            async for line in made.client.watch(SLIM_PODS, version, "default", timeout_s=3600):
                meta = line.object.metadata
                version = meta.resource_version
                if line.type == "MODIFIED" and meta.deletion_timestamp and meta.uid not in buried:
                    buried.add(meta.uid)
                    tasks.create_task(bury(meta.name, meta.uid))

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch(tasks))
        try:
            yield
        finally:
            watching.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--cards", type=int, default=8, help="of each node")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if why_not := control_plane.missing():
        raise SystemExit(f"no real control plane here: {why_not}")
    found = asyncio.run(measure(chosen.nodes, chosen.cards))
    print(json.dumps(found) if chosen.json else "\n".join(f"{name:18} {found[name]}" for name in found))


if __name__ == "__main__":
    main()
