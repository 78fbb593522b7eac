"""Everything that can go wrong, many times: `make chaos ARGS="--faults 1000000 --seed 1"`.

Stories are played in so many processes; a difference says how to play its story again. Then every parser is
fed. The exit status is 0 when nothing that must never be was seen, and everything came right again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import faulthandler
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.chaos import parsers
from tests.chaos.story import Told, play

A_STORY = 1500
A_MEAL = 5000
A_LIFE = 20
"""Stories of one process."""


def one_story(seed: int, faults: int) -> Told | str:
    """What was seen, or what went wrong and how to see it again."""
    logging.getLogger().handlers[:] = [logging.NullHandler()]
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        return play(folder, seed, faults)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", ()))
    finally:
        subprocess.run(["rm", "-rf", folder], check=False)  # it may be deeper than others can remove


def one_meal(seed: int, inputs: int) -> Counter[str] | str:
    faulthandler.enable()
    try:
        return parsers.feed(seed, inputs)
    except parsers.BadAnswer as error:
        return f"seed {seed}: {error}"


def stories(seed: int, faults: int, workers: int) -> Iterator[Told | str]:
    """As they end. Processes are made anew now and then, so that nothing they leave behind adds up.

    By new executors: `max_tasks_per_child` leaves an executor waiting for ever (python/cpython#115634).
    """
    parts = [
        (seed + number, min(A_STORY, faults - done)) for number, done in enumerate(range(0, faults, A_STORY))
    ]
    spawn = multiprocessing.get_context("forkserver")
    for chunk in range(0, len(parts), workers * A_LIFE):
        with concurrent.futures.ProcessPoolExecutor(workers, spawn) as pool:
            told = [pool.submit(one_story, *part) for part in parts[chunk : chunk + workers * A_LIFE]]
            for future in concurrent.futures.as_completed(told):
                yield future.result()


def report(told: Told, failures: Sequence[str], fed: Counter[str], seconds: float) -> dict[str, Any]:
    return {
        "faults": told.faults.total(),
        "by kind": dict(told.faults.most_common()),
        "virtual seconds": round(told.virtual_s),
        "real seconds": round(seconds),
        "checks": told.checks,
        "pods": told.pods,
        "bound": told.binds,
        "refused by kubelet": told.rejected,
        "recoveries": told.bouts,
        "longest wrong while faults went on, s": {
            what: round(s, 2) for what, s in sorted(told.longest_wrong_s.items())
        },
        "longest wrong after them, s": {
            what: round(s, 2) for what, s in sorted(told.longest_recovery_s.items())
        },
        "inputs fed to parsers": fed.total(),
        "failures": list(failures),
    }


def real(faults: int, seed: int) -> int:
    from tests.chaos.real import play_real
    from tests.e2e import node

    if reason := node.missing():
        print(f"no real cluster: {reason}", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    told, failures, moments = play_real(faults, seed)
    found = report(told, failures, Counter(), time.monotonic() - began_s)
    print(json.dumps({**found, "seen by one look alone": dict(moments)}, indent=2))
    return 1 if failures else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--faults", type=int, default=20_000)
    parser.add_argument("--inputs", type=int, default=50_000, help="for the parsers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--real",
        type=int,
        metavar="FAULTS",
        help="so many faults on a real control plane and kubelet alone (root, KUBEBUILDER_ASSETS)",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    chosen = parser.parse_args(arguments)
    began_s, total, failures, fed, told_s = time.monotonic(), Told(), list[str](), Counter[str](), 0.0

    def progress() -> None:
        seconds = time.monotonic() - began_s
        print(
            f"{total.faults.total()} faults, {fed.total()} inputs, {seconds:.0f} s, {len(failures)} failures",
            file=sys.stderr,
            flush=True,
        )

    if chosen.real:
        return real(chosen.real, chosen.seed)
    for one in stories(chosen.seed, chosen.faults, chosen.workers):
        if isinstance(one, str):
            failures.append(one)
            print(one, file=sys.stderr, flush=True)
        else:
            total.add(one)
        if time.monotonic() - told_s > 10.0:
            told_s = time.monotonic()
            progress()
    for number, done in enumerate(range(0, chosen.inputs, A_MEAL)):
        meal = one_meal(chosen.seed + number, min(A_MEAL, chosen.inputs - done))
        if isinstance(meal, str):
            failures.append(meal)
            print(meal, file=sys.stderr, flush=True)
        else:
            fed += meal
    progress()
    found = report(total, failures, fed, time.monotonic() - began_s)
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")
    return 1 if failures else 0
