"""What a simulation starts from: a cluster as it is, or trace files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace as replace_fields

from gpuslice.adapters.kube import objects
from gpuslice.core.errors import GpusliceError
from gpuslice.core.host_resources import HostResources
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Pod
from gpuslice.core.policy import FleetNode, Shape
from gpuslice.core.simulation.borrowing import Sample, Usage
from gpuslice.core.simulation.capacity import Outcome, outcome_of
from gpuslice.core.simulation.trace import Trace, read_nodes, read_pods, read_samples
from gpuslice.diagnosis.claims import Claims
from gpuslice.diagnosis.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Start:
    """The nodes, empty, and the initial pods. `now`: the cluster's present state, if there is a cluster; the
    pods that already have a place then come first.
    """

    name: str
    nodes: Sequence[FleetNode]
    pods: Sequence[Shape]
    now: Outcome | None = None
    waiting: int = 0  # of the pods, the last ones


def of_cluster(cluster: Cluster) -> Start:
    """The nodes that share cards, and all pods that request a part of one; including nodes of claims and pods
    with claims, as if all cards were given out in one way.
    """
    ledger = cluster.ledger
    if cluster.claims is not None and (cluster.claims.nodes() or cluster.claims.claims):
        ledger = with_claims(ledger, cluster.claims, cluster.pods)
    nodes, placed, waiting, now = fleet_of(ledger)
    return Start("the cluster's pods", nodes, [*placed, *waiting], now, len(waiting))


def of_files(pods: Path, nodes: Path | None) -> Start:
    """A trace."""
    trace = load_pods(pods)
    return Start(trace.name, load_nodes(find_nodes(pods, nodes)), trace.shapes)


def with_claims(ledger: Ledger, claims: Claims, pods: Iterable[objects.Pod]) -> Ledger:
    """A copy of `ledger` in which nodes of claims, and those of `pods` that claim parts of cards, are as the
    others: as if all were given out in one way."""
    claiming = {each.pod.uid: each.pod for each in map(claims.of, pods) if each is not None}
    others = {name: used_without_cards(ledger, name) for name in ledger.node_names()}
    for pod in claiming.values():  # so far they count as other pods of their nodes
        if pod.node in others:
            cpu, memory = others[pod.node].cpu_milli, others[pod.node].memory_mib
            others[pod.node] = HostResources(cpu - pod.host.cpu_milli, memory - pod.host.memory_mib)
    both = Ledger()
    for name, host in others.items():
        if state := claims.ledger.state(name) or ledger.state(name):
            both.apply_node(state.node)
        both.apply_pod(Pod(f"other pods of {name}", "", f"other pods of {name}", name, host=host))
    for pod in {**ledger.pods, **claiming}.values():
        both.apply_pod(pod)
    return both


def used_without_cards(ledger: Ledger, node: str) -> HostResources:
    """CPU and memory that a node's pods without cards ask for."""
    used, holds = ledger.host_used(node), ledger.holds.on(node)
    mine = [hold.pod.host for hold in holds.by_uid.values()] if holds is not None else []
    cpu, memory = sum(host.cpu_milli for host in mine), sum(host.memory_mib for host in mine)
    return HostResources(used.cpu_milli - cpu, used.memory_mib - memory)


def fleet_of(ledger: Ledger) -> tuple[list[FleetNode], list[Shape], list[Shape], Outcome]:
    """The nodes that share cards, empty; what pods that have a place ask for, and what those that wait do;
    and how the cluster is."""
    nodes = []
    for name in ledger.node_names():
        holds = ledger.holds.on(name)
        if holds is None or holds.node is None or not holds.node.cards:
            continue
        row = holds.row(used_without_cards(ledger, name))  # those pods stay where they are
        core = (row.compute_percent,) * len(row.size)
        nodes.append(
            replace(row, left=row.size, compute_left=core, cpu_milli=row.cpu_left, memory_mib=row.memory_left)
        )
    shapes = {
        pod.uid: replace_fields(shape_of(pod.request), names="")  # the webhook changes names, where it runs
        for pod in ledger.pods.values()
        if pod.request is not None
    }
    waiting = [shape for uid, shape in shapes.items() if ledger.holds.of(uid) is None]
    now = outcome_of(ledger.flush(), waiting, len(shapes) - len(waiting), {})
    placed = [shape for uid, shape in shapes.items() if ledger.holds.of(uid) is not None]
    return nodes, placed, waiting, now


# -- trace files -------------------------------------------------------------------------------------------


class UnreadableTraceError(GpusliceError):
    """The file is not a CSV file; the message names it."""


NODES_FILE = "openb_node_list_gpu_node.csv"


def load_pods(path: Path) -> Trace:
    """Read a list of pods."""
    with _opened(path) as lines:
        return read_pods(lines, path.name)


def load_nodes(path: Path) -> list[FleetNode]:
    """Read a list of nodes."""
    with _opened(path) as lines:
        return read_nodes(lines, path.name)


def load_usage(folder: Path) -> Usage:
    """What pods held and whether they computed, from two tables of GenTD26 (alibaba/clusterdata): memory in
    bytes and duty cycle in percent, columns ``container_ip,timestamp_anon,value``, joined.
    """
    tables = []
    for kind in ("memory_used_bytes", "gpu_duty_cycle"):
        path = next(iter(sorted(folder.glob(f"*{kind}*.csv"))), folder / f"pod_{kind}.csv")
        with _opened(path) as lines:
            tables.append(read_samples(lines, path.name))
    held, duty = tables
    found: dict[str, list[Sample]] = {}
    for pod, at_s in sorted(held.keys() & duty.keys(), key=lambda each: each[1]):
        found.setdefault(pod, []).append(Sample(at_s, duty[pod, at_s] > 0, held[pod, at_s]))
    if not any(each.held_bytes for samples in found.values() for each in samples):
        raise ValueError(f"{folder}: no pod has samples of memory and of its duty cycle at the same time")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        try:
            yield lines
        except (UnicodeDecodeError, csv.Error) as error:
            raise UnreadableTraceError(f"{path} is no CSV file in UTF-8: {error}") from None


def find_nodes(pods: Path, nodes: Path | None, *more: Path) -> Path:
    """The node list that belongs to a pod list: the given one, or one beside it, or one in the `more`
    folders.
    """
    places = [nodes] if nodes else [folder / NODES_FILE for folder in (pods.parent, *more)]
    for path in places:
        if path.is_file():
            return path
    looked = " and ".join(map(str, places))
    raise FileNotFoundError(f"no node list for {pods}: looked for {looked}; --nodes names one")
