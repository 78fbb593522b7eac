"""``gpuslice migrate``: what changes when migrating from another system, or switching a node to claims; and
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.completion import nodes as complete_nodes
from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import complain, output_flag, print_document, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuslice.adapters.kube.client import KubeClient
    from gpuslice.apps.cli.flags import Flags
    from gpuslice.migration.plan import Plan

FROM = ("gpushare", "hami", "ack", "time-slicing", "kai", "run-ai")
FAILED = 3  # some changes could not be made; each is reported with its reason


@click.command("migrate")
@click.option("--from", "system", type=click.Choice(FROM), help="The system to migrate from.")
@click.option("--to", type=click.Choice(["dra"]), help="Make each NODE give out its cards by claims.")
@click.option("--apply", is_flag=True, help="Make the changes. Without it nothing is written.")
@click.option("--undo", is_flag=True, help="Plan the way back to that system; with --apply do it.")
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="This node only; may be repeated.")
@click.option("--node-label", default="cgpu", show_default=True, help="The chart's nodeLabel.")
@click.option(
    "--memory-unit", type=click.Choice(["GiB", "MiB"]), default="GiB", show_default=True, help="The chart's."
)
@click.option(
    "--card-units",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Units of every card, for parts of cards; else as nodes tell.",
)
@click.option(
    "--slice-units",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Units of one time slice; else a card's by its replicas.",
)
@output_flag
@cluster_flags
@click.argument("switched", metavar="[NODE]...", nargs=-1, shell_complete=complete_nodes)
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    system: str | None,
    to: str | None,
    switched: Sequence[str],
    apply: bool,
    undo: bool,
    output: str,
    **asked: Any,
) -> None:
    """Migrate from another system that shares cards, or switch nodes to claims; and back. Without --apply
    nothing is written.

    Reads nodes, workloads and the other system's objects, and reports what changes, what waits for you, what
    you must do by hand, and what has no counterpart. Run it again after each step: no change is made twice.
    A node is changed only while no pod holds a card there. -n: workloads of one namespace.

    Each change can be undone: the originals of nodes and workloads are in annotation gpuslice.io/migration,
    deleted objects in ConfigMap kube-system/gpuslice-migration.

    --to dra NODE sets the label of a node and restarts its agent. Nothing is drained: pods that hold part of
    a card keep it, and the node gives out its cards by claims once these pods, which are listed, have ended.

    \b
    Examples:
      gpuslice migrate --from hami                       what would change
      gpuslice migrate --from hami --node gpu-1 --apply  one node, and all workloads
      gpuslice migrate --from time-slicing -n team-a     the workloads of one namespace, and the nodes
      gpuslice migrate --from gpushare --undo --apply    back
      gpuslice migrate --to dra gpu-1 --apply            give the cards of gpu-1 out by claims
      gpuslice migrate --to dra gpu-1 --undo             what the way back would change
    """
    from gpuslice.apps.cli.cluster import ask

    if (system is None) == (to is None):
        raise click.UsageError("either --from SYSTEM or --to dra NODE must be given")
    if bool(switched) != (to is not None):
        raise click.UsageError("NODE and --to go together: --from takes all nodes, or those of --node")
    flags = flags_of(context, asked)
    failed: dict[str, str] = {}

    async def migrate(client: KubeClient) -> Plan:
        planned = await _planned(client, flags, system, switched, asked, back=undo)
        if apply:
            await _carry_out(client, system, planned, failed, tells=output == "table")
        return planned

    found = ask(flags, migrate)
    if output == "table":
        tell(_text(found, system, undo=undo, applied=apply, failed=failed))
    else:
        print_document(_document(found, system, applied=apply, failed=failed), output)
    context.exit(FAILED if failed else 0)


async def _planned(
    client: KubeClient,
    flags: Flags,
    system: str | None,
    switched: Sequence[str],
    asked: dict[str, Any],
    *,
    back: bool,
) -> Plan:
    """What has to be done to switch nodes to claims, to migrate from another system, or to go back."""
    from gpuslice.migration.back import plan_back
    from gpuslice.migration.claims import plan_claims
    from gpuslice.migration.plan import plan
    from gpuslice.migration.reader import read
    from gpuslice.migration.systems import SYSTEMS, sizes_of

    if system is None:
        return await plan_claims(client, switched, asked["node_label"], back=back)
    known = SYSTEMS[system]
    cluster = await read(client, flags.namespace, asked["nodes"], known.owned)
    if back:
        return plan_back(known, cluster)
    sizes = sizes_of(cluster.all_nodes, asked["memory_unit"], asked["card_units"], asked["slice_units"])
    return plan(known, cluster, sizes, asked["node_label"])


async def _carry_out(
    client: KubeClient, system: str | None, planned: Plan, failed: dict[str, str], *, tells: bool
) -> None:
    from gpuslice.migration.writes import carry_out

    async for change, why in carry_out(client, system or "claims", planned.changes):
        if why:
            failed[change.where] = why
        if tells:
            complain(f"{change.where}: {why or 'done'}")


def _document(plan: Plan, system: str | None, *, applied: bool, failed: dict[str, str]) -> dict[str, Any]:
    def notes(name: str) -> list[dict[str, str]]:
        return [{"where": each.where, "what": each.what} for each in getattr(plan, name)]

    changes: list[dict[str, Any]] = []
    for each in plan.changes:
        why = failed.get(each.where)
        changes.append({"where": each.where, "what": list(each.what), "done": applied and not why})
        changes[-1] |= {"error": why} if why else {}
    return {
        **({"from": system} if system is not None else {"to": "dra", "mustGo": notes("must_go")}),
        "changes": changes,
        "waits": notes("waits"),
        "byHand": notes("by_hand"),
        "lost": notes("lost"),
    }


def _text(plan: Plan, system: str | None, *, undo: bool, applied: bool, failed: dict[str, str]) -> str:
    changes = [(each.where, line) for each in plan.changes if each.where not in failed for line in each.what]
    parts = [
        _section("CHANGED" if applied else "WOULD CHANGE", changes),
        _section("MUST GO FIRST", [(each.where, each.what) for each in plan.must_go]),
        _section("WAITS", [(each.where, each.what) for each in plan.waits]),
        _section("BY HAND", [(each.where, each.what) for each in plan.by_hand]),
        _section("HAS NO COUNTERPART", [(each.where, each.what) for each in plan.lost]),
    ]
    text = "\n".join(part for part in parts if part)
    way = f"{'back to' if undo else 'from'} {system}"
    if system is None:
        way = f"{'back from' if undo else 'to'} claims"
    if not plan.changes:
        text += f"\nNothing can be migrated {way} now.\n" if text else f"There is nothing to migrate {way}.\n"
    elif not applied:
        text += "\nNothing was written. To apply the changes, run the same command with --apply.\n"
    return text


def _section(title: str, lines: Sequence[tuple[str, str]]) -> str:
    if not lines:
        return ""
    width = min(44, max(len(where) for where, _ in lines))
    return "\n".join([title, *(f"  {where:<{width}}  {what}" for where, what in lines)]) + "\n"
