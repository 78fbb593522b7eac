"""Which paths to device memory a preload library limits, on the simulated driver, compared with libgpuslice.

    python bench/held_paths.py [--cuda 12.8] [--peer-lib PATH [--peer-env NAME=VALUE]...]

For each allocation path and each way in which the program found the function, in a separate process and on a
separate machine, under a limit of 1 GiB: are 64 MiB granted and returned, and is too much refused? The last
rows are about 600 MiB that the driver keeps although their maker released them or has ended: are 600 MiB more
refused until the driver has freed them? `{folder}` in a value of --peer-env stands for that process's folder.
Prints a table in Markdown. Needs `make native`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.integration.isolation_rig import MIB, OUT_OF_MEMORY, Container, Worker, container  # noqa: E402
from tests.integration.test_isolation_conformance import (  # noqa: E402
    KINDS,
    SIZED_BY_THE_DRIVER,
    WAYS,
    exists,
    number,
)

ABSENT = ("absent", "error 500", "error 801")
HELD, ODDLY, PASSED, BROKEN, NOWHERE = "held", "held¹", "**let through**", "**fails**", "–"
MARKS = """¹ refused by another error than CUDA_ERROR_OUT_OF_MEMORY.
**let through**: the driver's accounts stand above the limit afterwards.
**fails**: what fits is refused or not taken back, or the program ends.
–: the driver has no such function, or the way does not lead there."""


def too_much(worker: Worker, kind: str) -> str:
    """The answer to what does not fit. A context has its own size, so memory is used up before it."""
    if kind not in SIZED_BY_THE_DRIVER:
        return worker.ask(f"alloc 1 {kind} {2048 * MIB}")
    place = 10
    for step_mib in (64, 8, 2):
        while place < 600 and worker.ask(f"alloc {place} plain {step_mib * MIB}") == "ok":
            place += 1
    return worker.ask(f"alloc 1 {kind} 1")


def verdict(box: Container, worker: Worker, kind: str) -> str:
    began = worker.ask("start 0")
    answer = worker.ask(f"alloc 0 {kind} {64 * MIB}") if began == "ok" else began
    if answer in ABSENT:
        return NOWHERE
    if answer != "ok" or worker.ask("free 0") != "ok":
        return BROKEN
    answer = too_much(worker, kind)
    if box.machine.used() > 1024 * MIB:
        return PASSED
    return HELD if answer == OUT_OF_MEMORY else ODDLY if answer != "ok" else BROKEN


Kept = tuple[Worker, str, Worker]
"""Who releases the memory, how, and who requests more."""


def imported(maker: Worker, other: Worker) -> Kept:
    """Opened by another process, whose current card is not that of the memory."""
    maker.ok(f"alloc 0 physical {600 * MIB}")
    other.ok("start 1")
    pid, descriptor = maker.ok("share 0")
    other.ok(f"receive 0 {pid} {descriptor}")
    maker.ok(f"shut {descriptor}")
    maker.ok("free 0")
    return other, "free 0", maker


def exported(maker: Worker, _other: Worker) -> Kept:
    maker.ok(f"alloc 0 physical {600 * MIB}")
    _, descriptor = maker.ok("share 0")
    maker.ok("free 0")
    return maker, f"shut {descriptor}", maker


def orphaned(maker: Worker, other: Worker) -> Kept:
    """Of a process that has ended; another process has the descriptor and never imports it."""
    maker.ok(f"alloc 0 physical {600 * MIB}")
    pid, descriptor = maker.ok("share 0")
    _, copy = other.ok(f"take {pid} {descriptor}")
    maker.kill()
    other.ok("start 0")
    return other, f"shut {copy}", other


def exported_again(maker: Worker, other: Worker) -> Kept:
    """By an importer, of which only that second descriptor is left."""
    maker.ok(f"alloc 0 physical {300 * MIB}")
    other.ok("start 1")
    pid, descriptor = maker.ok("share 0")
    other.ok(f"receive 0 {pid} {descriptor}")
    maker.ok(f"shut {descriptor}")
    _, again = other.ok("share 0")
    maker.kill()
    for command in ("free 0", "current 0", f"alloc 1 plain {300 * MIB}"):
        other.ok(command)
    return other, f"shut {again}", other


def opened_of_a_pool(maker: Worker, other: Worker) -> Kept:
    """A block of a pool that another process has open when its maker ends."""
    maker.ok(f"alloc 0 pool {600 * MIB}")
    pid, descriptor = maker.ok("share-pool")
    block = maker.ask("share-block 0").split()[1]
    other.ok("start 0")
    other.ok(f"receive-pool 8 {pid} {descriptor}")
    other.ok(f"receive-block 0 8 {block}")
    maker.kill()
    other.ok("free 0")
    return other, "free 8", other


def left_by_green(maker: Worker, _other: Worker) -> Kept:
    for command in ("alloc 0 green 0", "enter 0", f"alloc 1 plain {600 * MIB}", "current 0", "free 0"):
        maker.ok(command)
    return maker, "free 1", maker


KEPT = {
    "cuMemImportFromShareableHandle beside another card, cuMemRelease": imported,
    "cuMemExportToShareableHandle, cuMemRelease": exported,
    "cuMemExportToShareableHandle, exit": orphaned,
    "cuMemImportFromShareableHandle, cuMemExportToShareableHandle, cuMemRelease": exported_again,
    "cuMemPoolImportPointer, the maker's exit": opened_of_a_pool,
    "cuGreenCtxCreate, cuMemAlloc, cuGreenCtxDestroy": left_by_green,
}


def verdict_on_kept(box: Container, maker: Worker, other: Worker, functions: str) -> str:
    """For 600 MiB that the driver keeps: what is granted in addition to them, and when they are gone."""
    if maker.ask("start 0") != "ok":
        return NOWHERE
    try:
        keeper, release, asker = KEPT[functions](maker, other)
    except AssertionError as error:
        return NOWHERE if any(absent in str(error) for absent in ABSENT) else BROKEN
    answer = asker.ask(f"alloc 2 plain {600 * MIB}")
    if box.machine.used() > 1024 * MIB:
        return PASSED
    keeper.ask(release)
    if answer == "ok" or asker.ask(f"alloc 2 plain {600 * MIB}") != "ok":
        return BROKEN
    return HELD if answer == OUT_OF_MEMORY else ODDLY


def tried(row: str, way: str, cuda: str, peer: Mapping[str, str]) -> str:
    with tempfile.TemporaryDirectory() as name, container(Path(name), cuda=cuda, cards=2) as box:
        environment = {key: value.replace("{folder}", name) for key, value in peer.items()}
        try:
            with box.worker(way, number(cuda), **environment) as worker:
                if row not in KEPT:
                    return verdict(box, worker, row)
                with box.worker(way, number(cuda), **environment) as other:
                    return verdict_on_kept(box, worker, other, row)
        except AssertionError:  # it has ended
            return BROKEN


def table(cuda: str, peer: Mapping[str, str]) -> tuple[list[str], Counter[str]]:
    ways = [way for way in WAYS if exists(way, cuda)]
    lines = [f"| allocation | {' | '.join(WAYS[way] for way in ways)} |", "| --- " * (len(ways) + 1) + "|"]
    counts = Counter[str]()
    for kind, functions in {**KINDS, **{functions: functions for functions in KEPT}}.items():
        found = [tried(kind, way, cuda, peer) for way in ways]
        counts.update(found)
        lines.append(f"| `{functions}` | {' | '.join(found)} |")
    return lines, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cuda", default="12.8", help="the simulated driver's version (12.8)")
    parser.add_argument("--peer-lib", type=Path, help="another preload library")
    parser.add_argument("--peer-env", action="append", default=[], metavar="NAME=VALUE", help="what it wants")
    options = parser.parse_args()
    chosen: dict[str, dict[str, str]] = {"libgpuslice.so": {}}
    if options.peer_lib:
        pairs = dict(pair.split("=", 1) for pair in options.peer_env)
        chosen[options.peer_lib.name] = {"LD_PRELOAD": os.path.abspath(options.peer_lib), **pairs}
    for name, environment in chosen.items():
        lines, counts = table(options.cuda, environment)
        there = sum(counts.values()) - counts[NOWHERE]
        held = counts[HELD] + counts[ODDLY]
        print(f"{name}: {held} of {there} paths held, CUDA {options.cuda}\n")
        print("\n".join(lines), end="\n\n", flush=True)
    print(MARKS)


if __name__ == "__main__":
    main()
