"""Where a card sits in its machine, from the kernel's sysfs: its PCI root and its NUMA node."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from gpuslice.core.claims import CardLocation

SYSFS = Path("/sys")
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


def location(pci_bus_id: str, sysfs: Path = SYSFS) -> CardLocation:
    """The location of a card whose PCI address NVML writes so: ``00000000:16:00.0``.

    The root is what the standard attribute ``resource.kubernetes.io/pcieRoot`` names: ``pci0000:16``.
    """
    domain, separator, rest = pci_bus_id.lower().partition(":")
    if not separator:
        return CardLocation()
    device = sysfs / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    root, numa_node = "", None
    with contextlib.suppress(OSError):
        root = next((part for part in device.resolve().parts if _ROOT.fullmatch(part)), "")
    with contextlib.suppress(OSError, ValueError):
        number = int((device / "numa_node").read_text())
        numa_node = number if number >= 0 else None  # -1 on machines with a single node
    return CardLocation(root, numa_node)
