"""What the interposer adds to a driver call, in nanoseconds, beside the raw simulated driver.

    python bench/interposer.py [--json] [--rounds N] [--peer-lib PATH [--peer-env NAME=VALUE]...]

The same program runs with and without the library, in turns, so that a busy machine disturbs all alike; the
best of all rounds counts. With one thread, with eight, and in eight processes at once. Needs `make native`
and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from gpuslice.adapters.region.limits import CardLimit, write_limits  # noqa: E402
from gpuslice.adapters.region.reader import prepare_region  # noqa: E402
from gpuslice.sim import gpu  # noqa: E402

BUILD = ROOT / "native" / "build"
CALLS = ("launch", "memgetinfo", "alloc_free", "alloc_free_2000_live")
AIMS_NS = {"launch": 15, "memgetinfo": 100, "alloc_free": 200, "alloc_free_2000_live": 200}
MODES = {"threads_1": (1, 1), "threads_8": (8, 1), "processes_8": (1, 8)}
CARD = "H200"
SEED = "bench"

Figures = dict[str, float]


def compiled(folder: Path) -> Path:
    program = folder / "interposer"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(
        [os.environ.get("CC", "cc"), "-O2", "-o", str(program), str(source), "-ldl", "-lpthread"], check=True
    )
    return program


def made_container(folder: Path) -> Path:
    """A container's files, as the agent lays them out; the library in it finds them beside itself."""
    for part in ("usr/lib", "etc/gpuslice", "var/lib/gpuslice"):
        (folder / part).mkdir(parents=True)
    library = folder / "usr/lib/gpuslice"
    library.symlink_to(BUILD / "lib")
    limit = CardLimit(gpu.make_uuid("GPU", SEED, 0), 100 << 30)
    write_limits(folder / "etc/gpuslice/limits", [limit])
    prepare_region(folder / "var/lib/gpuslice/region")
    return library / "libgpuslice.so"


def environments(
    folder: Path, peer: Path | None, peer_environment: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """By whose name: the raw driver, ours, and the other library's."""
    gpu.create(folder / "cards", [CARD], seed=SEED)
    raw = gpu.environment(folder / "cards", BUILD / "sim")
    every = {
        "raw": raw,
        "gpuslice": {**raw, "LD_PRELOAD": str(made_container(folder / "container"))},
    }
    if peer is not None:
        every["peer"] = {**raw, "LD_PRELOAD": str(peer), **peer_environment}
    return every


def measured(program: Path, environment: dict[str, str], threads: int, processes: int) -> Figures:
    """One run; with several processes the slowest counts."""
    meeting = program.with_name("meeting")
    meeting.write_bytes(bytes(8))
    command = [str(program), str(threads), "3", str(processes), str(meeting)]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("the measuring program failed")
    runs = [{name: float(ns) for name, ns in map(str.split, output.splitlines())} for output in outputs]
    return {call: max(run[call] for run in runs) for call in CALLS}


def best_of(
    program: Path, every: dict[str, dict[str, str]], mode: tuple[int, int], rounds: int
) -> dict[str, Figures]:
    best: dict[str, Figures] = {}
    for _ in range(rounds):
        for name, environment in every.items():
            figures = measured(program, environment, *mode)
            known = best.setdefault(name, figures)
            best[name] = {call: min(known[call], figures[call]) for call in CALLS}
    return best


def report(results: dict[str, dict[str, Figures]]) -> dict[str, object]:
    one = results["threads_1"]
    keys: dict[str, object] = {
        f"{call}_added_ns": round(one["gpuslice"][call] - one["raw"][call], 1) for call in CALLS
    }
    if "peer" in one:
        keys |= {f"peer_{call}_added_ns": round(one["peer"][call] - one["raw"][call], 1) for call in CALLS}
    return keys | {"ns_per_call": results, "aims_added_ns": AIMS_NS, "cores": os.cpu_count()}


def print_table(results: dict[str, dict[str, Figures]]) -> None:
    names = list(results["threads_1"])
    print(f"{'ns a call':34}" + "".join(f"{name:>12}" for name in names) + f"{'added':>10}{'aim':>7}")
    for mode, best in results.items():
        for call in CALLS:
            added = best["gpuslice"][call] - best["raw"][call]
            aim = str(AIMS_NS[call]) if mode == "threads_1" else ""
            line = "".join(f"{best[name][call]:12.1f}" for name in names)
            print(f"{mode + ' ' + call:34}{line}{added:10.1f}{aim:>7}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turns (5)")
    parser.add_argument("--peer-lib", type=Path, help="another preload library to measure beside ours")
    parser.add_argument(
        "--peer-env", action="append", default=[], metavar="NAME=VALUE", help="what that library wants"
    )
    options = parser.parse_args()
    peer_environment = dict(pair.split("=", 1) for pair in options.peer_env)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compiled(folder)
        every = environments(folder, options.peer_lib, peer_environment)
        results = {mode: best_of(program, every, shape, options.rounds) for mode, shape in MODES.items()}
    if options.json:
        print(json.dumps(report(results), indent=2))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
