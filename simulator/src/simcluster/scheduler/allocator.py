"""Structured parameters: which devices of a node a pod's claims are given, as by kube-scheduler's allocator.

Devices are taken in the order of the ResourceSlices, the first that fits, with backtracking if a later
request then finds none. If a device may be allocated several times, each request consumes capacity according
to the device's policy. Only selectors of the form ``device.driver == "…"`` are supported: others need CEL.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcluster.cluster.amounts import Object
from simcluster.cluster.quantity import parse_quantity
from simcluster.controllers.placement import tolerates

_DRIVER = re.compile(r'\s*device\.driver\s*==\s*"([^"]+)"\s*')
DeviceKey = tuple[str, str, str]  # driver, pool, name


class AllocatorError(Exception):
    """The claim cannot be evaluated: it names a missing class, or uses something unsupported here."""


@dataclass(frozen=True, slots=True)
class Device:
    key: DeviceKey
    document: Object

    @property
    def shared(self) -> bool:
        return bool(self.document.get("allowMultipleAllocations"))

    def attribute(self, name: str) -> Any:
        """Its value; a name without a domain, or with the driver's, is one of the driver."""
        attributes = self.document.get("attributes") or {}
        domain, _, rest = name.rpartition("/")
        found = attributes.get(name) or (attributes.get(rest) if domain == self.key[0] else None)
        return None if found is None else tuple(found.items())


@dataclass(frozen=True, slots=True)
class Wanted:
    """One device that a claim requests. `claim` is its position among the pod's claims to allocate."""

    claim: int
    request: str
    spec: Object
    drivers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Taken:
    wanted: Wanted
    device: Device
    consumed: Mapping[str, str]

    def as_result(self) -> dict[str, Any]:
        driver, pool, name = self.device.key
        result: dict[str, Any] = {
            "request": self.wanted.request,
            "driver": driver,
            "pool": pool,
            "device": name,
        }
        if self.wanted.spec.get("adminAccess"):
            result["adminAccess"] = True
        if not self.device.shared:
            return result
        return {**result, "shareID": str(uuid.uuid4()), "consumedCapacity": dict(self.consumed)}


def devices_of(slices: Iterable[Object], node: str) -> list[Device]:
    """The node's devices, from pools whose newest generation is complete."""
    pools: dict[tuple[str, str], list[Object]] = {}
    for each in sorted(slices, key=lambda one: str(one["metadata"]["name"])):
        if each["spec"].get("nodeName") == node:
            pools.setdefault((each["spec"]["driver"], each["spec"]["pool"]["name"]), []).append(each)
    found = []
    for (driver, pool), parts in pools.items():
        newest = max(part["spec"]["pool"]["generation"] for part in parts)
        current = [part["spec"] for part in parts if part["spec"]["pool"]["generation"] == newest]
        if len(current) == current[0]["pool"]["resourceSliceCount"]:
            listed = itertools.chain.from_iterable(spec.get("devices") or () for spec in current)
            found += [Device((driver, pool, device["name"]), device) for device in listed]
    return found


def wanted_of(claims: Sequence[Object], classes: Mapping[str, Object]) -> list[list[list[Wanted]]]:
    """For each request the devices that it needs, one list for each alternative, the best first.

    Raises AllocatorError.
    """
    parts: list[list[list[Wanted]]] = []
    for position, claim in enumerate(claims):
        for request in claim["spec"].get("devices", {}).get("requests") or ():
            alternatives = [(request["name"], request["exactly"])] if request.get("exactly") else []
            alternatives += [
                (f"{request['name']}/{each['name']}", each) for each in request.get("firstAvailable") or ()
            ]
            parts.append([_devices_wanted(position, name, spec, classes) for name, spec in alternatives])
    return parts


def _devices_wanted(claim: int, name: str, spec: Object, classes: Mapping[str, Object]) -> list[Wanted]:
    class_name = spec["deviceClassName"]
    if class_name not in classes:
        raise AllocatorError(f"request {name}: device class {class_name} does not exist")
    if spec.get("allocationMode", "ExactCount") != "ExactCount":
        raise AllocatorError(f"request {name}: allocationMode {spec['allocationMode']} is not simulated")
    of_class = classes[class_name].get("spec", {}).get("selectors") or ()
    drivers = []
    for selector in [*of_class, *(spec.get("selectors") or ())]:
        expression = (selector.get("cel") or {}).get("expression", "")
        matched = _DRIVER.fullmatch(expression)
        if matched is None:
            raise AllocatorError(f"request {name}: selector {expression} is not simulated")
        drivers.append(matched[1])
    return [Wanted(claim, name, spec, frozenset(drivers))] * spec.get("count", 1)


def allocate(
    claims: Sequence[Object],
    devices: Sequence[Device],
    classes: Mapping[str, Object],
    allocated: Iterable[Object],
) -> list[list[dict[str, Any]]] | None:
    """The results for each claim, or None if they do not all fit. `allocated`: results of other claims.

    Raises AllocatorError.
    """
    others = [each for each in allocated if not each.get("adminAccess")]
    search = _Search(claims, devices, others)
    if not search.place([], wanted_of(claims, classes)):
        return None
    found: list[list[dict[str, Any]]] = [[] for _ in claims]
    for each in search.taken:
        found[each.wanted.claim].append(each.as_result())
    return found


class _Search:
    """Depth-first search: a device for each one requested, request after request."""

    def __init__(
        self, claims: Sequence[Object], devices: Sequence[Device], allocated: Iterable[Object]
    ) -> None:
        self.taken: list[Taken] = []
        self._claims = claims
        self._devices = devices
        self._used: dict[DeviceKey, list[Mapping[str, Any]]] = {}
        for each in allocated:
            key = (each["driver"], each["pool"], each["device"])
            self._used.setdefault(key, []).append(each.get("consumedCapacity") or {})

    def place(self, pending: Sequence[Wanted], following: Sequence[list[list[Wanted]]]) -> bool:
        """`pending` of one request, then the requests `following`, each in one of its alternatives."""
        if not pending:
            choices = following[0] if following else []
            return not following or any(self.place(choice, following[1:]) for choice in choices)
        wanted, *others = pending
        for device in self._devices:
            mine = [each for each in self.taken if each.device.key == device.key]
            consumed = self._consumed(wanted, device, mine) if _may_have(wanted, device, mine) else None
            if consumed is None:
                continue
            self.taken.append(Taken(wanted, device, consumed))
            if self._constraints_hold(wanted.claim) and self.place(others, following):
                return True
            self.taken.pop()
        return False

    def _consumed(self, wanted: Wanted, device: Device, mine: Sequence[Taken]) -> dict[str, str] | None:
        """What the request would consume of the device, in addition to `mine`; None if there is too little.

        Even for admin access, kube-scheduler looks for room in a shared device; once given, it does not
        count.
        """
        held = [*self._used.get(device.key, ()), *(each.consumed for each in mine)]
        requested = (wanted.spec.get("capacity") or {}).get("requests") or {}
        capacity = device.document.get("capacity") or {}
        if not requested.keys() <= capacity.keys():
            return None
        if not device.shared:
            fits = all(_whole(each) <= _whole(capacity[name]["value"]) for name, each in requested.items())
            in_claim = [each for each in mine if each.wanted.claim == wanted.claim]
            taken = in_claim if wanted.spec.get("adminAccess") else held
            return {} if fits and not taken else None
        consumed = {}
        for name, offered in capacity.items():
            amount = consumed_amount(requested.get(name), offered)
            used = sum(_whole(each[name]) for each in held if name in each)
            if amount is None or used + _whole(amount) > _whole(offered["value"]):
                return None
            consumed[name] = amount
        return consumed

    def _constraints_hold(self, claim: int) -> bool:
        for constraint in self._claims[claim]["spec"]["devices"].get("constraints") or ():
            names = set(constraint.get("requests") or ())
            mine = (each for each in self.taken if each.wanted.claim == claim)
            devices = [
                each.device
                for each in mine
                if not names or names & {each.wanted.request, each.wanted.request.partition("/")[0]}
            ]
            same, distinct = constraint.get("matchAttribute"), constraint.get("distinctAttribute")
            values = [device.attribute(same or distinct or "") for device in devices]
            if None in values or (same and len(set(values)) > 1):
                return False
            if distinct and len(set(values)) < len(values):
                return False
        return True


def _may_have(wanted: Wanted, device: Device, mine: Sequence[Taken]) -> bool:
    """The devices of one request must be different ones."""
    asked = [(each.wanted.claim, each.wanted.request) for each in mine]
    fits = wanted.drivers <= {device.key[0]} and (wanted.claim, wanted.request) not in asked
    return fits and _tolerated(wanted.spec, device)


def consumed_amount(requested: Any, offered: Object) -> str | None:
    """By the capacity's policy: rounded up to what is available in one step; None if more is requested."""
    policy = offered.get("requestPolicy") or {}
    if requested is None:
        return str(policy.get("default") or offered["value"])
    amount = _whole(requested)
    if values := policy.get("validValues"):
        larger = [each for each in values if _whole(each) >= amount]
        return str(min(larger, key=_whole)) if larger else None
    if span := policy.get("validRange"):
        least, step = _whole(span["min"]), _whole(span.get("step") or 1)
        rounded = max(least, least + -(-(amount - least) // step) * step)
        if "max" in span and rounded > _whole(span["max"]):
            return None
        return str(requested) if rounded == amount else str(rounded)
    return str(requested)


def _tolerated(spec: Object, device: Device) -> bool:
    hard = [
        each
        for each in device.document.get("taints") or ()
        if each.get("effect") in ("NoSchedule", "NoExecute")
    ]
    return all(any(tolerates(one, taint) for one in spec.get("tolerations") or ()) for taint in hard)


def _whole(quantity: Any) -> int:
    return int(parse_quantity(str(quantity)).to_integral_value("ROUND_CEILING"))
