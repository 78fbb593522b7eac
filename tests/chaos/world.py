"""A cluster at work in virtual time: two replicas of the extender, agents, and who keeps them busy.

The processes are the real ones; users, kube-scheduler and kubelet are played here. Nothing in this file does
harm: that is `faults`.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.messages import HttpRequest
from gpuslice.apps.agent.main import Agent
from gpuslice.apps.extender.main import Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.extender.speedups.nominator import NominationLimits
from tests.builders import api_pod
from tests.chaos.checker import Card, CardSize, Checker, NodeFiles, Wrong
from tests.chaos.fleets import Ask, ChaosFleet
from tests.chaos.kube_scheduler import KubeScheduler, answered
from tests.integration.interleaving_node import NodeInMemory, Object, uuid_of
from tests.integration.interleaving_rig import World
from tests.integration.virtual import HeldTransport, Process, Stream
from tests.speedups import with_speedups

REPLICAS = ("extender-a", "extender-b")
LONG_AGO_NS = 30 * 86_400 * 10**9
"""More than any clock here jumps, and less than this world is behind the real one."""
PODS = "/api/v1/namespaces/default/pods"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


class ChaosNode(NodeInMemory):
    """A node whose agent also sweeps, and reads what tenants write. Its files have its own clock's dates."""

    refuses = False  # whatever is sent there
    refused: int = 0

    async def admit(self, pod: Object) -> None:
        if not self.refuses:
            await super().admit(pod)
            return
        self.refused += 1
        message = "Pod was rejected: Allocate failed due to rpc error: odd, which is unexpected"
        status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
        self.world.set_status(pod, status)

    def date_files(self) -> None:
        """Give what was written since the last time this world's date in place of the real one."""
        now_ns = self.world.now_ns(self.name)
        for folder in (self.folder / "host" / "containers").glob("*/"):
            if folder.stat().st_mtime_ns - now_ns > LONG_AGO_NS:
                os.utime(folder, ns=(now_ns, now_ns))

    def work_of(self, agent: Agent) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            **super().work_of(agent),
            "sweeper": agent.sweep(),
            "refused memory": agent.refused_memory.run(),
        }


class ChaosWorld(World):
    """`step` is a little of everybody's work; `wrong` is what the checker finds."""

    node_class = ChaosNode
    nodes: dict[str, ChaosNode]  # type: ignore[assignment]

    def __init__(self, folder: Path, seed: int, fleet: ChaosFleet) -> None:
        self.asks, self.priorities = fleet.asks, fleet.priorities
        self.names = [f"app-{number}" for number in range(fleet.pods)]
        self.tampered: set[str] = set()  # uids of pods whose owner changed what is said of their cards
        self.replicas: dict[str, tuple[Extender, Process, App]] = {}
        self.frozen: dict[Process, float] = {}  # until when
        self.withdrawn_until_s: dict[Process, float] = {}
        self.disk_full_until_s = 0.0
        self._file_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._seen: tuple[Any, ...] = ()
        self._wrong: set[Wrong] = set()
        self.scheduler = KubeScheduler(self)
        super().__init__(folder, seed, fleet)
        for value in {*fleet.priorities} - {0}:
            meta = {"name": f"p{value}"}
            head = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": meta}
            self.call("POST", CLASSES, head | {"value": value})
        cards: dict[Card, CardSize] = {
            (node, index): CardSize(uuid_of(node, index), units, fleet.memory_mib(units))
            for node, sizes in fleet.cards.items()
            for index, units in enumerate(sizes)
        }
        self._checker = Checker(cards)
        self.loop.advance(2.0)
        self.rest()

    def close(self) -> None:
        self.free_disk()
        super().close()

    # -- processes -------------------------------------------------------------------------------------------

    def start_extender(self) -> None:
        """Every replica that does not live."""
        for name in REPLICAS:
            if name in self.replicas:
                continue
            process = Process(name, self.loop)
            settings = ExtenderSettings(
                policy="binpack", nominate_from=1, leader_elect=True, lease_identity=name, label_leader=False
            )
            extender = Extender(
                settings,
                KubeClient(HeldTransport(self.network, process)),
                nomination_limits=NominationLimits(room=0, spare=0, at_once=2),
                with_speedups=with_speedups(),
                clock=self.loop.time,
                now_ns=functools.partial(self.now_ns, name),
            )
            self.replicas[name] = (extender, process, extender.app())
            process.start(extender.work(), "work")
        self.loop.settle()

    def kill_replica(self, name: str) -> None:
        _, process, _ = self.replicas.pop(name)
        self.frozen.pop(process, None)
        process.kill()
        self.network.forget(process)

    def kill_agent(self, node: NodeInMemory) -> None:
        if node.process is not None:
            self.frozen.pop(node.process, None)
        node.kill_agent()
        self.loop.settle()

    def processes(self) -> Iterator[Process]:
        for _, process, _ in self.replicas.values():
            yield process
        for node in self.nodes.values():
            if node.process is not None:
                yield node.process

    def everybody_lives(self) -> None:
        for process in list(self.frozen):
            self.loop.thaw(process)
        self.frozen.clear()
        self.withdrawn_until_s.clear()
        self.network.withdrawn.clear()
        self.free_disk()
        self.start_extender()
        for node in self.nodes.values():
            node.refuses = False
            if node.agent is None:
                node.start_agent()

    def fill_disk(self, seconds: float) -> None:
        """No file grows: the system says so as it does for a disk without room."""
        self.disk_full_until_s = self.loop.time() + seconds
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._file_limit[1]))

    def withdraw(self, process: Process, code: int, seconds: float) -> None:
        """Its token, or its rights: the API server answers all that it asks by `code`. Watches go on."""
        self.network.withdrawn[process] = code
        self.withdrawn_until_s[process] = self.loop.time() + seconds

    def free_disk(self) -> None:
        self.disk_full_until_s = 0.0
        resource.setrlimit(resource.RLIMIT_FSIZE, self._file_limit)

    # -- everybody's work ------------------------------------------------------------------------------------

    def step(self) -> None:
        """A moment: some user, kube-scheduler, a kubelet, some messages, some time."""
        dice = self.dice
        draw = dice.random()
        if draw < 0.3:
            self.user_acts()
        elif draw < 0.6:
            self.scheduler_acts()
        elif draw < 0.95:
            self.kubelet_acts(self.nodes[dice.choice(sorted(self.nodes))])
        if dice.random() < 0.7:
            self.deliver_some()
        if dice.random() < 0.3:
            led = any(not extender.not_ready() for extender, _, _ in self.replicas.values())
            self.pass_time(dice.choice((0.02, 0.1, 0.3, 1.0) if led else (0.3, 1.0, 3.0)))

    def user_acts(self) -> None:
        pods = self.pods()
        there = {pod["metadata"]["name"] for pod in pods}
        if pods and self.dice.random() < 0.4:
            name = self.dice.choice(sorted(there))
            failed = [pod for pod in pods if pod["metadata"]["name"] == name and "phase" in pod["status"]]
            if failed and failed[0]["status"]["phase"] == "Failed":
                self.remove(failed[0])
            else:
                self.delete(name)
        elif missing := [name for name in self.names if name not in there]:
            self.submit(self.dice.choice(missing))

    def submit(self, name: str, **fields: Any) -> Object:
        """Create a pod that asks for one of the fleet's amounts."""
        ask: Ask = self.dice.choice(self.asks)
        if value := self.dice.choice(self.priorities):
            fields["priorityClassName"] = f"p{value}"
        pod = api_pod(name, **ask.fields(), **fields)
        del pod["metadata"]["uid"]
        return self.call("POST", PODS, pod)

    def scheduler_acts(self) -> None:
        """It looks at one pod that waits: filter, then bind where that let it pass."""
        waiting = [pod for pod in self.pods() if "nodeName" not in pod["spec"] and _stays(pod)]
        if waiting:
            self.scheduler.attempt(self.dice.choice(waiting))

    def kubelet_acts(self, node: NodeInMemory) -> None:
        """It ends what is deleted, admits what is new, or starts a container, also one that ran before."""
        if node.busy:
            return
        terminating = [
            pod for pod in self.pods() if not _stays(pod) and pod["spec"].get("nodeName") == node.name
        ]
        if terminating and self.dice.random() < 0.7:
            self._end(node, self.dice.choice(terminating))
        elif (waiting := self.waiting(node.name)) and self.dice.random() < 0.6:
            self.play(node, node.admit(self.dice.choice(waiting)))
        else:
            at_work = [key for key in node.running if key[1] == "init"]
            startable = [(uid, name) for uid in node.admitted for name in node.startable(uid)]
            fresh = [key for key in startable if key not in node.running]
            if at_work and self.dice.random() < 0.5:
                node.complete(*self.dice.choice(at_work))
            elif fresh or (startable and self.dice.random() < 0.1):
                self.play(node, node.start(*self.dice.choice(fresh or startable)))

    def _end(self, node: NodeInMemory, pod: Object) -> None:
        if pod["metadata"]["uid"] in node.admitted:
            node.finish(pod["metadata"]["uid"])
        else:
            self.remove(pod)

    def end_what_is_gone(self) -> None:
        """What kubelet does by its own list: pods that it runs and that the API server has not any more."""
        living = {pod["metadata"]["uid"] for pod in self.pods()}
        for node in self.nodes.values():
            if not node.busy:
                for uid in set(node.admitted) - living:
                    node.finish(uid)

    def deliver_some(self) -> None:
        network, dice = self.network, self.dice
        for _ in range(dice.randrange(1, 8)):
            if network.messages and dice.random() < 0.7:
                network.deliver(dice.choice(network.messages))
            elif pending := [each for each in network.streams if each.pending]:
                stream: Stream = dice.choice(pending)
                network.deliver_line(stream)

    def pass_time(self, seconds: float) -> None:
        for node in self.nodes.values():
            node.date_files()
        self.loop.advance(seconds)
        now_s = self.loop.time()
        for process, until_s in list(self.frozen.items()):
            if until_s <= now_s:
                del self.frozen[process]
                self.loop.thaw(process)
        for process, until_s in list(self.withdrawn_until_s.items()):
            if until_s <= now_s:
                del self.withdrawn_until_s[process], self.network.withdrawn[process]
        if 0.0 < self.disk_full_until_s <= now_s:
            self.free_disk()
        self.loop.settle()

    def work_calmly(self, seconds: float = 0.5) -> None:
        """So much time in which nothing goes wrong and everybody does what there is to do."""
        self.end_what_is_gone()
        for pod in self.pods():
            if _stays(pod) and "nodeName" not in pod["spec"]:
                self.scheduler.attempt(pod)
            elif not _stays(pod) and "nodeName" not in pod["spec"]:
                self.remove(pod)
        for node in self.nodes.values():
            for _ in range(4):
                self.network.calm()
                self.kubelet_acts(node)
        self.network.calm()
        self.pass_time(seconds)
        self.network.calm()

    def replaced_where_refused(self, seconds: float) -> int:
        """A kubelet refuses all, and a controller makes another pod at once: how many fail in that time."""
        node = self.nodes[self.dice.choice(sorted(self.nodes))]
        node.refuses, node.refused = True, 0
        until_s = self.loop.time() + seconds
        while self.loop.time() < until_s:
            there = {pod["metadata"]["name"]: pod for pod in self.pods()}
            for pod in there.values():
                if pod["status"].get("phase") == "Failed":
                    self.remove(pod)
            if all("nodeName" in pod["spec"] for pod in there.values() if _stays(pod)):
                missing = [name for name in self.names if name not in there]
                if missing:
                    self.submit(missing[0])
                else:
                    self.delete(self.dice.choice(sorted(there)))
            self.work_calmly()
        node.refuses = False
        return node.refused

    def tamper(self, pod: Object, metadata: Object) -> None:
        """Its owner changes annotations or labels of their pod, by a merge patch."""
        self.tampered.add(pod["metadata"]["uid"])
        path = f"{PODS}/{pod['metadata']['name']}"
        self.call("PATCH", path, {"metadata": metadata}, "application/merge-patch+json")

    # -- what is there, without the way through the API ------------------------------------------------------

    def pods(self) -> list[Object]:
        return [entry.obj for entry in self.cluster.store.shelf("pods").items.values()]

    # -- judging ---------------------------------------------------------------------------------------------

    def wrong_ledgers(self) -> set[Wrong]:
        """Of every replica, the standby as well: it leads as soon as the other is gone."""
        inspected = {}
        for name, (_, process, app) in self.replicas.items():
            asked = process.start(answered(app, HttpRequest("GET", "/gpushare-scheduler/inspect")), "inspect")
            self.loop.settle()
            process.tasks.remove(asked)
            inspected[name] = asked.result()
        return self._checker.check_ledgers(self.pods(), inspected)

    def wrong(self) -> set[Wrong]:
        """Raises `Breach` for what must never be, and what a living process died of."""
        seen = (self.cluster.store.version, *(node.saved for node in self.nodes.values()))
        if seen == self._seen:  # nothing that could have become wrong
            return self._wrong
        for process in self.processes():
            process.check()
        files = {
            name: NodeFiles(
                node.saved,
                node.folder / "host" / "containers",
                {key: running.ids for key, running in node.running.items()},
            )
            for name, node in self.nodes.items()
        }
        moved = self.tampered | {pod["metadata"]["uid"] for pod in self.pods() if self.network.moved(pod)}
        self._seen, self._wrong = seen, self._checker.check(self.pods(), files, moved)
        return self._wrong


def _stays(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"]
