"""The sentence of a FailedScheduling event, as kube-scheduler 1.36 writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from simcluster.scheduler.filters import Failure

NO_HELP = "Preemption is not helpful for scheduling"
NO_VICTIMS = "No preemption victims found for incoming pod"


NOTHING_CLAIMED, CLAIMS_STAY = "no new claims to deallocate", "still not schedulable"


def fit_error(nodes: int, failures: Mapping[str, Failure], *, claims: bool = False) -> str:
    """`nodes`: the number of nodes; `failures`: why each of them is not suitable, by node name.

    `claims`: whether the pod has any.
    """
    if nodes == 0:
        return "no nodes available to schedule pods"
    reasons = Counter(reason for failure in failures.values() for reason in failure.reasons)
    head = _available(nodes, _histogram(reasons))
    deallocation = CLAIMS_STAY if claims else NOTHING_CLAIMED
    # a node that is not named counts as one where evicting pods cannot help
    candidates = sum(not failure.unresolvable for failure in failures.values())
    preemption = _histogram(Counter({NO_VICTIMS: candidates, NO_HELP: nodes - candidates}))
    return f"{head} {deallocation}, preemption: {_available(nodes, preemption)}"


def _histogram(counts: Mapping[str, int]) -> list[str]:
    return sorted(f"{count} {reason}" for reason, count in counts.items() if count)


def _available(nodes: int, parts: Iterable[str]) -> str:
    listed = ", ".join(parts)
    return f"0/{nodes} nodes are available: {listed}." if listed else f"0/{nodes} nodes are available:"
