"""Finds and opens the trace files that `gpuslice.core.policy.trace` reads."""

from __future__ import annotations

from pathlib import Path

from gpuslice.core.policy.fleet import FleetNode
from gpuslice.core.policy.trace import Trace, read_nodes, read_pods

NODES_FILE = "openb_node_list_gpu_node.csv"
PODS_FILE = "openb_pod_list_{name}.csv"


def find_pods(name: str, data: Path) -> Path:
    """The pod list `name`: a file, or a name in the folder `data`; FileNotFoundError says what there is."""
    for path in (Path(name), data / name, data / PODS_FILE.format(name=name)):
        if path.is_file():
            return path
    known = ", ".join(trace_names(data)) or "none"
    raise FileNotFoundError(f'no trace "{name}": not a file, and {data} has these: {known}')


def find_nodes(pods: Path, data: Path, nodes: str | None) -> Path:
    """The node list that belongs to a pod list: as said, or beside it, or in the folder `data`."""
    places = [Path(nodes)] if nodes else [pods.parent / NODES_FILE, data / NODES_FILE]
    for path in places:
        if path.is_file():
            return path
    looked = " and ".join(str(path) for path in places)
    raise FileNotFoundError(f"no node list for {pods}: looked for {looked}; --nodes names one")


def trace_names(data: Path) -> list[str]:
    """The traces of a folder by their short names."""
    before, after = PODS_FILE.split("{name}")
    return sorted(path.name[len(before) : -len(after)] for path in data.glob(PODS_FILE.format(name="*")))


def load_pods(path: Path) -> Trace:
    """Read a pod list."""
    with path.open(encoding="utf-8", newline="") as lines:
        return read_pods(lines, path.name)


def load_nodes(path: Path) -> list[FleetNode]:
    """Read a node list."""
    with path.open(encoding="utf-8", newline="") as lines:
        return read_nodes(lines, path.name)
