"""Finds the traces of a data folder by name."""

from __future__ import annotations

from pathlib import Path

PODS_FILE = "openb_pod_list_{name}.csv"


def find_pods(name: str, data: Path) -> Path:
    """The pod list `name`: a file, or a name in the folder `data`; FileNotFoundError lists what exists."""
    for path in (Path(name), data / name, data / PODS_FILE.format(name=name)):
        if path.is_file():
            return path
    known = ", ".join(trace_names(data)) or "none"
    raise FileNotFoundError(f'no trace "{name}": not a file, and {data} has these: {known}')


def trace_names(data: Path) -> list[str]:
    """The traces of a folder by their short names."""
    before, after = PODS_FILE.split("{name}")
    return sorted(path.name[len(before) : -len(after)] for path in data.glob(PODS_FILE.format(name="*")))
