"""A real control plane from the binaries in ``KUBEBUILDER_ASSETS``: etcd, kube-apiserver, kube-scheduler.

Each process gets a free port on 127.0.0.1 and a folder below the one given; leaving the context ends them.
"""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from gpuslice_demo.ports import free_port

NEEDED = ("kube-apiserver", "etcd", "kube-scheduler")
TOKEN = "e2e-admin"
START_TIMEOUT_S = 90.0
FAST_CLIENT = {"qps": 1000, "burst": 1000}


def missing() -> str:
    """Why there is no real control plane here, in one line; empty when there is one."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not folder:
        return f"KUBEBUILDER_ASSETS is not set: it names a folder with {', '.join(NEEDED)}"
    absent = [name for name in NEEDED if not os.access(Path(folder) / name, os.X_OK)]
    return f"KUBEBUILDER_ASSETS={folder} has no {', '.join(absent)}" if absent else ""


def asset(name: str) -> str:
    return str(Path(os.environ["KUBEBUILDER_ASSETS"]) / name)


@cache
def minor_version(program: str = "kube-apiserver") -> int:
    """Of one of the binaries, which differ while a cluster is upgraded: 36 for 1.36."""
    said = subprocess.run([asset(program), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"v1\.(\d+)", said.stdout)
    assert found is not None, said.stdout
    return int(found[1])


def claim_flags() -> tuple[str, ...]:
    """What claims of shared cards need in every component; nothing where it is on by default."""
    return () if minor_version() >= 36 else ("--feature-gates=DRAConsumableCapacity=true",)


_OLD_NAMES = {
    "endpoints-controller": "endpoint",
    "garbage-collector-controller": "garbagecollector",
    "horizontal-pod-autoscaler-controller": "horizontalpodautoscaling",
    "root-ca-certificate-publisher-controller": "root-ca-cert-publisher",
}


def controllers_flag(*names: str) -> str:
    """For kube-controller-manager, which called its controllers otherwise before Kubernetes 1.28."""
    if minor_version() < 28:
        names = tuple(_OLD_NAMES.get(name, name.removesuffix("-controller")) for name in names)
    return f"--controllers={','.join(names)}"


@dataclass(frozen=True)
class ControlPlane:
    """Where the API server is. `kubeconfig` belongs to a member of system:masters."""

    url: str
    kubeconfig: Path
    folder: Path
    pids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheduler:
    """A running kube-scheduler."""

    url: str
    pid: int


@contextmanager
def process(name: str, folder: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with its output in `folder`/`name`.log; it is ended, then killed, at the end."""
    with (folder / f"{name}.log").open("wb") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


@contextmanager
def api_server(
    folder: Path, *, without: tuple[str, ...] = (), for_pods: str = "", flags: tuple[str, ...] = ()
) -> Iterator[ControlPlane]:
    """etcd and kube-apiserver with `flags`, ready to be asked; `without` these admission plugins.

    `for_pods`: the address at which pods on networks of their own find it, with accounts as in any cluster.
    """
    etcd_port, peer_port, port = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        etcd = stack.enter_context(process("etcd", folder, _etcd(folder, etcd_port, peer_port)))
        command = [*_apiserver(folder, f"http://127.0.0.1:{etcd_port}", port, without, for_pods), *flags]
        server = stack.enter_context(process("kube-apiserver", folder, command))
        url = f"https://127.0.0.1:{port}"
        wait_for(lambda: _ready(f"{url}/readyz"), "kube-apiserver", server, folder)
        pids = {"etcd": etcd.pid, "kube-apiserver": server.pid}
        yield ControlPlane(url, _kubeconfig(folder, url), folder, pids)


@contextmanager
def scheduler(
    plane: ControlPlane,
    extenders: list[dict[str, object]],
    *,
    client: Mapping[str, object] = FAST_CLIENT,
    flags: tuple[str, ...] = (),
    **settings: object,
) -> Iterator[Scheduler]:
    """kube-scheduler with these extenders and `flags`; `settings` are further fields of its configuration."""
    port = free_port()
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {**client, "kubeconfig": str(plane.kubeconfig)},
        "leaderElection": {"leaderElect": False},
        "extenders": extenders,
        **settings,
    }
    file = plane.folder / "scheduler.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [
        asset("kube-scheduler"),
        f"--config={file}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
    ]
    command += [
        f"--authentication-kubeconfig={plane.kubeconfig}",
        f"--authorization-kubeconfig={plane.kubeconfig}",
        *flags,
    ]
    with process("kube-scheduler", plane.folder, command) as started:
        url = f"https://127.0.0.1:{port}"
        wait_for(lambda: _ready(f"{url}/healthz"), "kube-scheduler", started, plane.folder)
        yield Scheduler(url, started.pid)


@contextmanager
def controller_manager(plane: ControlPlane, *controllers: str, flags: tuple[str, ...] = ()) -> Iterator[int]:
    """kube-controller-manager with these controllers alone, asking as often as it likes; yields its pid."""
    port = free_port()
    command = [asset("kube-controller-manager"), f"--kubeconfig={plane.kubeconfig}"]
    command += [controllers_flag(*controllers), "--leader-elect=false"]
    command += [f"--secure-port={port}", "--bind-address=127.0.0.1"]
    command += ["--kube-api-qps=1000", "--kube-api-burst=1000", *flags]
    command += [f"--authentication-kubeconfig={plane.kubeconfig}"]
    command += [f"--authorization-kubeconfig={plane.kubeconfig}"]
    with process("kube-controller-manager", plane.folder, command) as started:
        url = f"https://127.0.0.1:{port}"
        wait_for(lambda: _ready(f"{url}/healthz"), "kube-controller-manager", started, plane.folder)
        yield started.pid


def wait_for(done: Callable[[], bool], what: str, started: subprocess.Popen[bytes], folder: Path) -> None:
    """Until `done`, or fail with the end of the program's log."""
    end = time.monotonic() + START_TIMEOUT_S
    while not done():
        if started.poll() is not None or time.monotonic() > end:
            tail = (folder / f"{what}.log").read_text(errors="replace")[-2000:]
            raise AssertionError(f"{what} did not become ready (exit {started.poll()}):\n{tail}")
        time.sleep(0.1)


def _etcd(folder: Path, port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        asset("etcd"),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


# Webhooks are found by their endpoints, and kubelets by their addresses: there is neither kube-proxy nor DNS.
_FOR_PODS = ("--enable-aggregator-routing=true", "--kubelet-preferred-address-types=InternalIP")


def _apiserver(folder: Path, etcd: str, port: int, without: tuple[str, ...], for_pods: str) -> list[str]:
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    key = folder / "service-account.pem"
    key.write_bytes(_private_key())
    return [
        asset("kube-apiserver"),
        f"--etcd-servers={etcd}",
        f"--secure-port={port}",
        f"--bind-address={'0.0.0.0' if for_pods else '127.0.0.1'}",
        *(_FOR_PODS if for_pods else ()),
        *((f"--advertise-address={for_pods}",) if for_pods else ()),
        f"--cert-dir={folder / 'apiserver'}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        # no controller-manager makes the default account
        f"--disable-admission-plugins={','.join(without if for_pods else ('ServiceAccount', *without))}",
        "--allow-privileged=true",
        "--watch-cache=true",
        "--max-requests-inflight=2000",
        "--max-mutating-requests-inflight=1000",
    ]


def _private_key() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _kubeconfig(folder: Path, url: str) -> Path:
    file = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "admin"}}],
        "current-context": "e2e",
    }
    file.write_text(yaml.safe_dump(config))
    return file


def fetch(url: str) -> bytes:
    """What a component answers an administrator; OSError when it does not, or not with 200."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=30, context=unverified) as answer:
        found: bytes = answer.read()
        return found


def _ready(url: str) -> bool:
    try:
        fetch(url)
    except OSError:
        return False
    return True
