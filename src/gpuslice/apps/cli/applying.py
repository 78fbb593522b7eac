"""Gives running pods the sizes that were advised, where their authors consent."""

from __future__ import annotations

import click

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import NAMESPACES
from gpuslice.apps.cli.cluster import ask
from gpuslice.apps.cli.flags import Flags
from gpuslice.apps.cli.output import complain
from gpuslice.apps.cli.resizing import NotResizedError, resize_pods
from gpuslice.core.advice import Advice
from gpuslice.core.contract import ANN_ADVICE
from gpuslice.core.request import peak
from gpuslice.core.words import counted
from gpuslice.diagnosis.cluster import Cluster

CONSENT = "apply"


def apply_advice(flags: Flags, cluster: Cluster, advice: Advice, *, dry_run: bool) -> None:
    """Resize every pod that may be; each that cannot is said, with the reason, and the others are done.

    Raises NotResizedError if there was such a one.
    """
    ask(flags, lambda client: _apply(client, cluster, advice, dry_run=dry_run))


async def _apply(client: KubeClient, cluster: Cluster, advice: Advice, *, dry_run: bool) -> None:
    pods = {each.metadata.uid: each for each in cluster.pods}
    spaces = {each.pod.namespace: await _consents(client, each.pod.namespace) for each in advice.resizes}
    failed = without = 0
    for each in advice.resizes:
        pod, found = each.pod, pods.get(each.pod.uid)
        said = (found.metadata.annotations or {}).get(ANN_ADVICE) if found else None
        if found is None or not (said == CONSENT or (said is None and spaces[pod.namespace])):
            without += 1
            continue
        created = peak(pod.request.containers, lambda one: one.devices) if pod.request else 0
        units = max(each.suggested_units, created)
        if units == each.units:
            click.echo(
                f"pod/{pod.name} keeps the {counted(units, 'unit')} that it was created with: its template "
                f"can ask for {each.suggested_units}"
            )
            continue
        try:
            await resize_pods(client, cluster.ledger, [found], str(units), dry_run=dry_run)
        except (NotResizedError, KubeError) as error:
            complain(str(error))
            failed += 1
    if without:
        pods_without = counted(without, "pod")
        click.echo(f"{pods_without} left alone: neither the pod nor its namespace has {ANN_ADVICE}={CONSENT}")
    if dry_run:
        click.echo("nothing was changed (--dry-run)")
    if failed:
        raise NotResizedError(f"{counted(failed, 'pod')} of {len(advice.resizes)} could not be resized")


async def _consents(client: KubeClient, namespace: str) -> bool:
    """Not where its annotations may not be read."""
    try:
        found = await client.get(NAMESPACES.as_dict(), namespace)
    except KubeError:
        return False
    return (found["metadata"].get("annotations") or {}).get(ANN_ADVICE) == CONSENT
