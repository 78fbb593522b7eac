"""``gpuslice advise``: which pods request too much or too little, and which cards could be emptied."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import complain, output_flag, print_document, tell

if TYPE_CHECKING:
    from gpuslice.core.advice import Advice

MOST_SHOWN = 40


@click.command("advise")
@click.option(
    "--prometheus",
    default="",
    metavar="URL",
    envvar="GPUSLICE_PROMETHEUS_URL",
    show_envvar=True,
    help="Take peaks of the last days from this Prometheus, instead of those since each container's start.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 90),
    default=7,
    show_default=True,
    help="How many days to look back, with --prometheus.",
)
@output_flag
@cluster_flags
@click.pass_context
def command(context: click.Context, /, prometheus: str, days: int, output: str, **cluster: Any) -> None:
    """Find requests that are too large or too small.

    Also shows which cards could be emptied by moving which pods. A suggested size is the peak of a container
    plus 10 %: since its start, from the exporters, or over some days, from Prometheus. If memory was refused,
    it is larger; a smaller one is suggested only from ten minutes after the start. -n NAMESPACE limits it to
    the pods of one namespace. Nothing is changed.

    \b
    Examples:
      gpuslice advise
      gpuslice advise -n team-a -o json
      gpuslice advise --prometheus http://localhost:9090 --days 14
    """
    from gpuslice.adapters.kube.resources import LIVING, NODES, PODS
    from gpuslice.adapters.kube.sync import SyncClient, SyncTransport
    from gpuslice.apps.cli.cluster import check_namespace, connection_of
    from gpuslice.apps.diagnosis.advice import advice_document, peaks_of
    from gpuslice.apps.diagnosis.claims import Claims, read_claims
    from gpuslice.apps.diagnosis.cluster_ledger import ledger_of, read_config_maps
    from gpuslice.apps.diagnosis.exporters import ClusterSource
    from gpuslice.apps.diagnosis.places import may_run
    from gpuslice.apps.diagnosis.prometheus import Prometheus
    from gpuslice.apps.diagnosis.usage import ClusterUsage
    from gpuslice.core.advice import advise

    flags = flags_of(context, cluster)
    connection = connection_of(flags)
    client = SyncClient(SyncTransport(connection))
    if flags.namespace:
        check_namespace(client, flags.namespace)
    nodes = client.list(NODES)
    pods = client.list(PODS, fields=f"{LIVING},spec.nodeName!=")
    ledger = ledger_of(nodes, pods, read_config_maps(client))
    claims = (read_claims(client, nodes, pods) or Claims()).ledger
    if prometheus:
        usage = ClusterUsage((), tuple(Prometheus(prometheus).containers(days=days)))
    else:
        usage = ClusterSource(connection).read()
    containers = usage.of_namespace(flags.namespace).containers
    peaks = peaks_of([*ledger.pods.values(), *claims.pods.values()], containers)
    found = advise(ledger, peaks, claims, now_s=time.time(), may_run=may_run(pods, nodes))
    for problem in usage.problem_lines:
        complain(f"Warning: {problem}")
    if output == "table":
        tell(text(found))
    else:
        print_document(advice_document(found), output)


def text(found: Advice) -> str:
    """The advice as text: sizes, what namespaces could give back, cards to empty, and the risk."""
    from gpuslice.apps.cli.table import fitted
    from gpuslice.core.advice import MOVE_RISK, SETTLED_S, SIZE_RISK
    from gpuslice.core.words import counted

    parts = []
    if found.resizes:
        rows = [["POD", "ASKS FOR", "PEAK", "BETTER", "WHY"]]
        for each in found.resizes[:MOST_SHOWN]:
            better = f"{counted(each.suggested_units, 'unit')} ({each.suggested_mib} MiB)"
            better = f"at least {better}" if each.more else better if each.suggested_units else "nothing"
            spare = f"{each.mib - each.suggested_mib} MiB" if each.suggested_units else "all of it"
            why = "memory was refused" if each.more else f"{spare} never used"
            on = f" on each of {each.cards} cards" if each.cards > 1 else ""
            asks = f"{counted(each.units, 'unit')} ({each.mib} MiB)"
            rows.append([each.pod.key, asks, f"{each.peak_mib:.0f} MiB{on}", better, why])
        parts.append(fitted(rows, cut=(0,)) + _rest(len(found.resizes)))
        parts.append("")
        rows = [["NAMESPACE", "COULD GIVE BACK"]]
        rows += [[name, f"{mib} MiB"] for name, mib in found.given_back.items()]
        parts.append(fitted(rows, cut=(0,)) if found.given_back else "")
        parts.append(f"{SIZE_RISK}\n")
    if found.cards:
        rows = [["CARD TO EMPTY", "POD", "MEMORY", "TO"]]
        for card in found.cards[:MOST_SHOWN]:
            for move in card.moves:
                place = f"{card.node}, card {card.card}"
                rows.append([place, move.pod.key, f"{move.mib} MiB", f"{move.node}, card {move.card}"])
        parts.append(fitted(rows, cut=(0, 1, 3)) + _rest(len(found.cards)))
        parts.append(f"{MOVE_RISK}\n")
    if found.young:
        minutes = round(SETTLED_S / 60)
        parts.append(
            f"{counted(found.young, 'pod')} may need less: ask again {minutes} minutes after the start.\n"
        )
    if not parts:
        known = f"the peak of {counted(found.measured, 'pod')} is known"
        return f"Nothing to advise: {known}, and no card in use could be emptied.\n"
    return "\n".join(filter(None, parts))


def _rest(number: int) -> str:
    return f"… and {number - MOST_SHOWN} more: -o json has all.\n" if number > MOST_SHOWN else ""
