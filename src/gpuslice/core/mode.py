"""How a node's labels want its cards given out: read the same way by the agent, the extender and `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuslice.core.contract import LABEL_MODE, LABEL_NO_ISOLATION, LABEL_SCHEDULE, LABEL_SHARED
from gpuslice.core.model import NodeMode

CORE_MEM = "core_mem"  # shared by memory and compute
SCHEDULES = frozenset({"cgpu", "share", CORE_MEM, "default"})
"""The values of label ``ack.node.gpu.schedule`` that mean something here; any other counts as absent."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How the node's labels want its cards given out. `divides_compute`: compute is shared out as well."""

    mode: NodeMode = NodeMode.SHARED
    divides_compute: bool = False

    @property
    def isolation(self) -> bool:
        return self.mode is NodeMode.SHARED

    @property
    def shared(self) -> bool:
        return self.mode is not NodeMode.EXCLUSIVE


def rules_of(labels: Mapping[str, str]) -> Rules:
    """The rules by our label (``gpuslice.io/mode``) and the vendor's: ``cgpu``, ``ack.node.gpu.schedule``.

    Ours says it all and wins; a value that is none of the modes counts as absent. The old isolation switch
    wins over the new label, because it is the more particular one. A node without any of the labels is
    shared: somebody started the agent there.
    """
    schedule = labels.get(LABEL_SCHEDULE, "")
    own = labels.get(LABEL_MODE, "")
    if own in list(NodeMode):
        return Rules(NodeMode(own), divides_compute=schedule == CORE_MEM)
    if labels.get(LABEL_SHARED) == "false" or schedule == "default":
        return Rules(NodeMode.EXCLUSIVE)
    switch = labels.get(LABEL_NO_ISOLATION)
    without = switch == "true" or (switch is None and schedule == "share")
    mode = NodeMode.SHARED_WITHOUT_ISOLATION if without else NodeMode.SHARED
    return Rules(mode, divides_compute=schedule == CORE_MEM)
