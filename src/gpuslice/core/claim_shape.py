"""Unchanged manifests as claims: what a pod's containers ask for, in the name of a ResourceClaimTemplate.

A policy of the API server, or our webhook before Kubernetes 1.36, turns ``aliyun.com/gpu-mem: 4`` of a new
pod into a reference to a template. It cannot create the template, so the name says what must be in it:
``gpuslice-4c25.2`` is for a pod with two containers on one card, 4 units and 25 percent, and 2 units;
``gpuslice-8-x2`` is for one with 8 units on two cards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from gpuslice.core.claims import memory_quantity
from gpuslice.core.contract import (
    AMOUNT_NAMES,
    CLAIM_CLASS,
    CLAIM_COMPUTE,
    CLAIM_DRIVER,
    CLAIM_MEMORY,
    GPU_CORE,
    GPU_COUNT,
    GPU_MEM,
    LABEL_CLAIMED,
)
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import MIRROR, PodForm, without
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import RIGHT_UNITS, ContainerSpec, pod_request

TEMPLATE_PREFIX = "gpuslice-"
CLAIM_NAME = "gpuslice"  # of the claim within the pod
_NAME = re.compile(r"gpuslice-(?P<containers>[0-9a-z.]+)(?:-x(?P<count>[0-9a-z]+))?")
_CONTAINER = re.compile(r"(?P<memory>\d+k?)(?:c(?P<compute>\d+))?")
MOST_REQUESTS = 32  # of one claim


@dataclass(frozen=True, slots=True)
class ClaimShape:
    """What each asking container wants, in units and percent, and on how many cards."""

    containers: tuple[tuple[int, int], ...]
    card_count: int = 1


def claim_shape(template: str) -> ClaimShape | None:
    """What a template of this name is for; None for names that are not ours.

    Raises `InvalidRequestError` for what can never be given, with the message for the same request without
    claims.
    """
    named = _NAME.fullmatch(template)
    if named is None:
        return None
    specs = []
    for index, text in enumerate(named["containers"].split(".")):
        part = _CONTAINER.fullmatch(text)
        limits: dict[str, object] = {GPU_MEM: part["memory"] if part else text}
        if part and part["compute"]:
            limits[GPU_CORE] = part["compute"]
        specs.append(ContainerSpec(f"#{index}", index, limits))
    for spec in specs:
        if whole_number(spec.limits[GPU_MEM]) == 0:  # no pod gets a claim for nothing
            raise InvalidRequestError(f'container "{spec.name}": limits["{GPU_MEM}"]', "0", RIGHT_UNITS)
    request = pod_request(specs, {GPU_COUNT: named["count"]} if named["count"] else {})
    assert request is not None  # every container asks for memory
    if request.card_count > 1 and len(specs) > 1:
        must_be = "1, or asked for by a pod of one asking container: claims spread a container over cards"
        raise InvalidRequestError(f'label "{GPU_COUNT}"', request.card_count, must_be)
    if len(specs) > MOST_REQUESTS or request.card_count > MOST_REQUESTS:
        raise InvalidRequestError("pod", template, f"at most {MOST_REQUESTS} parts of cards in one claim")
    return ClaimShape(
        tuple((each.units, each.compute_percent) for each in request.containers), request.card_count
    )


def as_claims(pod: PodForm) -> PodForm:
    """The pod with one claim instead of what its containers ask for, as the chart's policy makes it.

    Pods with asking init containers are left as they are, because a claim is held for the pod's life; so are
    pods with claims of their own. Raises `InvalidRequestError` for what can never be given.
    """
    asking = [each for each in pod.containers if each.asks]
    if not asking or pod.claims or MIRROR in pod.annotations:
        return pod
    if any(each.shelf != "containers" for each in asking) or (request := pod.request) is None:
        return pod
    names = request.names
    parts = []
    for each in asking:
        compute = f"c{whole_number(each.limits[names.compute])}" if names.compute in each.limits else ""
        parts.append(f"{whole_number(each.limits.get(names.memory, 0))}{compute}")
    count = f"-x{pod.labels[names.cards]}" if names.cards in pod.labels else ""
    template = f"{TEMPLATE_PREFIX}{'.'.join(parts)}{count}"
    claim_shape(template)  # reports immediately what an event would otherwise report later
    uses = {each.index: {"name": CLAIM_NAME, "request": f"c{at}"} for at, each in enumerate(asking)}
    containers = tuple(
        replace(
            each,
            limits=without(each.limits, AMOUNT_NAMES),
            requests=without(each.requests, AMOUNT_NAMES),
            claims=(uses[each.index],),
        )
        if each.asks
        else each
        for each in pod.containers
    )
    claims = ({"name": CLAIM_NAME, "resourceClaimTemplateName": template},)
    return replace(pod, containers=containers, claims=claims, labels={**pod.labels, LABEL_CLAIMED: "true"})


def template_spec(shape: ClaimShape, unit: str) -> dict[str, Any]:
    """The claim: a request for each container, all on one card, or one request for several cards."""
    requests = []
    for index, (units, percent) in enumerate(shape.containers):
        capacity = {CLAIM_MEMORY: memory_quantity(units // shape.card_count, unit)}
        if percent:
            capacity[CLAIM_COMPUTE] = str(percent)
        exactly: dict[str, Any] = {"deviceClassName": CLAIM_CLASS, "capacity": {"requests": capacity}}
        if shape.card_count > 1:
            exactly |= {"allocationMode": "ExactCount", "count": shape.card_count}
        requests.append({"name": f"c{index}", "exactly": exactly})
    devices: dict[str, Any] = {"requests": requests}
    if len(requests) > 1 or shape.card_count > 1:
        names = [each["name"] for each in requests]
        # otherwise kube-scheduler 1.34 gives a request for several devices the same one several times
        rule = "matchAttribute" if shape.card_count == 1 else "distinctAttribute"
        devices["constraints"] = [{"requests": names, rule: f"{CLAIM_DRIVER}/uuid"}]
    return {"spec": {"devices": devices}}
