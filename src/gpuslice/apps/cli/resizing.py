"""Changes what pods that run want of their cards, and waits until that is in force."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import click

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import PODS, QUOTAS
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.cli.cluster import ask, connection_of
from gpuslice.apps.cli.flags import Flags
from gpuslice.core.claim_views import unit_of
from gpuslice.core.contract import ANN_POD_UNITS, ANN_REQUEST
from gpuslice.core.errors import GpusliceError, InvalidRequestError
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import ContainerKind, Pod, Refusal, Request
from gpuslice.core.quantity import scaled
from gpuslice.core.quota import why_over_quota
from gpuslice.core.resize import added_in, grown, more, wanted, with_amounts
from gpuslice.core.units import MIB, UNIT_MIB
from gpuslice.core.words import counted
from gpuslice.diagnosis.cluster import read_cluster
from gpuslice.diagnosis.explain.facts import named_pods

LOOK_EVERY_S = 0.2


class NotResizedError(GpusliceError):
    """The pods do not have what was asked for; the message says why."""


def resize(flags: Flags, name: str, amount: str, container: str, *, wait_s: float) -> None:
    """Change each of the pods, or none if one of them cannot be. Raises GpusliceError."""
    namespace = connection_of(flags).namespace
    ask(flags, lambda client: _resize(client, namespace, name, amount, container, wait_s=wait_s))


async def _resize(
    client: KubeClient, namespace: str, name: str, amount: str, container: str, *, wait_s: float
) -> None:
    found = await named_pods(client, namespace, name)
    if not found:
        raise NotResizedError(f"{name} has no pods")
    await resize_pods(client, (await read_cluster(client)).ledger, found, amount, container, wait_s=wait_s)


async def resize_pods(
    client: KubeClient,
    ledger: Ledger,
    found: Sequence[objects.Pod],
    amount: str,
    container: str = "",
    *,
    wait_s: float = 0.0,
    dry_run: bool = False,
) -> None:
    """Change each of the pods, or none if one of them cannot be, or none at all in a dry run.

    Raises NotResizedError.
    """
    wishes = [(pod, _wish(pod_view(pod), pod, ledger, amount, container)) for pod in found]
    refusals = [] if wait_s else await _refusals(client, ledger, [pod for _, (pod, _) in wishes])
    if refusals:
        raise NotResizedError("; ".join(refusals))
    for pod, (then, text) in wishes:
        meta, now = pod.metadata, pod_view(pod).request
        patch = {"metadata": {"annotations": {ANN_REQUEST: text}}}
        if not dry_run:
            await client.merge_patch(PODS, meta.name, patch, meta.namespace)
        assert now is not None
        assert then.wanted is not None
        click.echo(f"pod/{meta.name} {counted(now.units, 'unit')} -> {then.wanted.units}")
    if wait_s:
        await _wait(client, [pod for _, (pod, _) in wishes], time.monotonic() + wait_s, wait_s)


def _wish(view: Pod, pod: objects.Pod, ledger: Ledger, amount: str, container: str) -> tuple[Pod, str]:
    """The pod with what it is to want, and the annotation. Raises GpusliceError for what no pod can have."""
    if pod.claims:
        raise NotResizedError(f"pod {view.key} has its part of a card by a claim, which cannot change")
    if view.request is None:
        raise NotResizedError(f"pod {view.key} asks for no part of a card")
    if not view.node or view.finished:
        raise NotResizedError(f"pod {view.key} does not run: create it with what it is to have")
    state = ledger.state(view.node)
    unit = unit_of(state.node.cards if state else ())
    units = int(amount) if amount.isdecimal() else _units(amount, UNIT_MIB[unit])
    running = [each.name for each in view.request.containers if each.kind is not ContainerKind.INIT]
    spec, text = with_amounts(view.request, dict.fromkeys(running, 0)), str(units)
    if container:  # the others keep what is wanted for them
        others = {each.name: each.units for each in (view.wanted or spec).containers if each.name in running}
        text = ",".join(f"{each}={of}" for each, of in {**others, container: units}.items())
    try:
        return replace(view, wanted=wanted({ANN_REQUEST: text}, spec)), text
    except InvalidRequestError as error:
        raise NotResizedError(f"pod {view.key}: {error}") from error


def _units(amount: str, unit_mib: int) -> int:
    """Whole units of a quantity such as 12Gi, rounded up."""
    found = scaled(amount, 1)
    if found is None or found <= 0:
        raise NotResizedError(
            f'--request is "{amount}", must be whole units such as 12, or memory such as 12Gi'
        )
    return -(-found // (unit_mib * MIB))


async def _refusals(client: KubeClient, ledger: Ledger, pods: list[Pod]) -> list[str]:
    """What keeps pods from more, in the words of the extender, which decides."""
    found = []
    for pod in pods:
        request, holds = more(pod), ledger.holds.on(pod.node)
        if request is None or holds is None:
            continue
        answer: Pod | Refusal | None = grown(pod, request, holds.state(), dict(holds.beside(pod)))
        if isinstance(answer, Pod):
            answer = await _over_quota(client, ledger, pod, request)
        if isinstance(answer, Refusal):
            found.append(f"pod {pod.key}: {answer}")
    return found


async def _over_quota(client: KubeClient, ledger: Ledger, pod: Pod, request: Request) -> Refusal | None:
    """None as well where quotas may not be read: then the extender says so."""
    try:
        quotas = await client.all(QUOTAS, pod.namespace)
    except KubeError:
        return None
    asked = request.units - (pod.request.units if pod.request else 0)
    return why_over_quota(quotas, request.names.memory, added_in(ledger.pods.values(), pod.namespace), asked)


async def _wait(client: KubeClient, pods: list[Pod], until_s: float, wait_s: float) -> None:
    """Until the agents of their nodes say so in the pods' annotations."""
    waiting = {pod.uid: pod for pod in pods}
    while waiting:
        for pod in tuple(waiting.values()):
            try:
                seen = await client.get(PODS, pod.name, pod.namespace)
            except NotFoundError:
                raise NotResizedError(f"pod {pod.key} has gone") from None
            view, said = pod_view(seen), (seen.metadata.annotations or {}).get(ANN_POD_UNITS, "")
            if view.request == pod.wanted and pod.wanted is not None and said == str(pod.wanted.units):
                del waiting[pod.uid]
        if waiting and time.monotonic() >= until_s:
            names = ", ".join(pod.key for pod in waiting.values())
            raise NotResizedError(
                f"not in force after {wait_s:g} s: {names}; it stays asked for, and gpuslice explain says "
                f"what it waits for"
            )
        if waiting:
            await asyncio.sleep(LOOK_EVERY_S)
