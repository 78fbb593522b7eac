"""A real node whose cards are given out by claims, and what tests ask of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from gpuslice.core.contract import CLAIM_CDI_KIND, CLAIM_CLASS, CLAIM_DRIVER
from simcluster import gpu
from tests import tools
from tests.chart import CHART, NAMED
from tests.e2e import control_plane, node
from tests.e2e.kubelet_rig import SHOW, Cluster, container, pod, start
from tests.e2e.node import Api, until

CLAIMS_SINCE = 34  # with a feature gate, see control_plane.claim_flags
HEALTH_SINCE = 36  # the pod's status tells of health: feature gate ResourceHealthStatus is on


def missing() -> str:
    """Why there is no node of claims here, in one line; empty when there is one."""
    if reason := node.missing():
        return reason
    if not os.access(control_plane.asset("kube-controller-manager"), os.X_OK):
        return f"KUBEBUILDER_ASSETS={os.environ['KUBEBUILDER_ASSETS']} has no kube-controller-manager"
    if control_plane.minor_version() < CLAIMS_SINCE:
        return f"claims of parts of cards need Kubernetes 1.{CLAIMS_SINCE}"
    return node.why_no_cdi()


LABELS = "cgpu=true,gpuslice.io/mode=claims"
DRIVERS_KIND = "nvidia.com/gpu"  # by which the card's own driver comes into containers
UNHEALTHY_FILE = "unhealthyDevices.json"
API = "/apis/resource.k8s.io/v1"
CLAIMS = f"{API}/namespaces/default/resourceclaims"
SETTINGS = {
    "syncFrequency": "3s"
}  # of kubelet: so often it tries again what a driver did not do, else each minute
CONTROLLERS = ("resourceclaim-controller", "statefulset-controller")
CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": CLAIM_CLASS},
    "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{CLAIM_DRIVER}"'}}]},
}


@contextmanager
def claims_cluster() -> Iterator[Cluster]:
    """One node of claims; kube-controller-manager makes claims of templates, and pods of StatefulSets."""
    with node.own_folder("gs-dra-") as folder, ExitStack() as stack:
        flags = control_plane.claim_flags()
        agent_flags = (f"--cdi-kind={DRIVERS_KIND}", f"--unhealthy-file={folder}/{UNHEALTHY_FILE}")
        found = start(folder, stack, LABELS, flags=flags, agent_flags=agent_flags, settings=SETTINGS)
        _write_drivers_cdi(found)
        stack.enter_context(control_plane.controller_manager(found.plane, *CONTROLLERS, flags=flags))
        found.api.create(f"{API}/deviceclasses", CLASS)
        yield found


def _write_drivers_cdi(cluster: Cluster) -> None:
    """As the vendor's toolkit does: what a container needs to use a card, here the simulated one's state."""
    folder = cluster.places.folder
    with gpu.Machine(folder / "gpus" / "machine") as machine:
        cards = [each.uuid for each in machine.cards()]
    edits = {
        "env": ["GPUSLICE_SIM_STATE=/run/gpus/machine"],
        "mounts": [{"hostPath": str(folder / "gpus"), "containerPath": "/run/gpus", "options": ["rbind"]}],
    }
    given = [{"name": each, "containerEdits": edits} for each in cards]
    document = {"cdiVersion": "0.6.0", "kind": DRIVERS_KIND, "devices": given}
    (cluster.places.cdi / "driver.json").write_text(json.dumps(document))


def prepared(cluster: Cluster) -> list[Path]:
    """The CDI files of claims."""
    return list(cluster.places.cdi.glob(f"{CLAIM_CDI_KIND.replace('/', '-')}-*"))


def leave_no_claims(cluster: Cluster) -> None:
    cluster.clear()
    for each in cluster.api.get(CLAIMS)["items"]:
        cluster.api.delete(f"{CLAIMS}/{each['metadata']['name']}")
    until(lambda: not cluster.api.get(CLAIMS)["items"], "all claims are gone")
    until(lambda: not prepared(cluster), "all CDI files of claims are gone")


def request(name: str, memory: str, **capacity: str) -> dict[str, Any]:
    exactly = {"deviceClassName": CLAIM_CLASS, "capacity": {"requests": {"memory": memory, **capacity}}}
    return {"name": name, "exactly": exactly}


def claim(cluster: Cluster, name: str, *requests: dict[str, Any], **devices: Any) -> None:
    spec = {"devices": {"requests": list(requests), **devices}}
    cluster.api.create(CLAIMS, {"kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec})


def claiming(name: str, claim_name: str, *containers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    claims = [{"name": "gpu", "resourceClaimName": claim_name}]
    return pod(name, *containers, resourceClaims=claims, **fields)


def using(request_name: str = "", script: str = SHOW, name: str = "main", **fields: Any) -> dict[str, Any]:
    use = {"name": "gpu", **({"request": request_name} if request_name else {})}
    return container(0, script, name, resources={"claims": [use]}, **fields)


def devices(cluster: Cluster) -> list[dict[str, Any]]:
    found = cluster.api.get(f"{API}/resourceslices")["items"]
    return [device for each in found for device in each["spec"]["devices"]]


def translate(api: Api, *values: str) -> None:
    """The chart's policy that turns unchanged manifests into claims, in labelled namespaces."""
    command = [str(tools.find("helm")), "template", "x", str(CHART), "--kube-version=1.36.0", *NAMED]
    command += ["--namespace=kube-system", f"--set={','.join(('dra.enabled=true', *values))}"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    group = "/apis/admissionregistration.k8s.io/v1"
    plurals = {
        "MutatingAdmissionPolicy": "mutatingadmissionpolicies",
        "MutatingAdmissionPolicyBinding": "mutatingadmissionpolicybindings",
    }
    for each in yaml.safe_load_all(rendered):
        if each and each["kind"] in plurals:
            api.create(f"{group}/{plurals[each['kind']]}", each)
