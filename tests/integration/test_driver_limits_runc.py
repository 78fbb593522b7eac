"""The hook under the real runc, on the kernel's cgroups: what a static program of a container gets."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.cgroup.tree import CgroupTree

from .driver_limits_rig import LIMIT_MIB, DriverNode, Tenant, driver_node
from .sim_driver_client import require_driver

CGROUPS = next(
    (path for path in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")) if CgroupTree(path).available),
    None,
)
MISSING = [name for name in ("runc", "unshare", "busybox") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="runc needs root"),
    pytest.mark.skipif(CGROUPS is None, reason="cgroups of version 2 are not mounted"),
    pytest.mark.skipif(bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)}"),
]

SCRIPT = f"""
cuda_malloc_static -size={LIMIT_MIB}; echo past $?
cuda_malloc_static -size=2000; echo within $?
"""


def bundle(node: DriverNode, tenant: Tenant, devices: list[dict[str, Any]]) -> Path:
    """An OCI bundle with what the CDI devices of the container add to it."""
    folder = node.bench.folder / f"bundle-{tenant.name}"
    programs = folder / "rootfs" / "bin"
    programs.mkdir(parents=True)
    for name in ("proc", "sys", "state"):
        (folder / "rootfs" / name).mkdir()
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, programs / "sh")
    shutil.copy(require_driver() / "cuda_malloc_static", programs)
    environment = [f"{name}={value}" for name, value in tenant.answer.envs.items()]
    environment += ["PATH=/bin", "GPUSLICE_SIM_STATE=/state/state"]
    hooks: dict[str, list[Any]] = {}
    for edits in devices:
        environment += edits["env"]
        for hook in edits["hooks"]:
            hooks.setdefault(hook["hookName"], []).append(
                {key: hook[key] for key in ("path", "args", "timeout")}
            )
    state = str(node.host.state.parent)
    spec = {
        "ociVersion": "1.0.2",
        "process": {
            "args": ["/bin/sh", "-c", SCRIPT],
            "cwd": "/",
            "env": environment,
            "user": {"uid": 0, "gid": 0},
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
            {"destination": "/state", "type": "bind", "source": state, "options": ["rbind", "rw"]},
        ],
        "hooks": hooks,
        "linux": {
            "cgroupsPath": f"/gs-test-{os.getpid()}/{tenant.id}",
            "namespaces": [{"type": each} for each in ("pid", "mount", "cgroup", "ipc", "uts")],
        },
    }
    (folder / "config.json").write_text(json.dumps(spec))
    return folder


async def run(node: DriverNode, tenant: Tenant, folder: str = "") -> tuple[int, str]:
    """As kubelet and containerd do it, in cgroups of version 2 whatever this machine has.

    `folder`: what the hook is told instead of the container's own.
    """
    await node.bench.kubelet.start_container(tenant.pod)
    devices = tenant.edits()
    if folder:
        devices[0]["hooks"][0]["args"][2] = folder
    place, root = bundle(node, tenant, devices), node.bench.folder / "runc"
    run = f"runc --root {root} run --bundle {place} {tenant.id[:12]}"
    command = f"mount -t cgroup2 none /sys/fs/cgroup && exec {run}"
    process = await asyncio.create_subprocess_exec(
        "unshare", "--mount", "sh", "-c", command, stdin=-3, stdout=-1, stderr=-2
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode(errors="replace")


async def test_runc_has_the_limit_set_before_the_program_or_does_not_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CGROUPS is not None
    async with driver_node(tmp_path, monkeypatch, cgroups=CGROUPS) as node:
        (node.bench.folder / "proc").symlink_to("/proc")
        await node.says("driver")
        assert not list(CGROUPS.glob("gpuslice-probe-*")), "what the probe made is gone"
        for name in ("first", "second"):
            status, said = await run(node, await node.tenant(name))
            assert status == 0, said
            assert "past 1" in said
            assert "within 0" in said
        status, said = await run(node, await node.tenant("third"), folder="nobody")
        assert status != 0
        assert "there is no container with the folder nobody" in said
        assert "within" not in said
        (CGROUPS / f"gs-test-{os.getpid()}").rmdir()
