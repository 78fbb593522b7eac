"""Processes start and die between any two of the exporter's readings: every card adds up all the same."""

from __future__ import annotations

import asyncio
import ctypes
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.adapters.gpu.telemetry import CardSample, NodeSample
from gpuslice.adapters.region import layout
from gpuslice.adapters.region.limits import LimitsEntry, write_limits
from gpuslice.adapters.region.reader import prepare_region
from gpuslice.apps.exporter.card_snapshot import CardSnapshot
from gpuslice.apps.exporter.device_grants import DeviceGrant, DeviceGrants, ShareMode
from gpuslice.apps.exporter.node_pods import KnownPod
from gpuslice.apps.exporter.node_state import initial_state
from gpuslice.apps.exporter.owners import NO_HOST_PID
from gpuslice.apps.exporter.sampler import Sampler
from gpuslice.apps.exporter.settings import ExporterSettings
from gpuslice.core.attribution import ContainerKey, ProcessReading

MIB = 1 << 20
UUIDS = ("GPU-a", "GPU-b")
TENANTS = 3
RESERVE = 50 * MIB  # the driver's own on each card


def key(tenant: int) -> ContainerKey:
    return ContainerKey("default", f"app-{tenant}", "main")


def uid(tenant: int) -> str:
    return f"00000000-0000-4000-8000-{tenant:012x}"


@dataclass
class Process:
    pid: int
    tenant: int | None  # None: of the host
    card: int
    used_bytes: int


@dataclass
class Node:
    """A node's processes, its /proc, the agent's folders; things happen between the driver's answers."""

    folder: Path
    happens: Iterator[int]
    processes: dict[int, Process] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)  # tenant → slots of its region in use
    next_pid: int = 100
    tells_memory: bool = True
    lists: bool = True

    def __post_init__(self) -> None:
        self.proc.mkdir()
        for tenant in range(TENANTS):
            place = self.folder / "root" / "containers" / f"c{tenant}"
            (place / "etc").mkdir(parents=True)
            (place / "var").mkdir()
            owner = {"namespace": "default", "pod": f"app-{tenant}", "container": "main"}
            (place / "owner.json").write_text(json.dumps(owner))
            write_limits(place / "etc" / "limits", [LimitsEntry(uuid, 4096 * MIB, 20) for uuid in UUIDS])
            prepare_region(place / "var" / "region")

    @property
    def proc(self) -> Path:
        return self.folder / "proc"

    def something(self) -> None:
        """A process starts, or one is killed; or nothing."""
        what = next(self.happens)
        if what % 3 == 1:
            tenant = what // 3 % (TENANTS + 1)
            self.start(None if tenant == TENANTS else tenant, what // 12 % len(UUIDS), (what + 1) * MIB)
        elif what % 3 == 2 and self.processes:
            pids = sorted(self.processes)
            self.kill(pids[what % len(pids)])

    def start(self, tenant: int | None, card: int, used_bytes: int) -> None:
        pid, self.next_pid = self.next_pid, self.next_pid + 1
        self.processes[pid] = Process(pid, tenant, card, used_bytes)
        place = self.proc / str(pid)
        place.mkdir()
        fields = " ".join(["0"] * 18)
        (place / "stat").write_text(f"{pid} (train) S {fields} {pid * 10} 0\n")
        (place / "status").write_text(f"NSpid:\t{pid}\t{pid % 7 + 1}\n")
        group = "/user.slice" if tenant is None else f"/kubepods/pod{uid(tenant)}/{tenant:064x}"
        (place / "cgroup").write_text(f"0::{group}\n")
        if tenant is not None:
            self.count(tenant, self.processes[pid])

    def kill(self, pid: int) -> None:
        """Its part of the region stays: nobody of its container came by since."""
        del self.processes[pid]
        for file in (self.proc / str(pid)).iterdir():
            file.unlink()
        (self.proc / str(pid)).rmdir()

    def count(self, tenant: int, process: Process) -> None:
        """What libgpuslice writes into the region."""
        place = self.folder / "root" / "containers" / f"c{tenant}" / "var" / "region"
        number = self.slots.get(tenant, 0)
        self.slots[tenant] = number + 1
        at = ctypes.sizeof(layout.RegionHead) + number * ctypes.sizeof(layout.RegionSlot)
        with place.open("rb") as file:
            data = bytearray(file.read(at + ctypes.sizeof(layout.RegionSlot)))
        head = layout.RegionHead.from_buffer(data)
        head.magic, head.slots_high = layout.MAGIC | layout.VERSION, number + 1
        for place_of_card, uuid in enumerate(UUIDS):
            head.cards[place_of_card].key = place_of_card + 1
            head.cards[place_of_card].uuid = uuid.encode()
        slot = layout.RegionSlot.from_buffer(data, at)
        slot.owner, slot.pid, slot.start_time = number + 1, process.pid % 7 + 1, process.pid * 10
        slot.usage[process.card].used_bytes = process.used_bytes
        written = bytes(data)
        with place.open("r+b") as file:
            file.write(written)

    def on(self, card: int) -> list[Process]:
        return [process for process in self.processes.values() if process.card == card]

    # -- as telemetry ---------------------------------------------------------------------------------

    async def renew(self) -> None:
        return None  # there is nothing to let go of

    async def sample(self, wanted: Mapping[int, str]) -> NodeSample:
        cards = []
        for card, uuid in enumerate(UUIDS):
            used_bytes = RESERVE + sum(process.used_bytes for process in self.on(card))
            self.something()
            readings = tuple(
                ProcessReading(each.pid, uuid, each.used_bytes if self.tells_memory else None, 0.1)
                for each in self.on(card)
            )
            self.something()
            cards.append(
                CardSample(
                    position=card,
                    index=card,
                    uuid=uuid,
                    total_bytes=16384 * MIB,
                    used_bytes=used_bytes,
                    processes=readings if self.lists else None,
                )
            )
        self.something()
        return NodeSample(tuple(cards), taken_at_s=1.0)


@dataclass
class Sampling:
    """A sampler over `node`, and the state it writes. `hidden`: why it cannot see the host's processes."""

    node: Node
    hidden: str = ""

    def __post_init__(self) -> None:
        chosen = ExporterSettings(root=str(self.node.folder / "root"), proc=str(self.node.proc))
        self.state = initial_state(chosen, "n1")
        self.state.pods.replace([KnownPod("default", f"app-{n}", uid(n), ("main",)) for n in range(TENANTS)])
        grant = DeviceGrant("aliyun.com/gpu-mem", ShareMode.SHARE, 4)
        grants = {uuid: {key(tenant): grant for tenant in range(TENANTS)} for uuid in UUIDS}
        self.state.grants = DeviceGrants(grants)
        self.sampler = Sampler(self.node, self.state, chosen, hidden=self.hidden)

    async def cards(self) -> tuple[CardSnapshot, ...]:
        await self.sampler.sample()
        return self.state.snapshot.cards


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=40, max_size=60), st.booleans(), st.booleans(), st.booleans())
def test_the_sum_is_the_cards_figure_no_matter_who_dies_meanwhile(
    happens: list[int], tells_memory: bool, lists: bool, sees: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        node = Node(Path(name), iter(happens), tells_memory=tells_memory, lists=lists)
        sampling = Sampling(node, "" if sees else NO_HOST_PID)
        for _ in range(5):
            node.something()
            for card in asyncio.run(sampling.cards()):
                parts = [each.used_bytes for each in card.containers.values()]
                parts += [use.memory_bytes for use in card.strangers.values()]
                assert sum(part for part in parts if part is not None) == card.sample.used_bytes


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, iter([0] * 1000))


async def test_what_a_killed_process_left_in_its_region_is_nobodys_use(node: Node) -> None:
    node.start(0, 0, 700 * MIB)
    node.kill(100)
    (card, _) = await Sampling(node).cards()
    assert card.attributed
    assert card.containers[key(0)].used_bytes == 0


async def test_where_the_driver_hides_the_living_they_are_counted_and_the_dead_are_not(node: Node) -> None:
    node.lists = False
    node.start(0, 0, 700 * MIB)
    node.start(0, 0, 30 * MIB)
    node.kill(100)
    (card, _) = await Sampling(node).cards()
    assert card.containers[key(0)].used_bytes == 30 * MIB


async def test_where_processes_cannot_be_seen_the_region_is_believed(node: Node) -> None:
    node.start(0, 0, 700 * MIB)
    node.processes.clear()  # the driver, too, shows this PID namespace only
    (card, _) = await Sampling(node, NO_HOST_PID).cards()
    assert card.containers[key(0)].used_bytes == 700 * MIB
    assert ("attribution", NO_HOST_PID) in card.missing
