"""The picture of ``gpuslice simulate --plot``: what each policy allocates while the pods arrive."""

from __future__ import annotations

from gpuslice.apps.cli.chart import Chart, Line
from gpuslice.apps.cli.simulation import Simulation
from gpuslice.apps.cli.simulation_text import asked_percent, question
from gpuslice.core.simulation.claims import SIMULATED
from gpuslice.core.words import counted

LEAST_START = 20.0  # %; a picture that could begin below begins at 0
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
"""Told apart by the colour-blind, too."""


def chart(simulation: Simulation) -> Chart:
    """The best policy first. Begins where the policies begin to differ, at 0 where they hardly do."""
    ordered = sorted(simulation.policies.items(), key=lambda item: -item[1].outcome.allocated_units)
    asked = asked_percent(simulation)
    lines = []
    for name, result in ordered:
        outcome = result.outcome
        on_the_way = ((float(at), pct) for at, pct in outcome.allocation_pct_at.items())
        points = ((0.0, 0.0), *on_the_way, (asked, outcome.allocation_pct))
        left = outcome.pods - outcome.placed
        rest = f"{counted(left, 'pod')} left over" if left else "all placed"
        color = COLORS[[policy.name for policy in SIMULATED].index(name) % len(COLORS)]
        lines.append(Line(name, points, color, f"{outcome.allocation_pct:.1f} %, {rest}"))
    full = min(asked, 100.0)
    most = ((0.0, 0.0), (full, full), (asked, full))
    lowest = min(line.points[-1][1] for line in lines)
    start = (lowest - (asked - lowest)) // 10 * 10
    return Chart(
        title="GPU allocated while the pods arrive, by placement policy",
        note=f"{simulation.plan.pods_name}: {question(simulation)}",
        across="GPU asked for so far, % of the cluster",
        up="GPU allocated, % of the cluster",
        lines=[*lines, Line("the most there could be", most, "#999", dashed=True)],
        start=start if asked - lowest > 1.0 and start >= LEAST_START else 0.0,
    )
