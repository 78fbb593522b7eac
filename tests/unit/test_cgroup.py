"""A process's container by its cgroup, in every way that a node may be set up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.cgroup.container import ContainerRef, parse_cgroup
from gpuslice.adapters.cgroup.readings import headroom_bytes, pids_in, ran_us

ID = "0f" * 32
OTHER = "a1" * 32
UID = "6ad8f5a4-4f0e-4b9e-8b6e-3f1f7c1f2a3b"
SYSTEMD_UID = UID.replace("-", "_")
STATIC_UID = "9f86d081884c7d659a2feaa0c55ad015"

CASES = {
    "v2, systemd, containerd": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice/"
        f"cri-containerd-{ID}.scope\n",
        ContainerRef(ID, UID),
    ),
    "v2, systemd, guaranteed": (
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope",
        ContainerRef(ID, UID),
    ),
    "v2, systemd, CRI-O": (
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD_UID}.slice/"
        f"crio-{ID}.scope/container",
        ContainerRef(ID, UID),
    ),
    "v2, cgroupfs": (f"0::/kubepods/burstable/pod{UID}/{ID}", ContainerRef(ID, UID)),
    "v1, cgroupfs": (
        f"12:memory:/kubepods/besteffort/pod{UID}/{ID}\n11:cpu,cpuacct:/kubepods/besteffort/pod{UID}/{ID}\n"
        f"1:name=systemd:/kubepods/besteffort/pod{UID}/{ID}\n0::/system.slice/containerd.service",
        ContainerRef(ID, UID),
    ),
    "v1, systemd, docker": (
        f"4:memory:/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/docker-{ID}.scope",
        ContainerRef(ID, UID),
    ),
    "containerd without its systemd driver": (
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}",
        ContainerRef(ID, UID),
    ),
    "kind: the node is a container": (
        f"0::/docker/{OTHER}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
        f"kubelet-kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope",
        ContainerRef(ID, UID),
    ),
    "kind with cgroupfs": (
        f"0::/docker/{OTHER}/kubelet/kubepods/besteffort/pod{UID}/{ID}",
        ContainerRef(ID, UID),
    ),
    "a container inside a pod's container": (
        f"0::/kubepods/pod{UID}/{ID}/docker/{OTHER}",
        ContainerRef(ID, UID),
    ),
    "a container with systemd inside": (
        f"0::/kubepods/pod{UID}/{ID}/init.scope",
        ContainerRef(ID, UID),
    ),
    "another cgroup namespace": (
        f"0::/../../kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope",
        ContainerRef(ID, UID),
    ),
    "a static pod": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC_UID}.slice/"
        f"cri-containerd-{ID}.scope",
        ContainerRef(ID, STATIC_UID),
    ),
    "docker without Kubernetes": (f"0::/docker/{ID}", ContainerRef(ID, "")),
    "podman": (
        f"0::/machine.slice/libpod-{ID}.scope/container",
        ContainerRef(ID, ""),
    ),
    "CRI-O's monitor beside the container": (
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/crio-conmon-{ID}.scope",
        None,
    ),
    "the pause of a pod slice": (f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice", None),
    "a service of the host": ("0::/system.slice/kubelet.service", None),
    "a user's shell": ("0::/user.slice/user-1000.slice/session-3.scope", None),
    "a kernel thread": ("0::/", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize("name", CASES)
def test_container_of_a_cgroup(name: str) -> None:
    text, expected = CASES[name]
    assert parse_cgroup(text) == expected


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    found = parse_cgroup(text)
    assert found is None or len(found.container_id) == 64


def cgroup(place: Path, most: str, current: int, inactive: int = 0) -> Path:
    place.mkdir(exist_ok=True)
    (place / "memory.max").write_text(f"{most}\n")
    (place / "memory.current").write_text(f"{current}\n")
    (place / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
    return place


def test_the_tightest_limit_on_the_way_up_leaves_the_least_memory(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    pod = cgroup(root / "pod", "max", 500)
    leaf = cgroup(pod / "leaf", "max", 300)
    assert headroom_bytes(leaf, root) is None
    cgroup(leaf, "1000", 300, inactive=50)
    assert headroom_bytes(leaf, root) == 750
    cgroup(pod, "600", 500)
    assert headroom_bytes(leaf, root) == 100
    (leaf / "memory.max").unlink()
    with pytest.raises(OSError, match=r"memory\.max"):
        headroom_bytes(leaf, root)


def test_a_containers_processes_are_those_of_cgroups_below_it_too(tmp_path: Path) -> None:
    (tmp_path / "below/deep").mkdir(parents=True)
    (tmp_path / "cgroup.procs").write_text("7\n3\n")
    (tmp_path / "below/deep/cgroup.procs").write_text("9\n")
    assert pids_in(tmp_path) == [3, 7, 9]
    assert pids_in(tmp_path / "gone") == []


def test_how_long_processes_ran_is_not_told_everywhere(tmp_path: Path) -> None:
    assert ran_us(tmp_path) == -1
    (tmp_path / "cpu.stat").write_text("usage_usec 42\nuser_usec 40\n")
    assert ran_us(tmp_path) == 42
