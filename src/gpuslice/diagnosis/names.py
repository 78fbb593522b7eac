"""Names that were given of nodes and namespaces: they exist, or the error says what was probably meant."""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.objects import Node
from gpuslice.adapters.kube.resources import NAMESPACES, NODES
from gpuslice.core.errors import GpusliceError
from gpuslice.core.words import nearest


class NoSuchNodeError(GpusliceError):
    """There is no node of that name; the message names the most similar one."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        hint = nearest(name, names)
        super().__init__(f'nodes "{name}" not found' + (f"; {hint}" if hint else ""))


class NoSuchNamespaceError(GpusliceError):
    """There is no namespace of that name; the message names the most similar one."""


async def read_node(client: KubeClient, name: str) -> Node:
    """NoSuchNodeError if there is none of that name."""
    try:
        return await client.get(NODES, name)
    except NotFoundError as error:
        raise NoSuchNodeError(name, sorted(each.metadata.name for each in await client.all(NODES))) from error


async def check_namespace(client: KubeClient, namespace: str) -> None:
    """Raises `NoSuchNamespaceError`; without the right to list namespaces nothing can be said."""
    try:
        names = [each["metadata"]["name"] for each in await client.all(NAMESPACES)]
    except KubeError:
        return
    if namespace not in names:
        hint = nearest(namespace, names) or "kubectl get namespaces lists them"
        raise NoSuchNamespaceError(f'there is no namespace "{namespace}"; {hint}')
