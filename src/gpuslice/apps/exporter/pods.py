"""Keeps the directory of the node's pods in step with the source that is there."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from gpuslice.apps.exporter.directory import Directory, LogFolders, known_pod
from gpuslice.apps.exporter.sampler import Health

_log = logging.getLogger(__name__)
LOGS_EVERY_S = 5.0


class ApiPods:
    """Pods of one node from the API server."""

    def __init__(self, client: KubeClient, node: str, directory: Directory, health: Health) -> None:
        self._directory = directory
        self._health = health
        self._reflector: Reflector[Pod] = Reflector(
            client, PODS, self._changed, fields=f"spec.nodeName={node}"
        )

    async def run(self) -> None:
        await self._reflector.run()

    def _changed(self, change: Change[Pod]) -> None:
        pod = change.object
        if pod is None:  # the first list is complete
            self._directory.known = True
            self._health.good("pods", 0.0)
        elif change.kind is ChangeKind.DELETED or pod.status.phase in {"Succeeded", "Failed"}:
            self._directory.remove(pod.metadata.uid)
        else:
            self._directory.put(known_pod(pod))


class LogFolderPods:
    """Pods of one node from the names of kubelet's log folders: needs no permission of the API."""

    def __init__(self, folder: Path, directory: Directory, health: Health) -> None:
        self._folders = LogFolders(folder)
        self._directory = directory
        self._health = health

    async def run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(LOGS_EVERY_S)

    async def _look(self) -> None:
        began_s = time.monotonic()
        try:
            pods = await asyncio.to_thread(self._folders.pods)  # thousands of folders, maybe slow ones
        except OSError as error:
            self._health.bad("pods", f"log folders: {error}", time.monotonic() - began_s)
            return
        self._directory.replace(pods)
        self._health.good("pods", time.monotonic() - began_s)
