"""The second way to a part of a card: what claims have given out, and what a pod's claim waits for.

Nodes with claims and the pods that were given something by claims are in a ledger of their own, as if it were
the extended resource. So claims are explained like other requests, and no pod is offered room that it cannot
have: neither kind of pod fits on the other kind of node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gpuslice.adapters.kube.objects import ClaimSpec, Node, Pod, PodClaim, ResourceClaim
from gpuslice.adapters.kube.views import held_by_claims, node_view, pod_view
from gpuslice.core import model
from gpuslice.core.claim_shape import TEMPLATE_PREFIX, claim_shape
from gpuslice.core.claim_views import cards_of_claims, unit_of, wanted, with_claimed
from gpuslice.core.claims import ClaimedSlice, device_index
from gpuslice.core.contract import (
    CLAIM_CLASS,
    CLAIM_COMPUTE,
    CLAIM_DRIVER,
    CLAIM_MEMORY,
    CLAIM_TAINT,
    LABEL_CLAIMED,
)
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import rules_of
from gpuslice.core.model import Card, Request
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import WHOLE_CORE_PERCENT
from gpuslice.core.units import MIB, UNIT_MIB

Key = tuple[str, str]  # namespace and name
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClaimedPod:
    """A pod as if it had asked for what its claims ask for, and had been given what they were given.

    `names`: its claims, or the templates of those that do not exist yet. `hints`: what they wait for.
    """

    pod: model.Pod
    names: tuple[str, ...]
    hints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Claims:
    """Everything about claims of shared cards. `templates` is None if they may not be read."""

    ledger: Ledger = field(default_factory=Ledger)
    slices: Sequence[Object] = ()  # ResourceSlices of our driver
    unit: str = "GiB"
    claims: Mapping[Key, ResourceClaim] = field(default_factory=dict)
    templates: Mapping[Key, ClaimSpec] | None = None
    held: Mapping[str, Sequence[ClaimedSlice]] = field(default_factory=dict)  # by the pod's uid

    def of(self, pod: Pod) -> ClaimedPod | None:
        """None for a pod without claims of shared cards."""
        namespace = pod.metadata.namespace
        requests: list[Request] = []
        names: list[str] = []
        hints: list[str] = []
        for reference in pod.claims:
            name = reference.resource_claim_name or ""
            try:
                request = self._request(namespace, name, reference)
            except InvalidRequestError as error:
                view = replace(pod_view(pod), problem=str(error))
                return ClaimedPod(view, (reference.resource_claim_template_name or name,))
            if request is not None:
                requests.append(request)
                names.append(name or reference.resource_claim_template_name or "")
                hints += self._waits_for(pod, name, reference)
        if not names:
            return None
        view, slices = pod_view(pod), self.held.get(pod.metadata.uid, ())
        if slices:
            view = with_claimed(view, slices)
        elif not view.node:
            request = max(requests, key=lambda each: each.units_per_card)
            view = replace(view, request=replace(request, host=view.host))
        return ClaimedPod(view, tuple(names), tuple(hints))

    def _request(self, namespace: str, name: str, reference: PodClaim) -> Request | None:
        """What the claim asks for of shared cards; None if it asks for something else or is not known."""
        template = reference.resource_claim_template_name or ""
        claim = self.claims.get((namespace, name))
        spec = claim.spec if claim is not None else (self.templates or {}).get((namespace, template))
        if spec is not None:
            together = any(each.match_attribute for each in spec.devices.constraints or ())
            return wanted(self._parts(spec), together=together)
        shape = claim_shape(template) if template else None
        if shape is None:
            return None
        count = shape.card_count
        parts = [(units // count, percent, count) for units, percent in shape.containers]
        return wanted(parts, together=True)

    def _parts(self, spec: ClaimSpec) -> Iterator[tuple[int, int, int]]:
        """Units, percent of compute and number of cards of each request for shared cards."""
        for each in spec.devices.requests or ():
            exact = each.exactly or next(iter(each.first_available or ()), None)
            if exact is None or exact.device_class_name != CLAIM_CLASS or exact.admin_access:
                continue
            amounts = (exact.capacity.requests if exact.capacity is not None else None) or {}
            asked = whole_number(amounts.get(CLAIM_MEMORY))
            if asked is None:  # without an amount it wants a whole card: the largest
                states = (self.ledger.state(node) for node in self.nodes())
                sizes = (card.units for state in states if state for card in state.node.cards)
                units = max(sizes, default=1)
            else:
                units = -(-asked // (UNIT_MIB[self.unit] * MIB))
            yield units, whole_number(amounts.get(CLAIM_COMPUTE)) or 0, exact.count

    def nodes(self) -> list[str]:
        """The nodes that offer cards by claims."""
        return sorted({each["spec"].get("nodeName", "") for each in self.slices})

    def _waits_for(self, pod: Pod, name: str, reference: PodClaim) -> Iterator[str]:
        namespace, template = pod.metadata.namespace, reference.resource_claim_template_name or ""
        claim = self.claims.get((namespace, name))
        if not name and self.templates is not None and (namespace, template) not in self.templates:
            ours = template.startswith(TEMPLATE_PREFIX) and (pod.metadata.labels or {}).get(LABEL_CLAIMED)
            who = "Deployment gpuslice-claims makes it: see that it runs" if ours else "create it there"
            yield f"Its claim waits for ResourceClaimTemplate {namespace}/{template}; {who}."
        elif not name:
            yield (
                f"Its claim has not been made from template {template} yet: kube-controller-manager does "
                "that, 10 a second by its default limits; gpuslice doctor tells how to raise them."
            )
        elif claim is None:
            yield f"It waits for ResourceClaim {namespace}/{name}, which is not there: create it."
        elif claim.status.allocation is not None and pod.metadata.uid not in self.held:
            users = claim.status.reserved_for or ()
            if users and users[0].uid != pod.metadata.uid:
                yield f"It shares claim {name} with pod {users[0].name}, with which the card is shown."
            else:
                yield f"Its claim {name} is allocated, and kube-scheduler binds the pod next."


def view_with_claims(pod: Pod, claims: Claims | None) -> tuple[model.Pod, ClaimedPod | None]:
    """A pod with what it asks for and holds, in either way; and by its claims, if it uses claims."""
    claimed = claims.of(pod) if claims is not None else None
    return (claimed.pod if claimed is not None else pod_view(pod)), claimed


def claims_of(
    nodes: Iterable[Node],
    pods: Iterable[Pod],
    claims: Iterable[ResourceClaim],
    slices: Iterable[Object],
    templates: Iterable[Object] | None = None,
) -> Claims:
    """From the cluster's objects. `slices` may include those of other drivers."""
    nodes, ledger = list(nodes), Ledger()
    slices = [each for each in slices if each["spec"].get("driver") == CLAIM_DRIVER]
    offering = {each["spec"].get("nodeName", "") for each in slices}
    offered: dict[str, set[int]] = defaultdict(set)
    for each in slices:
        for device in each["spec"].get("devices") or ():
            sick = any(taint.get("key") == CLAIM_TAINT for taint in device.get("taints") or ())
            index = device_index(device["name"])
            if index is not None and not sick:
                offered[each["spec"].get("nodeName", "")].add(index)
    cards: dict[str, Sequence[Card]] = {}
    for node in nodes:
        labels, name = node.metadata.labels or {}, node.metadata.name
        cards[name] = cards_of_claims(labels, node.metadata.annotations or {})
        if cards[name] and name in offering:
            view = replace(
                node_view(node),
                cards=tuple(cards[name]),
                shared=True,
                unhealthy=frozenset(card.index for card in cards[name]) - offered[name],
                compute_percent=WHOLE_CORE_PERCENT if rules_of(labels).divides_compute else 0,
                compute_required=False,
                problem="",
            )
            ledger.apply_node(view)
    claims = list(claims)
    held = held_by_claims(claims, cards)
    for pod in pods:
        if pod.metadata.uid in held:
            ledger.apply_pod(with_claimed(pod_view(pod), held[pod.metadata.uid]))
    known = None
    if templates is not None:
        known = {
            (each["metadata"].get("namespace", ""), each["metadata"]["name"]): msgspec.convert(
                each["spec"].get("spec") or {}, ClaimSpec
            )
            for each in templates
        }
    unit = unit_of([card for found in cards.values() for card in found])
    by_key = {(each.metadata.namespace, each.metadata.name): each for each in claims}
    return Claims(ledger, slices, unit, by_key, known, held)
