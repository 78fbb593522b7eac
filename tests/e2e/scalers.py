"""What people scale with, beside a real control plane: Prometheus, Prometheus Adapter and KEDA.

GPUSLICE_E2E_SCALERS names a folder with their programs, `prometheus-adapter`, `keda` and `keda-adapter`, and
`keda-crds.yaml`, the CustomResourceDefinitions of KEDA's release. Prometheus is found at the name and port
that our files expect: these programs see an /etc/hosts of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trustme
import yaml
from monitoring.build import ROOT, RULES
from monitoring.scaling import PROMETHEUS as PROMETHEUS_URL

from gpuslice_demo.ports import free_port
from simcluster.network import loopback_of
from tests.e2e import control_plane
from tests.e2e.control_plane import ControlPlane, process
from tests.e2e.node import Api
from tests.tools import TOOLS

PROMETHEUS = shutil.which("prometheus", path=f"{TOOLS}:{os.environ['PATH']}") or ""
FOLDER = os.environ.get("GPUSLICE_E2E_SCALERS", "")
ADAPTER, KEDA = ("prometheus-adapter",), ("keda", "keda-adapter", "keda-crds.yaml")
VALUES = ROOT / "monitoring/adapter/prometheus-adapter-values.yaml"
SCRAPE_S = 2


def missing(files: Sequence[str]) -> str:
    """Why nothing can be scaled by these here, in one line; empty when it can."""
    if not FOLDER:
        return f"GPUSLICE_E2E_SCALERS is not set: it names a folder with {', '.join((*ADAPTER, *KEDA))}"
    if os.geteuid() != 0:
        return "Prometheus gets the name that our files expect, which needs root"
    if not PROMETHEUS:
        return "Prometheus is not on PATH"
    absent = [name for name in files if not (Path(FOLDER) / name).exists()]
    return f"GPUSLICE_E2E_SCALERS={FOLDER} has no {', '.join(absent)}" if absent else ""


def aggregation_flags(folder: Path) -> tuple[str, ...]:
    """For kube-apiserver, which shows its caller to the servers behind it by a certificate."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "front-proxy-ca.pem")
    issued = authority.issue_cert("localhost", common_name="front-proxy-client")
    issued.cert_chain_pems[0].write_to_path(folder / "front-proxy.pem")
    issued.private_key_pem.write_to_path(folder / "front-proxy-key.pem")
    return (
        f"--requestheader-client-ca-file={folder / 'front-proxy-ca.pem'}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={folder / 'front-proxy.pem'}",
        f"--proxy-client-key-file={folder / 'front-proxy-key.pem'}",
    )


@contextmanager
def prometheus(folder: Path, *scraped: dict[str, Any]) -> Iterator[str]:
    """Prometheus with the shipped rules and these scrape configurations, at an address of its own."""
    number = free_port()
    address = f"127.{number >> 8}.{number & 255}.1:9090"
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(ROOT / RULES)],
        "scrape_configs": [{"honor_labels": True, **each} for each in scraped],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb"]
    command += [f"--web.listen-address={address}"]
    with process("prometheus", folder, command) as started:
        control_plane.wait_for(lambda: _ready(address), "prometheus", started, folder)
        name = urlsplit(PROMETHEUS_URL).hostname
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address.partition(':')[0]} {name}\n")
        yield f"http://{address}"


def _ready(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready") as answer:
        return bool(answer.status == 200)
    return False


def _beside(folder: Path, command: Sequence[str]) -> list[str]:
    """The command where Prometheus has its name."""
    hosts = f"mount --bind {folder / 'hosts'} /etc/hosts"
    return ["unshare", "--mount", "sh", "-c", f'{hosts} && exec "$@"', "sh", *command]


@contextmanager
def prometheus_adapter(plane: ControlPlane, api: Api) -> Iterator[None]:
    """Prometheus Adapter as its chart starts it with our values."""
    values = yaml.safe_load(VALUES.read_text())
    file = plane.folder / "adapter.yaml"
    file.write_text(yaml.safe_dump({"rules": values["rules"]["custom"]}))
    port, server = free_port(), values["prometheus"]
    command = [
        str(Path(FOLDER) / "prometheus-adapter"),
        f"--config={file}",
        f"--prometheus-url={server['url']}:{server['port']}",
        "--metrics-relist-interval=5s",  # a minute
        *_serving(plane, port, "adapter"),
    ]
    with process("prometheus-adapter", plane.folder, _beside(plane.folder, command)):
        _announce(api, "custom.metrics.k8s.io", port)
        yield


@contextmanager
def keda(plane: ControlPlane, api: Api) -> Iterator[None]:
    """KEDA: the operator, and the server of what it measures."""
    for each in yaml.safe_load_all((Path(FOLDER) / "keda-crds.yaml").read_text()):
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", each)
    api.create("namespaces", {"metadata": {"name": "keda"}})
    certificates, authority = plane.folder / "keda-certificates", trustme.CA()
    certificates.mkdir()
    authority.cert_pem.write_to_path(certificates / "ca.crt")
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(certificates / "tls.crt")
    issued.private_key_pem.write_to_path(certificates / "tls.key")
    measured, port = free_port(), free_port()
    operator = [
        str(Path(FOLDER) / "keda"),
        f"--cert-dir={certificates}",
        f"--metrics-service-bind-address=127.0.0.1:{measured}",
        f"--metrics-bind-address=127.0.0.1:{free_port()}",
        f"--health-probe-bind-address=127.0.0.1:{free_port()}",
    ]
    server = [
        str(Path(FOLDER) / "keda-adapter"),
        f"--metrics-service-address=localhost:{measured}",
        f"--port={free_port()}",
        *_serving(plane, port, certificates.name),
    ]
    environment = ["env", f"KUBECONFIG={plane.kubeconfig}", "WATCH_NAMESPACE=", "POD_NAMESPACE=keda"]
    environment.append("KEDA_CLUSTER_OBJECT_NAMESPACE=keda")
    with (
        process("keda", plane.folder, _beside(plane.folder, [*environment, *operator])),
        process("keda-adapter", plane.folder, [*environment, *server]),
    ):
        _announce(api, "external.metrics.k8s.io", port)
        yield


def _serving(plane: ControlPlane, port: int, name: str) -> list[str]:
    """The options of a server behind the API server."""
    return [
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={plane.folder / name}",
        f"--lister-kubeconfig={plane.kubeconfig}",
        f"--authentication-kubeconfig={plane.kubeconfig}",
        f"--authorization-kubeconfig={plane.kubeconfig}",
    ]


def _announce(api: Api, group: str, port: int) -> None:
    """The server as an API service, which the API server finds by an external name."""
    name = group.partition(".")[0]
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    api.create("namespaces/kube-system/services", {"metadata": {"name": name}, "spec": spec})
    service = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1beta1.{group}"},
        "spec": {
            "group": group,
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": name, "namespace": "kube-system", "port": port},
        },
    }
    api.create("/apis/apiregistration.k8s.io/v1/apiservices", service)


@contextmanager
def exporters(plane: ControlPlane) -> Iterator[dict[str, Any]]:
    """Has each exporter's pod scraped at its own address, as by the chart's ServiceMonitor.

    Debian's Prometheus knows nothing of Kubernetes, and is told of the pods by HTTP.
    """
    pods = "namespaces/kube-system/pods?labelSelector=component%3Dgpuslice-exporter"

    def targets(path: str) -> str:
        with closing(Api(plane)) as api:
            running = [each for each in api.get(pods)["items"] if each["status"]["phase"] == "Running"]
        found = [f"{loopback_of(each)}:9400" for each in running]
        return json.dumps([{"targets": found}])

    with served(targets, "application/json") as port:
        found = {"url": f"http://127.0.0.1:{port}/", "refresh_interval": "5s"}
        yield {"job_name": "gpuslice-exporter", "http_sd_configs": [found]}


@contextmanager
def served(answer: Callable[[str], str | None], kind: str = "text/plain") -> Iterator[int]:
    """The port where GET of a path gets this text; None is a 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answer(self.path)
            body = (text or "").encode()
            self.send_response(404 if text is None else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(BrokenPipeError):  # whoever asked did not wait
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
