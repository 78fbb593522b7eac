"""Kueue's controller, as its release's manifests configure it, beside a real control plane.

GPUSLICE_E2E_KUEUE names a folder with its program, `manager`, and what people apply, `manifests.yaml`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme
import yaml

from gpuslice_demo.ports import free_port
from tests.e2e import control_plane
from tests.e2e.control_plane import ControlPlane
from tests.e2e.node import until
from tests.integration.test_webhook import Certificates

FOLDER = os.environ.get("GPUSLICE_E2E_KUEUE", "")
KUBECTL = Path(sys.executable).parent / "kubectl"
CERTIFICATES = "/etc/kueue/metrics/certs"  # compiled in
CONTROLLERS = ("job-controller", "garbage-collector-controller")
_OBJECTS = {"CustomResourceDefinition", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"}


def missing() -> str:
    """Why there is no Kueue here, in one line; empty when there is one."""
    if not FOLDER:
        return "GPUSLICE_E2E_KUEUE is not set: it names a folder with Kueue's manager and manifests.yaml"
    if os.geteuid() != 0:
        return "Kueue's certificates are mounted where it looks for them, which needs root"
    absent = [name for name in ("manager", "manifests.yaml") if not (Path(FOLDER) / name).exists()]
    return f"GPUSLICE_E2E_KUEUE={FOLDER} has no {', '.join(absent)}" if absent else ""


class Kubectl:
    """An administrator's."""

    def __init__(self, plane: ControlPlane) -> None:
        self._command = [str(KUBECTL), "--kubeconfig", str(plane.kubeconfig)]

    def __call__(self, *words: str, given: str = "") -> str:
        done = self.tried(*words, given=given)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def tried(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        command = [*self._command, *words]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)

    def read(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("get", *words, "-o", "json"))
        return found


@contextmanager
def kueue(plane: ControlPlane, settings: Mapping[str, Any]) -> Iterator[Kubectl]:
    """The controller with `settings` over those of its release; it takes queues when this is entered."""
    certificates = Certificates(plane.folder, trustme.CA())
    certificates.renew()
    documents = [each for each in yaml.safe_load_all((Path(FOLDER) / "manifests.yaml").read_text()) if each]
    (configured,) = [each["data"] for each in documents if each["kind"] == "ConfigMap"]
    port, health = free_port(), free_port()
    configuration = yaml.safe_load(configured["controller_manager_config.yaml"])
    gates = {"VisibilityOnDemand": False, **settings.get("featureGates", {})}  # needs a Service
    configuration |= {
        **settings,
        "featureGates": gates,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": port, "certDir": str(plane.folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
    }
    file = plane.folder / "kueue.yaml"
    file.write_text(yaml.safe_dump(configuration))
    kubectl = Kubectl(plane)
    objects = [_reachable(each, port, certificates.bundle) for each in documents if each["kind"] in _OBJECTS]
    kubectl("apply", "--server-side", "-f", "-", given=yaml.safe_dump_all(objects))
    kubectl("wait", "--for=condition=established", "--all", "crd", "--timeout=60s")
    kubectl("create", "namespace", "kueue-system")
    program = str(Path(FOLDER) / "manager")
    there = f"mkdir -p {CERTIFICATES} && mount --bind {plane.folder} {CERTIFICATES}"  # seen by it alone
    command = ["env", f"KUBECONFIG={plane.kubeconfig}", "unshare", "--mount", "sh", "-c"]
    command.append(f"{there} && exec {program} --config={file}")
    with control_plane.process("kueue", plane.folder, command) as started:
        kind = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor"}
        probe = json.dumps({**kind, "metadata": {"name": "probe"}})

        def taken() -> bool:
            return kubectl.tried("apply", "-f", "-", given=probe).returncode == 0

        control_plane.wait_for(taken, "kueue", started, plane.folder)
        yield kubectl


def _reachable(document: dict[str, Any], port: int, bundle: str) -> dict[str, Any]:
    """The object with a port of this machine in the place of Kueue's Service."""
    hooks = document.get("webhooks") or [
        each for each in [document.get("spec", {}).get("conversion", {}).get("webhook")] if each
    ]
    for each in hooks:
        path = each["clientConfig"]["service"]["path"]
        each["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
    return document


def charged(kubectl: Kubectl, queue: str, resource: str) -> str:
    """How much of the queue's quota is in use."""
    used = kubectl.read("clusterqueue", queue).get("status", {}).get("flavorsUsage", [])
    return "".join(
        each["total"] for flavor in used for each in flavor["resources"] if each["name"] == resource
    )


def suspended(kubectl: Kubectl, job: str) -> bool:
    return bool(kubectl.read("job", job)["spec"]["suspend"])


def why_waiting(kubectl: Kubectl, job: str) -> str:
    """What Kueue says of the Job's workload."""
    uid = kubectl.read("job", job)["metadata"]["uid"]
    return " ".join(
        condition["message"]
        for each in kubectl.read("workloads")["items"]
        for condition in each.get("status", {}).get("conditions", [])
        if [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == [uid]
    )


def bound(kubectl: Kubectl, job: str) -> int:
    """Pods of the Job that have a node."""
    pods = kubectl.read("pods", "-l", f"job-name={job}")["items"]
    return sum("nodeName" in each["spec"] for each in pods)


def play(kubectl: Kubectl, file: Path, queue: str, resource: str, gib: tuple[str, str]) -> None:
    """The example as it is, then its Job twice more: two have room in 40 GiB, the third waits for one."""
    kubectl("apply", "-f", str(file))
    (job,) = [each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "Job"]
    first = job["metadata"]["name"]
    until(lambda: not suspended(kubectl, first), "Kueue lets the Job go")
    until(lambda: bound(kubectl, first) == 4, "its pods get parts of cards")
    until(lambda: charged(kubectl, queue, resource) == gib[0], f"the queue is charged {gib[0]}")
    for name in ("second", "third"):
        again = {**job, "metadata": {**job["metadata"], "name": name}}
        kubectl("apply", "-f", "-", given=yaml.safe_dump(again))
        until(functools.partial(why_waiting, kubectl, name), "Kueue looks at it")
    until(lambda: charged(kubectl, queue, resource) == gib[1], f"the queue is charged {gib[1]}")
    until(lambda: f"insufficient unused quota for {resource}" in why_waiting(kubectl, "third"), "it says why")
    assert (suspended(kubectl, "second"), suspended(kubectl, "third")) == (False, True)
    kubectl("delete", "job", first, "--cascade=foreground", "--wait=false")  # no kubelet ends its pods
    until(lambda: not suspended(kubectl, "third"), "the next gets its room")
    until(lambda: bound(kubectl, "third") == 4, "and its pods cards")
