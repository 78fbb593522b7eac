"""What each service account of the chart may do, as a real API server says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.objects import Metadata, Pod, PodSpec
from gpuslice.adapters.kube.requests import JSON, expect_success
from gpuslice.diagnosis.doctor.rights import PLUGIN_RIGHTS, missing_rights
from tests.blocking import BlockingTransport, asked
from tests.e2e.control_plane import ControlPlane, api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api
from tests.integration.guarded_cluster import RELEASE_NAMESPACE, Grant, grants_of, rendered
from tests.integration.test_rights import VALUES

pytestmark = ON_A_CONTROL_PLANE

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
OBJECTS = rendered(*VALUES)
GRANTS = grants_of(OBJECTS)
OTHERS_ROLES = "gpuslice-scheduler"  # it has kube-scheduler's own besides
NOBODY = "nobody-in-particular"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with api_server(tmp_path_factory.mktemp("plane")) as running, closing(Api(running)) as api:
        api.create("namespaces", {"metadata": {"name": "nvidia"}})
        for each in OBJECTS:
            kind, namespace = each["kind"], each["metadata"].get("namespace", "")
            if kind.removesuffix("Binding") in {"Role", "ClusterRole"}:
                where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
                api.create(f"{where}/{kind.lower()}s", each)
        yield running


def rules(plane: ControlPlane, account: str, namespace: str) -> set[Grant]:
    """What the account may do in a namespace and in the whole cluster."""
    headers = {
        "Impersonate-User": f"system:serviceaccount:{RELEASE_NAMESPACE}:{account}",
        "Impersonate-Group": "system:authenticated",
        "Content-Type": JSON,
    }
    body = msgspec.json.encode({"spec": {"namespace": namespace}})
    request = ApiRequest("POST", REVIEWS, {}, headers, body)
    answer = BlockingTransport(connect({}, kubeconfig=str(plane.kubeconfig))).request(request)
    expect_success(answer, request)
    status: dict[str, Any] = msgspec.json.decode(answer.body)["status"]
    assert not status["incomplete"]
    return {
        Grant(group, resource, verb, "", name)
        for rule in status["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames") or [""]
    }


@pytest.mark.parametrize("account", sorted(GRANTS.keys() - {OTHERS_ROLES}))
def test_an_account_may_do_what_its_roles_say_and_nothing_else(plane: ControlPlane, account: str) -> None:
    for namespace in ("default", RELEASE_NAMESPACE, "nvidia"):
        wanted = {
            grant._replace(namespace="") for grant in GRANTS[account] if grant.namespace in {"", namespace}
        }
        anybody = rules(plane, NOBODY, namespace)  # to ask about oneself
        assert rules(plane, account, namespace) - anybody == wanted


def test_doctor_finds_the_rights_that_a_device_plugin_lacks(plane: ControlPlane) -> None:
    plugins = [
        Pod(metadata=Metadata(namespace=RELEASE_NAMESPACE), spec=PodSpec(service_account_name=account))
        for account in ("gpushare-device-plugin", NOBODY)
    ]
    connection = connect({}, kubeconfig=str(plane.kubeconfig))
    missing = asked(connection, lambda client: missing_rights(client, plugins))
    assert missing == {(RELEASE_NAMESPACE, NOBODY): list(PLUGIN_RIGHTS)}
