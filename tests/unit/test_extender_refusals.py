"""What the owner of a pod that fits nowhere is told of nodes that nobody asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gpuslice.apps.extender.node_query import NodeNames
from gpuslice.apps.extender.refusals import SAMPLED, Refusals
from gpuslice.core.contract import NEUTRAL_NAMES
from gpuslice.core.host_resources import HostResources
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Request, Tier
from gpuslice.core.node_sample import sample_size
from gpuslice.core.placement import KUBELET_AWAY, NO_ROOM, RESERVED
from gpuslice.core.views import with_unhealthy
from tests.builders import make_node, make_placement, make_pod, make_request

NODES = 400
PLAIN = make_request(4)


def full_of(node: str, ledger: Ledger) -> None:
    ledger.apply_pod(make_pod(f"on-{node}", 15, node=node, card=0))


def cpu_of(node: str, ledger: Ledger) -> None:
    ledger.apply_pod(make_pod(f"on-{node}", 1, node=node, card=0, host=HostResources(4000, 0)))


def reserve_all(node: str, ledger: Ledger) -> None:
    ledger.apply_pod(first := make_pod(f"before-{node}", 15, priority=10))
    ledger.holds.reserve(first, make_placement(node, 15, 0))


def event(
    request: Request, shown: dict[str, Any], unseen: dict[str, Any], *uses: Callable[[str, Ledger], None]
) -> str:
    """The event's text if the nodes that kube-scheduler shows are full, and `uses` is made of the others."""
    ledger, names = Ledger(), [f"shown-{number}" for number in range(sample_size(NODES))]
    for name in names:
        ledger.apply_node(make_node(name, **shown))
        full_of(name, ledger)
    for number in range(NODES - len(names)):
        node = make_node(f"unseen-{number}", **unseen)
        ledger.apply_node(with_unhealthy(node, node.unhealthy))
        for use in uses:
            use(node.name, ledger)
    fleet = ledger.flush()
    query = NodeNames(fleet).query(msgspec.json.encode(names))
    return Refusals(ledger).explain(request, query, make_pod("asks"))


LIBRARY, COMPUTE = {"tier": Tier.LIBRARY}, {"compute_percent": 100}
WITH_CPU = replace(PLAIN, host=HostResources(2000, 0))


@pytest.mark.parametrize(
    ("request_", "shown", "unseen", "uses"),
    [
        (replace(PLAIN, min_tier=Tier.LIBRARY), LIBRARY, {}, ()),
        (replace(PLAIN, min_tier=Tier.DRIVER), {"tier": Tier.DRIVER}, LIBRARY, ()),
        (PLAIN, {}, {**COMPUTE, "compute_required": True}, ()),
        (make_request(4, core=20), COMPUTE, {}, ()),
        (PLAIN, {}, {"names": NEUTRAL_NAMES}, ()),
        (PLAIN, {}, {"kubelet_away": True}, ()),
        (PLAIN, {}, {"unhealthy": frozenset({0})}, ()),
        (PLAIN, {}, {"shared": False}, ()),
        (WITH_CPU, {}, {"host": HostResources(4000, 0)}, (cpu_of,)),
        (PLAIN, {}, {}, (reserve_all,)),
        (PLAIN, {}, {}, (full_of,)),
    ],
    ids=[
        "library",
        "driver",
        "requires",
        "divides",
        "names",
        "kubelet",
        "sick",
        "whole",
        "cpu",
        "kept",
        "full",
    ],
)
def test_no_sample_is_blamed_where_no_other_node_would_hold_the_pod(
    request_: Request,
    shown: dict[str, Any],
    unseen: dict[str, Any],
    uses: tuple[Callable[[str, Ledger], None], ...],
) -> None:
    assert SAMPLED not in event(request_, shown, unseen, *uses)


@pytest.mark.parametrize(
    ("request_", "unseen"),
    [
        (PLAIN, {}),
        (PLAIN, {"avoided": True}),
        (replace(PLAIN, min_tier=Tier.LIBRARY), LIBRARY),
        (make_request(4, core=20), {**COMPUTE, "compute_required": True}),
        (WITH_CPU, {"host": HostResources(2000, 0)}),
        (replace(PLAIN, names=NEUTRAL_NAMES), {"names": NEUTRAL_NAMES}),
    ],
)
def test_the_sample_is_named_where_a_node_that_was_left_out_would_hold_the_pod(
    request_: Request, unseen: dict[str, Any]
) -> None:
    assert SAMPLED in event(request_, {}, unseen)


def test_a_pod_that_only_kept_cards_would_hold_is_told_so() -> None:
    ledger = Ledger()
    for number, taken in enumerate((True, False)):
        ledger.apply_node(node := make_node(f"n{number}"))
        (full_of if taken else reserve_all)(node.name, ledger)
    query = NodeNames(ledger.flush()).query(b'["n0","n1"]')
    refusals = Refusals(ledger)
    assert (
        refusals.explain(PLAIN, query, make_pod("asks"))
        == f"{RESERVED} (2 nodes with shared cards looked at)"
    )
    failed, final = refusals.by_node(PLAIN, query, make_pod("asks"))
    assert msgspec.json.decode(b"".join(failed)) == {"n0": NO_ROOM, "n1": RESERVED}
    assert msgspec.json.decode(b"".join(final)) == {}, "it may have the cards if it becomes more important"


def test_nodes_where_no_eviction_can_help_are_told_apart() -> None:
    ledger = Ledger()
    nodes: dict[str, dict[str, Any]] = {
        "full": {},
        "small": {"cards": (2,)},
        "names": {"names": NEUTRAL_NAMES},
        "compute": {**COMPUTE, "compute_required": True},
        "away": {"kubelet_away": True},
    }
    for name, fields in nodes.items():
        node = make_node(name, **fields)
        ledger.apply_node(with_unhealthy(node, node.unhealthy))
    full_of("full", ledger)
    query = NodeNames(ledger.flush()).query(msgspec.json.encode([*nodes, "unknown"]))
    failed, final = Refusals(ledger).by_node(PLAIN, query, make_pod("asks"))
    told = msgspec.json.decode(b"".join(failed))
    assert told.keys() == {*nodes, "unknown"}
    assert (told["full"], told["small"], told["away"]) == (NO_ROOM, NO_ROOM, KUBELET_AWAY)
    assert msgspec.json.decode(b"".join(final)).keys() == told.keys() - {"full"}
