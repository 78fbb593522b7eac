"""Checks of claims: does each node with claims offer its cards, and to nobody by the other way as well?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuslice.adapters.kube.objects import Node
from gpuslice.adapters.kube.resources import PODS, RESOURCE_SLICES
from gpuslice.adapters.kube.views import node_view, pod_view
from gpuslice.core.claim_views import cards_of_claims
from gpuslice.core.contract import CLAIM_CLASS, CLAIM_DRIVER, LABEL_MODE
from gpuslice.core.words import counted
from gpuslice.diagnosis.doctor.facts import DEVICE_CLASSES, Facts, Finding, Level, option_of
from gpuslice.diagnosis.doctor.plugins import problem_of_plugin

CLAIMS_QPS = 100
"""Requests a second by kube-controller-manager for claims: upstream measures from 75 on."""
MOST_NAMED = 3
CLAIMS_SINCE = 34
"""The minor version from which kubelet knows the claims that we use (``resource.k8s.io/v1``)."""


def nodes_of_claims(facts: Facts) -> Iterator[Finding]:
    """Nodes whose label says claims, but that offer none."""
    if facts.claims is None or not facts.knows(RESOURCE_SLICES):
        return
    offering = set(facts.claims.nodes())
    for node in facts.nodes:
        if not facts.is_of_claims(node) or node.metadata.name in offering:
            continue
        where = f"node {node.metadata.name}"
        if holders := _others(facts, node):
            yield Finding(
                Level.WARNING,
                where,
                f"is to give its cards out by claims, and waits for {_named(holders)} to end, which "
                f"{'holds' if len(holders) == 1 else 'hold'} parts of its cards there",
                f"kubectl drain {node.metadata.name}, or let them end; or take label {LABEL_MODE} away again",
            )
            continue
        if kubelet := _kubelet_before_claims(node):
            what = f"is to give its cards out by claims, which its kubelet {kubelet} does not know"
            fix = (
                f"upgrade its kubelet to Kubernetes 1.{CLAIMS_SINCE} or later, or take label {LABEL_MODE} "
                "away again"
            )
        elif found := problem_of_plugin(facts, node):
            what, fix = f"is labelled {LABEL_MODE}=claims and {found[0]}", found[1]
        else:
            what = "is to give its cards out by claims and its agent publishes none"
            fix = "delete the agent's pod there, so that it reads the label; else see its /readyz and its log"
        yield Finding(Level.ERROR, where, what, fix)


def _kubelet_before_claims(node: Node) -> str:
    """The version of a kubelet that is too old for claims, as during an upgrade of the cluster; else ""."""
    version: str = (node.status.node_info or {}).get("kubeletVersion", "")
    found = re.match(r"v1\.(\d+)", version)
    return version if found and int(found[1]) < CLAIMS_SINCE else ""


def both_kinds(facts: Facts) -> Iterator[Finding]:
    """Nodes where pods of the extended resource hold cards of which claims are given parts too."""
    held = set(facts.claims.nodes()) if facts.claims is not None else set()
    for node in facts.nodes:
        if node.metadata.name in held and (others := _others(facts, node)):
            yield Finding(
                Level.ERROR,
                f"node {node.metadata.name}",
                f"offers its cards by claims while {_named(others)} hold{'s' if len(others) == 1 else ''} "
                "parts of its cards there: cards are given out twice",
                "delete these pods; the cause is nodeName set by hand, or an agent other than gpuslice's",
            )


def drivers_of_others(facts: Facts) -> Iterator[Finding]:
    """Nodes that share cards which another driver, such as NVIDIA's ``gpu.nvidia.com``, gives out by claims.

    Devices are recognized by their attribute ``uuid``, which that driver publishes.
    """
    offered: dict[str, dict[str, str]] = {}  # by node: uuid → driver
    for each in facts.device_slices:
        spec = each["spec"]
        for device in (spec.get("devices") or ()) if spec.get("driver") != CLAIM_DRIVER else ():
            for name, value in (device.get("attributes") or {}).items():
                if name.rpartition("/")[2] == "uuid":
                    offered.setdefault(spec.get("nodeName", ""), {})[value.get("string", "")] = spec["driver"]
    for node in facts.nodes:
        others = offered.get(node.metadata.name)
        if others is None or not (facts.is_to_share(node) or facts.is_of_claims(node)):
            continue
        labels, annotations = node.metadata.labels or {}, node.metadata.annotations or {}
        cards = cards_of_claims(labels, annotations) or node_view(node).cards
        twice = [card for card in cards if card.uuid in others]
        if twice:
            which = ", ".join(str(card.index) for card in twice)
            drivers = " and ".join(sorted({others[card.uuid] for card in twice}))
            yield Finding(
                Level.ERROR,
                f"node {node.metadata.name}",
                f"shares card {which}, which driver {drivers} gives out by claims: cards are given out twice",
                f"keep that driver off the node, or label it {facts.node_label}=false",
            )


def device_class(facts: Facts) -> Iterator[Finding]:
    """Without the class no claim of shared cards can be allocated."""
    of_claims = any(map(facts.is_of_claims, facts.nodes))
    there = any(each["metadata"]["name"] == CLAIM_CLASS for each in facts.classes)
    if of_claims and not there and facts.knows(DEVICE_CLASSES):
        yield Finding(
            Level.ERROR,
            "cluster",
            f"nodes give their cards out by claims and there is no DeviceClass {CLAIM_CLASS}",
            "install the chart with --set dra.enabled=true; Kubernetes must be 1.34 or newer",
        )


def claims_made_slowly(facts: Facts) -> Iterator[Finding]:
    """kube-controller-manager creates each pod's claim, with two requests, and is limited to 20 a second."""
    if not any(map(facts.is_of_claims, facts.nodes)) or not facts.knows(PODS, "kube-system"):
        return
    for pod in facts.managers:
        said = option_of(pod, "kube-api-qps") or "20"
        if said.replace(".", "", 1).isdigit() and float(said) < CLAIMS_QPS:
            yield Finding(
                Level.NOTE,
                f"pod kube-system/{pod['metadata']['name']}",
                f"makes at most {float(said) / 2:g} claims a second (--kube-api-qps={said}): pods that start "
                "in large numbers wait for it",
                f"give kube-controller-manager --kube-api-qps={CLAIMS_QPS} and "
                f"--kube-api-burst={2 * CLAIMS_QPS}",
            )
            return


def _others(facts: Facts, node: Node) -> list[str]:
    """Pods that hold, or were given, the extended resource there."""
    views = (pod_view(pod) for pod in facts.pods if pod.spec.node_name == node.metadata.name)
    return sorted(view.key for view in views if view.request is not None and not view.finished)


def _named(pods: list[str]) -> str:
    more = len(pods) - MOST_NAMED
    shown = ", ".join(pods[:MOST_NAMED])
    return f"{shown} and {counted(more, 'more pod')}" if more > 0 else shown
