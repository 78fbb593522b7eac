"""``gpuslice switch``: removes the device plugin for whole cards from a node, or restores it.

That plugin is either a static pod of the vendor's clusters, whose manifest is moved aside and back, or a
DaemonSet of NVIDIA's GPU operator, controlled by a node label. It is restored only when no pod holds a part
of a card any more: kubelet does not know about parts and would give such a card out whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import gpuslice
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import NODES
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.web.app import Probes, make_app
from gpuslice.adapters.web.exposition import page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.serve import Listen, run, serving, until_stopped, work_until
from gpuslice.apps.agent.library import replace_file
from gpuslice.apps.agent.pods import NODE_PODS, node_pod
from gpuslice.apps.agent.settings import SwitchSettings
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.contract import LABEL_OTHER_PLUGIN

_log = logging.getLogger(__name__)


class StaticPod:
    """The vendor's plugin for whole cards as a file that kubelet watches. The messages are the vendor's."""

    def __init__(self, manifest: Path, backup_folder: Path) -> None:
        self._manifest = manifest
        self._backup = backup_folder / manifest.name

    def remove(self) -> str:
        """Move the manifest aside; returns what was done. Raises `OSError`."""
        name = self._manifest.name
        if not self._manifest.exists():
            return f"Skip removing {name}, because it doesn't exist."
        self._backup.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._backup, self._manifest.read_bytes(), 0o600, lasting=True)
        self._manifest.unlink()  # not a rename: the two folders may be different mounts
        return f"Finish removing {name}."

    def recover(self) -> str:
        """Restore it unless it is there; returns what was done. Raises `OSError`."""
        name = self._manifest.name
        if self._manifest.exists():
            return f"Skip recovering {name}, because it already exist."
        if not self._backup.exists():
            return f"No {name} to recover."
        replace_file(self._manifest, self._backup.read_bytes(), 0o600, lasting=True)
        return f"Finish recovering {name}."


class Switch:
    """Keeps one node in the mode of the settings."""

    def __init__(self, settings: SwitchSettings, client: KubeClient) -> None:
        self.waits = "starting"  # why the mode is not reached yet, "" if it is
        self._settings = settings
        self._client = client
        self._writer = Writer(client, settings.node_name)
        self._static = StaticPod(Path(settings.manifest), Path(settings.backup_folder))
        self._last_logged = ""

    async def run(
        self, stopped: Awaitable[object], listening: Callable[[int], None] = lambda _: None
    ) -> None:
        async def keep() -> None:
            while True:
                try:
                    await self._step()
                except (KubeError, OSError) as error:
                    self.waits = str(error)
                    _log.warning("mode not switched, will try again", extra={"error": str(error)})
                await asyncio.sleep(self._settings.every_s)

        app = make_app(Probes(gpuslice.__version__, lambda: self.waits, page_of(tuple)))
        async with serving(app, Listen(self._settings.port, self._settings.host)) as port:
            listening(port)
            await work_until(stopped, {"switch": keep(), "events": self._writer.events.run()})

    async def _step(self) -> None:
        if self._settings.to == "shared":
            self._log_once(self._static.remove())
            await self._label("false")
        else:  # not while pods of this node hold or wait for parts of its cards
            fields = f"spec.nodeName={self._settings.node_name}"
            found = await self._client.list_as(NODE_PODS, node_pod, fields=fields, version="0")
            if holders := sorted(pod.view.key for pod in found.items or () if pod.holds_slices):
                waits = (
                    f"{len(holders)} pods still hold parts of its cards ({', '.join(holders[:5])}); "
                    "whole cards are given out again once they have ended"
                )
                if waits != self.waits:
                    self._writer.node_event("GPUModeWaits", waits, warning=True)
                self.waits = waits
                self._log_once(waits)
                return
            self._log_once(self._static.recover())
            await self._label("true")
        self.waits = ""

    async def _label(self, value: str) -> None:
        node = await self._client.get(NODES, self._settings.node_name)
        before = (node.metadata.labels or {}).get(LABEL_OTHER_PLUGIN)
        if before in ("true", "false") and before != value:
            patch = {"metadata": {"labels": {LABEL_OTHER_PLUGIN: value}}}
            await self._client.merge_patch(NODES, self._settings.node_name, patch)
            self._log_once(f"Set label {LABEL_OTHER_PLUGIN}={value}.")

    def _log_once(self, words: str) -> None:
        if words != self._last_logged:
            _log.info(words)
        self._last_logged = words


def start(settings: SwitchSettings) -> None:
    """Run the process until it is told to end."""

    async def main() -> None:
        connection = connect(os.environ, kubeconfig=settings.kubeconfig)
        async with HttpTransport(connection) as transport:
            client = KubeClient(transport, manager="gpuslice-switch")
            await Switch(settings, client).run(until_stopped())

    configure_logs(settings.log_level)
    run(main())
