"""The usual day: a full cluster, pods that wait for it, and others that come and go, with priorities.

    KUBEBUILDER_ASSETS=/path/to/binaries python bench/full_cluster.py --nodes 60 --waiting 100 --rate 10

etcd, API server and kube-scheduler are real; nodes and pods are API objects, kubelets and agents are played,
with what they write. Nodes have 2 or 4 cards of 16, 32 or 80 units, or one of 24, and are full. A third of
the waiting pods fits a node's sum and no card (12 units, low priority), a third is smaller and takes what
becomes free (6, low), a third is larger than any card though not than some node's sum (96, middle). For
`--seconds` pods end at `--rate`, and others ask for as much, 60 % with low, 30 % with middle and 10 % with
high priority; who is evicted is created again. Each way has a control plane of its own:

    whole      kube-scheduler alone with the chart's configuration, and whole cards: as many as there are pods
    empty      the same with an extender that is asked of every pod and decides nothing (`empty_extender.py`)
    gpuslice   parts of cards, the chart's configuration, the extender as the chart starts it

The same with one thing changed, where `--ways` names it:

    unsummed   kube-scheduler does not look at the node's sum before it asks the extender
    backoff    it waits for 5 to 60 s before it tries a pod again, instead of 1 to 10
    pop        since 1.33 it tries pods before that time has passed if it has nothing else to do, which the
               chart turns off (`SchedulerPopFromBackoffQ`); it is left on for the first two ways, too
    gates      pods of low priority, and those that no card holds, are behind a scheduling gate, which is
               opened for those for which a card has room

`--flags=…` are for the extender of `gpuslice`. Per bound pod, while pods come and go:

    attempts       of kube-scheduler by result; `woken`: what made it try waiting pods again, by event
    calls          that our extender answered, by verb
    writes         that the API server answered, without those of users, kubelets and agents; `events`
    cpu_ms         of each process; `idle_cpu_ms_per_s`: just before, while pods wait and nothing happens

In all:

    in_use         units that pods hold when the last has come, in % of those that they held at first
    wait_ms        creation → bound, p50 and p99 by priority, of those that `came` meanwhile
    unbound        of these, once all with high priority are bound, or a minute later
    evictions      `in_vain`: of pods for which the pod that preempted them was not bound to that node
    violations     cards over their units, pods bound twice, at any moment of the API server's history
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.busy_cluster import IMPORTANCE, WHOLE_CARD, BusyCluster, Diary  # noqa: E402 - after the path to it
from bench.control_plane_costs import Figures, cpu_s, requests, totals  # noqa: E402
from bench.empty_extender import empty_extender  # noqa: E402
from tests.e2e import control_plane  # noqa: E402
from tests.e2e.cluster import (  # noqa: E402
    Cluster,
    Object,
    Running,
    extender,
    logged,
    scheduler_arguments,
    shipped_configuration,
)
from tests.e2e.control_plane import ControlPlane, Scheduler  # noqa: E402

from gpuslice.adapters.kube.resources import EVENTS  # noqa: E402

IDLE_S = 3.0
SETTLED_WITHIN_S, LAST_BOUND_WITHIN_S = 180.0, 60.0


@dataclass(frozen=True)
class Way:
    """Whole cards or parts, with whose extender, and changes of the chart's configuration."""

    name: str
    whole: bool = False
    extender: str = "ours"  # or empty, or none
    changes: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] | None = None  # of kube-scheduler, instead of the chart's
    sums: bool = True
    gated: bool = False


BACKOFF = {"podInitialBackoffSeconds": 5, "podMaxBackoffSeconds": 60}
WAYS = {
    each.name: each
    for each in (
        Way("whole", whole=True, extender="none", flags=()),
        Way("empty", whole=True, extender="empty", flags=()),
        Way("gpuslice"),
        Way("unsummed", sums=False),
        Way("backoff", changes=BACKOFF),
        Way("pop", flags=()),
        Way("gates", gated=True),
    )
}


@dataclass(frozen=True)
class Size:
    """The cluster and its day."""

    nodes: int = 60
    waiting: int = 100
    rate: float = 10.0
    seconds: float = 30.0
    seed: int = 1


@dataclass(frozen=True)
class Counts:
    """What has happened so far."""

    bound: int
    cpu_s: Figures
    requests: Figures
    attempts: Figures
    woken: Figures
    calls: Figures


async def measure(size: Size, way: Way, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """One way. AssertionError if a component does not start."""
    with (
        tempfile.TemporaryDirectory(prefix="gpuslice-bench-") as folder,
        control_plane.api_server(Path(folder), without=("TaintNodesByCondition",)) as plane,
        contextlib.ExitStack() as stack,
    ):
        diary = Diary(0)
        async with logged(plane, diary) as made, asyncio.TaskGroup() as tasks:
            busy = BusyCluster(made, diary, whole=way.whole, gated=way.gated, seed=size.seed)
            await busy.fill(size.nodes)
            ours, scheduler = await asyncio.to_thread(_started, stack, plane, way, flags)
            played = [tasks.create_task(each) for each in (busy.nodes(), busy.gates())]
            await busy.wait_in_line(size.waiting)
            await _settled(scheduler, size.waiting)
            watched = Watched(plane, scheduler, ours, diary)
            quiet = watched.counts()
            await asyncio.sleep(IDLE_S)
            before, own, units = watched.counts(), Counter(busy.writes), busy.units_in_use()
            await busy.come_and_go(size.rate, size.seconds)
            after, own = watched.counts(), busy.writes - own
            in_use = round(100 * busy.units_in_use() / units, 1)
            important = [name for name, want in busy.wants.items() if want.priority == "high"]
            with contextlib.suppress(TimeoutError):
                await made.until(
                    lambda: all(name in diary.waited_s for name in important if name in diary.asked_at),
                    LAST_BOUND_WITHIN_S,
                )
            idle = {
                name: round((s - quiet.cpu_s[name]) * 1e3 / IDLE_S, 1) for name, s in before.cpu_s.items()
            }
            found = per_pod(before, after, own) | waits(busy, size.waiting) | await evictions(made, diary)
            for each in played:
                each.cancel()
            await asyncio.to_thread(stack.close)
    return {
        "way": way.name,
        "idle_cpu_ms_per_s": idle,
        **found,
        "in_use": in_use,
        "violations": diary.wrong,
    }


def _started(
    stack: contextlib.ExitStack, plane: ControlPlane, way: Way, flags: tuple[str, ...]
) -> tuple[Running | None, Scheduler]:
    ours = None
    if way.extender == "ours":
        ours = stack.enter_context(extender(plane, *flags))
    elif way.extender == "empty":
        ours = stack.enter_context(empty_extender(plane, 0.0))
    configuration: Object = {**shipped_configuration(ours.url if ours else ""), **way.changes}
    for section in configuration["extenders"]:
        names = [WHOLE_CARD] if way.whole else [each["name"] for each in section["managedResources"]]
        section["managedResources"] = [{"name": name, "ignoredByScheduler": not way.sums} for name in names]
    arguments = scheduler_arguments(configuration)
    if way.flags is not None:
        arguments["flags"] = way.flags
    return ours, stack.enter_context(control_plane.scheduler(plane, **arguments))


async def _settled(scheduler: Scheduler, waiting: int) -> None:
    """Until kube-scheduler has tried all of them."""
    async with asyncio.timeout(SETTLED_WITHIN_S):
        while True:
            text = control_plane.fetch(f"{scheduler.url}/metrics").decode()
            pending = totals(text, "scheduler_pending_pods", "queue")
            if sum(pending.get(each, 0) for each in ("unschedulable", "backoff", "gated")) >= waiting:
                return
            await asyncio.sleep(0.5)


@dataclass(frozen=True)
class Watched:
    """The processes that are measured."""

    plane: ControlPlane
    scheduler: Scheduler
    extender: Running | None
    diary: Diary

    def counts(self) -> Counts:
        pids = {**self.plane.pids, "kube-scheduler": self.scheduler.pid}
        pids |= {"extender": self.extender.process.pid} if self.extender else {}
        scheduler = control_plane.fetch(f"{self.scheduler.url}/metrics").decode()
        ours = self.extender.get("/metrics")[1].decode() if self.extender else ""
        return Counts(
            self.diary.bindings,
            cpu_s(pids),
            requests(self.plane),
            totals(scheduler, "scheduler_schedule_attempts_total", "result"),
            totals(scheduler, "scheduler_queue_incoming_pods_total", "event"),
            totals(ours, "gpuslice_extender_requests_total", "verb"),
        )


def per_pod(before: Counts, after: Counts, own: Mapping[str, int]) -> dict[str, Any]:
    """What happened between the two, for each pod that was bound; `own` requests are not counted."""
    bound = after.bound - before.bound

    def each(late: Figures, early: Figures, factor: float = 1.0) -> Figures:
        grown = {
            name: (value - early.get(name, 0.0)) * factor / max(1, bound) for name, value in late.items()
        }
        return {name: round(value, 3) for name, value in sorted(grown.items()) if value >= 0.005}

    theirs = {name: count - own.get(name, 0) for name, count in after.requests.items()}
    writes = {name: count for name, count in theirs.items() if not name.startswith("GET")}
    found: dict[str, Any] = {
        "bound": bound,
        "attempts": each(after.attempts, before.attempts),
        "woken": each(after.woken, before.woken),
        "calls": each(after.calls, before.calls),
        "writes": each(writes, before.requests),
        "cpu_ms": each(after.cpu_s, before.cpu_s, 1e3),
    }
    found["events"] = round(sum(count for name, count in found["writes"].items() if " events" in name), 3)
    found["cpu_ms"]["all"] = round(sum(found["cpu_ms"].values()), 2)
    return found


def waits(busy: BusyCluster, waiting: int) -> dict[str, Any]:
    """How long those who came after the first `waiting` had to wait."""
    came = list(busy.diary.asked_at)[waiting:]
    found: dict[str, Any] = {"wait_ms": {}, "came": {}, "unbound": {}}
    for priority in IMPORTANCE:
        own = [name for name in came if busy.wants[name].priority == priority]
        waited = sorted(busy.diary.waited_s[name] * 1e3 for name in own if name in busy.diary.waited_s)
        if len(waited) > 1:
            cuts = statistics.quantiles(waited, n=100, method="inclusive")
            found["wait_ms"][priority] = {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1)}
        found["came"][priority] = len(own)
        found["unbound"][priority] = len(own) - len(waited)
    return found


async def evictions(made: Cluster, diary: Diary) -> dict[str, Any]:
    """How many there were, and how many of them gave no room to the pod that they were for."""
    vain = 0
    for event in (await made.client.list(EVENTS, "default")).items or []:
        if event.reason == "Preempted":
            found = re.match(r"Preempted by pod (\S+) on node (\S+)", event.message)
            assert found is not None, event.message
            vain += diary.node_of.get(found[1]) != found[2]
    return {"evictions": len(diary.evicted), "in_vain": vain}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--ways", default="whole,empty,gpuslice", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--flags", action="append", default=[], help="for the extender; may be repeated")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if why_not := control_plane.missing():
        raise SystemExit(f"no real control plane here: {why_not}")
    size = Size(**{name: getattr(chosen, name) for name in asdict(Size())})
    found = []
    for name in chosen.ways.split(","):
        found.append(asyncio.run(measure(size, WAYS[name], tuple(chosen.flags))))
        if not chosen.json:
            print("\n".join(f"{key:<20} {value}" for key, value in found[-1].items()), end="\n\n", flush=True)
    if chosen.json:
        print(json.dumps({**asdict(size), "ways": found}, indent=2))


if __name__ == "__main__":
    main()
