"""Every allocation path, by every way a program can reach it, under every driver: refused past the limit, and
counted as the driver's books have it. The table in docs/reference/isolation.md is what these tests found.

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
    "physical": "cuMemCreate",
    "mapped": "cuMemCreate, cuMemMap, cuMemRelease",
    "array": "cuArrayCreate",
    "array3d": "cuArray3DCreate",
    "mipmap": "cuMipmappedArrayCreate",
    "graph": "cuGraphAddMemAllocNode, cuGraphLaunch",
    "context": "cuCtxCreate",
}
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
    """The books agree, to the byte, once everything has come to rest."""
    worker.ok("sync")
    assert box.card().used_bytes == box.machine.used()


def too_much(worker: Worker, kind: str) -> str:
    """What a request past the limit gets. A context has its own size: there the card is filled before."""
    if kind != "context":
        return worker.ask(f"alloc 1 {kind} {2048 * MIB}")
    worker.ok(f"alloc 2 plain {700 * MIB}")
    answer = worker.ask("alloc 1 context 1")
    worker.ok("free 2")
    return answer


def check(box: Container, worker: Worker, kind: str) -> str:
    """One cell of the table. What a driver does not have, it does not have with us either."""
    answer = worker.ask(f"alloc 0 {kind} {64 * MIB}")
    if answer in ("absent", "error 500", "error 801"):
        return ABSENT
    assert answer == "ok", f"{kind}: {answer}"
    assert box.card().used_bytes == box.machine.used()
    assert too_much(worker, kind) == OUT_OF_MEMORY, kind
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


def cell(kind: str, way: str) -> str:
    held = [version for version in VERSIONS if found.get((kind, way, version)) == HELD]
    if not held:
        return ABSENT
    tried = [version for version in VERSIONS if exists(way, version)]
    whole = tried[tried.index(held[0]) :] == held
    return f"{held[0]} – {held[-1]}" if whole and len(held) > 1 else ", ".join(held)


def table() -> str:
    head = ["allocation", *WAYS.values()]
    rows = [head, ["---"] * len(head)]
    rows += [[f"`{name}`", *(cell(kind, way) for way in WAYS)] for kind, name in KINDS.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_page_shows_what_was_found() -> None:
    if SANITIZER or {(way, version) for _, way, version in found} != set(CELLS):
        pytest.skip("only some of the cells were tested in this run")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    written, after = rest.split(END)
    if os.environ.get("GPUSLICE_WRITE_DOCS"):
        PAGE.write_text(before + BEGIN + table() + END + after)
    else:
        assert written == table(), "GPUSLICE_WRITE_DOCS=1 writes the table again"


def test_no_path_is_missing_from_the_newest_driver() -> None:
    newest = {kind: found.get((kind, "dlsym", VERSIONS[-1])) for kind in KINDS}
    if None in newest.values():
        pytest.skip("only some of the cells were tested in this run")
    missing = [kind for kind, result in newest.items() if result != HELD]
    assert missing == []
