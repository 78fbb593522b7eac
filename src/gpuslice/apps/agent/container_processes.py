"""The processes of containers: what the driver says of them is published, the library's accounts are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from gpuslice.adapters.region.figures import Figure, write_figures
from gpuslice.adapters.region.living import Identity
from gpuslice.adapters.region.reader import RegionError, read_region
from gpuslice.apps.agent.folders import Folders

ContainerName = tuple[str, str]
"""The pod's uid and the container's name."""


def publish(folders: Folders, figures: Mapping[ContainerName, Sequence[Figure]], at_ns: int) -> None:
    """What the driver says of each container's processes, read at monotonic `at_ns`. Raises OSError."""
    for place, folder in folders.of_containers().items() if figures else ():
        if own := figures.get(place):
            write_figures(folder / "etc" / "figures", own, at_ns)


def counted(folders: Folders, names: Iterable[ContainerName]) -> dict[ContainerName, frozenset[Identity]]:
    """The processes of which the library keeps accounts.

    A container whose region cannot be read is left out: nothing is known of it.
    """
    known, found = folders.of_containers(), {}
    for name in names:
        with contextlib.suppress(RegionError, OSError, KeyError):
            reading = read_region(known[name] / "var" / "region")
            processes = (each for card in (reading.cards if reading else ()) for each in card.processes)
            found[name] = frozenset(Identity(each.pid, each.start_time) for each in processes)
    return found
