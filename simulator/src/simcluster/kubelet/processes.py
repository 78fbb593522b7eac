"""The node's /proc as a pod with hostPID sees it: which process is in which container's cgroup.

Containers are ordinary processes here and have no cgroups of their own. So the node gets a folder that looks
as a real node's /proc does to a reader of ``<pid>/cgroup`` and ``<pid>/stat``: processes of a container
in the form that containerd and systemd give them, all others as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

from simcluster.kubelet.runtime import Container, Runtime

LOOK_EVERY_S = 0.2
LOOKS = 4


class ProcessTable:
    """Keeps `folder` in step with the processes of this machine."""

    def __init__(self, folder: Path, runtime: Runtime) -> None:
        self._folder = folder
        self._runtime = runtime
        self._shown: dict[int, str] = {}  # pid → container id, "" for a process of the host
        self._looks: dict[int, int] = {}  # how often a process of the host has been examined

    async def run(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        while True:
            self.refresh()
            await asyncio.sleep(LOOK_EVERY_S)

    def refresh(self) -> None:
        """Add new processes, remove ended ones. A process in a container stays there."""
        sessions = {container.process.pid: container for container in self._runtime.running()}
        present = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        for pid in self._shown.keys() - present:
            self._forget(pid)
        for pid in present:
            if not self._shown.get(pid):
                self._place(pid, sessions)

    def _place(self, pid: int, sessions: dict[int, Container]) -> None:
        """By session, which the first process of a container leads; otherwise by root, which `exec` sets as
        well.

        A process that has just been forked has neither yet, so a process of the host is examined again.
        """
        try:
            container = sessions.get(os.getsid(pid))
        except ProcessLookupError:
            return
        looks = self._looks[pid] = self._looks.get(pid, 0) + 1
        if container is None and looks <= LOOKS:
            container = _by_root(pid, sessions)
        if container is not None and pid in self._shown:
            self._forget(pid)
        if pid not in self._shown:
            place = self._folder / str(pid)
            with contextlib.suppress(FileExistsError):
                if container is None:
                    place.symlink_to(f"/proc/{pid}")
                else:
                    place.mkdir()
                    (place / "stat").symlink_to(f"/proc/{pid}/stat")
                    (place / "cgroup").write_text(f"0::{cgroup_path(container)}\n")
            self._shown[pid] = container.id if container is not None else ""

    def _forget(self, pid: int) -> None:
        place = self._folder / str(pid)
        if place.is_symlink():
            place.unlink()
        else:
            shutil.rmtree(place, ignore_errors=True)
        del self._shown[pid]
        self._looks.pop(pid, None)


def cgroup_path(container: Container) -> str:
    """The name that the systemd driver gives a burstable pod's container under containerd."""
    pod = container.spec.pod_uid.replace("-", "_")
    group = "/kubepods.slice/kubepods-burstable.slice"
    return f"{group}/kubepods-burstable-pod{pod}.slice/cri-containerd-{container.id}.scope"


def _by_root(pid: int, sessions: dict[int, Container]) -> Container | None:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    home = next((one.removeprefix(b"HOME=").decode() for one in environ if one.startswith(b"HOME=")), "")
    return next((one for one in sessions.values() if home == f"{one.spec.rootfs.path}/root"), None)
