"""How long the help of each command and a Tab take, as a person waits for it: whole processes.

python bench/start.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

from gpuslice.apps.cli.main import COMMANDS

RUNS = 10
GOAL_MS = 150
PROGRAM = "from gpuslice.apps.cli.main import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    helped = {name: _times_ms(name, "--help") for name in ("", *(entry.name for entry in COMMANDS))}
    completed = {name: _tab_ms(name) for name in ("", "agent --", "exporter --", "extender --", "webhook --")}
    least = {f"gpuslice {name} --help".replace("  ", " "): min(times) for name, times in helped.items()}
    least |= {f"gpuslice {words}<Tab>": min(times) for words, times in completed.items()}
    result = {
        "help_min_ms": min(helped[""]),
        "help_p50_ms": statistics.median(helped[""]),
        "slowest_min_ms": max(least.values()),
        "goal_ms": GOAL_MS,
        "least_ms": {name: round(each, 1) for name, each in least.items()},
    }
    print(json.dumps(result) if as_json else result)


def _tab_ms(words: str) -> list[float]:
    """A Tab after `words`, as bash's completion script requests it."""
    line = f"gpuslice {words}"
    asked = {"_GPUSLICE_COMPLETE": "bash_complete", "COMP_WORDS": line}
    return _times_ms(environ={**asked, "COMP_CWORD": str(line.count(" "))})


def _times_ms(*arguments: str, environ: Mapping[str, str] = {}) -> list[float]:
    return [_once_ms([each for each in arguments if each], {**os.environ, **environ}) for _ in range(RUNS)]


def _once_ms(arguments: list[str], environ: Mapping[str, str]) -> float:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    main()
