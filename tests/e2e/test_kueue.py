"""Kueue's charge for parts of cards, by its own controller: the examples, and pods that become claims.

GPUSLICE_E2E_KUEUE names a folder with Kueue's `manager` and, from its sources, `config/components`. Nothing
is scheduled: Kueue decides before there is a pod.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from gpuslice.adapters.kube.errors import KubeError
from gpuslice.core.contract import GPU_MEM, LABEL_CLAIMS
from gpuslice_demo.ports import free_port
from tests.e2e import control_plane
from tests.e2e.claims_rig import API, CLASS, translate
from tests.e2e.control_plane import ControlPlane
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api, until

HERE = os.environ.get("GPUSLICE_E2E_KUEUE", "")
CLAIMS_KNOWN = control_plane.missing() == "" and control_plane.minor_version() >= 36
pytestmark = [
    *ON_A_CONTROL_PLANE,
    pytest.mark.skipif(not HERE, reason="GPUSLICE_E2E_KUEUE is not set; it names a folder with Kueue"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Kueue reads certificates from /etc, so root gives it one"),
    pytest.mark.skipif(not CLAIMS_KNOWN, reason="claims of parts of cards need Kubernetes 1.36"),
]
QUEUES = Path(__file__).resolve().parents[2] / "examples" / "queues"
KUEUE = "/apis/kueue.x-k8s.io/v1beta1"
MINE = "namespaces/default"
JOBS = f"/apis/batch/v1/{MINE}/jobs"
PATHS = {
    "ResourceFlavor": f"{KUEUE}/resourceflavors",
    "ClusterQueue": f"{KUEUE}/clusterqueues",
    "LocalQueue": f"{KUEUE}/{MINE}/localqueues",
    "ResourceClaimTemplate": f"{API}/{MINE}/resourceclaimtemplates",
    "Job": JOBS,
}
CONTROLLERS = ("job-controller", "garbage-collector-controller", "resourceclaim-controller")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A control plane with Kueue, configured as the example says."""
    folder = tmp_path_factory.mktemp("kueue")
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane.api_server(folder))
        stack.enter_context(control_plane.controller_manager(plane, *CONTROLLERS))
        found = stack.enter_context(closing(Api(plane)))
        found.create(f"{API}/deviceclasses", CLASS)
        port, authority = free_port(), trustme.CA()
        bundle = authority.cert_pem.bytes()
        for each in _definitions(port, bundle):
            found.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", each)
        until(lambda: "workloads" in _served(found), "the API server knows Kueue's kinds")
        stack.enter_context(_manager(plane, folder, port, authority))
        for each in _webhooks(port, bundle):
            path = f"/apis/admissionregistration.k8s.io/v1/{each['kind'].lower()}s"
            found.create(path, each)
        yield found


def _url(port: int, path: str, bundle: bytes) -> dict[str, str]:
    return {"url": f"https://127.0.0.1:{port}{path}", "caBundle": base64.b64encode(bundle).decode()}


def _definitions(port: int, bundle: bytes) -> Iterator[dict[str, Any]]:
    """Kueue's kinds; those of two versions are converted by it."""
    folder = Path(HERE) / "config" / "components" / "crd"
    for file in sorted((folder / "bases").glob("*.yaml")):
        made = yaml.safe_load(file.read_text())
        if (folder / "patches" / f"webhook_in_{made['spec']['names']['plural']}.yaml").exists():
            client = _url(port, "/convert", bundle)
            webhook = {"clientConfig": client, "conversionReviewVersions": ["v1"]}
            made["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
        yield made


def _webhooks(port: int, bundle: bytes) -> Iterator[dict[str, Any]]:
    """Those of Kueue's own kinds and of Jobs: the others belong to frameworks that are not here."""
    file = Path(HERE) / "config" / "components" / "webhook" / "manifests.yaml"
    for made in yaml.safe_load_all(file.read_text()):
        wanted = ("kueue.x-k8s.io", "batch")
        made["webhooks"] = [each for each in made["webhooks"] if each["rules"][0]["apiGroups"][0] in wanted]
        for each in made["webhooks"]:
            each["clientConfig"] = _url(port, each["clientConfig"]["service"]["path"], bundle)
        yield made


def _served(api: Api) -> set[str]:
    groups = {each["name"] for each in api.get("/apis")["groups"]}
    return {each["name"] for each in api.get(KUEUE)["resources"]} if "kueue.x-k8s.io" in groups else set()


def _manager(plane: ControlPlane, folder: Path, port: int, authority: trustme.CA) -> Any:
    """Kueue's controller, in a mount namespace of its own where it finds a certificate for its metrics."""
    certificates = folder / "etc" / "kueue" / "metrics" / "certs"
    certificates.mkdir(parents=True)
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(certificates / "tls.key")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(certificates / "tls.crt", append=True)
    shutil.copy("/etc/hosts", folder / "etc" / "hosts")
    configuration = documented_configuration() | {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": "kube-system",
        "health": {"healthProbeBindAddress": "127.0.0.1:0"},
        "metrics": {"bindAddress": "127.0.0.1:0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": "/etc/kueue/metrics/certs"},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job"]},
    }
    configuration["featureGates"] = {**configuration["featureGates"], "VisibilityOnDemand": False}
    file = folder / "kueue.yaml"
    file.write_text(yaml.safe_dump(configuration))
    program = f"{HERE}/manager --config={file} --kubeconfig={plane.kubeconfig}"
    inside = f"mount --bind {folder}/etc /etc && exec {program}"
    return control_plane.process("kueue", folder, ["unshare", "--mount", "sh", "-c", inside])


def documented_configuration() -> dict[str, Any]:
    """What the example tells an administrator to put into Kueue's configuration."""
    text = (QUEUES / "kueue-claims.yaml").read_text().partition("apiVersion: kueue")[0]
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    return dict(yaml.safe_load("\n".join(lines)))


def queued(api: Api, file: str, name: str) -> list[str]:
    """The example's objects and its Job three times, of which two fit into the queue."""
    names = [f"{name}-{number}" for number in range(3)]
    for each in yaml.safe_load_all((QUEUES / file).read_text()):
        for document in [named(each, one) for one in names] if each["kind"] == "Job" else [each]:
            until(partial(_created, api, document), f"{document['metadata']['name']} is taken")
    return names


def named(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {**document, "metadata": {**document["metadata"], "name": name}}


def _created(api: Api, document: dict[str, Any]) -> bool:
    """False while Kueue does not serve its webhooks yet."""
    try:
        api.create(PATHS[document["kind"]], document)
    except KubeError as error:
        if "failed calling webhook" in str(error) or "conversion webhook" in str(error):
            return False
        raise
    return True


def suspended(api: Api, name: str) -> bool:
    return bool(api.get(f"{JOBS}/{name}")["spec"].get("suspend"))


def refusal(api: Api, job: str) -> str:
    """Why Kueue holds it back, as its Workload tells."""
    for each in api.get(f"{KUEUE}/{MINE}/workloads")["items"]:
        if each["metadata"]["ownerReferences"][0]["name"] == job:
            conditions = each.get("status", {}).get("conditions", [])
            return next((one["message"] for one in conditions if one["type"] == "QuotaReserved"), "")
    return ""


@pytest.mark.parametrize(
    ("file", "name", "resource"),
    [("kueue.yaml", "queued", GPU_MEM), ("kueue-claims.yaml", "queued-claims", "shared-card-memory")],
    ids=["the workload's own amount", "what its templates claim"],
)
def test_a_queue_of_40_gib_takes_two_jobs_of_16_and_the_third_when_one_is_gone(
    api: Api, file: str, name: str, resource: str
) -> None:
    first, second, third = queued(api, file, name)
    until(lambda: not suspended(api, first) and not suspended(api, second), "two are let go")
    until(lambda: resource in refusal(api, third), f"it says what is short; {refusal(api, third)}")
    assert suspended(api, third)
    api.delete(f"{JOBS}/{first}?propagationPolicy=Background")
    until(lambda: not suspended(api, third), "the third is let go")


def test_an_unchanged_job_is_charged_before_its_pods_become_claims(api: Api) -> None:
    """In a labelled namespace: the queue counts aliyun.com/gpu-mem, and the pods have none of it left."""
    translate(api)
    api.patch(MINE, {"metadata": {"labels": {LABEL_CLAIMS: "true"}}})
    for each in api.get(JOBS)["items"]:
        api.delete(f"{JOBS}/{each['metadata']['name']}?propagationPolicy=Background")
    until(lambda: not api.get(f"{KUEUE}/{MINE}/workloads")["items"], "the queue is empty")
    (job,) = (
        each for each in yaml.safe_load_all((QUEUES / "kueue.yaml").read_text()) if each["kind"] == "Job"
    )

    def claims() -> list[str]:
        pods = api.get(f"{MINE}/pods?labelSelector=job-name%3Dclaimed")["items"]
        return [
            each["resourceClaimTemplateName"]
            for pod in pods
            for each in pod["spec"].get("resourceClaims", ())
        ]

    api.create(JOBS, named(job, "claimed"))
    until(lambda: len(claims()) == 4, "its pods claim")
    assert set(claims()) == {"gpuslice-4"}
    (workload,) = api.get(f"{KUEUE}/{MINE}/workloads")["items"]
    (charged,) = workload["status"]["admission"]["podSetAssignments"]
    assert charged["resourceUsage"][GPU_MEM] == "16"
