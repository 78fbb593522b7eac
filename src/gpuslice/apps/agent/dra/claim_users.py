"""The containers that use a claim, as their pods say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuslice.adapters.kube.objects import ResourceClaim
from gpuslice.core.container_files import hiding_mount
from gpuslice.core.contract import CLAIM_DRIVER


@dataclass(frozen=True, slots=True)
class ClaimUser:
    """A container that uses requests of a claim."""

    namespace: str
    pod: str
    uid: str
    container: str
    requests: frozenset[str]
    other_claims: frozenset[str]
    hiding: str  # what is wrong about its mounts


def users_of(pod: dict[str, Any], claim: ResourceClaim) -> list[ClaimUser]:
    """The pod's containers that use `claim`, with the requests of it that each uses.

    A container that names no request uses all of the claim's that are ours.
    """
    spec, meta = pod["spec"], pod["metadata"]
    made = {
        each["name"]: each.get("resourceClaimName")
        for each in pod.get("status", {}).get("resourceClaimStatuses") or ()
    }
    claims = {
        each["name"]: each.get("resourceClaimName") or made.get(each["name"]) or ""
        for each in spec.get("resourceClaims") or ()
    }
    allocation = claim.status.allocation
    results = (allocation.devices.results if allocation else None) or ()
    every = {each.request for each in results if each.driver == CLAIM_DRIVER}
    users = []
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        used: set[str] = set()
        others: set[str] = set()
        for each in (container.get("resources") or {}).get("claims") or ():
            name = claims.get(each["name"], "")
            if name != claim.metadata.name:
                others.add(name)
            else:
                wanted = each.get("request", "")
                used |= {one for one in every if wanted in ("", one, one.partition("/")[0])}
        if used:
            users.append(
                ClaimUser(
                    meta["namespace"],
                    meta["name"],
                    meta["uid"],
                    container["name"],
                    frozenset(used),
                    frozenset(others),
                    hiding_mount(
                        container["name"],
                        container.get("volumeMounts"),
                        container.get("volumeDevices"),
                        container.get("terminationMessagePath"),
                    ),
                )
            )
    return users
