"""The agent process: wires everything and starts named tasks.

kubelet is told of the cards only when an answer to its first question can be right: the cards, the node's
rules and the node's pods are known, and what enforces the limits is in place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import gpuslice
from gpuslice.adapters.gpu.nvml import NvmlSource
from gpuslice.adapters.gpu.recorded import RecordedSource
from gpuslice.adapters.gpu.source import GpuSource
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from gpuslice.adapters.kubelet.deviceplugin import PluginAddress, PluginServer
from gpuslice.adapters.kubelet.podresources import PodResources
from gpuslice.adapters.web.app import Probes, get, make_app
from gpuslice.adapters.web.connection import App
from gpuslice.adapters.web.exposition import page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.messages import Request, Response, json_answer
from gpuslice.adapters.web.serve import Listen, run, until_stopped, work_until
from gpuslice.apps.agent.bookkeeper import Bookkeeper, KubeletBook
from gpuslice.apps.agent.cards import CardKeeper
from gpuslice.apps.agent.desk import Desk
from gpuslice.apps.agent.devices import DeviceList
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.health import Health
from gpuslice.apps.agent.library import IsolationMissingError
from gpuslice.apps.agent.metrics import Counters
from gpuslice.apps.agent.node import memory_unit
from gpuslice.apps.agent.nodekeeper import NodeKeeper
from gpuslice.apps.agent.offer import Offer
from gpuslice.apps.agent.plugin import GpuMemoryPlugin, PluginOptions
from gpuslice.apps.agent.pods import NODE_PODS, AgentPod, node_pod
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.start import Starter
from gpuslice.apps.agent.state import agent_state, families
from gpuslice.apps.agent.turn import Turn, serving_in_turn
from gpuslice.apps.agent.writer import Writer
from gpuslice.apps.settings import shown
from gpuslice.core.contract import EXCLUSIVE_GPU, GPU_MEM, PLUGIN_ENDPOINT
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
        book: KubeletBook | None = None,
        boot: str | None = None,
    ) -> None:
        self.settings = settings
        unit, self._warning = memory_unit(settings.memory_unit)
        name = settings.node_name
        self.counters = Counters()
        self.turn = Turn(Path(settings.root))
        self.desk = Desk(Node(name, ()), place_unplaced=settings.place_unplaced)
        self.devices = DeviceList()
        self.offer = Offer(self.desk, self.devices, lambda: self.node.rules)
        host_root = Path(settings.host_root) if settings.host_root else None
        self.folders = Folders(Path(settings.root), host_root, boot)
        self._writer = Writer(client, name)
        self.node = NodeKeeper(
            client,
            self._writer,
            name,
            lambda: self.cards.cards,
            hot=settings.hot_reload_isolation,
            new_pods=settings.new_pods,
        )
        self.cards = CardKeeper(
            source,
            self._writer,
            self._cards_changed,
            unit=unit,
            health=Health(settings.recovery_s),
            unhealthy_file=Path(settings.unhealthy_file),
            every_s=settings.inventory_s,
            follow_events=settings.health_check,
            may_write=self.turn.mine.is_set,
        )
        self.bookkeeper = Bookkeeper(
            self.desk,
            book or PodResources(Path(settings.pod_resources_socket)),
            self._writer,
            self.folders,
            self.counters,
            every_s=settings.reconcile_s,
            sweep_after_s=settings.sweep_after_s,
        )
        self._pods: Reflector[AgentPod] = Reflector(
            client, NODE_PODS, self._pod_changed, fields=f"spec.nodeName={name}"
        )
        self.plugin = self._make_plugin(unit)
        self.server = PluginServer(self.plugin, _address(settings))
        self._source = source
        self._holding_back = "starting"
        self._told = ""

    def _make_plugin(self, unit: str) -> GpuMemoryPlugin:
        settings = self.settings
        return GpuMemoryPlugin(
            self.desk,
            self.devices,
            folders=self.folders,
            starter=Starter(self.desk, self.bookkeeper, self.folders, lambda: self.node.rules, self.counters),
            rules=lambda: self.node.rules,
            offer=self.offer,
            look=self.bookkeeper.look,
            counters=self.counters,
            options=PluginOptions(settings.match_wait_s, unit, settings.legacy_poison_env, settings.cdi_kind),
        )

    # -- running --------------------------------------------------------------------------------------

    async def run(
        self, stopped: Awaitable[object], listening: Callable[[int], None] = lambda _: None
    ) -> None:
        """Serve until `stopped`; `listening` hears the port of health and metrics.

        Raises `TooManyUnitsError` when the cards cannot be told to kubelet in the unit of the settings.
        """
        if self._warning:
            _log.warning(self._warning)
        web = self._serve_web(listening)
        tasks = {**self.upkeep(), "device plugin": self._serve_kubelet(), "web": web}
        try:
            await work_until(stopped, tasks)
        finally:
            await self._source.close()
        if self.settings.node_label and self.turn.mine.is_set():
            await self.node.leave(self.settings.node_label, self.desk.holders())

    def upkeep(self) -> dict[str, Coroutine[Any, Any, None]]:
        """All that goes on beside kubelet's calls, by name."""
        return {
            "turn": self.turn.hold(),
            "node": self.node.watch(),
            "node object": self._in_turn(self.node.keep),
            "pods": self._pods.run(),
            "cards": self.cards.watch(),
            "fault reports": self.cards.follow_events(),
            "kubelet's book": self._keep_book(),
        }

    async def _keep_book(self) -> None:
        await self._pods.synced.wait()
        await self._in_turn(self.bookkeeper.run)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self.turn.mine.wait()
        await work()

    async def _serve_web(self, listening: Callable[[int], None]) -> None:
        listen = Listen(self.settings.port, self.settings.host)
        async with serving_in_turn(self._app(), listen, self.turn) as port:
            listening(port)
            await asyncio.Event().wait()

    async def _serve_kubelet(self) -> None:
        while True:
            await self.until_servable()
            await self.turn.mine.wait()
            await self.until_servable()  # much may have changed since
            await self.offer.look()
            with self.turn.serving():
                await work_until(self.offer.keep_until_ended(), {"plugin server": self.server.run()})

    async def until_servable(self) -> None:
        """Wait until kubelet's questions can be answered rightly."""
        await self.node.read.wait()
        await self._pods.synced.wait()
        while reason := self._obstacle():
            if reason != self._holding_back:
                _log.warning("not registering with kubelet", extra={"reason": reason})
            self._holding_back = reason
            await self._tell_waiting(reason)
            await asyncio.sleep(RETRY_S)
        self._holding_back = ""

    async def _tell_waiting(self, reason: str) -> None:
        if reason != self._told and self.turn.mine.is_set() and reason == self._in_use_whole():
            await self._writer.tell_node("GPUModeWaits", reason, warning=True)
            self._told = reason

    def _obstacle(self) -> str:
        """Why kubelet must not be told of the cards yet; "" when it may."""
        if self.offer.ended:
            return "the node's labels say that its cards are not shared"
        if self.offer.unknown and self.turn.mine.is_set():
            return self.bookkeeper.problem
        if not self.desk.node.cards:
            return self.cards.problem or "there are no cards"
        if self.node.rules.shared and (reason := self._in_use_whole()):
            return reason
        try:
            self.folders.library.install(self.settings.library)
            self.folders.library.check()
        except (IsolationMissingError, OSError) as error:
            return str(error) if self.node.rules.isolation else ""
        return ""

    def _in_use_whole(self) -> str:
        """Why parts of cards would be parts of cards that somebody has as a whole."""
        if holders := self.desk.holders_of_whole_cards():
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
        """SIGHUP, as the vendor's plugin takes it."""
        self.server.register_again()
        self.bookkeeper.look()

    # -- what changes ---------------------------------------------------------------------------------

    def _pod_changed(self, change: Change[AgentPod]) -> None:
        pod = change.object
        if pod is None:
            return
        if change.kind is ChangeKind.DELETED:
            self.desk.pod_gone(pod.metadata.uid)
        else:
            self.desk.pod_changed(node_pod(pod))

    async def _cards_changed(self) -> None:
        indices = frozenset(self.cards.reasons())
        self.desk.set_cards(self.cards.cards, indices)
        await self.devices.update(self.cards.cards, self.cards.unhealthy_uuids())
        self.node.look()

    # -- what is told ---------------------------------------------------------------------------------

    def not_ready(self) -> str:
        """Why kubelet does not know our cards; "" when it does, or will once the agent before us ends."""
        if self._holding_back or not self.turn.mine.is_set():
            return self._holding_back
        return "" if self.server.registered else "kubelet has not registered the plugin yet"

    def _app(self) -> App:
        probes = Probes(gpuslice.__version__, self.not_ready, page_of(lambda: families(self)))
        return make_app(probes, [get("/debug/state", self._state)])

    def _state(self, _: Request) -> Response:
        return json_answer(agent_state(self, shown(self.settings), time.monotonic()))


def _address(settings: AgentSettings) -> PluginAddress:
    return PluginAddress(Path(settings.device_plugin_folder), PLUGIN_ENDPOINT, GPU_MEM)


def _source(settings: AgentSettings) -> GpuSource:
    if settings.recording:
        return RecordedSource(Path(settings.recording))
    return NvmlSource(library=settings.nvml_library, timeout_s=settings.driver_timeout_s)


def start(settings: AgentSettings) -> None:
    """The process, until it is told to end."""
    configure_logs(settings.log_level)
    run(_main(settings))


async def _main(settings: AgentSettings) -> None:
    connection = connect(os.environ, kubeconfig=settings.kubeconfig)
    async with HttpTransport(connection) as transport:
        agent = Agent(settings, KubeClient(transport, manager="gpuslice-agent"), _source(settings))
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, agent.register_again)
        await agent.run(until_stopped())
