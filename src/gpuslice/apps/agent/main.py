"""The agent process: wires everything together and starts named tasks.

The plugin registers with kubelet only once it can answer its first question correctly: the cards, the node's
rules and the node's pods are known, and what enforces the limits is in place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import gpuslice
from gpuslice.adapters.gpu.memory_limits import MemoryLimiter
from gpuslice.adapters.gpu.nvml import NvmlSource
from gpuslice.adapters.gpu.recorded import RecordedSource
from gpuslice.adapters.gpu.source import GpuSource
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.transport import HttpTransport, TimedTransport
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from gpuslice.adapters.kubelet.deviceplugin import PluginAddress, PluginServer
from gpuslice.adapters.kubelet.podresources import PodResources
from gpuslice.adapters.otlp.exporter import exporter_to
from gpuslice.adapters.web.app import Probes, for_operators, get, make_app
from gpuslice.adapters.web.clients import App
from gpuslice.adapters.web.exposition import Family, MetricKind, page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, json_answer
from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.adapters.web.serve import Listen, run, until_stopped, work_until
from gpuslice.apps.agent.active_lock import ActiveLock, serving_once_free
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.cards import CardMonitor
from gpuslice.apps.agent.device_list import DeviceList, memory_unit
from gpuslice.apps.agent.dra.service import ClaimService
from gpuslice.apps.agent.driver_limits import DriverLimits
from gpuslice.apps.agent.folder_upkeep import FileUpkeep
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.lender import Lender
from gpuslice.apps.agent.library import IsolationMissingError
from gpuslice.apps.agent.node_reconciler import NodeReconciler
from gpuslice.apps.agent.orphans import Orphans
from gpuslice.apps.agent.parking.parker import Parker
from gpuslice.apps.agent.plugin import GpuMemoryPlugin, plugin_options
from gpuslice.apps.agent.pods import NODE_PODS, AgentPod, node_pod
from gpuslice.apps.agent.reconciler import AssignmentSource, Reconciler
from gpuslice.apps.agent.refused_memory import RefusedMemory
from gpuslice.apps.agent.region_file_system import RegionFileSystemError
from gpuslice.apps.agent.resizer import Resizer
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.status import AgentStatus, Counters
from gpuslice.apps.agent.sweeper import Sweeper
from gpuslice.apps.agent.traced_plugin import TracedPlugin
from gpuslice.apps.agent.units_in_force import UnitsInForce
from gpuslice.apps.agent.upkeep import Upkeep
from gpuslice.apps.agent.watchdog import Watchdog
from gpuslice.apps.agent.writer import Writer
from gpuslice.apps.settings import shown
from gpuslice.core.contract import AGENT_COMPONENT, EXCLUSIVE_GPU, PLUGIN_ENDPOINT
from gpuslice.core.model import Node

_log = logging.getLogger(__name__)

RETRY_S = 0.2


class Agent:
    """Everything of one node's agent around a Kubernetes client and a source of cards."""

    def __init__(
        self,
        settings: AgentSettings,
        client: KubeClient,
        source: GpuSource,
        kubelet: AssignmentSource | None = None,
        *,
        limiter: MemoryLimiter | None = None,
        counters: Counters | None = None,
        boot: str | None = None,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.settings = settings
        unit, self._warning = memory_unit(settings.memory_unit)
        name, root, every_s = settings.node_name, Path(settings.root), settings.reconcile_s
        self.units = units = UnitsInForce(root, unit, settings.resource_names, self._holders)
        self.counters = counters or Counters()
        self.process, self.lock = ProcessMetrics(), ActiveLock(root)
        placing, node = settings.place_unplaced, Node(name, (), names=units.names)
        self.state = state = AllocationState(node, place_unplaced=placing, clock=clock, now_ns=now_ns)
        self.devices = DeviceList(state)
        self.folders = folders = _folders(settings, boot, now_ns)
        self._writer = writer = Writer(client, name, clock=clock, now_ns=now_ns)
        self.node = NodeReconciler(client, writer, state, settings, self._isolation_missing, clock=clock)
        self.cards = CardMonitor(source, state, self.devices, self.node, writer, client=client,
            lock=self.lock, units=units, settings=settings, proc=proc, clock=clock)  # fmt: skip
        self.limits = DriverLimits(state, folders, self.cards, self.node, writer, limiter=limiter,
            settings=settings, proc=proc)  # fmt: skip
        kubelet = kubelet or PodResources(Path(settings.pod_resources_socket))
        self.reconciler = Reconciler(state, kubelet, writer, self.counters, every_s=every_s, clock=clock)
        after_s = settings.sweep_after_s
        self.sweeper = Sweeper(state, self.reconciler, folders, every_s=every_s, after_s=after_s)
        self._pods: Reflector[AgentPod] = Reflector(
            client, NODE_PODS, self._pod_changed, fields=f"spec.nodeName={name}", cached=True, clock=clock
        )
        self.lender = lender = Lender(state, folders, enabled=settings.watchdog == "stop", clock=clock)
        self.plugin = GpuMemoryPlugin(
            state, self.devices, folders, self.reconciler, limits=self.limits, lender=lender,
            counters=self.counters, ask_for_news=self._pods.hurry, options=plugin_options(settings, unit),
        )  # fmt: skip
        self.spans = exporter_to(settings.otlp_endpoint, settings.otlp_headers, AGENT_COMPONENT)
        self.server = self._plugin_server()
        self.claims = ClaimService(
            client, state, folders, self.cards, self.node, writer=writer, units=units,
            lock=self.lock, settings=settings, obstacle=self._no_claims_yet,
        )  # fmt: skip
        others = (units.owned, self.claims.prepared.owned, self.lock.owned, self.limits.hook.owned)
        self.files = FileUpkeep(root, folders, others, recover=self._recover, tell=writer.not_repaired)
        self.watchdog = Watchdog(source, state, folders, writer, lender=lender,
            counters=self.counters, settings=settings, proc=proc)  # fmt: skip
        self.parker = Parker(source, state, lender, self.watchdog, writer, cards=self.cards,
            counters=self.counters, settings=settings, proc=proc, clock=clock)  # fmt: skip
        self.resizer = Resizer(state, lender, writer, self.reconciler.wake)
        self.refused_memory = RefusedMemory(state, folders, writer)
        self.orphans = Orphans(state, self.reconciler, folders, self.node, writer, every_s=every_s, proc=proc)
        self._source = source
        self._obstacle = "starting"  # why the plugin must not register with kubelet yet
        self._reported = ""

    def _plugin_server(self) -> PluginServer:
        folder, resource = Path(self.settings.device_plugin_folder), self.units.names.memory
        plugin = TracedPlugin(self.plugin, self.state, self.spans) if self.spans else self.plugin
        address, observe = PluginAddress(folder, PLUGIN_ENDPOINT, resource), self.counters.calls.observe
        return PluginServer(plugin, address, observe=observe, on_kubelet=self.node.kubelet_answers)

    def _pod_changed(self, change: Change[AgentPod]) -> None:
        if change.object is None:
            return
        uid = change.object.metadata.uid
        if change.kind is ChangeKind.DELETED:
            self.state.pod_gone(uid)
            return
        before, now = self.state.pod(uid), node_pod(change.object)
        self.state.pod_changed(now)
        if before is not None and before.said != now.said and self.state.due_repairs(uid):
            self.reconciler.wake()  # somebody else changed its annotations

    def _holders(self) -> list[str] | None:
        """Who holds a part of a card; None before that is known."""
        if not self._pods.synced.is_set():
            return None
        return self.state.holders() + [f"claim {each.allocation.key}" for each in self.claims.prepared.all()]

    def _recover(self) -> bool:
        """Learn what running containers were given, whose folders may be lost; whether that is known yet."""
        self.claims.prepared.all()
        if not self._pods.synced.is_set() or self.reconciler.problem or self._isolation_missing():
            return False
        self.plugin.recover()
        return True

    # -- running --------------------------------------------------------------------------------------

    async def run(
        self, stopped: Awaitable[object], listening: Callable[[int], None] = lambda _: None
    ) -> None:
        """Serve until `stopped`; `listening` is called with the port of health and metrics.

        Raises `TooManyUnitsError` if the cards are too many devices for kubelet in this unit.
        """
        if self._warning:
            _log.warning(self._warning)

        async def serve_web() -> None:
            listen = Listen(self.settings.port, self.settings.host)
            app = self._app()
            async with self.process.measured(), serving_once_free(app, listen, self.lock) as port:
                listening(port)
                await asyncio.Event().wait()

        async def serve_kubelet() -> None:
            while True:
                await self.until_servable()
                await self.lock.held.wait()
                await self.until_servable()  # much may have changed since
                self.state.node = replace(self.state.node, names=self.units.names)
                self.server.offer(self.units.names.memory)
                await self.devices.refresh()
                with self.lock.serving():
                    leaving = self.devices.refresh_while(lambda: self.units.names == self.state.node.names)
                    await work_until(leaving, {"plugin server": self.server.run()})

        active = self.lock.held
        tasks = {
            **self.upkeep(),
            "sweeper": self.sweep(),
            "shared files": self.folders.shared.run(),
            "files": _after(self.files.run, active),
            "lend": _after(self.lender.run, self._pods.synced, active),
            "park": _after(self.parker.run, self._pods.synced, active),
            "resize": _after(self.resizer.run, self._pods.synced, active),
            "driver's limits": _after(self.limits.run, self._pods.synced, active),
            "refused memory": _after(self.refused_memory.run, active),
            "device plugin": serve_kubelet(),
            # of plugin and claims, one waits until nobody holds a part of a card by the other
            "claims": _after(self.claims.run, self.node.read, self._pods.synced, active),
            "web": serve_web(),
        }
        if self.settings.watchdog != "off":
            tasks["watchdog"] = _after(self.watchdog.run, active)
        if self.spans is not None:
            tasks["spans"] = self.spans.run()
        try:
            await work_until(stopped, tasks)
        finally:
            await self._source.close()
        if self.settings.node_label and self.lock.held.is_set():
            await self.node.leave(self.settings.node_label, self.state.holders())

    def upkeep(self) -> dict[str, Coroutine[Any, Any, None]]:
        """All tasks besides kubelet's calls, by name."""
        return {
            "active lock": self.lock.hold(),
            "node": self.node.watch(),
            "node object": _after(self.node.upkeep.run, self.lock.held),
            "pods": self._pods.run(),
            "cards": self.cards.watch(),
            "record of cards": _after(self.cards.record, self.lock.held),
            "events": self._writer.events.run(),
            "fault reports": self.cards.follow_events(),
            "orphans": _after(self.orphans.run, self._pods.synced, self.lock.held),
            "device assignments": _after(self.reconciler.run, self._pods.synced, self.lock.held),
        }

    async def sweep(self) -> None:
        """Sweep folders, once it is known which pods live here and what kubelet lists."""
        await _after(self.sweeper.run, self._pods.synced, self.lock.held)

    async def until_servable(self) -> None:
        """Wait until kubelet's questions can be answered correctly."""
        await self.node.read.wait()
        await self._pods.synced.wait()
        while reason := self._find_obstacle():
            if reason != self._obstacle:
                _log.warning("not registering with kubelet", extra={"reason": reason})
            self._obstacle = reason
            if reason == self._in_use_whole() and reason != self._reported and self.lock.held.is_set():
                self._writer.node_event("GPUModeWaits", reason, warning=True)
                self._reported = reason
            await asyncio.sleep(RETRY_S)
        self._obstacle = ""

    def _find_obstacle(self) -> str:
        """Why the plugin must not register with kubelet yet; "" when it may."""
        rules = self.state.rules
        if self.devices.needless:
            return "the node's labels say that its cards are not shared"
        if not rules.shared and self.state.assignments is None and self.lock.held.is_set():
            return self.reconciler.problem
        if not self.state.node.cards:
            return self.cards.problem or "there are no cards"
        if rules.shared and (reason := self._in_use_whole() or self.claims.holders()):
            return reason
        reason = self._isolation_missing()
        return reason if rules.isolation else ""

    def _no_claims_yet(self) -> str:
        """Why no part of a card may be given out by a claim yet; "" if it may."""
        if not self.state.node.cards:
            return self.cards.problem or "there are no cards"
        if holders := self.state.holders():
            return (
                f"{len(holders)} pods hold parts of its cards by the device plugin "
                f"({', '.join(holders[:5])}); claims are served once they have ended"
            )
        return self._in_use_whole() or self._isolation_missing()

    def _isolation_missing(self) -> str:
        """What is missing of that which enforces limits; "" if nothing is."""
        try:
            if not self.folders.library.version:
                writes = self.settings.install_library
                self.folders.library.install(self.settings.library, writes=writes)
            self.folders.check()
        except (IsolationMissingError, RegionFileSystemError, OSError) as error:
            return str(error)
        return ""

    def _in_use_whole(self) -> str:
        """Which cards somebody has as a whole, so that no parts of them can be given out."""
        pods = self.state.pods()
        if holders := sorted(pod.view.key for pod in pods if pod.whole and not pod.view.finished):
            return (
                f"{len(holders)} pods hold whole cards of this node ({', '.join(holders[:5])}); "
                f"its cards are shared once they have ended"
            )
        if count := self.node.offered_whole():
            return (
                f"another device plugin gives out {count} {EXCLUSIVE_GPU} of this node; its cards are shared "
                f"once that plugin is taken off the node"
            )
        return ""

    def register_again(self) -> None:
        """Called on SIGHUP, like the vendor's plugin."""
        self.server.register_again()
        self.reconciler.wake()

    # -- what others see --------------------------------------------------------------------------------

    def not_ready(self) -> str:
        """Why kubelet does not know our cards; "" if it does, or will once the previous agent ends."""
        if self.state.rules.claims:
            return self.claims.not_ready() if self.lock.held.is_set() else ""
        if self._obstacle or not self.lock.held.is_set():
            return self._obstacle
        return "" if self.server.registered else "kubelet has not registered the plugin yet"

    def status(self) -> AgentStatus:
        return AgentStatus(
            self.state,
            self.server.registered,
            self.server.registrations,
            self.not_ready(),
            self.devices.counts(),
            self.cards.reasons(),
            self.reconciler.without_devices,
            self.watchdog.containers_past_limit,
            tuple(self.watchdog.tiers.tiers()),
            dict(chain.from_iterable(each.problems.items() for each in self._upkeeps())),
            self.units.waits,
            self.cards.driver_version,
            {card.uuid: self.limits.problem(card.uuid) for card in self.cards.cards},
            self.cards.problem,
            self.reconciler.problem,
        )

    def _upkeeps(self) -> tuple[Upkeep, ...]:
        return self.node.upkeep, self.cards.upkeep, self.claims.publisher.upkeep, self.files

    def _app(self) -> App:
        def families() -> Iterator[Family]:
            yield from self.counters.families()
            yield from self.status().families()
            about = "Since the watch of the node's pods said anything; a bookmark comes each minute."
            silent_s = round(self._pods.silent_s(), 3)
            yield Family("gpuslice_agent_watch_silent_seconds", MetricKind.GAUGE, about, [("", silent_s)])

        def debug_state(_: HttpRequest) -> HttpResponse:
            return json_answer(self.status().as_json(shown(self.settings), time.monotonic()))

        probes = Probes(gpuslice.__version__, self.not_ready, page_of(families), self.process)
        return make_app(probes, [for_operators(get("/debug/state", debug_state))])


def _folders(settings: AgentSettings, boot: str | None, now_ns: Callable[[], int]) -> Folders:
    host_root = Path(settings.host_root) if settings.host_root else None
    bound = settings.region_file_system
    return Folders(Path(settings.root), host_root, boot, bound_regions=bound, now_ns=now_ns)


async def _after(work: Callable[[], Awaitable[None]], *events: asyncio.Event) -> None:
    for event in events:
        await event.wait()
    await work()


def start(settings: AgentSettings) -> None:
    """Run the process until it is told to end."""

    async def main() -> None:
        nvml = NvmlSource(library=settings.nvml_library, timeout_s=settings.driver_timeout_s)
        source: GpuSource = RecordedSource(Path(settings.recording)) if settings.recording else nvml
        limiter = None if settings.recording else nvml
        connection = connect(os.environ, kubeconfig=settings.kubeconfig)
        async with HttpTransport(connection) as transport:
            counters = Counters()
            client = KubeClient(TimedTransport(transport, counters.api.observe), manager="gpuslice-agent")
            agent = Agent(settings, client, source, limiter=limiter, counters=counters)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, agent.register_again)
            await agent.run(until_stopped())

    configure_logs(settings.log_level)
    run(main())
