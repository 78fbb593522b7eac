"""What did not change is not read or thought over again; what comes out is as if it had been."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.gpu.mig import MigSample
from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.adapters.region import layout
from gpuslice.adapters.region.limits import LimitsEntry, write_limits
from gpuslice.adapters.region.reader import CardUsage as Counted
from gpuslice.adapters.region.reader import prepare_region
from gpuslice.apps.exporter.card_snapshot import NodeFacts, SnapshotBuilder, build_card
from gpuslice.apps.exporter.device_grants import DeviceGrant, DeviceGrants, ShareMode
from gpuslice.apps.exporter.isolation import (
    CHECK_EVERY,
    LONGEST_REST,
    ContainerIsolation,
    Isolation,
    IsolationReader,
)
from gpuslice.core.attribution import ContainerKey, ProcessReading, Stranger

CARD = "GPU-a"
A, B = ContainerKey("default", "a", "main"), ContainerKey("default", "b", "main")
SHARE = DeviceGrant("aliyun.com/gpu-mem", ShareMode.SHARE, 4)
WHOLE = DeviceGrant("nvidia.com/gpu", ShareMode.EXCLUSIVE)
INSTANCE = DeviceGrant("nvidia.com/mig-1g.10gb", ShareMode.MIG, mig=("MIG-1",))
COUNTED = Counted(CARD, 100, 20, used_bytes=30, peak_bytes=40, refused=1, throttled_ns=5, processes=())

maybe_bytes = st.sampled_from([None, 0, 30, 1000])
readings = st.builds(
    ProcessReading, st.integers(1, 3), st.just(CARD), maybe_bytes, st.sampled_from([None, None, 0.5])
)
samples = st.builds(
    CardSample,
    position=st.just(0),
    index=st.integers(0, 1),
    uuid=st.just(CARD),
    total_bytes=maybe_bytes,
    used_bytes=maybe_bytes,
    fields=st.sampled_from([{150: 40.0}, {150: 41.0}]),
    processes=st.none() | st.lists(readings, max_size=3, unique_by=lambda each: each.pid).map(tuple),
    mig=st.sampled_from([(), (MigSample("MIG-1", "1g.10gb", 1, 0, 500, 20),)]),
    mig_enabled=st.booleans(),
)
owners = st.dictionaries(st.integers(1, 3), st.sampled_from([A, B, Stranger.HOST]))
held = st.dictionaries(st.sampled_from([A, B]), st.sampled_from([SHARE, WHOLE, INSTANCE]))
isolated = st.builds(
    ContainerIsolation,
    st.sampled_from([{}, {CARD: LimitsEntry(CARD, 100, 20)}]),
    st.sampled_from([{}, {CARD: COUNTED}, {CARD: replace(COUNTED, refused=2)}]),
)
known = st.builds(
    NodeFacts,
    owners=owners,
    grants=st.builds(DeviceGrants, st.dictionaries(st.sampled_from([CARD, "nvidia0"]), held)),
    isolation=st.builds(Isolation, st.dictionaries(st.sampled_from([A, B]), isolated)),
    obstacle=st.sampled_from(["", "pods of this node are not known"]),
)


@given(st.lists(st.tuples(samples, known), min_size=2, max_size=2), st.data())
def test_a_card_drawn_again_is_the_card_drawn_anew(
    worlds: list[tuple[CardSample, NodeFacts]], data: st.DataObject
) -> None:
    """Each world is the one before with one thing taken from the other."""
    builder, (sample, knowledge), (other, other_knowledge) = SnapshotBuilder(), *worlds
    for _ in range(6):
        assert builder.build(sample, knowledge) == build_card(sample, knowledge)
        sample = _with_one_of(sample, other, data)
        knowledge = _with_one_of(knowledge, other_knowledge, data)


def _with_one_of(world: Any, other: Any, data: st.DataObject) -> Any:
    name = data.draw(st.sampled_from([*world.__dataclass_fields__, ""]))
    return replace(world, **{name: getattr(other, name)}) if name else world


def _folder(root: Path) -> Path:
    """The agent's of one container."""
    place = root / "containers" / "a"
    (place / "etc").mkdir(parents=True)
    (place / "var").mkdir()
    (place / "owner.json").write_text(json.dumps({"namespace": "default", "pod": "a", "container": "main"}))
    write_limits(place / "etc" / "limits", [LimitsEntry(CARD, 100, 20)])
    return place


def _write_peak(region: Path, peak_bytes: int) -> None:
    head = layout.RegionHead(magic=layout.MAGIC | layout.VERSION)
    head.cards[0].key, head.cards[0].uuid, head.cards[0].peak_bytes = 1, CARD.encode(), peak_bytes
    with region.open("r+b") as file:
        file.write(bytes(head))


async def test_a_container_without_a_process_is_looked_at_in_turns(tmp_path: Path) -> None:
    place = _folder(tmp_path)
    reader = IsolationReader(tmp_path)
    first = await reader.read(busy=())
    assert first.limit(A, CARD) == LimitsEntry(CARD, 100, 20)
    (place / "var" / "region").write_bytes(b"nonsense")
    seen = [bool((await reader.read(busy=())).problems) for _ in range(2 * CHECK_EVERY)]
    assert seen.index(True) < CHECK_EVERY
    assert seen == sorted(seen)  # what cannot be read is asked for until it can


@pytest.mark.parametrize("content", [b"{", b'{"pod": "\xff"}'])
async def test_an_owner_that_cannot_be_read_is_a_problem_of_its_own(tmp_path: Path, content: bytes) -> None:
    (_folder(tmp_path) / "owner.json").write_bytes(content)
    found = await IsolationReader(tmp_path).read()
    assert (found.containers, len(found.problems)) == ({}, 1)


async def test_folders_that_cannot_be_listed_are_a_problem_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "containers").write_text("no folder")
    found = await IsolationReader(tmp_path).read()
    assert found == Isolation({}, (f"{tmp_path}/containers: Not a directory",))


@pytest.mark.parametrize(("took_s", "rests"), [(0.004, 0), (0.011, 2), (9.0, LONGEST_REST)])
async def test_a_region_that_takes_more_than_its_budget_is_read_more_seldom(
    tmp_path: Path, took_s: float, rests: int
) -> None:
    """And is shown as it was meanwhile; other containers are read each time."""
    place = _folder(tmp_path)
    prepare_region(place / "var" / "region")
    ticks = itertools.count()
    reader = IsolationReader(tmp_path, clock=lambda: next(ticks) * took_s)
    seen = []
    for number in range(1, LONGEST_REST + 3):
        _write_peak(place / "var" / "region", number)
        counted = (await reader.read(busy=(A,))).counted(A, CARD)
        assert counted is not None
        seen.append(counted.peak_bytes)
    assert seen[: rests + 2] == [1] * (rests + 1) + [rests + 2]


async def test_a_container_with_a_process_is_looked_at_each_time(tmp_path: Path) -> None:
    place = _folder(tmp_path)
    reader = IsolationReader(tmp_path)
    await reader.read()
    prepare_region(place / "var" / "region")
    await reader.read()
    for size in (10, 20, 30, 40):
        _write_peak(place / "var" / "region", size)
        counted = (await reader.read(busy=(A,))).counted(A, CARD)
        assert counted is not None
        assert counted.peak_bytes == size
