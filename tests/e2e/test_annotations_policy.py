"""Who can write what gpuslice records of a pod, in every way in which pods are written: a real API server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.requests import APPLY_PATCH, JSON, JSON_PATCH, MERGE_PATCH
from gpuslice.core.contract import AGENT, EXTENDER, NODE_ANNOTATION_WRITERS, POD_ANNOTATION_WRITERS
from tests.blocking import BlockingTransport
from tests.e2e.control_plane import ControlPlane, api_server, minor_version, missing
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api, until
from tests.e2e.test_agent_policy import WHERE
from tests.integration.guarded_cluster import RELEASE_NAMESPACE, rendered

pytestmark = [
    *ON_A_CONTROL_PLANE,
    pytest.mark.skipif(
        not missing() and minor_version() < 30,
        reason="there are no ValidatingAdmissionPolicies before Kubernetes 1.30",
    ),
]

PODS = "/api/v1/namespaces/team/pods"
ACCOUNT = f"system:serviceaccount:{RELEASE_NAMESPACE}:"
TENANT, ADMIN = "tenant", "namespace-admin"
NODE_CLAIM = "Impersonate-Extra-Authentication.kubernetes.io%2fnode-name"
WHO: dict[str, dict[str, str]] = {
    TENANT: {"Impersonate-User": TENANT},
    ADMIN: {"Impersonate-User": ADMIN},
    "agent": {"Impersonate-User": f"{ACCOUNT}gpushare-device-plugin", NODE_CLAIM: "n1"},
    "another agent": {"Impersonate-User": f"{ACCOUNT}gpushare-device-plugin", NODE_CLAIM: "n2"},
    "extender": {"Impersonate-User": f"{ACCOUNT}gpushare-schd-extender"},
}
POD = {"spec": {"containers": [{"name": "c", "image": "x"}]}}
NUMBERS = itertools.count()


class World:
    def __init__(self, plane: ControlPlane) -> None:
        self.api = Api(plane)
        self._transport = BlockingTransport(connect({}, kubeconfig=str(plane.kubeconfig)))

    def close(self) -> None:
        self.api.close()

    def ask(
        self, who: str, method: str, path: str, document: Any, kind: str = MERGE_PATCH
    ) -> tuple[int, str]:
        query = {"fieldManager": "x", "force": "true"} if kind == APPLY_PATCH else {}
        headers = {**WHO[who], "Impersonate-Group": "system:authenticated", "Content-Type": kind}
        body = msgspec.json.encode(document)
        answer = self._transport.request(ApiRequest(method, path, query, headers, body))
        return answer.status, str(msgspec.json.decode(answer.body).get("message", ""))

    def pod(self, life: str, **annotations: str) -> str:
        """A pod of the tenant, and how far it has come."""
        name = f"p{next(NUMBERS)}"
        spec = POD["spec"] | ({} if life == "waiting" else {"nodeName": "n1"})
        meta: dict[str, Any] = {"name": name, "annotations": annotations}
        if life == "ending":
            meta["finalizers"] = ["a.b/c"]
        self.api.create(PODS, {"metadata": meta, "spec": spec})
        if life in ("running", "ended", "ending"):
            phase = "Succeeded" if life == "ended" else "Running"
            self.api.patch(f"{PODS}/{name}/status", {"status": {"phase": phase}})
        if life == "ending":
            self.api.delete(f"{PODS}/{name}")
        return f"{PODS}/{name}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with api_server(tmp_path_factory.mktemp("plane")) as running, closing(World(running)) as world:
        api = world.api
        api.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
        for node in ("n1", "n2"):
            api.create("/api/v1/nodes", {"metadata": {"name": node, "labels": {"cgpu": "true"}}})
        for each in rendered():
            if (where := WHERE.get(each["kind"])) is not None:
                api.create(where.format(each["metadata"].get("namespace", "")), each)
        # more than a namespace's admin has: whatever a role may give, the names are not theirs
        parts = ("binding", "ephemeralcontainers", "resize", "status")
        resources = ["pods", *(f"pods/{each}" for each in parts), "bindings", "nodes", "nodes/status"]
        rules = [{"apiGroups": [""], "resources": resources, "verbs": ["*"]}]
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        api.create(f"{rbac}/clusterroles", {"metadata": {"name": "everything"}, "rules": rules})
        for user in (TENANT, ADMIN):
            subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
            role = {"kind": "ClusterRole", "name": "everything", "apiGroup": "rbac.authorization.k8s.io"}
            api.create(
                f"{rbac}/clusterrolebindings",
                {"metadata": {"name": user}, "roleRef": role, "subjects": [subject]},
            )

        def in_force() -> bool:
            tiers = POD | {"metadata": {"name": "try", "annotations": {"gpuslice.io/tiers": "{}"}}}
            status, said = world.ask(TENANT, "POST", f"{PODS}?dryRun=All", tiers, JSON)
            return status == 422 and "may be written only by gpuslice" in said

        until(in_force, "the policy is in force")
        yield world


NAMES = sorted(POD_ANNOTATION_WRITERS)
LIVES = ("waiting", "bound", "running", "ended", "ending")


def writes(path: str, name: str, value: str | None) -> dict[str, tuple[str, str, Any, str]]:
    """Every way to write an annotation of the pod at `path`."""
    pod = path.rpartition("/")[2]
    change = {"metadata": {"annotations": {name: value}}}
    escaped = name.replace("~", "~0").replace("/", "~1")
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "annotations": {name: value or ""}}}
    ways: dict[str, tuple[str, str, Any, str]] = {
        "patch": ("PATCH", path, change, MERGE_PATCH),
        "strategic": ("PATCH", path, change, "application/strategic-merge-patch+json"),
        "status": ("PATCH", f"{path}/status", change, MERGE_PATCH),
        "ephemeralcontainers": ("PATCH", f"{path}/ephemeralcontainers", change, MERGE_PATCH),
    }
    if minor_version() >= 33:
        ways["resize"] = ("PATCH", f"{path}/resize", change, MERGE_PATCH)
    if value is not None:
        ways["apply"] = ("PATCH", path, whole, APPLY_PATCH)
        json_patch = [{"op": "add", "path": f"/metadata/annotations/{escaped}", "value": value}]
        ways["json patch"] = ("PATCH", path, json_patch, JSON_PATCH)
    return ways


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("who", [TENANT, ADMIN, "another agent"])
def test_nobody_else_adds_changes_or_removes_a_record(world: World, who: str, life: str) -> None:
    for name in NAMES:
        for had, value in ((None, "x"), ("as recorded", "x"), ("as recorded", None)):
            annotations = {"theirs": "1"} | ({name: had} if had is not None else {})
            path = world.pod(life, **annotations)
            for way, request in writes(path, name, value).items():
                status, said = world.ask(who, *request)
                kept = world.api.get(path)["metadata"]["annotations"].get(name)
                assert kept == had, (name, way, status, said)
                if way not in ("ephemeralcontainers", "resize"):  # which take nothing else
                    assert status in (403, 422), (name, way, status, said)


@pytest.mark.parametrize("who", [TENANT, ADMIN])
def test_nobody_else_makes_or_binds_a_pod_with_a_record(world: World, who: str) -> None:
    for name in NAMES:
        for spec in ({}, {"nodeName": "n1"}):
            document = {
                "metadata": {"generateName": "p", "annotations": {name: "x"}},
                "spec": POD["spec"] | spec,
            }
            status, said = world.ask(who, "POST", PODS, document, JSON)
            assert status == 422, (name, said)
            assert f'"{name}"' in said
        path = world.pod("waiting")
        pod = path.rpartition("/")[2]
        target = {"apiVersion": "v1", "kind": "Node", "name": "n1"}
        meta: dict[str, Any] = {"name": pod, "annotations": {name: "x"}}
        document = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
        assert world.ask(who, "POST", f"{path}/binding", document, JSON)[0] == 422
        assert world.ask(who, "POST", f"{PODS.removesuffix('pods')}bindings", document, JSON)[0] == 422
        del meta["annotations"]
        assert world.ask(who, "POST", f"{path}/binding", document, JSON)[0] == 201


def test_what_else_authors_write_of_their_pods_is_theirs(world: World) -> None:
    for life in LIVES:
        path = world.pod(life, **{"gpuslice.io/tiers": "{}", "theirs": "1"})
        for name in ("theirs", "gpuslice.io/latency-class"):
            status, said = world.ask(TENANT, "PATCH", path, {"metadata": {"annotations": {name: "2"}}})
            assert status == 200, said


def test_the_processes_write_their_own(world: World) -> None:
    for name, writers in POD_ANNOTATION_WRITERS.items():
        path = world.pod("running")
        change = {"metadata": {"annotations": {name: "x"}}}
        if AGENT in writers:
            assert world.ask("agent", "PATCH", path, change)[0] == 200
        else:
            assert world.ask("agent", "PATCH", path, change)[0] == 422
        if EXTENDER in writers:
            assert world.ask("extender", "PATCH", world.pod("waiting"), change)[0] == 200
            target = {"apiVersion": "v1", "kind": "Node", "name": "n1"}
            waiting = world.pod("waiting")
            binding = {
                "metadata": {"name": waiting.rpartition("/")[2], **change["metadata"]},
                "target": target,
            }
            assert world.ask("extender", "POST", f"{waiting}/binding", binding, JSON)[0] == 201


def test_of_a_node_an_agent_writes_its_own_and_the_extender_its_part(world: World) -> None:
    for name, writers in NODE_ANNOTATION_WRITERS.items():
        change = {"metadata": {"annotations": {name: "x"}}}
        assert (world.ask("agent", "PATCH", "/api/v1/nodes/n1", change)[0] == 200) == (AGENT in writers)
        for path in ("/api/v1/nodes/n1", "/api/v1/nodes/n1/status"):
            assert world.ask("another agent", "PATCH", path, change)[0] == 422
        assert world.ask("extender", "PATCH", "/api/v1/nodes/n1", change)[0] == 200
