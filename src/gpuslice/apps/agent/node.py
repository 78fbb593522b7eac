"""What this node gives out: its cards cut into units, and by which rules its labels want them used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuslice.adapters.gpu.source import Card
from gpuslice.core.contract import (
    GPU_MEM,
    LABEL_MODE,
    LABEL_NO_ISOLATION,
    LABEL_SCHEDULE,
    LABEL_SHARED,
    device_id,
)
from gpuslice.core.errors import GpusliceError
from gpuslice.core.model import Gpu, NodeMode
from gpuslice.core.units import UNIT_MIB, card_units

MOST_LIST_BYTES = 4 * 1024 * 1024
"""gRPC's limit for one message in kubelet; ListAndWatch has to name every device in one."""

_ENTRY_BYTES = 20  # tags, lengths, "Unhealthy" and some room, beside the id itself


class TooManyUnitsError(GpusliceError):
    """The cards in this unit are more devices than kubelet can be told of."""


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
        return Rules(NodeMode(own), divides_compute=schedule == "core_mem")
    if labels.get(LABEL_SHARED) == "false" or schedule == "default":
        return Rules(NodeMode.EXCLUSIVE)
    switch = labels.get(LABEL_NO_ISOLATION)
    without = switch == "true" or (switch is None and schedule == "share")
    mode = NodeMode.SHARED_WITHOUT_ISOLATION if without else NodeMode.SHARED
    return Rules(mode, divides_compute=schedule == "core_mem")


def memory_unit(wanted: str) -> tuple[str, str]:
    """The unit to use and a warning where `wanted` is none: the vendor's plugin falls back to GiB as well."""
    if wanted in UNIT_MIB:
        return wanted, ""
    return "GiB", f'memory unit "{wanted}" is unknown, wants {" or ".join(UNIT_MIB)}; using GiB'


def cut(cards: Iterable[Card], unit: str) -> tuple[Gpu, ...]:
    """Each card in its own number of units, in index order. Raises `TooManyUnitsError`."""
    gpus = tuple(
        Gpu(card.index, card.uuid, card.memory_mib, card_units(card.memory_mib, unit), card.model)
        for card in sorted(cards, key=lambda card: card.index)
    )
    size_bytes = sum(gpu.units * (len(gpu.uuid) + 8 + _ENTRY_BYTES) for gpu in gpus)
    if size_bytes > MOST_LIST_BYTES:
        units = sum(gpu.units for gpu in gpus)
        raise TooManyUnitsError(
            f"{units} devices of {GPU_MEM} in units of 1 {unit} are about {size_bytes // 1024} KiB, "
            f"and kubelet takes {MOST_LIST_BYTES // 1024} KiB at once; use --memory-unit=GiB"
        )
    return gpus


def device_ids(gpu: Gpu) -> list[str]:
    """The kubelet device ids of a card, unit by unit."""
    return [device_id(gpu.uuid, unit) for unit in range(gpu.units)]
