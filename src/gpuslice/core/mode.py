"""How a node's labels say its cards are given out: read the same way by agent, extender and `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuslice.core.contract import (
    LABEL_COMPUTE_POLICY,
    LABEL_MODE,
    LABEL_NO_ISOLATION,
    LABEL_SCHEDULE,
    LABEL_SHARED,
)
from gpuslice.core.model import NodeMode

CORE_MEM = "core_mem"  # shared by memory and compute
SCHEDULES = frozenset({"cgpu", "share", CORE_MEM, "default"})
"""The values of label ``ack.node.gpu.schedule`` that mean something here; any other counts as absent."""


class ComputePolicy(StrEnum):
    """What a container's percentage of compute means: label ``gpuslice.io/compute-policy``."""

    CAP = "cap"  # the most it may use, as in the vendor's system
    FAIR = "fair"  # what it is entitled to; what nobody uses is lent
    OFF = "off"  # counted by the scheduler and not enforced


@dataclass(frozen=True, slots=True)
class Rules:
    """How the node's labels say its cards are given out. `divides_compute`: compute is divided as well."""

    mode: NodeMode = NodeMode.SHARED
    divides_compute: bool = False
    compute_policy: ComputePolicy = ComputePolicy.CAP

    @property
    def limits_compute(self) -> bool:
        """Whether containers may have a share of compute that the library enforces."""
        policy = self.compute_policy
        return policy is ComputePolicy.FAIR or (self.divides_compute and policy is ComputePolicy.CAP)

    @property
    def isolation(self) -> bool:
        return self.mode in (NodeMode.SHARED, NodeMode.CLAIMS)

    @property
    def shared(self) -> bool:
        """Whether parts of cards are given out as an extended resource."""
        return self.mode in (NodeMode.SHARED, NodeMode.SHARED_WITHOUT_ISOLATION)

    @property
    def claims(self) -> bool:
        """Whether parts of cards are given out by claims."""
        return self.mode is NodeMode.CLAIMS


def wants_agent(labels: Mapping[str, str], shared_label: str) -> bool:
    """Whether the chart's DaemonSets run an agent there: by one label, or by ACK's alone."""
    switch, schedule = labels.get(shared_label), labels.get(LABEL_SCHEDULE)
    return switch == "true" or (switch != "false" and schedule in SCHEDULES and schedule != "default")


def rules_of(labels: Mapping[str, str]) -> Rules:
    """The rules by our label (``gpuslice.io/mode``) and the vendor's: ``cgpu``, ``ack.node.gpu.schedule``.

    Ours is complete and wins; a value that is not a mode counts as absent. The old isolation switch wins over
    the new label, because it is more specific. A node without any of the labels is shared, since somebody
    started the agent there.
    """
    schedule = labels.get(LABEL_SCHEDULE, "")
    own = labels.get(LABEL_MODE, "")
    text = labels.get(LABEL_COMPUTE_POLICY, "")
    policy = ComputePolicy(text) if text in list(ComputePolicy) else ComputePolicy.CAP
    if own == NodeMode.CLAIMS:  # a claim itself says whether it wants compute
        return Rules(NodeMode.CLAIMS, policy is not ComputePolicy.OFF, policy)
    if own in list(NodeMode):
        return Rules(NodeMode(own), schedule == CORE_MEM, policy)
    if labels.get(LABEL_SHARED) == "false" or schedule == "default":
        return Rules(NodeMode.EXCLUSIVE)
    switch = labels.get(LABEL_NO_ISOLATION)
    without = switch == "true" or (switch is None and schedule == "share")
    mode = NodeMode.SHARED_WITHOUT_ISOLATION if without else NodeMode.SHARED
    return Rules(mode, schedule == CORE_MEM, policy)
