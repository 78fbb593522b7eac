"""What a container gets for the device ids that kubelet gave it: environment and limits per card.

The ids carry the card (``<uuid>-_-<n>``), so kubelet's own device assignments are the truth about a
container's card; nothing is guessed from amounts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuslice.core.contract import (
    ENV_CARD_UNITS,
    ENV_CONTAINER_UNITS,
    ENV_INDEX,
    ENV_NO_ISOLATION,
    ENV_POD_UNITS,
    ENV_VISIBLE,
    card_of_device_id,
)
from gpuslice.core.errors import GpusliceError
from gpuslice.core.model import Card, CardSlice, ContainerRequest, Node, Placement
from gpuslice.core.units import limit_mib


class GrantError(GpusliceError):
    """kubelet offers device ids that cannot be granted; the container must not start."""


@dataclass(frozen=True, slots=True)
class CardLimit:
    """The most that a container may hold of one card. `compute_percent` 0: compute is not limited."""

    card: Card
    units: int
    memory_mib: int
    compute_percent: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Everything a container gets. `limits` are in card index order and empty only without devices."""

    environment: dict[str, str]
    limits: tuple[CardLimit, ...]

    @property
    def units(self) -> int:
        return sum(limit.units for limit in self.limits)


def units_per_card(device_ids: Iterable[str]) -> dict[str, int]:
    """How many units of each card uuid the ids represent. Raises `GrantError` for an id that is not ours."""
    try:
        return dict(Counter(card_of_device_id(identifier) for identifier in device_ids))
    except ValueError as error:
        raise GrantError(str(error)) from error


def container_grant(
    device_ids: Iterable[str],
    node: Node,
    *,
    pod_units: int | None = None,
    compute_percent: int = 0,
    isolation: bool = True,
    added: int = 0,
) -> Grant:
    """What a container with these device ids gets on `node`.

    `pod_units` is what the whole pod holds, if known; otherwise the container's own amount is used. `added`:
    units beyond the ids, evenly on the same cards. Raises `GrantError` if there are no ids or one names a
    card that the node does not have.
    """
    units = units_per_card(device_ids)
    if not units:
        raise GrantError(f"node {node.name}: no device ids to grant, there must be at least one")
    units = {uuid: count + added // len(units) for uuid, count in units.items()}
    return grant_of_units(
        units, node, pod_units=pod_units, compute_percent=compute_percent, isolation=isolation
    )


def grant_to(container: ContainerRequest | None, device_ids: Iterable[str], node: Node) -> Grant:
    """The same for a container whose request is known: what was added to it, and its share of compute."""
    if container is None:
        return container_grant(device_ids, node)
    percent, added = container.compute_percent, container.added
    return container_grant(device_ids, node, compute_percent=percent, added=added)


def grant_of_units(
    units: Mapping[str, int],
    node: Node,
    *,
    pod_units: int | None = None,
    compute_percent: int = 0,
    isolation: bool = True,
) -> Grant:
    """What a container gets with so many units of each card uuid. Arguments as for `container_grant`."""
    limits = tuple(_limits(units, node, compute_percent))
    held = sum(limit.units for limit in limits)
    environment = {
        ENV_VISIBLE: ",".join(limit.card.uuid for limit in limits),
        ENV_INDEX: ",".join(str(limit.card.index) for limit in limits),
        # plain integers in the same unit, since applications divide one by the other
        ENV_POD_UNITS: str(held if pod_units is None else pod_units),
        # with several cards the amount on *one*, like the vendor; if kubelet spread the units unevenly, the
        # smallest, which every card has
        ENV_CONTAINER_UNITS: str(min(limit.units for limit in limits)),
        ENV_CARD_UNITS: str(limits[0].card.units),
    }
    if not isolation:
        environment[ENV_NO_ISOLATION] = "true"
    return Grant(environment, limits)


def placement_of_devices(device_ids: Iterable[str], node: Node, compute_percent: int = 0) -> Placement:
    """Where device ids are on `node`: what a reconciler compares the annotations with."""
    limits = _limits(units_per_card(device_ids), node, compute_percent)
    return Placement(
        node.name, tuple(CardSlice(each.card.index, each.units, each.compute_percent) for each in limits)
    )


def _limits(units: Mapping[str, int], node: Node, compute_percent: int) -> list[CardLimit]:
    cards = {card.uuid: card for card in node.cards}
    missing = sorted(set(units) - set(cards))
    if missing:
        known = ", ".join(sorted(cards)) or "none"
        raise GrantError(f"node {node.name} has no card {missing[0]} (it has: {known})")
    held = sorted((cards[uuid] for uuid in units), key=lambda card: card.index)
    limits = []
    for card in held:
        try:
            memory_mib = limit_mib(card.memory_mib, units[card.uuid], card.units)
        except ValueError as error:
            raise GrantError(f"card {card.index} ({card.uuid}): {error}") from error
        limits.append(CardLimit(card, units[card.uuid], memory_mib, compute_percent))
    return limits
