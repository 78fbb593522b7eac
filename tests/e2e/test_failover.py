"""Two replicas behind a Service, a real kube-scheduler, and the leader killed again and again under load.

What is held against the API server's own history (`BindingLog` sees every change of a pod): no card over its
units at any moment, no pod bound twice, another replica ready within 15 s, and a new process finding the very
same accounts. Moments are drawn from a seed that a failing run prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.resources import PODS
from gpuslice.core.contract import GPU_MEM
from tests import HANG_S
from tests.builders import api_node
from tests.e2e import control_plane
from tests.e2e.cluster import (
    Cluster,
    Running,
    cluster,
    extender,
    pod,
    scheduler_arguments,
    shipped_configuration,
)
from tests.e2e.control_plane import ControlPlane, api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.service import Service, service

pytestmark = ON_A_CONTROL_PLANE

CARD_UNITS = 16
KILLS = int(os.environ.get("GPUSLICE_E2E_KILLS", "2"))
SEED = int(os.environ.get("GPUSLICE_E2E_SEED", "20"))
LIVING = 60  # pods that the load keeps around: a few more than fit
INSPECT = "/gpushare-scheduler/inspect"
Object = dict[str, Any]


def node(name: str, cards: int) -> Object:
    made = api_node(name, cards * CARD_UNITS, cards)
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return made


class Replicas:
    """The processes behind the Service."""

    def __init__(self, plane: ControlPlane, stack: contextlib.ExitStack) -> None:
        self._plane = plane
        self._stack = stack
        self._started = 0

    async def start(self, service: Service) -> Running:
        self._started += 1
        log = f"extender-{self._started}"
        context = extender(self._plane, log=log, wait=False)
        running = await asyncio.to_thread(self._stack.enter_context, context)
        service.replicas.append(running)
        return running


class World:
    """The control plane, the cluster of `nodes` × `cards`, two replicas behind a Service, the scheduler."""

    def __init__(self, plane: ControlPlane, made: Cluster, behind: Service, replicas: Replicas) -> None:
        self.plane, self.cluster, self.service, self.replicas = plane, made, behind, replicas

    async def kill_leader(self) -> None:
        leader = self.service.ready
        assert leader is not None
        self.service.replicas.remove(leader)
        self.service.ready = None
        await asyncio.to_thread(leader.kill)

    async def inspect(self) -> Any:
        """What the ready replica's ledger holds."""
        assert self.service.ready is not None
        status, body = await asyncio.to_thread(self.service.ready.get, INSPECT)
        assert status == 200
        return msgspec.json.decode(body)

    async def agreed(self) -> Any:
        """The same, once the replica has seen all that the API server's history holds."""
        async with asyncio.timeout(HANG_S):
            while used(found := await self.inspect()) != self.cluster.log.sums:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)
        return found

    async def waiting(self) -> list[Object]:
        """The pods that are not bound, as the API server shows them."""
        listing = await self.cluster.client.list(PODS, "default")
        found: list[Object] = [msgspec.to_builtins(each) for each in listing.items or []]
        return [each for each in found if not each["spec"].get("nodeName")]


@contextlib.asynccontextmanager
async def world(folder: Path, nodes: int, cards: int) -> AsyncIterator[World]:
    with contextlib.ExitStack() as stack:
        context = api_server(folder, without=("TaintNodesByCondition",))
        plane = await asyncio.to_thread(stack.enter_context, context)
        async with cluster(plane, CARD_UNITS) as made, service() as behind:
            await made.add_nodes([node(f"n{number}", cards) for number in range(nodes)])
            replicas = Replicas(plane, stack)
            await replicas.start(behind)
            await behind.until_ready(HANG_S)
            await replicas.start(behind)
            arguments = scheduler_arguments(shipped_configuration(behind.url))
            await asyncio.to_thread(stack.enter_context, control_plane.scheduler(plane, **arguments))
            yield World(plane, made, behind, replicas)


def units_of(pod: Object) -> int:
    return int(pod["spec"]["containers"][0]["resources"]["limits"][GPU_MEM])


def reason_of(pod: Object) -> str:
    """What kube-scheduler wrote on a pod that waits; "" while it has not said why."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition["message"])
    return ""


async def settled(here: World, cards: int) -> list[Object]:
    """Until every pod is bound, or waits with a reason and would indeed fit on no card; those that wait.

    The reason may be that a call broke off: kube-scheduler's `updatePod` compares what it is about to write
    with its own copy of the pod. Where that is late and still says the same as the new answer, it writes
    nothing, and the message of the call in between stays.
    """
    deadline = asyncio.get_running_loop().time() + HANG_S
    while True:
        waiting = await here.waiting()
        held = list(here.cluster.log.sums.values())
        free = CARD_UNITS - (min(held) if len(held) == cards else 0)
        odd = [each for each in waiting if not reason_of(each) or units_of(each) <= free]
        if not odd:
            return waiting
        told = [(each["metadata"].get("annotations"), each["status"], units_of(each)) for each in odd]
        assert asyncio.get_running_loop().time() < deadline, (free, told, await here.inspect())
        await asyncio.sleep(0.25)


def used(inspection: Any) -> dict[tuple[str, str], int]:
    return {
        (each["name"], str(device["id"])): device["usedGPU"]
        for each in inspection["nodes"]
        for device in each["devs"]
        if device["usedGPU"]
    }


def printed(plane: ControlPlane) -> str:
    """What a person sees."""
    code = "from gpuslice.apps.cli.main import main; main()"
    command = [sys.executable, "-c", code, "inspect", "-d", "--kubeconfig", str(plane.kubeconfig)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


async def test_a_hundred_pods_at_once_on_eight_cards_never_pass_their_units(tmp_path: Path) -> None:
    dice = random.Random(8)
    pods = [pod(f"p{number:03d}", dice.choice((1, 2, 3, 4))) for number in range(100)]
    async with world(tmp_path, nodes=1, cards=8) as here:
        await here.cluster.add_pods(pods)
        waiting = await settled(here, cards=8)
        await here.agreed()
        log = here.cluster.log
    assert log.wrong == []
    assert waiting
    assert len(waiting) + len(log.bound_at) == 100
    assert all("Insufficient" in reason_of(each) for each in waiting)


class Load:
    """Pods that come and go, drawn from `dice`: always a few more than fit."""

    def __init__(self, here: World, dice: random.Random) -> None:
        self._here = here
        self._dice = dice
        self._names: list[str] = []
        self._made = 0

    async def run(self) -> None:
        while True:
            if len(self._names) < LIVING or self._dice.random() < 0.5:
                await self._add()
            else:
                await self._remove()
            await asyncio.sleep(self._dice.uniform(0.0, 0.06))

    async def _add(self) -> None:
        name = f"p{self._made:05d}"
        self._made += 1
        self._names.append(name)
        await self._here.cluster.add_pods([pod(name, self._dice.choice((1, 2, 4, 4, 8, 16)))])
        while len(self._names) > LIVING + 10:
            await self._remove()

    async def _remove(self) -> None:
        name = self._names.pop(self._dice.randrange(len(self._names)))
        await self._here.cluster.remove_pod(name)


@pytest.mark.timeout(HANG_S * (4 + KILLS))  # on a machine of its own 40 s
async def test_leaders_killed_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    print(f"GPUSLICE_E2E_SEED={SEED}")
    dice = random.Random(SEED)
    async with world(tmp_path, nodes=4, cards=4) as here:
        log = here.cluster.log
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(Load(here, dice).run())
            for number in range(KILLS):
                await here.cluster.until(lambda: log.bindings >= 20, HANG_S)
                await asyncio.sleep(dice.uniform(0.1, 2.0))
                await here.kill_leader()
                took_s = await here.service.until_ready(HANG_S)
                print(f"kill {number + 1}: after {log.bindings} bindings, taken over in {took_s:.1f} s")
                log.bindings = 0
                await here.replicas.start(here.service)
            load.cancel()
        await settled(here, cards=16)
        before, shown = await here.agreed(), await asyncio.to_thread(printed, here.plane)
        await here.kill_leader()
        await here.service.until_ready(HANG_S)
        assert await here.agreed() == before
        assert await asyncio.to_thread(printed, here.plane) == shown
    assert log.wrong == []
    assert log.most == CARD_UNITS  # full to the brim at some moment, and never over it
    assert not here.service.both_ready
