"""The rights that the chart gives an agent as a driver of claims, judged by a real API server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import yaml

from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import ForbiddenError, InvalidError, KubeError
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.requests import APPLY_PATCH, JSON, MERGE_PATCH, expect_success
from gpuslice.core.claims import Pool
from gpuslice.core.contract import CLAIM_DRIVER
from gpuslice.core.model import Card
from tests import tools
from tests.blocking import BlockingTransport
from tests.chart import CHART, NAMED
from tests.e2e.control_plane import ControlPlane, api_server, claim_flags, minor_version
from tests.e2e.marks import WHERE_CLAIMS_ARE_KNOWN
from tests.e2e.node import Api, until

pytestmark = WHERE_CLAIMS_ARE_KNOWN

DRA = "/apis/resource.k8s.io/v1"
SLICES = f"{DRA}/resourceslices"
CLAIM = f"{DRA}/namespaces/default/resourceclaims/c"
AGENT = "system:serviceaccount:kube-system:gpushare-device-plugin"
WANTED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
PLACES = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    ),
}


class Agent:
    """Asks as the agent of one node."""

    def __init__(self, plane: ControlPlane, node: str) -> None:
        self._kubeconfig = str(plane.kubeconfig)
        self._headers = {
            "Impersonate-User": AGENT,
            "Impersonate-Group": "system:authenticated",
            "Impersonate-Extra-authentication.kubernetes.io%2Fnode-name": node,
        }

    def ask(self, method: str, path: str, document: Any = None, kind: str = JSON) -> dict[str, Any]:
        body = b"" if document is None else msgspec.json.encode(document)
        headers = {**self._headers, **({"Content-Type": kind} if body else {})}
        query = {"fieldManager": "agent", "force": "true"} if kind == APPLY_PATCH else {}
        request = ApiRequest(method, path, query, headers, body)
        answer = BlockingTransport(connect({}, kubeconfig=self._kubeconfig)).request(request)
        expect_success(answer, request)
        found: dict[str, Any] = msgspec.json.decode(answer.body)
        return found


def slice_of(node: str, driver: str = CLAIM_DRIVER) -> dict[str, Any]:
    pool = Pool(
        node, (Card(0, "GPU-1", 16130, 15, "Tesla V100"), Card(1, "GPU-2", 2000, 1)), unhealthy={1: "Xid 79"}
    )
    spec = {
        "driver": driver,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
        "devices": pool.devices({}),
    }
    return {"kind": "ResourceSlice", "metadata": {"name": f"{node}-0"}, "spec": spec}


NO_CHECK = "--feature-gates=DRAResourceClaimGranularStatusAuthorization=false"
"""As before 1.36, when the API server did not ask itself on which node a claim is."""


@pytest.fixture(scope="module", params=["with the API server's own check", "by the policy alone"])
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    alone = request.param == "by the policy alone"
    if not alone and minor_version() < 36:
        pytest.skip("the API server checks it from Kubernetes 1.36 on")
    flags = (NO_CHECK,) if minor_version() >= 36 else claim_flags()
    with (
        api_server(tmp_path_factory.mktemp("plane"), flags=flags if alone else ()) as running,
        closing(Api(running)) as api,
    ):
        command = [str(tools.find("helm")), "template", "x", str(CHART), "--kube-version=1.36.0", *NAMED]
        command += ["--namespace=kube-system", "--set=dra.enabled=true"]
        rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for each in yaml.safe_load_all(rendered):
            if each and each["kind"] in WANTED:
                api.create(PLACES[each["kind"]], each)
        foreign = Agent(running, "n1")

        def denied() -> bool:
            try:
                foreign.ask("POST", f"{SLICES}?dryRun=All", slice_of("n2"))
            except KubeError as error:
                return "own node only" in str(error)
            return False

        until(denied, "the policy is in force")
        yield running


def test_an_agent_publishes_changes_and_withdraws_its_own_cards(plane: ControlPlane) -> None:
    agent = Agent(plane, "n1")
    made = agent.ask("POST", SLICES, slice_of("n1"))
    made["spec"]["pool"]["generation"] = 2
    agent.ask("PUT", f"{SLICES}/n1-0", made)
    assert agent.ask("GET", f"{SLICES}?fieldSelector=spec.nodeName%3Dn1")["items"]
    with pytest.raises((ForbiddenError, InvalidError), match="own node only"):
        Agent(plane, "n2").ask("DELETE", f"{SLICES}/n1-0")
    agent.ask("DELETE", f"{SLICES}/n1-0")


def test_an_agent_publishes_as_our_driver_alone(plane: ControlPlane) -> None:
    with pytest.raises((ForbiddenError, InvalidError), match="as driver gpu"):
        Agent(plane, "n1").ask("POST", SLICES, slice_of("n1", "gpu.nvidia.com"))


def test_an_agent_writes_the_status_of_a_claim_and_not_its_allocation(plane: ControlPlane) -> None:
    api = Api(plane)
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpuslice.io"}}
    theirs = {"name": "nic", "exactly": {"deviceClassName": "theirs"}}
    spec = {"devices": {"requests": [request, theirs]}}
    api.create(CLAIM.rpartition("/")[0], {"metadata": {"name": "c"}, "spec": spec})
    result = {"request": "gpu", "driver": CLAIM_DRIVER, "pool": "n1", "device": "gpu-0"}
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]
    allocation: dict[str, Any] = {
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": terms},
    }
    nic = {"request": "nic", "driver": "gpu.nvidia.com", "pool": "theirs", "device": "gpu-0"}
    allocation["devices"]["results"].append(nic)
    api.patch(f"{CLAIM}/status", {"status": {"allocation": allocation}})
    agent = Agent(plane, "n1")
    device = {"driver": CLAIM_DRIVER, "pool": "n1", "device": "gpu-0", "data": {"units": 4}}
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "c", "namespace": "default"},
        "status": {"devices": [device]},
    }
    told = agent.ask("PATCH", f"{CLAIM}/status", document, APPLY_PATCH)
    assert told["status"]["devices"][0]["data"] == {"units": 4}
    foreign = {**device, "driver": "gpu.nvidia.com", "pool": "theirs"}
    api.patch(f"{CLAIM}/status", {"status": {"devices": [device, foreign]}})
    taken = {**allocation, "devices": {"results": [{**result, "device": "gpu-1"}, nic]}}
    for node, status, kind in (
        ("n1", {"devices": [device, {**foreign, "data": {"mine": 1}}]}, APPLY_PATCH),
        ("n1", {"devices": [device]}, MERGE_PATCH),  # without the other driver's
        ("n1", {"allocation": taken}, MERGE_PATCH),
        ("n1", {"allocation": None}, MERGE_PATCH),
        ("n1", {"reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]}, MERGE_PATCH),
        ("n1", {"devices": [{**device, "pool": "n2"}, foreign]}, MERGE_PATCH),
        ("n2", {"devices": [{**device, "data": {"units": 5}}]}, APPLY_PATCH),
        ("n2", {"devices": [foreign]}, MERGE_PATCH),
        ("", {"devices": [{**device, "data": {"units": 5}}]}, APPLY_PATCH),
    ):
        with pytest.raises(KubeError):
            Agent(plane, node).ask("PATCH", f"{CLAIM}/status", {**document, "status": status}, kind)
    assert len(api.get(CLAIM)["status"]["devices"]) == 2
    again = {**document, "status": {"devices": [{**device, "data": {"units": 5}}]}}
    told = agent.ask("PATCH", f"{CLAIM}/status", again, APPLY_PATCH)
    assert {"units": 5} in [each["data"] for each in told["status"]["devices"] if "data" in each]
    api.close()


def test_a_pod_that_shares_a_claim_hides_nothing(plane: ControlPlane) -> None:
    pods = "/api/v1/namespaces/default/pods"
    api = Api(plane)

    def pod(name: str, path: str, **claim: str) -> dict[str, Any]:
        mounts = [{"name": "v", "mountPath": path}]
        resources = {"claims": [{"name": "g"}]}
        container = {"name": "c", "image": "i", "resources": resources, "volumeMounts": mounts}
        volumes = [{"name": "v", "emptyDir": {}}]
        spec = {"resourceClaims": [{"name": "g", **claim}], "containers": [container], "volumes": volumes}
        return {"metadata": {"name": name}, "spec": spec}

    for path in ("/etc/ld.so.preload", "//usr/./lib/gpuslice/", "/etc/gpuslice/x", "/proc/self/root/etc"):
        with pytest.raises((ForbiddenError, InvalidError), match="claim that other pods may share"):
            api.create(pods, pod("hider", path, resourceClaimName="shared"))
    api.create(pods, pod("innocent", "/data", resourceClaimName="shared"))
    api.create(pods, pod("own", "/etc/gpuslice", resourceClaimTemplateName="its-own"))
    api.close()
