"""What the agent does where a container holds more of a card than its limit by the driver's figures."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpuslice.adapters.kube.resources import EVENTS, PODS
from gpuslice.adapters.region import layout
from gpuslice.adapters.region.figures import Figure, format_figures
from gpuslice.adapters.region.layout import FigureEntry, FiguresHead
from gpuslice.adapters.region.living import start_time_of
from gpuslice.apps.agent.watchdog import Excess, Holder
from gpuslice.core.attribution import ProcessReading
from gpuslice.core.contract import ANN_TIERS, LABEL_MIN_TIER
from gpuslice.core.units import MIB
from simcluster.cluster.faults import Fault
from tests.integration.agent_bench import Bench, container, eventually, uuid

ONE = {0: 16130}
LIMIT_MIB = 4301  # of 4 units
PID_INSIDE = 7
SLEEP = "import time; print(flush=True); time.sleep(600)"
ECHO = "import sys; print(flush=True); print(sys.stdin.readline(), end='', flush=True)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


class Tenant:
    """A pod of 4 units with one running container, and processes in it that the driver tells of."""

    def __init__(self, node: Bench, name: str) -> None:
        self.node = node
        self.name = name
        self.id = (name * 64)[:64].translate(str.maketrans("ghijklmnopqrstuvwxyz", "0123456789abcdef0123"))

    async def start(self, labels: Mapping[str, str] | None = None, **env: str) -> None:
        spec = {**container(4), "env": [{"name": key, "value": value} for key, value in env.items()]}
        self.pod = await self.node.place(self.name, 0, 0, containers=[spec], labels=labels)
        await self.node.kubelet.admit(self.pod)
        await self.node.kubelet.start_container(self.pod)
        status = {
            "phase": "Running",
            "containerStatuses": [
                {"name": "main", "containerID": f"containerd://{self.id}", "state": {"running": {}}}
            ],
        }
        await self.node.client.patch_status(PODS, self.name, status, "default")
        uid = self.pod["metadata"]["uid"]

        def known() -> bool:
            pod = self.node.agent.state.pod(uid)
            listed = self.node.agent.state.listed_ids(uid, "main")
            return pod is not None and self.id in pod.container_ids and listed is not None

        await eventually(known, f"{self.name} is known")

    @contextlib.contextmanager
    def process(
        self, program: str = SLEEP, cgroup: str = "/kubepods/burstable/pod{uid}/{id}"
    ) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-c", program]
        running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdout.readline()  # it is what it is to be
        folder = self.node.folder / "proc" / str(running.pid)
        folder.mkdir(parents=True)
        path = cgroup.format(uid=self.pod["metadata"]["uid"], id=self.id)
        (folder / "cgroup").write_text(f"0::{path}\n")
        (folder / "stat").write_bytes(Path(f"/proc/{running.pid}/stat").read_bytes())
        (folder / "status").write_text(f"NSpid:\t{running.pid}\t{PID_INSIDE}\n")
        try:
            yield running
        finally:
            running.kill()
            running.wait()
            running.stdin.close()
            running.stdout.close()


def holds(node: Bench, *held: tuple[subprocess.Popen[bytes], int]) -> None:
    """What the driver says from now on: processes with MiB."""
    processes = [{"pid": each.pid, "uuid": uuid(0), "memory_bytes": mib * MIB} for each, mib in held]
    node.record(ONE, processes=processes)


async def warnings(node: Bench, reason: str = "GPUMemoryPastLimit") -> list[str]:
    found = (await node.client.list(EVENTS)).items or ()
    return [each.message for each in found if each.reason == reason]


async def metrics(node: Bench) -> str:
    async with aiohttp.ClientSession() as web, web.get(f"http://127.0.0.1:{node.port}/metrics") as answer:
        return await answer.text()


async def test_who_is_past_its_limit_is_warned_of_once_on_its_pod_and_in_the_metrics(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        one, other = Tenant(node, "a"), Tenant(node, "b")
        await one.start()
        await other.start()
        with one.process() as big, other.process() as small:
            holds(node, (big, LIMIT_MIB + 400), (small, LIMIT_MIB))
            await eventually(lambda: warnings(node), "an event")
            (message,) = await warnings(node)
            assert f"holds {LIMIT_MIB + 400} MiB of card {uuid(0)}, its limit is {LIMIT_MIB} MiB" in message
            assert "gpuslice_agent_containers_past_limit 1" in await metrics(node)
            holds(node, (big, LIMIT_MIB), (small, LIMIT_MIB))
            await eventually(lambda: not node.agent.watchdog.containers_past_limit, "it is within again")
            assert "gpuslice_agent_limit_excesses_total 1" in await metrics(node)
            assert (big.poll(), small.poll()) == (None, None)


@pytest.mark.parametrize(
    "cgroup",
    [
        pytest.param("/k8s.io/{id}", id="kubelet without cgroups of pods"),
        pytest.param("/kubepods/burstable/pod5e0f5aa1bc1e3b1b4b8c4d5c9a5f0c11/{id}", id="static pod"),
    ],
)
async def test_a_container_is_known_whatever_its_cgroup_calls_its_pod(tmp_path: Path, cgroup: str) -> None:
    async with Bench(tmp_path).running() as node:
        one = Tenant(node, "a")
        await one.start()
        with one.process(cgroup=cgroup) as big:
            holds(node, (big, LIMIT_MIB + 400))
            await eventually(lambda: warnings(node), "an event")


async def test_what_holds_the_excess_is_ended_and_nothing_else(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings={"watchdog": "stop"}).running() as node:
        one, other = Tenant(node, "a"), Tenant(node, "b")
        await one.start()
        await other.start()
        with one.process() as big, one.process() as small, other.process() as neighbour:
            holds(node, (big, LIMIT_MIB), (small, 500), (neighbour, LIMIT_MIB))
            await eventually(lambda: big.poll() is not None, "the largest has ended")
            holds(node, (small, 500), (neighbour, LIMIT_MIB))
            await eventually(lambda: not node.agent.watchdog.containers_past_limit, "it is within again")
            assert big.returncode == -signal.SIGTERM
            assert (small.poll(), neighbour.poll()) == (None, None)
            assert 'gpuslice_agent_processes_ended_total{signal="SIGTERM"} 1' in await metrics(node)


async def test_who_does_not_heed_the_first_signal_gets_the_second(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings={"watchdog": "stop"}).running() as node:
        node.agent.watchdog.grace_s = 0.5
        tenant = Tenant(node, "a")
        await tenant.start()
        with tenant.process(STUBBORN) as process:
            holds(node, (process, 2 * LIMIT_MIB))
            await eventually(lambda: process.poll() is not None, "it has ended")
            assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("settings", [{"watchdog": "off"}, {"allow_cgpu_disable": True}])
async def test_nobody_else_is_minded(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with Bench(tmp_path, settings={"watchdog": "stop", **settings}).running() as node:
        tenant = Tenant(node, "a")
        await tenant.start(CGPU_DISABLE="true")
        with tenant.process() as process:
            holds(node, (process, 2 * LIMIT_MIB))
            if settings.get("watchdog") != "off":
                for _ in range(3):
                    await node.agent.watchdog.check()
            assert process.poll() is None
            assert await warnings(node) == []


@pytest.mark.parametrize(
    ("labels", "settings", "env"),
    [
        pytest.param({"cgpu.disable.isolation": "true"}, {}, {}, id="a node without isolation"),
        pytest.param({}, {"allow_cgpu_disable": True}, {"CGPU_DISABLE": "true"}, id="an exempt container"),
    ],
)
async def test_who_nothing_limits_is_told_of_what_it_holds_beyond_its_request_and_goes_on(
    tmp_path: Path, labels: dict[str, str], settings: dict[str, Any], env: dict[str, str]
) -> None:
    async with Bench(tmp_path, labels=labels, settings={"watchdog": "stop", **settings}).running() as node:
        one, other = Tenant(node, "a"), Tenant(node, "b")
        await one.start(None, **env)
        await other.start(None, **env)
        with one.process() as big, other.process() as small:
            holds(node, (big, 2 * LIMIT_MIB), (small, LIMIT_MIB))
            await eventually(lambda: warnings(node, "GPUMemoryPastRequest"), "an event")
            (message,) = await warnings(node, "GPUMemoryPastRequest")
            assert f"holds {2 * LIMIT_MIB} MiB of card {uuid(0)} and asked for {LIMIT_MIB} MiB" in message
            assert await warnings(node) == []
            assert "gpuslice_agent_containers_past_limit 0" in await metrics(node)
            assert (big.poll(), small.poll()) == (None, None)


async def test_a_pid_that_went_to_a_neighbour_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """The driver's figures are of a moment ago: what counts is where the process is now."""
    async with Bench(tmp_path, settings={"watchdog": "off"}).running() as node:
        one, other = Tenant(node, "a"), Tenant(node, "b")
        await one.start()
        await other.start()
        with other.process(ECHO) as process:
            excess = Excess()
            reading = ProcessReading(process.pid, uuid(0), 2 * LIMIT_MIB * MIB)
            holder = Holder(one.pod["metadata"]["uid"], "main", uuid(0))
            node.agent.watchdog._end(holder, excess, [reading], 1)
            excess.close()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"alive\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"alive\n"  # a signal would have come before


async def test_a_container_is_told_the_drivers_figures_of_its_own_processes(tmp_path: Path) -> None:
    """By the numbers that its processes have inside; of neighbours it hears nothing."""
    async with Bench(tmp_path).running() as node:
        one, other = Tenant(node, "a"), Tenant(node, "b")
        await one.start()
        await other.start()
        with one.process() as process, other.process() as neighbour:
            holds(node, (process, 600), (neighbour, 500))
            await eventually(lambda: len(told(node)) == 2, "both containers are told")
            of = {each.memory_bytes // MIB: each for each in told(node)}
            start = start_time_of(process.pid)
            assert of[600] == Figure(uuid(0), PID_INSIDE, start or 0, 600 * MIB)
            assert set(of) == {500, 600}


async def test_an_api_server_that_hangs_keeps_no_container_from_its_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Bench(tmp_path).running() as node:
        node.agent.watchdog.tell_s = 0.2
        one, other = Tenant(node, "a"), Tenant(node, "b")
        await one.start()
        await other.start()
        node.cluster.add_fault(Fault(method="PATCH", path=".*/pods/.*", delay_s=10.0))
        with one.process() as loose, other.process() as small:
            account_of(node, one, small.pid)
            holds(node, (loose, 400), (small, 500))
            await eventually(lambda: "process without the library" in caplog.text, "a tier is to be written")
            holds(node, (loose, 400), (small, 600))
            await eventually(
                lambda: {each.memory_bytes // MIB for each in told(node)} == {400, 600}, "growth"
            )
            holds(node, (loose, 400), (small, 700))
            await eventually(lambda: {each.memory_bytes // MIB for each in told(node)} == {400, 700}, "more")
            assert "tiers not written" not in caplog.text  # it has not been given up before


async def tiers_of(node: Bench, name: str) -> str | None:
    found: Any = await node.client.get(PODS, name, "default")
    return (found.metadata.annotations or {}).get(ANN_TIERS)


async def test_who_is_held_by_the_watchdog_alone_is_said_on_its_pod_and_in_the_metrics(
    tmp_path: Path,
) -> None:
    """A program that the library did not enter has no account in the container's region."""
    async with Bench(tmp_path).running() as node:
        one, other = Tenant(node, "a"), Tenant(node, "b")
        await one.start(labels={LABEL_MIN_TIER: "library"})
        await other.start()
        line = 'gpuslice_agent_container_tier{namespace="default",pod="a",container="main",tier='
        with one.process() as process, other.process() as neighbour:
            account_of(node, other, neighbour.pid)
            assert f'{line}"library"}} 1' in await metrics(node)
            holds(node, (process, 600), (neighbour, 500))
            await eventually(lambda: warnings(node, "GPULimitHeldByWatchdog"), "an event")
            (message,) = await warnings(node, "GPULimitHeldByWatchdog")
            assert f"process {PID_INSIDE} holds 600 MiB of card {uuid(0)} without libgpuslice" in message
            assert "the pod asks for gpuslice.io/min-tier=library" in message
            await eventually(lambda: tiers_of(node, "a"), "the pod says so")
            assert await tiers_of(node, "a") == '{"main":"watchdog"}'
            assert f'{line}"watchdog"}} 1' in await metrics(node)
            holds(node, (neighbour, 500))
            for _ in range(3):  # looks that find an account, or no process: its tenant can bring that about
                await node.agent.watchdog.tiers.judge({})
            assert await tiers_of(node, "a") == '{"main":"watchdog"}'
            node.agent.watchdog.tiers.kept_s = 0.0  # the minute is over

            async def is_over() -> bool:
                return await tiers_of(node, "a") is None

            await eventually(is_over, "the program has gone, and the word of it")
            assert await tiers_of(node, "b") is None


def account_of(node: Bench, tenant: Tenant, pid: int) -> None:
    """What the library writes for a process, in the region of its tenant's container."""
    uid = tenant.pod["metadata"]["uid"]
    (owner,) = (path for path in node.folder.glob("**/owner.json") if uid in path.read_text())
    region = bytearray(layout.REGION_BYTES)
    head = layout.RegionHead.from_buffer(region)
    head.magic, head.slots_high = layout.MAGIC | layout.VERSION, 1
    head.cards[0].key, head.cards[0].uuid = 1, uuid(0).encode()
    slot = layout.RegionSlot.from_buffer(region, ctypes.sizeof(layout.RegionHead))
    slot.owner, slot.pid, slot.start_time = 1, PID_INSIDE, start_time_of(pid)
    slot.usage[0].used_bytes = 500 * MIB
    (owner.parent / "var/region").write_bytes(region)


def told(node: Bench) -> list[Figure]:
    """Each container's figures; an error where it has more than one."""
    found = []
    for path in node.folder.glob("host/containers/*/etc/figures"):
        data = path.read_bytes()
        at_ns = FiguresHead.from_buffer_copy(data).at_ns
        assert time.monotonic_ns() - 10**10 < at_ns < time.monotonic_ns()
        entry = FigureEntry.from_buffer_copy(data, ctypes.sizeof(FiguresHead))
        figure = Figure(uuid(0), entry.pid, entry.start_time, entry.bytes)
        assert data == format_figures([figure], at_ns)
        found.append(figure)
    return found
