"""Every way of taking device memory, in the driver's own accounts to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simcluster import gpu

from .sim_driver_client import MIB, DriverProcess, given, out, pinned_on_device, pool_on_device

CONTEXT = 527 * MIB


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["H200", "H200"])


@pytest.fixture
def process(state: Path) -> Iterator[DriverProcess]:
    with DriverProcess(state) as started:
        yield started.start()


def held(state: Path, card: int | None = None) -> dict[str, int]:
    """Bytes by kind, contexts left out."""
    with gpu.Machine(state) as machine:
        found: dict[str, int] = {}
        for each in machine.holdings():
            if each.kind != "context" and each.bytes and card in (None, each.card):
                found[each.kind] = found.get(each.kind, 0) + each.bytes
        return found


def plain(process: DriverProcess) -> Callable[[], object]:
    address = process.alloc(5 * MIB)
    return lambda: process.cu("cuMemFree_v2", address)


def pitched(process: DriverProcess) -> Callable[[], object]:
    reply = process.cu("cuMemAllocPitch_v2", out(), out(), 1000, 3000, 4)
    assert reply.number(1) == 1024
    return lambda: process.cu("cuMemFree_v2", reply.number(0))


def managed(process: DriverProcess) -> Callable[[], object]:
    address = process.cu("cuMemAllocManaged", out(), 3 * MIB, 1).number()
    return lambda: process.cu("cuMemFree_v2", address)


def pooled(process: DriverProcess) -> Callable[[], object]:
    address = process.cu("cuMemAllocAsync", out(), 40 * MIB, 0).number()

    def free() -> None:
        process.cu("cuMemFreeAsync", address, 0)
        process.cu("cuStreamSynchronize", 0)

    return free


def physical(process: DriverProcess) -> Callable[[], object]:
    handle = process.cu("cuMemCreate", out(), 6 * MIB, pinned_on_device(), 0).number()
    return lambda: process.cu("cuMemRelease", handle)


def array(process: DriverProcess) -> Callable[[], object]:
    shape = (1024).to_bytes(8, "little") * 2 + (0x20).to_bytes(4, "little") + (4).to_bytes(4, "little")
    handle = process.cu("cuArrayCreate_v2", out(), given(shape)).number()
    return lambda: process.cu("cuArrayDestroy", handle)


def mipmapped(process: DriverProcess) -> Callable[[], object]:
    shape = (
        (512).to_bytes(8, "little") * 2
        + bytes(8)
        + (0x20).to_bytes(4, "little")
        + (4).to_bytes(4, "little")
        + bytes(8)
    )
    handle = process.cu("cuMipmappedArrayCreate", out(), given(shape), 5).number()
    process.cu("cuMipmappedArrayGetLevel", out(), handle, 1)
    return lambda: process.cu("cuMipmappedArrayDestroy", handle)


def module(process: DriverProcess) -> Callable[[], object]:
    handle = process.cu("cuModuleLoadData", out(), "// code").number()
    return lambda: process.cu("cuModuleUnload", handle)


def heap(process: DriverProcess) -> Callable[[], object]:
    process.cu("cuCtxSetLimit", 2, 24 * MIB)
    return lambda: process.cu("cuCtxSetLimit", 2, 8 * MIB)


@pytest.mark.parametrize(
    ("take", "kind", "expected_mib"),
    [
        (plain, "plain", 6),
        (pitched, "plain", 4),
        (managed, "managed", 4),
        (pooled, "pool", 64),
        (physical, "physical", 6),
        (array, "array", 16),
        (mipmapped, "array", 6),
        (module, "module", 2),
        (heap, "limit", 16),
    ],
)
def test_each_kind_is_booked_when_taken_and_gone_when_given_back(
    take: Callable[[DriverProcess], Callable[[], object]],
    kind: str,
    expected_mib: int,
    state: Path,
    process: DriverProcess,
) -> None:
    free_before, _ = process.memory()
    give_back = take(process)
    assert held(state) == {kind: expected_mib * MIB}
    assert process.memory()[0] == free_before - expected_mib * MIB
    give_back()
    assert held(state) == {}
    assert process.memory()[0] == free_before


def test_a_context_takes_its_share_and_gives_it_back_with_all_that_was_in_it(state: Path) -> None:
    with DriverProcess(state) as process:
        process.cu("cuInit", 0)
        context = process.cu("cuCtxCreate_v2", out(), 0, 0).number()
        other = process.cu("cuCtxCreate_v4", out(), None, 0, 0).number()
        process.alloc(10 * MIB)
        with gpu.Machine(state) as machine:
            assert machine.used_bytes(pid=process.pid) == 2 * CONTEXT + 10 * MIB
        process.cu("cuCtxDestroy_v2", other)
        assert held(state) == {}
        process.cu("cuCtxDestroy_v2", context)
        with gpu.Machine(state) as machine:
            assert machine.used_bytes() == 0


def test_the_primary_context_lasts_until_its_last_reference_or_its_reset(
    state: Path, process: DriverProcess
) -> None:
    process.cu("cuDevicePrimaryCtxRetain", out(), 0)
    process.alloc(2 * MIB)
    process.cu("cuDevicePrimaryCtxRelease_v2", 0)
    assert held(state) == {"plain": 2 * MIB}
    process.cu("cuDevicePrimaryCtxReset_v2", 0)
    assert process.cu("cuDevicePrimaryCtxGetState", 0, out(4), out(4)).number(1, 4) == 0
    with gpu.Machine(state) as machine:
        assert machine.used_bytes() == 0
    assert process.call("cuMemAlloc_v2", out(), MIB).result == 709


def test_a_full_card_refuses_and_the_process_goes_on(process: DriverProcess) -> None:
    free, _ = process.memory()
    assert process.call("cuMemAlloc_v2", out(), free + 1).result == 2
    address = process.alloc(free // (2 * MIB) * 2 * MIB)
    assert process.call("cuMemAlloc_v2", out(), 1).result == 2
    assert process.call("cuMemAllocAsync", out(), 1, 0).result == 2
    assert process.call("cuMemCreate", out(), 2 * MIB, pinned_on_device(), 0).result == 2
    process.cu("cuMemFree_v2", address)
    process.alloc(1)


def test_managed_memory_may_exceed_the_card(state: Path, process: DriverProcess) -> None:
    free, _ = process.memory()
    process.cu("cuMemAllocManaged", out(), free + 1024 * MIB, 1)
    assert held(state) == {"managed": free // (2 * MIB) * 2 * MIB}


def test_a_pool_keeps_what_is_freed_until_it_is_trimmed(state: Path, process: DriverProcess) -> None:
    pool = process.cu("cuMemPoolCreate", out(), pool_on_device()).number()
    process.cu("cuMemPoolSetAttribute", pool, 4, given((2**64 - 1).to_bytes(8, "little")))
    first = process.cu("cuMemAllocFromPoolAsync", out(), 20 * MIB, pool, 0).number()
    second = process.cu("cuMemAllocFromPoolAsync", out(), 20 * MIB, pool, 0).number()
    assert held(state) == {"pool": 64 * MIB}
    process.cu("cuMemFreeAsync", first, 0)
    process.cu("cuStreamSynchronize", 0)

    def attribute(number: int) -> int:
        return process.cu("cuMemPoolGetAttribute", pool, number, out()).number()

    assert (attribute(5), attribute(7), attribute(8)) == (64 * MIB, 20 * MIB, 40 * MIB)
    process.cu("cuMemPoolTrimTo", pool, 0)
    assert held(state) == {"pool": 32 * MIB}
    process.cu("cuMemPoolDestroy", pool)
    assert held(state) == {"pool": 32 * MIB}  # its last block is still in use
    process.cu("cuMemFreeAsync", second, 0)
    assert held(state) == {}


def test_small_blocks_share_a_chunk(state: Path, process: DriverProcess) -> None:
    for _ in range(100):
        process.cu("cuMemAllocAsync", out(), 1000, 0)
    assert held(state) == {"pool": 32 * MIB}


def test_physical_memory_outlives_its_handle_while_it_is_mapped(state: Path, process: DriverProcess) -> None:
    handle = process.cu("cuMemCreate", out(), 8 * MIB, pinned_on_device(1), 0).number()
    address = process.cu("cuMemAddressReserve", out(), 16 * MIB, 0, 0, 0).number()
    process.cu("cuMemMap", address, 8 * MIB, 0, handle, 0)
    process.cu("cuMemRelease", handle)
    assert held(state, card=1) == {
        "physical": 8 * MIB
    }  # on the device that was asked for, not the current one
    retained = process.cu("cuMemRetainAllocationHandle", out(), address + MIB).number()
    assert process.call("cuMemUnmap", address, 4 * MIB).result == 1
    process.cu("cuMemUnmap", address, 8 * MIB)
    assert held(state) == {"physical": 8 * MIB}
    process.cu("cuMemRelease", retained)
    assert held(state) == {}
    process.cu("cuMemAddressFree", address, 16 * MIB)


def test_mapping_twice_to_one_address_is_refused(process: DriverProcess) -> None:
    handle = process.cu("cuMemCreate", out(), 4 * MIB, pinned_on_device(), 0).number()
    address = process.cu("cuMemAddressReserve", out(), 4 * MIB, 0, 0, 0).number()
    process.cu("cuMemMap", address, 4 * MIB, 0, handle, 0)
    assert process.call("cuMemMap", address + 2 * MIB, 2 * MIB, 0, handle, 0).result == 1
    assert process.call("cuMemAddressFree", address, 4 * MIB).result == 1  # still mapped
    assert (
        process.call("cuMemCreate", out(), 3 * MIB, pinned_on_device(), 0).result == 1
    )  # not whole granules


def alloc_node(process: DriverProcess, graph: int, size: int, after: int = 0) -> tuple[int, int]:
    """A memory allocation node and the address it stands for."""
    head = (1).to_bytes(4, "little") + bytes(4) + (1).to_bytes(4, "little") + bytes(4)
    parameters = head + bytes(88 - len(head)) + bytes(16) + size.to_bytes(8, "little") + bytes(8)
    before = given(after.to_bytes(8, "little")) if after else None
    reply = process.cu("cuGraphAddMemAllocNode", out(), graph, before, int(bool(after)), given(parameters))
    return reply.number(0), int.from_bytes(reply.bytes[-1][-8:], "little")


def test_graphs_reserve_as_much_as_they_ever_needed_until_trimmed(
    state: Path, process: DriverProcess
) -> None:
    graph = process.cu("cuGraphCreate", out(), 0).number()
    node, address = alloc_node(process, graph, 10 * MIB)
    process.cu("cuGraphAddMemFreeNode", out(), graph, given(node.to_bytes(8, "little")), 1, address)
    executable = process.cu("cuGraphInstantiateWithFlags", out(), graph, 0).number()
    assert held(state) == {}
    for _ in range(3):
        process.cu("cuGraphLaunch", executable, 0)
    process.cu("cuStreamSynchronize", 0)
    assert held(state) == {"graph": 10 * MIB}
    assert [
        process.cu("cuDeviceGetGraphMemAttribute", 0, each, out()).number() // MIB for each in range(4)
    ] == [0, 10, 10, 10]
    process.cu("cuDeviceGraphMemTrim", 0)
    assert held(state) == {}


def test_what_a_graph_allocates_and_does_not_free_is_freed_by_hand(
    state: Path, process: DriverProcess
) -> None:
    graph = process.cu("cuGraphCreate", out(), 0).number()
    _, address = alloc_node(process, graph, 4 * MIB)
    executable = process.cu("cuGraphInstantiateWithFlags", out(), graph, 0).number()
    process.cu("cuGraphLaunch", executable, 0)
    assert process.call("cuGraphLaunch", executable, 0).result == 1  # its memory is still in use
    process.cu("cuDeviceGraphMemTrim", 0)
    assert held(state) == {"graph": 4 * MIB}
    process.cu("cuMemFree_v2", address)
    process.cu("cuDeviceGraphMemTrim", 0)
    assert held(state) == {}


def test_a_captured_stream_becomes_a_graph_with_its_memory(state: Path, process: DriverProcess) -> None:
    stream = process.cu("cuStreamCreate", out(), 1).number()
    process.cu("cuStreamBeginCapture_v2", stream, 2)
    address = process.cu("cuMemAllocAsync", out(), 6 * MIB, stream).number()
    process.launch(process.kernel(), 1000, stream)
    process.cu("cuMemFreeAsync", address, stream)
    graph = process.cu("cuStreamEndCapture", stream, out()).number()
    assert process.cu("cuGraphGetNodes", graph, None, given(bytes(8))).number() == 3
    assert held(state) == {"module": 2 * MIB}
    executable = process.cu("cuGraphInstantiateWithFlags", out(), graph, 0).number()
    process.cu("cuGraphLaunch", executable, stream)
    assert held(state) == {"module": 2 * MIB, "graph": 6 * MIB}


def test_a_green_context_takes_a_part_of_a_contexts_share(state: Path, process: DriverProcess) -> None:
    whole = process.cu("cuDeviceGetDevResource", 0, out(144), 1).bytes[0]
    parts = process.cu(
        "cuDevSmResourceSplitByCount", out(144), given((1).to_bytes(4, "little")), given(whole), None, 0, 16
    )
    description = process.cu("cuDevResourceGenerateDesc", out(), given(parts.bytes[0]), 1).number()
    green = process.cu("cuGreenCtxCreate", out(), description, 0, 1).number()
    with gpu.Machine(state) as machine:
        assert machine.used_bytes() == CONTEXT + CONTEXT // 8
    process.cu("cuDevicePrimaryCtxRelease_v2", 0)  # the green one retains the primary one itself
    context = process.cu("cuCtxFromGreenCtx", out(), green).number()
    process.cu("cuCtxPushCurrent_v2", context)
    process.alloc(2 * MIB)
    process.cu("cuDevicePrimaryCtxRetain", out(), 0)
    process.cu("cuGreenCtxDestroy", green)
    with gpu.Machine(state) as machine:  # the memory was the primary context's
        assert machine.used_bytes() == CONTEXT + 2 * MIB
        process.cu("cuDevicePrimaryCtxRelease_v2", 0)
        assert machine.used_bytes() == 0


def test_small_memory_keeps_its_contents(process: DriverProcess) -> None:
    address, other = process.alloc(MIB), process.alloc(MIB)
    process.cu("cuMemcpyHtoD_v2", address + 100, given(b"sixteen bytes ok"), 16)
    process.cu("cuMemcpyDtoDAsync_v2", other, address + 100, 16, 0)
    process.cu("cuMemsetD8_v2", other, ord("S"), 1)
    assert process.cu("cuMemcpyDtoH_v2", out(16), other, 16).bytes[0] == b"Sixteen bytes ok"
    process.cu("cuMemFree_v2", other)
    again = process.alloc(MIB)
    assert process.cu("cuMemcpyDtoH_v2", out(16), again, 16).bytes[0] == bytes(16)


def test_large_memory_takes_copies_without_taking_the_hosts_memory(process: DriverProcess) -> None:
    address = process.alloc(100 << 30)
    process.cu("cuMemsetD32_v2", address, 7, 25 << 30)
    process.cu("cuMemcpyDtoD_v2", address, address + (50 << 30), 50 << 30)
    resident_kib = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4
    assert resident_kib < 200 * 1024


def test_an_address_tells_what_it_belongs_to(process: DriverProcess) -> None:
    address = process.alloc(3 * MIB)
    reply = process.cu("cuMemGetAddressRange_v2", out(), out(), address + MIB)
    assert (reply.number(0), reply.number(1)) == (address, 3 * MIB)
    assert process.cu("cuPointerGetAttribute", out(4), 2, address).number(size=4) == 2
    assert process.cu("cuPointerGetAttribute", out(), 11, address + 5).number() == address
    assert process.call("cuPointerGetAttribute", out(4), 2, 4096).result == 1
    assert process.call("cuMemFree_v2", address + MIB).result == 1
    host = process.cu("cuMemHostAlloc", out(), 4096, 0).number()
    assert process.cu("cuPointerGetAttribute", out(4), 2, host).number(size=4) == 1
    process.cu("cuMemFreeHost", host)


def test_memory_keeps_every_byte_that_was_copied_to_it_however_large(process: DriverProcess) -> None:
    one, other = process.alloc(10 << 30), process.alloc(10 << 30)
    process.cu("cuMemcpyHtoD_v2", one + (9 << 30), given(b"sixteen bytes ok"), 16)
    process.cu("cuMemcpyDtoD_v2", other, one, 10 << 30)
    assert process.cu("cuMemcpyDtoH_v2", out(16), other + (9 << 30), 16).bytes[0] == b"sixteen bytes ok"
    process.cu("cuMemsetD8_v2", other, 0, 10 << 30)
    assert process.cu("cuMemcpyDtoH_v2", out(16), other + (9 << 30), 16).bytes[0] == bytes(16)
