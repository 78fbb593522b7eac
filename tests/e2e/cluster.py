"""A cluster of API objects at a real control plane: no kubelets, but every node, pod and binding is real.

`Cluster` makes and removes them, `BindingLog` follows each change of pods, keeps the sums that no card may
pass, `shipped_configuration` is the chart's scheduler configuration, and `extender` runs our process on it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.slim import SLIM_NODES, SLIM_PODS, SlimPod
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.core.contract import ANN_ALLOCATION, ANN_INDEX, ANN_POD_UNITS, GPU_MEM
from gpuslice_demo.ports import free_port
from tests import tools
from tests.chart import NAMED
from tests.e2e.control_plane import ControlPlane, minor_version

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "gpuslice"
AT_ONCE = 32  # requests of ours under way
PODS = "/api/v1/namespaces/default/pods"
Object = dict[str, Any]
Card = tuple[str, str]  # node, index


# -- the product's side ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """The chart with its default values, rendered by helm, and the files of the certificates it makes."""

    objects: Mapping[tuple[str, str], Object]
    folder: tempfile.TemporaryDirectory[str]  # gone with us

    def files(self, secret: str) -> Path:
        """A folder with the Secret's files, as kubelet mounts it."""
        place = Path(self.folder.name) / secret
        if not place.exists():
            place.mkdir()
            for name, content in self.objects["Secret", secret]["data"].items():
                (place / name).write_bytes(base64.b64decode(content))
        return place

    @functools.cached_property
    def client(self) -> ssl.SSLContext:
        """As kube-scheduler connects, to any address."""
        place = self.files("gpushare-schd-extender-client")
        context = ssl.create_default_context(cafile=str(place / "ca.crt"))
        context.check_hostname = False
        context.load_cert_chain(place / "tls.crt", place / "tls.key")
        return context


@functools.cache
def release() -> Release:
    command = [str(tools.find("helm")), "template", "cgpu", str(CHART), "--namespace", "kube-system", *NAMED]
    command.append(f"--kube-version=1.{minor_version('kube-scheduler')}.0")
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each}
    return Release(objects, tempfile.TemporaryDirectory(prefix="gs-release-"))


def shipped_configuration(extender_url: str = "") -> Object:
    """The scheduler configuration of the chart with its default values, calling the extender at this URL.

    Without a URL it calls none: what is left is a plain kube-scheduler, tuned alike. An ``http:`` URL is that
    of something in between, which speaks TLS on the other side, or of an extender that speaks none.
    """
    text = release().objects["ConfigMap", "gpuslice-scheduler"]["data"]["config.yaml"]
    files = release().files("gpushare-schd-extender-client")
    configuration: Object = yaml.safe_load(text.replace("/etc/kubernetes/gpuslice-tls", str(files)))
    # there is one, and the next need not wait for it
    configuration["leaderElection"] = {"leaderElect": False}
    (section,) = configuration["extenders"]
    section["urlPrefix"] = f"{extender_url}/gpushare-scheduler"
    if extender_url.startswith("http:"):
        section["enableHTTPS"] = False
        del section["tlsConfig"]
    if not extender_url:
        configuration["extenders"] = []
    return configuration


def scheduler_arguments(configuration: Object) -> Object:
    """The configuration as `control_plane.scheduler` takes it, with the feature gates that the chart sets."""
    named = ("apiVersion", "kind", "clientConnection")
    rest = {key: value for key, value in configuration.items() if key not in named}
    (container,) = release().objects["Deployment", "gpuslice-scheduler"]["spec"]["template"]["spec"][
        "containers"
    ]
    flags = tuple(each for each in container["command"] if each.startswith("--feature-gates"))
    return {**rest, "client": configuration.get("clientConnection", {}), "flags": flags}


@dataclass(frozen=True)
class Running:
    """Our process."""

    port: int
    process: subprocess.Popen[bytes]
    tls: bool = True

    @property
    def url(self) -> str:
        return f"http{'s' * self.tls}://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        if self.tls:
            context = release().client
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def ready(self) -> bool:
        try:
            return self.get("/readyz")[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        """As the kernel or a lost machine would: nothing of ours gets to run any more."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def extender(
    plane: ControlPlane, *flags: str, log: str = "extender", wait: bool = True, tls: bool = True
) -> Iterator[Running]:
    """The extender as a process, with the chart's flags and these; it is ready unless `wait` is False."""
    port = free_port()
    code = "from gpuslice.apps.extender.command import command; command()"
    pod = release().objects["Deployment", "gpushare-schd-extender"]["spec"]["template"]["spec"]
    files = str(release().files("gpushare-schd-extender-tls"))
    shipped = [each.replace("/etc/gpuslice/tls", files) for each in pod["containers"][0]["args"][1:]]
    shipped.remove("--label-leader")  # there is no pod to label
    if not tls:
        shipped = [each for each in shipped if not each.startswith(("--tls-", "--debug-tokens"))]
    command = [sys.executable, "-c", code, f"--port={port}", "--host=127.0.0.1", *shipped, *flags]
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig), "PYTHONPATH": str(ROOT / "src")}
    environment.setdefault("LOG_LEVEL", "info")
    with (plane.folder / f"{log}.log").open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            running = Running(port, process, tls)
            if wait:
                wait_ready(running)
            yield running
        finally:
            process.terminate()
            process.wait(30)


def refused_binds(log: Path) -> list[str]:
    """Why binds were refused, by the extender's log of all turns: the first few."""
    text = log.read_text() if log.exists() else ""  # no turn had an extender
    lines = (json.loads(line) for line in text.splitlines() if '"bind decided"' in line)
    return [each["error"] for each in lines if each["error"]][:20]


def wait_ready(running: Running, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not running.ready():
        if running.process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"the extender was not ready within {timeout_s:g} s; see its log")
        time.sleep(0.05)


# -- what the API server's history says --------------------------------------------------------------------


@dataclass
class BindingLog:
    """Every change of a pod, in the API server's order. `wrong` is what may never be, in words."""

    card_units: int
    on_bound: asyncio.Event = field(default_factory=asyncio.Event)
    bound_at: dict[str, float] = field(default_factory=dict)  # by uid
    wrong: list[str] = field(default_factory=list)
    most: int = 0  # units ever seen on one card
    bindings: int = 0
    _nodes: dict[str, str] = field(default_factory=dict)
    _held: dict[str, dict[Card, int]] = field(default_factory=dict)
    _sums: Counter[Card] = field(default_factory=Counter)

    def apply(self, kind: str, pod: SlimPod) -> None:
        uid, node = pod.metadata.uid, pod.spec.node_name
        self._release(uid)
        if kind == "DELETED":
            self._nodes.pop(uid, None)
            self.bound_at.pop(uid, None)
        elif node:
            self._bind(uid, node)
            self._hold(uid, cards_of(pod))
        self.on_bound.set()

    @property
    def sums(self) -> dict[Card, int]:
        """Units per card, of bound pods."""
        return {card: units for card, units in self._sums.items() if units}

    def units_of(self, node: str) -> int:
        """Of each of its cards."""
        return self.card_units

    def _bind(self, uid: str, node: str) -> None:
        before = self._nodes.setdefault(uid, node)
        if before != node:
            self.wrong.append(f"pod {uid} was bound to {before}, then to {node}")
        if uid not in self.bound_at:
            self.bound_at[uid] = time.perf_counter()
            self.bindings += 1

    def _hold(self, uid: str, cards: dict[Card, int]) -> None:
        self._held[uid] = cards
        for card, units in cards.items():
            self._sums[card] += units
            self.most = max(self.most, self._sums[card])
            if self._sums[card] > (most := self.units_of(card[0])):
                self.wrong.append(f"card {card}: {self._sums[card]} of {most} units")

    def _release(self, uid: str) -> None:
        for card, units in self._held.pop(uid, {}).items():
            self._sums[card] -= units


def cards_of(pod: SlimPod) -> dict[Card, int]:
    """Units per card by the pod's annotations; its two protocols must agree. Read by no code of ours."""
    annotations = pod.metadata.annotations or {}
    if ANN_ALLOCATION not in annotations:
        return {}
    table: dict[str, dict[str, int]] = msgspec.json.decode(annotations[ANN_ALLOCATION])
    cards: Counter[Card] = Counter()
    for amounts in table.values():
        cards.update({(pod.spec.node_name, index): units for index, units in amounts.items()})
    assert sum(cards.values()) == int(annotations[ANN_POD_UNITS]), annotations
    assert {index for _, index in cards} == set(annotations[ANN_INDEX].split(",")), annotations
    return dict(cards)


def pod(name: str, units: int) -> Object:
    """A pod of one container that asks for this many units of one card, for the chart's scheduler."""
    limits = {GPU_MEM: str(units)}
    container = {"name": "main", "image": "image", "resources": {"limits": limits, "requests": limits}}
    spec = {"containers": [container], "schedulerName": "gpuslice-scheduler"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


# -- the cluster -------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """Nodes and pods at one API server, and what became of them."""

    transport: HttpTransport
    client: KubeClient
    log: BindingLog

    async def add_nodes(self, nodes: Sequence[Object]) -> None:
        await self._all(self.client.create(SLIM_NODES, node) for node in nodes)

    async def add_pods(self, pods: Sequence[Object]) -> None:
        await self._all(self.client.create(SLIM_PODS, pod, "default") for pod in pods)

    async def remove_pod(self, name: str) -> None:
        """At once, as a kubelet would confirm it."""
        await self.client.delete(SLIM_PODS, name, "default", grace_s=0)

    async def remove_all_pods(self) -> None:
        answer = await self.transport.request(ApiRequest("DELETE", PODS, query={"gracePeriodSeconds": "0"}))
        assert answer.status == 200, answer.body
        await self.until(lambda: not self.log.bound_at)

    async def pods(self) -> list[SlimPod]:
        listing = await self.client.list(SLIM_PODS, "default")
        return listing.items or []

    async def until(self, condition: Any, timeout_s: float = 60) -> None:
        """Until the log says so; TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.log.on_bound.clear()
                await self.log.on_bound.wait()

    async def _all(self, calls: Iterator[Any]) -> None:
        async def work() -> None:
            for call in calls:
                await call

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())

    async def follow(self, version: str) -> None:
        """Write the log until cancelled."""
        while True:
            async for line in self.client.watch(SLIM_PODS, version, "default", timeout_s=3600):
                if line.type == "BOOKMARK":  # a pod without containers: nothing happened
                    continue
                assert line.type in ("ADDED", "MODIFIED", "DELETED"), line
                version = line.object.metadata.resource_version
                self.log.apply(line.type, line.object)


def cluster(plane: ControlPlane, card_units: int) -> AbstractAsyncContextManager[Cluster]:
    """An API server's pods, followed from now on."""
    return logged(plane, BindingLog(card_units))


@contextlib.asynccontextmanager
async def logged(plane: ControlPlane, log: BindingLog) -> AsyncIterator[Cluster]:
    """The same with a log of one's own."""
    connection = connect({}, kubeconfig=str(plane.kubeconfig))
    async with HttpTransport(connection, timeout_s=60, connections=AT_ONCE + 4) as transport:
        made = Cluster(transport, KubeClient(transport), log)
        listing = await made.client.list(SLIM_PODS, "default")
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(made.follow(listing.metadata.resource_version))
            yield made
            following.cancel()
