"""`gpuslice load` on this card, judged by the exporter beside it.

A program of its own: the last line says what was seen; it ends with 0, with 77 where something it needs is
missing, else with 1. Plays on the simulated driver too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SKIPPED = 77
ROOT = Path(__file__).resolve().parents[2]
START = [sys.executable, "-c", "from gpuslice.apps.cli.main import main; main()"]
NEEDED = ("msgspec", "httptools", "click", "pynvml", "numpy", "grpclib", "google.protobuf", "yaml")
# Arguments, and whether the two must agree: a duty cycle is told by some drivers as the whole period, and
# NVML's counter of PCIe bytes begins anew after 4 GiB (nvml.h: "Value can be wrapped").
ORDERS: tuple[tuple[str, bool], ...] = (
    ("-t 1002 -d 2", True),
    ("-t 1001 -d 2 --level 50 --hold 1GiB", False),
    ("-t 1004 -d 2", True),
    ("-t 1005 -d 2", True),
    ("-t 1010 -d 2", False),
)


def main() -> int:
    missing = [name for name in NEEDED if not found(name)]
    if missing:
        print(f"this Python lacks {', '.join(missing)}")
        return SKIPPED
    environment = dict(os.environ)
    environment.pop("LD_PRELOAD", None)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    exporter = [*START, "exporter", "--no-kubernetes", "--address", f"127.0.0.1:{port}"]
    with subprocess.Popen(exporter, env=environment, stderr=subprocess.DEVNULL) as running:
        try:
            return judged(f"http://127.0.0.1:{port}/metrics", environment)
        finally:
            running.terminate()


def judged(url: str, environment: dict[str, str]) -> int:
    wait_for(url)
    parted, seen = [], []
    for arguments, strict in ORDERS:
        command = [*START, "load", *arguments.split(), "--validate", url, "-o", "json", "--tolerance", "20"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in {0, 1} or not done.stdout:
            print(f"{arguments}: ended with {done.returncode}: {done.stderr[-500:]}")
            return 1
        report: dict[str, Any] = json.loads(done.stdout)
        seen.append(f"{arguments.split(' -d')[0]}: {figures(report)}")
        print(arguments, json.dumps(report["verdicts"]))
        if strict and not report["agrees"]:
            parted.append(arguments)
    print(f"parted at {', '.join(parted)}: " if parted else "", "; ".join(seen), sep="")
    return 1 if parted else 0


def figures(report: dict[str, Any]) -> str:
    parts = [f"{each['series']} {each['generated']:.4g}→{each['measured']}" for each in report["verdicts"]]
    fastest = max((each["gflops"] for each in report["intervals"]), default=0)
    return ", ".join(parts) + (f", {fastest / 1000:.1f} TFLOPS" if fastest else "")


def wait_for(url: str) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if b"gpuslice_gpu_up" in answer.read():
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.3)


def found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
