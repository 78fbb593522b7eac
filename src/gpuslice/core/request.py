"""From what a pod's containers ask for to the one request that is placed.

The amounts are the containers' **limits**: for extended resources the API server makes requests equal to
them. A pod holds its peak over time, as kube-scheduler and kubelet count it (``PodRequests`` of
k8s.io/component-helpers): init containers run one after another next to the sidecars started before them, the
app containers next to all sidecars.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpuslice.core.contract import (
    AMOUNT_NAMES,
    CARDS_NAMES,
    LABEL_MIN_TIER,
    NAME_SETS,
    VENDOR_NAMES,
    ResourceNames,
)
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.model import TIERS, ContainerKind, ContainerRequest, Request, Tier
from gpuslice.core.quantity import whole_number
from gpuslice.core.units import MOST_UNITS

CORE_STEP_PERCENT = 5
WHOLE_CORE_PERCENT = 100
_DIGITS = re.compile(r"[0-9]{1,9}")  # a label is not a quantity: "2k" and "2.0" are typing errors


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The part of a container that concerns GPUs. `index` is its position in its own list of the pod."""

    name: str
    index: int
    limits: Mapping[str, object]
    kind: ContainerKind = ContainerKind.APP


def asked_names(amounts: Mapping[str, object]) -> list[str]:
    """Those of our resources that a container's limits ask for; an amount of zero asks for nothing."""
    return [name for name in AMOUNT_NAMES if name in amounts and whole_number(amounts[name]) != 0]


def names_in(amounts: Iterable[str]) -> ResourceNames:
    """The set of names in which `amounts` are given; the vendor's if there is none."""
    given = set(amounts)
    found = (names for names in NAME_SETS.values() if not given.isdisjoint((names.memory, names.compute)))
    return next(found, VENDOR_NAMES)


def pod_request(specs: Iterable[ContainerSpec], labels: Mapping[str, str] | None = None) -> Request | None:
    """What the pod holds at its peak; None if no container asks for any of our resources.

    `specs` are init containers and sidecars in their order, then app containers. Raises `InvalidRequestError`
    naming the container and the field if a value can never be given.
    """
    everyone = list(specs)
    asking = [spec for spec in everyone if asked_names(spec.limits)]
    if not asking:
        return None
    names = names_in(asked_names(asking[0].limits))
    for spec in asking:
        for name in asked_names(spec.limits):
            if name not in (names.memory, names.compute):  # no node offers both: it would wait for ever
                must_be = f"left out beside {names.memory}: they mean the same, and a pod asks in one of them"
                raise InvalidRequestError(_field(spec, name), spec.limits[name], must_be)
    held = tuple(_container(spec, names) for spec in asking)
    card_count = _card_count(held, labels or {}, names)
    units = peak(held, lambda container: container.units)
    if units > MOST_UNITS:
        must_be = f"at most {MOST_UNITS} for all containers together"
        raise InvalidRequestError(f'pod: limits["{names.memory}"]', units, must_be)
    percent = peak(held, lambda container: container.compute_percent)
    if percent > WHOLE_CORE_PERCENT:
        must_be = f"at most {WHOLE_CORE_PERCENT} for all containers together"
        raise InvalidRequestError(
            f'pod: limits["{names.compute}"]', percent, f"{must_be}: a pod's containers share one card"
        )
    app_containers = sum(spec.kind is ContainerKind.APP for spec in everyone)
    tier = min_tier(labels or {})
    return Request(units, card_count, percent, held, app_containers, names=names, min_tier=tier)


def min_tier(labels: Mapping[str, str]) -> Tier:
    """The weakest tier that a pod runs under. Raises `InvalidRequestError`."""
    word = labels.get(LABEL_MIN_TIER, Tier.NONE.word)
    if word not in TIERS:
        raise InvalidRequestError(f'label "{LABEL_MIN_TIER}"', word, f"one of {', '.join(TIERS)}")
    return TIERS[word]


def held_request(specs: Sequence[ContainerSpec], labels: Mapping[str, str]) -> Request | None:
    """What a pod that is bound holds: a label that cannot be read takes nothing from the others.

    Where labels of both sets of names contradict each other, the one in the names of its amounts counts. None
    if the amounts themselves cannot be read.
    """
    own = names_in(name for spec in specs for name in asked_names(spec.limits)).cards
    readable: dict[str, str] = {}
    request = None
    with contextlib.suppress(InvalidRequestError):
        request = pod_request(specs)
    for label in (own, *(name for name in CARDS_NAMES if name != own), LABEL_MIN_TIER):
        if label in labels:
            tried = {**readable, label: labels[label]}
            with contextlib.suppress(InvalidRequestError):
                request, readable = pod_request(specs, tried), tried
    return request


def peak(containers: Sequence[ContainerRequest], amount: Callable[[ContainerRequest], int]) -> int:
    """The most that the containers hold at one time, by kubelet's rule for init containers and sidecars."""
    sidecars = largest_init = 0
    for container in containers:
        if container.kind is ContainerKind.SIDECAR:
            sidecars += amount(container)
        elif container.kind is ContainerKind.INIT:
            largest_init = max(largest_init, sidecars + amount(container))
    apps = sum(amount(container) for container in containers if container.kind is ContainerKind.APP)
    return max(apps + sidecars, largest_init)


RIGHT_UNITS = f"a whole number of units from 1 to {MOST_UNITS}, such as 4 (no fraction, no Gi)"


def _container(spec: ContainerSpec, names: ResourceNames) -> ContainerRequest:
    units = whole_number(spec.limits.get(names.memory, 0))
    if units is None or not 0 <= units <= MOST_UNITS:
        raise InvalidRequestError(_field(spec, names.memory), spec.limits[names.memory], RIGHT_UNITS)
    if names.compute not in asked_names(spec.limits):
        return ContainerRequest(spec.name, spec.index, units, 0, spec.kind)
    field, given = _field(spec, names.compute), spec.limits[names.compute]
    percent = whole_number(given)
    if percent is None or not 0 <= percent <= WHOLE_CORE_PERCENT or percent % CORE_STEP_PERCENT:
        must_be = f"a multiple of {CORE_STEP_PERCENT} from {CORE_STEP_PERCENT} to {WHOLE_CORE_PERCENT}"
        raise InvalidRequestError(field, given, must_be)
    if not units:
        must_be = f"accompanied by limits of {names.memory} in the same container"
        raise InvalidRequestError(field, given, must_be)
    return ContainerRequest(spec.name, spec.index, units, percent, spec.kind)


def _card_count(
    containers: Sequence[ContainerRequest], labels: Mapping[str, str], names: ResourceNames
) -> int:
    """Nothing counts a label, so that of either set of names is valid for every pod."""
    given = {name: labels[name] for name in CARDS_NAMES if name in labels}
    if not given:
        return 1
    label, text = next(iter(given.items()))
    for other, value in given.items():
        if value != text:
            raise InvalidRequestError(f'label "{other}"', value, f'"{text}" as label "{label}" says')
    count = int(text) if _DIGITS.fullmatch(text) else 0
    if not count:
        raise InvalidRequestError(f'label "{label}"', text, "a whole number of cards, at least 1")
    for each in containers:
        if each.units % count:
            must_be = f'a multiple of {count}, because label "{label}" spreads it evenly over {count} cards'
            raise InvalidRequestError(_field(each, names.memory), each.units, must_be)
        if count > 1 and each.compute_percent:
            must_be = f'left out beside label "{label}": a share of compute is of one card'
            raise InvalidRequestError(_field(each, names.compute), each.compute_percent, must_be)
    return count


def _field(container: ContainerSpec | ContainerRequest, resource: str) -> str:
    return f'container "{container.name}": limits["{resource}"]'


def held_at_peak(request: Request) -> list[tuple[ContainerRequest, int]]:
    """Each container with the units that it adds to the pod's peak; the amounts sum up to ``request.units``.

    Apps and sidecars add what they ask for. If one init container needs more than all of them together, that
    container adds the difference: its card must have that much free while it runs.
    """
    standing = [each for each in request.containers if each.kind is not ContainerKind.INIT]
    amounts = [(each, each.units) for each in standing]
    surplus = request.units - sum(amount for _, amount in amounts)
    if surplus > 0:
        sidecars = accumulate(
            each.units if each.kind is ContainerKind.SIDECAR else 0 for each in request.containers
        )
        steps = [
            (each.units + beside, each)
            for each, beside in zip(request.containers, sidecars, strict=True)
            if each.kind is ContainerKind.INIT
        ]
        amounts.append((max(steps, key=lambda step: step[0])[1], surplus))
    return amounts
