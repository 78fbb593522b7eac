"""The cluster of ``bench/end_to_end.py`` with claims: ResourceSlices of its nodes, and pods that claim.

The pods are those of the other ways, translated into claims as by the webhook.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from bench.big_api import UNITS
from tests.e2e.cluster import Cluster

from gpuslice.adapters.kube.errors import AlreadyExistsError
from gpuslice.adapters.kube.objects import ResourceClaim
from gpuslice.adapters.kube.resources import RESOURCE_CLAIM_TEMPLATES, RESOURCE_CLAIMS, RESOURCE_SLICES
from gpuslice.adapters.wire.review import pod_form
from gpuslice.core.claim_shape import as_claims, claim_shape, template_spec
from gpuslice.core.claims import Pool
from gpuslice.core.contract import CLAIM_CLASS, CLAIM_DRIVER, CLAIM_MEMORY
from gpuslice.core.model import Card
from gpuslice.core.quantity import whole_number
from gpuslice.core.units import MIB
from gpuslice.diagnosis.doctor.facts import DEVICE_CLASSES

Object = dict[str, Any]
UNIT = "GiB"


async def offer(made: Cluster, nodes: int, cards: int) -> None:
    """Create the class, and what the agents of these nodes publish."""
    selector = {"cel": {"expression": f'device.driver == "{CLAIM_DRIVER}"'}}
    await made.client.create(
        DEVICE_CLASSES, {"metadata": {"name": CLAIM_CLASS}, "spec": {"selectors": [selector]}}
    )
    for number in range(nodes):
        name = f"node-{number:05d}"
        mine = tuple(Card(index, f"GPU-{name}-{index}", UNITS * 1024, UNITS) for index in range(cards))
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec: Object = {"driver": CLAIM_DRIVER, "nodeName": name, "pool": pool}
        spec |= {"devices": Pool(name, mine).devices({})}
        await made.client.create(RESOURCE_SLICES, {"metadata": {"name": f"{name}-0"}, "spec": spec})


async def claiming(made: Cluster, pods: Sequence[Object], scheduler: str) -> list[Object]:
    """The pods with claims instead of amounts; their templates exist."""
    found = []
    for each in pods:
        form = as_claims(pod_form(msgspec.Raw(msgspec.json.encode(each))))
        template = form.claims[0]["resourceClaimTemplateName"]
        shape = claim_shape(template)
        assert shape is not None
        metadata = {"name": template, "namespace": "default"}
        with contextlib.suppress(AlreadyExistsError):
            await made.client.create(
                RESOURCE_CLAIM_TEMPLATES, {"metadata": metadata, "spec": template_spec(shape, UNIT)}
            )
        (container,) = form.containers
        resources = {**each["spec"]["containers"][0]["resources"], "claims": list(container.claims)}
        resources |= {"limits": dict(container.limits), "requests": dict(container.requests)}
        spec = {**each["spec"], "resourceClaims": list(form.claims), "schedulerName": scheduler}
        spec["containers"] = [{**each["spec"]["containers"][0], "resources": resources}]
        found.append({**each, "spec": spec})
    return found


async def overcommitted(made: Cluster) -> list[str]:
    """Cards of which claims were given more than they have."""
    sums: Counter[tuple[str, str]] = Counter()
    for claim in await _claims(made):
        allocation = claim.status.allocation
        for result in (allocation.devices.results if allocation else None) or ():
            memory = whole_number((result.consumed_capacity or {}).get(CLAIM_MEMORY)) or 0
            sums[result.pool, result.device] += memory // (1024 * MIB)
    return [f"card {card}: {units} of {UNITS} units" for card, units in sums.items() if units > UNITS]


async def remove_claims(made: Cluster) -> None:
    """Does a garbage collector's work: none is running, and kube-controller-manager has released them."""
    for claim in await _claims(made):
        if claim.metadata.finalizers:
            patch = {"metadata": {"finalizers": None}}
            await made.client.merge_patch(RESOURCE_CLAIMS, claim.metadata.name, patch, "default")
        await made.client.delete(RESOURCE_CLAIMS, claim.metadata.name, "default")


async def _claims(made: Cluster) -> list[ResourceClaim]:
    return (await made.client.list(RESOURCE_CLAIMS, "default")).items or []
