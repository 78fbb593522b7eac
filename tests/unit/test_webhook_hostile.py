"""Pods and reviews that are made to cost: the webhook denies them in words, and soon.

An answer that is late, or none, lets a pod pass where the failure policy is to ignore: the default.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.wire.errors import MalformedError
from gpuslice.adapters.wire.review import decode_review
from gpuslice.apps.webhook.main import WEB_LIMITS
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.apps.webhook.settings import WebhookSettings
from gpuslice.core.contract import GPU_MEM

SETTINGS = WebhookSettings(tls_certificate="a", tls_key="b")
REVIEWER = Reviewer(SETTINGS.rules, SETTINGS.hami, SETTINGS.kai)
VERBS = [REVIEWER.mutate, REVIEWER.claim, REVIEWER.validate]
CARD = {"limits": {GPU_MEM: "1"}}
STORED_BYTES = 3 << 19  # etcd takes no larger object
SOON_S = 3.0  # of processor time; the API server waits five seconds


def body(pod: dict[str, Any] | bytes, **more: Any) -> bytes:
    review = msgspec.json.encode(
        {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": "u",
                "operation": "CREATE",
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "object": pod if isinstance(pod, dict) else msgspec.Raw(pod),
                **more,
            },
        }
    )
    assert len(review) <= WEB_LIMITS.body_bytes
    return review


def pod(*containers: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", **meta}, "spec": {"containers": [*containers]}}


LARGEST = 0.95 * WEB_LIMITS.object_values
HALF = [{"name": f"c{each}", "resources": CARD} for each in range(int(LARGEST / 2))]
BARE = [{"name": f"c{each}"} for each in range(int(LARGEST))]
COSTLY = {
    "containers that ask": pod(*HALF),
    "containers that do not": pod({"name": "c", "resources": CARD}, *BARE),
    "names of resources": pod(
        {"name": "c", "resources": {"limits": {f"{GPU_MEM}{each}": "1" for each in range(int(LARGEST))}}}
    ),
    "labels": pod(
        {"name": "c", "resources": CARD}, labels={f"aliyun.com/{each}": "" for each in range(int(LARGEST))}
    ),
    "environment": pod(
        {"name": "c", "resources": CARD, "env": [{"name": "NVIDIA_VISIBLE_DEVICES"}] * int(LARGEST)}
    ),
}


@pytest.mark.parametrize("costly", COSTLY.values(), ids=COSTLY)
def test_the_largest_pod_that_is_looked_at_is_answered_in_time(costly: dict[str, Any]) -> None:
    for verb in VERBS:
        began_s = time.process_time()
        verb(decode_review(body(costly)))
        assert time.process_time() - began_s < SOON_S


@pytest.mark.parametrize("verb", VERBS)
def test_a_pod_of_more_values_is_denied_and_not_passed_over(verb: Any) -> None:
    many = pod({"name": "c", "resources": CARD, "env": [{"name": "a"}] * (WEB_LIMITS.object_values + 1)})
    response = verb(decode_review(body(many)))["response"]
    assert (response["allowed"], response["uid"]) == (False, "u")
    assert "must be at most 20000" in response["status"]["message"]


def test_a_change_into_such_a_pod_is_denied_too() -> None:
    many = pod({"name": "c", "resources": CARD, "env": [{"name": "a"}] * (WEB_LIMITS.object_values + 1)})
    small = pod({"name": "c", "resources": CARD})
    review = decode_review(body(many, operation="UPDATE", oldObject=small))
    assert not REVIEWER.validate(review)["response"]["allowed"]


@pytest.mark.parametrize("text", [",", '\\",', "\\\\", '\\",\\\\'])
def test_commas_in_a_text_are_no_values(text: str) -> None:
    """A configuration in a variable, or in an annotation, may have any number."""
    long = text * 400_000
    many = pod(
        {"name": "c", "resources": CARD, "env": [{"name": "A", "value": long}]}, annotations={"a": long}
    )
    assert REVIEWER.mutate(decode_review(body(many)))["response"]["allowed"]


def test_two_pods_as_large_as_are_stored_fit_into_a_review() -> None:
    """Go's JSON writes six bytes for some signs: a pod could be made whose changes nobody would look at."""
    env = b'[{"name":"A","value":"' + b"\\u003c" * STORED_BYTES + b'"}]'
    large = b'{"spec":{"containers":[{"name":"c","env":' + env + b"}]}}"
    review = decode_review(body(large, operation="UPDATE", oldObject=msgspec.Raw(large)))
    assert REVIEWER.validate(review)["response"]["allowed"]


@pytest.mark.parametrize("value", [b"{}", b'"a"', b"1", b'"":{}'])
def test_a_forged_review_is_refused_before_it_is_unpacked(value: bytes) -> None:
    """15 MiB took 1.8 GiB and a minute, of a process that may have 256 MiB; who reaches the port may ask."""
    begins, ends = (b"{", b"}") if b":" in value else (b"[", b"]")
    many = begins + (value + b",") * WEB_LIMITS.values + value + ends
    began_s = time.process_time()
    with pytest.raises(MalformedError, match="more than 1000000 values"):
        decode_review(body(many[: WEB_LIMITS.body_bytes - 1000]))
    assert time.process_time() - began_s < SOON_S
