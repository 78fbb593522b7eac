"""What is wrong with a pod: containers, resources, volumes, and what may not change."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from simcluster.cluster.amounts import quality
from simcluster.cluster.errors import Cause
from simcluster.cluster.names import key_problems, label_problems
from simcluster.cluster.problem import (
    duplicate,
    forbidden_value,
    invalid_value,
    not_found_value,
    required,
    unsupported,
)
from simcluster.cluster.quantity import parse_quantity
from simcluster.cluster.request import Object

MIRROR = "kubernetes.io/config.mirror"
_STANDARD = ("cpu", "memory", "ephemeral-storage")
_OF_A_POD = ("cpu", "memory")
_RESTARTS = ("Always", "OnFailure", "Never")
_PULLS = ("Always", "IfNotPresent", "Never")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_NOT_FOR_EPHEMERAL = {*_PROBES, "ports", "resources", "resizePolicy", "restartPolicy", "lifecycle"}
_UPDATABLE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def check_pod(pod: Object) -> Iterator[Cause]:
    yield from check_spec(pod["spec"], "spec")


def check_spec(spec: Object, path: str) -> Iterator[Cause]:
    """A pod's or a template's spec."""
    containers = spec.get("containers") or []
    if not containers:
        yield required(f"{path}.containers")
    seen: set[str] = set()
    for part in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(part) or []):
            yield from _container(container, f"{path}.{part}[{index}]", seen)
    targets = set(seen)
    for index, container in enumerate(spec.get("ephemeralContainers") or []):
        where = f"{path}.ephemeralContainers[{index}]"
        yield from _container(container, where, seen)
        for field in sorted(_NOT_FOR_EPHEMERAL & {key for key, value in container.items() if value}):
            yield forbidden_value(f"{where}.{field}", "cannot be set for an Ephemeral Container")
        if (target := container.get("targetContainerName")) and target not in targets:
            yield not_found_value(f"{where}.targetContainerName", target)
    if spec.get("restartPolicy") not in _RESTARTS:
        yield unsupported(f"{path}.restartPolicy", spec.get("restartPolicy"), _RESTARTS)
    if spec.get("terminationGracePeriodSeconds", 0) < 0:
        value = spec["terminationGracePeriodSeconds"]
        yield invalid_value(
            f"{path}.terminationGracePeriodSeconds", value, "must be greater than or equal to 0"
        )
    for part in ("limits", "requests"):
        for name in (spec.get("resources") or {}).get(part) or {}:
            if name not in _OF_A_POD and not name.startswith("hugepages-"):
                yield unsupported(f"{path}.resources.{part}[{name}]", name, (*_OF_A_POD, "hugepages-"))
    yield from _volumes(spec, path)


def _container(container: Object, path: str, seen: set[str]) -> Iterator[Cause]:
    name = container.get("name", "")
    if not name:
        yield required(f"{path}.name")
    elif name in seen:
        yield duplicate(f"{path}.name", name)
    else:
        for problem in label_problems(name):
            yield invalid_value(f"{path}.name", name, problem)
    seen.add(name)
    if not container.get("image"):
        yield required(f"{path}.image")
    if container.get("imagePullPolicy") not in _PULLS:
        yield unsupported(f"{path}.imagePullPolicy", container.get("imagePullPolicy"), _PULLS)
    for index, variable in enumerate(container.get("env") or []):
        if not variable.get("name"):
            yield required(f"{path}.env[{index}].name")
    for index, port in enumerate(container.get("ports") or []):
        if not 0 < port.get("containerPort", 0) < 65536:
            where = f"{path}.ports[{index}].containerPort"
            yield invalid_value(where, port.get("containerPort", 0), "must be between 1 and 65535, inclusive")
    yield from _resources(container.get("resources") or {}, f"{path}.resources")


def _resources(resources: Object, path: str) -> Iterator[Cause]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for part, amounts in (("limits", limits), ("requests", requests)):
        for name, quantity in amounts.items():
            yield from _amount(name, quantity, f"{path}.{part}[{name}]")
    # A request may not pass its limit, and must be its limit where nothing may be over-committed
    for name, quantity in requests.items():
        exact = is_extended(name) or name.startswith("hugepages-")
        limit = limits.get(name)
        if limit is None:
            if exact:
                yield required(f"{path}.limits", "Limit must be set for non overcommitable resources")
            continue
        asked, allowed = parse_quantity(quantity), parse_quantity(limit)
        if exact and asked != allowed:
            yield invalid_value(f"{path}.requests", quantity, f"must be equal to {name} limit of {limit}")
        elif asked > allowed:
            text = f"must be less than or equal to {name} limit of {limit}"
            yield invalid_value(f"{path}.requests", quantity, text)


def _amount(name: str, quantity: str, path: str) -> Iterator[Cause]:
    if not (name in _STANDARD or name.startswith("hugepages-") or "/" in name):
        yield invalid_value(path, name, "must be a standard resource type or fully qualified")
        yield invalid_value(path, name, "must be a standard resource for containers")
        return
    for problem in key_problems(name):
        yield invalid_value(path, name, problem)
    value = parse_quantity(quantity)
    if value < 0:
        yield invalid_value(path, quantity, "must be greater than or equal to 0")
    if is_extended(name) and value != value.to_integral_value():
        yield invalid_value(path, quantity, "must be an integer")


def is_extended(name: str) -> bool:
    """Counted by somebody else than Kubernetes: whole, and never over-committed."""
    return "/" in name and not name.split("/", maxsplit=1)[0].endswith("kubernetes.io")


def _volumes(spec: Object, path: str) -> Iterator[Cause]:
    names: set[str] = set()
    for index, volume in enumerate(spec.get("volumes") or []):
        name = volume.get("name", "")
        if not name:
            yield required(f"{path}.volumes[{index}].name")
        elif name in names:
            yield duplicate(f"{path}.volumes[{index}].name", name)
        names.add(name)
    for part in ("initContainers", "containers", "ephemeralContainers"):
        for number, container in enumerate(spec.get(part) or []):
            for index, mount in enumerate(container.get("volumeMounts") or []):
                where = f"{path}.{part}[{number}].volumeMounts[{index}]"
                if mount.get("name") not in names:
                    yield not_found_value(f"{where}.name", mount.get("name", ""))
                if not mount.get("mountPath"):
                    yield required(f"{where}.mountPath")


def check_pod_update(old: Object, new: Object) -> Iterator[Cause]:
    """Only images, deadlines, more tolerations, fewer gates; the node is set by binding alone."""
    if old["spec"] == new["spec"]:
        return
    held = copy.deepcopy(old["spec"])
    wanted = copy.deepcopy(new["spec"])
    gates_held = {gate["name"] for gate in held.pop("schedulingGates", [])}
    gates = {gate["name"] for gate in wanted.pop("schedulingGates", [])}
    if gates - gates_held:
        text = "only deletion is allowed, but found new scheduling gate"
        yield forbidden_value("spec.schedulingGates", f"{text} '{sorted(gates - gates_held)[0]}'")
    if any(item not in wanted.get("tolerations", []) for item in held.get("tolerations", [])):
        yield forbidden_value(
            "spec.tolerations", "existing toleration can not be modified except its tolerationSeconds"
        )
    if gates_held:
        _ignore(held, wanted, "nodeSelector", "affinity")
    _ignore(held, wanted, "tolerations", "activeDeadlineSeconds")
    for spec in (held, wanted):
        for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
            container.pop("image", None)
    if held != wanted:
        yield forbidden_value("spec", _UPDATABLE)


def check_ephemeral_update(old: Object, new: Object) -> Iterator[Cause]:
    """More of them, and none that is there removed or changed."""
    wanted = {each.get("name"): each for each in new["spec"].get("ephemeralContainers") or []}
    for each in old["spec"].get("ephemeralContainers") or []:
        if each != wanted.get(each["name"]):
            what = "changed" if each["name"] in wanted else "removed"
            why = f'existing ephemeral containers "{each["name"]}" may not be {what}'
            yield forbidden_value("spec.ephemeralContainers", why)


def check_pod_resize(old: Object, new: Object) -> Iterator[Cause]:
    """CPU and memory of app containers and sidecars may change (``ValidatePodResize``, 1.36)."""
    if MIRROR in (old["metadata"].get("annotations") or {}):
        yield forbidden_value("", "static pods cannot be resized")
        return
    for part in ("containers", "initContainers"):
        held, wanted = old["spec"].get(part) or [], new["spec"].get(part) or []
        if [each["name"] for each in held] != [each.get("name") for each in wanted]:
            yield forbidden_value("spec", f"{part} may not be renamed or reordered on resize")
            return
    if quality(old["spec"]) != quality(new["spec"]):
        what = "Pod QOS Class may not change as a result of resizing"
        yield invalid_value("spec", quality(new["spec"]), what)
    for part, what in (
        ("containers", "only cpu and memory resources are mutable"),
        ("initContainers", "only cpu and memory resources for sidecar containers are mutable"),
    ):
        for index, (before, after) in enumerate(
            zip(old["spec"].get(part) or [], new["spec"].get(part) or [], strict=True)
        ):
            if part == "initContainers" and before.get("restartPolicy") != "Always":
                if before != after:
                    yield forbidden_value("spec", "resources for non-sidecar init containers are immutable")
                continue
            held, wanted = before.get("resources") or {}, after.get("resources") or {}
            for kind in ("requests", "limits"):
                if (held.get(kind) or {}).keys() - (wanted.get(kind) or {}).keys():
                    where = f"spec.{part}[{index}].resources.{kind}"
                    yield forbidden_value(where, f"resource {kind} cannot be removed")
            if _fixed(held) != _fixed(wanted):
                yield forbidden_value("spec", what)


def _fixed(resources: Object) -> list[Object]:
    """What no resize may change of a container's resources."""
    kept: list[Object] = [{"claims": resources.get("claims")}]
    for part in ("requests", "limits"):
        amounts = resources.get(part) or {}
        kept.append({name: amount for name, amount in amounts.items() if name not in ("cpu", "memory")})
    return kept


def _ignore(held: Object, wanted: Object, *fields: str) -> None:
    for field in fields:
        held.pop(field, None)
        wanted.pop(field, None)
