"""``gpuslice resize POD --request UNITS``: more or less memory for a pod that runs."""

from __future__ import annotations

from typing import Any

import click

from gpuslice.apps.cli.completion import pods
from gpuslice.apps.cli.flags import cluster_flags, flags_of


@click.command("resize")
@click.option(
    "--request", required=True, metavar="AMOUNT", help="Units, or 12Gi, that are kept for the container."
)
@click.option(
    "--container", "-c", default="", metavar="NAME", help="Of several that ask for a part of a card."
)
@click.option("--wait", is_flag=True, help="Until it is in force. Without it, no room is an error at once.")
@click.option("--timeout", "timeout_s", default=60.0, metavar="SECONDS", help="For --wait. [60]")
@cluster_flags
@click.argument("pod", shell_complete=pods)
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    pod: str,
    request: str,
    container: str,
    wait: bool,
    timeout_s: float,
    **cluster: Any,
) -> None:
    """Give POD more or less memory of its card, while it runs and without a restart.

    POD is the name of a pod, NAMESPACE/NAME, or KIND/NAME for the pods of a deployment, statefulset,
    daemonset, replicaset or job. Their template stays as it is: pods created later have what it says.

    More needs room on the card where the pod is, and in its namespace's quota. Less is in force once the
    container uses no more than that, and no pod gets less than it was created with. The same is done by
    kubectl annotate pod NAME gpuslice.io/memory-request=UNITS.

    \b
    Examples:
      gpuslice resize train-0 --request 12
      gpuslice resize deploy/jupyter --request 12Gi --wait
      gpuslice resize train-0 -c main --request 4     of its containers one
    """
    from gpuslice.apps.cli.resizing import resize

    resize(flags_of(context, cluster), pod, request, container, wait_s=timeout_s if wait else 0.0)
