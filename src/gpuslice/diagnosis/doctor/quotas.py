"""Checks of quotas: is what a namespace may have of shared cards counted?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.resources import QUOTAS
from gpuslice.core.contract import AMOUNT_NAMES, ResourceNames
from gpuslice.core.quantity import whole_number
from gpuslice.core.quota import quota_hints, range_hints
from gpuslice.core.views import names_offered
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level


def quotas(facts: Facts) -> Iterator[Finding]:
    """Limits under a name in which nothing is counted, and defaults that nobody meant."""
    for where, hint in hints_of(facts.nodes, facts.quotas):
        what, _, fix = hint.partition(": ")
        yield Finding(Level.WARNING, where, what, fix)


def hints_of(nodes: Sequence[objects.Node], limits: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Which ResourceQuota or LimitRange, and what is wrong with it. `limits` have their kind."""
    capacities = [node.status.capacity or {} for node in nodes]
    sharing = [each for each in capacities if any(map(whole_number, map(each.get, AMOUNT_NAMES)))]
    offered: tuple[ResourceNames, ...] = tuple(dict.fromkeys(map(names_offered, sharing)))
    others = {name for each in capacities for name in each} - set(AMOUNT_NAMES)
    for each in limits:
        where = f"{each['kind'].lower()} {each['metadata']['namespace']}/{each['metadata']['name']}"
        is_quota = each["kind"] == QUOTAS.kind
        hints = quota_hints(each, offered, others) if is_quota else range_hints(each, offered)
        yield from ((where, hint) for hint in hints)
