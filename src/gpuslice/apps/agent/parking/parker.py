"""Decides who is parked and who is woken on this node, and keeps the promise: what is parked is its holder's.

Who is parked: whoever somebody orders to be, or, while a container that borrows is near its limit, whoever
consented and has been idle the longest. What is lent then is called back before anything is put back: a
restore never meets a full card, for the process would be lost. Who is off its card is read from the driver;
the pod's annotation, written before a move begins, tells only whom to ask about, and how much it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuslice.adapters.cgroup.readings import pids_in
from gpuslice.adapters.cgroup.tree import CgroupTree
from gpuslice.adapters.gpu.source import GpuSource
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.cards import CardMonitor
from gpuslice.apps.agent.driver_probe import cuda_environment
from gpuslice.apps.agent.lender import Lender
from gpuslice.apps.agent.parking.bell import Bell
from gpuslice.apps.agent.parking.checkpointer import (
    Checkpointer,
    CheckpointRefusedError,
    HelperEndedError,
    ProcessState,
)
from gpuslice.apps.agent.parking.idle_times import IdleTimes
from gpuslice.apps.agent.parking.mover import Mover
from gpuslice.apps.agent.parking.obstacles import Obstacles
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.status import Counters
from gpuslice.apps.agent.watchdog import Watchdog
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.errors import GpusliceError
from gpuslice.core.lending import Name
from gpuslice.core.model import ContainerKind
from gpuslice.core.parking import Order
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

EVERY_S = 0.2
LISTEN_S = 0.015
LOOK_AGAIN_S = 1.0
"""Between the two looks at threads that sleep in the driver before a move: a call takes less."""
REST_S = 2.0
"""After a container was parked, what it left is lent, and used, before another one is."""
REPORT_AFTER_S = 2.0
END_S = 10.0
"""For moves in progress when the agent ends: an ended helper could leave a process locked."""
TRIES = 5


@dataclass(slots=True)
class Parked:
    """A container that is off its cards. `id`: the runtime's, as another run of it is on its card."""

    id: str
    pids: Collection[int]
    amounts: Mapping[str, int]  # bytes by card uuid
    bell: Bell
    since_s: float


class Parker:
    """One node's."""

    def __init__(
        self,
        source: GpuSource,
        state: AllocationState,
        lender: Lender,
        watchdog: Watchdog,
        writer: Writer,
        *,
        cards: CardMonitor,
        counters: Counters,
        settings: AgentSettings,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.look_again_s = LOOK_AGAIN_S
        self._source = source
        self._state = state
        self._lender = lender
        self._watchdog = watchdog
        self._writer = writer
        self._counters = counters.parking
        self._proc = proc
        self._clock = clock
        self._environ = cuda_environment(os.environ, settings.nvml_library)
        self._folder = Path(settings.root) / "parking"
        self._tree = CgroupTree(Path(settings.cgroup_folder))
        self._enabled = settings.parking_host_mib > 0
        self._obstacles = Obstacles(self._tree, source, state, cards, settings=settings, proc=proc)
        self._helpers: dict[str, Checkpointer] = {}  # by card: the moves of one do not wait for another's
        self._turns: dict[str, asyncio.Lock] = {}  # likewise: one move at a time
        self.parked: dict[Name, Parked] = {}
        self._moves: dict[Name, asyncio.Task[None]] = {}
        self.idle = IdleTimes(clock)
        self._rests: dict[str, float] = {}  # by card, until when nobody on it is parked
        lender.parked_bytes = self.lent_bytes

    def lent_bytes(self, uid: str, container: str, card: str) -> int:
        """What a container that is parked leaves to others of a card."""
        pod, name = self._state.pod(uid), (uid, container)
        if pod is None or name in self._lender.on_card or not self._enabled:
            return 0
        limits = self._state.limits(uid, container) or {}
        own_bytes = limits[card].memory_mib * MIB if card in limits else 0
        return min(pod.parked.get(container, {}).get(card, 0), own_bytes)

    async def run(self) -> None:
        """For ever; nothing where this node parks nothing."""
        if not self._enabled:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                while True:
                    await self.check()
                    await asyncio.sleep(EVERY_S)
        finally:
            moves = tuple(self._moves.values())
            if moves:
                await asyncio.wait(moves, timeout=END_S)
            for move in moves:
                move.cancel()
            await asyncio.gather(*moves, return_exceptions=True)
            for helper in self._helpers.values():
                await helper.close()

    async def _listen(self) -> None:
        """Wake whoever calls the driver."""
        while True:
            for name, parked in tuple(self.parked.items()):
                if name not in self._moves and parked.bell.rings():
                    self._start(name, self._wake(name, "it called the driver"))
            await asyncio.sleep(LISTEN_S)

    async def check(self) -> None:
        """One round."""
        pods = {pod.view.uid: pod for pod in self._state.pods() if pod.holds_slices}
        self.idle.learn(self._watchdog.held)
        for name, parked in tuple(self.parked.items()):
            pod = pods.get(name[0])
            if name not in self._moves and (pod is None or pod.container_ids.get(parked.id) != name[1]):
                self._forget(name)  # its memory went with it
        for pod in pods.values():
            for container in pod.parked:
                if (pod.view.uid, container) not in self.parked and pod.container_ids:
                    self._start((pod.view.uid, container), self._recover(pod, container))
            if pod.order is not None:
                await self._obey(pod, pod.order)
        on_card = self._lender.on_card
        on_card -= {name for name in on_card if name not in self._moves and not self._annotated(name)}
        self._make_room(pods)

    def _annotated(self, name: Name) -> bool:
        pod = self._state.pod(name[0])
        return pod is not None and name[1] in pod.parked

    # -- when ------------------------------------------------------------------------------------------

    def _make_room(self, pods: Mapping[str, NodePod]) -> None:
        """Park the one that was idle the longest, on each card whose borrowers want more."""
        now_s = self._clock()
        moving = {card for name in self._moves for card in self._cards_of(name)}
        consenting = {
            name: pod.when_idle.after_s
            for name in self.idle.uses
            if (pod := pods.get(name[0])) is not None and pod.when_idle.parks and name not in self._moves
        }
        for name in self.idle.due(consenting):
            cards = [card for card in self._state.node.cards if card.uuid in self.idle.uses[name].held]
            rests = any(card.uuid in moving or now_s < self._rests.get(card.uuid, 0.0) for card in cards)
            if not rests and any(self._lender.wants(card, name) for card in cards):
                self._start(name, self._park(pods[name[0]], name[1]))
                return  # the others in a later round, if it was not enough

    async def _obey(self, pod: NodePod, order: Order) -> None:
        asking = pod.view.request.containers if pod.view.request else ()
        running = [each.name for each in asking if each.kind is not ContainerKind.INIT]
        names = [(pod.view.uid, each) for each in running if each in pod.running]
        if any(name in self._moves for name in (*names, (pod.view.uid, ""))):
            return
        for name in names:
            if order is Order.PARK and name not in self.parked:
                self._start(name, self._park(pod, name[1], ordered=True))
            elif order is Order.WAKE and name in self.parked:
                self._start(name, self._wake(name, "ordered"))
        moves = [self._moves[name] for name in names if name in self._moves]
        self._start((pod.view.uid, ""), self._done(pod, moves))

    async def _done(self, pod: NodePod, moves: Collection[asyncio.Task[None]]) -> None:
        await asyncio.gather(*moves, return_exceptions=True)
        self._state_written(await self._writer.order_done(pod.view))

    # -- moves -----------------------------------------------------------------------------------------

    def _start(self, name: Name, move: Coroutine[Any, Any, None]) -> None:
        """One move of a container at a time."""
        if name in self._moves:
            move.close()
            return

        async def task() -> None:
            try:
                await move
            except (GpusliceError, OSError) as error:
                _log.warning("not moved, will try again", extra={"of": name[1], "error": str(error)})
                await asyncio.sleep(1.0)
            finally:
                del self._moves[name]

        self._moves[name] = asyncio.create_task(task(), name=f"move {name[1]}")

    async def _park(self, pod: NodePod, container: str, *, ordered: bool = False) -> None:
        uid, name, place = pod.view.uid, (pod.view.uid, container), self._place(pod, container)
        pids = pids_in(place) if place is not None else []
        amounts = await self._held_by(pids)
        problem = await self._obstacles.why_not(pod, container, place, amounts, self._parked_bytes())
        if problem or place is None:
            self._refuse(pod, container, problem, report=ordered)
            return
        bell = Bell(pids, place, self._proc)
        await bell.set(self.look_again_s)
        async with self._turns_of(amounts):
            self._lender.on_card.add(name)
            known = {**self._annotations_of(uid), container: amounts}
            self._state_written(await self._writer.parked(pod.view, known))
            began_s = self._clock()
            if problem := await self._mover(amounts).park(pids, lambda: self._has_grown(pids, amounts)):
                self._state_written(await self._writer.parked(pod.view, self._without(name)))
                self._refuse(pod, container, problem, report=True)
                return
            self.parked[name] = Parked(self._id(pod, container), pids, amounts, bell, self._clock())
            self._lender.on_card.discard(name)
            self._rests |= dict.fromkeys(amounts, self._clock() + REST_S)
            self._counters.parked(self._clock() - began_s)
            _log.info(
                "parked", extra={"pod": pod.view.key, "container": container, "bytes": sum(amounts.values())}
            )
        mib = sum(amounts.values()) // MIB
        what = f"{mib} MiB of container {container} are in its host memory; it comes back when it is used"
        await self._say(pod, what)

    async def _wake(self, name: Name, why: str) -> None:
        parked, pod = self.parked[name], self._state.pod(name[0])
        began_s = self._clock()
        async with self._turns_of(parked.amounts):
            self._lender.on_card.add(name)
            await self._until_room(pod, name[1], parked.amounts)
            waited_s = self._clock() - began_s
            problem = await self._mover(parked.amounts).wake(parked.pids)
            self._forget(name)
        self._counters.woken(waited_s, self._clock() - began_s)
        _log.info("woken", extra={"container": name[1], "why": why, "waited_s": round(waited_s, 3)})
        await self._says_running(name, pod, problem)

    async def _recover(self, pod: NodePod, container: str) -> None:
        """What an agent before this one began: the driver knows how far it came."""
        name, place = (pod.view.uid, container), self._place(pod, container)
        amounts, pids = pod.parked[container], pids_in(place) if place is not None else []
        async with self._turns_of(amounts):
            try:
                states = set((await self._mover(amounts).states(pids)).values()) if pids else set()
            except (CheckpointRefusedError, HelperEndedError) as error:
                _log.warning("not known whether it is parked", extra={"error": str(error)})
                await asyncio.sleep(1.0)
                return
            if states == {ProcessState.CHECKPOINTED} and place is not None:
                bell = Bell(pids, place, self._proc)
                bell.set_again()
                self.parked[name] = Parked(self._id(pod, container), pids, amounts, bell, self._clock())
                return
            self._lender.on_card.add(name)
            problem = ""
            if states - {ProcessState.RUNNING}:
                await self._until_room(pod, container, amounts)
                problem = await self._mover(amounts).wake(pids)
        await self._says_running(name, pod, problem)

    async def _until_room(self, pod: NodePod | None, container: str, amounts: Mapping[str, int]) -> None:
        """Until what it needs is lent to nobody, and is free on its cards."""
        reported, began_s = False, self._clock()
        self._counters.waiting += 1
        try:
            who = pod.view if pod is not None else None
            while not (
                await self._lender.make_room(amounts, who, container) and await self._is_free(amounts)
            ):
                if not reported and pod is not None and self._clock() - began_s > REPORT_AFTER_S:
                    reported = True
                    mib = sum(amounts.values()) // MIB
                    what = f"container {container} waits for {mib} MiB of its own, which others still hold"
                    self._writer.pod_event(pod.view, "GPUWakeWaits", what)
                await asyncio.sleep(EVERY_S)
        finally:
            self._counters.waiting -= 1

    async def _is_free(self, amounts: Mapping[str, int]) -> bool:
        for uuid, amount in amounts.items():
            if await self._source.free_bytes(uuid) < amount:
                return False
        return True

    async def _has_grown(self, pids: Collection[int], amounts: Mapping[str, int]) -> str:
        """Why it must not be taken off its cards, once it is locked: it would need more room to return."""
        held = await self._held_by(pids)
        grown = any(amount > amounts.get(uuid, 0) for uuid, amount in held.items())
        return "it was allocating memory" if grown else ""

    # -- what is known ---------------------------------------------------------------------------------

    async def _held_by(self, pids: Collection[int]) -> dict[str, int]:
        """Bytes by card, as the driver tells now."""
        held = Counter[str]()
        for each in await self._source.processes():
            if each.pid in pids:
                held[each.uuid] += each.memory_bytes or 0
        return {uuid: amount for uuid, amount in held.items() if amount}

    def _parked_bytes(self) -> int:
        return sum(sum(each.amounts.values()) for each in self.parked.values())

    def _place(self, pod: NodePod, container: str) -> Path | None:
        """Its cgroup."""
        identifier = self._id(pod, container)
        return self._tree.of_containers([identifier]).get(identifier) if identifier else None

    def _id(self, pod: NodePod, container: str) -> str:
        return next((found for found, name in pod.container_ids.items() if name == container and found), "")

    def _annotations_of(self, uid: str) -> Mapping[str, Mapping[str, int]]:
        pod = self._state.pod(uid)
        return pod.parked if pod is not None else {}

    def _without(self, name: Name) -> Mapping[str, Mapping[str, int]]:
        return {each: held for each, held in self._annotations_of(name[0]).items() if each != name[1]}

    def _mover(self, amounts: Mapping[str, int]) -> Mover:
        card = min(amounts, default="")
        if card not in self._helpers:
            self._folder.mkdir(exist_ok=True)
            self._helpers[card] = Checkpointer(self._folder / card, self._environ)
        return Mover(self._helpers[card])

    def _cards_of(self, name: Name) -> Collection[str]:
        if name in self.parked:
            return self.parked[name].amounts
        return self.idle.uses[name].held if name in self.idle.uses else ()

    def _turn(self, uuid: str) -> asyncio.Lock:
        return self._turns.setdefault(uuid, asyncio.Lock())

    @contextlib.asynccontextmanager
    async def _turns_of(self, amounts: Mapping[str, int]) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            for uuid in sorted(amounts):
                await stack.enter_async_context(self._turn(uuid))
            yield

    def _forget(self, name: Name) -> None:
        self.parked.pop(name).bell.close()
        self.idle.leave_alone(name)

    def _refuse(self, pod: NodePod, container: str, problem: str, *, report: bool) -> None:
        self.idle.leave_alone((pod.view.uid, container))
        self._counters.moves["refused"] += 1
        _log.info("not parked", extra={"pod": pod.view.key, "container": container, "reason": problem})
        if report:
            self._writer.pod_event(
                pod.view, "GPUNotParked", f"container {container} is not parked: {problem}"
            )

    async def _says_running(self, name: Name, pod: NodePod | None, problem: str) -> None:
        if pod is None:
            return
        if problem:
            self._writer.pod_event(pod.view, "GPUParkedMemoryLost", f"container {name[1]}: {problem}")
        left = self._without(name)
        self._state_written(await self._writer.parked(pod.view, left))
        if not left:
            await self._say(pod, "")

    async def _say(self, pod: NodePod, what: str) -> None:
        """The pod's condition, for people: nothing depends on it."""
        for _ in range(TRIES):
            try:
                await self._writer.parked_condition(pod.view, what)
                return
            except KubeError as error:
                _log.warning("condition not written", extra={"pod": pod.view.key, "error": str(error)})
                await asyncio.sleep(1.0)

    def _state_written(self, pod: NodePod | None) -> None:
        if pod is not None:
            self._state.written(pod)
