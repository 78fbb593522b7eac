"""A real node: containerd with runc and kubelet, in mount and process namespaces of their own.

containerd is the first process of its namespace, so whatever it or kubelet started (shims, containers,
mounts) ends with it, also when the tests are killed. kubelet's plugin folder is compiled in; in our namespace
its place is taken by a folder of our own, so a kubelet of the machine is not disturbed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.requests import JSON, MERGE_PATCH, expect_success
from gpuslice_demo.ports import free_port
from tests import HANG_S
from tests.blocking import BlockingTransport
from tests.e2e import control_plane
from tests.e2e.control_plane import ControlPlane
from tests.e2e.images import needed_libraries, write_image

T = TypeVar("T")

PROGRAMS = ("containerd", "runc", "ctr", "unshare", "nsenter", "setpriv", "ldd")
KUBELET_PLUGINS = "/var/lib/kubelet/device-plugins"  # compiled into kubelet; --root-dir does not move it
NUMA_NODES = "/sys/devices/system/node"
POD_LOGS = "/var/log/pods"  # compiled in before Kubernetes 1.30
SANDBOX_IMAGE = "localhost/sandbox:1"
POLL_S = 0.1
PATIENCE_S = float(HANG_S)


def missing() -> str:
    """Why there is no real node here, in one line; empty when there is one."""
    if reason := control_plane.missing():
        return reason
    if not os.access(control_plane.asset("kubelet"), os.X_OK):
        return f"KUBEBUILDER_ASSETS={os.environ['KUBEBUILDER_ASSETS']} has no kubelet"
    if os.geteuid() != 0:
        return "a kubelet needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not on PATH: {', '.join(absent)}"
    busybox = shutil.which("busybox")
    if busybox is None or needed_libraries(Path(busybox)):
        return "a statically linked busybox is needed for images (Debian: busybox-static)"
    return ""


def until(ask: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first answer that is true; AssertionError with the last one when none comes in time."""
    end = time.monotonic() + timeout_s
    while not (answer := ask()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; last answer: {answer!r}")
        time.sleep(POLL_S)
    return answer


@contextmanager
def own_folder(prefix: str) -> Iterator[Path]:
    """For a node; removed afterwards unless GPUSLICE_E2E_KEEP is set. Sockets need a short path."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        if "GPUSLICE_E2E_KEEP" not in os.environ:
            shutil.rmtree(folder)


# -- processes -------------------------------------------------------------------------------------------


class Service:
    """A program that a test stops and starts again; each run has a log of its own in `folder`."""

    def __init__(self, name: str, folder: Path, command: list[str], *, entered: bool = False) -> None:
        self._name = name
        self._folder = folder
        self._command = command
        self._entered = entered  # the program is the child of nsenter, which passes no signal on
        self._stack = ExitStack()
        self._runs = 0
        self._pid = 0

    def start(self) -> None:
        self._runs += 1
        run = control_plane.process(f"{self._name}-{self._runs}", self._folder, self._command)
        self._pid = self._stack.enter_context(run).pid

    def stop(self) -> None:
        if self._pid and self._entered:
            for child in children(self._pid):
                os.kill(child, signal.SIGTERM)
            until(lambda: not children(self._pid), f"{self._name} ends", 20)
        self._pid = 0
        self._stack.close()

    def signal(self, number: signal.Signals) -> None:
        """To the program itself; SIGCONT to nsenter as well, which stops when its child does."""
        pids = children(self._pid) if self._entered else [self._pid]
        for pid in [*pids, self._pid] if number is signal.SIGCONT else pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Without a word of warning."""
        self.signal(signal.SIGKILL)
        self._pid = 0
        self._stack.close()

    def log(self) -> str:
        """What the program wrote since its last start."""
        return (self._folder / f"{self._name}-{self._runs}.log").read_text(errors="replace")


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


# -- the node --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """The folders of a node, all below one."""

    folder: Path

    @property
    def plugins(self) -> Path:
        return self.folder / "plugins"

    @property
    def kubelet(self) -> Path:
        return self.folder / "kubelet"

    @property
    def cdi(self) -> Path:
        return self.folder / "cdi"

    @property
    def pod_resources(self) -> Path:
        return self.kubelet / "pod-resources" / "kubelet.sock"

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    def make(self) -> None:
        for path in (self.plugins, self.kubelet, self.folder / "logs", self.folder / "cni", self.cdi):
            path.mkdir(parents=True)
        (self.folder / "cni" / "none.conflist").write_text(json.dumps(_NETWORK))
        for name in ("none", "loopback"):  # containerd before 2 calls both
            (self.folder / "cni" / name).write_text(_NO_WIRE)
            (self.folder / "cni" / name).chmod(0o755)


@contextmanager
def containerd(
    places: Places, *, shared: bool = False, cgroups: bool = False, sockets: int = 1
) -> Iterator[int]:
    """containerd in namespaces of its own; yields its pid. Its end is the end of every container.

    `shared`: what pods mount for others with Bidirectional propagation is seen in all of the namespace.
    `cgroups`: of version 2 there, also on a machine that has version 1. Its controllers are that one's then,
    so that containers get no amounts of CPU and memory.
    `sockets`: how many NUMA nodes kubelet sees, which starts in the same namespaces.
    """
    config = places.folder / "containerd.toml"
    text = _CONTAINERD.format(folder=places.folder, sandbox=SANDBOX_IMAGE)
    prepare = "mount --make-rshared / && " if shared else ""
    if cgroups:
        runc = places.folder / "runc"
        runc.write_text(f"#!{sys.executable}\n{_RUNC}")
        runc.chmod(0o755)
        text += _RUNC_OPTIONS.format(runc=runc)
        prepare += "mount -t cgroup2 none /sys/fs/cgroup && "
    config.write_text(text)
    ours = {KUBELET_PLUGINS: places.plugins}
    if control_plane.minor_version("kubelet") < 30:
        ours[POD_LOGS] = places.folder / "logs"
    prepare += " && ".join(f"mkdir -p {place} && mount --bind {own} {place}" for place, own in ours.items())
    if sockets > 1:
        prepare += f" && mount --rbind {numa_nodes(places.folder / 'numa', sockets)} {NUMA_NODES}"
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
    command += ["--mount-proc", "sh", "-c", f"{prepare} && exec containerd --config {config}"]
    with control_plane.process("containerd", places.folder, command) as outer:
        control_plane.wait_for(
            lambda: ctr(places, "version").returncode == 0, "containerd", outer, places.folder
        )
        (pid,) = children(outer.pid)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):  # a test may have ended it
                os.kill(
                    pid, signal.SIGKILL
                )  # the kernel ends the rest of the namespace before wait() returns
            outer.wait(20)


def numa_nodes(folder: Path, count: int) -> Path:
    """What the kernel would show of a machine with so many NUMA nodes, in which CPUs take turns."""
    cpus = sorted(int(path.name[3:]) for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*"))
    for number in range(count):
        here = folder / f"node{number}"
        here.mkdir(parents=True)
        for cpu in cpus[number::count]:
            (here / f"cpu{cpu}").symlink_to(f"/sys/devices/system/cpu/cpu{cpu}")
        (here / "meminfo").write_text(f"Node {number} MemTotal:       8388608 kB\n")
        (here / "distance").write_text(" ".join("10" if at == number else "21" for at in range(count)) + "\n")
    return folder


def ctr(places: Places, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["ctr", "--address", str(places.socket), "--namespace", "k8s.io", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


def load_image(places: Places, name: str, command: list[str], files: Mapping[str, Path]) -> None:
    archive = places.folder / "image.tar"
    write_image(archive, name, command, files)
    done = ctr(places, "images", "import", "--snapshotter", "native", str(archive))
    assert done.returncode == 0, done.stderr
    archive.unlink()


def why_no_cdi() -> str:
    """Why the containerd on PATH takes no CDI devices, as 1.7 and newer do; empty when it takes them."""
    said = subprocess.run(["containerd", "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r" v?(\d+)\.(\d+)", said)
    if version is None:
        return f'claims need containerd 1.7 or newer; the one on PATH says "{said.strip()}"'
    if (int(version[1]), int(version[2])) < (1, 7):
        found = f"{version[1]}.{version[2]}"
        return f"claims need containerd 1.7 or newer, and the one on PATH is {found}: put another before it"
    return ""


def kubelet(
    plane: ControlPlane,
    places: Places,
    containerd_pid: int,
    name: str,
    labels: str = "cgpu=true",
    *,
    settings: Mapping[str, Any] | None = None,
    flags: tuple[str, ...] = (),
) -> Service:
    """kubelet beside that containerd, with these settings besides; not started yet."""
    config = places.folder / "kubelet.json"
    config.write_text(json.dumps({**_kubelet_settings(places), **(settings or {})}))
    command = ["nsenter", f"--target={containerd_pid}", "--mount", "--pid", "--"]
    command += [control_plane.asset("kubelet"), f"--config={config}", f"--kubeconfig={plane.kubeconfig}"]
    command += [f"--hostname-override={name}", f"--root-dir={places.kubelet}", f"--node-labels={labels}"]
    command += [f"--cert-dir={places.kubelet}/pki", "--v=2"]
    command += flags
    return Service("kubelet", places.folder, command, entered=True)


def _kubelet_settings(places: Places) -> dict[str, Any]:
    """A kubelet that may run inside a container itself: it touches neither cgroups of pods nor the kernel."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{places.socket}",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "1s",
        "runtimeRequestTimeout": "15m",  # images are copied for each container, on a busy disk for minutes
        "podLogsDir": str(places.folder / "logs"),
        "port": free_port(),
        "readOnlyPort": 0,
        "healthzPort": 0,
        "resolvConf": "/dev/null",
    }


# The node is ready only with a network. Pods that are not on the host's get an address and no wire.
_NETWORK = {"cniVersion": "0.4.0", "name": "no-wires", "plugins": [{"type": "none"}]}
_NO_WIRE = """\
#!/bin/sh
case "$CNI_COMMAND" in
ADD) echo '{"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.203.0.1/32"}]}' ;;
VERSION) echo '{"cniVersion": "0.4.0", "supportedVersions": ["0.3.1", "0.4.0"]}' ;;
esac
"""
_CONTAINERD = """\
version = 2
root = "{folder}/containerd-root"
state = "{folder}/containerd-state"
[grpc]
  address = "{folder}/containerd.sock"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux"
  snapshotter = "native"
[plugins."io.containerd.nri.v1.nri"]
  disable = true
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox}"
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["{folder}/cdi"]
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{folder}/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


_RUNC_OPTIONS = """\
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
"""
_RUNC = """
import json, os, sys
words = sys.argv[1:]
if "--bundle" in words:
    path = words[words.index("--bundle") + 1] + "/config.json"
    spec = json.load(open(path))
    spec["linux"].pop("resources", None)
    json.dump(spec, open(path, "w"))
os.execvp("runc", ["runc", *words])
"""


# -- the API ---------------------------------------------------------------------------------------------


class Api:
    """The API server, asked plainly: documents and paths; one that begins with / is not below /api/v1."""

    def __init__(self, plane: ControlPlane) -> None:
        self._transport = BlockingTransport(connect({}, kubeconfig=str(plane.kubeconfig)))

    def close(self) -> None:
        pass

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path)

    def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, document)

    def patch(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("PATCH", path, document, MERGE_PATCH)

    def delete(self, path: str) -> dict[str, Any]:
        return self._ask("DELETE", path)

    def _ask(self, method: str, path: str, document: object = None, kind: str = JSON) -> dict[str, Any]:
        body = b"" if document is None else msgspec.json.encode(document)
        headers = {"Content-Type": kind} if body else {}
        where = path if path.startswith("/") else f"/api/v1/{path}"
        request = ApiRequest(method, where, headers=headers, body=body)
        answer = self._transport.request(request)
        expect_success(answer, request)
        found: dict[str, Any] = msgspec.json.decode(answer.body)
        return found
