"""Every allocation path, by every way a program can reach it, under every driver: refused past the limit, and
counted as the driver's accounts have it. The table in docs/reference/isolation.md is what these tests found.

`GPUSLICE_WRITE_DOCS=1` writes the table again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.isolation_rig import MIB, OUT_OF_MEMORY, SANITIZER, Container, Worker, container

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/isolation.md"
BEGIN, END = "<!-- conformance: begin -->\n", "<!-- conformance: end -->\n"

KINDS = {
    "plain": "cuMemAlloc",
    "pitch": "cuMemAllocPitch",
    "managed": "cuMemAllocManaged",
    "async": "cuMemAllocAsync",
    "pool": "cuMemAllocFromPoolAsync",
    "managed-pool": "cuMemPoolCreate of managed memory, cuMemAllocFromPoolAsync",
    "physical": "cuMemCreate",
    "mapped": "cuMemCreate, cuMemMap, cuMemRelease",
    "array": "cuArrayCreate",
    "array3d": "cuArray3DCreate",
    "mipmap": "cuMipmappedArrayCreate",
    "group": "cuMulticastBindMem, cuMemRelease",
    "group-addr": "cuMulticastBindAddr, cuMemUnmap, cuMemRelease",
    "tile": "cuMemMapArrayAsync, cuMemRelease",
    "graph": "cuGraphAddMemAllocNode, cuGraphLaunch",
    "node": "cuGraphAddNode, cuGraphLaunch",
    "captured": "cuMemAllocAsync while capturing, cuGraphLaunch",
    "context": "cuCtxCreate",
    "green": "cuGreenCtxCreate",
    "module": "cuModuleLoadData",
}
SIZED_BY_THE_DRIVER = ("context", "green")
BETWEEN = {
    "ipc": "cuIpcGetMemHandle, cuIpcOpenMemHandle",
    "handle": "cuMemExportToShareableHandle, cuMemImportFromShareableHandle",
    "shared pool": "cuMemPoolImportFromShareableHandle, cuMemPoolImportPointer",
}
"""Memory of one process that another one opens: counted once, and as long as anybody has it."""
WAYS = {
    "linked": "linked",
    "default": "dlsym(RTLD_DEFAULT)",
    "dlsym": "dlopen, dlsym",
    "dlvsym": "libc's dlsym, by dlvsym",
    "deepbind": "RTLD_DEEPBIND",
    "proc": "cuGetProcAddress",
    "proc2": "cuGetProcAddress_v2",
    "proc2-own": "… per-thread streams",
}
VERSIONS = ("10.1", "11.0", "11.4", "12.2", "12.8", "13.0", "13.4")
EVERY = {**KINDS, **BETWEEN}
HELD, ABSENT = "held", "–"


def number(version: str) -> int:
    major, minor = version.split(".")
    return int(major) * 1000 + int(minor) * 10


def exists(way: str, version: str) -> bool:
    if SANITIZER and way == "deepbind":  # which a sanitizer's runtime does not allow
        return False
    return not (way == "proc" and number(version) < 11030) and not (
        way.startswith("proc2") and number(version) < 12000
    )


CELLS = [(way, version) for version in VERSIONS for way in WAYS if exists(way, version)]
found: dict[tuple[str, str, str], str] = {}


def settled(box: Container, worker: Worker) -> None:
    """The accounts agree, to the byte, once everything has come to rest."""
    worker.ok("sync")
    assert box.card().used_bytes == box.machine.used()


def too_much(box: Container, worker: Worker, kind: str) -> str:
    """What a request past the limit gets. A context has its own size: there the card is filled before."""
    if kind not in SIZED_BY_THE_DRIVER:
        return worker.ask(f"alloc 1 {kind} {2048 * MIB}")
    fill = (limit_of(box) - box.machine.used()) // MIB // 2 * 2 - 2
    worker.ok(f"alloc 2 plain {fill * MIB}")
    answer = worker.ask(f"alloc 1 {kind} 1")
    worker.ok("free 2")
    return answer


def limit_of(box: Container) -> int:
    limit = box.limits[0].memory_bytes
    assert limit is not None
    return limit


def check(box: Container, worker: Worker, kind: str) -> str:
    """One cell of the table. What a driver does not have, it does not have with us either."""
    answer = worker.ask(f"alloc 0 {kind} {64 * MIB}")
    if answer in ("absent", "error 500", "error 801"):
        return ABSENT
    assert answer == "ok", f"{kind}: {answer}"
    assert box.card().used_bytes == box.machine.used()
    assert too_much(box, worker, kind) == OUT_OF_MEMORY, kind
    settled(box, worker)
    worker.ok("free 0")
    if kind == "pool":
        worker.ok("trim")
    settled(box, worker)
    return HELD


@pytest.mark.parametrize(("way", "version"), CELLS)
def test_every_path_is_held(tmp_path: Path, way: str, version: str) -> None:
    with (
        container(tmp_path, cuda=version) as box,
        box.worker(way, number(version)) as worker,
    ):
        if worker.ask("start 0") == "absent":  # the version has no such way to a primary context
            pytest.skip(f"{way} leads nowhere in CUDA {version}")
        at_rest = box.machine.used()
        for kind in KINDS:
            found[kind, way, version] = check(box, worker, kind)
            assert box.machine.used() == at_rest, f"{kind} left something behind"
        assert worker.leave() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_with_the_library_the_driver_gives_without(tmp_path: Path, kind: str) -> None:
    """Else the tests above would show nothing."""
    with (
        container(tmp_path, cuda=VERSIONS[-1]) as box,
        box.worker("dlsym", number(VERSIONS[-1]), LD_PRELOAD="") as worker,
    ):
        worker.ok("start 0")
        worker.ok(f"alloc 0 {kind} {64 * MIB}")
        worker.ok(f"alloc 1 {kind} {2048 * MIB}")


HAND_OVER = {
    "ipc": ("plain", "export 0", "import 0"),
    "handle": ("physical", "share 0", "receive 0"),
    "shared pool": ("pool", "share-block 0", "receive-block 0 8"),
}


def check_between(box: Container, maker: Worker, opener: Worker, kind: str) -> str:
    made, hand_over, take = HAND_OVER[kind]
    answer = maker.ask(f"alloc 0 {made} {64 * MIB}")
    if answer in ("absent", "error 500", "error 801"):
        return ABSENT
    assert answer == "ok", f"{kind}: {answer}"
    before = box.machine.used()
    if kind == "shared pool":
        opener.ok(f"receive-pool 8 {' '.join(map(str, maker.ok('share-pool')))}")
    handed = maker.ask(hand_over).split()[1:]
    answer = opener.ask(f"{take} {' '.join(handed)}")
    if kind == "handle" and len(handed) == 2:
        maker.ok(f"shut {handed[1]}")  # an open descriptor keeps memory too
    if answer in ("absent", "error 500", "error 801"):
        return ABSENT
    assert answer == "ok", f"{kind}: {answer}"
    assert box.card().used_bytes == box.machine.used() == before
    maker.ok("free 0")
    assert box.card().used_bytes >= box.machine.used(), f"{kind}: gone while somebody has it open"
    opener.ok("free 0")
    if kind == "shared pool":
        opener.ok("free 8")  # a real driver keeps what was opened of a pool until then
    for worker in (maker, opener):
        worker.ok("sync")
        worker.ok("trim")
    assert box.card().used_bytes == box.machine.used()
    return HELD


@pytest.mark.parametrize(("way", "version"), CELLS)
def test_what_another_process_opens_is_counted_once(tmp_path: Path, way: str, version: str) -> None:
    with (
        container(tmp_path, cuda=version) as box,
        box.worker(way, number(version)) as maker,
        box.worker(way, number(version)) as opener,
    ):
        if "absent" in (maker.ask("start 0"), opener.ask("start 0")):
            pytest.skip(f"{way} leads nowhere in CUDA {version}")
        for kind in BETWEEN:
            found[kind, way, version] = check_between(box, maker, opener, kind)


def cell(kind: str, way: str) -> str:
    held = [version for version in VERSIONS if found.get((kind, way, version)) == HELD]
    if not held:
        return ABSENT
    tried = [version for version in VERSIONS if exists(way, version)]
    whole = tried[tried.index(held[0]) :] == held
    return f"{held[0]} – {held[-1]}" if whole and len(held) > 1 else ", ".join(held)


def table() -> str:
    """Ways that lead to the same versions share a column, allocations that do a row."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for way, name in WAYS.items():
        columns.setdefault(tuple(cell(kind, way) for kind in EVERY), []).append(name)
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, cells in zip(EVERY.values(), zip(*columns, strict=True), strict=True):
        rows.setdefault(cells, []).append(f"`{name}`")
    head = ["allocation", *(", ".join(names) for names in columns.values())]
    lines = [head, ["---"] * len(head), *(["<br>".join(names), *cells] for cells, names in rows.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_page_shows_what_was_found() -> None:
    tried = {(kind in BETWEEN, way, version) for kind, way, version in found}
    if SANITIZER or tried != {(between, *cell) for between in (False, True) for cell in CELLS}:
        pytest.skip("only some of the cells were tested in this run")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    written, after = rest.split(END)
    if os.environ.get("GPUSLICE_WRITE_DOCS"):
        PAGE.write_text(before + BEGIN + table() + END + after)
    else:
        assert written == table(), "GPUSLICE_WRITE_DOCS=1 writes the table again"


def test_no_path_is_missing_from_the_newest_driver() -> None:
    newest = {kind: found.get((kind, "dlsym", VERSIONS[-1])) for kind in EVERY}
    if None in newest.values():
        pytest.skip("only some of the cells were tested in this run")
    missing = [kind for kind, result in newest.items() if result != HELD]
    assert missing == []
