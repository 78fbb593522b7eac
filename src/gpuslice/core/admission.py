"""What admission decides about a pod: the changes, or a denial that names the field.

A decision about a `PodForm` is another `PodForm`; `form.difference` gives the JSON Patch between them.
Deciding twice has the same result as once, so a webhook may be called again.

**Why the environment is cleaned, and rarely written.** kubelet puts the pod's own variables after those of
the device plugin (``kubelet_pods.go``), so a pod's own ``NVIDIA_VISIBLE_DEVICES`` would win. The plugin's
values are exact, since they come from the device ids that kubelet gave to this container. A value taken from
the pod's annotations is not exact while cards are exchanged: kubelet reads annotations when it begins to sync
the pod, before the agent corrects them. So a pod's own entries are removed, and the plugin's apply. Entries
are written only where some could come in through ``envFrom``, because an explicit entry wins over
``envFrom``; and everywhere with `EnvSource.ALWAYS`, for device plugins that guess the card from amounts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gpuslice.core.annotations import check_room
from gpuslice.core.container_files import hiding_mount
from gpuslice.core.contract import (
    AMOUNT_NAMES,
    ANN_CARD_UNITS,
    ANN_INDEX,
    ANN_LIMIT,
    ANN_POD_UNITS,
    ANN_REQUEST,
    ANN_VISIBLE,
    CARDS_NAMES,
    ENV_CARD_UNITS,
    ENV_CONTAINER_UNITS,
    ENV_DRIVER_LIMIT,
    ENV_DRIVER_REQUEST,
    ENV_INDEX,
    ENV_NO_ISOLATION,
    ENV_POD_UNITS,
    ENV_VISIBLE,
    EXCLUSIVE_GPU,
    GATE_POD_GROUP,
    LABEL_GROUP_MIN,
    LABEL_GROUP_NAME,
    LABEL_MIN_TIER,
    POD_ANNOTATION_WRITERS,
    VENDOR_NAMES,
    ResourceNames,
)
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import ContainerForm, PodForm, limit_field, without
from gpuslice.core.model import Request
from gpuslice.core.parking import PARKING_ANNOTATIONS, check_parking
from gpuslice.core.pod_group import pod_group
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import min_tier, names_in
from gpuslice.core.resize import wanted, with_limits

MASTERS = "system:masters"
DEFAULT_SCHEDULER = "default-scheduler"
GATE = {"name": GATE_POD_GROUP}
NO_CARDS = "void"  # the container runtime's hook treats it as "no GPU"


class EnvSource(StrEnum):
    """When the pod's annotations are written into its environment."""

    HIDDEN = "hidden"  # only in containers with envFrom, which could set the names
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What a cluster's owner may decide. `scheduler`, `runtime_class`: given to pods that leave them open.

    "" gives them none.

    `writers`: users who may change a pod's placement annotations; empty means everybody. `names`: those that
    nodes offer, given to pods that ask in others. `gate_groups`: members of pod groups get a scheduling gate,
    which the extender removes.
    """

    scheduler: str = ""
    runtime_class: str = ""
    env: EnvSource = EnvSource.HIDDEN
    allow_no_isolation: bool = False
    hide_cards: bool = True
    writers: frozenset[str] = frozenset()
    names: ResourceNames = VENDOR_NAMES
    gate_groups: bool = False


@dataclass(frozen=True, slots=True)
class User:
    """Who changes a pod, as the API server knows them."""

    name: str = ""
    groups: Collection[str] = ()

    def may_write(self, rules: AdmissionRules) -> bool:
        """Cluster administrators may correct by hand what its writers wrote."""
        return not rules.writers or self.name in rules.writers or MASTERS in self.groups


NOBODY = User()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer about one pod: `denial` is why not, "" if it is allowed; `warnings` go to its author."""

    denial: str = ""
    pod: PodForm | None = None  # as it should be
    warnings: tuple[str, ...] = ()


# -- deciding --------------------------------------------------------------------------------------------


def mutate(pod: PodForm, rules: AdmissionRules) -> Verdict:
    """What a new pod should be; a denial only if its request can never be given."""
    pod = replace(pod, annotations=without(pod.annotations, POD_ANNOTATION_WRITERS))
    if not pod.concerns_us:
        return Verdict(pod=pod)
    try:
        _check_resources(pod)
        request, group = pod.request, pod_group(pod.labels)
    except InvalidRequestError as error:
        return Verdict(denial=str(error))
    assert request is not None
    left_open = rules.scheduler and pod.scheduler in ("", DEFAULT_SCHEDULER)
    scheduler = rules.scheduler if left_open else pod.scheduler
    changed = replace(
        pod,
        containers=tuple(_container(each, request, rules) for each in pod.containers),
        scheduler=scheduler,
        runtime_class=pod.runtime_class or rules.runtime_class,
        tolerations=_tolerating_gpu_nodes(pod.tolerations),
    )
    ours = scheduler in ("", rules.scheduler or DEFAULT_SCHEDULER)  # another may handle its groups itself
    gated = GATE in pod.gates or pod.in_group or pod.node
    if group is not None and rules.gate_groups and ours and not gated:
        changed = replace(changed, gates=(*pod.gates, GATE))
    warnings = []
    for old, new in zip(pod.containers, changed.containers, strict=True):
        for name in (entry.get("name") for entry in old.env if entry not in new.env):
            why = _WHY if name != ENV_NO_ISOLATION else "this cluster does not allow it"
            warnings.append(f'container "{old.name}": env["{name}"] is taken out: {why}')
    if pod.node:
        warnings.append(
            "spec.nodeName is set, so no scheduler chooses its card: a node with one card gives that, if it "
            "has room, and a node with several refuses the pod"
        )
    return Verdict(pod=changed, warnings=tuple(warnings))


def mutate_ephemeral(old: PodForm, new: PodForm, rules: AdmissionRules) -> PodForm:
    """What a pod with cards should be when a container is added: that one sees none, as if it asked for none
    from the beginning."""
    if not new.concerns_us:
        return new
    known = {each.name for each in old.ephemeral}  # those cannot change
    ephemeral = tuple(each if each.name in known else _container(each, None, rules) for each in new.ephemeral)
    return replace(new, ephemeral=ephemeral)


def validate(pod: PodForm, rules: AdmissionRules, user: User = NOBODY) -> Verdict:
    """Whether a new pod is allowed as it is after all mutation."""
    if denial := _denied_annotation({}, pod.annotations, user, rules):
        return Verdict(denial=denial)
    if not pod.concerns_us:
        return Verdict(pod=pod)
    try:
        _check_resources(pod)
        pod_group(pod.labels)
        if pod.request is not None:
            _check_environment(pod, rules)
            check_room(pod.annotations, pod.request)
            wanted(pod.annotations, with_limits(pod.annotations, pod.request))
            check_parking(pod.annotations)
    except InvalidRequestError as error:
        return Verdict(denial=str(error))
    for each in pod.containers:
        mounts, devices, message_path = each.volume_mounts, each.volume_devices, each.termination_message_path
        wrong = hiding_mount(each.name, mounts, devices, message_path) if each.asks else ""
        if wrong and not (rules.allow_no_isolation and any(map(_switches_off, each.env))):
            return Verdict(denial=wrong)
    return Verdict(pod=pod)


def validate_update(old: PodForm, new: PodForm, user: User, rules: AdmissionRules) -> Verdict:
    """Whether this change of a pod is allowed. Only changes are examined: old pods can be cleaned up."""
    if denial := _denied_annotation(old.annotations, new.annotations, user, rules):
        return Verdict(denial=denial)
    if new.terminating or not old.concerns_us:
        return Verdict(pod=new)
    for label in (each for each in CARDS_NAMES if old.labels.get(each) != new.labels.get(each)):
        must_be = f'"{old.labels.get(label, "")}" as at creation: what a pod holds cannot change'
        field, given = f'metadata.labels["{label}"]', new.labels.get(label, "absent")
        return Verdict(denial=str(InvalidRequestError(field, given, must_be)))
    try:
        if old.labels.get(LABEL_MIN_TIER) != new.labels.get(LABEL_MIN_TIER):
            min_tier(new.labels)
        if any(old.labels.get(each) != new.labels.get(each) for each in (LABEL_GROUP_NAME, LABEL_GROUP_MIN)):
            pod_group(new.labels)
        resized = any(
            old.annotations.get(each) != new.annotations.get(each) for each in (ANN_REQUEST, ANN_LIMIT)
        )
        if resized and new.request is not None:
            wanted(new.annotations, with_limits(new.annotations, new.request))
        if any(old.annotations.get(each) != new.annotations.get(each) for each in PARKING_ANNOTATIONS):
            check_parking(new.annotations)
    except InvalidRequestError as error:
        return Verdict(denial=str(error))
    return Verdict(pod=new)


def _denied_annotation(
    old: Mapping[str, str], new: Mapping[str, str], user: User, rules: AdmissionRules
) -> str:
    changed = [name for name in POD_ANNOTATION_WRITERS if old.get(name) != new.get(name)]
    if not changed or user.may_write(rules):
        return ""
    return (
        f'metadata.annotations["{changed[0]}"] may be changed only by {", ".join(sorted(rules.writers))}, '
        f"not by {user.name or 'an unnamed user'}: it is gpuslice's own record of the pod"
    )


def _tolerating_gpu_nodes(given: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    """With the toleration that ``ExtendedResourceToleration`` gives pods that request `nvidia.com/gpu`.

    GPU nodes are often tainted with that resource's name (GKE does it), and pods rely on that admission
    plugin. It would give ours a toleration for ``aliyun.com/gpu-mem``, with which nobody taints nodes.
    """
    tolerated = any(
        each.get("operator") == "Exists"
        and (each.get("key") or EXCLUSIVE_GPU) == EXCLUSIVE_GPU
        and (each.get("effect") or "NoSchedule") == "NoSchedule"
        for each in given
    )
    added = {"key": EXCLUSIVE_GPU, "operator": "Exists", "effect": "NoSchedule"}
    return given if tolerated else (*given, added)


# -- resources -------------------------------------------------------------------------------------------


def _check_resources(pod: PodForm) -> None:
    for each in pod.containers:
        for name in set(AMOUNT_NAMES) & each.requests.keys():
            # the API server says the same about every extended resource, but in other words
            asked, limit = each.requests[name], each.limits.get(name)
            if limit is None or whole_number(asked) != whole_number(limit):
                shown = "absent" if limit is None else f'"{limit}"'
                must_be = f'the same as limits["{name}"], which is {shown}; limits alone are enough'
                raise InvalidRequestError(f'container "{each.name}": requests["{name}"]', asked, must_be)
    for each in pod.containers:
        if whole_number(each.limits.get(EXCLUSIVE_GPU)):
            asked = names_in(name for every in pod.containers for name in every.limits).memory
            must_be = f"left out beside {asked} in a pod: no node offers both"
            raise InvalidRequestError(limit_field(each, EXCLUSIVE_GPU), each.limits[EXCLUSIVE_GPU], must_be)


# -- environment -----------------------------------------------------------------------------------------

RESERVED = (
    ENV_VISIBLE,
    ENV_INDEX,
    ENV_POD_UNITS,
    ENV_CONTAINER_UNITS,
    ENV_CARD_UNITS,
    ENV_DRIVER_REQUEST,
    ENV_DRIVER_LIMIT,
)
"""Variables that say which card a container has, and how much of it: only the node's agent sets them."""

_FROM_ANNOTATION = {
    ENV_VISIBLE: ANN_VISIBLE,
    ENV_INDEX: ANN_INDEX,
    ENV_POD_UNITS: ANN_POD_UNITS,
    ENV_CARD_UNITS: ANN_CARD_UNITS,
}


def _container(container: ContainerForm, request: Request | None, rules: AdmissionRules) -> ContainerForm:
    """Entries that must exist stand before the author's, so that those may refer to them. `request`: the
    pod's; an ephemeral container asks for no part of it."""
    if not container.asks and not rules.hide_cards:
        return container
    written: list[Mapping[str, Any]] = []
    if not container.asks:
        other_plugins_devices = any("/" in name for name in container.limits.keys() - set(AMOUNT_NAMES))
        if not other_plugins_devices:
            written.append({"name": ENV_VISIBLE, "value": NO_CARDS})
    elif request and (
        rules.env is EnvSource.ALWAYS or (rules.env is EnvSource.HIDDEN and container.env_from)
    ):
        written += [from_annotation(name, annotation) for name, annotation in _FROM_ANNOTATION.items()]
        units = whole_number(container.limits.get(request.names.memory, 0)) or 0
        written.append({"name": ENV_CONTAINER_UNITS, "value": str(units // request.card_count)})
        if not rules.allow_no_isolation and container.env_from:
            written.append({"name": ENV_NO_ISOLATION, "value": "false"})
    reserved = set(RESERVED) if container.asks else {ENV_VISIBLE}
    if not rules.allow_no_isolation:
        reserved.add(ENV_NO_ISOLATION)
    own = tuple(each for each in container.env if each.get("name") not in reserved)
    return replace(
        container,
        env=(*written, *own),
        limits=in_names(container.limits, rules.names),
        requests=in_names(container.requests, rules.names),
    )


def in_names(amounts: Mapping[str, Any], names: ResourceNames) -> Mapping[str, Any]:
    """The same amounts under the names that nodes offer."""
    given = names_in(amounts)
    other = {given.memory: names.memory, given.compute: names.compute}
    return {other.get(name, name): amount for name, amount in amounts.items()}


def from_annotation(name: str, annotation: str) -> dict[str, Any]:
    """A variable with the value of one of the pod's own annotations, in the API server's form."""
    path = f"metadata.annotations['{annotation}']"
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _check_environment(pod: PodForm, rules: AdmissionRules) -> None:
    allowed = [from_annotation(name, ann) for name, ann in _FROM_ANNOTATION.items()]
    for container in (each for each in pod.containers if each.asks):
        for entry in container.env:
            name, value = entry.get("name"), entry.get("value", "a reference")
            field = f'container "{container.name}": env["{name}"]'
            if name in (ENV_VISIBLE, ENV_INDEX) and dict(entry) not in allowed:
                raise InvalidRequestError(field, value, "left out: " + _WHY)
            if _switches_off(entry) and not rules.allow_no_isolation:
                must_be = "left out: this cluster does not let pods switch their memory limit off"
                raise InvalidRequestError(field, value, must_be)


def _switches_off(entry: Mapping[str, Any]) -> bool:
    """Whether a variable switches the container's memory limit off, or may."""
    true = "valueFrom" in entry or str(entry.get("value")).lower() in ("true", "1")
    return entry.get("name") == ENV_NO_ISOLATION and true


_WHY = "the node sets it to the card that the pod was given"
