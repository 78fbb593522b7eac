"""The real cluster-autoscaler beside a real control plane; its provider kwok makes nodes of API objects.

GPUSLICE_E2E_AUTOSCALER names a folder with its program, of Kubernetes 1.34 or newer and with this provider,
and with the CustomResourceDefinition of CapacityBuffers from its source.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.claims import Pool
from gpuslice.core.contract import ANN_ASSIGNED, CLAIM_DRIVER, GPU_MEM, LABEL_SHARED
from gpuslice_demo.ports import free_port
from tests.builders import api_node, make_card, make_node, make_placement, make_request
from tests.e2e import control_plane
from tests.e2e.cluster import Object, pod
from tests.e2e.control_plane import ControlPlane
from tests.e2e.node import Api, until

FOLDER = os.environ.get("GPUSLICE_E2E_AUTOSCALER", "")
PROGRAM, BUFFERS = "cluster-autoscaler", "autoscaling.x-k8s.io_capacitybuffers.yaml"
GROUP = "node.kubernetes.io/instance-type"
SCENARIO = "scenario"  # a label: the extender remembers groups of earlier ones
OF_GROUP = "cluster-autoscaler.kwok.nodegroup"
QUICK = (
    "--scale-down-unneeded-time=15s",
    "--scale-down-delay-after-add=3s",
    "--unremovable-node-recheck-timeout=2s",
)
WITH_BUFFERS = ("--capacity-buffer-controller-enabled", "--capacity-buffer-pod-injection-enabled")
QUIET_LOOPS = 15  # of the autoscaler, in which nothing changed: it has decided
PODS = "namespaces/default/pods"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
SETS = "/apis/apps/v1/namespaces/default/replicasets"


def missing() -> str:
    """Why there is no cluster-autoscaler here, in one line; empty when there is one."""
    if not FOLDER:
        return f"GPUSLICE_E2E_AUTOSCALER is not set: it names a folder with {PROGRAM}, {BUFFERS}"
    absent = [name for name in (PROGRAM, BUFFERS) if not os.access(os.path.join(FOLDER, name), os.R_OK)]
    return f"GPUSLICE_E2E_AUTOSCALER={FOLDER} has no {', '.join(absent)}" if absent else ""


def serve_buffers(api: Api) -> None:
    """Have the API server serve CapacityBuffers."""
    with open(os.path.join(FOLDER, BUFFERS)) as text:
        made = yaml.safe_load(text)
    api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", made)
    until(lambda: served(api), "CapacityBuffers are served")


def served(api: Api) -> bool:
    with suppress(NotFoundError):
        return bool(api.get("/apis/autoscaling.x-k8s.io/v1beta1/capacitybuffers"))
    return False


@dataclass(frozen=True)
class Group:
    """A group of equal nodes, as a cloud has them."""

    name: str
    cards: int = 2
    units: int = 16  # of each card
    most: int = 5
    cpu: int = 64
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()

    def node(self, name: str, scenario: str) -> Object:
        labels = {LABEL_SHARED: "true", GROUP: self.name, SCENARIO: scenario, **self.labels}
        sizes = {f"{OF_GROUP}/name": self.name, f"{OF_GROUP}/max-count": str(self.most)}
        made = api_node(name, self.units * self.cards, self.cards, labels=labels, annotations=sizes)
        made["metadata"]["annotations"]["kwok.x-k8s.io/node"] = "fake"
        made["spec"] = {"providerID": f"kwok:{name}", "taints": list(self.taints)}
        made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        for amounts in (made["status"]["capacity"], made["status"]["allocatable"]):
            amounts["cpu"] = str(self.cpu)
        return made


@dataclass(frozen=True)
class Held:
    """A pod that runs on a card from the start; it belongs to a ReplicaSet, so that it may be moved."""

    node: str
    card: int
    units: int


@dataclass(frozen=True)
class Outcome:
    """What became of a cluster: nodes more or less by group, and how many pods wait."""

    nodes: Mapping[str, int]
    waiting: int


class Scaled:
    """A cluster whose nodes the autoscaler adds and removes; kubelets and controllers are played.

    With `claims` agents are, too: each node's cards are published.
    """

    def __init__(self, api: Api, groups: Sequence[Group], scenario: str, *, claims: bool = False) -> None:
        self.api, self.groups = api, {each.name: each for each in groups}
        self.scenario = scenario.replace(" ", "-")
        self._claims, self._published = claims, set[str]()
        self._replaced = 0

    def start(self, nodes: Mapping[str, str], held: Sequence[Held]) -> None:
        """`nodes`: name → group."""
        for name, group_name in nodes.items():
            self.api.create("nodes", self.groups[group_name].node(name, self.scenario))
        for number, each in enumerate(held):
            group = self.groups[nodes[each.node]]
            placement = make_placement(each.node, each.units, each.card)
            node = make_node(each.node, (group.units,) * group.cards)
            made = self._owned(f"held-{number}", each.units)
            written = placement_annotations(placement, make_request(each.units), node, 1)
            made["metadata"]["annotations"] = written | {ANN_ASSIGNED: "true"}
            made["spec"]["nodeName"] = each.node
            self.api.create(PODS, made)

    def add(self, pods: Sequence[Object]) -> None:
        """Pods that wait."""
        for each in pods:
            selector = {**each["spec"].get("nodeSelector", {}), SCENARIO: self.scenario}
            self.api.create(PODS, {**each, "spec": {**each["spec"], "nodeSelector": selector}})

    def _owned(self, name: str, units: int) -> Object:
        """A pod of the ReplicaSet of all; nobody acts for that."""
        with suppress(NotFoundError):
            uid = self.api.get(f"{SETS}/held")["metadata"]["uid"]
            made = pod(name, units)
            owner = {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "name": "held",
                "uid": uid,
                "controller": True,
            }
            made["metadata"] |= {"ownerReferences": [owner], "labels": {"app": "held"}}
            return made
        template = {
            "metadata": {"labels": {"app": "held"}},
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        }
        spec = {"replicas": 1, "selector": {"matchLabels": {"app": "held"}}, "template": template}
        kind = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "held"}}
        self.api.create(SETS, {**kind, "spec": spec})
        return self._owned(name, units)

    def state(self) -> tuple[Counter[str], int]:
        """Nodes by group, and pods that wait. Who was evicted is gone then, and another asks for as much."""
        waiting = 0
        for each in self.api.get(PODS)["items"]:
            metadata = each["metadata"]
            if "deletionTimestamp" in metadata:
                with suppress(NotFoundError):
                    self.api.delete(f"{PODS}/{metadata['name']}?gracePeriodSeconds=0")
                self._replaced += 1
                (container,) = each["spec"]["containers"]
                units = int(container["resources"]["limits"][GPU_MEM])
                self.api.create(PODS, self._owned(f"again-{self._replaced}", units))
            waiting += "nodeName" not in each["spec"] or "deletionTimestamp" in metadata
        nodes = self.api.get("nodes")["items"]
        if self._claims:
            for each in nodes:
                self._publish(each["metadata"]["name"], self.groups[each["metadata"]["labels"][GROUP]])
        return Counter(each["metadata"]["labels"][GROUP] for each in nodes), waiting

    def _publish(self, name: str, group: Group) -> None:
        if name not in self._published:
            self._published.add(name)
            pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
            cards = tuple(make_card(index, group.units, node=name) for index in range(group.cards))
            spec: Object = {"driver": CLAIM_DRIVER, "nodeName": name, "pool": pool}
            spec |= {"devices": Pool(name, cards).devices({})}
            self.api.create(SLICES, {"metadata": {"name": f"{name}-0"}, "spec": spec})

    def clear(self) -> None:
        for each in self.api.get(PODS)["items"]:
            self.api.delete(f"{PODS}/{each['metadata']['name']}?gracePeriodSeconds=0")
        for each in self.api.get("nodes")["items"]:
            self.api.delete(f"nodes/{each['metadata']['name']}")
        for name in self._published:
            self.api.delete(f"{SLICES}/{name}-0")
        for name in ("kwok-provider-config", "kwok-provider-templates"):
            self.api.delete(f"namespaces/kube-system/configmaps/{name}")


@contextmanager
def cluster_autoscaler(plane: ControlPlane, scaled: Scaled, *flags: str) -> Iterator[int]:
    """The program for these groups; yields the port of its metrics."""
    templates = yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "List",
            "items": [group.node(name, scaled.scenario) for name, group in scaled.groups.items()],
        }
    )
    settings = {
        "apiVersion": "v1alpha1",
        "readNodesFrom": "configmap",
        "nodegroups": {"fromNodeLabelKey": GROUP},
        "nodes": {"skipTaint": True},
        "configmap": {"name": "kwok-provider-templates"},
    }
    maps = {"kwok-provider-config": ("config", yaml.safe_dump(settings))}
    maps["kwok-provider-templates"] = ("templates", templates)
    for name, (key, text) in maps.items():
        made = {"metadata": {"name": name}, "data": {key: text}}
        scaled.api.create("namespaces/kube-system/configmaps", made)
    port = free_port()
    environment = [f"KUBECONFIG={plane.kubeconfig}", "KWOK_PROVIDER_MODE=local", "POD_NAMESPACE=kube-system"]
    command = [
        "env",
        *environment,
        os.path.join(FOLDER, PROGRAM),
        "--cloud-provider=kwok",
        f"--kubeconfig={plane.kubeconfig}",
        "--namespace=kube-system",
        "--leader-elect=false",
        "--scan-interval=1s",
        f"--address=127.0.0.1:{port}",
        *flags,
    ]
    with control_plane.process("cluster-autoscaler", plane.folder, command) as started:
        control_plane.wait_for(lambda: loops(port) > 0, "cluster-autoscaler", started, plane.folder)
        yield port


def loops(port: int) -> int:
    """How often it has looked at the cluster."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        family = r'^cluster_autoscaler_function_duration_seconds_count\{function="main"\} (\S+)$'
        found = re.search(family, answer.read().decode(), re.MULTILINE)
        return int(float(found[1])) if found else 0
    return 0


def outcome(scaled: Scaled, port: int, before: Counter[str], quiet: int = QUIET_LOOPS) -> Outcome:
    """Once it has looked `quiet` times without anything that changed."""
    last: Any = None
    since = 0

    def decided() -> bool:
        nonlocal last, since
        now, seen = scaled.state(), loops(port)
        if now != last:
            last, since = now, seen
        return seen - since >= quiet

    until(decided, "the autoscaler has decided", 300)
    nodes, waiting = last
    names = sorted(nodes | before)
    return Outcome(
        {name: nodes[name] - before[name] for name in names if nodes[name] != before[name]}, waiting
    )
