"""What each service account of the chart may do, as a real API server says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
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
from tests.e2e.node import Api, until
from tests.integration.guarded_cluster import RELEASE_NAMESPACE, Grant, grants_of, rendered
from tests.integration.test_rights import VALUES

pytestmark = ON_A_CONTROL_PLANE

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
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


def single_rights() -> Iterator[tuple[dict[str, Any], int, str, str]]:
    """Each role, the number of a rule of it, and one resource and one verb of that."""
    for role in OBJECTS:
        if role["kind"] in {"Role", "ClusterRole"}:
            for number, rule in enumerate(role["rules"]):
                for resource in rule.get("resources", ()):
                    for verb in rule["verbs"]:
                        yield role, number, resource, verb


def without(role: dict[str, Any], number: int, resource: str, verb: str) -> list[dict[str, Any]]:
    rules, rule = list(role["rules"]), role["rules"][number]
    other_resources = [each for each in rule["resources"] if each != resource]
    other_verbs = [each for each in rule["verbs"] if each != verb]
    rest = [{**rule, "resources": other_resources}, {**rule, "resources": [resource], "verbs": other_verbs}]
    rules[number : number + 1] = [each for each in rest if each["resources"] and each["verbs"]]
    return rules


def is_decided(api: Api, review: dict[str, Any], *, allowed: bool) -> bool:
    return bool(api.create(ACCESS_REVIEWS, review)["status"]["allowed"]) == allowed


def test_without_any_single_right_its_account_is_refused(plane: ControlPlane) -> None:
    """None of them is granted twice: what uses it (`tests/integration/test_rights.py`) would break."""
    subjects = {
        (each["kind"], each["metadata"].get("namespace", ""), each["roleRef"]["name"]): each["subjects"][0]
        for each in OBJECTS
        if "roleRef" in each and each["subjects"][0]["kind"] == "ServiceAccount"
    }
    with closing(Api(plane)) as api:
        for role, number, resource, verb in single_rights():
            namespace, rule = role["metadata"].get("namespace", ""), role["rules"][number]
            account = subjects.get((f"{role['kind']}Binding", namespace, role["metadata"]["name"]))
            if account is None or account["name"] == OTHERS_ROLES:
                continue
            kind, _, part = resource.partition("/")
            asked = {
                "namespace": namespace, "verb": verb, "group": rule["apiGroups"][0], "resource": kind,
                "subresource": part, "name": (rule.get("resourceNames") or [""])[0],
            }  # fmt: skip
            user = f"system:serviceaccount:{account['namespace']}:{account['name']}"

            review = {"spec": {"user": user, "resourceAttributes": asked}}
            what = f"{user}: {verb} {resource}"
            assert is_decided(api, review, allowed=True), what
            where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
            path = f"{where}/{role['kind'].lower()}s/{role['metadata']['name']}"
            api.patch(path, {"rules": without(role, number, resource, verb)})
            until(partial(is_decided, api, review, allowed=False), f"refused: {what}")
            api.patch(path, {"rules": role["rules"]})
            until(partial(is_decided, api, review, allowed=True), what)


def test_doctor_finds_the_rights_that_a_device_plugin_lacks(plane: ControlPlane) -> None:
    plugins = [
        Pod(metadata=Metadata(namespace=RELEASE_NAMESPACE), spec=PodSpec(service_account_name=account))
        for account in ("gpushare-device-plugin", NOBODY)
    ]
    connection = connect({}, kubeconfig=str(plane.kubeconfig))
    missing = asked(connection, lambda client: missing_rights(client, plugins))
    assert missing == {(RELEASE_NAMESPACE, NOBODY): list(PLUGIN_RIGHTS)}
