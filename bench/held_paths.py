"""Which paths to device memory a preload library holds, on the simulated driver, beside libgpuslice.

    python bench/held_paths.py [--cuda 12.8] [--peer-lib PATH [--peer-env NAME=VALUE]...]

By allocation path and by the way the program found the function, in a process and on a machine of its own
each time, under a limit of 1 GiB: is 64 MiB given and taken back, and is what is too much refused? `{folder}`
in a value of --peer-env stands for that process's folder. Prints a table in Markdown. Needs `make native`.
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
**fails**: 64 MiB are refused or not taken back, or the program ends.
–: the driver has no such function, or the way does not lead there."""


def too_much(worker: Worker, kind: str) -> str:
    """The answer to what does not fit. A context has its own size: there the memory is used up before."""
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


def tried(kind: str, way: str, cuda: str, peer: Mapping[str, str]) -> str:
    with tempfile.TemporaryDirectory() as name, container(Path(name), cuda=cuda) as box:
        environment = {key: value.replace("{folder}", name) for key, value in peer.items()}
        try:
            with box.worker(way, number(cuda), **environment) as worker:
                return verdict(box, worker, kind)
        except AssertionError:  # it has ended
            return BROKEN


def table(cuda: str, peer: Mapping[str, str]) -> tuple[list[str], Counter[str]]:
    ways = [way for way in WAYS if exists(way, cuda)]
    lines = [f"| allocation | {' | '.join(WAYS[way] for way in ways)} |", "| --- " * (len(ways) + 1) + "|"]
    counts = Counter[str]()
    for kind, functions in KINDS.items():
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
