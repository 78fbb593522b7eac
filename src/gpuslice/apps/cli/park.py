"""``gpuslice park POD`` and ``gpuslice wake POD``: a pod's memory leaves its card, and comes back."""

from __future__ import annotations

from typing import Any

import click

from gpuslice.apps.cli.completion import pods
from gpuslice.apps.cli.flags import cluster_flags, flags_of

wait = click.option("--wait", is_flag=True, help="Until it is done, or refused.")
timeout = click.option("--timeout", "timeout_s", default=60.0, metavar="SECONDS", help="For --wait. [60]")
pod_argument = click.argument("pod", shell_complete=pods)


@click.command("park")
@wait
@timeout
@cluster_flags
@pod_argument
@click.pass_context
def command(context: click.Context, /, *, pod: str, wait: bool, timeout_s: float, **cluster: Any) -> None:
    """Move POD's memory from its card to its host memory, until it uses its card again.

    POD is the name of a pod, NAMESPACE/NAME, or KIND/NAME for the pods of a deployment, statefulset,
    daemonset, replicaset or job. Its programs go on; whichever calls the driver waits until the memory is
    back. What it requested stays its own: meanwhile it is lent to pods that may have more than their
    request. The same is done by kubectl annotate pod NAME gpuslice.io/park=park.

    \b
    Examples:
      gpuslice park jupyter-0 --wait
      gpuslice wake jupyter-0
    """
    from gpuslice.apps.cli.parking import give_order

    give_order(flags_of(context, cluster), pod, "park", wait_s=timeout_s if wait else 0.0)


@click.command("wake")
@wait
@timeout
@cluster_flags
@pod_argument
@click.pass_context
def wake(context: click.Context, /, *, pod: str, wait: bool, timeout_s: float, **cluster: Any) -> None:
    """Put back on its card what `gpuslice park`, or an idle time, took off it.

    Any use of the card does the same. POD is as for `gpuslice park`. What others borrowed of the memory is
    called back first. The same is done by kubectl annotate pod NAME gpuslice.io/park=wake.

    \b
    Example:
      gpuslice wake deploy/model --wait
    """
    from gpuslice.apps.cli.parking import give_order

    give_order(flags_of(context, cluster), pod, "wake", wait_s=timeout_s if wait else 0.0)
