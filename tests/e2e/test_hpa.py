"""A Deployment is scaled by what its pods hold of their cards: real Prometheus, API server and controllers.

Between them stands an adapter of this test, as small as the interface of custom metrics allows; what it asks
Prometheus are the rules that are shipped for Prometheus Adapter. The pods' kubelet and exporter are played.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import trustme
import yaml
from monitoring.build import ROOT

from gpuslice_demo.ports import free_port
from tests.e2e import control_plane
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api, until
from tests.tools import TOOLS

PROMETHEUS = shutil.which("prometheus", path=f"{TOOLS}:{os.environ['PATH']}") or ""
pytestmark = [*ON_A_CONTROL_PLANE, pytest.mark.skipif(not PROMETHEUS, reason="Prometheus is not on PATH")]

GIB = 1 << 30
METRIC = "pod_gpu_memory_used_bytes"
GROUP = "/apis/custom.metrics.k8s.io/v1beta2"
PODS = "namespaces/default/pods"
HPAS = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"


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


class Adapter:
    """custom.metrics.k8s.io for metrics of pods, by the rules that are shipped."""

    def __init__(self, prometheus: str, infer: Infer) -> None:
        values = yaml.safe_load((ROOT / "monitoring/adapter/prometheus-adapter-values.yaml").read_text())
        self._rules = {rule["name"]["as"]: rule["metricsQuery"] for rule in values["rules"]["custom"]}
        self._prometheus, self._infer = prometheus, infer

    def answer(self, path: str) -> str | None:
        url = urlsplit(path)
        if url.path == GROUP:
            shape = {"singularName": "", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
            resources = [{"name": f"pods/{name}", **shape} for name in self._rules]
            return json.dumps(
                {
                    "kind": "APIResourceList",
                    "apiVersion": "v1",
                    "groupVersion": GROUP.removeprefix("/apis/"),
                    "resources": resources,
                }
            )
        namespace, pods, who, metric = ["", "", *url.path.split("/")][-4:]
        if pods != "pods" or who not in ("*", "%2A") or metric not in self._rules:
            return None
        (selector,) = parse_qs(url.query)["labelSelector"]
        return json.dumps(self._values(namespace, metric, selector))

    def _values(self, namespace: str, metric: str, selector: str) -> dict[str, Any]:
        matchers = f'namespace="{namespace}",pod=~"{"|".join(self._infer.pods(selector))}"'
        asked = self._rules[metric].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", matchers)
        with urllib.request.urlopen(f"{self._prometheus}/api/v1/query?query={quote(asked)}") as response:
            found = json.load(response)["data"]["result"]
        items = [
            {
                "describedObject": {"kind": "Pod", "namespace": namespace, "name": each["metric"]["pod"]},
                "metric": {"name": metric},
                "timestamp": "2026-01-01T00:00:00Z",
                "value": str(int(float(each["value"][1]))),
            }
            for each in found
        ]
        return {
            "kind": "MetricValueList",
            "apiVersion": GROUP.removeprefix("/apis/"),
            "metadata": {},
            "items": items,
        }


@contextmanager
def served(answer: Callable[[str], str | None], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port where GET of a path gets this text; None is a 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answer(self.path)
            body = (text or "").encode()
            self.send_response(404 if text is None else 200)
            self.send_header("Content-Type", "application/json" if body[:1] == b"{" else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    port = free_port()
    scrape = {"job_name": "exporter", "honor_labels": True, "scrape_interval": "1s"}
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with control_plane.process("prometheus", folder, command):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[tuple[Api, Infer]]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane.api_server(tmp_path))
        api, theirs = Api(plane), Api(plane)
        stack.callback(api.close)
        stack.callback(theirs.close)
        infer = Infer(theirs)
        exporter = stack.enter_context(served(lambda path: infer.page() if path == "/metrics" else None))
        url = stack.enter_context(prometheus(tmp_path, exporter))
        port = stack.enter_context(served(Adapter(url, infer).answer, context))
        _announced(api, port)
        flags = ("--horizontal-pod-autoscaler-sync-period=1s",)
        controllers = (
            "deployment-controller",
            "replicaset-controller",
            "horizontal-pod-autoscaler-controller",
        )
        stack.enter_context(control_plane.controller_manager(plane, *controllers, flags=flags))
        yield api, infer


def _announced(api: Api, port: int) -> None:
    """The adapter as an API service, which the API server finds by an external name."""
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    api.create("namespaces/kube-system/services", {"metadata": {"name": "adapter"}, "spec": spec})
    service = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1beta2.custom.metrics.k8s.io"},
        "spec": {
            "group": "custom.metrics.k8s.io",
            "version": "v1beta2",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": "adapter", "namespace": "kube-system", "port": port},
        },
    }
    api.create("/apis/apiregistration.k8s.io/v1/apiservices", service)


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
