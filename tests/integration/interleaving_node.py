"""One node in a virtual world: what kubelet assigned, what runs, and the real parts of the agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
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
from simcluster.kubelet import checkpoint
from simcluster.kubelet.devices import (
    AdmissionError,
    Call,
    ContainerDemand,
    Device,
    DeviceAssignments,
    Options,
    PluginError,
    PreferredCall,
    Response,
    carry_out,
)
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
    running: dict[str, Running] = field(default_factory=dict)  # by uid
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
        """What the pod-resources socket tells; the seam of the agent's reconciler."""
        return tuple(
            device_assignment.DeviceAssignment("default", pod["metadata"]["name"], one.container, one.ids)
            for uid, pod in self.admitted.items()
            for one in self.device_manager.assignments_of(uid, "main")
            if one.resource == resource
        )

    async def admit(self, pod: Object) -> None:
        """kubelet's admission: serialised, final when it fails.

        Before the agent's first registration kubelet would start the pod without devices, which nobody can
        prevent: what then becomes of it is tested elsewhere, and here it waits.
        """
        if GPU_MEM not in self.device_manager.registered():
            return
        uid, units = pod["metadata"]["uid"], int(pod["spec"]["containers"][0]["resources"]["limits"][GPU_MEM])
        self.admitted[uid] = pod
        steps = self.device_manager.allocate(
            uid, ContainerDemand("main", {GPU_MEM: units}), set(self.admitted)
        )
        try:
            await carry_out(steps, self._call)
        except AdmissionError as error:
            self.admitted.pop(uid)
            self.world.set_status(pod, {"phase": "Failed", "reason": "UnexpectedAdmissionError"})
            self.world.rejections.append(str(error))
        self.save()

    async def start(self, uid: str) -> None:
        """PreStartContainer and, if the plugin agrees, the container."""
        (held,) = self.device_manager.assignments_of(uid, "main")
        request = dp.PreStartContainerRequest(devices_ids=sorted(held.ids))
        try:
            await self._ask(lambda agent: agent.plugin.pre_start_container(request))
        except PluginError:
            return  # kubelet tries again later
        if uid in self.admitted:
            response = dp.ContainerAllocateResponse.FromString(held.response)
            (folder,) = [Path(each.host_path) for each in response.mounts if each.container_path == LIMITS]
            limits = (folder / "limits").read_text()
            self.running[uid] = Running(held.ids, dict(response.envs), folder, limits)
            runs = {"name": "main", "state": {"running": {}}}
            self.world.set_status(self.admitted[uid], {"phase": "Running", "containerStatuses": [runs]})

    def finish(self, uid: str) -> None:
        """The containers are gone, and with them the devices."""
        pod = self.admitted.pop(uid)
        self.running.pop(uid, None)
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
            self.admitted = {uid: pod for uid, pod in self.admitted.items() if uid in self.running}
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
        """Units by card uuid: by what the container was started with, else by kubelet's assignments."""
        held = self.device_manager.assignments_of(uid, "main")
        if not held and uid in self.running:
            ids = list(self.running[uid].ids)
        else:
            ids = [identifier for one in held for identifier in one.ids]
        uuids = [card_of_device_id(identifier) for identifier in ids]
        return {uuid: uuids.count(uuid) for uuid in uuids}
