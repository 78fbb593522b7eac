"""Pods per second bound by a real kube-scheduler, alone and with our extender, on a real API server.

    KUBEBUILDER_ASSETS=/path/to/binaries python bench/end_to_end.py --nodes 5000 --gpus 8 --pods 500 --json

Nodes and pods are API objects without kubelets. A turn: the pods are created while no scheduler runs, then
kube-scheduler is started on the waiting queue and every binding is timed as the API server's watch shows it.
Turns take place one after the other, round by round, on the same API server, each with fresh processes:

    plain          the shipped scheduler configuration without its extender: aliyun.com/gpu-mem is an ordinary
                   resource then, summed over the node
    plain sampled  the same with kube-scheduler's own percentageOfNodesToScore (10 % of 5,000 nodes)
    gpuslice       the shipped scheduler configuration and the extender as the chart starts it

    plain_http     gpuslice without TLS between kube-scheduler and the extender. Only where `--ways` names it:
                   `--ways gpuslice,plain_http` measures what TLS costs, as tls_ratio (at least 0.9 is wanted)
    empty          an extender that decides nothing (`empty_extender.py`): what any extender costs.
                   empty_busy: the same, computing for 1.4 ms a question. Only where `--ways` names them
    claims         by dynamic resource allocation: the same pods with a claim each, and no extender;
                   kube-controller-manager, whose limits are raised, makes the claims meanwhile. Only where
                   `--ways` names it, and best alone: the nodes then have ResourceSlices as well

`--flags=…` adds a turn with these flags for the extender; may be repeated. `--replicas N` gives the pods to
ReplicaSets, N equal pods to each: kube-scheduler spreads those over the nodes. `--owner Job` to Jobs instead.

`end_to_end_sizes.py` measures many sizes one after the other.
    X_pods_per_s  bindings a second from the first to the last, the median of the rounds
    ratio         of gpuslice to plain, of the same round; the median
    X_ms_per_pod  where the time goes, per pod, from the scheduler's and the extender's metrics
    X_cpu_ms_per_pod  CPU of each process, from the first to the last binding: what counts on a busy machine
    X_requests_per_pod  that the API server answered, by verb and resource
    idle_cpu_ms_per_s   of etcd and kube-apiserver before the first turn: slow turns pay more of it for a pod
    X_pods_a_node of one ReplicaSet, on nodes that hold any of it: the mean
    violations    cards over their units, pods bound twice, at any moment of the API server's history
    refusals      why binds were refused, the first few
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench import claims  # noqa: E402 - after the path to it
from bench.big_api import UNITS, node, pending_pods  # noqa: E402
from bench.control_plane_costs import Figures, cpu_s, requests, where  # noqa: E402
from bench.empty_extender import empty_extender  # noqa: E402
from tests.e2e import control_plane  # noqa: E402
from tests.e2e.cluster import (  # noqa: E402
    Cluster,
    Running,
    cluster,
    extender,
    refused_binds,
    scheduler_arguments,
    shipped_configuration,
)

from gpuslice.adapters.kube.http import ApiRequest  # noqa: E402
from gpuslice.adapters.kube.slim import SlimPod  # noqa: E402
from gpuslice.adapters.kube.terms import replica_of  # noqa: E402

SCHEDULER = "gpuslice-scheduler"
CONTAINER = {"name": "main", "image": "image"}
LONGEST_TURN_S = 240.0
WORTH_SHOWING = 0.005  # requests per pod
IDLE_S = 3.0
ALL = "all of the control plane"


@dataclass(frozen=True)
class Way:
    """One way to schedule: with or without the extender, its flags, and changes of the configuration."""

    name: str
    extended: bool = False
    flags: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    claims: bool = False
    tls: bool = True  # of the extender
    busy_ms: float | None = None  # instead of ours, one that decides nothing and takes this long to do so


PLAIN = Way("plain")
SAMPLED = Way("plain_sampled", changes={"percentageOfNodesToScore": 0})
GPUSLICE = Way("gpuslice", extended=True)
PLAIN_HTTP = Way("plain_http", extended=True, tls=False)
EMPTY = Way("empty", extended=True, tls=False, busy_ms=0.0)
EMPTY_BUSY = Way("empty_busy", extended=True, tls=False, busy_ms=1.4)
CLAIMS = Way("claims", claims=True, changes={"percentageOfNodesToScore": 0})


@dataclass(frozen=True)
class Turn:
    """The result of one way for one round's pods."""

    way: str
    pods: int
    bound: int
    seconds: float
    pods_a_node: float
    ms_per_pod: Figures
    cpu_ms_per_pod: Figures
    requests_per_pod: Figures

    @property
    def pods_per_s(self) -> float:
        return (self.bound - 1) / self.seconds if self.bound > 1 else 0.0


@dataclass(frozen=True)
class Size:
    """The size of the cluster, and of the demand."""

    nodes: int
    cards: int = 8
    pods: int = 500
    rounds: int = 2
    seed: int = 1
    replicas: int = 0
    owner: str = "ReplicaSet"


async def measure(size: Size, ways: list[Way]) -> dict[str, Any]:
    """Run all turns of all rounds and summarise them. AssertionError if a component does not start."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuslice-bench-")))
        # On real nodes a controller, which is not running here, removes the taint of a new node.
        flags = control_plane.claim_flags() if CLAIMS in ways else ()
        plane = stack.enter_context(
            control_plane.api_server(folder, without=("TaintNodesByCondition",), flags=flags)
        )
        async with cluster(plane, UNITS) as made:
            await made.add_nodes([api_node(f"node-{number:05d}", size.cards) for number in range(size.nodes)])
            owners = await add_owners(made, size)
            if CLAIMS in ways:
                await claims.offer(made, size.nodes, size.cards)
            idle = await idle_cpu_ms_per_s(plane)
            turns = [
                await turn(
                    plane, made, way, api_pods(size.pods, size.seed + number, owners, size.replicas), number
                )
                for number in range(size.rounds)
                for way in ways
            ]
            found = summary(ways, turns, size.replicas, idle)
            found |= {"violations": made.log.wrong, "refusals": refused_binds(folder / "extender.log")}
            return {**asdict(size), **found}


def api_node(name: str, cards: int) -> dict[str, Any]:
    made = node(name, cards)
    meta = {key: made["metadata"][key] for key in ("name", "labels")}
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return {"apiVersion": "v1", "kind": "Node", **made, "metadata": meta}


async def idle_cpu_ms_per_s(plane: control_plane.ControlPlane) -> float:
    """What the API server and etcd use while there are no requests."""
    before = cpu_s(plane.pids)
    await asyncio.sleep(IDLE_S)
    after = cpu_s(plane.pids)
    return round(sum(after[name] - before[name] for name in after) * 1e3 / IDLE_S, 1)


async def add_owners(made: Cluster, size: Size) -> list[dict[str, Any]]:
    """References to as many owners as the pods need, for kube-scheduler alone: no controller uses them."""
    group, plural = {"ReplicaSet": ("apps/v1", "replicasets"), "Job": ("batch/v1", "jobs")}[size.owner]
    path, owners = f"/apis/{group}/namespaces/default/{plural}", []
    for number in range(-(-size.pods // size.replicas) if size.replicas else 0):
        name = f"set-{number:03}"
        template: dict[str, Any] = {
            "metadata": {"labels": {"app": name}},
            "spec": {"containers": [CONTAINER]},
        }
        spec: dict[str, Any] = {
            "replicas": 0,
            "selector": {"matchLabels": {"app": name}},
            "template": template,
        }
        if size.owner == "Job":
            template["spec"]["restartPolicy"] = "Never"
            spec = {"parallelism": 0, "template": template}
        body = json.dumps({"metadata": {"name": name}, "spec": spec}).encode()
        headers = {"Content-Type": "application/json"}
        answer = await made.transport.request(ApiRequest("POST", path, headers=headers, body=body))
        assert answer.status == 201, answer.body
        uid = json.loads(answer.body)["metadata"]["uid"]
        owners.append({"apiVersion": group, "kind": size.owner, "name": name, "uid": uid})
    return owners


def api_pods(count: int, seed: int, owners: list[dict[str, Any]], replicas: int) -> list[dict[str, Any]]:
    made = pending_pods(count, seed)
    for number, each in enumerate(made):
        each["metadata"] = {key: each["metadata"][key] for key in ("name", "labels")}
        each["spec"]["schedulerName"] = SCHEDULER
        del each["status"]
        if owners:
            first, owner = made[number - number % replicas], owners[number // replicas]
            each["spec"] = first["spec"]
            labels = {**first["metadata"]["labels"], "app": owner["name"]}
            each["metadata"] |= {"labels": labels, "ownerReferences": [{**owner, "controller": True}]}
    return [{"apiVersion": "v1", "kind": "Pod", **each} for each in made]


# -- one turn ----------------------------------------------------------------------------------------------


async def turn(
    plane: control_plane.ControlPlane, made: Cluster, way: Way, pods: list[dict[str, Any]], number: int
) -> Turn:
    with contextlib.ExitStack() as stack:
        ours = await asyncio.to_thread(_extender, stack, plane, way) if way.extended else None
        await made.add_pods(await claims.claiming(made, pods, SCHEDULER) if way.claims else pods)
        makers = {}
        if way.claims:
            maker = control_plane.controller_manager(
                plane, "resourceclaim-controller", flags=control_plane.claim_flags()
            )
            makers["kube-controller-manager"] = await asyncio.to_thread(stack.enter_context, maker)
        configuration = {**shipped_configuration(ours.url if ours else ""), **way.changes}
        arguments = scheduler_arguments(configuration)
        arguments["flags"] += control_plane.claim_flags() if way.claims else ()
        scheduler = await asyncio.to_thread(stack.enter_context, control_plane.scheduler(plane, **arguments))
        pids = {**plane.pids, **makers, "kube-scheduler": scheduler.pid, "benchmark": os.getpid()}
        pids |= {"extender": ours.process.pid} if ours else {}
        await made.until(lambda: bool(made.log.bound_at))
        before, asked = cpu_s(pids), requests(plane)
        with contextlib.suppress(TimeoutError):
            await made.until(lambda: len(made.log.bound_at) == len(pods), LONGEST_TURN_S)
        after, times = cpu_s(pids), sorted(made.log.bound_at.values())
        asked = {
            what: round((count - asked.get(what, 0)) / len(pods), 3)
            for what, count in requests(plane).items()
        }
        asked = {what: count for what, count in asked.items() if count >= WORTH_SHOWING}
        spent = where(
            control_plane.fetch(f"{scheduler.url}/metrics").decode(),
            ours.get("/metrics")[1].decode() if ours else "",
        )
        await asyncio.to_thread(stack.close)
    crowding = pods_a_node(await made.pods())
    if way.claims:
        made.log.wrong += await claims.overcommitted(made)
    await made.remove_all_pods()
    if way.claims:
        await claims.remove_claims(made)
    handled = max(1, len(times) - 1)
    cpu = {name: round((after[name] - before[name]) * 1e3 / handled, 2) for name in pids}
    cpu[ALL] = round(sum(cpu.values()) - cpu.pop("benchmark"), 2)
    done = Turn(way.name, len(pods), len(times), times[-1] - times[0], crowding, spent, cpu, asked)
    print(f"round {number + 1}, {way.name}: {done.pods_per_s:.1f} pods/s", file=sys.stderr, flush=True)
    return done


def _extender(stack: contextlib.ExitStack, plane: control_plane.ControlPlane, way: Way) -> Running:
    if way.busy_ms is not None:
        return stack.enter_context(empty_extender(plane, way.busy_ms))
    return stack.enter_context(extender(plane, *way.flags, tls=way.tls))


def pods_a_node(pods: list[SlimPod]) -> float:
    """Mean number of pods per owner on the nodes that have any of its pods."""
    found = Counter((replica_of(each), each.spec.node_name) for each in pods if each.spec.node_name)
    return round(sum(found.values()) / max(1, len(found)), 2)


# -- all turns ---------------------------------------------------------------------------------------------


def summary(ways: list[Way], turns: list[Turn], replicas: int, idle_cpu_ms_per_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"idle_cpu_ms_per_s": idle_cpu_ms_per_s}
    for way in ways:
        own = [each for each in turns if each.way == way.name]
        found[f"{way.name}_pods_per_s"] = round(statistics.median(each.pods_per_s for each in own), 1)
        found[f"{way.name}_unbound"] = sum(each.pods - each.bound for each in own)
        if replicas:
            found[f"{way.name}_pods_a_node"] = statistics.median(each.pods_a_node for each in own)
    for way in ways:
        if way.name != PLAIN.name and PLAIN in ways:
            name = "ratio" if way == GPUSLICE else f"{way.name}_ratio"
            found[name] = round(_ratio(turns, way.name, PLAIN.name), 3)
    if SAMPLED in ways and GPUSLICE in ways:
        found["of_sampled"] = round(_ratio(turns, GPUSLICE.name, SAMPLED.name), 3)
    if SAMPLED in ways and EMPTY in ways:
        found["empty_of_sampled"] = round(_ratio(turns, EMPTY.name, SAMPLED.name), 3)
    if PLAIN_HTTP in ways and GPUSLICE in ways:
        found["tls_ratio"] = round(_ratio(turns, GPUSLICE.name, PLAIN_HTTP.name), 3)
    for way in ways:
        own = [each for each in turns if each.way == way.name]
        found[f"{way.name}_ms_per_pod"] = _medians([each.ms_per_pod for each in own])
        found[f"{way.name}_cpu_ms_per_pod"] = _medians([each.cpu_ms_per_pod for each in own])
        busy = [
            each.cpu_ms_per_pod[ALL] - idle_cpu_ms_per_s * each.seconds / max(1, each.bound - 1)
            for each in own
        ]
        found[f"{way.name}_cpu_ms_per_pod_without_idle"] = round(statistics.median(busy), 2)
        found[f"{way.name}_requests_per_pod"] = _medians([each.requests_per_pod for each in own])
    return found


def _ratio(turns: list[Turn], name: str, to: str) -> float:
    others = [each.pods_per_s for each in turns if each.way == to]
    ours = [each.pods_per_s for each in turns if each.way == name]
    return statistics.median(one / other for one, other in zip(ours, others, strict=True))


def _medians(rows: list[Figures]) -> Figures:
    """Over the rows that have a value: a verb without calls in a turn has no mean."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(statistics.median(row[name] for row in rows if name in row), 3) for name in names}


def table(found: dict[str, Any]) -> str:
    lines = []
    for key, value in found.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        lines += [f"{key + ('  ' + name if name else ''):<52} {shown}" for name, shown in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpus", type=int, default=8, dest="cards", help="of a node")
    parser.add_argument("--pods", type=int, default=500, help="pods of a turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=0, help="pods of a ReplicaSet; 0: pods of nobody")
    parser.add_argument("--flags", action="append", default=[], help="a turn with these extender flags")
    parser.add_argument("--ways", default="plain,plain_sampled,gpuslice", help="of these, in this order")
    parser.add_argument("--owner", choices=["ReplicaSet", "Job"], default="ReplicaSet")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if why_not := control_plane.missing():
        raise SystemExit(f"no real control plane here: {why_not}")
    others = [Way(f"gpuslice {flags}", True, tuple(flags.split())) for flags in chosen.flags]
    known = (PLAIN, SAMPLED, GPUSLICE, PLAIN_HTTP, EMPTY, EMPTY_BUSY, CLAIMS)
    ways = [way for way in known if way.name in chosen.ways.split(",")] + others
    began = time.perf_counter()
    size = Size(**{each.name: getattr(chosen, each.name) for each in fields(Size)})
    found = asyncio.run(measure(size, ways))
    found["took_s"] = round(time.perf_counter() - began, 1)
    print(json.dumps(found) if chosen.json else table(found))


if __name__ == "__main__":
    main()
