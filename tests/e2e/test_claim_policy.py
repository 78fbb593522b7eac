"""HAMi's names become claims by the API server's own policy, as our webhook would make them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.wire.review import pod_form
from gpuslice.core import hami
from gpuslice.core.claim_shape import as_claims, claim_shape
from gpuslice.core.contract import LABEL_CLAIMS
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import PodForm
from tests import tools
from tests.e2e import control_plane
from tests.e2e.claims_rig import translate
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api, until

_IS_THERE = bool(control_plane.missing()) or control_plane.minor_version() >= 36
pytestmark = [
    *ON_A_CONTROL_PLANE,
    pytest.mark.skipif(not _IS_THERE, reason="there are no mutating policies before Kubernetes 1.36"),
]
PODS = "namespaces/team/pods?dryRun=All"
OURS = {"aliyun.com/gpu-mem": 4}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    tools.find("helm")
    with control_plane.api_server(tmp_path_factory.mktemp("plane")) as plane, closing(Api(plane)) as api:
        metadata = {"name": "team", "labels": {LABEL_CLAIMS: "true"}}
        api.create("namespaces", {"kind": "Namespace", "metadata": metadata})
        translate(api, "webhook.hami.enabled=true")
        until(
            lambda: made(api, pod({hami.MEMORY: 1024}))["spec"].get("resourceClaims"),
            "the policy is in force",
        )
        yield api


def pod(*limits: dict[str, Any], scheduler: str = "default-scheduler", **metadata: Any) -> dict[str, Any]:
    containers = [
        {"name": f"c{at}", "image": "i", "resources": {"limits": each}} for at, each in enumerate(limits)
    ]
    spec = {"schedulerName": scheduler, "containers": containers}
    return {"kind": "Pod", "metadata": {"name": "p", **metadata}, "spec": spec}


def made(api: Api, document: dict[str, Any]) -> dict[str, Any]:
    return api.create(PODS, document)


def form(document: dict[str, Any]) -> PodForm:
    return pod_form(msgspec.Raw(msgspec.json.encode(document)))


def some_pod(dice: random.Random) -> dict[str, Any]:
    def limits() -> dict[str, Any]:
        memory = dice.choice([1, 1000, 1024, 1025, 3000, "4096", "3k", 16000, 100_000])
        cores, count = dice.choice([None, None, 0, 6, 30, "100"]), dice.choice([None, None, 1, 1, 2, 4])
        found = {hami.MEMORY: memory, hami.CORES: cores, "nvidia.com/gpu": count}
        return {name: amount for name, amount in found.items() if amount is not None}

    every = [limits() if dice.random() < 0.7 else {} for _ in range(dice.choice([1, 1, 2, 3]))]
    return pod(*every, scheduler=dice.choice(["default-scheduler", "hami-scheduler"]))


@pytest.mark.parametrize("seed", range(120))
def test_policy_and_webhook_make_the_same_of_a_pod(api: Api, seed: int) -> None:
    document = some_pod(random.Random(seed))
    found = form(made(api, document))
    try:
        expected = as_claims(hami.translate(form(document), hami.HamiRules()))
    except InvalidRequestError:  # the webhook denies it; the policy leaves it, or its claim is never made
        for each in found.claims:
            with pytest.raises(InvalidRequestError):
                claim_shape(each["resourceClaimTemplateName"])
        return
    if expected.claims:
        plain = [(each.limits, tuple(each.claims)) for each in expected.containers]
        assert (tuple(found.claims), found.scheduler) == (expected.claims, expected.scheduler)
        assert [(each.limits, tuple(each.claims)) for each in found.containers] == plain
        assert all(not set(each.requests) & {hami.MEMORY, hami.CORES} for each in found.containers)
    else:
        assert not found.claims


@pytest.mark.parametrize(
    "document",
    [
        pod({hami.MEMORY_PERCENT: 50}),
        pod({hami.MEMORY: 1024, hami.MEMORY_PERCENT: 50}),
        pod({hami.MEMORY: 1024, hami.PRIORITY: 1}),
        pod({hami.MEMORY: 1024, "nvidia.com/gpu": 1}, {hami.MEMORY: 1024, "nvidia.com/gpu": 2}),
        pod({hami.MEMORY: 1024}, OURS, labels={LABEL_CLAIMS: "false"}),
        pod({hami.MEMORY: 1024}, annotations={"nvidia.com/use-gpuuuid": "GPU-1"}),
        pod({hami.MEMORY: 1024}, annotations={hami.USE_TYPE: "A100"}),
        pod({"nvidia.com/gpu": 1}),
    ],
)
def test_what_no_claim_can_say_stays_as_it_is(api: Api, document: dict[str, Any]) -> None:
    found = form(made(api, document))
    assert not found.claims
    for each, before in zip(found.containers, form(document).containers, strict=True):
        assert each.limits.keys() == before.limits.keys()
