"""What a running pod's author may want instead, and what counts until then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.hold import HoldKind
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import ContainerKind, ContainerRequest, Pod, Refusal, Request
from gpuslice.core.resize import encode_granted, granted, grown, less, more, wanted, with_amounts
from tests.builders import make_node, make_pod

REQUEST, GRANTED = "gpuslice.io/memory-request", "gpuslice.io/memory-granted"
ONE = Request(4, containers=(ContainerRequest("main", 0, 4),))
TWO = Request(6, containers=(ContainerRequest("main", 0, 4), ContainerRequest("side", 1, 2)))
ON_TWO_CARDS = Request(4, 2, containers=(ContainerRequest("main", 0, 4),))
WITH_INIT = Request(
    8,
    containers=(ContainerRequest("load", 0, 8, kind=ContainerKind.INIT), ContainerRequest("main", 0, 4)),
)


def units(request: Request) -> dict[str, int]:
    return {each.name: each.units for each in request.containers}


@pytest.mark.parametrize(
    ("request_", "text", "amounts", "total"),
    [
        (ONE, "12", {"main": 12}, 12),
        (ONE, "main=12", {"main": 12}, 12),
        (ONE, "4", {"main": 4}, 4),
        (TWO, "main=7, side=3", {"main": 7, "side": 3}, 10),
        (TWO, "side=3", {"main": 4, "side": 3}, 7),
        (ON_TWO_CARDS, "10", {"main": 10}, 10),
        (WITH_INIT, "6", {"load": 8, "main": 6}, 8),
        (WITH_INIT, "12", {"load": 8, "main": 12}, 12),
    ],
)
def test_the_wish_names_units_of_containers(
    request_: Request, text: str, amounts: dict[str, int], total: int
) -> None:
    found = wanted({REQUEST: text}, request_)
    assert units(found) == amounts
    assert found.units == total
    assert [each.devices for each in found.containers] == [each.units for each in request_.containers]


@pytest.mark.parametrize(
    ("request_", "text", "must"),
    [
        (ONE, "", "whole units (no Gi), such as 12"),
        (ONE, "12Gi", "whole units (no Gi), such as 12"),
        (ONE, "4.5", "whole units"),
        (ONE, "-3", "whole units"),
        (ONE, "99999999999999", "whole units"),
        (ONE, "4294967296", "from 4 up"),
        (ONE, "3", "from 4 up: kubelet counts what the pod was created with"),
        (ONE, "side=5", "once for each container that asks for a part of a card: main"),
        (ONE, "main=5,main=6", "once for each container"),
        (ONE, "5,6", "whole units"),
        (TWO, "12", "such as main=4,side=2"),
        (ON_TWO_CARDS, "5", "in steps of 2, the number of its cards"),
        (WITH_INIT, "load=9", "once for each container that asks for a part of a card: main"),
    ],
)
def test_a_wish_that_nobody_can_fulfil_is_refused_with_what_would_be_right(
    request_: Request, text: str, must: str
) -> None:
    with pytest.raises(InvalidRequestError) as found:
        wanted({REQUEST: text}, request_)
    assert REQUEST in str(found.value)
    assert must in str(found.value)


def test_what_was_granted_counts_and_never_less_than_kubelet_counts() -> None:
    assert units(granted({GRANTED: '{"main":9}'}, TWO)) == {"main": 9, "side": 2}
    assert granted({GRANTED: '{"main":1,"other":9}'}, TWO) == TWO
    for damaged in ("", "[]", '{"main":"x"}', '{"main":1e99}', "{"):
        assert granted({GRANTED: damaged}, TWO) == TWO
    assert granted({}, TWO) == TWO


def test_the_record_names_only_what_was_added_to() -> None:
    assert encode_granted(with_amounts(TWO, {"side": 5})) == '{"side":5}'
    assert encode_granted(TWO) is None


def test_without_a_wish_a_pod_goes_back_to_what_it_was_created_with() -> None:
    pod = make_pod(memory=4, node="n1")
    assert pod.request is not None
    held = replace(pod, request=with_amounts(pod.request, {"main": 9}), wanted=pod.request)
    assert more(held) is None
    assert less(held) == pod.request


def test_one_container_grows_at_once_while_another_gives_back() -> None:
    pod = replace(make_pod(node="n1"), request=with_amounts(TWO, {"side": 5}))
    pod = replace(pod, wanted=with_amounts(TWO, {"main": 8, "side": 3}))
    larger, smaller = more(pod), less(pod)
    assert larger is not None
    assert smaller is not None
    assert units(larger) == {"main": 8, "side": 5}
    assert units(smaller) == {"main": 4, "side": 3}


def ledger_with(*pods: Pod) -> Ledger:
    ledger = Ledger()
    ledger.apply_node(make_node("n1", (15, 15)))
    for pod in pods:
        ledger.apply_pod(pod)
    return ledger


def placed(name: str, memory: int, card: int = 0) -> Pod:
    return make_pod(name, memory, node="n1", card=card, assigned=True, version=5)


def larger(ledger: Ledger, pod: Pod, to: int) -> Pod | Refusal:
    holds, request = ledger.holds.on("n1"), pod.request
    assert holds is not None
    assert request is not None
    return grown(pod, with_amounts(request, {"main": to}), holds.state(), dict(holds.beside(pod)))


def test_a_pod_grows_only_on_its_own_card_and_is_told_who_holds_the_rest() -> None:
    pod, other = placed("a", 4), placed("b", 8)
    ledger = ledger_with(pod, other, placed("c", 1, 1))
    assert isinstance(larger(ledger, pod, 7), Pod)
    refusal = larger(ledger, pod, 8)
    assert isinstance(refusal, Refusal)
    assert str(refusal) == (
        "Insufficient GPU Memory in one device: asked for 4 more of card 0 of n1, 3 of 15 are free; the rest "
        "is held by default/b (8 units)"
    )


def test_what_is_being_granted_is_held_until_another_version_of_the_pod_is_seen() -> None:
    pod = placed("a", 4)
    ledger = ledger_with(pod)
    found = larger(ledger, pod, 10)
    assert isinstance(found, Pod)
    ledger.grow(found)
    ledger.apply_pod(pod)  # a list that was begun before the grant arrived
    state = ledger.state("n1")
    assert state is not None
    assert state.left == (5, 15)
    ledger.apply_pod(replace(pod, version=6))  # somebody else changed it: the grant has no effect
    state = ledger.state("n1")
    assert state is not None
    assert state.left == (11, 15)


def test_a_grant_that_was_refused_is_given_up() -> None:
    pod = placed("a", 4)
    ledger = ledger_with(pod)
    found = larger(ledger, pod, 10)
    assert isinstance(found, Pod)
    ledger.grow(found)
    ledger.grow(pod, HoldKind.BOUND)
    state = ledger.state("n1")
    assert state is not None
    assert state.left == (11, 15)
