"""The ConfigMaps and Secrets that a pod names, read from the API before its containers are created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import CONFIG_MAPS, SECRETS
from simcluster.cluster.amounts import Object
from simcluster.kubelet.environment import ReadData, decode_secret

Named = tuple[str, str]  # kind ("configmap" or "secret"), name


async def fetch(client: KubeClient, pod: Object) -> ReadData:
    """A look-up over everything that the pod names, as of now."""
    namespace = pod["metadata"]["namespace"]
    found = {named: await _read(client, namespace, named) for named in sorted(set(references(pod)))}
    return lambda kind, name: found.get((kind, name))


async def _read(client: KubeClient, namespace: str, named: Named) -> Mapping[str, str] | None:
    kind, name = named
    try:
        if kind == "secret":
            secret = await client.get(SECRETS, name, namespace)
            return decode_secret(secret)
        return (await client.get(CONFIG_MAPS, name, namespace)).data or {}
    except NotFoundError:
        return None


def references(pod: Object) -> Iterator[Named]:
    spec = pod["spec"]
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        for source in container.get("envFrom") or ():
            yield from _sources(source, "configMapRef", "secretRef")
        for variable in container.get("env") or ():
            yield from _sources(variable.get("valueFrom") or {}, "configMapKeyRef", "secretKeyRef")
    for volume in spec.get("volumes") or ():
        for one in [volume, *((volume.get("projected") or {}).get("sources") or ())]:
            yield from _sources(one, "configMap", "secret")


def _sources(source: Mapping[str, Any], config_map: str, secret: str) -> Iterator[Named]:
    if config_map in source:
        yield "configmap", source[config_map].get("name", "")
    if secret in source:
        yield "secret", source[secret].get("secretName") or source[secret].get("name", "")
