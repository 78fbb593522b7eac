"""The node object as kubelet keeps it: registration, status, heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import AlreadyExistsError, NotFoundError
from gpuslice.adapters.kube.resources import LEASES, NODES
from simcluster.cluster.amounts import Object, amounts_of
from simcluster.kubelet.devices import Capacity, DeviceAssignments
from simcluster.kubelet.records import timestamp
from simcluster.kubelet.settings import KubeletSettings
from simcluster.kubelet.troubles import Troubles

LEASE_NAMESPACE = "kube-node-lease"
REPORT_EVERY = timedelta(minutes=5)
"""How often kubelet writes an unchanged status (its nodeStatusReportFrequency)."""
URL_ANNOTATION = "sim.gpuslice.io/kubelet-url"
_HEALTHY = {
    "MemoryPressure": ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
}


class NodeStatus:
    """Writes one node. `clock` is monotonic, for the grace period of device resources."""

    def __init__(
        self,
        client: KubeClient,
        settings: KubeletSettings,
        device_manager: DeviceAssignments,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        troubles: Troubles | None = None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._device_manager = device_manager
        self._url = url
        self._clock = clock
        self._troubles = troubles or Troubles()
        self._since = timestamp(datetime.now(UTC))

    async def register(self, *, reset_extended: bool) -> None:
        """Create the node, or adopt the existing one.

        `reset_extended`: a kubelet that finds its plugin folder empty zeroes every extended resource of the
        node, even those that others added. Its own socket usually exists first, so this happens rarely.
        """
        try:
            await self._client.create(
                NODES.as_dict(),
                {
                    "metadata": {"name": self._settings.name, **self._metadata()},
                    "spec": {"taints": [dict(one) for one in self._settings.taints]}
                    if self._settings.taints
                    else {},
                },
            )
        except AlreadyExistsError:
            await self._adopt(reset_extended=reset_extended)
        await self.report()

    async def report(self) -> bool:
        """Write what has changed since the API server last had the status; True if something had."""
        node = await self._client.get(NODES.as_dict(), self._settings.name)
        fresh = self.status(node.get("status") or {}, self._device_manager.capacity(self._clock()))
        old = node.get("status") or {}
        changed = {key: value for key, value in fresh.items() if old.get(key) != value}
        if changed:
            await self._client.patch_status(NODES.as_dict(), self._settings.name, changed)
        return bool(changed)

    async def heartbeat(self) -> None:
        """Renew the node's Lease; create it if it is missing."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._settings.name, "leaseDurationSeconds": 40, "renewTime": now}
        leases = LEASES.as_dict()
        try:
            await self._client.merge_patch(leases, self._settings.name, {"spec": spec}, LEASE_NAMESPACE)
        except NotFoundError:
            metadata = {"name": self._settings.name, "namespace": LEASE_NAMESPACE}
            await self._client.create(leases, {"metadata": metadata, "spec": spec})

    def status(self, old: Mapping[str, Any], devices: Capacity) -> dict[str, Any]:
        """The whole status; capacity that others added is kept."""
        capacity = dict(old.get("capacity") or {}) | dict(self._settings.capacity)
        capacity |= {name: str(count) for name, count in devices.capacity.items()}
        capacity |= dict.fromkeys(devices.removed, "0")
        allocatable = capacity | {name: str(count) for name, count in devices.allocatable.items()}
        known = {one["type"]: one for one in old.get("conditions") or ()}
        fresh = {kind: ("False", *words) for kind, words in _HEALTHY.items()}
        fresh |= {kind: ("True", f"KubeletHas{kind}", "kubelet has it") for kind in self._troubles.pressure}
        fresh["Ready"] = ("True", "KubeletReady", "kubelet is posting ready status")
        if self._troubles.shutting_down:
            fresh["Ready"] = ("False", "KubeletNotReady", "node is shutting down")
        return {
            "capacity": capacity,
            "allocatable": allocatable,
            "conditions": [self._condition(kind, *words, known.get(kind)) for kind, words in fresh.items()],
            "addresses": [
                {"type": "InternalIP", "address": self._settings.internal_ip},
                {"type": "Hostname", "address": self._settings.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": int(self._url.rpartition(":")[2])}},
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": "sim",
                "containerRuntimeVersion": "sim://1.0",
                "kernelVersion": "6.1.0",
                "kubeProxyVersion": "",
                "kubeletVersion": self._settings.version,
                "machineID": self._settings.name,
                "operatingSystem": "linux",
                "osImage": "gpuslice simulation",
                "systemUUID": self._settings.name,
            },
        }

    async def _adopt(self, *, reset_extended: bool) -> None:
        node = await self._client.get(NODES.as_dict(), self._settings.name)
        await self._client.merge_patch(NODES.as_dict(), self._settings.name, {"metadata": self._metadata()})
        if not reset_extended:
            return
        status = node.get("status") or {}
        extended = [name for name in status.get("capacity") or {} if is_extended(name)]
        if extended:
            zeroes = dict.fromkeys(extended, "0")
            await self._client.patch_status(
                NODES.as_dict(), self._settings.name, {"capacity": zeroes, "allocatable": zeroes}
            )

    def _metadata(self) -> dict[str, Any]:
        own = {
            "kubernetes.io/hostname": self._settings.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
        }
        return {"labels": {**own, **self._settings.labels}, "annotations": {URL_ANNOTATION: self._url}}

    def _condition(
        self, kind: str, value: str, reason: str, message: str, old: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        at = datetime.now(UTC)
        same = old and (old.get("status"), old.get("reason"), old.get("message")) == (value, reason, message)
        if old and same and at - datetime.fromisoformat(old["lastHeartbeatTime"]) < REPORT_EVERY:
            return dict(old)
        now = timestamp(at)
        since = old.get("lastTransitionTime") if old and old.get("status") == value else now
        return {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastHeartbeatTime": now,
            "lastTransitionTime": since,
        }


def is_extended(resource: str) -> bool:
    """Whether a resource name is an extended one: a domain that is not Kubernetes' own."""
    return "/" in resource and "kubernetes.io/" not in resource


def device_limits(container: Object) -> dict[str, int]:
    """A container's limits of extended resources, in whole devices."""
    limits = amounts_of((container.get("resources") or {}).get("limits"))
    return {name: amount for name, amount in limits.items() if is_extended(name)}
