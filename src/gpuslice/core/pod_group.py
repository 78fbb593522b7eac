"""Pods that must start together or not at all, by their labels.

The labels are those of kubernetes-sigs' coscheduling, which the vendor's scheduler and others read as well.
With Kubernetes' own pod groups (``spec.schedulingGroup``, 1.36) kube-scheduler is responsible, and labels are
not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuslice.core.contract import LABEL_GROUP_MIN, LABEL_GROUP_NAME
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.quantity import whole_number

MOST_MEMBERS = 1000


@dataclass(frozen=True, slots=True)
class PodGroup:
    """What a pod says about its group, in its namespace: `least` members start, or none."""

    name: str
    least: int


def pod_group(labels: Mapping[str, str] | None) -> PodGroup | None:
    """The group that these labels name; None if they name none, or only half of one.

    Raises `InvalidRequestError`.
    """
    name, least = (labels or {}).get(LABEL_GROUP_NAME), (labels or {}).get(LABEL_GROUP_MIN)
    if not name or least is None:
        return None
    count = whole_number(least)
    if count is None or not 1 <= count <= MOST_MEMBERS:
        must_be = f'a whole number of pods, 1 to {MOST_MEMBERS}: of group "{name}" so many start together'
        raise InvalidRequestError(f'metadata.labels["{LABEL_GROUP_MIN}"]', least, must_be)
    return PodGroup(name, count)
