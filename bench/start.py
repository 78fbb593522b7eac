"""How long `gpuslice --help` takes, as a person waits for it: whole processes, least and median of many.

python bench/start.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

RUNS = 20
GOAL_MS = 150


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    times_ms = [_once_ms() for _ in range(RUNS)]
    result = {"help_min_ms": min(times_ms), "help_p50_ms": statistics.median(times_ms), "goal_ms": GOAL_MS}
    print(json.dumps(result) if as_json else result)


def _once_ms() -> float:
    program = "from gpuslice.apps.cli.main import main; main()"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program, "--help"], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    main()
