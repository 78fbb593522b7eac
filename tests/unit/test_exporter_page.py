"""The page from made-up readings: what is known, what is absent, and that every card adds up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.adapters.region.limits import LimitsEntry
from gpuslice.adapters.region.reader import CardUsage
from gpuslice.adapters.web.exposition import joined, pieces, render
from gpuslice.adapters.web.scrape import Page, parse
from gpuslice.apps.exporter.card_history import XidCounts
from gpuslice.apps.exporter.card_snapshot import (
    Active,
    CardSnapshot,
    LostCard,
    NodeFacts,
    NodeSnapshot,
    build_card,
)
from gpuslice.apps.exporter.catalogue import METRICS
from gpuslice.apps.exporter.device_grants import DeviceGrant, DeviceGrants, ShareMode
from gpuslice.apps.exporter.isolation import ContainerIsolation, Isolation
from gpuslice.apps.exporter.node_pods import KnownPod, NodePods
from gpuslice.apps.exporter.own_families import PageContext, families
from gpuslice.core.attribution import ContainerKey, Owner, ProcessReading, Stranger

MIB = 1 << 20
UUID = "GPU-a"
A = ContainerKey("default", "app-0", "main")
B = ContainerKey("default", "app-1", "main")
SHARED = DeviceGrant("aliyun.com/gpu-mem", ShareMode.SHARE, 4)
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "exporter" / "shared-card.txt"


def sample(*processes: ProcessReading, used_mib: int = 3203, listed: bool = True) -> CardSample:
    return CardSample(
        position=0,
        index=0,
        uuid=UUID,
        model="Tesla V100-SXM2-16GB",
        pci_bus_id="00000000:00:07.0",
        total_bytes=16130 * MIB,
        used_bytes=used_mib * MIB,
        fields={150: 37.0, 155: 57.0, 158: 87.0, 203: 20.0},
        processes=processes if listed else None,
    )


def known(owners: dict[int, Owner] | None = None, **more: object) -> NodeFacts:
    isolation = more.pop("isolation", Isolation({}))
    grants = DeviceGrants({UUID: {A: SHARED, B: SHARED}})
    return NodeFacts(owners or {}, grants, isolation, **more)  # type: ignore[arg-type]


def limited() -> Isolation:
    usage = CardUsage(UUID, 4301 * MIB, 30, 3000 * MIB, 3193 * MIB, 2, 1_500_000_000, ())
    limit = LimitsEntry(UUID, 4301 * MIB, 30)
    return Isolation(
        {A: ContainerIsolation({UUID: limit}, {UUID: usage}), B: ContainerIsolation({UUID: limit}, {})}
    )


def page(*cards: CardSnapshot, lost: tuple[LostCard, ...] = ()) -> str:
    pods = NodePods()
    owned = KnownPod(
        "default", "app-0", "uid-0", ("main",), {"f" * 64: "main"}, workload=("Deployment", "app")
    )
    pods.replace([owned])
    active = {(UUID, A): Active("uid-0", 1_700_000_000, 0)}
    snapshot = NodeSnapshot(cards, lost, "418.87.01", 1.0, {(UUID, A): 12.5}, active)
    xids = XidCounts()
    xids.add(UUID, 79, 1_700_000_000.0)
    return render(families(snapshot, PageContext("n1", pods, xids))).decode()


def read(*cards: CardSnapshot) -> Page:
    return parse(page(*cards))


def test_the_page_of_a_shared_card_is_the_golden_one() -> None:
    card = build_card(sample(ProcessReading(7, UUID, 3193 * MIB, 0.2)), known({7: A}, isolation=limited()))
    text = page(card, lost=(LostCard(1, "GPU is lost", 1, "GPU-b"),))
    assert text == GOLDEN.read_text()


def test_what_is_on_the_page_is_in_the_catalogue_with_its_labels() -> None:
    card = build_card(sample(ProcessReading(7, UUID, 3193 * MIB, 0.2)), known({7: A}, isolation=limited()))
    catalogue = {metric.name: metric for metric in METRICS}
    for family in text_string_to_metric_families(page(card)):
        for one in family.samples:
            assert tuple(one.labels) == catalogue[one.name].labels, one.name


def test_what_is_borrowed_is_told_of_who_may_borrow_and_who_lends_keeps_its_limit() -> None:
    borrows = LimitsEntry(UUID, 4301 * MIB, request_bytes=2000 * MIB)
    lends = LimitsEntry(UUID, 1000 * MIB, request_bytes=2000 * MIB)
    isolation = Isolation(
        {A: ContainerIsolation({UUID: borrows}, {}), B: ContainerIsolation({UUID: lends}, {})}
    )
    processes = ProcessReading(7, UUID, 3193 * MIB, 0.2), ProcessReading(8, UUID, 500 * MIB, 0.2)
    found = read(build_card(sample(*processes), known({7: A, 8: B}, isolation=isolation)))
    values = {
        name: [one.value // MIB for one in found.find(f"gpuslice_container_memory_{name}_bytes")]
        for name in ("borrowed", "limit")
    }
    assert values == {"borrowed": [1193, 0], "limit": [4301, 2000]}


def test_without_a_process_list_the_interposers_count_stands_in_and_the_rest_is_absent() -> None:
    card = build_card(sample(listed=False), known(isolation=limited()))
    found = read(card)
    values = {one.labels["pod"]: one.value for one in found.find("gpuslice_container_memory_used_bytes")}
    assert values == {"app-0": 3000 * MIB, "app-1": 0}  # the second is limited and has not called CUDA
    assert found.find("gpuslice_container_sm_utilization_ratio") == []
    assert found.find("gpuslice_container_processes") == []
    assert not card.attributed


def test_memory_that_the_driver_does_not_tell_is_absent_and_counted() -> None:
    card = build_card(sample(ProcessReading(7, UUID, None, None)), known({7: A}))
    found = read(card)
    assert [one.labels["pod"] for one in found.find("gpuslice_container_memory_used_bytes")] == ["app-1"]
    (missing,) = found.find("gpuslice_unavailable", what="memory_used")
    assert missing.value == 1
    (rest,) = found.find("gpuslice_unattributed_memory_bytes")
    assert (rest.labels["reason"], rest.value) == ("unknown", 3203 * MIB)


def test_processes_that_the_driver_hides_do_not_make_containers_idle() -> None:
    card = build_card(sample(), known(isolation=limited()))
    assert not card.attributed
    assert card.containers[A].used_bytes == 3000 * MIB


def test_without_isolation_there_is_no_limit_and_nothing_counted() -> None:
    card = build_card(sample(ProcessReading(7, UUID, 3193 * MIB, 0.2)), known({7: A}))
    assert card.containers[A].limit_bytes is None
    assert card.containers[A].refused is None
    assert card.allocated_bytes == 2 * 4301 * MIB


def test_a_whole_card_is_its_own_limit() -> None:
    grants = DeviceGrants({UUID: {A: DeviceGrant("nvidia.com/gpu", ShareMode.EXCLUSIVE)}})
    card = build_card(sample(), NodeFacts({}, grants, Isolation({})))
    assert card.containers[A].limit_bytes == card.allocated_bytes == 16130 * MIB


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B, Stranger.HOST, Stranger.UNKNOWN_CONTAINER, None]),
            st.none() | st.integers(0, 4000),
        ),
        max_size=8,
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "pods of this node are not known"]),
)
def test_every_card_adds_up_whatever_is_unknown(
    given_processes: list[tuple[Owner | None, int | None]], listed: bool, isolated: bool, obstacle: str
) -> None:
    processes = [
        ProcessReading(pid, UUID, None if mib is None else mib * MIB)
        for pid, (_, mib) in enumerate(given_processes)
    ]
    owners = {pid: owner for pid, (owner, _) in enumerate(given_processes) if owner is not None}
    used_mib = 50 + sum(mib or 0 for _, mib in given_processes)
    isolation = limited() if isolated else Isolation({})
    card = build_card(
        sample(*processes, used_mib=used_mib, listed=listed),
        known(owners, isolation=isolation, obstacle=obstacle),
    )
    parts = [each.used_bytes for each in card.containers.values()]
    parts += [use.memory_bytes for use in card.strangers.values()]
    assert sum(part for part in parts if part is not None) == used_mib * MIB


@pytest.mark.parametrize("room", [0, 15, 1000])
def test_a_page_has_no_more_container_series_than_it_may(room: int) -> None:
    card = build_card(sample(), known(isolation=limited()))
    context = PageContext("n1", NodePods(), XidCounts(), max_series=room)
    found = parse(render(families(NodeSnapshot((card,), (), "", 1.0), context)).decode())
    shown = [one for one in found.samples if one.name.startswith("gpuslice_container_")]
    assert len(shown) <= room
    assert bool(found.find("gpuslice_unavailable", what="containers")) == (room < 22)


def test_a_page_that_was_made_of_the_one_before_is_as_if_made_anew() -> None:
    pods = NodePods()
    kept = PageContext("n1", pods, XidCounts())
    keys = [ContainerKey("default", f"app-{number}", "main") for number in range(200)]
    seen: set[bytes] = set()
    for step, present in enumerate((keys, keys, keys[:150], keys[20:], keys)):
        busy = ProcessReading(7, UUID, (100 + step) * MIB, 0.25 * step)
        card = build_card(
            sample(busy),
            NodeFacts({7: keys[30]}, DeviceGrants({UUID: dict.fromkeys(present, SHARED)}), Isolation({})),
        )
        snapshot = NodeSnapshot((card,), (), "", 1.0, {(UUID, keys[30]): 0.5 * step})
        if step == 3:
            pods.replace([KnownPod("default", "app-40", "uid-40", ("main",), {"f" * 64: "main"})])
        page = joined(pieces(families(snapshot, kept)))
        assert page == joined(pieces(families(snapshot, PageContext("n1", pods, XidCounts()))))
        seen.add(page)
    assert len(seen) == 5


def test_what_did_not_change_keeps_its_piece() -> None:
    context = PageContext("n1", NodePods(), XidCounts())
    first = pieces(families(NodeSnapshot((build_card(sample(), known()),), (), "", 1.0), context))
    second = pieces(
        families(NodeSnapshot((build_card(sample(used_mib=3204), known()),), (), "", 2.0), context)
    )
    kept = [piece for piece in second if any(piece is each for each in first)]
    shown = b"".join(piece.text for piece in kept)
    assert b"gpuslice_container_memory_used_bytes" in shown
    assert b"gpuslice_gpu_memory_used_bytes" not in shown
