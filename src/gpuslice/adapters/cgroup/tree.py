"""The machine's cgroups of version 2: where a process or a container is among them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from gpuslice.adapters.cgroup.container import parse_path

ROOT = Path("/sys/fs/cgroup")
DMEM = "dmem"


class CgroupTree:
    """Below `root`, the whole machine's: a container's own ``/sys/fs/cgroup`` shows only itself."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._containers: dict[str, Path] = {}  # by the runtime's id

    @property
    def available(self) -> bool:
        """Whether it is there in version 2; with version 1 each controller has a folder of its own."""
        return (self.root / "cgroup.controllers").is_file()

    def of_process(self, pid: int, proc: Path) -> Path | None:
        """None if it has ended, or its cgroup is not below the root.

        In a namespace of cgroups a path is relative to where that begins (``/../../pod/container``): the last
        part is then looked for, since a runtime names a container's cgroup by its id.
        """
        try:
            lines = (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines()
        except OSError:
            return None
        path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        place = self.root.joinpath(*parts)
        if parts and ".." not in path.split("/") and place.is_dir():
            return place
        found = [each for each in self._folders() if parts and each.name == parts[-1]]
        return found[0] if len(found) == 1 else None

    def of_containers(self, ids: Collection[str]) -> dict[str, Path]:
        """Where containers are, by the runtime's id; without those that are not found. They do not move."""
        known = {each: path for each, path in self._containers.items() if each in ids and path.is_dir()}
        if missing := set(ids) - known.keys():
            for path in self._folders():
                ref = parse_path(str(path.relative_to(self.root)))
                if ref is not None and ref.container_id in missing:
                    known.setdefault(ref.container_id, path)  # the outermost: it may have cgroups of its own
        self._containers = known
        return dict(known)

    def make(self, name: str) -> Path:
        """A cgroup of that name below the root. Raises OSError."""
        place = self.root / name
        place.mkdir(exist_ok=True)
        return place

    def count_device_memory(self, cgroup: Path) -> None:
        """Let the kernel's controller of device memory, if it has one, count in this cgroup.

        Each cgroup on the way has to pass it on, which neither systemd nor kubelet asks for. Raises OSError.
        """
        for above in reversed(cgroup.parents):
            if above == self.root or self.root in above.parents:
                control = above / "cgroup.subtree_control"
                if DMEM in _words(above / "cgroup.controllers") and DMEM not in _words(control):
                    control.write_text(f"+{DMEM}")

    def _folders(self) -> Iterator[Path]:
        for folder, names, _ in os.walk(self.root):
            yield from (Path(folder, name) for name in names)


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []
