"""The chart of ``gpuslice simulate --plot``: what each policy allocates while the pods arrive, as SVG.

Readable on light and dark backgrounds, without a library or a script.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

from gpuslice.core.simulation.claims import SIMULATED
from gpuslice.core.words import counted
from gpuslice.diagnosis.simulate.rule import Simulation
from gpuslice.diagnosis.simulate.words import asked_percent, question

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 66, 56
AREA = (LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
STYLE = (
    "text{fill:#222}.soft{fill:#666}.grid{stroke:#888;stroke-opacity:.3}.axis{stroke:#888}"
    "@media (prefers-color-scheme:dark){text{fill:#eee}.soft{fill:#aaa}}"
)
TICKS = 5  # at least this many steps, if round numbers allow
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # round numbers, in each power of ten
LEAST_START = 20.0  # %; an axis that would start below this starts at 0
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
"""Distinguishable for the colour-blind, too."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, and its text in the legend."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = "#0072b2"
    note: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """The data of a chart; both axes begin at `start`."""

    title: str
    across: str
    up: str
    lines: Sequence[Line]
    note: str = ""
    start: float = 0.0


def chart(simulation: Simulation) -> Chart:
    """The best policy first. The axis begins where the policies start to differ, at 0 if they hardly do."""
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


def svg(chart: Chart) -> str:
    """The chart as an SVG document."""
    scale = _Scale(
        chart.start,
        _end((x for line in chart.lines for x, _ in line.points), chart.start),
        _end((y for line in chart.lines for _, y in line.points), chart.start),
    )
    middle, title = TOP + AREA[3] / 2, escape(chart.title, {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="13">',
        f"<style>{STYLE}</style>",
        '<clipPath id="area"><rect x="{}" y="{}" width="{}" height="{}"/></clipPath>'.format(*AREA),
        _text(LEFT, 24, chart.title, size=17),
        _text(LEFT, 45, chart.note, soft=True),
        _text(LEFT + AREA[2] / 2, HEIGHT - 12, chart.across, anchor="middle"),
        f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, chart.up, anchor="middle")}</g>',
    ]
    for x in _ticks(scale.start, scale.most_x):
        parts.append(f'<path d="M{scale.x(x):.1f} {TOP}V{HEIGHT - BOTTOM}" {_kind(x, scale)}/>')
        parts.append(_text(scale.x(x), HEIGHT - BOTTOM + 18, f"{x:g}", anchor="middle"))
    for y in _ticks(scale.start, scale.most_y):
        parts.append(f'<path d="M{LEFT} {scale.y(y):.1f}H{WIDTH - RIGHT}" {_kind(y, scale)}/>')
        parts.append(_text(LEFT - 8, scale.y(y) + 4, f"{y:g}", anchor="end"))
    for line in reversed(chart.lines):  # the first is drawn on top
        points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line.points)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{line.color}" {_width(line)} '
            'stroke-linejoin="round" clip-path="url(#area)"/>'
        )
    for number, line in enumerate(chart.lines):
        y, start = TOP + 12 + 42 * number, WIDTH - RIGHT + 18
        bar = f'<path d="M{start} {y - 4}h20" stroke="{line.color}" {_width(line)}/>'
        words = _text(start + 28, y, line.name) + _text(start + 28, y + 17, line.note, soft=True)
        parts.append(bar + words)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _end(values: Iterable[float], start: float) -> float:
    """The end of an axis, which always lies beyond its start."""
    most = max(values, default=start)
    return round_up(most - start) + start if most > start else start + 1.0


@dataclass(frozen=True, slots=True)
class _Scale:
    start: float
    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return LEFT + AREA[2] * (value - self.start) / (self.most_x - self.start)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - AREA[3] * (value - self.start) / (self.most_y - self.start)


def round_step(most: float) -> float:
    """The largest round step of which at least `TICKS` make `most`, or nearly so."""
    power: float = 10.0 ** floor(log10(most / (TICKS - 1)))
    return max(step * power for step in STEPS if step * power <= most / (TICKS - 1))


def round_up(most: float) -> float:
    """The end of an axis: a whole number of round steps."""
    step = round_step(most)
    return ceil(most / step - 1e-9) * step


def _ticks(start: float, most: float) -> list[float]:
    step = round_step(most - start)
    return [start + number * step for number in range(int((most - start) / step + 1e-9) + 1)]


def _kind(value: float, scale: _Scale) -> str:
    """The axes are drawn stronger than the grid."""
    return f'class="{"axis" if value == scale.start else "grid"}"'


def _width(line: Line) -> str:
    return 'stroke-width="1.5" stroke-dasharray="5 4"' if line.dashed else 'stroke-width="2.5"'


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, soft: bool = False
) -> str:
    if not words:
        return ""
    kind = ' class="soft"' if soft else ""
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {where}{kind}>{escape(words)}</text>"
