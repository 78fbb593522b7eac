"""Odd pods through the API server's decoding and validation, the webhook, and our reading of the result."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.views import pod_view
from gpuslice.adapters.wire.review import decode_review
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.core.admission import AdmissionRules
from simcluster.cluster.admission import WebhookAnswer, WebhookCall
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.request import Request
from tests.builders import api_container, api_pod

Object = dict[str, Any]
HOOKS = {"mutate": "mutatingwebhookconfigurations", "validate": "validatingwebhookconfigurations"}
RANGE = "must be a whole number of units from 1 to"


def answered(call: WebhookCall) -> WebhookAnswer:
    decide = getattr(Reviewer(AdmissionRules()), call.name.partition(".")[0])
    return WebhookAnswer(decide(decode_review(msgspec.json.encode(call.review)))["response"])


def stored(pod: Object) -> tuple[int, Object]:
    """What the API server answers to its creation, with the webhook in place."""
    cluster = Cluster(webhook=answered)

    def post(path: str, document: Object) -> tuple[int, Object]:
        answer = cluster.handle(Request("POST", path, {}, {}, json.dumps(document).encode()))
        return answer.status, json.loads(answer.body)

    rules = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    for verb, plural in HOOKS.items():
        hook = {"name": f"{verb}.gpuslice.io", "clientConfig": {"url": "https://x"}, "rules": [rules]}
        document = {"metadata": {"name": verb}, "webhooks": [hook]}
        assert post(f"/apis/admissionregistration.k8s.io/v1/{plural}", document)[0] == 201
    return post("/api/v1/namespaces/default/pods", pod)


@pytest.mark.parametrize(
    ("quantity", "units"),
    [
        *((text, 4) for text in ("4", 4, 4.0, "4e0", "4E0", "4000m", "+4", "4.0", "004", " 4", "0.004k")),
        *((text, 4) for text in ("4000000000n", "4000000u", "4.")),
        *((text, 0) for text in ("0", "-0", "0e5", None, "0Gi", 0)),
        ("1e3", 1000),
        ("4k", 4000),
        ("4Ki", 4096),
        (".5k", 500),
        *((text, RANGE) for text in ("4.5", 4.5, "1500m", "4n", "4e-1", "-4", "4Gi", "1E", "1e30")),
        ("9223372036854775808", RANGE),
        *((text, "quantities must match") for text in ("", "4 GiB", "0x4", "1_000", "٤", "four")),
    ],
)
def test_each_way_to_write_an_amount_is_counted_or_refused(quantity: Any, units: int | str) -> None:
    status, answer = stored(api_pod(memory=quantity))
    if isinstance(units, str):
        assert status in (400, 422)
        assert units in answer["message"]
        return
    assert status == 201, answer
    view = pod_view(msgspec.convert(answer, objects.Pod))
    assert (view.request.units if view.request else 0) == units
    assert not view.problem


def asking(name: str, units: int, **more: Any) -> Object:
    return api_container(str(units)) | {"name": name, "image": "x", **more}


@pytest.mark.parametrize(
    ("spec", "units"),
    [
        ({"initContainers": [asking("i", 8)], "containers": [{"name": "c", "image": "x"}]}, 8),
        (
            {
                "initContainers": [
                    asking("a", 8),
                    asking("b", 2, restartPolicy="Always"),
                    asking("c", 10),
                    asking("d", 1, restartPolicy="Always"),
                ],
                "containers": [asking("e", 3), {"name": "f", "image": "x"}],
            },
            12,
        ),
        ({"containers": [asking("a", 1), asking("b", 1)], "resources": {"limits": {"cpu": "2"}}}, 2),
        ({"nodeName": "n1", "containers": [asking("a", 1)]}, 1),
        ({"containers": [asking("a", 1, restartPolicy="Always")]}, 1),
        ({"initContainers": [asking("s", 4, restartPolicy="Always")], "containers": [asking("a", 4)]}, 8),
    ],
)
def test_what_a_pod_holds_at_its_peak_is_counted(spec: Object, units: int) -> None:
    pod = api_pod()
    pod["spec"] = spec
    status, answer = stored(pod)
    assert status == 201, answer
    view = pod_view(msgspec.convert(answer, objects.Pod))
    assert view.request is not None
    assert view.request.units == units


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"containers": [asking("a", 1)], "resources": {"limits": {"aliyun.com/gpu-mem": "1"}}},
            "Unsupported",
        ),
        (
            {"containers": [asking("a", 1)], "ephemeralContainers": [asking("e", 1)]},
            "cannot be set on create",
        ),
        ({"containers": [asking("a", 1), asking("a", 1)]}, "Duplicate value"),
        (
            {"containers": [asking("a", 1) | api_container("1", **{"gpuslice.io/memory": "1"})]},
            "left out beside",
        ),
        (
            {
                "containers": [
                    {"name": "a", "image": "x", "resources": {"requests": {"aliyun.com/gpu-mem": "1"}}}
                ]
            },
            "the same as",
        ),
    ],
)
def test_what_can_never_be_given_is_refused_with_its_field(spec: Object, words: str) -> None:
    pod = api_pod()
    pod["spec"] = spec
    status, answer = stored(pod)
    assert status == 422, answer
    assert words in answer["message"]
