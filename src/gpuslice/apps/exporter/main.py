"""The exporter process: wires everything together and starts named tasks.

One tick: `Sampler.sample` queries the driver, `SnapshotBuilder` makes cards from the answer, and `NodeState`
holds them. A scrape: `MetricsPage.render` makes families from that state, and bytes from the families.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpuslice.adapters.gpu.nvml import NvmlSource
from gpuslice.adapters.gpu.source import GpuSource
from gpuslice.adapters.gpu.telemetry import NvmlTelemetry, Telemetry
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import ConfigError
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kubelet.podresources import PodResources, PodResourcesError
from gpuslice.adapters.malloc import share_one_arena
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.adapters.web.serve import tell_stacks_on_signal, until_stopped, work_until
from gpuslice.adapters.web.webconfig import WebConfigFile
from gpuslice.apps.exporter.activity import KEEP_EVERY_S
from gpuslice.apps.exporter.dcgm import XID_FIELD
from gpuslice.apps.exporter.device_grants import (
    DeviceSlices,
    claim_records,
    claimed_parts,
    grants_of,
    is_card_resource,
)
from gpuslice.apps.exporter.driver import keep_driver_open
from gpuslice.apps.exporter.memory import set_aside_what_lives
from gpuslice.apps.exporter.node_pods import follow_api, follow_log_folders
from gpuslice.apps.exporter.node_state import NodeState, initial_state
from gpuslice.apps.exporter.owners import hidden_processes
from gpuslice.apps.exporter.page import MetricsPage
from gpuslice.apps.exporter.sampler import Sampler
from gpuslice.apps.exporter.settings import ExporterSettings
from gpuslice.apps.exporter.web import make_app, make_legacy_app, serve_all

_log = logging.getLogger(__name__)
COUNTER_FILE_EVERY_S = 2.0
CONFIG_MAP_EVERY_S = 5.0
SWITCH_EVERY_S = 0.001
"""How long the sampling thread may delay a scrape; Python's own 5 ms add up over its steps."""


class Exporter:
    """One node's exporter around a source of samples, one of faults, and possibly a Kubernetes client."""

    def __init__(
        self,
        settings: ExporterSettings,
        telemetry: Telemetry,
        source: GpuSource,
        client: KubeClient | None = None,
    ) -> None:
        self.settings = settings
        self.state = initial_state(settings, settings.node_name or platform.node())
        self._telemetry = telemetry
        self._source = source
        self._client = client

    async def run(self, stopped: Awaitable[None], listening: Callable[[int], None] = lambda _: None) -> None:
        """Serve until `stopped`; `listening` is called with the port of the metrics."""
        settings, state, client = self.settings, self.state, self._client
        self._try_activity(state.activity.load)
        drivers_cards = Path(settings.proc) / "driver" / "nvidia" / "gpus"
        tasks = {
            "samples": self._take_samples(),
            "driver": keep_driver_open(
                self._source, self._telemetry, state, drivers_cards, settings.interval_s
            ),
            "counter file": self._follow_counter_file(),
            "memory": set_aside_what_lives(),
            "activity": self._keep_activity(),
        }
        if settings.kubernetes:
            tasks["device assignments"] = self._follow_device_assignments()
            logs = Path(settings.pod_logs)
            if client is not None and settings.pod_source in {"auto", "api"}:
                tasks["pods"] = follow_api(client, state.node, state.pods, state.collectors)
            elif settings.pod_source == "logs" or (settings.pod_source == "auto" and logs.is_dir()):  # noqa: ASYNC240
                tasks["pods"] = follow_log_folders(logs, state.pods, state.collectors)
            elif settings.pod_source != "off":
                state.collectors.bad("pods", "neither an API server nor kubelet's log folders")
        if settings.counters_of_config_map:
            await state.counters.poll_config_map(client, settings.configmap_data, state.collectors)
            tasks["ConfigMap"] = self._follow_config_map()
        page, process = MetricsPage(settings, state), ProcessMetrics()
        apps = make_app(page, process), make_legacy_app(page)
        async with process.measured(), serve_all(settings, process, *apps) as port:
            listening(port)
            try:
                await work_until(stopped, tasks)
            finally:
                self._try_activity(state.activity.save)
                await self._source.close()

    async def _take_samples(self) -> None:
        hidden = hidden_processes(self.settings.proc)
        sampler = Sampler(self._telemetry, self.state, self.settings, hidden=hidden)
        logged: set[tuple[str, int]] = set()
        while True:
            began_s = time.monotonic()
            await sampler.sample()
            log_unsupported(self.state, logged)
            await asyncio.sleep(max(0.0, began_s + self.settings.interval_s - time.monotonic()))

    async def _keep_activity(self) -> None:
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            self._try_activity(self.state.activity.save)

    def _try_activity(self, act: Callable[[], None]) -> None:
        if self.state.activity.kept:
            began_s, problem = time.monotonic(), ""
            try:
                act()
            except OSError as error:
                problem = f"{self.settings.state_dir}: {error.strerror}"
            self.state.collectors.report("activity", time.monotonic() - began_s, problem)

    async def _follow_device_assignments(self) -> None:
        """What kubelet gave which container, as grants; the last ones stay while it cannot be queried."""
        settings, state = self.settings, self.state
        kubelet = PodResources(Path(settings.pod_resources_kubelet_socket))
        wanted = functools.partial(is_card_resource, more=frozenset(settings.nvidia_resource_names))
        slices = DeviceSlices(self._client, state.node)
        root = Path(settings.root)
        before: tuple[object, ...] | None = None
        while True:
            began_s = time.monotonic()
            try:
                found = await kubelet.read(wanted)
                devices = dict(await slices.of(found.claims))
                prepared = claim_records(root) if found.claims else {}
                parts = claimed_parts(found.claims, prepared, state.pods)
                beside = devices, parts, state.pods.added()
                if before is None or before[0] is not found or before[1:] != beside:
                    before = found, *beside
                    state.grants = grants_of(found.assignments, found.claims, *beside)
                problem = state.grants.problems[0] if state.grants.problems else ""
            except PodResourcesError as error:
                problem = str(error)
            state.collectors.report("pod_resources", time.monotonic() - began_s, problem)
            await asyncio.sleep(settings.pod_resources_interval_s)

    async def _follow_counter_file(self) -> None:
        while True:
            await asyncio.sleep(COUNTER_FILE_EVERY_S)
            self.state.counters.poll()

    async def _follow_config_map(self) -> None:
        """By polling: a role that lets upstream read it does not allow a watch."""
        where, state = self.settings.configmap_data, self.state
        while True:
            await asyncio.sleep(CONFIG_MAP_EVERY_S)
            await state.counters.poll_config_map(self._client, where, state.collectors)


def log_unsupported(state: NodeState, logged: set[tuple[str, int]]) -> None:
    """Each field of the counter file that a card does not have, once: `logged` remembers."""
    names = {each.field.id: each.name for each in state.counters.file.counters if each.field}
    for card in state.snapshot.cards:
        for number, reason in card.sample.unsupported.items():
            known = (card.sample.uuid, number)
            if number in names and number != XID_FIELD and known not in logged:
                logged.add(known)
                extra = {"field": names[number], "gpu": card.sample.index, "reason": reason}
                _log.warning("field not supported by this card", extra=extra)


async def serve(settings: ExporterSettings) -> None:
    """The exporter of this node's driver, with an API server if one is known."""
    library, timeout_s = settings.nvml_library, settings.driver_timeout_s
    telemetry = NvmlTelemetry(library=library, timeout_s=timeout_s)
    source = NvmlSource(library=library, timeout_s=timeout_s)
    try:
        wanted = settings.kubernetes and settings.pod_source in {"auto", "api"}
        wanted = wanted or settings.counters_of_config_map
        connection = connect(os.environ, kubeconfig=settings.kubeconfig) if wanted else None
    except ConfigError as error:
        if settings.pod_source == "api" or settings.kubeconfig or os.environ.get("KUBECONFIG"):
            raise
        _log.warning("no API server", extra={"reason": str(error)})
        connection = None
    if connection is None:
        await Exporter(settings, telemetry, source).run(until_stopped())
        return
    async with HttpTransport(connection) as transport:
        client = KubeClient(transport, manager="gpuslice-exporter")
        await Exporter(settings, telemetry, source, client).run(until_stopped())


def start(settings: ExporterSettings) -> None:
    """Run the process until it is told to end."""
    configure_logs("debug" if settings.debug else "info")
    if settings.web_config_file:
        WebConfigFile(Path(settings.web_config_file))  # reports errors before anything starts
    share_one_arena()
    sys.setswitchinterval(SWITCH_EVERY_S)
    tell_stacks_on_signal()
    asyncio.run(serve(settings))  # not on uvloop: it takes 2 MiB, and an occasional scrape gains nothing
