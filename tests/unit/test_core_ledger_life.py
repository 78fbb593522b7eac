"""After any order of events the ledger is what a new one would be, and no card is promised twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Refusal
from gpuslice.core.placement import place
from gpuslice.core.policy import make_policy
from tests.builders import make_node, make_placement, make_pod

NODES = ("n1", "n2")


class LedgerLife(RuleBasedStateMachine):
    """An API server's truth, and a ledger that hears of it late, twice or out of order."""

    pods: Bundle[str] = Bundle("pods")

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()
        self.policy = make_policy("binpack", self.ledger.fleet)
        self.ledger.listener = self.policy
        self.truth: dict[str, Pod] = {}
        self.news: list[Pod] = []
        self.cards: dict[str, tuple[int, ...]] = {}
        self.version = 0
        self.count = 0
        for name in NODES:
            self.set_node(name, (8, 15))

    def publish(self, pod: Pod) -> None:
        self.version += 1
        pod = replace(pod, version=self.version)
        self.truth[pod.uid] = pod
        self.news.append(pod)

    @rule(name=st.sampled_from(NODES), cards=st.lists(st.integers(1, 16), min_size=1, max_size=3).map(tuple))
    def set_node(self, name: str, cards: tuple[int, ...]) -> None:
        self.cards[name] = cards
        self.ledger.apply_node(make_node(name, cards))

    @rule(name=st.sampled_from(NODES))
    def remove_node(self, name: str) -> None:
        self.cards.pop(name, None)
        self.ledger.remove_node(name)

    @rule(target=pods, name=st.sampled_from("abc"), units=st.integers(1, 10))
    def create(self, name: str, units: int) -> str:
        for uid, pod in list(self.truth.items()):
            if pod.name == name:
                self.delete_for_real(uid)
        self.count += 1
        uid = f"uid-{self.count}"
        self.publish(make_pod(name, units, uid=uid))
        return uid

    @rule(uid=pods, node=st.sampled_from(NODES), data=st.data())
    def bind_by_us(self, uid: str, node: str, data: st.DataObject) -> None:
        """The whole way of a bind, with the ledger asked for room and the API server's answer drawn."""
        pod = self.truth.get(uid)
        state = self.ledger.state(node)
        if pod is None or pod.node or state is None or pod.request is None:
            return
        placement = place(state, pod.request)
        if isinstance(placement, Refusal) or self.ledger.assume(pod, placement) is not None:
            return
        if data.draw(st.booleans(), label="bound"):
            self.publish(replace(pod, node=node, placement=placement))
        else:
            self.ledger.forget(uid)

    @rule(uid=pods, node=st.sampled_from(NODES))
    def bind_by_a_stranger(self, uid: str, node: str) -> None:
        pod = self.truth.get(uid)
        if pod is not None and not pod.node:
            self.publish(replace(pod, node=node))

    @rule(uid=pods, card=st.integers(0, 3))
    def repair(self, uid: str, card: int) -> None:
        pod = self.truth.get(uid)
        if pod is not None and pod.node and pod.request is not None:
            self.publish(replace(pod, placement=make_placement(pod.node, pod.request.units, card)))

    @rule(uid=pods)
    def finish(self, uid: str) -> None:
        if uid in self.truth:
            self.publish(replace(self.truth[uid], finished=True))

    @rule(uid=consumes(pods))
    def delete(self, uid: str) -> None:
        self.delete_for_real(uid)

    def delete_for_real(self, uid: str) -> None:
        if self.truth.pop(uid, None) is not None:
            self.deliver_all()
            self.ledger.remove_pod(uid)

    @rule(data=st.data())
    def deliver_one(self, data: st.DataObject) -> None:
        """Any event that ever happened, perhaps again, perhaps long after it was true."""
        if self.news:
            self.ledger.apply_pod(data.draw(st.sampled_from(self.news), label="news"))

    @rule()
    def deliver_all(self) -> None:
        for pod in self.truth.values():
            self.ledger.apply_pod(pod)

    @invariant()
    def the_arrays_say_what_the_book_says(self) -> None:
        fleet = self.ledger.flush()
        for name in NODES:
            state = self.ledger.state(name)
            if state is None:
                assert name not in fleet.row_of
                continue
            row = fleet.row_of[name]
            assert tuple(fleet.left[row][: len(state.left)].tolist()) == state.left
            assert not np.any(fleet.left[row][len(state.left) :])

    @invariant()
    def nothing_is_less_than_nothing(self) -> None:
        assert int(self.ledger.flush().left.min(initial=0)) >= 0

    @invariant()
    def up_to_date_it_is_what_a_new_ledger_would_be(self) -> None:
        self.deliver_all()
        rebuilt = Ledger()
        for pod in reversed(self.truth.values()):
            rebuilt.apply_pod(pod)
        for name, cards in self.cards.items():
            rebuilt.apply_node(make_node(name, cards))
        assert self.ledger.snapshot() == rebuilt.snapshot()
        assert self.ledger.assumed() == []


class PromisesKept(LedgerLife):
    """Without strangers, shrinking nodes and repairs nothing is ever promised twice."""

    def set_node(self, name: str, cards: tuple[int, ...]) -> None:
        self.cards[name] = (8, 15)
        self.ledger.apply_node(make_node(name, (8, 15)))

    bind_by_a_stranger = repair = None  # type: ignore[assignment]

    @invariant()
    def no_card_is_over_committed(self) -> None:
        assert list(self.ledger.overcommitted()) == []


LIFE: Any = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestLedgerLife = LedgerLife.TestCase
TestLedgerLife.settings = LIFE
TestPromisesKept = PromisesKept.TestCase
TestPromisesKept.settings = LIFE
