"""The network of a simulated cluster on one machine: no root, no network namespaces.

Each pod listens on a loopback address of its own; the pods of a node's own network share one. Programs with
``libsimnet.so`` (native/sim/network) read where services and pods really are from the table that
`ServiceProxy` keeps, as kube-proxy and the cluster's DNS do.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.resources import DICT, PODS, SERVICES, Resource
from gpuslice.adapters.kube.watch import Change, Reflector

Object = Mapping[str, Any]
ENDPOINTS = Resource("v1", "endpoints", "Endpoints", DICT)


def loopback_of(pod: Object) -> str:
    """An address in 127.0.0.0/8 for each pod, different from those of other clusters on this machine."""
    spec = pod["spec"]
    name = f"node {spec.get('nodeName')}" if spec.get("hostNetwork") else pod["metadata"]["uid"]
    number = zlib.crc32(f"{os.getpid()}/{name}".encode())
    return f"127.{1 + (number >> 16) % 254}.{(number >> 8) % 256}.{1 + number % 254}"


class ServiceProxy:
    """Writes `table` whenever services or their pods change; `run` it until cancelled."""

    def __init__(self, client: KubeClient, table: Path) -> None:
        self._table = table
        self._changed = asyncio.Event()
        self._services = Reflector(client, SERVICES, self._on_change)
        self._endpoints = Reflector(client, ENDPOINTS, self._on_change)
        self._pods = Reflector(client, PODS.as_dict(), self._on_change)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, each in (
                ("services", self._services),
                ("endpoints", self._endpoints),
                ("pods", self._pods),
            ):
                group.create_task(each.run(), name=f"service proxy: {name}")
            while True:
                await self._changed.wait()
                self._changed.clear()
                fresh = self._table.with_suffix(".new")
                fresh.write_text("".join(f"{line}\n" for line in self._lines()))
                fresh.replace(self._table)

    def _on_change(self, _: Change[dict[str, Any]]) -> None:
        self._changed.set()

    def _lines(self) -> Iterator[str]:
        for key, service in self._services.objects.items():
            address = service["spec"].get("clusterIP")
            if not address or address == "None":
                continue
            namespace, name = key
            for suffix in ("", ".svc", ".svc.cluster.local"):
                yield f"name {name}.{namespace}{suffix} {address}"
            status = service.get("status") or {}
            outside = (status.get("loadBalancer") or {}).get("ingress") or []
            for each in (address, *(entry["ip"] for entry in outside)):
                for port, real, real_port in self._places(service, key):
                    yield f"route {each} {port} {real} {real_port}"
        for pod in self._pods.objects.values():
            if known := (pod.get("status") or {}).get("podIP"):
                yield f"route {known} 0 {loopback_of(pod)} 0"

    def _places(self, service: Object, key: tuple[str, str]) -> Iterator[tuple[int, str, int]]:
        """Of each port where it is served: at the first ready pod."""
        found = self._endpoints.objects.get(key) or {}
        for subset in found.get("subsets") or []:
            target = (subset.get("addresses") or [{}])[0].get("targetRef") or {}
            pod = self._pods.objects.get((target.get("namespace", ""), target.get("name", "")))
            served = {port.get("name", ""): port["port"] for port in subset.get("ports") or []}
            for port in service["spec"].get("ports") or []:
                if pod is not None and port.get("name", "") in served:
                    yield port["port"], loopback_of(pod), served[port.get("name", "")]
