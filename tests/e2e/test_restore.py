"""A backup of etcd is restored under a running extender: versions go back, and deleted pods live again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.adapters.kube.resources import PODS
from tests import HANG_S
from tests.builders import api_node, api_pod
from tests.e2e.cluster import cluster, extender
from tests.e2e.control_plane import ControlPlane, api_server, fetch, process, wait_for
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE

UNITS = 15
PLACED = {
    "scheduler.framework.gpushare.allocation": '{"0":{"0":8}}',
    "ALIYUN_COM_GPU_MEM_IDX": "0",
    "ALIYUN_COM_GPU_MEM_POD": "8",
}


def placed(name: str) -> dict[str, Any]:
    pod = api_pod(name, "8", node="n1", annotations=PLACED)
    del pod["metadata"]["uid"]
    return pod


class Program:
    """One of the control plane's, started again as it was."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.name, self.pid = name, plane.pids[name]
        self.command = Path(f"/proc/{self.pid}/cmdline").read_text().split("\0")[:-1]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


async def test_the_extender_ends_and_the_next_one_counts_what_the_backup_has(tmp_path: Path) -> None:
    """A watch from a version that is still to come would be silent, and a uid that is gone stays gone."""
    backup, data = tmp_path / "backup", tmp_path / "etcd"
    with api_server(tmp_path) as plane:
        etcd, server = Program(plane, "etcd"), Program(plane, "kube-apiserver")
        async with cluster(plane, UNITS) as made:
            await made.add_nodes([api_node("n1", UNITS, 1)])
            await made.client.create(PODS, placed("before"), "default")
            os.kill(etcd.pid, signal.SIGSTOP)
            shutil.copytree(data, backup)
            os.kill(etcd.pid, signal.SIGCONT)
            await made.remove_pod("before")
            await made.client.create(PODS, placed("after"), "default")
            for number in range(100):  # more than the API server writes of its own accord after the restore
                note = {"metadata": {"annotations": {"number": str(number)}}}
                await made.client.merge_patch(PODS, "after", note, "default")
        with extender(plane) as running, contextlib.ExitStack() as restored:
            assert names(running.get("/gpushare-scheduler/inspect")[1]) == {"after"}
            server.end()
            etcd.end()
            shutil.rmtree(data)
            backup.rename(data)
            restored.enter_context(process("etcd", tmp_path, etcd.command))
            started = restored.enter_context(process("kube-apiserver", tmp_path, server.command))
            wait_for(lambda: answers(plane), "kube-apiserver", started, tmp_path)
            assert running.process.wait(HANG_S) == 1
            assert "a backup of etcd was probably restored" in (tmp_path / "extender.log").read_text()
            anew = restored.enter_context(extender(plane))
            assert names(anew.get("/gpushare-scheduler/inspect")[1]) == {"before"}


def answers(plane: ControlPlane) -> bool:
    try:
        return bool(fetch(f"{plane.url}/readyz"))
    except OSError:
        return False


def names(inspected: bytes) -> set[str]:
    nodes = msgspec.json.decode(inspected)["nodes"] or ()
    return {pod["name"] for node in nodes for card in node["devs"] for pod in card["pods"]}
