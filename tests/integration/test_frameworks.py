"""What frameworks that serve and train models ask of the driver, call for call, under a limit.

The sequences are those that the frameworks' sources make; each test names them. The driver is simulated:
what it shows is that the library's account follows, that what fits is given, and that what does not is
refused as a full card refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .isolation_rig import MIB, OUT_OF_MEMORY, Container, Worker, container
from .sim_driver_client import DriverProcess, out

LIMIT_MIB = 4096
BIG = 20 * MIB


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Container]:
    with container(tmp_path, memory_mib=LIMIT_MIB, cards=2) as made:
        yield made
        # whatever was done
        for card in range(2):
            assert made.card(card).used_bytes >= made.machine.used(card)
            assert made.machine.used(card) <= LIMIT_MIB * MIB


@pytest.fixture
def worker(box: Container) -> Iterator[Worker]:
    with box.worker("proc2") as started:
        started.ok("start 0")
        yield started


def agree(box: Container, *workers: Worker) -> int:
    """After everybody has synchronised, the account is the driver's accounts; the bytes."""
    for worker in workers:
        worker.ok("sync")
        worker.ok("info")
    assert box.card().used_bytes == box.machine.used()
    return box.machine.used()


def test_pytorchs_caching_allocator(box: Container, worker: Worker) -> None:
    """c10/cuda/CUDACachingAllocator.cpp: segments of 20 MiB and of whole 2 MiB; on a refusal it gives all
    that is cached back and asks again; only then the program hears of it."""
    held: list[int] = []
    while worker.ask(f"alloc {len(held)} plain {BIG}") == "ok":
        held.append(len(held))
    assert len(held) * BIG > 0.9 * (LIMIT_MIB - 200) * MIB
    for number in held:  # empty_cache
        worker.ok(f"free {number}")
    worker.ok(f"alloc 9999 plain {3 * 1024 * MIB}")
    assert worker.ask(f"alloc 10000 plain {1024 * MIB}") == OUT_OF_MEMORY
    agree(box, worker)


def test_pytorchs_expandable_segments(box: Container, worker: Worker) -> None:
    """ExpandableSegment of the same file: one reservation of addresses, then cuMemCreate, cuMemMap and
    cuMemRelease of 20 MiB at a time as it grows; cuMemUnmap where it shrinks, in any order."""
    number = 0
    while worker.ask(f"alloc {number} mapped {BIG}") == "ok":
        number += 1
    full = agree(box, worker)
    assert full > (LIMIT_MIB - 20) * MIB
    for unmapped in range(0, number, 2):
        worker.ok(f"free {unmapped}")
    assert agree(box, worker) == full - (number + 1) // 2 * BIG
    for again in range(0, number, 2):
        worker.ok(f"alloc {again} mapped {BIG}")
    assert worker.ask(f"alloc {number} mapped {BIG}") == OUT_OF_MEMORY


def test_vllm_starts_sleeps_and_wakes(box: Container, worker: Worker) -> None:
    """vllm/v1/worker/gpu_worker.py: weights, a profile run, cuMemGetInfo, then a cache of what is left of
    90 %, then graphs; csrc/cumem_allocator.cpp: asleep the memory is unmapped and released and the
    addresses stay, awake it is created anew."""
    worker.ok(f"alloc 0 mapped {1024 * MIB}")  # weights
    worker.ok(f"alloc 1 plain {512 * MIB}")  # the profile run's peak
    worker.ok("free 1")
    free, total = worker.ok("info")
    assert total == LIMIT_MIB * MIB
    cache = int(0.9 * total - (total - free)) // (2 * MIB) * (2 * MIB)
    worker.ok(f"alloc 2 mapped {cache}")
    for graph in range(3, 11):
        worker.ok(f"alloc {graph} captured {6 * MIB}")
    awake = agree(box, worker)
    for number in (0, 2):
        worker.ok(f"free {number}")
    asleep = agree(box, worker)
    assert awake - asleep == 1024 * MIB + cache
    with box.worker("proc2") as neighbour:  # which may have what the sleeper gave back, and no more
        neighbour.ok("start 0")
        neighbour.ok(f"alloc 0 plain {2048 * MIB}")
        assert worker.ask(f"alloc 2 mapped {cache}") == OUT_OF_MEMORY
    worker.ok("info")
    worker.ok(f"alloc 0 mapped {1024 * MIB}")
    worker.ok(f"alloc 2 mapped {cache}")
    assert agree(box, worker) == awake


def test_sglang_starts_pauses_and_resumes(box: Container, worker: Worker) -> None:
    """sglang/srt/model_executor/model_runner.py asks cuMemGetInfo before the weights and after them, with no
    run in between, and keeps 12 % of the first answer; mem_cache/memory_pool.py takes a buffer for the keys
    and one for the values of each layer, by torch_memory_saver as physical memory that is let go and taken
    again at the same addresses; cuda_graph_runner.py captures into a pool of segments.
    """
    layers = range(10, 26)
    (first, _) = worker.ok("info")
    worker.ok(f"alloc 0 plain {1024 * MIB}")  # weights
    (rest, total) = worker.ok("info")
    assert total == LIMIT_MIB * MIB
    each = int(rest - first * 0.12) // (2 * len(layers)) // (2 * MIB) * (2 * MIB)
    for layer in layers:
        worker.ok(f"alloc {layer} mapped {each}")  # keys
        worker.ok(f"alloc {layer + 100} mapped {each}")  # values
    for size in range(1, 6):  # of batches: the largest first
        worker.ok(f"alloc {size} plain {20 * MIB}")
    running = agree(box, worker)
    for layer in layers:
        worker.ok(f"free {layer}")
        worker.ok(f"free {layer + 100}")
    assert running - agree(box, worker) == 2 * len(layers) * each
    assert worker.ask(f"alloc 200 plain {3072 * MIB}") == OUT_OF_MEMORY
    for layer in layers:
        worker.ok(f"alloc {layer} mapped {each}")
        worker.ok(f"alloc {layer + 100} mapped {each}")
    assert agree(box, worker) == running


def test_tensor_parallel_by_two_processes_on_two_cards(box: Container, worker: Worker) -> None:
    """vLLM's custom all-reduce (csrc/custom_all_reduce.cuh) opens each peer's buffer with
    cuIpcOpenMemHandle while its own card is current; NCCL (src/transport/p2p.cc) exports cuMem handles by
    descriptor and imports them."""
    with box.worker("proc2") as peer:
        peer.ok("start 1")
        for rank, (mine, theirs) in enumerate(((worker, peer), (peer, worker))):
            mine.ok(f"alloc 0 plain {64 * MIB}")
            theirs.ok(f"import 1 {mine.ask('export 0').split()[1]}")
            mine.ok(f"alloc 2 physical {32 * MIB}")
            pid, descriptor = mine.ok("share 2")
            theirs.ok(f"receive 3 {pid} {descriptor}")
            mine.ok(f"shut {descriptor}")
            assert box.card(rank).used_bytes == box.machine.used(rank)
        before = [box.machine.used(card) for card in range(2)]
        for mine in (worker, peer):  # a rank that frees before its peers have closed
            mine.ok("free 0")
            mine.ok("free 2")
        for card in range(2):
            assert box.card(card).used_bytes >= box.machine.used(card) == before[card]
        for mine in (worker, peer):
            mine.ok("free 1")
            mine.ok("free 3")
            mine.ok("sync")
            mine.ok("info")
        assert [box.card(card).used_bytes for card in range(2)] == [
            box.machine.used(card) for card in range(2)
        ]


def test_kvcached_maps_on_demand(box: Container, worker: Worker) -> None:
    """kvcached (csrc/): addresses for the whole cache once, pages of 2 MiB created and mapped as requests
    come."""
    with box.worker("proc2") as other:
        other.ok("start 0")
        for page in range(400):
            (worker, other)[page % 2].ok(f"alloc {page} mapped {2 * MIB}")
        for page in range(0, 400, 4):
            worker.ok(f"free {page}")
        for page in range(400, 450):
            other.ok(f"alloc {page} mapped {4 * MIB}")
        agree(box, worker, other)


def test_rmm_and_cuda_malloc_async(box: Container, worker: Worker) -> None:
    """RMM's cuda_async_memory_resource: a pool whose release threshold is all there is, grown once at the
    start by an allocation that is freed at once; what is freed stays reserved."""
    worker.ok(f"keep {1 << 50}")
    worker.ok(f"alloc 0 async {2048 * MIB}")
    worker.ok("free 0")
    reserved = agree(box, worker)
    assert reserved > 2048 * MIB
    for number in range(64):
        worker.ok(f"alloc {number} async {16 * MIB}")
    assert agree(box, worker) == reserved
    assert worker.ask(f"alloc 100 async {3072 * MIB}") == OUT_OF_MEMORY
    for number in range(64):
        worker.ok(f"free {number}")
    worker.ok("keep 0")
    worker.ok("trim-default")
    assert agree(box, worker) < 256 * MIB


def test_tritons_several_models_in_one_process(box: Container, worker: Worker) -> None:
    """Triton's backends share the primary context; each model loads code and takes memory, and gives both
    back."""
    sizes = (700, 900, 1100)
    for model, size in enumerate(sizes):
        worker.ok(f"alloc {model} plain {size * MIB}")
        worker.ok(f"alloc {10 + model} module {4 * MIB}")
    assert worker.ask(f"alloc 3 plain {1400 * MIB}") == OUT_OF_MEMORY
    loaded = agree(box, worker)
    worker.ok("free 11")
    worker.ok("free 1")
    assert loaded - agree(box, worker) == 906 * MIB  # code takes whole pages of 2 MiB
    worker.ok(f"alloc 3 plain {1000 * MIB}")


def test_jax_preallocates_three_quarters(box: Container, worker: Worker) -> None:
    """XLA's GPU client: 75 % of what cuMemGetInfo calls free, in one allocation."""
    free, total = worker.ok("info")
    assert total == LIMIT_MIB * MIB
    worker.ok(f"alloc 0 plain {free * 3 // 4}")
    with box.worker("proc2") as second:  # a second one does not fit, and hears so
        second.ok("start 0")
        left, _ = second.ok("info")
        assert second.ask(f"alloc 0 plain {free * 3 // 4}") == OUT_OF_MEMORY
        second.ok(f"alloc 0 plain {left * 3 // 4}")
        agree(box, worker, second)


def test_cuda_checkpoint_takes_a_process_off_the_card_and_back(box: Container) -> None:
    """cuda-checkpoint (its README): lock, checkpoint, restore, unlock, from outside by pid."""
    preload = {"LD_PRELOAD": box.environ()["LD_PRELOAD"]}
    state = box.machine.state
    with DriverProcess(state, **preload) as process, DriverProcess(state) as tool:
        address = process.start().alloc(512 * MIB)
        before = box.machine.used()
        tool.cu("cuInit", 0)
        tool.cu("cuCheckpointProcessLock", process.pid, None)
        tool.cu("cuCheckpointProcessCheckpoint", process.pid, None)
        assert box.machine.used() == 0
        assert box.card().used_bytes == before  # what will come back stays promised
        tool.cu("cuCheckpointProcessRestore", process.pid, None)
        tool.cu("cuCheckpointProcessUnlock", process.pid, None)
        assert box.card().used_bytes == box.machine.used() == before
        process.cu("cuMemFree_v2", address)
        assert process.call("cuMemAlloc_v2", out(), LIMIT_MIB * MIB).result == 2
        assert box.card().used_bytes == box.machine.used()
