"""When the agent relies on the driver for limits: after a program was refused, card by card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuslice.adapters.cgroup.tree import CgroupTree
from gpuslice.adapters.gpu.memory_limits import MemoryLimits
from gpuslice.apps.agent.driver_probe import DriverProbe
from gpuslice.core.model import Card
from simcluster import gpu

from .limiter_rig import Host, Root
from .sim_driver_client import python, require_driver

DRIVER = "615.71.05"


@contextmanager
def probe_on(host: Host, root: Path, limiter: Root | None = None, boot: str = "b1") -> Iterator[DriverProbe]:
    asked = limiter or Root(host)
    environ = gpu.environment(host.state, require_driver())
    try:
        yield DriverProbe(asked, CgroupTree(host.cgroups.root), root, boot=boot, environ=environ)
    finally:
        asked.close()


def cards(host: Host) -> tuple[Card, ...]:
    return tuple(Card(index, uuid, 143771, 140) for index, uuid in enumerate(host.uuids))


@pytest.mark.parametrize("accounting", ["misc", "dmem"])
async def test_a_card_on_which_a_program_is_refused_is_left_to_the_driver(
    accounting: str, tmp_path: Path
) -> None:
    host = Host(tmp_path, accounting)
    with probe_on(host, tmp_path) as probe:
        assert await probe.proved(cards(host), DRIVER) == set(host.uuids)
        assert not probe.problems
    with gpu.Machine(host.state) as machine:
        assert machine.used_bytes() == 0


async def test_what_was_proved_holds_for_this_run_of_the_machine_and_this_driver(tmp_path: Path) -> None:
    host = Host(tmp_path)
    with probe_on(host, tmp_path) as probe:
        proved = await probe.proved(cards(host), DRIVER)
    broken = Host(tmp_path / "later", "off")  # it would not be proved again
    for boot, driver, expected in (("b1", DRIVER, proved), ("b2", DRIVER, set()), ("b1", "616.10", set())):
        with probe_on(broken, tmp_path, boot=boot) as probe:
            assert await probe.proved(cards(host), driver) == expected


async def test_each_card_is_judged_by_itself(tmp_path: Path) -> None:
    divided = gpu.CardSpec("A100-SXM4-40GB", mig=("3g.20gb",))
    host = Host(tmp_path, cards=(gpu.CardSpec("H200"), divided))
    with probe_on(host, tmp_path) as probe:
        assert await probe.proved(cards(host)[:2], DRIVER) == {host.uuids[0]}
        assert "NVML 3" in probe.problems[host.uuids[1]]


@pytest.mark.parametrize(
    ("accounting", "driver", "said"),
    [("misc", "580.65.06", "615 is the first"), ("misc", "", "unknown"), ("off", DRIVER, "NVML 3")],
)
async def test_what_cannot_be_relied_on_says_why(
    accounting: str, driver: str, said: str, tmp_path: Path
) -> None:
    host = Host(tmp_path, accounting)
    with probe_on(host, tmp_path) as probe:
        assert await probe.proved(cards(host), driver) == set()
        assert said in probe.problems[host.uuids[0]]


async def test_cgroups_of_version_1_are_none(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (host.cgroups.root / "cgroup.controllers").unlink()
    with probe_on(host, tmp_path) as probe:
        assert await probe.proved(cards(host), DRIVER) == set()
        assert "version 2" in probe.problems[host.uuids[0]]


class Forgetful(Root):
    """A driver that takes every limit and enforces none."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._said = MemoryLimits(0, None)

    async def memory_limits(self, uuid: str, cgroup: Path) -> MemoryLimits:
        return self._said

    async def set_memory_limits(self, uuid: str, cgroup: Path, limits: MemoryLimits) -> None:
        self._said = limits


async def test_a_driver_that_says_yes_and_refuses_nothing_is_not_believed(tmp_path: Path) -> None:
    host = Host(tmp_path)
    with probe_on(host, tmp_path, Forgetful(host)) as probe:
        assert await probe.proved(cards(host), DRIVER) == set()
        assert "not refused: allowed" in probe.problems[host.uuids[0]]


async def test_a_refusal_on_a_full_card_proves_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path)
    with gpu.Machine(host.state) as machine:
        (card,) = machine.cards()
        machine.add_ghost(0, 7, card.total_mib - 1000, "full")
    with probe_on(host, tmp_path) as probe:
        assert await probe.proved(cards(host), DRIVER) == set()
        assert "without a limit did not get memory" in probe.problems[host.uuids[0]]


async def test_a_cgroup_that_the_controller_does_not_reach_is_made_to_count(tmp_path: Path) -> None:
    host = Host(tmp_path, "dmem")
    (host.cgroups.root / "cgroup.subtree_control").write_text("cpu memory")
    tree = CgroupTree(host.cgroups.root)
    tree.count_device_memory(host.cgroups.root / "new")
    assert "+dmem" in (host.cgroups.root / "cgroup.subtree_control").read_text()


NVML = """
import asyncio, json, sys
from pathlib import Path
from gpuslice.adapters.gpu.memory_limits import LimitRefusedError, MemoryLimits
from gpuslice.adapters.gpu.nvml import NvmlSource
leaf, gone = Path(sys.argv[-2]), Path(sys.argv[-1])
async def play():
    source = NvmlSource()
    (card,) = (await source.inventory()).cards
    said = [await source.memory_limits(card.uuid, leaf)]
    await source.set_memory_limits(card.uuid, leaf, MemoryLimits(1 << 20, 8 << 20))
    said.append(await source.memory_limits(card.uuid, leaf))
    await source.set_memory_limits(card.uuid, leaf, MemoryLimits(0, None))
    said.append(await source.memory_limits(card.uuid, leaf))
    for wrong in (lambda: source.set_memory_limits(card.uuid, gone, MemoryLimits(0, 1)),
                  lambda: source.set_memory_limits(card.uuid, leaf, MemoryLimits(2, 1))):
        try:
            await wrong()
        except LimitRefusedError as error:
            said.append(str(error))
    await source.close()
    print(json.dumps([each if isinstance(each, str) else [each.soft, each.hard] for each in said]))
asyncio.run(play())
"""


@pytest.mark.parametrize("accounting", ["misc", "dmem"])
def test_limits_are_set_and_read_through_nvidias_binding(accounting: str, tmp_path: Path) -> None:
    host = Host(tmp_path, accounting)
    leaf = host.cgroups.make("pods/one")
    program = NVML.replace("sys.argv[-2]", repr(str(leaf))).replace("sys.argv[-1]", repr(str(leaf / "x")))
    *said, gone, wrong = json.loads(python(program, state=host.state))
    assert said == [[0, None], [1 << 20, 8 << 20], [0, None]]
    assert str(leaf / "x") in gone
    assert "Invalid" in wrong
