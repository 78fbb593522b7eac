"""How fast the extender answers: the real process, the wires that kube-scheduler uses, a cluster half full.

    python bench/extender.py --nodes 5000 --gpus 8 --pods 300 --json

For each pod the requests are kube-scheduler's: filter with all node names (``nodeCacheCapable``), prioritize
with those that passed, bind to the best. The order of the names differs for each pod, as kube-scheduler's
workers take chunks of the nodes, and each node gets the next free place in the list as soon as it passes
(1.36, ``findNodesThatPassFilters`` in pkg/scheduler/schedule_one.go); ``--order stable`` sends one order. The
API server (`big_api`) is a process of its own. Times are taken at the client, around one HTTP call on a kept
connection; CPU and memory are read from /proc.

    filter_p50_ms, filter_p99_ms, prioritize_p99_ms, bind_p50_ms    latency
    bind_own_ms      what a bind takes in the extender without the waits for its API calls, by its metrics
    cpu_ms_per_pod   CPU that the extender spends on all of one pod: filter, prioritize, bind, watch events
    rss_mib          resident memory at the end
    start_to_ready_s from the start of the process to /readyz

``--go`` uses kube-scheduler's own HTTP client (`scheduler_client.go`, built on request): HTTP/1.1 without TLS
and HTTP/2 with it. Without ``--go``, Python sends the requests, by HTTP/1.1.

``--tls-beside`` starts two extenders, each with an API server of its own, one of them with mutual TLS, and
calls them in turn for each pod, so that other load on the machine affects both alike. Prints two objects, the
second with ``of_plain``: each figure divided by that of plain HTTP.

``--peer PROGRAM`` measures another extender of this protocol instead: started with KUBECONFIG and PORT in its
environment, ready once it answers, called to filter and to bind, but not for scores; figures that it does not
publish are absent.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trustme

from gpuslice_demo.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "/gpushare-scheduler"
SIZES = (500, 2000, 5000, 20000)
WORKERS = 16  # kube-scheduler's default parallelism
RUNNING = 2  # of these, how many run at a time on two cores
GOALS = {
    "filter_p99_ms": 5.0,
    "cpu_ms_per_pod": 1.5,
    "bind_own_ms": 1.0,
    "rss_mib": 150.0,
    "start_to_ready_s": 3.0,
}


@dataclass(slots=True)
class Times:
    """Milliseconds for each call, and the extender's CPU seconds by verb."""

    filter: list[float] = field(default_factory=list)
    prioritize: list[float] = field(default_factory=list)
    bind: list[float] = field(default_factory=list)
    bind_own_s: float = 0.0
    cpu_s: float = 0.0
    refused: int = 0


class Caller:
    """kube-scheduler's side: one persistent connection, and a timer around each call.

    `go`: the running `scheduler_client.go`; without it, Python sends the requests.
    """

    def __init__(
        self,
        port: int,
        pid: int,
        *,
        is_peer: bool = False,
        tls: ssl.SSLContext | None = None,
        go: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._connection = connection_to(port, tls, timeout_s=60)
        self._pid = pid
        self._go = go
        self.is_peer = is_peer

    def post(self, verb: str, body: bytes) -> tuple[bytes, float]:
        """The answer and the milliseconds it took."""
        if self._go is not None:
            assert self._go.stdin is not None
            assert self._go.stdout is not None
            self._go.stdin.write(b"%s %d\n%s" % (verb.encode(), len(body), body))
            self._go.stdin.flush()
            nanoseconds, length = map(int, self._go.stdout.readline().split())
            return self._go.stdout.read(length), nanoseconds / 1e6
        began = time.perf_counter()
        self._connection.request("POST", f"{PREFIX}/{verb}", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse().read()
        return answer, (time.perf_counter() - began) * 1e3

    def cpu_s(self) -> float:
        """Processor time of all threads so far."""
        threads = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def bind_own_s(self) -> float:
        """Seconds in bind calls so far, without the waits for the API server."""
        if self.is_peer:
            return float("nan")
        self._connection.request("GET", "/metrics")
        text = self._connection.getresponse().read().decode()
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        binds = 'gpuslice_extender_request_seconds_sum{verb="bind"}'
        api = "gpuslice_extender_api_request_seconds_sum"
        waited_s = sum(float(value) for name, value in samples.items() if name.startswith(api))
        return float(samples.get(binds, 0)) - waited_s

    def rss_mib(self) -> float:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def schedule(
    callers: Sequence[Caller], names: list[str], pods: list[dict[str, Any]], order: str = "workers"
) -> list[Times]:
    """Schedule each pod with each of the callers, who take turns in going first."""
    times = [Times() for _ in callers]
    bodies = [
        (pod, args_of(pod, names if order == "stable" else as_sent(names, number)))
        for number, pod in enumerate(pods)
    ]
    before = [(caller.cpu_s(), caller.bind_own_s()) for caller in callers]
    for number, (pod, body) in enumerate(bodies):
        for turn in range(len(callers)):
            chosen = (number + turn) % len(callers)
            schedule_one(callers[chosen], pod, body, times[chosen])
    time.sleep(0.2)  # the last watch events are part of the cost
    for caller, its, (cpu_s, own_s) in zip(callers, times, before, strict=True):
        its.cpu_s = caller.cpu_s() - cpu_s
        its.bind_own_s = caller.bind_own_s() - own_s
    return times


def schedule_one(caller: Caller, pod: dict[str, Any], body: bytes, times: Times) -> None:
    answer, took_ms = caller.post("filter", body)
    times.filter.append(took_ms)
    passing = msgspec.json.decode(answer)["NodeNames"]
    if not passing:
        times.refused += 1
        return
    best = passing[0]
    if not caller.is_peer:
        answer, took_ms = caller.post("prioritize", args_of(pod, passing))
        times.prioritize.append(took_ms)
        best = max(msgspec.json.decode(answer), key=lambda each: each["Score"])["Host"]
    meta = pod["metadata"]
    binding = {"PodName": meta["name"], "PodNamespace": "default", "PodUID": meta["uid"], "Node": best}
    answer, took_ms = caller.post("bind", msgspec.json.encode(binding))
    times.bind.append(took_ms)
    if error := msgspec.json.decode(answer)["Error"]:
        raise SystemExit(f"bind of {meta['name']} to {best} failed: {error}")


def as_sent(names: list[str], seed: int) -> list[str]:
    """The names in an order that kube-scheduler's workers may produce: chunks, some interleaved.

    The size of a chunk: ``chunkSizeFor`` in pkg/scheduler/framework/parallelize.
    """
    dice = random.Random(seed)
    size = max(1, min(int(len(names) ** 0.5), len(names) // WORKERS + 1))
    chunks = [names[start : start + size][::-1] for start in range(0, len(names), size)]
    dice.shuffle(chunks)
    running, sent = [chunks.pop() for _ in range(min(RUNNING, len(chunks)))], []
    while running:
        worker = dice.randrange(len(running))
        sent.append(running[worker].pop())
        if not running[worker]:
            running[worker : worker + 1] = [chunks.pop()] if chunks else []
    return sent


def args_of(pod: dict[str, Any], names: list[str]) -> bytes:
    return msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names})


def measure(nodes: int, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each extender: one, or two with ``--tls-beside``."""
    from bench.big_api import pending_pods

    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(one_extender(nodes, chosen, tls=tls))
            for tls in ([False, True] if chosen.tls_beside else [chosen.tls])
        ]
        names = [f"node-{number:05d}" for number in range(nodes)]
        pods = pending_pods(chosen.pods, chosen.seed)
        all_times = schedule([caller for caller, _ in started], names, pods, chosen.order)
        rows = []
        for (caller, row), times in zip(started, all_times, strict=True):
            measured = {name: value for name, value in summary(times).items() if not math.isnan(value)}
            rows.append(row | measured | {"rss_mib": round(caller.rss_mib(), 1)})
    if chosen.tls_beside:
        plain, secured = rows
        secured["of_plain"] = {
            name: round(secured[name] / plain[name], 3)
            for name in plain
            if name.endswith(("_ms", "_mib", "_per_pod"))
        }
    return rows


@contextlib.contextmanager
def one_extender(
    nodes: int, chosen: argparse.Namespace, *, tls: bool
) -> Iterator[tuple[Caller, dict[str, Any]]]:
    """A ready extender with an API server of its own, and the values of the row known so far."""
    size = (nodes, chosen.gpus, chosen.pods, chosen.seed)
    with big_api(*size) as api_port, tempfile.TemporaryDirectory() as folder:
        flags, context = mutual_tls(Path(folder)) if tls else ([], None)
        began = time.perf_counter()
        with extender(api_port, Path(folder), chosen.policy, chosen.peer, flags) as (port, pid):
            ready_s = wait_ready(port, "/version" if chosen.peer else "/readyz", tls=context) - began
            row = {"nodes": nodes, "gpus": chosen.gpus, "pods": chosen.pods, "policy": chosen.policy}
            row |= {"order": chosen.order, "tls": tls, "start_to_ready_s": round(ready_s, 2)}
            with (
                scheduler_client(Path(folder), port, tls=tls) if chosen.go else contextlib.nullcontext() as go
            ):
                yield Caller(port, pid, is_peer=bool(chosen.peer), tls=context, go=go), row


@contextlib.contextmanager
def scheduler_client(folder: Path, port: int, *, tls: bool) -> Iterator[subprocess.Popen[bytes]]:
    """kube-scheduler's own HTTP client, built and running."""
    program = folder / "scheduler_client"
    subprocess.run(["go", "build", "-o", program, ROOT / "bench" / "scheduler_client.go"], check=True)
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}{PREFIX}"
    files = [folder / name for name in ("authority", "client-certificate", "client-key")] if tls else []
    arguments = [str(each) for each in (program, url, *files)]
    with running(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


def summary(times: Times) -> dict[str, float]:
    handled = max(1, len(times.filter))
    return {
        "filter_p50_ms": percentile(times.filter, 50),
        "filter_p99_ms": percentile(times.filter, 99),
        "prioritize_p99_ms": percentile(times.prioritize, 99),
        "bind_p50_ms": percentile(times.bind, 50),
        "bind_own_ms": round(times.bind_own_s * 1e3 / max(1, len(times.bind)), 3),
        "cpu_ms_per_pod": round(times.cpu_s * 1e3 / handled, 3),
        "refused": times.refused,
    }


def percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return round(values[0], 3) if values else float("nan")
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 3)


@contextlib.contextmanager
def big_api(nodes: int, cards: int, pods: int, seed: int) -> Iterator[int]:
    arguments = [sys.executable, "-m", "bench.big_api", *map(str, (nodes, cards, pods, seed))]
    with running(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextlib.contextmanager
def extender(
    api_port: int, folder: Path, policy: str, peer: str = "", flags: Sequence[str] = ()
) -> Iterator[tuple[int, int]]:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG.format(port=api_port))
    port = free_port()
    code = "from gpuslice.apps.extender.command import command; command()"
    arguments = [sys.executable, "-c", code, "--port", str(port), "--host", "127.0.0.1", "--policy", policy]
    arguments.append("--no-nominate")  # the kube-scheduler played here examines all nodes for every pod
    program = [peer] if peer else [*arguments, *flags]
    with running(program, KUBECONFIG=str(kubeconfig), LOG_LEVEL="error", PORT=str(port)) as process:
        yield port, process.pid


@contextlib.contextmanager
def running(
    arguments: list[str], stdin: int | None = None, stdout: int | None = None, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environ}
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdin=stdin, stdout=stdout)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            pipe.close()


def mutual_tls(folder: Path) -> tuple[list[str], ssl.SSLContext]:
    """Certificates as in the chart, on P-256: the extender's flags, and the TLS context of kube-scheduler."""
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("gpuslice-scheduler")
    files = {
        "certificate": server.cert_chain_pems[0],
        "key": server.private_key_pem,
        "authority": authority.cert_pem,
        "client-certificate": client.cert_chain_pems[0],
        "client-key": client.private_key_pem,
    }
    for name, pem in files.items():
        pem.write_to_path(str(folder / name))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    client.configure_cert(context)
    flags = {"certificate": "certificate", "key": "key", "client-ca": "authority"}
    return [f"--tls-{flag}={folder / name}" for flag, name in flags.items()], context


def connection_to(port: int, tls: ssl.SSLContext | None, timeout_s: float) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout_s, context=tls)


def wait_ready(
    port: int, path: str = "/readyz", timeout_s: float = 120, tls: ssl.SSLContext | None = None
) -> float:
    """When `path` was first answered successfully."""
    deadline = time.perf_counter() + timeout_s
    while time.perf_counter() < deadline:
        with contextlib.suppress(OSError):
            connection = connection_to(port, tls, timeout_s=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return time.perf_counter()
        time.sleep(0.01)
    raise SystemExit(f"the extender was not ready within {timeout_s:g} s")


def table(rows: list[dict[str, Any]]) -> str:
    names = [name for name in rows[0] if name in rows[-1]]
    cells = [[str(row[name]) for row in rows] for name in names]
    lines = []
    for name, values in zip(names, cells, strict=True):
        goal = f"  goal at 5000 nodes: {GOALS[name]:g}" if name in GOALS else ""
        lines.append(f"{name:<20}" + "".join(f"{value:>18}" for value in values) + goal)
    for row in rows:
        if "of_plain" in row:
            ratios = ", ".join(f"{name} {ratio:g}" for name, ratio in row["of_plain"].items())
            lines.append(f"{row['nodes']} nodes, with TLS of what it is without: {ratios}")
    return "\n".join(lines)


KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{{name: bench, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: bench, user: {{}}}}]
contexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]
current-context: bench
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, action="append", help=f"may be repeated; {SIZES} without it")
    parser.add_argument("--gpus", type=int, default=8, help="cards of a node")
    parser.add_argument("--pods", type=int, default=300, help="pods to schedule")
    parser.add_argument("--policy", default="opportunity-cost")
    parser.add_argument(
        "--order", choices=["workers", "stable"], default="workers", help="of the names: see above"
    )
    parser.add_argument(
        "--peer", default="", metavar="PROGRAM", help="measure this extender instead: see above"
    )
    parser.add_argument(
        "--go",
        action="store_true",
        help="ask by kube-scheduler's own HTTP client: see above; wants go on PATH",
    )
    parser.add_argument("--tls", action="store_true", help="mutual TLS, as the chart has it")
    parser.add_argument(
        "--tls-beside", action="store_true", help="plain HTTP and mutual TLS in turn: see above"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one object, or a list for several sizes")
    chosen = parser.parse_args()
    rows = [row for nodes in chosen.nodes or SIZES for row in measure(nodes, chosen)]
    if chosen.json:
        print(json.dumps(rows[0] if len(rows) == 1 else rows))
    else:
        print(table(rows))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
