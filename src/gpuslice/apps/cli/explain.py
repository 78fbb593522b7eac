"""``gpuslice explain POD``: why it waits, why it is where it is, and how it fared there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.completion import pods
from gpuslice.apps.cli.flags import Flags, cluster_flags, flags_of
from gpuslice.apps.cli.output import DOCUMENTS, as_document, listing_flags, print_repeatedly

if TYPE_CHECKING:
    from gpuslice.diagnosis.explain.facts import Explanations


@click.command("explain")
@click.option("--waiting", is_flag=True, help="Only pods that do not run yet.")
@listing_flags
@cluster_flags
@click.argument("pod", required=False, default=None, shell_complete=pods)
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    pod: str | None,
    waiting: bool,
    output: str,
    no_headers: bool,
    watch: bool,
    **cluster: Any,
) -> None:
    """Say why POD waits for part of a card, or which card it holds and who shares it.

    POD is the name of a pod, NAMESPACE/NAME, or KIND/NAME for the pods of a deployment, statefulset,
    daemonset, replicaset or job, or node/NAME for those on a node; without POD it is all pods of the
    namespace that ask for a part of a card, with -A of all namespaces.

    Nodes are grouped by the reason why the pod does not fit, with the most that is free there on one card.
    This needs only the API server, like the scheduler extender. Usage, peak and refused allocations come from
    the exporter of the node, if there is one, and who bound the pod from the extender's log, if you may read
    it.

    \b
    Examples:
      gpuslice explain train-0
      gpuslice explain team-a/train-0 -o json
      gpuslice explain deploy/serve          its pods, or why it has none
      gpuslice explain -n team-a             all pods of a namespace that share cards
      gpuslice explain -A --waiting          all pods that wait for a card
      gpuslice explain node/gpu-1            who is on a node's cards
    """
    from gpuslice.diagnosis.explain.words import document, text

    flags = flags_of(context, cluster)

    def show() -> str:
        found = read(flags, pod, waiting=waiting)
        if output == "name":
            return "".join(f"pod/{each.pod.name}\n" for each in found.pods)
        if output in DOCUMENTS:
            return as_document(document(found), output)
        return text(found, headers=not no_headers, wide=output == "wide")

    print_repeatedly(show, output, watch=watch)


def read(flags: Flags, pod: str | None, *, waiting: bool = False) -> Explanations:
    """What explains POD, or the pods of the selected namespace."""
    from gpuslice.apps.cli.cluster import ask, connection_of
    from gpuslice.diagnosis.explain import facts

    if pod is not None:
        facts.kind_and_name(pod)  # what can be no name is not asked for
    namespace, everywhere = connection_of(flags).namespace, flags.everywhere
    return ask(
        flags, lambda client: facts.read(client, pod, namespace, everywhere=everywhere, waiting=waiting)
    )
