"""Another amount for the containers of a pod that runs: what its author wants, and what it was granted.

    annotation gpuslice.io/memory-request: "12"              units, of the only container that asks for some
    annotation gpuslice.io/memory-request: "main=12,side=4"  of each; one that is left out is as in the spec
    annotation gpuslice.io/memory-limit: "24"                the same: what it may have if nobody requests it
    annotation gpuslice.io/memory-granted: {"main":12}       what counts, where it is not as in the spec

The extender alone grants more, since it alone knows what is free of a card; the node's agent alone takes
back, since it alone knows when the container can have no more than that. So a pod always counts for what it
may use.

Kubernetes never changes the limits of a device plugin's resource in a spec, nor the device ids of a
container: kubelet counts those as long as the pod lives, and less is not held. What is held beyond them is
`added`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from gpuslice.core.contract import ANN_GRANTED, ANN_LIMIT, ANN_REQUEST
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.model import ContainerKind, Pod, Refusal, Request
from gpuslice.core.placement import NO_ROOM, NO_ROOM_IN_SEVERAL, NodeState, on_cards
from gpuslice.core.request import peak
from gpuslice.core.units import MOST_UNITS
from gpuslice.core.words import counted

Amounts = Mapping[str, int]
"""Units by container."""
_AMOUNT = re.compile(r"(?:(?P<container>[a-z0-9]([-a-z0-9]*[a-z0-9])?)=)?(?P<units>[0-9]{1,10})")


def with_amounts(request: Request, amounts: Amounts) -> Request:
    """`request` with so many units for these containers; never less than kubelet counts for them."""
    containers = tuple(
        replace(each, units=max(amount, each.devices), added=max(0, amount - each.devices))
        if (amount := amounts.get(each.name)) is not None and each.kind is not ContainerKind.INIT
        else each
        for each in request.containers
    )
    return replace(request, containers=containers, units=peak(containers, lambda one: one.units))


def amounts_of(request: Request) -> Amounts:
    """What was added to, as `with_amounts` takes it."""
    return {each.name: each.units for each in request.containers if each.added}


def granted(annotations: Mapping[str, str], request: Request) -> Request:
    """What a bound pod holds, whose spec says `request`. What cannot be read was not granted."""
    try:
        amounts = msgspec.json.decode(annotations.get(ANN_GRANTED, "{}"), type=dict[str, int])
    except msgspec.MsgspecError:
        return request
    amounts = {name: units for name, units in amounts.items() if units <= MOST_UNITS}
    return with_amounts(request, amounts)


def encode_granted(request: Request) -> str | None:
    """The annotation; None for no annotation."""
    amounts = amounts_of(request)
    return msgspec.json.encode(amounts, order="sorted").decode() if amounts else None


def wanted(annotations: Mapping[str, str], request: Request) -> Request:
    """What the author wants the pod to hold, whose spec says `request`. Raises `InvalidRequestError`."""
    text = annotations.get(ANN_REQUEST)
    return request if text is None else with_amounts(request, _parsed(ANN_REQUEST, text, request))


def with_limits(annotations: Mapping[str, str], request: Request) -> Request:
    """`request` with the limits that its author allows beyond it. Raises `InvalidRequestError`."""
    text = annotations.get(ANN_LIMIT)
    if text is None:
        return request
    limits = _parsed(ANN_LIMIT, text, request)
    containers = (replace(each, limit=limits.get(each.name, 0)) for each in request.containers)
    return replace(request, containers=tuple(containers))


def _parsed(name: str, text: str, request: Request) -> Amounts:
    field = f'metadata.annotations["{name}"]'
    running = {each.name: each for each in request.containers if each.kind is not ContainerKind.INIT}
    amounts: dict[str, int] = {}
    for part in text.split(","):
        found = _AMOUNT.fullmatch(part.strip())
        if found is None or (found["container"] is None and (len(running) != 1 or amounts)):
            several = ",".join(f"{name}={each.units}" for name, each in running.items())
            example = several if len(running) > 1 else "12"
            raise InvalidRequestError(field, text, f"whole units (no Gi), such as {example}")
        of, units = found["container"] or next(iter(running)), int(found["units"])
        if of not in running or of in amounts:
            must_be = f"once for each container that asks for a part of a card: {', '.join(running)}"
            raise InvalidRequestError(field, text, must_be)
        if not running[of].devices <= units <= MOST_UNITS or units % request.card_count:
            least, step = running[of].devices, request.card_count
            of_cards = f" in steps of {step}, the number of its cards," if step > 1 else ""
            must_be = f"for {of} from {least}{of_cards} up: kubelet counts what the pod was created with"
            raise InvalidRequestError(field, text, must_be)
        amounts[of] = units
    return amounts


def more(pod: Pod) -> Request | None:
    """What a pod is to hold once each container has all that is wanted for it; None if none wants more."""
    if pod.wanted is None or pod.request is None or not pod.node or pod.finished or pod.terminating:
        return None
    amounts = {each.name: each.units for each in pod.wanted.containers}
    grown = {each.name: max(each.units, amounts.get(each.name, 0)) for each in pod.request.containers}
    request = with_amounts(pod.request, grown)
    return request if request != pod.request else None


def less(pod: Pod) -> Request | None:
    """What a pod is to hold once none of its containers has more than is wanted for it; None if none has."""
    if pod.wanted is None or pod.request is None or pod.finished:
        return None
    amounts = {each.name: each.units for each in pod.wanted.containers}
    shrunk = {
        each.name: min(each.units, amounts.get(each.name, each.units)) for each in pod.request.containers
    }
    request = with_amounts(pod.request, shrunk)
    return request if request != pod.request else None


def added_in(pods: Iterable[Pod], namespace: str) -> int:
    """What a namespace's pods hold beyond their specs, which quotas do not count."""
    requests = (pod.request for pod in pods if pod.namespace == namespace and pod.request is not None)
    return sum(each.added for request in requests for each in request.containers)


def grown(pod: Pod, request: Request, state: NodeState, others: Mapping[str, int]) -> Pod | Refusal:
    """`pod` holding `request` on the cards where it is, or why its node has no room for that.

    `state`: of its node, with what the pod holds now. `others`: units by pod of those on its cards.
    """
    assert pod.request is not None
    if pod.placement is None or not pod.assigned:
        return Refusal("Its node's agent has not confirmed its card yet")
    placement = on_cards(pod.node, (part.card for part in pod.placement.slices), request)
    has = {part.card: part.units for part in pod.placement.slices}
    for slot, card in enumerate(state.node.cards):
        added = next((part.units for part in placement.slices if part.card == card.index), 0)
        added -= has.get(card.index, 0)
        if added > state.left[slot]:
            return Refusal(_reason(request), detail=_no_room(state, slot, added, others))
    missing = sorted(has.keys() - {card.index for card in state.node.cards})
    if missing:
        return Refusal(_reason(request), detail=f"{pod.node} has no card {missing[0]} any more")
    return replace(pod, request=request, placement=placement)


def _reason(request: Request) -> str:
    return NO_ROOM if request.card_count == 1 else NO_ROOM_IN_SEVERAL.format(count=request.card_count)


def _no_room(state: NodeState, slot: int, added: int, others: Mapping[str, int]) -> str:
    card, node = state.node.cards[slot], state.node
    if card.index in node.unhealthy:
        return f"card {card.index} of {node.name} is out of use"
    free = f"{state.left[slot]} of {card.units} are free"
    text = f"asked for {added} more of card {card.index} of {node.name}, {free}"
    most = sorted(others.items(), key=lambda each: (-each[1], each[0]))[:3]
    holders = ", ".join(f"{key} ({counted(units, 'unit')})" for key, units in most)
    return f"{text}; the rest is held by {holders}" if holders else text
