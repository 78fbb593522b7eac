"""From what a pod's containers ask for to the one request that is placed.

The amounts are the containers' **limits**: for extended resources the API server makes requests equal to
them. A pod holds its peak over time, as kube-scheduler and kubelet count it (``PodRequests`` of
k8s.io/component-helpers): init containers run one after another beside the sidecars started before them, the
app containers beside all sidecars.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpuslice.core.contract import GPU_CORE, GPU_COUNT, GPU_MEM
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.model import ContainerKind, ContainerRequest, Request
from gpuslice.core.quantity import whole_number
from gpuslice.core.units import MOST_UNITS

CORE_STEP_PERCENT = 5
WHOLE_CORE_PERCENT = 100
_DIGITS = re.compile(r"[0-9]{1,9}")  # a label is no quantity: "2k" and "2.0" are typing errors


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The part of a container that decides about GPUs. `index` is its place in its own list of the pod."""

    name: str
    index: int
    limits: Mapping[str, object]
    kind: ContainerKind = ContainerKind.APP


def asks_for_gpu(limits: Mapping[str, object] | None) -> bool:
    """Whether a container's limits name one of our resources at all, with whatever value."""
    return limits is not None and (GPU_MEM in limits or GPU_CORE in limits)


def pod_request(specs: Iterable[ContainerSpec], labels: Mapping[str, str] | None = None) -> Request | None:
    """What the pod holds at its peak; None when no container names one of our resources.

    `specs` are init containers and sidecars in their order, then app containers. Raises
    `InvalidRequestError` naming the container and the field when a value can never be given.
    """
    everyone = list(specs)
    asking = [spec for spec in everyone if asks_for_gpu(spec.limits)]
    if not asking:
        return None
    containers = tuple(_container(spec) for spec in asking)
    held = tuple(container for container in containers if container.units)
    if not held:
        raise InvalidRequestError(_field(asking[0], GPU_MEM), _given(asking[0]), _WANTS_UNITS)
    card_count = _card_count(held, labels or {})
    return Request(
        units=_units_of_pod(held),
        card_count=card_count,
        compute_percent=_compute_of_pod(held),
        containers=held,
        app_containers=sum(spec.kind is ContainerKind.APP for spec in everyone),
    )


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


_WANTS_UNITS = f"a whole number of units from 1 to {MOST_UNITS}, such as 4 (no fraction, no Gi)"
_WANTS_CORE = f"a multiple of {CORE_STEP_PERCENT} from {CORE_STEP_PERCENT} to {WHOLE_CORE_PERCENT}"


def _container(spec: ContainerSpec) -> ContainerRequest:
    units = whole_number(spec.limits.get(GPU_MEM, 0))
    if units is None or not 0 <= units <= MOST_UNITS:
        raise InvalidRequestError(_field(spec, GPU_MEM), spec.limits[GPU_MEM], _WANTS_UNITS)
    return ContainerRequest(spec.name, spec.index, units, _core(spec, units), spec.kind)


def _core(spec: ContainerSpec, units: int) -> int:
    if GPU_CORE not in spec.limits:
        return 0
    percent = whole_number(spec.limits[GPU_CORE])
    if percent is None or not 0 < percent <= WHOLE_CORE_PERCENT or percent % CORE_STEP_PERCENT:
        raise InvalidRequestError(_field(spec, GPU_CORE), spec.limits[GPU_CORE], _WANTS_CORE)
    if not units:
        raise InvalidRequestError(
            _field(spec, GPU_CORE),
            spec.limits[GPU_CORE],
            f"accompanied by limits of {GPU_MEM} in the same container",
        )
    return percent


def _units_of_pod(containers: Sequence[ContainerRequest]) -> int:
    units = peak(containers, lambda container: container.units)
    if units > MOST_UNITS:
        raise InvalidRequestError(
            f'pod: limits["{GPU_MEM}"]', units, f"at most {MOST_UNITS} for all containers together"
        )
    return units


def _compute_of_pod(containers: Sequence[ContainerRequest]) -> int:
    percent = peak(containers, lambda container: container.compute_percent)
    if percent > WHOLE_CORE_PERCENT:
        must_be = (
            f"at most {WHOLE_CORE_PERCENT} for all containers together: a pod's containers share one card"
        )
        raise InvalidRequestError(f'pod: limits["{GPU_CORE}"]', percent, must_be)
    return percent


def _card_count(containers: Sequence[ContainerRequest], labels: Mapping[str, str]) -> int:
    text = labels.get(GPU_COUNT)
    if text is None:
        return 1
    count = int(text) if _DIGITS.fullmatch(text) else 0
    if not count:
        raise InvalidRequestError(f'label "{GPU_COUNT}"', text, "a whole number of cards, at least 1")
    for container in containers:
        _check_spread(container, count)
    return count


def _check_spread(container: ContainerRequest, count: int) -> None:
    field = f'container "{container.name}": limits["{GPU_MEM}"]'
    if container.units % count:
        must_be = f'a multiple of {count}, because label "{GPU_COUNT}" spreads it evenly over {count} cards'
        raise InvalidRequestError(field, container.units, must_be)
    if count > 1 and container.compute_percent:
        must_be = f'left out beside label "{GPU_COUNT}": a share of compute is of one card'
        raise InvalidRequestError(
            f'container "{container.name}": limits["{GPU_CORE}"]', container.compute_percent, must_be
        )


def _field(spec: ContainerSpec, resource: str) -> str:
    return f'container "{spec.name}": limits["{resource}"]'


def _given(spec: ContainerSpec) -> object:
    return spec.limits.get(GPU_MEM, "absent")


def held_at_peak(request: Request) -> list[tuple[ContainerRequest, int]]:
    """Each container with the units it adds to the pod's peak; the amounts sum up to ``request.units``.

    Apps and sidecars add what they ask for. Where one init container needs more than all of them together,
    that container adds the difference: it is what its card must have free while it runs.
    """
    standing = [each for each in request.containers if each.kind is not ContainerKind.INIT]
    amounts = [(each, each.units) for each in standing]
    surplus = request.units - sum(amount for _, amount in amounts)
    if surplus > 0:
        amounts.append((_largest_init(request.containers), surplus))
    return amounts


def _largest_init(containers: Sequence[ContainerRequest]) -> ContainerRequest:
    beside = accumulate(each.units if each.kind is ContainerKind.SIDECAR else 0 for each in containers)
    steps = [
        (each.units + sidecars, each)
        for each, sidecars in zip(containers, beside, strict=True)
        if each.kind is ContainerKind.INIT
    ]
    return max(steps, key=lambda step: step[0])[1]
