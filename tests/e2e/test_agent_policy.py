"""What somebody with the token of a node's agent can do to a cluster: a real API server says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.requests import MERGE_PATCH
from tests.blocking import BlockingTransport
from tests.e2e.control_plane import ControlPlane, api_server, minor_version, missing
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api
from tests.integration.guarded_cluster import RELEASE_NAMESPACE, rendered

pytestmark = [
    *ON_A_CONTROL_PLANE,
    pytest.mark.skipif(
        not missing() and minor_version() < 30,
        reason="there are no ValidatingAdmissionPolicies before Kubernetes 1.30",
    ),
]

AGENT = f"system:serviceaccount:{RELEASE_NAMESPACE}:gpushare-device-plugin"
APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
CAPACITY = {"cpu": "8", "memory": "32Gi", "pods": "110"}
POLICY_S = 30.0
"""At most so long it takes the API server to heed a new policy."""
OBJECTS = rendered()
WHERE = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    ),
}
Document = dict[str, Any]


def event(name: str, component: str, host: str) -> Document:
    about = {"kind": "Pod", "namespace": "default", "name": "on-n1"}
    source = {"component": component, "host": host}
    return {
        "metadata": {"name": name},
        "involvedObject": about,
        "source": source,
        "reason": "A",
        "message": "a",
    }


class Thief:
    """Somebody who has the token of the agent of `node`."""

    def __init__(self, plane: ControlPlane, node: str) -> None:
        self._transport = BlockingTransport(connect({}, kubeconfig=str(plane.kubeconfig)))
        self._headers = {
            "Impersonate-User": AGENT,
            "Impersonate-Group": "system:serviceaccounts",
            "Impersonate-Extra-Authentication.kubernetes.io%2fnode-name": node,
        }

    def close(self) -> None:
        pass

    def status(self, method: str, path: str, document: object, kind: str = MERGE_PATCH) -> tuple[int, str]:
        headers = {**self._headers, "Content-Type": kind}
        where = path.partition("?")[0]
        query = dict(each.split("=") for each in path.partition("?")[2].split("&") if each)
        answer = self._transport.request(
            ApiRequest(method, f"/api/v1/{where}", query, headers, msgspec.json.encode(document))
        )
        return answer.status, str(msgspec.json.decode(answer.body).get("message", ""))


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with api_server(tmp_path_factory.mktemp("plane")) as running, closing(Api(running)) as api:
        for node in ("n1", "n2"):
            api.create("nodes", {"metadata": {"name": node, "labels": {"cgpu": "true"}}})
            api.patch(f"nodes/{node}/status", {"status": {"capacity": CAPACITY, "allocatable": CAPACITY}})
            api.create(
                "namespaces/default/pods",
                {
                    "metadata": {"name": f"on-{node}"},
                    "spec": {"nodeName": node, "containers": [{"name": "c", "image": "x"}]},
                },
            )
        api.create("namespaces/default/events", event("theirs", "kubelet", "n1"))
        for name in ("unhealthy-gpu-n2", "theirs"):
            api.create("namespaces/kube-system/configmaps", {"metadata": {"name": name}})
        for each in OBJECTS:
            if (where := WHERE.get(each["kind"])) is not None:
                api.create(where.format(each["metadata"].get("namespace", "")), each)
        with closing(Thief(running, "n1")) as thief:
            ends = time.monotonic() + POLICY_S
            while thief.status("PATCH", "nodes/n2", {"metadata": {"annotations": {"a": "b"}}})[0] != 422:
                assert time.monotonic() < ends, "the policy is not heeded"
                time.sleep(0.2)
        yield running


@pytest.fixture
def thief(plane: ControlPlane) -> Iterator[Thief]:
    with closing(Thief(plane, "n1")) as found:
        yield found


PLACED = {"metadata": {"annotations": {"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}}}
AMOUNTS = {"status": {"capacity": {"aliyun.com/gpu-count": "2"}, "allocatable": {"gpuslice.io/cards": "2"}}}
OWN_MAP = {"metadata": {"name": "unhealthy-gpu-n1"}, "data": {"gpus": "0"}}
CONFIG_MAPS = "namespaces/kube-system/configmaps"
EVENTS = "namespaces/default/events"
OWN_POD = "namespaces/default/pods/on-n1"


def test_what_its_work_needs_it_may_do(thief: Thief) -> None:
    assert thief.status("PATCH", OWN_POD, PLACED)[0] == 200
    assert thief.status("PATCH", "nodes/n1/status", AMOUNTS)[0] == 200
    assert (
        thief.status("PATCH", "nodes/n1", {"metadata": {"annotations": {"gpuslice.io/gpus": "[]"}}})[0] == 200
    )
    assert thief.status("POST", CONFIG_MAPS, OWN_MAP, "application/json")[0] == 201
    own = event("own", "gpushare-device-plugin", "n1")
    assert thief.status("POST", EVENTS, own, "application/json")[0] == 201
    assert thief.status("PATCH", f"{EVENTS}/own", {"count": 2})[0] == 200


ATTACKS: dict[str, tuple[str, str, object, str]] = {
    "status of another node": ("PATCH", "nodes/n2/status", AMOUNTS, MERGE_PATCH),
    "a pod of another node": ("PATCH", "namespaces/default/pods/on-n2", PLACED, MERGE_PATCH),
    "a ConfigMap of another node": ("PATCH", f"{CONFIG_MAPS}/unhealthy-gpu-n2", {"data": {}}, MERGE_PATCH),
    "a ConfigMap of others": ("PATCH", f"{CONFIG_MAPS}/theirs", {"data": {"a": "b"}}, MERGE_PATCH),
    "a ConfigMap with a made-up name": (
        "POST",
        CONFIG_MAPS,
        {"metadata": {"generateName": "unhealthy-gpu-"}},
        "application/json",
    ),
    "a ConfigMap made by apply": (
        "PATCH",
        f"{CONFIG_MAPS}/made?fieldManager=x&force=true",
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "made"}},
        APPLY,
    ),
    "finalizers": ("PATCH", OWN_POD, {"metadata": {"finalizers": ["a.b/c"]}}, MERGE_PATCH),
    "owners": (
        "PATCH",
        OWN_POD,
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u"}]}},
        MERGE_PATCH,
    ),
    "labels": ("PATCH", OWN_POD, {"metadata": {"labels": {"app": "db"}}}, MERGE_PATCH),
    "labels by apply": (
        "PATCH",
        f"{OWN_POD}?fieldManager=x&force=true",
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "on-n1", "labels": {"app": "db"}}},
        APPLY,
    ),
    "an image": (
        "PATCH",
        OWN_POD,
        [{"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}],
        JSON_PATCH,
    ),
    "a container": (
        "PATCH",
        f"{OWN_POD}/ephemeralcontainers",
        {"spec": {"ephemeralContainers": [{"name": "e", "image": "evil"}]}},
        MERGE_PATCH,
    ),
    "a pod's status": ("PATCH", f"{OWN_POD}/status", {"status": {"phase": "Failed"}}, MERGE_PATCH),
    "a token": (
        "POST",
        f"namespaces/{RELEASE_NAMESPACE}/serviceaccounts/default/token",
        {"spec": {}},
        "application/json",
    ),
    "another's event": ("PATCH", f"{EVENTS}/theirs", {"message": "all is well"}, MERGE_PATCH),
    "another's event as its own": (
        "PATCH",
        f"{EVENTS}/theirs",
        {"source": {"component": "gpushare-device-plugin"}},
        MERGE_PATCH,
    ),
    "an event in another's name": ("POST", EVENTS, event("b", "kubelet", "n1"), "application/json"),
    "an event in another node's name": (
        "POST",
        EVENTS,
        event("c", "gpushare-device-plugin", "n2"),
        "application/json",
    ),
    "a taint": ("PATCH", "nodes/n1", {"spec": {"unschedulable": True}}, MERGE_PATCH),
    "kubelet's port": (
        "PATCH",
        "nodes/n1/status",
        {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 22}}}},
        MERGE_PATCH,
    ),
    "volumes": (
        "PATCH",
        "nodes/n1/status",
        {"status": {"volumesAttached": [{"name": "v", "devicePath": "/d"}]}},
        MERGE_PATCH,
    ),
    "more memory than there is": (
        "PATCH",
        "nodes/n1/status",
        {"status": {"allocatable": {"memory": "9Ti"}}},
        MERGE_PATCH,
    ),
    "another's resource": (
        "PATCH",
        "nodes/n1/status",
        {"status": {"capacity": {"example.com/fpga": "9"}}},
        MERGE_PATCH,
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_else_is_let_through(thief: Thief, attack: str) -> None:
    status, message = thief.status(*ATTACKS[attack])
    assert (status == 403) or (status == 422 and "gpuslice-agent-own-node" in message), (status, message)


def test_a_token_that_names_no_node_writes_nothing(plane: ControlPlane) -> None:
    with closing(Thief(plane, "")) as thief:
        status, message = thief.status("PATCH", OWN_POD, PLACED)
    assert status == 422
    assert "own node" in message or "does not say" in message
