"""Pods that come to share a claim: the policy looks at them, since kubelet has a claim prepared once."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.core.container_files import OUR_PATHS, hiding_mount
from tests.chart import render
from tests.contract.test_chart_policy import holds

NAME = "gpuslice-shared-claims"
Object = dict[str, Any]
PATHS = [
    *OUR_PATHS,
    *(f"{path}/deeper" for path in OUR_PATHS),
    *(path.replace("/", "//") for path in OUR_PATHS),
    *(path.replace("/", "/./") + "/" for path in OUR_PATHS),
    *(path.lstrip("/") for path in OUR_PATHS),
    *("/var/lock/../gpuslice", "..", "/..", "/a/.."),
    *("/proc/self/root/etc", "/proc//1/cwd", "./proc/thread-self", "/proc/12"),
]
CLEAN = [
    "/etc",
    "/etc/ld.so.preload.d",
    "/data",
    "/usr/lib/gpuslices",
    "/proc/sys",
    "/a..b",
    "/...",
    "/etc/ld-so-preload",
]


@pytest.fixture(scope="module")
def policy(helm: str) -> Object:
    objects = render(helm, "--kube-version", "1.34.0", "--set", "dra.enabled=true")
    assert objects["ValidatingAdmissionPolicyBinding", NAME]["spec"]["policyName"] == NAME
    spec: Object = objects["ValidatingAdmissionPolicy", NAME]["spec"]
    return spec


def denied(policy: Object, pod: Object) -> bool:
    known = {"object": pod}
    variables = {each["name"]: each["expression"] for each in policy["variables"]}
    concerned = all(holds(each["expression"], {}, known) for each in policy["matchConditions"])
    return concerned and not all(
        holds(each["expression"], variables, known) for each in policy["validations"]
    )


def pod(*, init: bool = False, claim: Object | None = None, **container: Any) -> Object:
    """With one container that uses the claim, and has whatever else is said."""
    uses = {"name": "c", "resources": {"claims": [{"name": "g"}]}, **container}
    plain: Object = {"name": "plain", "volumeMounts": [{"name": "v", "mountPath": "/etc/gpuslice"}]}
    spec: Object = {"resourceClaims": [{"name": "g", **(claim or {"resourceClaimName": "shared"})}]}
    spec |= {"initContainers": [uses], "containers": [plain]} if init else {"containers": [plain, uses]}
    return {"metadata": {"name": "p"}, "spec": spec}


@pytest.mark.parametrize("path", PATHS)
def test_what_hides_the_limits_of_a_shared_claim_is_denied(policy: Object, path: str) -> None:
    assert hiding_mount("c", [{"mountPath": path}], None, None)
    mounts, devices = [{"name": "v", "mountPath": path}], [{"name": "v", "devicePath": path}]
    for fields in ({"volumeMounts": mounts}, {"volumeDevices": devices}, {"terminationMessagePath": path}):
        for init in (False, True):
            assert denied(policy, pod(init=init, **fields))
        alone = {"resourceClaimTemplateName": "of-its-own"}
        assert not denied(policy, pod(claim=alone, **fields)), "the agent looks at it"


@pytest.mark.parametrize("path", CLEAN)
def test_any_other_path_is_let_through(policy: Object, path: str) -> None:
    assert not hiding_mount("c", [{"mountPath": path}], None, None)
    assert not denied(policy, pod(volumeMounts=[{"name": "v", "mountPath": path}]))


def test_pods_without_a_shared_claim_are_not_looked_at(policy: Object) -> None:
    plain = pod(volumeMounts=[{"name": "v", "mountPath": "/etc/gpuslice"}])
    del plain["spec"]["resourceClaims"]
    assert not denied(policy, plain)
