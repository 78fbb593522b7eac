"""What a kubelet's no says of cards, nodes and pods, and for how long."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from gpuslice.core.model import Pod
from gpuslice.core.rejections import (
    FIRST_BACKOFF_S,
    FORGOTTEN_AFTER_S,
    LONGEST_BACKOFF_S,
    MOST_A_MINUTE,
    Backoff,
    KubeletRefusal,
    Rejections,
    Scope,
    refusal_of,
    rejection_of,
    scope_of,
    words_of,
)
from tests.builders import make_pod

UNAVAILABLE = (
    "Allocate failed due to requested number of devices unavailable for aliyun.com/gpu-mem. "
    "Requested: 4, Available: 0, which is unexpected"
)
NO_PLUGIN = (
    "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices aliyun.com/gpu-mem"
)
CARD = KubeletRefusal("UnexpectedAdmissionError", UNAVAILABLE)
PRESSURE = KubeletRefusal("Evicted", "The node had condition: [DiskPressure].")
PORTS = KubeletRefusal("NodePorts", "Predicate NodePorts failed")


class Kubelets:
    """What becomes known, at times that the test sets."""

    def __init__(self) -> None:
        self.known = Rejections()
        self.now_s = 1000.0
        self._number = 0

    def pod(self, card: int = 0, units: int = 4, node: str = "n1", **fields: Any) -> Pod:
        self._number += 1
        return make_pod(f"p{self._number}", units, node=node, card=card, **fields)

    def reject(self, card: int = 0, units: int = 4, why: KubeletRefusal = CARD, **fields: Any) -> None:
        rejection = rejection_of(self.pod(card, units, **fields), why, self.now_s, is_news=True)
        assert rejection is not None
        self.known.add(rejection)

    def admit(self, card: int = 0, units: int = 4, **fields: Any) -> None:
        self.known.admitted(self.pod(card, units, **fields), self.now_s)

    def backoff(self, units: int = 4, node: str = "n1", **fields: Any) -> Backoff | None:
        pod = make_pod("next", units, **fields)
        assert pod.request is not None
        return self.known.on(node, pod, pod.request, self.now_s)

    def closed(self, units: int = 4, **fields: Any) -> object:
        """ "node", or the cards that are closed to such a pod."""
        found = self.backoff(units, **fields)
        return "node" if found is not None and found.closed else set(found.closed_cards if found else ())

    def opens(self, units: int = 4, most_s: float = 4000.0) -> float:
        """After how many seconds everything is open to such a pod; they have passed then."""
        since_s = self.now_s
        while self.closed(units):
            self.now_s += 0.5
            assert self.now_s < since_s + most_s
        return self.now_s - since_s


def test_the_rejected_card_is_closed_for_as_much_or_more_and_the_node_is_the_last_choice() -> None:
    kubelets = Kubelets()
    kubelets.reject(card=1, units=4)
    found = kubelets.backoff(4)
    assert found is not None
    assert (found.closed, found.doubtful, *found.closed_cards) == (False, True, 1)
    assert kubelets.closed(15) == {1}
    assert kubelets.backoff(3) is None
    assert kubelets.backoff(4, node="n2") is None


def test_the_waiting_doubles_with_each_round_up_to_a_limit() -> None:
    kubelets, waited = Kubelets(), []
    for _ in range(8):
        kubelets.reject()
        waited.append(kubelets.opens())
    assert waited[:5] == [FIRST_BACKOFF_S * 2**number for number in range(5)]
    assert max(waited) <= LONGEST_BACKOFF_S


def test_pods_that_were_on_their_way_together_are_one_round() -> None:
    kubelets = Kubelets()
    for _ in range(20):
        kubelets.reject()
        kubelets.now_s += 0.1
    assert kubelets.opens() <= 60


def test_what_is_over_its_waiting_is_tried_by_one_pod_at_a_time() -> None:
    kubelets = Kubelets()
    kubelets.reject()
    kubelets.opens()
    kubelets.known.tried("uid-first", "n1", frozenset({0}), kubelets.now_s)
    assert kubelets.closed() == "node"
    assert kubelets.closed(uid="uid-first") == set()
    kubelets.known.untried("uid-first", "n1")
    assert kubelets.closed() == set()
    kubelets.known.tried("uid-silent", "n1", frozenset({0}), kubelets.now_s)
    assert kubelets.opens() == 60  # it is not known how that ended


def test_one_sick_card_does_not_close_a_node_whose_others_work() -> None:
    kubelets = Kubelets()
    for _ in range(6):
        kubelets.reject(card=0)
        kubelets.now_s += 1
        kubelets.admit(card=1)
        assert kubelets.closed() == {0}
        kubelets.opens()
    kubelets.reject(card=0)
    kubelets.known.tried("uid-other", "n1", frozenset({1}), kubelets.now_s)
    kubelets.now_s += 1
    kubelets.admit(card=1)
    kubelets.known.tried("uid-another", "n1", frozenset({1}), kubelets.now_s)
    assert kubelets.closed() == {0}  # the other cards are not tried one by one


def test_several_cards_in_a_row_close_the_node() -> None:
    kubelets = Kubelets()
    for card in (0, 1, 2):
        kubelets.reject(card=card)
    assert kubelets.closed() == "node"
    assert kubelets.closed(3) == set()  # for less it is not known


@pytest.mark.parametrize(
    ("why", "others"),
    [
        (PRESSURE, "node"),
        (KubeletRefusal("NodeShutdown", "Pod was rejected as the node is shutting down."), "node"),
        (KubeletRefusal("UnexpectedAdmissionError", NO_PLUGIN), "node"),
        (KubeletRefusal("OutOfaliyun.com/gpu-mem", "Node didn't have enough resource"), "node"),
        (PORTS, set()),
        (KubeletRefusal("SysctlForbidden", "forbidden sysctl"), set()),
        (KubeletRefusal("SomethingNew", "of another admit handler"), set()),
    ],
)
def test_what_is_the_nodes_fault_closes_it_for_all_and_what_may_be_the_pods_only_for_its_like(
    why: KubeletRefusal, others: object
) -> None:
    kubelets = Kubelets()
    kubelets.reject(why=why)
    assert kubelets.closed(4) == "node"
    assert kubelets.closed(1) == others
    assert kubelets.closed(4, namespace="another") == others


def test_another_plugins_no_is_not_blamed_on_our_cards() -> None:
    foreign = "Allocate failed due to rpc error: code = Unknown desc = no free function, which is unexpected"
    assert scope_of("UnexpectedAdmissionError", foreign, asks_others=True) is Scope.ALIKE
    assert scope_of("UnexpectedAdmissionError", foreign, asks_others=False) is Scope.CARDS
    assert scope_of("UnexpectedAdmissionError", UNAVAILABLE, asks_others=True) is Scope.CARDS


def test_a_change_on_the_node_ends_the_waiting_but_not_more_than_a_few_times_a_minute() -> None:
    kubelets = Kubelets()
    rejected: list[float] = []
    for _ in range(240):  # two minutes in which something changes all the time
        if not kubelets.closed():
            kubelets.reject()
            rejected.append(kubelets.now_s)
        kubelets.now_s += 0.5
        kubelets.known.changed("n1", kubelets.now_s)
    assert max(sum(at_s <= each < at_s + 60 for each in rejected) for at_s in rejected) == MOST_A_MINUTE


def test_a_pod_that_is_admitted_disproves_what_was_rejected_before() -> None:
    kubelets = Kubelets()
    kubelets.reject(card=0, units=8)
    kubelets.reject(card=0, units=4, why=PRESSURE)
    kubelets.now_s += 1
    kubelets.admit(card=0, units=4)
    assert kubelets.closed(4) == set()
    assert kubelets.closed(8) == {0}
    kubelets.admit(card=0, units=8)
    assert not kubelets.known


def test_nothing_is_held_against_a_node_for_ever() -> None:
    kubelets = Kubelets()
    kubelets.reject()
    kubelets.now_s += FORGOTTEN_AFTER_S + 1
    assert kubelets.backoff() is None
    kubelets.known.forget_old(kubelets.now_s)
    assert not kubelets.known


def test_a_clock_that_is_set_back_closes_nothing_for_long() -> None:
    kubelets = Kubelets()
    kubelets.reject()
    kubelets.now_s += 20
    kubelets.known.tried("uid-other", "n1", frozenset({0}), kubelets.now_s)
    kubelets.now_s -= 86_400
    assert kubelets.closed() == set()


def test_the_pod_that_tries_it_proves_it_whatever_its_nodes_clock_says() -> None:
    kubelets = Kubelets()
    kubelets.reject()
    kubelets.opens()
    tries = kubelets.pod(0)
    kubelets.known.tried(tries.uid, "n1", frozenset({0}), kubelets.now_s)
    kubelets.known.admitted(tries, kubelets.now_s - 86_400)
    assert not kubelets.known


def test_a_new_leader_finds_the_same_in_any_order() -> None:
    """Failed pods that are still listed say where and when; those that run disprove."""
    kubelets = Kubelets()
    refusals = []
    for number, at_s in enumerate((900.0, 915.0, 945.0, 990.0)):
        pod = make_pod(f"old{number}", 4, node="n1", card=0, assume_time_ns=int(at_s * 1e9))
        refusals.append(rejection_of(pod, CARD, 1000.0, is_news=False))
    waits = set()
    for seed in range(6):
        random.Random(seed).shuffle(refusals)
        kubelets.known = Rejections()
        for each in refusals:
            assert each is not None
            kubelets.known.add(each)
        kubelets.now_s = 1000.0
        waits.add(kubelets.opens())
    assert waits == {FIRST_BACKOFF_S * 8 - 10}


def test_it_is_said_in_one_sentence() -> None:
    kubelets = Kubelets()
    kubelets.reject(card=0)
    found = kubelets.backoff()
    assert found is not None
    assert words_of(replace(found, until_s=1_800_000_015.0)) == (
        f"kubelet on n1 rejected 1 pod, the last one with UnexpectedAdmissionError ({UNAVAILABLE}): "
        "card 0 there is in back-off until 08:00:15 UTC"
    )


# -- what is a no -------------------------------------------------------------------------------------------


REJECTED = {
    "phase": "Failed",
    "reason": "UnexpectedAdmissionError",
    "message": f"Pod was rejected: {UNAVAILABLE}",
}
WAITS = {"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}}


@pytest.mark.parametrize(
    ("status", "containers"),
    [
        (REJECTED, []),
        (REJECTED, [WAITS]),
        ({**REJECTED, "reason": "TopologyAffinityError"}, []),
        ({**REJECTED, "reason": "AnythingElse", "message": ""}, []),
        (
            {"phase": "Pending", "reason": "", "message": ""},
            [
                {
                    "name": "main",
                    "state": {
                        "waiting": {
                            "reason": "CreateContainerConfigError",
                            "message": "device plugin PreStartContainer rpc failed with err: rpc error: x",
                        }
                    },
                }
            ],
        ),
    ],
)
def test_a_pod_that_kubelet_did_not_let_start_is_a_no(status: dict[str, str], containers: list[Any]) -> None:
    assert refusal_of(**status, containers=containers) is not None


@pytest.mark.parametrize(
    ("status", "containers"),
    [
        ({"phase": "Failed", "reason": "", "message": ""}, [WAITS]),
        ({"phase": "Failed", "reason": "DeadlineExceeded", "message": "too long"}, [WAITS]),
        ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}, []),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
            [{"state": {"terminated": {"exitCode": 137, "startedAt": "2026-11-28T17:00:00Z"}}}],
        ),
        (REJECTED, [{"state": {"running": {}}}]),
        (REJECTED, [{"state": {"waiting": {}}, "lastState": {"terminated": {"exitCode": 1}}}]),
        (REJECTED, [{"state": {"waiting": {}}, "restartCount": 2}]),
        ({"phase": "Running", "reason": "", "message": ""}, []),
        ({"phase": "Succeeded", "reason": "", "message": ""}, []),
        (
            {"phase": "Pending", "reason": "", "message": ""},
            [{"state": {"waiting": {"message": 'configmap "x" not found'}}}, {"state": None}],
        ),
    ],
)
def test_a_pod_that_ran_and_failed_or_waits_for_its_owner_is_none(
    status: dict[str, str], containers: list[Any]
) -> None:
    assert refusal_of(**status, containers=containers) is None


def test_a_pod_that_nobody_placed_says_nothing_of_cards() -> None:
    assert rejection_of(make_pod(node="n1"), CARD, 1.0, is_news=True) is None
    assert rejection_of(make_pod(card=0), CARD, 1.0, is_news=True) is None


def test_a_message_is_kept_short_and_on_one_line() -> None:
    found = refusal_of("Failed", "Odd", "a\nb" * 1000, [])
    assert found is not None
    assert len(found.message) <= 240
    assert found.message.isprintable()
