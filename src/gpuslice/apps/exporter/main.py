"""The exporter process: wires everything and starts named tasks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gpuslice.adapters.gpu.nvml import NvmlSource
from gpuslice.adapters.gpu.source import GpuSource, GpuUnavailableError
from gpuslice.adapters.gpu.telemetry import PEERS, NvmlTelemetry, Telemetry
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import ConfigError, KubeError
from gpuslice.adapters.kube.resources import CONFIG_MAPS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kubelet.podresources import DeviceAssignments, PodResources, PodResourcesError
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.serve import until_stopped, work_until
from gpuslice.adapters.web.webconfig import read_web_config
from gpuslice.apps.exporter import upstreamfile
from gpuslice.apps.exporter.book import Book, book_of, is_ours
from gpuslice.apps.exporter.clocks import ClockWindows
from gpuslice.apps.exporter.config import CounterConfig
from gpuslice.apps.exporter.dcgm import XID_FIELD
from gpuslice.apps.exporter.directory import Directory
from gpuslice.apps.exporter.extra import EXTRA_FIELDS, OWN_FIELDS
from gpuslice.apps.exporter.fields import load as load_fields
from gpuslice.apps.exporter.health import READ as HEALTH_FIELDS
from gpuslice.apps.exporter.health import Rises
from gpuslice.apps.exporter.jobs import Jobs
from gpuslice.apps.exporter.memory import set_aside_what_lives, share_one_arena
from gpuslice.apps.exporter.owners import Owners
from gpuslice.apps.exporter.pods import ApiPods, LogFolderPods
from gpuslice.apps.exporter.privilege import hidden_processes
from gpuslice.apps.exporter.renewal import LOOK_EVERY_S as RENEWAL_LOOK_EVERY_S
from gpuslice.apps.exporter.renewal import Renewal
from gpuslice.apps.exporter.sampler import Health, Sampler
from gpuslice.apps.exporter.settings import ExporterSettings, parse_devices
from gpuslice.apps.exporter.slices import DeviceSlices
from gpuslice.apps.exporter.view import View
from gpuslice.apps.exporter.web import make_app, make_legacy_app, serve_all
from gpuslice.apps.exporter.xids import Xids
from gpuslice.apps.settings import shown

_log = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
EVENTS_RETRY_S = 10.0
SWITCH_EVERY_S = 0.001
"""How long the thread that samples may keep a scrape waiting; Python's own 5 ms add up over its steps."""
CONFIG_MAP_EVERY_S = 5.0


class Exporter:
    """One node's exporter around a source of samples, one of faults, and a Kubernetes client if any."""

    def __init__(
        self,
        settings: ExporterSettings,
        telemetry: Telemetry,
        source: GpuSource,
        client: KubeClient | None = None,
    ) -> None:
        self.settings = settings
        self.node = settings.node_name or platform.node()
        self.health = Health()
        self.directory = Directory()
        self.xids = Xids()
        self.clocks = ClockWindows(settings.clock_events_count_window_size / 1000)
        self.rises = Rises()
        self.jobs = Jobs(settings.hpc_job_mapping_dir)
        self._fields = load_fields()
        self.config = CounterConfig(settings.collectors, self._fields)
        if counters := upstreamfile.counters_for(settings.config_file, settings.collectors):
            self.config.use(counters, settings.config_file)
        self.owners = Owners(self.directory, Path(settings.proc))
        self._hidden = hidden_processes(settings.proc)
        self.sampler = Sampler(
            telemetry,
            self.owners,
            self.health,
            root=Path(settings.root),
            proc=None if self._hidden else Path(settings.proc),
            memory_unit=settings.memory_unit,
            chosen=parse_devices(settings.devices).cards,
        )
        self.sampler.obstacle = self._obstacle
        self.view = View(self)
        self._source = source
        self._telemetry = telemetry
        self._renewal = Renewal(Path(settings.proc) / "driver" / "nvidia" / "gpus")
        self._client = client
        self._slices = DeviceSlices(client, self.node)
        self._told: set[tuple[str, int]] = set()  # fields that a card was said not to give
        self._take_config()

    async def run(self, stopped: Awaitable[None], listening: Callable[[int], None] = lambda _: None) -> None:
        """Serve until `stopped`; `listening` hears the port of the metrics."""
        tasks = {
            "samples": self._sample(),
            "driver": self._keep_driver(),
            "counter file": self._watch_config(),
            "memory": set_aside_what_lives(),
        }
        if self.settings.kubernetes:
            tasks |= {"kubelet's book": self._keep_book(), "pods": self._keep_pods()}
        if self.settings.counters_of_config_map:
            await self._look_at_config_map()
            tasks["ConfigMap"] = self._watch_config_map()
        async with serve_all(self.settings, make_app(self.view), make_legacy_app(self.view)) as port:
            listening(port)
            try:
                await work_until(stopped, tasks)
            finally:
                await self._source.close()

    def shown_settings(self) -> dict[str, Any]:
        return shown(self.settings)

    # -- tasks ----------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            began_s = time.monotonic()
            await self.sampler.sample()
            snapshot = self.sampler.snapshot
            for uuid, bits in snapshot.clock_events.items():
                self.clocks.add(uuid, bits, snapshot.taken_at_s)
            if self.config.asks("DCGM_EXP_GPU_HEALTH_STATUS"):
                for card in snapshot.cards:
                    self.rises.add(card.sample.uuid, card.sample.fields, began_s)
            self._tell_unsupported()
            await asyncio.sleep(max(0.0, began_s + self.settings.interval_s - time.monotonic()))

    async def _keep_driver(self) -> None:
        """Faults are followed; the driver is opened anew by all of us when it is time."""
        while True:
            faults = asyncio.create_task(self._follow_faults(), name="faults")
            try:
                reason = await self._until_renewal(faults)
            finally:
                faults.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await faults
            await self._source.close()
            await self._telemetry.renew()
            self._renewal.done()
            _log.info("driver is opened anew", extra={"reason": reason})

    async def _until_renewal(self, faults: asyncio.Task[None]) -> str:
        while True:
            await asyncio.wait({faults}, timeout=RENEWAL_LOOK_EVERY_S)
            if faults.done():
                faults.result()  # it does not end by itself
            driver = self.health.readings.get("driver")
            failing = driver is not None and not driver.success
            if reason := self._renewal.reason(failing=failing, lost=bool(self.sampler.snapshot.lost)):
                return reason

    async def _follow_faults(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._source.events()) as events:
                    self.health.good("xid", 0.0)
                    async for event in events:
                        _log.warning("xid", extra={"xid": event.xid, "uuid": event.uuid})
                        self.xids.add(event.uuid, event.xid, time.time())
            except GpuUnavailableError as error:
                self.health.bad("xid", str(error))
            await asyncio.sleep(EVENTS_RETRY_S)

    async def _watch_config(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            version = self.config.version
            self.config.look()
            if self.config.version != version:
                self._take_config()

    async def _keep_book(self) -> None:
        reader = PodResources(Path(self.settings.pod_resources_kubelet_socket))
        more = frozenset(self.settings.nvidia_resource_names)
        wanted = functools.partial(is_ours, more=more)
        read: tuple[DeviceAssignments, dict[tuple[str, str], str]] | None = None
        book = Book({})
        while True:
            began_s = time.monotonic()
            try:
                found = await reader.book(wanted)
                devices = dict(await self._slices.of(found.claims))
                if read is None or read[0] is not found or read[1] != devices:
                    read, book = (found, devices), book_of(found.assignments, found.claims, devices)
                self._take_book(book, began_s)
            except PodResourcesError as error:
                self.health.bad("pod_resources", str(error), time.monotonic() - began_s)
            await asyncio.sleep(self.settings.book_interval_s)

    def _take_book(self, book: Book, began_s: float) -> None:
        self.sampler.book = book
        took_s = time.monotonic() - began_s
        if book.problems:
            self.health.bad("pod_resources", book.problems[0], took_s)
        else:
            self.health.good("pod_resources", took_s)

    async def _keep_pods(self) -> None:
        source, logs = self.settings.pod_source, Path(self.settings.pod_logs)
        if self._client is not None and source in {"auto", "api"}:
            await ApiPods(self._client, self.node, self.directory, self.health).run()
        elif source == "logs" or (source == "auto" and logs.is_dir()):  # noqa: ASYNC240
            await LogFolderPods(logs, self.directory, self.health).run()
        elif source != "off":
            self.health.bad("pods", "neither an API server nor kubelet's log folders")

    # -- what changes ---------------------------------------------------------------------------------

    async def _watch_config_map(self) -> None:
        """By asking again: a role that lets upstream read it lets nobody watch it."""
        while True:
            await asyncio.sleep(CONFIG_MAP_EVERY_S)
            await self._look_at_config_map()

    async def _look_at_config_map(self) -> None:
        """The counters of a ConfigMap; those in force stay when it cannot be read."""
        namespace, _, name = self.settings.configmap_data.partition(":")
        try:
            if self._client is None:
                raise ConfigError("no API server is known")
            found = await self._client.get(CONFIG_MAPS, name, namespace)
            text = (found.data or {}).get("metrics")
            if text is None:
                raise ConfigError('it has no key "metrics"')
        except (KubeError, ConfigError) as error:
            self.health.bad("config_map", f"{namespace}/{name}: {error}")
            return
        self.health.good("config_map", 0.0)
        if self.config.use(text, f"ConfigMap {namespace}/{name}"):
            self._take_config()

    def _tell_unsupported(self) -> None:
        """Each field of the counter file that a card cannot give, once."""
        names = {each.field.id: each.name for each in self.config.file.counters if each.field}
        for card in self.sampler.snapshot.cards:
            for number, reason in card.sample.unsupported.items():
                known = (card.sample.uuid, number)
                if number in names and number != XID_FIELD and known not in self._told:
                    self._told.add(known)
                    extra = {"field": names[number], "gpu": card.sample.index, "reason": reason}
                    _log.warning("field not supported by this card", extra=extra)

    def _take_config(self) -> None:
        self.config.look()
        fields = {each.field.id: each.field.nvml_field for each in self.config.file.counters if each.field}
        own = dict.fromkeys(OWN_FIELDS, "")
        if self.config.asks("DCGM_EXP_GPU_HEALTH_STATUS"):
            by_id = {each.id: each.nvml_field for each in self._fields.values()}
            fields = {number: by_id[number] for number in HEALTH_FIELDS} | fields
        if self.config.asks("DCGM_EXP_P2P_STATUS"):
            own[PEERS] = ""
        self.sampler.wanted = {**EXTRA_FIELDS, **own, **fields}

    def _obstacle(self) -> str:
        """Why no process can be given to a container; "" when that can be done."""
        if not self.settings.kubernetes:
            return ""
        if self._hidden:
            return self._hidden
        return "" if self.directory.known else "pods of this node are not known"


async def _main(settings: ExporterSettings) -> None:
    library, timeout_s = settings.nvml_library, settings.driver_timeout_s
    telemetry = NvmlTelemetry(library=library, timeout_s=timeout_s)
    source = NvmlSource(library=library, timeout_s=timeout_s)
    try:
        wanted = settings.kubernetes and settings.pod_source in {"auto", "api"}
        wanted = wanted or settings.counters_of_config_map
        connection = connect(os.environ, kubeconfig=settings.kubeconfig) if wanted else None
    except ConfigError as error:
        if settings.pod_source == "api" or settings.kubeconfig:
            raise
        _log.warning("no API server", extra={"reason": str(error)})
        connection = None
    if connection is None:
        await Exporter(settings, telemetry, source).run(until_stopped())
        return
    async with HttpTransport(connection) as transport:
        client = KubeClient(transport, manager="gpuslice-exporter")
        await Exporter(settings, telemetry, source, client).run(until_stopped())


def _check(settings: ExporterSettings) -> None:
    if settings.web_config_file:
        read_web_config(Path(settings.web_config_file))


def start(settings: ExporterSettings) -> None:
    """The process, until it is told to end."""
    configure_logs("debug" if settings.debug else "info")
    _check(settings)
    share_one_arena()
    sys.setswitchinterval(SWITCH_EVERY_S)
    asyncio.run(_main(settings))  # not on uvloop: a scrape now and then gains nothing, and it is 2 MiB
