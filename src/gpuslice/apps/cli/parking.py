"""Orders pods to be parked or woken, which their nodes' agents do."""

from __future__ import annotations

import asyncio
import time

import click

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.cli.cluster import ask, connection_of
from gpuslice.apps.cli.flags import Flags
from gpuslice.core.contract import ANN_PARK
from gpuslice.core.errors import GpusliceError
from gpuslice.core.parking import parked
from gpuslice.diagnosis.explain.facts import named_pods

LOOK_EVERY_S = 0.2


class NotMovedError(GpusliceError):
    """The pods are not as they were to be; the message says why."""


def give_order(flags: Flags, name: str, order: str, *, wait_s: float) -> None:
    """Give all of the pods the order, or none if one of them cannot have it. Raises GpusliceError."""
    namespace = connection_of(flags).namespace
    ask(flags, lambda client: _give(client, namespace, name, order, wait_s))


async def _give(client: KubeClient, namespace: str, name: str, order: str, wait_s: float) -> None:
    found = await named_pods(client, namespace, name)
    if not found:
        raise NotMovedError(f"{name} has no pods")
    for pod in found:
        _check(pod)
    for pod in found:
        patch = {"metadata": {"annotations": {ANN_PARK: order}}}
        await client.merge_patch(PODS, pod.metadata.name, patch, pod.metadata.namespace, uid=pod.metadata.uid)
    until_s = time.monotonic() + wait_s
    for pod in found:
        done = await _outcome(client, pod, order, until_s) if wait_s else "ordered"
        click.echo(f"pod/{pod.metadata.name} {done}")


def _check(pod: objects.Pod) -> None:
    view = pod_view(pod)
    if pod.claims:
        raise NotMovedError(f"pod {view.key} has its part of a card by a claim, which is never parked")
    if view.request is None:
        raise NotMovedError(f"pod {view.key} asks for no part of a card")
    if not view.node or view.finished:
        raise NotMovedError(f"pod {view.key} does not run")


async def _outcome(client: KubeClient, pod: objects.Pod, order: str, until_s: float) -> str:
    """What became of it, once its agent has taken the order away."""
    meta = pod.metadata
    key = f"{meta.namespace}/{meta.name}"
    while True:
        try:
            seen = await client.get(PODS, meta.name, meta.namespace)
        except NotFoundError:
            raise NotMovedError(f"pod {key} has gone") from None
        annotations = seen.metadata.annotations or {}
        if annotations.get(ANN_PARK) != order:
            break
        if time.monotonic() >= until_s:
            raise NotMovedError(f"pod {key}: its node's agent has not answered yet; it stays ordered")
        await asyncio.sleep(LOOK_EVERY_S)
    held = parked(annotations)
    if order == "park" and not held:
        raise NotMovedError(f"pod {key} is not parked: kubectl events --for pod/{meta.name} says why")
    return "parked" if held else "on its card"
