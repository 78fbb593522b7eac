"""Pods of one owner are counted by node and zone, whatever came in between."""

from __future__ import annotations

from collections import Counter
from math import log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.replicas import Replicas

NODES, OWNERS, ZONES = ("n1", "n2", "n3", "n4"), ("web", "db"), ("", "a", "b")
CHANGES = st.one_of(
    st.tuples(
        st.just("put"), st.integers(0, 5).map(str), st.sampled_from(("", *OWNERS)), st.sampled_from(NODES)
    ),
    st.tuples(st.just("drop"), st.integers(0, 5).map(str)),
    st.tuples(st.just("zone"), st.sampled_from(NODES), st.sampled_from(ZONES)),
    st.tuples(st.just("look"), st.sampled_from(OWNERS)),
)


def expected(owner: str, pods: dict[str, tuple[str, str]], zone: dict[str, str]) -> list[float]:
    mine = [node for of, node in pods.values() if of == owner]
    on, within = Counter(mine), Counter(zone.get(node, "") for node in mine)
    zones = {zone.get(node, "") for node in NODES} - {""}
    crowd = [on[node] * log(6) + 2 for node in NODES]
    for number, node in enumerate(NODES):
        if zone.get(node):
            crowd[number] += within[zone[node]] * log(len(zones) + 2) + 4
    return [100 * (max(crowd) + min(crowd) - each) / max(crowd) for each in crowd]


@given(st.lists(CHANGES, max_size=40))
def test_the_count_is_that_of_the_pods_there_are(changes: list[tuple[Any, ...]]) -> None:
    replicas = Replicas()
    pods: dict[str, tuple[str, str]] = {}
    zone: dict[str, str] = {}
    for kind, what, *where in [*changes, *(("look", owner) for owner in OWNERS)]:
        if kind == "put":
            replicas.put(what, *where)
            pods[what] = (where[0], where[1])
        elif kind == "drop":
            replicas.drop(what)
            pods.pop(what, None)
        elif kind == "zone":
            replicas.node_is_in(what, where[0])
            zone[what] = where[0]
        else:
            assert replicas.scores(what, NODES) == pytest.approx(expected(what, pods, zone))


def test_a_zone_counts_less_than_a_node() -> None:
    replicas = Replicas()
    for node, zone in (("n1", "a"), ("n2", "a"), ("n3", "b")):
        replicas.node_is_in(node, zone)
    assert replicas.scores("web", ["n1", "n2", "n3"]).tolist() == [100, 100, 100]
    replicas.put("p", "web", "n1")
    here, near, far = replicas.scores("web", ["n1", "n2", "n3"])
    assert here < near < far == 100
