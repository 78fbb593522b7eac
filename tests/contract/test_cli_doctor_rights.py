"""``gpuslice doctor`` about what a stolen token is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.core.contract import CARD_FIT
from gpuslice.diagnosis.claims import Claims
from gpuslice.diagnosis.doctor.facts import Facts, Level
from gpuslice.diagnosis.doctor.queues import card_fit
from gpuslice.diagnosis.doctor.rights import EXCESS_RIGHTS, excess_rights
from gpuslice.diagnosis.doctor.trust import excess, in_the_clear, policies
from simcluster.apiserver.server import ApiServer
from tests.builders import api_pod
from tests.chart import render
from tests.integration.extender_rig import Api
from tests.integration.guarded_cluster import Grant, GuardedCluster, grants_of, rendered
from tests.integration.test_rights import VALUES

ACCOUNT = ("kube-system", "gpushare-device-plugin")
WHOLE = Facts(plugins=[Pod()])


def of_chart(helm: str, *values: str) -> list[dict[str, Any]]:
    objects = render(helm, "--kube-version=1.34.0", *values)
    return [each for (kind, _), each in objects.items() if kind.startswith("ValidatingAdmissionPolicy")]


def test_the_charts_own_policies_are_all_that_is_wanted(helm: str) -> None:
    assert not list(policies(replace(WHOLE, policies=of_chart(helm))))
    claims = of_chart(helm, "--set=dra.enabled=true")
    assert not list(policies(replace(WHOLE, policies=claims, claims=Claims())))
    named = of_chart(helm, "--set=fullnameOverride=own")
    assert not list(policies(replace(WHOLE, policies=named)))


def test_a_policy_that_is_missing_or_not_enforced_is_named_with_its_risk(helm: str) -> None:
    found = list(policies(replace(WHOLE, policies=[])))
    assert [each.where.rpartition(" ")[2] for each in found] == [
        "gpuslice-agent-own-node",
        "gpuslice-annotations",
    ]
    assert "all nodes and their pods" in found[0].what
    assert len(list(policies(replace(WHOLE, policies=[], claims=Claims())))) == 4
    unbound = [each for each in of_chart(helm) if not each["kind"].endswith("Binding")]
    assert all("is not enforced" in each.what for each in policies(replace(WHOLE, policies=unbound)))


@pytest.mark.parametrize(
    ("kind", "weaker"),
    [
        ("Binding", {"validationActions": ["Audit"]}),
        ("Binding", {"validationActions": ["Warn", "Audit"]}),
        ("Binding", {"policyName": "another"}),
        ("Binding", {"matchResources": {"namespaceSelector": {"matchLabels": {"guarded": "true"}}}}),
        ("Binding", {"matchResources": {"objectSelector": {"matchLabels": {"guarded": "true"}}}}),
        ("Binding", {"matchResources": {"excludeResourceRules": [{"resources": ["pods"]}]}}),
        ("Binding", {"paramRef": {"name": "none", "parameterNotFoundAction": "Allow"}}),
        ("Policy", {"failurePolicy": "Ignore"}),
        ("Policy", {"matchConstraints": {"namespaceSelector": {"matchLabels": {"guarded": "true"}}}}),
    ],
)
def test_a_policy_that_lets_some_writes_past_is_not_enforced(
    helm: str, kind: str, weaker: dict[str, Any]
) -> None:
    changed = [
        each | {"spec": each["spec"] | weaker} if each["kind"].endswith(kind) else each
        for each in of_chart(helm)
    ]
    found = list(policies(replace(WHOLE, policies=changed)))
    assert [each.where.rpartition("-")[2] for each in found] == ["node", "annotations"]
    assert all("is not enforced" in each.what for each in found)


def test_a_policy_of_somebody_else_with_such_a_name_is_not_ours(helm: str) -> None:
    theirs = [each | {"metadata": each["metadata"] | {"labels": {}}} for each in of_chart(helm)]
    assert all("does not exist" in each.what for each in policies(replace(WHOLE, policies=theirs)))


@pytest.mark.parametrize(
    ("what", "grants"),
    [
        ("everything", [Grant("*", "*", "*")]),
        (
            "the role view",
            [Grant("", resource, verb) for resource in ("pods", "configmaps") for verb in ("get", "list")],
        ),
        ("a role of its namespace", [Grant("", "secrets", "get", "kube-system")]),
        ("all verbs of a resource", [Grant("", "serviceaccounts", "*")]),
        ("what kubelets may", [Grant("", "nodes/proxy", "get")]),
    ],
)
async def test_an_account_with_another_role_is_found(what: str, grants: list[Grant]) -> None:
    own = grants_of(rendered(*VALUES))
    for given in ({}, {ACCOUNT[1]: set(grants)}):
        cluster = GuardedCluster({name: has | given.get(name, set()) for name, has in own.items()})
        api = Api(cluster)
        for account in own:
            made = api_pod(account, "0", labels={"app": "gpushare", "component": account})
            made["metadata"]["namespace"] = "kube-system"
            made["spec"]["serviceAccountName"] = account
            api.call("POST", "/api/v1/namespaces/kube-system/pods", made)
        async with ApiServer(cluster) as server, HttpTransport(Connection(server.url)) as transport:
            client = KubeClient(transport)
            found = await excess_rights(client, (await client.list(PODS)).items or ())
        assert found.keys() == ({ACCOUNT} if given else set()), (what, found)


def test_where_policies_are_unknown_or_nothing_is_installed_nothing_is_said() -> None:
    assert not list(policies(replace(WHOLE, policies=None)))
    assert not list(policies(Facts(policies=[])))


def test_rights_beyond_the_charts_are_named() -> None:
    (found,) = excess(Facts(excess_rights={ACCOUNT: EXCESS_RIGHTS[:2]}))
    assert found.level is Level.WARNING
    assert found.where == "account kube-system/gpushare-device-plugin"
    assert "may also get secrets, get configmaps: more than the chart grants" in found.what
    assert not list(excess(Facts()))


def pod(component: str, *arguments: str) -> dict[str, Any]:
    metadata = {"namespace": "kube-system", "name": "p", "labels": {"component": component}}
    return {"metadata": metadata, "spec": {"containers": [{"name": "c", "args": list(arguments)}]}}


def test_an_extender_that_answers_kueue_is_asked_by_a_check_or_that_is_said() -> None:
    answers = [pod("gpushare-schd-extender", "extender", "--card-fit")]
    other = {"metadata": {"name": "other"}, "spec": {"controllerName": "kueue.x-k8s.io/multikueue"}}
    (found,) = card_fit(Facts(own_pods=answers, admission_checks=[other]))
    assert (found.level, found.where) == (Level.WARNING, "AdmissionCheck")
    own = {"metadata": {"name": "own"}, "spec": {"controllerName": CARD_FIT}}
    assert not list(card_fit(Facts(own_pods=answers, admission_checks=[other, own])))
    assert not list(card_fit(Facts(own_pods=answers, unreadable=["admissionchecks"])))
    assert not list(card_fit(Facts(own_pods=[pod("gpushare-schd-extender", "extender")])))


def test_tokens_without_tls_are_told_once_a_deployment() -> None:
    plain = pod("gpuslice-console", "console", "--access=token")
    (found,) = in_the_clear(Facts(own_pods=[plain, plain]))
    assert found.where == "deployment kube-system/gpuslice-console"
    assert list(in_the_clear(Facts(own_pods=[pod("gpushare-schd-extender", "--debug-tokens")])))
    for safe in (
        pod("gpuslice-console", "--access=token", "--tls-certificate=/a"),
        pod("gpushare-schd-extender", "--debug-tokens", "--tls-certificate=/a"),
        pod("gpushare-schd-extender", "extender"),
    ):
        assert not list(in_the_clear(Facts(own_pods=[safe])))
