"""One node in a virtual world: what kubelet assigned, what runs, and the real parts of the agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpclib import GRPCError

from gpuslice.adapters.gpu.recorded import RecordedSource
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.apps.agent.main import Agent
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.core import device_assignment
from gpuslice.core.contract import GPU_MEM, card_of_device_id
from gpuslice.core.model import ContainerKind
from simcluster.kubelet import checkpoint
from simcluster.kubelet.devices import AdmissionError, ContainerDemand, Device, DeviceAssignments, Options
from simcluster.kubelet.plugin_calls import Call, PluginError, PreferredCall, Response, carry_out
from tests.builders import UNIT_MIB
from tests.integration.virtual import HeldTransport, Process

if TYPE_CHECKING:
    from tests.integration.interleaving_rig import World

Object = dict[str, Any]


@dataclass(frozen=True)
class Fleet:
    """The units of each card by node, and what a unit is."""

    cards: Mapping[str, tuple[int, ...]]
    unit_mib: int = UNIT_MIB

    def memory_mib(self, units: int) -> int:
        """Of a card with so many units: not a whole number of GiB, as on real cards."""
        return units * self.unit_mib + 3 * self.unit_mib // 4


CARDS = {"n1": (4, 3), "n2": (4,)}
"""Small, so that pods meet."""
SMALL_FLEET = Fleet(CARDS)


def uuid_of(node: str, index: int) -> str:
    return f"GPU-{node}-{index}"


LIMITS = "/etc/gpuslice"
ContainerKey = tuple[str, str]
"""A pod's uid and the container's name."""


def demands_of(pod: Object) -> Iterator[ContainerDemand]:
    """Init containers and sidecars in their order, then app containers, with the units they ask for."""
    spec = pod["spec"]
    for each in (*(spec.get("initContainers") or ()), *spec["containers"]):
        kind = ContainerKind.APP if each in spec["containers"] else ContainerKind.INIT
        if each.get("restartPolicy") == "Always":
            kind = ContainerKind.SIDECAR
        units = int((each["resources"].get("limits") or {}).get(GPU_MEM, 0))
        yield ContainerDemand(each["name"], {GPU_MEM: units} if units else {}, kind)


@dataclass(frozen=True)
class Running:
    """A container at work: what it was given, and the limits that it found at its start."""

    ids: frozenset[str]
    environment: dict[str, str]
    folder: Path
    limits: str

    @property
    def units(self) -> int:
        return len(self.ids)

    def limits_now(self) -> str:
        return (self.folder / "limits").read_text()


@dataclass(eq=False)
class NodeInMemory:
    """One node: kubelet's device assignments, the pods it runs, and the agent beside it."""

    name: str
    world: World
    folder: Path
    device_manager: DeviceAssignments = field(init=False)
    admitted: dict[str, Object] = field(default_factory=dict)  # by uid, in kubelet's eyes active
    running: dict[ContainerKey, Running] = field(default_factory=dict)
    completed: set[ContainerKey] = field(default_factory=set)  # init containers that ended well
    boots: int = 1
    agent: Agent | None = None
    process: Process | None = None
    busy: bool = False
    _generation: int = 0
    _served: bool = False  # the agent's plugin, since it registered with this kubelet

    def __post_init__(self) -> None:
        self.device_manager = DeviceAssignments(self.world.dice)
        self.folder.mkdir(parents=True)
        fleet = self.world.fleet
        cards = [
            {"index": index, "uuid": uuid_of(self.name, index), "memory_mib": fleet.memory_mib(units)}
            for index, units in enumerate(fleet.cards[self.name])
        ]
        (self.folder / "cards.json").write_text(json.dumps({"cards": cards}))

    # -- the agent -------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        self.process = Process(f"agent {self.name}", self.world.loop)
        client = KubeClient(HeldTransport(self.world.network, self.process))
        source = RecordedSource(self.folder / "cards.json")
        self.agent = Agent(
            self._settings(),
            client,
            source,
            kubelet=self,
            boot=f"boot {self.boots}",
            clock=self.world.loop.time,
            now_ns=lambda: self.world.now_ns(self.name),
        )
        for name, work in self.work_of(self.agent).items():
            self.process.start(work, name)
        self.process.start(self._register(self.agent), "register")
        self.world.loop.settle()

    def work_of(self, agent: Agent) -> dict[str, Coroutine[Any, Any, None]]:
        """The agent's tasks that are played here, by name."""
        return agent.upkeep()

    def _settings(self) -> AgentSettings:
        library = self.folder / "libgpuslice.so"
        if not library.exists():
            library.write_bytes(b"the library")
        return AgentSettings(
            node_name=self.name,
            root=str(self.folder / "host"),
            library=str(library),
            memory_unit="MiB" if self.world.fleet.unit_mib == 1 else "GiB",
            match_wait_s=0.2,
            health_check=False,
            unhealthy_file=str(self.folder / "none"),
        )

    async def _register(self, agent: Agent) -> None:
        self._served = False
        await agent.until_servable()
        message = await anext(agent.plugin.list_and_watch(dp.Empty()))
        self._generation = self.device_manager.register(GPU_MEM, Options(True, True))
        self.device_manager.update(GPU_MEM, self._generation, [Device(each.ID) for each in message.devices])
        self._served = True
        self.save()

    def kill_agent(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.world.network.forget(self.process)
        self.agent, self._served = None, False
        self.device_manager.stop(GPU_MEM, self._generation, self.world.loop.time())

    # -- kubelet ---------------------------------------------------------------------------------------

    async def assignments(self, resource: str) -> tuple[device_assignment.DeviceAssignment, ...]:
        """What the pod-resources socket tells, of no ordinary init container; the reconciler's seam."""
        return tuple(
            device_assignment.DeviceAssignment("default", pod["metadata"]["name"], one.container, one.ids)
            for uid, pod in self.admitted.items()
            for each in demands_of(pod)
            if each.kind is not ContainerKind.INIT
            for one in self.device_manager.assignments_of(uid, each.name)
            if one.resource == resource
        )

    async def admit(self, pod: Object) -> None:
        """kubelet's admission: serialised, final when it fails.

        Before the agent's first registration kubelet would start the pod without devices, which nobody can
        prevent: what then becomes of it is tested elsewhere, and here it waits.
        """
        if GPU_MEM not in self.device_manager.registered():
            return
        uid = pod["metadata"]["uid"]
        self.admitted[uid] = pod
        try:
            for each in demands_of(pod):
                await carry_out(self.device_manager.allocate(uid, each, set(self.admitted)), self._call)
        except AdmissionError as error:
            self.admitted.pop(uid, None)
            message = f"Pod was rejected: Allocate failed due to {error}, which is unexpected"
            status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
            self.world.set_status(pod, status)
            self.world.rejections.append(str(error))
        self.save()

    def startable(self, uid: str) -> list[str]:
        """Which of a pod's containers kubelet may start now, or start anew: what is before them is done.

        A container whose devices kubelet forgot is none of them.
        """
        demands = list(demands_of(self.admitted[uid]))
        names = [each.name for each in demands if each.kind is ContainerKind.APP]
        for each in demands:
            key = uid, each.name
            done = key in (self.completed if each.kind is ContainerKind.INIT else self.running)
            if each.limits and each.kind is not ContainerKind.APP and not done:
                names = [each.name]
                break
        return [name for name in names if self.device_manager.assignments_of(uid, name)]

    async def start(self, uid: str, name: str = "main") -> None:
        """PreStartContainer and, if the plugin agrees, the container."""
        (held,) = self.device_manager.assignments_of(uid, name)
        request = dp.PreStartContainerRequest(devices_ids=sorted(held.ids))
        try:
            await self._ask(lambda agent: agent.plugin.pre_start_container(request))
        except PluginError:
            return  # kubelet tries again later
        if uid in self.admitted:
            response = dp.ContainerAllocateResponse.FromString(held.response)
            (folder,) = [Path(each.host_path) for each in response.mounts if each.container_path == LIMITS]
            limits = (folder / "limits").read_text()
            self.running[uid, name] = Running(held.ids, dict(response.envs), folder, limits)
            self._show(uid)

    def complete(self, uid: str, name: str) -> None:
        """An init container has done its work."""
        del self.running[uid, name]
        self.completed.add((uid, name))
        self._show(uid)

    def _show(self, uid: str) -> None:
        """What the pod's status says of its containers."""
        statuses: dict[str, list[Object]] = {"containerStatuses": [], "initContainerStatuses": []}
        for each in demands_of(self.admitted[uid]):
            kind = "containerStatuses" if each.kind is ContainerKind.APP else "initContainerStatuses"
            if (uid, each.name) in self.running:
                statuses[kind].append({"name": each.name, "state": {"running": {}}})
            elif (uid, each.name) in self.completed:
                ended = {"exitCode": 0, "reason": "Completed"}
                statuses[kind].append({"name": each.name, "state": {"terminated": ended}})
        phase = {"phase": "Running"} if statuses["containerStatuses"] else {}
        self.world.set_status(self.admitted[uid], {**phase, **statuses})

    def finish(self, uid: str) -> None:
        """The containers are gone, and with them the devices."""
        pod = self.admitted.pop(uid)
        self.running = {key: one for key, one in self.running.items() if key[0] != uid}
        self.device_manager.forget_except(self.admitted)
        self.save()
        self.world.remove(pod)

    def restart(self, *, keeps_checkpoint: bool) -> None:
        """kubelet starts anew. Without its checkpoint it asks for what does not run, for nothing else."""
        saved = checkpoint.decode(self.saved)
        self.device_manager = DeviceAssignments(self.world.dice)
        if keeps_checkpoint:
            self.device_manager.restore(saved.assignments, saved.registered, self.world.loop.time())
        else:
            runs = {uid for uid, _ in self.running}
            self.admitted = {uid: pod for uid, pod in self.admitted.items() if uid in runs}
            self.save()
        if self.agent is not None and self.process is not None:
            self.process.start(self._register(self.agent), "register again")
        self.world.loop.settle()

    def reboot(self) -> None:
        """The machine starts anew, without kubelet's device assignments: nothing runs any more."""
        was_there = self.agent is not None
        if was_there:
            self.kill_agent()
        self.boots += 1
        self.admitted.clear()
        self.running.clear()
        self.completed.clear()
        self.device_manager = DeviceAssignments(self.world.dice)
        self.save()
        if was_there:
            self.start_agent()

    def save(self) -> None:
        self.saved = checkpoint.encode(self.device_manager.assignments(), self.device_manager.registered())

    async def _call(self, call: Call) -> Response:
        if isinstance(call, PreferredCall):
            wish = dp.ContainerPreferredAllocationRequest(
                available_deviceIDs=list(call.available),
                must_include_deviceIDs=list(call.must_include),
                allocation_size=call.size,
            )
            question = dp.PreferredAllocationRequest(container_requests=[wish])
            preferred = await self._ask(lambda agent: agent.plugin.get_preferred_allocation(question))
            return tuple(preferred.container_responses[0].deviceIDs)
        container = dp.ContainerAllocateRequest(devices_ids=list(call.ids))
        request = dp.AllocateRequest(container_requests=[container])
        granted = await self._ask(lambda agent: agent.plugin.allocate(request))
        raw: bytes = granted.container_responses[0].SerializeToString()
        return raw

    async def _ask(self, question: Any) -> Any:
        """A call of the plugin; an error when it says no, dies, or is not there yet."""
        if self.agent is None or self.process is None or not self._served:
            raise PluginError("no plugin")
        task = self.process.start(question(self.agent), "call")
        await asyncio.wait([task])
        self.process.tasks.remove(task)
        if task.cancelled():
            raise PluginError("connection lost")
        try:
            return task.result()
        except GRPCError as error:
            raise PluginError(str(error.message)) from error

    # -- what is true ------------------------------------------------------------------------------------

    def cards_of(self, uid: str) -> dict[str, int]:
        """Units by card uuid: by kubelet's assignments, else by what containers were started with."""
        held = [one.ids for one in self.device_manager.assignments() if one.pod_uid == uid]
        held = held or [each.ids for (pod, _), each in self.running.items() if pod == uid]
        uuids = [card_of_device_id(identifier) for identifier in frozenset[str]().union(*held)]
        return {uuid: uuids.count(uuid) for uuid in uuids}
