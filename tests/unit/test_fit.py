"""Where a request fits, where not, and why: one rule, for one node and for all nodes at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.contract import NEUTRAL_NAMES, VENDOR_NAMES
from gpuslice.core.host_resources import HostResources
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Node, Placement, Pod, Refusal, Request, Tier
from gpuslice.core.placement import Fit, place, refusal, why_not
from gpuslice.core.policy import NEVER, POLICIES, make_policy
from gpuslice.core.views import with_unhealthy
from tests.builders import make_card, make_placement, make_pod, make_request

NAMES = st.sampled_from([VENDOR_NAMES, VENDOR_NAMES, NEUTRAL_NAMES])


@st.composite
def nodes(draw: st.DrawFn, name: str) -> Node:
    """A node of every kind that decides: shared or not, healthy or not, with its terms and its host."""
    sizes = draw(st.lists(st.sampled_from([8, 15, 15, 40]), max_size=4))
    node = Node(
        name,
        tuple(make_card(index, units, node=name) for index, units in enumerate(sizes)),
        shared=draw(st.sampled_from([True, True, True, False])),
        packing=draw(st.sampled_from(["", "", "binpack", "spread", "other"])),
        compute_percent=draw(st.sampled_from([0, 100])),
        compute_required=draw(st.sampled_from([False, False, True])),
        avoided=draw(st.booleans()),
        host=HostResources(draw(st.sampled_from([0, 4000, 8000])), draw(st.sampled_from([0, 4096]))),
        names=draw(NAMES),
        tier=draw(st.sampled_from(Tier)),
        kubelet_away=draw(st.sampled_from([False, False, False, True])),
    )
    return with_unhealthy(node, draw(st.frozensets(st.integers(0, 3), max_size=2)))


@st.composite
def clusters(draw: st.DrawFn) -> Ledger:
    """A few nodes and pods that hold cards, are leaving, sit nobody knows where, or have cards reserved."""
    ledger = Ledger()
    names = [f"n{number}" for number in range(draw(st.integers(1, 4)))]
    for name in names:
        ledger.apply_node(draw(nodes(name)))
    for number in range(draw(st.integers(0, 8))):
        name, node, card = (
            f"p{number}",
            draw(st.sampled_from(names)),
            draw(st.sampled_from([0, 0, 1, 2, None])),
        )
        units, core = draw(st.integers(1, 15)), draw(st.sampled_from([0, 40]))
        host = HostResources(draw(st.sampled_from([0, 1000])), draw(st.sampled_from([0, 1024])))
        pod = make_pod(
            name, units, node=node, card=card, core=core, host=host, terminating=draw(st.booleans())
        )
        ledger.apply_pod(pod)
    for number in range(draw(st.integers(0, 2))):
        waiting, node = make_pod(f"w{number}", priority=draw(st.integers(0, 2))), draw(st.sampled_from(names))
        ledger.apply_pod(waiting)
        ledger.holds.reserve(waiting, make_placement(node, draw(st.integers(1, 15)), 0))
    return ledger


requests = st.builds(
    lambda units, cards, core, tier, names, host: replace(
        make_request(units * cards, cards=cards, core=core), min_tier=tier, names=names, host=host
    ),
    st.integers(1, 20),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([0, 0, 30, 100]),
    st.sampled_from([Tier.NONE, Tier.NONE, *Tier]),
    NAMES,
    st.builds(HostResources, st.sampled_from([0, 1000, 5000]), st.sampled_from([0, 2048])),
)
askers = st.builds(
    lambda uid, priority: (uid, priority), st.sampled_from(["uid-w0", "x"]), st.integers(-1, 3)
)


@given(clusters(), requests, askers)
def test_many_nodes_at_once_are_judged_as_each_alone(
    ledger: Ledger, request: Request, asker: tuple[str, int]
) -> None:
    row_of = ledger.flush().row_of
    rows = np.array(list(row_of.values()), dtype=np.intp)
    pod = make_pod(uid=asker[0], priority=asker[1])
    together = dict(zip(row_of, ledger.why_not(request, rows, pod, host_limits=True).tolist(), strict=True))
    for name in ledger.node_names():
        assert together.get(name, Fit.NOT_SHARED) == ledger.why_not_on(name, request, *asker)


@given(clusters(), requests, st.sampled_from([each.name for each in POLICIES]))
def test_a_policy_ranks_exactly_the_nodes_that_fit_and_takes_cards_that_hold_the_pod(
    ledger: Ledger, request: Request, name: str
) -> None:
    fleet = ledger.flush()
    policy, shape = make_policy(name, fleet), shape_of(request)
    keys, fits = policy.keys(shape), ledger.why_not(request, np.arange(fleet.rows), make_pod(priority=99))
    assert ((keys != NEVER) == (fits == Fit.YES)).all()
    for node, row in fleet.row_of.items():
        state, slots = ledger.state(node), policy.fitting_slots(shape, row)
        assert state is not None
        if slots is None:
            assert isinstance(place(state, request), Refusal)
            continue
        chosen = place(state, request, slots)
        assert isinstance(chosen, Placement)
        cards = tuple(state.node.cards[slot].index for slot in slots)
        assert tuple(part.card for part in chosen.slices) == cards, "also where the node's own rule decides"


@given(clusters(), requests)
def test_every_reason_has_words_that_say_what_is_missing(ledger: Ledger, request: Request) -> None:
    for name in ledger.node_names():
        state = ledger.state(name)
        assert state is not None
        fit = why_not(state, request, ledger.host_used(name))
        told = refusal(fit, state, request, ledger.host_used(name))
        placed = place(state, request)
        assert told.reason
        assert (fit is Fit.YES) <= isinstance(placed, Placement)
        if isinstance(placed, Refusal):
            assert placed == told
            assert placed.never <= fit.is_final


@given(clusters(), requests)
def test_a_final_reason_stays_when_all_pods_leave(ledger: Ledger, request: Request) -> None:
    for name in ledger.node_names():
        holds = ledger.holds.on(name)
        assert holds is not None
        empty = holds.state_without(holds.by_uid.keys())
        if why_not(holds.state(), request).is_final:
            assert why_not(empty, request) is not Fit.YES
        else:
            assert why_not(empty, request) is Fit.YES, "room comes when pods leave"


def test_a_pod_that_is_not_known_yet_comes_last() -> None:
    ledger = Ledger()
    ledger.apply_node(Node("n1", (make_card(),)))
    ledger.holds.reserve(Pod("w", "default", "w", priority=-5), make_placement("n1", 15, 0))
    assert ledger.why_not(make_request(4), np.array([0])).tolist() == [Fit.HELD]
