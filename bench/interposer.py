"""What the interposer adds to a driver call, in nanoseconds, compared with the raw simulated driver.

    python bench/interposer.py [--json] [--rounds N] [--peer-lib PATH [--peer-env NAME=VALUE]...]

The same program runs with and without the library, in turns, so that a busy machine disturbs all alike. With
one thread, the best slice of 3 ms of all rounds counts: even a busy machine has undisturbed ones. With two
and eight threads, and with two and eight processes that run for the same time, the figure is the core time of
a call: duration × busy cores / all calls. It would stay constant if no thread waited for another; what counts
there is the ratio to the raw driver, as the median of all rounds. Needs `make native` and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from gpuslice.adapters.region.limits import LimitsEntry, write_limits  # noqa: E402
from gpuslice.adapters.region.reader import prepare_region  # noqa: E402
from simcluster import gpu  # noqa: E402

BUILD = ROOT / "native" / "build"
CALLS = ("launch", "memgetinfo", "alloc_free", "alloc_free_async", "alloc_free_2000_live")
AIMS_NS = {"launch": 15, "memgetinfo": 100, "alloc_free": 200, "alloc_free_2000_live": 200}
MODES = {
    "threads_1": (1, 1),
    "threads_2": (2, 1),
    "threads_8": (8, 1),
    "processes_2": (1, 2),
    "processes_8": (1, 8),
}
ALONE = "threads_1"
ROUND_MS, SLICES = 60, 20
STARTS = 200
CORES = os.cpu_count() or 1
CARD = "H200"
SEED = "bench"

Figures = dict[str, float]
"""By call: nanoseconds."""
Rounds = dict[str, list[Figures]]
"""By name of the library: the figures of each round."""


def compiled(folder: Path) -> Path:
    program = folder / "interposer"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(
        [os.environ.get("CC", "cc"), "-O2", "-o", str(program), str(source), "-ldl", "-lpthread"], check=True
    )
    return program


def made_container(folder: Path) -> Path:
    """A container's files as the agent creates them; the library in it finds them next to itself."""
    for part in ("usr/lib", "etc/gpuslice", "var/lib/gpuslice"):
        (folder / part).mkdir(parents=True)
    library = folder / "usr/lib/gpuslice"
    library.symlink_to(BUILD / "lib")
    limit = LimitsEntry(gpu.make_uuid("GPU", SEED, 0), 100 << 30)
    write_limits(folder / "etc/gpuslice/limits", [limit])
    prepare_region(folder / "var/lib/gpuslice/region")
    return library / "libgpuslice.so"


def environments(
    folder: Path, peer: Path | None, peer_environment: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """By name: the raw driver, ours, and the other library's."""
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
    """One run: the core time that a call costs."""
    meeting = program.with_name("meeting")
    meeting.write_bytes(bytes(8))
    slices = SLICES if threads * processes == 1 else 1
    shape = [threads, slices, processes, meeting, ROUND_MS // slices]
    command = [str(program), *map(str, shape)]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("the measuring program failed")
    lines = [line.split() for output in outputs for line in output.splitlines()]
    if slices > 1:
        return {
            call: min(int(took) / int(count) for name, count, took in lines if name == call) for call in CALLS
        }
    calls, longest_ns = defaultdict[str, int](int), defaultdict[str, int](int)
    for name, count, took_ns in lines:
        calls[name] += int(count)
        longest_ns[name] = max(longest_ns[name], int(took_ns))
    at_work = min(threads * processes, CORES)
    return {call: longest_ns[call] * at_work / calls[call] for call in CALLS}


def in_turns(program: Path, every: dict[str, dict[str, str]], mode: tuple[int, int], rounds: int) -> Rounds:
    figures: Rounds = {name: [] for name in every}
    for _ in range(rounds):
        for name, environment in every.items():
            figures[name].append(measured(program, environment, *mode))
    return figures


def best(rounds: list[Figures]) -> Figures:
    return {call: min(figures[call] for figures in rounds) for call in CALLS}


def middle(rounds: list[Figures]) -> Figures:
    return {call: statistics.median(figures[call] for figures in rounds) for call in CALLS}


def typical(mode: str, rounds: list[Figures]) -> Figures:
    return best(rounds) if mode == ALONE else middle(rounds)


def ratios(results: Rounds, name: str) -> Figures:
    """Ratios to the raw driver, round by round: what disturbed one disturbed the other."""
    pairs = list(zip(results[name], results["raw"], strict=True))
    return {call: statistics.median(own[call] / raw[call] for own, raw in pairs) for call in CALLS}


def started_us(environment: dict[str, str]) -> float:
    """The processor time for starting and ending /bin/true."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(STARTS):
        os.waitpid(os.posix_spawn("/bin/true", ["/bin/true"], environment), 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds / STARTS * 1e6


def starts(folder: Path, rounds: int) -> dict[str, float]:
    """Programs that never use the driver, in turns: alone, with an empty library preloaded, with ours."""
    empty = folder / "empty.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(empty)]
    subprocess.run(command, check=True)
    preloads = {"alone": {}, "empty": {"LD_PRELOAD": str(empty)}}
    preloads["gpuslice"] = {"LD_PRELOAD": str(BUILD / "lib/libgpuslice.so")}
    taken: dict[str, list[float]] = {name: [] for name in preloads}
    for _ in range(rounds):
        for name, preload in preloads.items():
            taken[name].append(started_us({"PATH": "/bin", **preload}))
    return {name: statistics.median(figures) for name, figures in taken.items()}


def report(results: dict[str, Rounds], start_us: dict[str, float]) -> dict[str, object]:
    one = {name: best(rounds) for name, rounds in results[ALONE].items()}
    keys: dict[str, object] = {
        f"{call}_added_ns": round(one["gpuslice"][call] - one["raw"][call], 1) for call in CALLS
    }
    if "peer" in one:
        keys |= {f"peer_{call}_added_ns": round(one["peer"][call] - one["raw"][call], 1) for call in CALLS}
    names = [name for name in one if name != "raw"]
    return keys | {
        "ns_per_call": {
            mode: {name: typical(mode, rounds) for name, rounds in by.items()} for mode, by in results.items()
        },
        "ratio_to_raw": {mode: {name: ratios(by, name) for name in names} for mode, by in results.items()},
        "start_us": start_us,
        "aims_added_ns": AIMS_NS,
        "cores": CORES,
    }


def print_table(results: dict[str, Rounds]) -> None:
    names = list(results[ALONE])
    print(
        f"{'ns of a core a call':34}"
        + "".join(f"{name:>12}" for name in names)
        + f"{'added':>10}{'aim':>7}{'ratio':>8}"
    )
    for mode, by in results.items():
        shown = {name: typical(mode, rounds) for name, rounds in by.items()}
        ratio = ratios(by, "gpuslice")
        for call in CALLS:
            added = shown["gpuslice"][call] - shown["raw"][call]
            aim = str(AIMS_NS.get(call, "")) if mode == ALONE else ""
            line = "".join(f"{shown[name][call]:12.1f}" for name in names)
            print(f"{mode + ' ' + call:34}{line}{added:10.1f}{aim:>7}{ratio[call]:8.2f}")


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
        results = {mode: in_turns(program, every, shape, options.rounds) for mode, shape in MODES.items()}
        start_us = starts(folder, options.rounds)
    if options.json:
        print(json.dumps(report(results, start_us), indent=2))
    else:
        print_table(results)
        told = ", ".join(f"{name} {us:.0f}" for name, us in start_us.items())
        print(f"/bin/true where there is no driver, us of processor time: {told}")


if __name__ == "__main__":
    main()
