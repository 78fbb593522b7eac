"""Which pods are on this node, by every key by which a process or kubelet may name them.

Two sources: the API server, and the names of kubelet's log folders. Neither is required: without them,
processes are attributed to nobody, and the page says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuslice.adapters.cgroup.container import ContainerRef
from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import PODS, Resource
from gpuslice.adapters.kube.views import pod_view
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from gpuslice.apps.exporter.collectors import CollectorHealth
from gpuslice.core.attribution import ContainerKey
from gpuslice.core.contract import ANN_GRANTED

LOG_FOLDERS_EVERY_S = 5.0
CONFIG_HASH = "kubernetes.io/config.hash"  # of a static pod: its cgroup is named after it
SETTLED_NS = 3_000_000_000
"""A folder changed more recently may change again with the same time: file systems' clocks are coarse."""


@dataclass(frozen=True, slots=True)
class KnownPod:
    """One pod. `containers`: id (bare, 64 hex digits) → container name, for those that have started."""

    namespace: str
    name: str
    uid: str
    names: tuple[str, ...] = ()
    containers: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    cgroup_uid: str = ""  # if it differs from `uid`: for a static pod
    requests: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """(container, claim) → the claim's requests that it uses; "" among them means all of the claim."""
    workload: tuple[str, str] = ("", "")
    """Kind and name of the outermost owner that is known, or of the pod itself."""
    added: Mapping[str, int] = field(default_factory=dict)
    """Units by container that it was granted beyond its device ids while it runs."""

    def shown_labels(self, patterns: Sequence[re.Pattern[str]], prefix: str = "") -> dict[str, str]:
        """Its labels that any of `patterns` matches, all without patterns, under names that Prometheus takes.

        Those that would have one name get _conflict1, _conflict2 …, as in kube-state-metrics.
        """
        alike: dict[str, list[str]] = {}
        for label in sorted(self.labels):
            if not patterns or any(pattern.search(label) for pattern in patterns):
                name = re.sub(r"\W|^(?=\d)", "_", prefix + label, flags=re.ASCII)
                alike.setdefault(name, []).append(self.labels[label])
        return {
            name if len(values) == 1 else f"{name}_conflict{number}": value
            for name, values in alike.items()
            for number, value in enumerate(values, start=1)
        }

    def key(self, container: str) -> ContainerKey:
        return ContainerKey(self.namespace, self.name, container)


class NodePods:
    """The node's pods. `known` is false until a source has answered once."""

    def __init__(self) -> None:
        self.known = False
        self.version = 0  # incremented with each change, for those who keep results of lookups
        self._all: list[KnownPod] | None = None  # what `replace` was given, while that is everything
        self._by_uid: dict[str, KnownPod] = {}
        self._by_name: dict[tuple[str, str], KnownPod] = {}
        self._by_container: dict[str, ContainerKey] = {}

    def replace(self, pods: Iterable[KnownPod]) -> None:
        """Replace all pods of the node."""
        self.known = True
        pods = list(pods)
        if pods == self._all:
            return
        self._all = pods
        self.version += 1
        self._by_uid, self._by_name, self._by_container = {}, {}, {}
        for pod in pods:
            self._index(pod)

    def put(self, pod: KnownPod) -> None:
        self._all = None
        self.remove(pod.uid)
        self._index(pod)
        self.version += 1

    def remove(self, uid: str) -> None:
        gone = self._by_uid.pop(uid, None)
        if gone is None:
            return
        self._all = None
        self.version += 1
        self._by_uid.pop(gone.cgroup_uid, None)
        if self._by_name.get((gone.namespace, gone.name)) is gone:
            del self._by_name[gone.namespace, gone.name]
        for identifier in gone.containers:
            self._by_container.pop(identifier, None)

    def pod(self, namespace: str, name: str) -> KnownPod | None:
        return self._by_name.get((namespace, name))

    def added(self) -> dict[ContainerKey, int]:
        """Units beyond their device ids, of the containers that were granted some."""
        pods = self._by_uid.values()
        return {pod.key(name): units for pod in pods for name, units in pod.added.items()}

    def container_id(self, key: ContainerKey) -> str:
        """The id of the container that runs under this name; "" if unknown."""
        pod = self.pod(key.namespace, key.pod)
        named = [each for each, name in (pod.containers if pod else {}).items() if name == key.container]
        return named[-1] if named else ""

    def owner(self, ref: ContainerRef, holders: Mapping[str, tuple[str, ...]]) -> ContainerKey | None:
        """The container that a cgroup names; None if it belongs to no known pod.

        A container that has just started is not in the pod's status yet. Its pod is known by the uid, and if
        the pod has one container, or one with an allocation (`holders`, by ``namespace/pod``), it is that
        one.
        """
        exact = self._by_container.get(ref.container_id)
        if exact is not None:
            return exact
        pod = self._by_uid.get(ref.pod_uid)
        if pod is None:
            return None
        for names in (pod.names, holders.get(f"{pod.namespace}/{pod.name}", ())):
            if len(names) == 1:
                return pod.key(names[0])
        return None

    def _index(self, pod: KnownPod) -> None:
        self._by_uid[pod.uid] = pod
        if pod.cgroup_uid:
            self._by_uid[pod.cgroup_uid] = pod
        self._by_name[pod.namespace, pod.name] = pod
        for identifier, name in pod.containers.items():
            self._by_container[identifier] = pod.key(name)


def known_pod(pod: objects.Pod) -> KnownPod:
    """A pod of the API."""
    meta, status = pod.metadata, pod.status
    statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    containers = (*(pod.spec.init_containers or ()), *pod.spec.containers)
    requests: dict[tuple[str, str], frozenset[str]] = {}
    for container, claim, request in pod.used_requests:
        requests[container, claim] = requests.get((container, claim), frozenset()) | {request}
    held = pod_view(pod).request if ANN_GRANTED in (meta.annotations or {}) else None
    return KnownPod(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        added={each.name: each.added for each in (held.containers if held else ()) if each.added},
        names=tuple(each.name for each in containers),
        containers={  # "containerd://<id>" without the runtime
            each.container_id.rpartition("://")[2]: each.name for each in statuses if each.container_id
        },
        labels=meta.labels or {},
        cgroup_uid=(meta.annotations or {}).get(CONFIG_HASH, ""),
        requests=requests,
        workload=(made_by.kind, made_by.name) if (made_by := meta.controller) else ("Pod", meta.name),
    )


class LogFolders:
    """Pods by kubelet's log folders: ``<namespace>_<pod>_<uid>/<container>/``.

    A pod's folder is listed again only after a change: its time changes when a container's folder is created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[int, KnownPod]] = {}

    def pods(self) -> list[KnownPod]:
        """The current pods, by name of their folder. Raises OSError."""
        found: dict[str, tuple[int, KnownPod]] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                parts = entry.name.split("_")  # none of the three can contain an underscore
                if len(parts) != 3 or not entry.is_dir():
                    continue
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    changed_ns = entry.stat().st_mtime_ns
                    known = self._known.get(entry.name)
                    if known is None or known[0] != changed_ns:
                        settled = time.time_ns() - changed_ns > SETTLED_NS
                        with os.scandir(entry.path) as inside:
                            names = tuple(sorted(each.name for each in inside if each.is_dir()))
                        known = (changed_ns if settled else 0, KnownPod(parts[0], parts[1], parts[2], names))
                    found[entry.name] = known
        self._known = found
        return [pod for _, (_, pod) in sorted(found.items())]


MIDDLE = {
    "ReplicaSet": Resource("apps/v1", "replicasets", "ReplicaSet", objects.Owned),
    "Job": Resource("batch/v1", "jobs", "Job", objects.Owned),
}
"""What is itself made by something else, mostly: by a Deployment, or a CronJob."""
ASK_AGAIN_S = 60.0
MOST_OWNERS = 5000


async def follow_api(client: KubeClient, node: str, pods: NodePods, health: CollectorHealth) -> None:
    """Keeps `pods` up to date with the API server; runs until cancelled."""
    made_by: dict[str, tuple[str, str]] = {}  # uid of a ReplicaSet or Job → its own owner
    unknown: asyncio.Queue[tuple[objects.OwnerReference, KnownPod]] = asyncio.Queue()

    def put(pod: objects.Pod) -> None:
        known, owner = known_pod(pod), pod.metadata.controller
        if owner is not None and owner.kind in MIDDLE:
            if owner.uid in made_by:
                known = replace(known, workload=made_by[owner.uid])
            else:
                unknown.put_nowait((owner, known))
        pods.put(known)

    def changed(change: Change[objects.Pod]) -> None:
        pod = change.object
        if pod is None:  # the first list is complete
            pods.known = True
            health.good("pods", 0.0)
        elif change.kind is ChangeKind.DELETED or pod.status.phase in {"Succeeded", "Failed"}:
            pods.remove(pod.metadata.uid)
        else:
            put(pod)

    async def ask_for_owners() -> None:
        while True:
            owner, pod = await unknown.get()
            if (now := pods.pod(pod.namespace, pod.name)) is None or now.uid != pod.uid:
                continue
            if len(made_by) > MOST_OWNERS:
                made_by.clear()
            began_s = time.monotonic()
            try:
                if owner.uid not in made_by:
                    made = (await client.get(MIDDLE[owner.kind], owner.name, pod.namespace)).metadata
                    above = made.controller or owner
                    made_by[owner.uid] = above.kind, above.name
                    health.good("workloads", time.monotonic() - began_s)
                pods.put(replace(pods.pod(pod.namespace, pod.name) or now, workload=made_by[owner.uid]))
            except NotFoundError:
                made_by[owner.uid] = owner.kind, owner.name  # it was deleted, its pods stayed
            except KubeError as error:
                health.bad("workloads", str(error), time.monotonic() - began_s)
                unknown.put_nowait((owner, pod))
                await asyncio.sleep(ASK_AGAIN_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Reflector(client, PODS, changed, fields=f"spec.nodeName={node}", cached=True).run())
        tasks.create_task(ask_for_owners())


async def follow_log_folders(folder: Path, pods: NodePods, health: CollectorHealth) -> None:
    """Keeps `pods` up to date with kubelet's log folders, which needs no API permission."""
    folders = LogFolders(folder)
    while True:
        began_s = time.monotonic()
        try:
            found = await asyncio.to_thread(folders.pods)  # thousands of folders, maybe on a slow disk
            pods.replace(found)
            health.good("pods", time.monotonic() - began_s)
        except OSError as error:
            health.bad("pods", f"log folders: {error}", time.monotonic() - began_s)
        await asyncio.sleep(LOG_FOLDERS_EVERY_S)
