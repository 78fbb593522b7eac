"""Memory limits of cgroups, as drivers from R615 on have them: what is set, read, refused and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from simcluster import gpu

from .limiter_rig import (
    FUNCTION_NOT_FOUND,
    INVALID,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    SUCCESS,
    Host,
)
from .sim_driver_client import MIB, given, out

CARD_MIB: Final = 143771
OUT_OF_MEMORY: Final = 2
CONTEXT: Final = 527


@pytest.fixture(params=["misc", "dmem"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path, request.param)


def test_past_the_hard_limit_of_its_cgroup_a_program_is_refused(host: Host) -> None:
    leaf = host.cgroups.make("pods/one")
    assert host.set(leaf, 0, 1000) == SUCCESS
    with host.program(leaf) as process, host.program(host.cgroups.make("pods/two")) as neighbour:
        process.start()
        assert process.memory() == ((1000 - CONTEXT) * MIB, 1000 * MIB), "the context counts"
        assert process.call("cuMemAlloc_v2", out(), (1000 - CONTEXT + 2) * MIB).result == OUT_OF_MEMORY
        process.alloc(472 * MIB)
        assert process.call("cuMemAlloc_v2", out(), 2 * MIB).result == OUT_OF_MEMORY
        neighbour.start().alloc(5000 * MIB)
        assert host.get(leaf) == (SUCCESS, 0, 1000, CONTEXT + 472)


def test_all_programs_of_a_cgroup_and_what_they_start_share_its_limit(host: Host) -> None:
    leaf = host.cgroups.make("pods/one")
    host.set(leaf, 0, 2000)
    with host.program(leaf) as first, host.program(leaf) as second:
        first.start().alloc(500 * MIB)
        second.start()
        assert second.memory()[0] == (2000 - 2 * CONTEXT - 500) * MIB
        assert second.call("cuMemAlloc_v2", out(), 500 * MIB).result == OUT_OF_MEMORY
        first.kill()
        second.alloc(500 * MIB)


def test_managed_memory_is_not_counted(host: Host) -> None:
    leaf = host.cgroups.make("pods/one")
    host.set(leaf, 0, 1000)
    with host.program(leaf) as process:
        process.start().cu("cuMemAllocManaged", out(), 4000 * MIB, 1)
        assert host.get(leaf) == (SUCCESS, 0, 1000, CONTEXT)


def test_a_context_past_the_limit_is_refused(host: Host) -> None:
    leaf = host.cgroups.make("pods/one")
    host.set(leaf, 0, 100)
    with host.program(leaf) as process:
        process.cu("cuInit", 0)
        assert process.call("cuDevicePrimaryCtxRetain", out(), 0).result == OUT_OF_MEMORY


def test_a_limit_is_changed_and_cleared_while_a_program_runs(host: Host) -> None:
    leaf = host.cgroups.make("pods/one")
    host.set(leaf, 0, 1000)
    with host.program(leaf) as process:
        process.start()
        host.set(leaf, 0, 3000)
        process.alloc(2000 * MIB)
        host.set(leaf, 0, 1000)  # below what it holds: nothing is taken away
        assert process.memory() == (0, 1000 * MIB)
        assert process.call("cuMemAlloc_v2", out(), 2 * MIB).result == OUT_OF_MEMORY
        assert host.set(leaf, 0, -1) == SUCCESS
        process.alloc(9000 * MIB)


def test_nvml_shows_a_program_its_limit_in_the_newer_form(host: Host) -> None:
    leaf = host.cgroups.make("pods/one")
    host.set(leaf, 0, 1000)
    with host.program(leaf) as process:
        process.start()
        process.cu("nvmlInit_v2")
        handle = process.cu("nvmlDeviceGetHandleByIndex_v2", 0, out()).number()
        info = given((40 | 2 << 24).to_bytes(8, "little") + bytes(32))
        newer = process.cu("nvmlDeviceGetMemoryInfo_v2", handle, info).bytes[0]
        found = [int.from_bytes(newer[at : at + 8], "little") // MIB for at in (8, 16, 24, 32)]
        assert found == [1000, 0, 1000 - CONTEXT, CONTEXT]
        older = process.cu("nvmlDeviceGetMemoryInfo", handle, out(24))
        assert older.number() // MIB == CARD_MIB


def test_of_a_limit_above_the_leaf_misc_shows_it_and_dmem_does_not(tmp_path: Path) -> None:
    for accounting, shown_mib in (("misc", 1000), ("dmem", None)):
        host = Host(tmp_path / accounting, accounting)
        leaf, pod = host.cgroups.make("pods/pod/one"), host.cgroups.root / "pods/pod"
        assert host.set(pod, 0, 1000) == SUCCESS
        with host.program(leaf) as process:
            process.start()
            assert process.call("cuMemAlloc_v2", out(), 600 * MIB).result == OUT_OF_MEMORY
            total = process.memory()[1] // MIB
            assert total == shown_mib if shown_mib else total > 100_000
            assert host.get(leaf)[:3] == ((0, 0, 1000) if shown_mib else (0, 0, -1))


def test_of_two_limits_on_the_way_misc_takes_the_nearest_and_dmem_both(tmp_path: Path) -> None:
    for accounting, answer in (("misc", SUCCESS), ("dmem", OUT_OF_MEMORY)):
        host = Host(tmp_path / accounting, accounting)
        leaf = host.cgroups.make("pods/pod/one")
        host.set(leaf.parent, 0, 1000)
        host.set(leaf, 0, 3000)
        with host.program(leaf) as process:
            process.start()
            assert process.call("cuMemAlloc_v2", out(), 2000 * MIB).result == answer


def test_with_dmem_soft_limits_drift_on_what_is_above_a_cgroup_that_goes_first(tmp_path: Path) -> None:
    host = Host(tmp_path, "dmem")
    first, second = host.cgroups.make("pods/pod/one"), host.cgroups.make("pods/pod/two")
    host.set(first, 600, 1000)
    host.set(second, 300, 1000)
    assert host.get(first.parent) == (SUCCESS, 900, -1, 0)
    assert host.get(first.parent.parent) == (SUCCESS, 900, -1, 0)
    host.set(second, 0, -1)
    assert host.get(first.parent) == (SUCCESS, 600, -1, 0)
    host.cgroups.remove("pods/pod/one")
    host.set(second, 0, 1000)
    assert host.get(first.parent) == (SUCCESS, 600, -1, 0), "for good: nobody can take it back by its name"


def test_a_cgroup_that_comes_again_by_the_same_name_has_no_limit(host: Host) -> None:
    leaf = host.cgroups.make("pods/one")
    host.set(leaf, 0, 1000)
    host.cgroups.remove("pods/one")
    again = host.cgroups.make("pods/one")
    with host.program(again) as process:
        process.start().alloc(2000 * MIB)


def test_without_the_controllers_files_nothing_is_set_and_the_next_above_is_read(tmp_path: Path) -> None:
    host = Host(tmp_path, "dmem")
    pods = host.cgroups.make("pods")
    (pods / "cgroup.subtree_control").write_text("cpu memory")
    leaf = host.cgroups.make("pods/one")
    host.set(pods, 0, 5000)
    assert host.set(leaf, 0, 1000) == NOT_FOUND
    assert host.get(leaf) == (SUCCESS, 0, 5000, 0)


def test_what_cannot_be_set_is_refused_with_its_reason(host: Host) -> None:
    leaf = host.cgroups.make("pods/one")
    assert host.set(leaf, 2000, 1000) == INVALID
    assert host.set(leaf, 0, CARD_MIB + 1) == INVALID
    assert host.set(host.cgroups.root, 0, 1000) == NOT_SUPPORTED
    assert host.get(host.cgroups.root) == (NOT_SUPPORTED,)
    assert host.set(leaf / "nothing", 0, 1000) == OPERATING_SYSTEM
    assert host.set(leaf.parent.parent.parent, 0, 1000) == OPERATING_SYSTEM, "no cgroup"
    assert host.set(leaf, 0, 1000, visible="all") == NO_PERMISSION, "a container's root is nobody here"
    assert host.set(leaf, 0, 1000, visible="all", GPUSLICE_SIM_ADMIN="1") == SUCCESS
    assert host.get(leaf, visible="all") == (SUCCESS, 0, 1000, 0), "everybody may read"


def test_with_misc_nobody_has_a_limit_until_one_is_set(tmp_path: Path) -> None:
    host = Host(tmp_path, "misc")
    leaf = host.cgroups.make("pods/one")
    assert host.get(leaf) == (NOT_SUPPORTED,)
    host.set(leaf, 0, 1000)
    assert host.get(leaf) == (SUCCESS, 0, 1000, 0)


def test_cards_divided_by_mig_and_drivers_without_accounting_refuse(tmp_path: Path) -> None:
    card = gpu.CardSpec("A100-SXM4-40GB", mig=("3g.20gb",))
    divided = Host(tmp_path / "mig", cards=(card,))
    assert divided.set(divided.cgroups.make("one"), 0, 1000) == NOT_SUPPORTED
    off = Host(tmp_path / "off", "off")
    assert off.set(off.cgroups.make("one"), 0, 1000) == NOT_SUPPORTED
    older = Host(tmp_path / "older", driver="580")
    assert older.set(older.cgroups.make("one"), 0, 1000) == FUNCTION_NOT_FOUND
    with older.program(older.cgroups.root / "one") as process:
        process.start().alloc(2000 * MIB)
