"""A Deployment is scaled by what its pods hold of their cards and compute on them, and by nothing else.

Prometheus, Prometheus Adapter, KEDA, API server and controllers are real, and what we ship is used unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest
from monitoring.build import ROOT

from gpuslice_demo import guard
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.places import Places, find_places
from simcluster.workload.images import Image
from tests.chart import CHART
from tests.e2e import control_plane, scalers
from tests.e2e.control_plane import ControlPlane
from tests.e2e.kueue import Kubectl
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api, until
from tests.e2e.test_story import RealWorld, values_for

pytestmark = ON_A_CONTROL_PLANE
WITH_ADAPTER, WITH_KEDA = (
    pytest.mark.skipif(bool(scalers.missing(files)), reason=scalers.missing(files))
    for files in (scalers.ADAPTER, scalers.KEDA)
)

GIB = 1 << 30
METRIC = "pod_gpu_memory_used_bytes"
PODS = "namespaces/default/pods"
HPAS = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
CONTROLLERS = ("deployment-controller", "replicaset-controller", "horizontal-pod-autoscaler-controller")
EACH_SECOND = ("--horizontal-pod-autoscaler-sync-period=1s",)
EXAMPLES = ROOT / "examples" / "scaling"


class Infer:
    """A server whose replicas share what it holds of cards; kubelet's and the exporter's part is played."""

    def __init__(self, api: Api) -> None:
        self.holds_gib = 12
        self.unseen = 0  # pods of which the exporters cannot tell
        self._api, self._turn = api, threading.Lock()  # one connection, many who ask

    def pods(self, selector: str = "app=infer") -> list[str]:
        """Their names; those that are new run from now on."""
        with self._turn:
            return self._pods(selector)

    def _pods(self, selector: str) -> list[str]:
        items = self._api.get(f"{PODS}?labelSelector={quote(selector)}")["items"]
        for pod in items:
            if pod["status"].get("phase") == "Pending":
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
                status = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z", "conditions": [ready]}
                self._api.patch(f"{PODS}/{pod['metadata']['name']}/status", {"status": status})
        return [each["metadata"]["name"] for each in items if "deletionTimestamp" not in each["metadata"]]

    def page(self) -> str:
        """What exporters would say of them."""
        names = self.pods()
        each = self.holds_gib * GIB // max(1, len(names))
        family = "gpuslice_container_memory_used_bytes"
        lines = [f'{family}{{namespace="default",pod="{name}",container="main"}} {each}' for name in names]
        return "\n".join([f"# TYPE {family} gauge", *lines[self.unseen :], ""])


@pytest.fixture
def here(tmp_path: Path) -> Iterator[tuple[Api, Infer]]:
    with ExitStack() as stack:
        flags = scalers.aggregation_flags(tmp_path)
        plane = stack.enter_context(control_plane.api_server(tmp_path, flags=flags))
        api, theirs = Api(plane), Api(plane)
        stack.callback(api.close)
        stack.callback(theirs.close)
        infer = Infer(theirs)
        exporter = stack.enter_context(
            scalers.served(lambda path: infer.page() if path == "/metrics" else None)
        )
        scraped = {"job_name": "exporter", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}
        stack.enter_context(scalers.prometheus(tmp_path, scraped))
        stack.enter_context(scalers.prometheus_adapter(plane, api))
        stack.enter_context(control_plane.controller_manager(plane, *CONTROLLERS, flags=EACH_SECOND))
        yield api, infer


@WITH_ADAPTER
def test_replicas_follow_the_memory_that_their_pods_hold(here: tuple[Api, Infer]) -> None:
    api, infer = here
    labels = {"app": "infer"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    kind = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "infer"}}
    api.create(DEPLOYMENTS, {**kind, "spec": spec})
    metric = {"metric": {"name": METRIC}, "target": {"type": "AverageValue", "averageValue": "4Gi"}}
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "infer"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "infer"},
            "minReplicas": 1,
            "maxReplicas": 6,
            "metrics": [{"type": "Pods", "pods": metric}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }
    api.create(HPAS, hpa)

    def replicas() -> int:
        infer.pods()
        return int(api.get(f"{DEPLOYMENTS}/infer")["spec"]["replicas"])

    def says() -> str:
        status = api.get(f"{HPAS}/infer")["status"]
        return " ".join(each.get("message", "") for each in status.get("conditions", []))

    until(lambda: replicas() == 3, f"12 GiB are three times 4; {says()}", 120)
    infer.holds_gib = 4
    until(lambda: replicas() == 1, f"4 GiB are one; {says()}", 120)

    def used() -> str:
        (metric,) = api.get(f"{HPAS}/infer")["status"]["currentMetrics"]
        return str(metric["pods"]["current"]["averageValue"])

    until(lambda: used() in (f"{4 * GIB}", "4Gi"), f"one pod holds all; {used()}")

    # what is not known is not taken for 0: neither some pods' figures, nor all
    infer.holds_gib = 12
    until(lambda: replicas() == 3, f"three again; {says()}", 120)
    infer.holds_gib, infer.unseen = 3, 2
    until(lambda: used() in (f"{GIB}", "1Gi"), f"one is known, and holds 1 GiB; {used()}", 120)
    assert replicas() == 3
    infer.unseen = 3
    until(lambda: "unable to get metric" in says(), f"none is known; {says()}", 120)
    assert replicas() == 3
    infer.unseen = 0
    until(lambda: replicas() == 1, f"3 GiB are one; {says()}", 120)


# -- what is shipped, with real exporters -------------------------------------------------------------------

BUSY = "busy"  # a file in the world's folder; from then on each replica keeps its card busy
QUIET_LEVEL, BUSY_LEVEL, TARGET = 55, 90, 60
MORE_THAN_IT_IS = TARGET * 1.1  # percent; the autoscaler would add a replica


class ScaledWorld(RealWorld):
    """One node with its agent and exporter, and Kubernetes' own controllers."""

    async def _start_controllers(self) -> None:
        names = (*CONTROLLERS, "daemonset-controller", "node-lifecycle-controller")
        await asyncio.to_thread(
            self._sync.enter_context, control_plane.controller_manager(self._plane, *names, flags=EACH_SECOND)
        )

    def _api_flags(self) -> tuple[str, ...]:
        return scalers.aggregation_flags(self.places.folder)

    def _images(self) -> dict[str, Image]:
        """The example's server, which computes for this percentage of the time."""
        load = f"{Path(sys.executable).parent}/gpuslice load -t 1002 -d 3600 --level"
        busy = self.places.folder / BUSY
        script = (
            f"{load} {QUIET_LEVEL} & until [ -e {busy} ]; do sleep 1; done; kill $!; exec {load} {BUSY_LEVEL}"
        )
        server = Image(entrypoint=("sh", "-c", script, "vllm"))
        return {**super()._images(), "vllm/vllm-openai:v0.11.0": server}

    @property
    def plane(self) -> ControlPlane:
        return self._plane


@pytest.fixture
def places() -> Iterator[Places]:
    found = find_places()
    yield found
    guard.end(found.mark.encode())
    shutil.rmtree(found.root, ignore_errors=True)


class Watched:
    """What the autoscaler has measured and done so far."""

    def __init__(self, plane: ControlPlane, prometheus: str, name: str) -> None:
        self._api, self._prometheus, self._name = Api(plane), prometheus, name
        self.most = 0.0

    def close(self) -> None:
        self._api.close()

    def replicas(self) -> int:
        return int(self._api.get(f"{DEPLOYMENTS}/infer")["spec"]["replicas"])

    def measured(self) -> float:
        """Percent; 0 while it knows none."""
        status = self._api.get(f"{HPAS}/{self._name}").get("status", {})
        for source in (
            each.get("pods") or each.get("external") for each in status.get("currentMetrics") or ()
        ):
            if source:  # else it has no value yet
                text = str(source["current"].get("averageValue") or source["current"].get("value"))
                found = int(text[:-1]) / 1000 if text.endswith("m") else float(text)
                self.most = max(self.most, found)
                return found
        return 0.0

    def exporters(self) -> int:
        """Those whose series are among the last minute's, over which the shipped queries average."""
        self.measured()
        asked = "count(count by (instance) (count_over_time(gpuslice_container_sm_utilization_ratio[1m])))"
        with urllib.request.urlopen(f"{self._prometheus}/api/v1/query?query={quote(asked)}") as response:
            found = json.load(response)["data"]["result"]
        return int(found[0]["value"][1]) if found else 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scaler", "example", "autoscaler"),
    [
        pytest.param(scalers.prometheus_adapter, "hpa.yaml", "infer", id="adapter", marks=WITH_ADAPTER),
        pytest.param(scalers.keda, "keda.yaml", "keda-hpa-infer", id="keda", marks=WITH_KEDA),
    ],
)
async def test_replicas_follow_what_they_compute_and_not_that_an_exporter_is_replaced(
    scaler: Callable[[ControlPlane, Api], AbstractContextManager[None]],
    example: str,
    autoscaler: str,
    places: Places,
) -> None:
    node = NodePlan("n1", "192.168.2.1", ("V100-SXM2-16GB",), {"cgpu": "true"})
    async with ScaledWorld(places.below("s"), [node]) as world:
        with ExitStack() as stack:
            try:
                await asyncio.to_thread(_scale, stack, world, scaler, example, autoscaler)
            finally:
                await asyncio.to_thread(stack.close)


def _scale(
    stack: ExitStack,
    world: ScaledWorld,
    scaler: Callable[[ControlPlane, Api], AbstractContextManager[None]],
    example: str,
    autoscaler: str,
) -> None:
    plane, kubectl = world.plane, Kubectl(world.plane)
    values = f"image.repository=registry.example.com/gpuslice,exporter.enabled=true,{values_for('n1')}"
    command = ["helm", "install", "cgpu", str(CHART), "--namespace", "kube-system", "--set", values]
    subprocess.run(command, env=world.places.environment(), check=True, stdout=subprocess.DEVNULL)
    kubectl("apply", "-f", str(EXAMPLES / "infer.yaml"))
    kubectl("wait", "deployment/infer", "--for=condition=Available", "--timeout=300s")
    scraped = stack.enter_context(scalers.exporters(plane))
    prometheus = stack.enter_context(scalers.prometheus(plane.folder, scraped))
    api = stack.enter_context(contextlib.closing(Api(plane)))
    stack.enter_context(scaler(plane, api))
    kubectl("wait", "apiservice", "--all", "--for=condition=Available", "--timeout=300s")
    kubectl("apply", "-f", str(EXAMPLES / example))
    kubectl("wait", f"hpa/{autoscaler}", "--for=create", "--timeout=300s")
    watched = stack.enter_context(contextlib.closing(Watched(plane, prometheus, autoscaler)))
    until(
        lambda: watched.measured() > QUIET_LEVEL * 0.9,
        f"it sees what one replica computes: {watched.most}",
        240,
    )

    for _ in range(2):
        kubectl("delete", "pod", "-n", "kube-system", "-l", "component=gpuslice-exporter")
        kubectl("rollout", "status", "-n", "kube-system", "daemonset/gpuslice-exporter", "--timeout=300s")
    until(lambda: watched.exporters() > 1, "Prometheus has series of both", 60)
    until(lambda: watched.exporters() == 1, "and then those of the last alone", 180)
    assert watched.most < MORE_THAN_IT_IS
    assert watched.replicas() == 1

    (world.places.folder / BUSY).touch()
    until(lambda: watched.replicas() > 1, f"a busy replica gets help: {watched.most}", 240)
