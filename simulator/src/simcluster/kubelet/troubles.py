"""What is wrong with a machine for a while, so that its kubelet lets no pod start. A test sets it."""

from __future__ import annotations

from dataclasses import dataclass, field

from simcluster.cluster.amounts import Object, pod_requests

CRITICAL = 2_000_000_000
"""The priority from which on a pod is critical: neither pressure nor a shutdown keeps it away."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a pod cannot run here, for good; `reason` is one word."""

    reason: str
    message: str


@dataclass(slots=True)
class Troubles:
    """`pressure`: node conditions such as DiskPressure. `handler`: another admit handler rejects all."""

    pressure: set[str] = field(default_factory=set)
    shutting_down: bool = False
    handler: Rejection | None = None

    def keep_away(self, pod: Object) -> Rejection | None:
        """In the order and with the words of kubelet 1.36."""
        critical = (pod["spec"].get("priority") or 0) >= CRITICAL
        counts = {each for each in self.pressure if each != "MemoryPressure" or not pod_requests(pod)}
        if counts and not critical:
            return Rejection("Evicted", f"The node had condition: [{' '.join(sorted(counts))}]. ")
        if self.shutting_down and not critical:
            return Rejection("NodeShutdown", "Pod was rejected as the node is shutting down.")
        return self.handler
