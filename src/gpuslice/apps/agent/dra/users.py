"""Which containers of a pod use a claim, and which of its requests each has."""

from __future__ import annotations

from dataclasses import dataclass

from gpuslice.adapters.kube.objects import ResourceClaim
from gpuslice.apps.agent.pods import AgentPod, hiding_in
from gpuslice.core.contract import CLAIM_DRIVER


@dataclass(frozen=True, slots=True)
class User:
    """A container that uses requests of a claim."""

    namespace: str
    pod: str
    uid: str
    container: str
    requests: frozenset[str]
    hiding: str  # what is wrong about its mounts


def users_of(pod: AgentPod, claim: ResourceClaim) -> list[User]:
    """The pod's containers that use `claim`, with the requests of it that each uses.

    A container that names no request uses all of the claim's that are ours.
    """
    meta, spec = pod.metadata, pod.spec
    results = (claim.status.allocation.devices.results if claim.status.allocation else None) or ()
    every = {each.request for each in results if each.driver == CLAIM_DRIVER}
    uses = [each for each in pod.used_requests if each.claim == claim.metadata.name]
    users = []
    for container in [*(spec.init_containers or ()), *spec.containers]:
        wanted = {each.request for each in uses if each.container == container.name}
        used = frozenset(one for one in every if wanted & {"", one, one.partition("/")[0]})
        if used:
            users.append(
                User(meta.namespace, meta.name, meta.uid, container.name, used, hiding_in(container))
            )
    return users
