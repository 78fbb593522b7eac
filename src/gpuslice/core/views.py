"""From the plain values of an API object to the values that everything here speaks of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpuslice.core.annotations import decode_assume_time, decode_gpus, decode_placement
from gpuslice.core.contract import (
    ANN_ASSIGNED,
    GPU_CORE,
    GPU_COUNT,
    GPU_MEM,
    LABEL_PLACEMENT,
    LABEL_SCHEDULE,
    NODE_GPUS,
)
from gpuslice.core.errors import ContractError, InvalidRequestError
from gpuslice.core.feed import NO_FEED, Feed, node_feed
from gpuslice.core.mode import CORE_MEM
from gpuslice.core.model import ContainerKind, Gpu, Node, Placement, Pod, Request
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import WHOLE_CORE_PERCENT, ContainerSpec, asks_for_gpu, pod_request

FINISHED_PHASES = frozenset({"Succeeded", "Failed"})
_NOTHING: Mapping[str, str] = {}


class ResourcesLike(Protocol):
    @property
    def limits(self) -> Mapping[str, object] | None: ...


class ContainerLike(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def resources(self) -> ResourcesLike | None: ...
    @property
    def restart_policy(self) -> str | None: ...


class PodSpecLike(Protocol):
    """A pod spec, decoded by whichever adapter, with at least these fields."""

    @property
    def containers(self) -> Sequence[ContainerLike]: ...
    @property
    def init_containers(self) -> Sequence[ContainerLike] | None: ...


def container_specs(spec: PodSpecLike) -> list[ContainerSpec]:
    """All containers in the order they start; empty when none names one of our resources, as in most pods."""
    inits = spec.init_containers or ()
    if not any(each.resources and asks_for_gpu(each.resources.limits) for each in (*inits, *spec.containers)):
        return []
    return [*_init_specs(inits), *_app_specs(spec.containers)]


def _init_specs(containers: Sequence[ContainerLike]) -> Iterator[ContainerSpec]:
    for index, each in enumerate(containers):
        kind = ContainerKind.SIDECAR if each.restart_policy == "Always" else ContainerKind.INIT
        yield ContainerSpec(each.name, index, _limits(each), kind)


def _app_specs(containers: Sequence[ContainerLike]) -> Iterator[ContainerSpec]:
    for index, each in enumerate(containers):
        yield ContainerSpec(each.name, index, _limits(each))


def _limits(container: ContainerLike) -> Mapping[str, object]:
    return (container.resources.limits if container.resources else None) or {}


def pod_of(
    *,
    uid: str,
    namespace: str,
    name: str,
    node: str,
    phase: str,
    terminating: bool,
    version: str,
    priority: int | None = None,
    nominated: str = "",
    feed: Feed = NO_FEED,
    specs: Sequence[ContainerSpec],
    labels: Mapping[str, str] | None,
    annotations: Mapping[str, str] | None,
) -> Pod:
    """A pod of the API. What cannot be read is its `problem`, not raised: one bad pod stops nobody."""
    labels, annotations = labels or _NOTHING, annotations or _NOTHING
    request, problem = _request(specs, labels, bound=bool(node))
    if request is not None and feed:
        request = replace(request, feed=feed)
    placement, misread = _placement(annotations, node, request)
    return Pod(
        uid=uid,
        namespace=namespace,
        name=name,
        node=node,
        request=request,
        placement=placement,
        assigned=annotations.get(ANN_ASSIGNED) == "true",
        assume_time_ns=decode_assume_time(annotations),
        finished=phase in FINISHED_PHASES,
        terminating=terminating,
        problem=problem or misread,
        priority=priority or 0,
        nominated=nominated,
        feed=feed,
        version=version_number(version),
    )


def node_of(
    *,
    name: str,
    labels: Mapping[str, str] | None,
    annotations: Mapping[str, str] | None,
    capacity: Mapping[str, object] | None,
    allocatable: Mapping[str, str] | None = None,
    unhealthy: frozenset[int] = frozenset(),
) -> Node:
    """A node of the API: no cards when it shares none (capacity without ``aliyun.com/gpu-mem``)."""
    labels, annotations, capacity = labels or _NOTHING, annotations or _NOTHING, capacity or {}
    gpus, problem = _gpus(annotations, capacity)
    return Node(
        name=name,
        gpus=gpus,
        unhealthy=unhealthy,
        placement=labels.get(LABEL_PLACEMENT, ""),
        core_percent=WHOLE_CORE_PERCENT if whole_number(capacity.get(GPU_CORE)) else 0,
        core_required=labels.get(LABEL_SCHEDULE) == CORE_MEM,
        feed=node_feed(allocatable),
        problem=problem,
    )


def version_number(resource_version: str) -> int:
    """A resourceVersion as a number, 0 when it is none; the larger is the newer (KEP-5504)."""
    return int(resource_version) if resource_version.isascii() and resource_version.isdecimal() else 0


def cards_of_capacity(capacity: Mapping[str, object]) -> tuple[Gpu, ...]:
    """Equal cards by node status alone, total divided by count, as the open-source gpushare reads it."""
    units = whole_number(capacity.get(GPU_MEM)) or 0
    count = whole_number(capacity.get(GPU_COUNT)) or 0
    if units <= 0 or not 0 < count <= 1024:
        return ()
    return tuple(Gpu(index, uuid="", memory_mib=0, units=units // count) for index in range(count))


def _request(
    specs: Sequence[ContainerSpec], labels: Mapping[str, str], bound: bool
) -> tuple[Request | None, str]:
    try:
        return pod_request(specs, labels), ""
    except InvalidRequestError as error:
        return _amount_held(specs) if bound else None, str(error)


def _amount_held(specs: Sequence[ContainerSpec]) -> Request | None:
    """What a wrongly labelled pod holds that is bound all the same: the memory is gone either way."""
    try:
        return pod_request(specs)
    except InvalidRequestError:
        return None


def _placement(
    annotations: Mapping[str, str], node: str, request: Request | None
) -> tuple[Placement | None, str]:
    try:
        return decode_placement(annotations, node, request), ""
    except ContractError as error:
        return None, str(error)


def _gpus(annotations: Mapping[str, str], capacity: Mapping[str, object]) -> tuple[tuple[Gpu, ...], str]:
    if not whole_number(capacity.get(GPU_MEM)):
        return (), ""
    if NODE_GPUS not in annotations:
        return cards_of_capacity(capacity), ""
    try:
        return decode_gpus(annotations[NODE_GPUS]), ""
    except ContractError as error:
        return cards_of_capacity(capacity), str(error)
