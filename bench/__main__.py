"""Runs every benchmark in turn and prints one table: `make bench`. `--json` prints one object per benchmark.

Figures depend on the machine and the moment; compare only figures of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRACES = Path(os.environ.get("GPUSLICE_TRACE_DATA", "data/openb"))
RUNS: dict[str, list[str]] = {
    "extender, 500 nodes": ["extender.py", "--nodes", "500"],
    "extender, 2,000 nodes": ["extender.py", "--nodes", "2000"],
    "extender, 5,000 nodes": ["extender.py", "--nodes", "5000"],
    "extender, 20,000 nodes": ["extender.py", "--nodes", "20000", "--pods", "100"],
    "exporter, 8 cards of 20 containers": ["exporter.py", "--gpus", "8", "--containers-per-gpu", "20"],
    "exporter, 25,000 series": ["exporter.py", "--series", "25000"],
    "console, 5,000 nodes": ["console.py"],
    "interposer": ["interposer.py"],
    "start of the command line": ["start.py"],
    "first requests beside strangers": ["strangers.py"],
}
END_TO_END = {
    "end to end, 5,000 nodes": ["end_to_end.py", "--rounds", "1"],
    "a full cluster of 60 nodes": ["full_cluster.py"],
}


def main() -> int:
    arguments = _arguments()
    results: dict[str, Any] = {}
    for name, command in _chosen(arguments.only).items():
        print(f"running: {name}", file=sys.stderr, flush=True)
        results[name] = _run(command)
        if not arguments.json:
            _show(name, results[name])
    if arguments.json:
        print(json.dumps(results, indent=2))
    return 1 if any("error" in result for result in results.values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--only", default="", help="benchmarks whose name contains this")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _chosen(only: str) -> dict[str, list[str]]:
    placement = [
        "placement.py",
        "--trace",
        "default",
        "--policy",
        "all",
        "--seeds",
        "42",
        "--data",
        str(TRACES),
    ]
    runs = {**RUNS, "placement, one seed of the default trace": placement} if TRACES.is_dir() else RUNS
    if os.environ.get("KUBEBUILDER_ASSETS"):
        runs = {**runs, **END_TO_END}
    else:
        print("left out: end to end, which needs a real control plane in KUBEBUILDER_ASSETS", file=sys.stderr)
    return {name: command for name, command in runs.items() if only in name}


def _run(command: list[str]) -> Any:
    script, *rest = command
    done = subprocess.run(
        [sys.executable, str(HERE / script), *rest, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:] or f"exit status {done.returncode}"}
    return json.loads(done.stdout)


def _show(name: str, result: Any) -> None:
    print(f"\n{name}")
    for key, value in _flat(result):
        print(f"  {key:<52} {value}")


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [row for key, inner in value.items() for row in _flat(inner, f"{path}.{key}" if path else key)]
    if isinstance(value, float):
        return [(path, f"{value:.3f}")]
    return [(path, str(value))]


if __name__ == "__main__":
    sys.exit(main())
