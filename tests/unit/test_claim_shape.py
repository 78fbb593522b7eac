"""What the name of a claim template says, and what is made of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.wire.review import pod_form
from gpuslice.core.claim_shape import ClaimShape, as_claims, claim_shape, template_spec
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import PodForm, difference
from tests.builders import api_container, api_pod


def test_one_container_is_one_request() -> None:
    shape = claim_shape("gpuslice-4")
    assert shape == ClaimShape(((4, 0),))
    assert template_spec(shape, "GiB") == {
        "spec": {
            "devices": {
                "requests": [
                    {
                        "name": "c0",
                        "exactly": {
                            "deviceClassName": "gpuslice.io",
                            "capacity": {"requests": {"memory": "4Gi"}},
                        },
                    }
                ]
            }
        }
    }


def test_the_containers_of_a_pod_share_its_card() -> None:
    shape = claim_shape("gpuslice-4c25.2")
    assert shape == ClaimShape(((4, 25), (2, 0)))
    devices = template_spec(shape, "MiB")["spec"]["devices"]
    amounts = [each["exactly"]["capacity"]["requests"] for each in devices["requests"]]
    assert amounts == [{"memory": "4Mi", "compute": "25"}, {"memory": "2Mi"}]
    assert devices["constraints"] == [{"requests": ["c0", "c1"], "matchAttribute": "gpu.gpuslice.io/uuid"}]


def test_several_cards_are_several_devices_of_one_request() -> None:
    devices = template_spec(ClaimShape(((8, 0),), 2), "GiB")["spec"]["devices"]
    (request,) = devices["requests"]
    assert devices["constraints"] == [{"requests": ["c0"], "distinctAttribute": "gpu.gpuslice.io/uuid"}]
    assert request["exactly"]["count"] == 2
    assert request["exactly"]["capacity"]["requests"] == {"memory": "4Gi"}


@pytest.mark.parametrize("name", ["gpu-mem-4", "gpuslice", "gpuslice-", "gpuslice-4-x", "gpuslice-4_2", ""])
def test_other_names_are_not_ours(name: str) -> None:
    assert claim_shape(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpuslice-0", "must be a whole number of units"),
        ("gpuslice-4c7", "must be a multiple of 5 from 5 to 100"),
        ("gpuslice-5-x2", "must be a multiple of 2"),
        ("gpuslice-4c60.4c60", "at most 100 for all containers together"),
        ("gpuslice-4.4-x2", "a pod of one asking container"),
        ("gpuslice-4ki", "must be a whole number of units"),
        ("gpuslice-1500m", "must be a whole number of units"),
        ("gpuslice-4-xtwo", "a whole number of cards"),
    ],
)
def test_what_can_never_be_given_is_said(name: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match="must be") as raised:
        claim_shape(name)
    assert words in str(raised.value)


@given(st.text(alphabet="0123456789abckmx.-", max_size=12))
def test_any_name_is_a_shape_or_a_sentence(text: str) -> None:
    try:
        shape = claim_shape(f"gpuslice-{text}")
    except InvalidRequestError:
        return
    if shape is not None:
        assert all(units > 0 for units, _ in shape.containers)
        assert template_spec(shape, "GiB")["spec"]["devices"]["requests"]


def form(*containers: dict[str, Any], **fields: Any) -> PodForm:
    return pod_form(msgspec.Raw(msgspec.json.encode(api_pod("p", containers=list(containers), **fields))))


def test_a_pod_is_made_to_claim_what_it_asks_for() -> None:
    plain = {"name": "plain", "image": "i", "resources": {"limits": {"cpu": "1"}}}
    limits = (
        {"aliyun.com/gpu-mem": "4", "aliyun.com/gpu-core.percentage": "25"},
        {"aliyun.com/gpu-mem": "2"},
    )
    first, last = ({"name": "a", "resources": {"limits": each}} for each in limits)
    pod = form(first, plain, last)
    assert [each.document() for each in difference(pod, as_claims(pod))] == [
        {"op": "add", "path": "/metadata/labels", "value": {"gpuslice.io/claimed": "true"}},
        {
            "op": "add",
            "path": "/spec/resourceClaims",
            "value": [{"name": "gpuslice", "resourceClaimTemplateName": "gpuslice-4c25.2"}],
        },
        {"op": "remove", "path": "/spec/containers/0/resources/limits/aliyun.com~1gpu-mem"},
        {"op": "remove", "path": "/spec/containers/0/resources/limits/aliyun.com~1gpu-core.percentage"},
        {
            "op": "add",
            "path": "/spec/containers/0/resources/claims",
            "value": [{"name": "gpuslice", "request": "c0"}],
        },
        {"op": "remove", "path": "/spec/containers/2/resources/limits/aliyun.com~1gpu-mem"},
        {
            "op": "add",
            "path": "/spec/containers/2/resources/claims",
            "value": [{"name": "gpuslice", "request": "c1"}],
        },
    ]
    assert as_claims(as_claims(pod)) == as_claims(pod)


def test_pods_that_a_claim_cannot_serve_are_left_alone() -> None:
    first = api_pod("p", initContainers=[api_container("4", "init")])
    mine = api_pod("p", resourceClaims=[{"name": "nic", "resourceClaimName": "nic"}])
    nothing = api_pod("p", containers=[{"name": "a", "image": "a"}])
    for document in (first, mine, nothing, api_pod("p", containers=[api_container("0")])):
        pod = pod_form(msgspec.Raw(msgspec.json.encode(document)))
        assert as_claims(pod) == pod


@pytest.mark.parametrize(
    ("memory", "cards", "words"),
    [("4.5", "", "must be a whole number"), ("5", "2", "must be a multiple of 2")],
)
def test_a_claim_that_can_never_be_given_is_denied_at_once(memory: str, cards: str, words: str) -> None:
    labels = {"aliyun.com/gpu-count": cards} if cards else None
    with pytest.raises(InvalidRequestError, match=words):
        as_claims(form(api_container(memory), labels=labels))


@given(st.integers(1, 80), st.sampled_from([0, 5, 25, 100]), st.integers(1, 4))
def test_what_a_pod_claims_is_what_it_asked_for(units: int, percent: int, cards: int) -> None:
    limits = {"gpuslice.io/memory": str(units * cards)}
    limits |= {"gpuslice.io/compute": str(percent)} if percent and cards == 1 else {}
    labels = {"gpuslice.io/cards": str(cards)} if cards > 1 else None
    pod = form(api_container(None, **limits), labels=labels)
    claimed = as_claims(pod)
    shape = claim_shape(claimed.claims[0]["resourceClaimTemplateName"])
    assert shape is not None
    assert pod.request is not None
    assert (shape.card_count, sum(part[0] for part in shape.containers)) == (cards, pod.request.units)
    assert [percent for _, percent in shape.containers] == [pod.request.compute_percent]
