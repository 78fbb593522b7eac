"""``gpuslice simulate``: what a cluster could hold with other nodes, more pods or another policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import output_flag, print_document, tell
from gpuslice.apps.command_line import FiniteRange
from gpuslice.core.errors import GpusliceError, words_of

if TYPE_CHECKING:
    from gpuslice.diagnosis.simulate.rule import Simulation

PARTS = 100  # of each replay, in the progress bar
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("simulate")
@click.option("--from-cluster", is_flag=True, help="Take nodes and pods from the cluster.")
@click.option("--trace", type=FILE, help="Take pods from a CSV file.")
@click.option("--nodes", type=FILE, help="Take nodes from a CSV file.")
@click.option("--add", multiple=True, metavar="NxCARDS[xUNITS][:MODEL]", help="Add nodes, such as 4x8x80.")
@click.option("--drop", multiple=True, metavar="NAME", help="Leave out nodes; * is a wildcard.")
@click.option(
    "--growth", type=FiniteRange(0, min_open=True), default=1.0, help="Demand as a multiple of today's."
)
@click.option(
    "--policy", default="opportunity-cost", show_default=True, help="all, or names separated by commas."
)
@click.option(
    "--seed", type=click.IntRange(0), default=42, show_default=True, help="The order of a trace's pods."
)
@click.option(
    "--borrow",
    type=FiniteRange(1),
    default=1.0,
    help="Parts of cards request 1/FACTOR of what they ask for, and borrow the rest.",
    metavar="FACTOR",
)
@click.option(
    "--usage",
    type=click.Path(path_type=Path),
    help="Take pods from measured memory and duty cycles in a folder; with --borrow.",
)
@click.option("--card-gib", type=FiniteRange(1), default=80.0, show_default=True, help="Cards of --usage.")
@click.option(
    "--lacking",
    type=FiniteRange(0, 100),
    default=0.3,
    show_default=True,
    help="Percent of the samples of --usage with work that may lack room.",
)
@click.option("--needed/--no-needed", default=True, show_default=True, help="Find how many cards are needed.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw how the cluster fills up, as SVG."
)
@output_flag
@cluster_flags
@click.pass_context
def command(context: click.Context, /, output: str, plot: Path | None, **asked: Any) -> None:
    """Place the pods of a trace, or of the cluster, on empty nodes and see what fits.

    Shows for each policy how much is allocated, which cards stay wholly free, what does not fit and why,
    and how many cards of this mix of nodes would hold everything. Nothing in the cluster is changed.

    With --usage, each pod requests its measured peak divided by --borrow: shows how many cards hold them all
    if what is idle is given back to whoever needs it, and who computes then seldom lacks room.

    \b
    Examples:
      gpuslice simulate --from-cluster --policy all      what another policy would free
      gpuslice simulate --from-cluster --add 4x8x80      with 4 more nodes of 8 cards of 80 units
      gpuslice simulate --from-cluster --drop 'old-*' --growth 1.2
      gpuslice simulate --trace pods.csv --nodes nodes.csv --plot filling.svg
      gpuslice simulate --usage GenTD26 --borrow 1.5     cards for pods that borrow up to their peaks
    """
    from gpuslice.diagnosis.simulate.words import borrowing_table, document, table

    if plot is not None and not plot.absolute().parent.is_dir():
        raise click.UsageError(f'--plot is "{plot}", must be a file in a folder that exists')
    if asked["usage"] is not None:
        found = _borrowed(asked)
        if output == "table":
            tell(borrowing_table(found))
        else:
            print_document(found, output)
        return
    simulation = _simulate(context, asked)
    if output == "table":
        tell(table(simulation))
    else:
        print_document(document(simulation), output)
    if plot is None:
        return
    from gpuslice.diagnosis.simulate.chart import chart, svg

    try:  # last: a full disk costs only the chart
        plot.write_text(svg(chart(simulation)), encoding="utf-8")
    except OSError as error:
        raise GpusliceError(f"--plot: {plot} cannot be written: {words_of(error)}") from error


def _borrowed(asked: dict[str, Any]) -> dict[str, Any]:
    from gpuslice.core.simulation.borrowing import needed
    from gpuslice.core.units import MIB
    from gpuslice.diagnosis.simulate.facts import load_usage
    from gpuslice.diagnosis.simulate.words import borrowing

    if asked["from_cluster"] or asked["trace"] is not None:
        raise click.UsageError("--usage is a source of pods of its own: leave out --from-cluster and --trace")
    try:
        usage = load_usage(asked["usage"])
    except (ValueError, OSError) as error:
        raise GpusliceError(str(error)) from error
    factor, card_gib, seed = asked["borrow"], asked["card_gib"], asked["seed"]
    both = (
        needed(usage, card_gib * 1024 * MIB, each, asked["lacking"] / 100, seed) for each in (1.0, factor)
    )
    return borrowing(len(usage), factor, card_gib, *both)


def _simulate(context: click.Context, asked: dict[str, Any]) -> Simulation:
    from gpuslice.diagnosis.simulate import facts, rule

    if asked["from_cluster"] == (asked["trace"] is not None):
        raise click.UsageError("one of --from-cluster, --trace FILE and --usage FOLDER must be given")
    try:
        policies = rule.policy_names(asked["policy"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        if asked["from_cluster"]:
            from gpuslice.apps.cli.cluster import ask
            from gpuslice.diagnosis.cluster import read_cluster

            start = facts.of_cluster(ask(flags_of(context, asked), read_cluster))
        else:
            start = facts.of_files(asked["trace"], asked["nodes"])
        wish = rule.Wish(
            add=asked["add"],
            drop=asked["drop"],
            growth=asked["growth"],
            policies=policies,
            seed=asked["seed"],
            needed=asked["needed"],
            borrow=asked["borrow"],
        )
        plan = rule.plan(start, wish)
    except (ValueError, OSError) as error:
        raise GpusliceError(str(error)) from error
    steps, unseen = rule.steps(plan), not sys.stderr.isatty()
    with click.progressbar(length=PARTS * steps, label="placing", file=sys.stderr, hidden=unseen) as bar:
        return rule.run(plan, lambda done: bar.update(int(PARTS * min(done, steps)) - bar.pos))
