"""Opens trace files: a list of pods and a list of nodes, as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gpuslice.core.errors import GpusliceError
from gpuslice.core.policy.fleet import FleetNode
from gpuslice.core.simulation.trace import Trace, read_nodes, read_pods


class UnreadableTraceError(GpusliceError):
    """The file is not a CSV file; the message names it."""


NODES_FILE = "openb_node_list_gpu_node.csv"


def load_pods(path: Path) -> Trace:
    """Read a list of pods."""
    with _opened(path) as lines:
        return read_pods(lines, path.name)


def load_nodes(path: Path) -> list[FleetNode]:
    """Read a list of nodes."""
    with _opened(path) as lines:
        return read_nodes(lines, path.name)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        try:
            yield lines
        except (UnicodeDecodeError, csv.Error) as error:
            raise UnreadableTraceError(f"{path} is no CSV file in UTF-8: {error}") from None


def find_nodes(pods: Path, nodes: Path | None, *more: Path) -> Path:
    """The node list that belongs to a pod list: the given one, or one beside it, or one in the `more`
    folders.
    """
    places = [nodes] if nodes else [folder / NODES_FILE for folder in (pods.parent, *more)]
    for path in places:
        if path.is_file():
            return path
    looked = " and ".join(map(str, places))
    raise FileNotFoundError(f"no node list for {pods}: looked for {looked}; --nodes names one")
