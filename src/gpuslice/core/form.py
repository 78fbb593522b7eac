"""A pod as its author wrote it, as a plain value, and the JSON Patch from one such value to another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuslice.core.model import ContainerKind, Request
from gpuslice.core.request import ContainerSpec, asked_names, pod_request

MIRROR = "kubernetes.io/config.mirror"  # a static pod's mirror: kubelet compares it

Env = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ContainerForm:
    """One container. `shelf` is its list in the pod spec, `containers` or `initContainers`."""

    shelf: str
    index: int
    name: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    requests: Mapping[str, Any] = field(default_factory=dict)
    env: Env = ()
    env_from: bool = False
    sidecar: bool = False
    claims: tuple[Mapping[str, Any], ...] = ()
    volume_mounts: tuple[Mapping[str, Any], ...] = ()
    volume_devices: tuple[Mapping[str, Any], ...] = ()
    termination_message_path: str = ""

    @property
    def spec(self) -> ContainerSpec:
        if self.shelf == "containers":
            return ContainerSpec(self.name, self.index, self.limits)
        kind = ContainerKind.SIDECAR if self.sidecar else ContainerKind.INIT
        return ContainerSpec(self.name, self.index, self.limits, kind)

    @property
    def asks(self) -> bool:
        return bool(asked_names(self.limits))


@dataclass(frozen=True, slots=True)
class PodForm:
    """A pod as its author wrote it: init containers first, then app containers."""

    containers: tuple[ContainerForm, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""
    runtime_class: str = ""
    node: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    affinity: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    terminating: bool = False
    claims: tuple[Mapping[str, Any], ...] = ()
    gates: tuple[Mapping[str, Any], ...] = ()  # scheduling gates
    in_group: bool = False  # one of kube-scheduler's own
    ephemeral: tuple[ContainerForm, ...] = ()  # added while it runs; they ask for nothing

    @property
    def request(self) -> Request | None:
        """Raises `InvalidRequestError`."""
        return pod_request((each.spec for each in self.containers), self.labels)

    @property
    def concerns_us(self) -> bool:
        return MIRROR not in self.annotations and any(
            each.asks or asked_names(each.requests) for each in self.containers
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a JSON Patch (RFC 6902)."""

    op: str
    path: str
    value: Any = None

    def document(self) -> dict[str, Any]:
        return {"op": self.op, "path": self.path} | ({} if self.op == "remove" else {"value": self.value})


def limit_field(container: ContainerForm, name: str) -> str:
    return f'container "{container.name}": limits["{name}"]'


def without(values: Mapping[str, str], names: Iterable[str]) -> Mapping[str, str]:
    dropped = set(names)
    return {name: value for name, value in values.items() if name not in dropped}


# -- the difference --------------------------------------------------------------------------------------


def difference(before: PodForm, after: PodForm) -> list[Operation]:
    """JSON Patch from one to the other; both have the same containers."""
    operations = [
        *_map_steps("/metadata/labels", before.labels, after.labels),
        *_map_steps("/metadata/annotations", before.annotations, after.annotations),
    ]
    if before.scheduler != after.scheduler:
        operations.append(Operation("add", "/spec/schedulerName", after.scheduler))
    if before.runtime_class != after.runtime_class:
        operations.append(Operation("add", "/spec/runtimeClassName", after.runtime_class))
    operations += _map_steps("/spec/nodeSelector", before.node_selector, after.node_selector)
    if before.affinity != after.affinity:
        op = "add" if after.affinity else "remove"
        operations.append(Operation(op, "/spec/affinity", dict(after.affinity)))
    if before.tolerations != after.tolerations:
        operations.append(Operation("add", "/spec/tolerations", [dict(each) for each in after.tolerations]))
    if before.gates != after.gates:
        operations.append(Operation("add", "/spec/schedulingGates", [dict(each) for each in after.gates]))
    if before.claims != after.claims:
        operations.append(Operation("add", "/spec/resourceClaims", [dict(each) for each in after.claims]))
    pairs = ((before.containers, after.containers), (before.ephemeral, after.ephemeral))
    for old, new in (each for lists in pairs for each in zip(*lists, strict=True)):
        root = f"/spec/{old.shelf}/{old.index}"
        if (old.limits, old.requests) != (new.limits, new.requests):
            operations += _map_steps(f"{root}/resources/limits", old.limits, new.limits)
            operations += _map_steps(f"{root}/resources/requests", old.requests, new.requests)
        if old.claims != new.claims:
            claims = [dict(each) for each in new.claims]
            operations.append(Operation("add", f"{root}/resources/claims", claims))
        if new.env and old.env != new.env:
            operations.append(Operation("add", f"{root}/env", [dict(each) for each in new.env]))
        elif old.env != new.env:
            operations.append(Operation("remove", f"{root}/env"))
    return operations


def _map_steps(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Operation]:
    if old == new:
        return
    if not old:
        yield Operation("add", path, dict(new))
        return
    for name in old:
        if name not in new:
            yield Operation("remove", f"{path}/{escaped(name)}")
    for name, value in new.items():
        if name not in old or old[name] != value:
            yield Operation("add", f"{path}/{escaped(name)}", value)


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
