"""What a namespace may claim of shared cards, judged by a real API server: our policy, and ResourceQuota."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuslice.adapters.kube.errors import ForbiddenError, InvalidError, KubeError
from gpuslice.core.contract import CLAIM_CLASS
from tests import tools
from tests.chart import CHART, NAMED
from tests.e2e import control_plane
from tests.e2e.marks import WHERE_CLAIMS_ARE_KNOWN
from tests.e2e.node import Api, until
from tests.e2e.test_claim_rights import PLACES

pytestmark = WHERE_CLAIMS_ARE_KNOWN
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "teams" / "claims.yaml"
POLICY = "gpuslice-claim-limits"
PATHS = {
    **PLACES,
    "Namespace": "/api/v1/namespaces",
    "ResourceQuota": "/api/v1/namespaces/team-c/resourcequotas",
}
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team-c/resourceclaims"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The example's namespace on a cluster with the chart's policy."""
    flags = control_plane.claim_flags()
    command = [str(tools.find("helm")), "template", "x", str(CHART), "--kube-version=1.36.0", *NAMED]
    command += ["--set=dra.enabled=true", "--show-only=templates/dra-limits.yaml"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane.api_server(tmp_path_factory.mktemp("plane"), flags=flags))
        stack.enter_context(control_plane.controller_manager(plane, "resourcequota-controller", flags=flags))
        api = stack.enter_context(closing(Api(plane)))
        for each in [*yaml.safe_load_all(rendered), *yaml.safe_load_all(EXAMPLE.read_text())]:
            api.create(PATHS[each["kind"]], each)
        until(
            lambda: "may have 8Gi" in refusal(api, claim("probe", "9Gi", dry=True)), "the policy is in force"
        )
        until(lambda: not refusal(api, claim("probe", "1Gi", dry=True)), "the quota is counted")
        yield api


def claim(name: str, memory: str, *, dry: bool = False, **more: Any) -> tuple[str, dict[str, Any]]:
    exactly = {"deviceClassName": CLAIM_CLASS, "capacity": {"requests": {"memory": memory}}, **more}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    path = f"{CLAIMS}?dryRun=All" if dry else CLAIMS
    return path, {"kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}


def refusal(api: Api, asked: tuple[str, dict[str, Any]]) -> str:
    """What the API server says; "" where it makes the claim."""
    try:
        api.create(*asked)
    except (ForbiddenError, InvalidError) as error:
        return str(error)
    except KubeError as error:
        return f"not yet: {error}"
    return ""


def test_a_claim_past_its_namespaces_limit_is_refused_with_both_amounts(api: Api) -> None:
    words = refusal(api, claim("large", "9Gi"))
    assert "the claim asks for 9 GiB of shared cards, and a claim of namespace team-c may have 8Gi" in words
    assert "asks for 10 GiB" in refusal(api, claim("two", "4500Mi", count=2))
    assert "capacity.requests.memory" in refusal(api, claim("whole", "1Gi", capacity=None))
    choices = [
        {"name": name, "deviceClassName": CLAIM_CLASS, "capacity": {"requests": {"memory": memory}}}
        for name, memory in (("much", "9Gi"), ("little", "1Gi"))
    ]
    spec = {"devices": {"requests": [{"name": "gpu", "firstAvailable": choices}]}}
    assert "asks for 9 GiB" in refusal(api, (CLAIMS, {"metadata": {"name": "either"}, "spec": spec}))


def test_a_quota_counts_claims_so_that_amounts_are_bounded(api: Api) -> None:
    made = [refusal(api, claim(f"c{number}", "8Gi")) for number in range(5)]
    assert made == [""] * 5
    words = refusal(api, claim("one-more", "1Gi"))
    assert "exceeded quota: claims" in words
    assert "count/resourceclaims.resource.k8s.io=5" in words
