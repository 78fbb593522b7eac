"""What mutual TLS with HTTP/2 adds to a request, in our HTTP server and in Go's.

    python bench/tls_cost.py --bytes 65000 --busy-us 700

Four servers: ours and Go's (`tls_cost.go`: net/http), each with mutual TLS and without. They read a request,
compute for so long and answer, and are asked in turn, so that what else the machine does meets all alike. The
client is that of `extender.py --go`; go must be on PATH. Microseconds:

    p50, p99      from the call to the last byte of the answer
    server_cpu    processor time of the server, by request
    adds          what TLS and HTTP/2 add to the median, and to the server's processor time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.extender import PREFIX, Caller, mutual_tls, percentile, running, scheduler_client  # noqa: E402

from gpuslice.adapters.web.app import Router, post  # noqa: E402
from gpuslice.adapters.web.messages import JSON, HttpRequest, HttpResponse  # noqa: E402
from gpuslice.adapters.web.serve import Listen, run, serving  # noqa: E402
from gpuslice.adapters.web.server_tls import TlsFiles  # noqa: E402

WARM_UP = 50


async def serve(busy_us: int, answer_bytes: int, files: Sequence[str]) -> None:
    """Our server, started as by the extender."""

    def handle(_: HttpRequest) -> HttpResponse:
        end_s = time.perf_counter() + busy_us / 1e6
        while time.perf_counter() < end_s:
            pass
        return HttpResponse(b"x" * answer_bytes, content_type=JSON)

    listen = Listen(0, "127.0.0.1")
    if files:
        authority, certificate, key = files
        shown = TlsFiles(certificate, key, authority, must_show=True)
        listen = Listen(0, "127.0.0.1", tls_files=lambda: shown, http2=True)
    async with serving(Router([post(f"{PREFIX}/filter", handle)]), listen) as port:
        print(port, flush=True)
        await asyncio.Event().wait()


def measure(size_bytes: int, busy_us: int, answer_bytes: int, requests: int) -> dict[str, dict[str, float]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subprocess.run(
            ["go", "build", "-o", folder / "go_server", ROOT / "bench" / "tls_cost.go"], check=True
        )
        mutual_tls(folder)
        files = [str(folder / name) for name in ("authority", "certificate", "key")]
        programs = {"ours": [sys.executable, __file__, "--serve"], "go": [str(folder / "go_server")]}
        callers: dict[tuple[str, bool], Caller] = {}
        for name, program in programs.items():
            for tls in (False, True):
                arguments = [*program, str(busy_us), str(answer_bytes), *(files if tls else [])]
                server = stack.enter_context(running(arguments, stdout=subprocess.PIPE))
                assert server.stdout is not None
                port = int(server.stdout.readline())
                go = stack.enter_context(scheduler_client(folder, port, tls=tls))
                callers[name, tls] = Caller(port, server.pid, is_peer=True, go=go)
        times = ask_in_turn(callers, b"x" * size_bytes, requests)
    rows: dict[str, dict[str, float]] = {}
    for name in programs:
        plain, secured = times[name, False], times[name, True]
        rows[f"{name}, plain"], rows[f"{name}, TLS"] = plain, secured
        rows[f"{name}, adds"] = {figure: round(secured[figure] - plain[figure], 1) for figure in plain}
    return rows


def ask_in_turn(
    callers: dict[tuple[str, bool], Caller], body: bytes, requests: int
) -> dict[tuple[str, bool], dict[str, float]]:
    for caller in callers.values():
        for _ in range(WARM_UP):
            caller.post("filter", body)
    before_s = {which: caller.cpu_s() for which, caller in callers.items()}
    took_ms: dict[tuple[str, bool], list[float]] = {which: [] for which in callers}
    order = list(callers)
    for number in range(requests):
        for turn in range(len(order)):
            which = order[(number + turn) % len(order)]
            took_ms[which].append(callers[which].post("filter", body)[1])
    return {
        which: {
            "p50": round(percentile(took_ms[which], 50) * 1e3, 1),
            "p99": round(percentile(took_ms[which], 99) * 1e3, 1),
            "server_cpu": round((caller.cpu_s() - before_s[which]) / requests * 1e6, 1),
        }
        for which, caller in callers.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=65_000, help="of a request; 65,000: 5,000 names")
    parser.add_argument("--busy-us", type=int, default=700, help="what a server computes for each")
    parser.add_argument("--answer-bytes", type=int, default=1200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    chosen: Any = parser.parse_args()
    if chosen.serve:
        busy_us, answer_bytes, *files = chosen.serve
        run(serve(int(busy_us), int(answer_bytes), files))
        return
    rows = measure(chosen.bytes, chosen.busy_us, chosen.answer_bytes, chosen.requests)
    if chosen.json:
        print(json.dumps(rows, indent=2))
        return
    for name, figures in rows.items():
        print(f"{name:12}" + "".join(f"  {figure} {value:8.1f}" for figure, value in figures.items()))


if __name__ == "__main__":
    main()
