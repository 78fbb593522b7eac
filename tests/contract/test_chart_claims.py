"""What the chart makes for claims, rendered by the real helm."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpuslice.core.contract import CLAIM_CLASS, CLAIM_DRIVER, LABEL_CLAIMED, LABEL_CLAIMS, NAME_SETS
from tests import tools
from tests.chart import render

Objects = dict[tuple[str, str], dict[str, Any]]
POLICIES = ("gpuslice-claims-aliyun", "gpuslice-claims-neutral")


@pytest.fixture(scope="module")
def objects() -> Objects:
    return render(str(tools.find("helm")), "--set=dra.enabled=true", "--kube-version=1.36.0")


def test_nothing_of_it_is_there_unasked() -> None:
    plain = render(str(tools.find("helm")), "--kube-version=1.36.0")
    assert not [name for kind, name in plain if "claims" in name or "dra" in name or kind == "DeviceClass"]


def test_before_1_36_the_webhook_rewrites_pods_where_there_is_one() -> None:
    helm, older = str(tools.find("helm")), ("--set=dra.enabled=true", "--kube-version=1.35.0")
    without = render(helm, *older, "--set=webhook.enabled=false")
    assert ("DeviceClass", CLAIM_CLASS) in without
    assert not [name for kind, name in without if "gpuslice-claims" in name]
    beside = render(helm, *older, "--set=webhook.enabled=true")
    assert ("Deployment", "gpuslice-claims") in beside
    assert not [name for kind, name in beside if kind == "MutatingAdmissionPolicy"]
    hooks = beside["MutatingWebhookConfiguration", "gpuslice-mutate"]["webhooks"]
    paths = [(each["name"], each["clientConfig"]["service"]["path"]) for each in hooks]
    assert paths == [
        ("claim-namespace.gpuslice.io", "/claim"),
        ("claim-pod.gpuslice.io", "/claim"),
        ("mutate.gpuslice.io", "/mutate"),
    ]
    newer = render(helm, "--set=dra.enabled=true,webhook.enabled=true", "--kube-version=1.36.0")
    hooks = newer["MutatingWebhookConfiguration", "gpuslice-mutate"]["webhooks"]
    assert [each["name"] for each in hooks] == ["mutate.gpuslice.io"]


def test_a_policy_takes_hamis_names_where_the_webhook_would() -> None:
    values = "--set=dra.enabled=true,memoryUnit=MiB,webhook.hami.enabled=true"
    made = render(str(tools.find("helm")), values, "--kube-version=1.36.0")
    policies = sorted(name for kind, name in made if kind == "MutatingAdmissionPolicy")
    assert policies == [POLICIES[0], "gpuslice-claims-hami", POLICIES[1]]
    spec = made["MutatingAdmissionPolicy", "gpuslice-claims-hami"]["spec"]
    (shapes,) = [each["expression"] for each in spec["variables"] if each["name"] == "shapes"]
    assert "/ 1 * variables.counts[0]" in " ".join(shapes.split())  # a unit is what HAMi counts in


def test_the_class_is_of_our_driver_alone(objects: Objects) -> None:
    (selector,) = objects["DeviceClass", CLAIM_CLASS]["spec"]["selectors"]
    assert selector["cel"]["expression"] == f'device.driver == "{CLAIM_DRIVER}"'


def test_an_agent_sees_kubelets_sockets_where_kubelet_does(objects: Objects) -> None:
    pod = objects["DaemonSet", "gpushare-device-plugin-ds"]["spec"]["template"]["spec"]
    mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    volumes = {each["name"]: each.get("hostPath", {}).get("path") for each in pod["volumes"]}
    for folder in ("plugins", "plugins_registry"):
        path = f"/var/lib/kubelet/{folder}"
        assert volumes[mounts[path]] == path
        assert any(argument.endswith(f"={path}") for argument in pod["containers"][0]["args"])
    assert volumes[mounts["/var/run/cdi"]] == "/var/run/cdi"


def test_an_agent_may_write_what_a_driver_writes_and_no_more(objects: Objects) -> None:
    rules = objects["ClusterRole", "gpuslice-dra-driver"]["rules"]
    rights = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert {resource for resource, _ in rights} == {
        "resourceslices",
        "resourceclaims",
        "resourceclaims/status",
        "resourceclaims/driver",
    }
    assert {verb for resource, verb in rights if resource == "resourceclaims"} == {"get", "list"}
    (driver,) = [rule for rule in rules if "resourceclaims/driver" in rule["resources"]]
    assert driver["resourceNames"] == [CLAIM_DRIVER]


def test_a_console_may_see_claims_where_there_are_any() -> None:
    def seen(*values: str) -> set[str]:
        made = render(str(tools.find("helm")), "--set=console.enabled=true", "--kube-version=1.36.0", *values)
        rules = made["ClusterRole", "gpuslice-console"]["rules"]
        return {
            each for rule in rules if "resource.k8s.io" in rule["apiGroups"] for each in rule["resources"]
        }

    assert seen() == set()
    assert seen("--set=dra.enabled=true") == {"resourceclaims", "resourceclaimtemplates", "resourceslices"}


@pytest.mark.parametrize(("policy", "names"), list(zip(POLICIES, NAME_SETS.values(), strict=True)))
def test_a_policy_rewrites_one_set_of_names(objects: Objects, policy: str, names: Any) -> None:
    spec = objects["MutatingAdmissionPolicy", policy]["spec"]
    (mutation,) = spec["mutations"]
    patch = mutation["jsonPatch"]["expression"]
    variables = {each["name"]: each["expression"] for each in spec["variables"]}
    assert names.memory in patch
    assert names.compute in patch
    assert names.cards in variables["template"]
    assert LABEL_CLAIMS in variables["chosen"]
    assert LABEL_CLAIMED in patch
    assert not re.search(r"Object\.?\w*\{", patch)  # a list of these makes the API server panic
    assert ("MutatingAdmissionPolicyBinding", policy) in objects
