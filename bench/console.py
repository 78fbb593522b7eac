"""The console before a cluster that is too big to simulate: 5,000 nodes of 8 cards, 20,000 measured pods.

    ready_s          from its start until it has read the cluster
    whole_ms         the answer that a page gets first, read whole
    whole_mib        its size, packed
    update_ms        from a pod's change in the API server to the answer that contains it, median
    answer_cpu_ms    what the console computes for the answer that a page gets first
    usage_cpu_s      what it computes to read once what all cards and containers use
    rss_mib          resident memory after all of that
    paint_ms         in Chromium, from navigation to the first wall of cards
    paint_cpu_ms     of these, what the page's main thread computed, which load does not lengthen
    shown_ms         in Chromium, from an answer to the wall that shows it, median
    shown_cpu_ms     what the page's main thread computed for one update, mean

Goals, on an otherwise idle machine (`load` shows it): paint 1,000 ms, an update shown 100 ms, 150 MiB.
Without a browser (`make tools ARGS=browser`) the last four are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.tools import playwright

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.transport import HttpTransport

SETTLES_S = 5.0  # long enough for one reading to end before the next begins
HERE = Path(__file__).resolve().parent
PROGRAM = "from gpuslice.apps.cli.main import main; main()"
GOALS = {"paint_ms": 1000.0, "shown_ms": 100.0, "rss_mib": 150.0}
KUBECONFIG = """{{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"clusters": [{{"name": "c", "cluster": {{"server": "http://127.0.0.1:{port}"}}}}],
"contexts": [{{"name": "c", "context": {{"cluster": "c"}}}}]}}"""


@contextlib.contextmanager
def process(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ})
    try:
        yield started
    finally:
        started.terminate()
        started.communicate()


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def cpu_ms(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return 1000 * sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


async def measure(url: str, api: str, updates: int, pid: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    async with aiohttp.ClientSession() as http, HttpTransport(Connection(api)) as transport:
        client = KubeClient(transport)
        began = time.perf_counter()
        while True:
            async with http.get(f"{url}api/v1/cluster") as answer:
                body = await answer.read()
                if (found := msgspec.json.decode(body))["cluster"]["synced"]:
                    break
        result["ready_s"] = round(time.perf_counter() - began, 2)
        before_ms = cpu_ms(pid)
        while "podUsage" not in found:
            async with http.get(f"{url}api/v1/cluster?since={found['version']}") as answer:
                found |= msgspec.json.decode(await answer.read())
        await asyncio.sleep(SETTLES_S)
        result["usage_cpu_s"] = round((cpu_ms(pid) - before_ms) / 1000, 2)
        times, before_ms = [], cpu_ms(pid)
        for _ in range(5):
            began = time.perf_counter()
            async with http.get(f"{url}api/v1/cluster?figures=later") as answer:
                body = await answer.read()
                size = int(answer.headers["Content-Length"])
            times.append((time.perf_counter() - began) * 1000)
        result["answer_cpu_ms"] = round((cpu_ms(pid) - before_ms) / len(times), 1)
        result |= {"whole_ms": round(min(times), 1), "whole_mib": round(size / (1 << 20), 2)}
        async with http.get(f"{url}api/v1/cluster") as answer:
            whole = msgspec.json.decode(await answer.read())
        result |= {name: len(whole[name]) for name in ("nodes", "pods", "cardUsage", "podUsage")}
        latencies = []
        version = found["version"]
        for number in range(updates):
            async with http.get(f"{url}api/v1/cluster") as answer:
                version = msgspec.json.decode(await answer.read())["version"]
            coming = asyncio.create_task(http.get(f"{url}api/v1/cluster?since={version}"))
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            await client.bind("default", f"pending-{number:05d}", f"node-{number:05d}")
            answer = await coming
            version = msgspec.json.decode(await answer.read())["version"]
            latencies.append((time.perf_counter() - began) * 1000)
        result["update_ms"] = round(statistics.median(latencies), 1)
        result["rss_mib"] = round(rss_mib(pid), 1)
    return result


async def in_browser(url: str, api: str, updates: int) -> dict[str, Any]:
    try:
        made, program = playwright()
    except pytest.skip.Exception as missing:
        return {"browser": str(missing)}
    async with made() as driver, HttpTransport(Connection(api)) as transport:
        browser = await driver.chromium.launch(executable_path=str(program), args=["--no-sandbox"])
        size = {"width": 1380, "height": 860}
        tab = await browser.new_page(viewport=size, bypass_csp=True)  # to run our code in it
        devtools = await tab.context.new_cdp_session(tab)
        await devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

        async def page_ms() -> float:
            metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
            return next(1000 * float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

        before_ms = await page_ms()
        await tab.goto(f"{url}#/cards")
        shown = "performance.getEntriesByName('shown')"
        await tab.wait_for_function(f"{shown}.length > 0", timeout=60_000)
        painted_ms = await page_ms()
        paint = await tab.evaluate(f"{shown}[0].startTime + {shown}[0].duration")
        client = KubeClient(transport)
        for number in range(updates):
            count = await tab.evaluate(f"{shown}.length")
            await client.bind("default", f"pending-{updates + number:05d}", f"node-{number:05d}")
            await tab.wait_for_function(f"{shown}.length > {count}")
        durations = await tab.evaluate(f"{shown}.slice(1).map((each) => each.duration)")
        updated_ms = await page_ms()
        await browser.close()
    return {
        "paint_ms": round(paint, 1),
        "paint_cpu_ms": round(painted_ms - before_ms, 1),
        "shown_ms": round(statistics.median(durations), 1),
        "shown_cpu_ms": round((updated_ms - painted_ms) / updates, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        pending = str(2 * arguments.updates)
        size = (str(arguments.nodes), "8", pending, "1")
        server = stack.enter_context(process(sys.executable, str(HERE / "big_api.py"), *size))
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config").write_text(KUBECONFIG.format(port=port))
        known = (sys.executable, str(HERE / "big_prometheus.py"), str(arguments.nodes), "8")
        prometheus = stack.enter_context(process(*known))
        assert prometheus.stdout is not None
        flags = [
            f"--kubeconfig={folder / 'config'}",
            f"--prometheus-url=http://127.0.0.1:{prometheus.stdout.readline().strip()}",
            "--usage-interval-s=15",
            "--log-level=error",  # about what this API server does not have
        ]
        command = (sys.executable, "-c", PROGRAM, "console", "--no-open-browser", *flags)
        console = stack.enter_context(process(*command, PYTHONUNBUFFERED="1"))
        assert console.stdout is not None
        url = console.stdout.readline().split()[-1]
        api = f"http://127.0.0.1:{port}"
        result = asyncio.run(measure(url, api, arguments.updates, console.pid))
        result |= asyncio.run(in_browser(url, api, arguments.updates))
        result["rss_mib"] = round(rss_mib(console.pid), 1)
    result["load"] = os.getloadavg()[0]
    result["missed"] = [name for name, goal in GOALS.items() if result.get(name, 0) > goal]
    print(
        json.dumps(result)
        if arguments.json
        else "\n".join(f"{name:12} {value}" for name, value in result.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
