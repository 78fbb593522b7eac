"""The Python API: ``import gpuslice`` offers what is here, and imports it when it is first used.

Functions are synchronous, also where an event loop runs (a notebook), and change nothing in a cluster. Memory
is counted in units: GiB of a card, or what the nodes' `--memory-unit` says. Every error that they raise for a
reason outside the program is a `GpusliceError`; wrong arguments are a ValueError.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection, connect
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core import placement
from gpuslice.core.errors import GpusliceError  # noqa: F401, the API's
from gpuslice.core.explanation import NodeClass
from gpuslice.core.explanation import explain as judge_nodes
from gpuslice.core.ledger import shape_of
from gpuslice.core.model import Card, CardSlice, Placement, Pod, Request  # noqa: F401, also the API's
from gpuslice.core.node_filters import Wish
from gpuslice.core.placement import NodeState
from gpuslice.diagnosis import cluster as facts
from gpuslice.diagnosis.claims import view_with_claims
from gpuslice.diagnosis.explain.facts import NoSuchPodError  # noqa: F401, the API's
from gpuslice.diagnosis.explain.facts import read as read_explanations
from gpuslice.diagnosis.explain.rule import sentences_of
from gpuslice.diagnosis.explain.words import pod_document, pod_text
from gpuslice.diagnosis.exporters import ClusterSource
from gpuslice.diagnosis.places import wish_of
from gpuslice.diagnosis.usage import ContainerUsage

if TYPE_CHECKING:  # NumPy, which only `simulate` and `place` need
    from gpuslice.diagnosis.simulate.facts import Start
    from gpuslice.diagnosis.simulate.rule import Simulation

T = TypeVar("T")
CONNECTIONS = 40  # at once: exporters are read through the API server, a few dozen at a time
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as it was at one time.

    `nodes`: those that share their cards, by name, each with its cards (`node.cards`) and in the same order
    what is free of them (`left` in units, `compute_left` in percent; a card out of use has 0). `pods`: the
    living ones that ask for or hold a part of a card, by namespace and name; `placement` says which.
    `usage`: measured, by the pod's namespace/name. `problems`: why some usage is unknown, a sentence each.
    `unreadable`: what the user may not read, so that nothing is known about it.
    """

    nodes: tuple[NodeState, ...]
    pods: tuple[Pod, ...]
    usage: Mapping[str, Sequence[ContainerUsage]]
    problems: tuple[str, ...]
    unreadable: tuple[str, ...]
    read_at: datetime
    _facts: facts.Cluster = field(repr=False, compare=False)

    def holders(self, node: str, card: int) -> dict[str, int]:
        """Who holds how many units of a card, by the pod's namespace/name; `card` is its minor number."""
        return {
            pod.key: part.units
            for pod in self.pods
            if pod.node == node and pod.placement is not None
            for part in pod.placement.slices
            if part.card == card
        }


@dataclass(frozen=True, slots=True)
class ExplainedPod:
    """Why a pod waits, or is where it is. Printed, it is the text of ``gpuslice explain``.

    `nodes`: why it waits, nodes by their common reason; empty for a pod that has one. `sentences`: what there
    is to say, the most important first. `usage`: of its containers now, by card. `document`: everything, as
    ``gpuslice explain -o json`` has it.
    """

    pod: Pod
    phase: str
    nodes: tuple[NodeClass, ...]
    sentences: tuple[str, ...]
    usage: tuple[ContainerUsage, ...]
    document: Mapping[str, Any] = field(repr=False)
    _text: str = field(repr=False)

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, slots=True)
class Candidates:
    """Where a request would fit now. `placements`: a node and its cards each, the policy's choice first.

    `refusals`: the other nodes by the reason why not, with the most that is free there on one card; `hints`:
    what follows, in sentences.
    """

    placements: tuple[Placement, ...]
    refusals: tuple[NodeClass, ...]
    hints: tuple[str, ...]


def read_cluster(*, kubeconfig: str = "", context: str = "", usage: bool = False) -> Cluster:
    """Read a cluster: the nodes that share cards, and who holds what.

    The cluster is kubectl's: `kubeconfig` (a file), else $KUBECONFIG, else ~/.kube/config, else that of the
    pod this runs in; `context` selects another one of the file. `usage`: ask the exporters what is used, too.
    GpusliceError if there is no such cluster, it does not answer, or nodes and pods may not be read.
    """

    async def read(client: KubeClient) -> facts.Cluster:
        return await facts.read_cluster(client, ClusterSource(client) if usage else None)

    found = _ask(connect(os.environ, kubeconfig=kubeconfig, context=context), read)
    states = found.ledger.snapshot() | found.ledger_of_claims.snapshot()
    pods = (view_with_claims(pod, found.claims)[0] for pod in found.pods)
    ours = (pod for pod in pods if pod.request or pod.placement or pod.problem)
    return Cluster(
        nodes=tuple(states[name] for name in sorted(states) if states[name].node.divides_cards),
        pods=tuple(sorted(ours, key=lambda pod: pod.key)),
        usage=found.usage,
        problems=found.problems,
        unreadable=tuple(found.unreadable),
        read_at=found.now,
        _facts=found,
    )


def explain(pod: str, *, namespace: str = "", kubeconfig: str = "", context: str = "") -> ExplainedPod:
    """Explain why a pod waits for a part of a card, or which card it holds and who shares it.

    `namespace`: the kubeconfig's without it. The cluster is selected as by `read_cluster`. NoSuchPodError
    names the most similar pod; otherwise as `read_cluster`.
    """
    if "/" in pod:
        raise ValueError(f'pod is "{pod}", must be the name of a pod, without its namespace')
    connection = connect(os.environ, kubeconfig=kubeconfig, context=context, namespace=namespace)
    (found,) = _ask(connection, lambda client: read_explanations(client, pod, connection.namespace)).pods
    return ExplainedPod(
        pod=found.pod,
        phase=found.phase,
        nodes=found.explanation.classes if found.explanation is not None else (),
        sentences=tuple(sentences_of(found)),
        usage=found.usage,
        document=pod_document(found),
        _text=pod_text(found),
    )


def simulate(
    pods: Cluster | str | os.PathLike[str],
    *,
    nodes: str | os.PathLike[str] | None = None,
    add: Sequence[str] = (),
    drop: Sequence[str] = (),
    growth: float = 1.0,
    policies: str | Sequence[str] = "opportunity-cost",
    seed: int = 42,
    needed: bool = True,
) -> Simulation:
    """Place the pods of a cluster or of a trace on its nodes, empty, and see what fits.

    `pods`: a cluster, or the CSV file of a trace, whose nodes are in the file `nodes` or in
    openb_node_list_gpu_node.csv beside it. `add`: more nodes, such as "4x8x80:A100" for 4 nodes with 8 cards
    of 80 units; `drop`: names of nodes to leave out, * stands for anything. `growth`: demand as a multiple.
    `policies`: names, or "all". `seed`: the order of a trace's pods. `needed`: find how many cards suffice.

    Of the result, `policies[name].outcome` says what one policy achieves (`placed` of `pods`,
    `allocated_units` of `units`, `allocation_pct`, `free_cards`, `unplaced` with reasons), `.needed` the
    smallest cluster that holds everything, and `best` names the best policy. ValueError says which argument
    is wrong or that there is nothing to place; OSError and GpusliceError that a file cannot be read.
    Needs the extra `daemons`.
    """
    from gpuslice.diagnosis.simulate import rule

    if not growth > 0:
        raise ValueError(f"growth is {growth:g}, must be more than 0")
    names = policies if isinstance(policies, str) else ",".join(policies)
    try:
        wish = rule.Wish(add, drop, growth, rule.policy_names(names), seed, needed)
        return rule.run(rule.plan(_start(pods, nodes), wish), lambda _: None)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--")) from error  # sentences about the command's options


def _start(pods: Cluster | str | os.PathLike[str], nodes: str | os.PathLike[str] | None) -> Start:
    from gpuslice.diagnosis.simulate.facts import of_cluster, of_files

    if not isinstance(pods, Cluster):
        return of_files(Path(pods), Path(nodes) if nodes is not None else None)
    if nodes is not None:
        raise ValueError("nodes is for a trace, a cluster has its own")
    return of_cluster(pods._facts)


def place(
    cluster: Cluster, request: Request | Mapping[str, Any], *, policy: str = "opportunity-cost"
) -> Candidates:
    """Say where a request would fit in a cluster as it was read, and why not elsewhere.

    `request`: `Request(units, card_count)`, the units in all over so many cards of one node, or the manifest
    of a pod, whose node selector, affinity and tolerations count as well. `policy`: the extender's, which
    here expects more pods like those of the cluster. Nodes that share cards by claims are no candidates;
    that a kubelet has just rejected such a pod does not count.
    ValueError if the request or the policy's name is wrong. Needs the extra `daemons`.
    """
    from gpuslice.core.policy import make_policy

    wish = _wish(request)
    asked, shape, ledger = wish.request, shape_of(wish.request), cluster._facts.ledger
    fleet = ledger.flush()
    present = (shape_of(pod.request) for pod in ledger.pods.values() if pod.request is not None)
    chosen = make_policy(policy, fleet, Counter([*present, shape]))
    explanation = judge_nodes(ledger, cluster._facts.places, wish)
    ranks, avoided = chosen.keys(shape), fleet.terms["avoided"]
    fitting = (fleet.row_of[name] for each in explanation.classes if each.fits for name in each.nodes)
    names, states = {row: name for name, row in fleet.row_of.items()}, ledger.snapshot()
    placements = (
        placement.place(states[names[row]], asked, chosen.slots(shape, row))
        for row in sorted(fitting, key=lambda row: (bool(avoided[row]), int(ranks[row])))
    )
    return Candidates(
        tuple(each for each in placements if isinstance(each, Placement)),
        tuple(each for each in explanation.classes if not each.fits),
        () if explanation.fits else explanation.hints,
    )


def _wish(request: Request | Mapping[str, Any]) -> Wish:
    if isinstance(request, Request):
        if request.card_count < 1 or request.units < 1 or request.units % request.card_count:
            raise ValueError(
                f"the request is for {request.units} units on {request.card_count} cards, must be for as "
                "many on each card, 1 or more"
            )
        return Wish(request)
    try:
        pod = msgspec.convert(request, objects.Pod)
    except msgspec.ValidationError as error:
        raise ValueError(f"the manifest is not that of a pod: {error}") from error
    view = pod_view(pod)
    if view.request is None:
        raise ValueError(view.problem or "the pod asks for no part of a card")
    return wish_of(pod, view.request)


def _ask(connection: Connection, question: Callable[[KubeClient], Awaitable[T]]) -> T:
    async def asked() -> T:
        async with HttpTransport(connection, timeout_s=TIMEOUT_S, connections=CONNECTIONS) as transport:
            return await question(KubeClient(transport))

    return _finished(asked())


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """On a loop of its own: in a thread where this one runs a loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
