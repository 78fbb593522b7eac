"""Folders that stand for a machine's cgroups, where it has none that can be used.

`cgroup.procs` names the processes in it, and one that is named nowhere is where its parent is. The dmem
controller counts in a cgroup if the one above passes it on (`cgroup.subtree_control`). What the simulated
driver makes of that: `native/sim/state/limits.c`.
"""

from __future__ import annotations

import shutil
from pathlib import Path


class Cgroups:
    """The tree below `root`. `dmem`: the kernel has that controller, and it is passed on from the root."""

    def __init__(self, root: Path, *, dmem: bool = False) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        (root / "cgroup.controllers").write_text("cpu memory pids" + " dmem" * dmem)
        (root / "cgroup.subtree_control").write_text("cpu memory pids" + " dmem" * dmem)
        (root / "cgroup.procs").touch()

    def make(self, path: str) -> Path:
        """The cgroup of that path below the root, and all above it."""
        place = self.root
        for name in path.strip("/").split("/"):
            above, place = place, place / name
            if place.is_dir():
                continue
            place.mkdir()
            passed_on = (above / "cgroup.subtree_control").read_text()
            for file in ("cgroup.controllers", "cgroup.subtree_control"):
                (place / file).write_text(passed_on)
            (place / "cgroup.procs").touch()
        return place

    def remove(self, path: str) -> None:
        """The cgroup and all below it, which must be empty in reality and need not be here."""
        shutil.rmtree(self.root / path.strip("/"), ignore_errors=True)


def join(cgroup: Path, pid: int) -> None:
    """Move a process there, and what it starts later."""
    with (cgroup / "cgroup.procs").open("a") as file:
        file.write(f"{pid}\n")
