"""A small writer of line charts as SVG: readable on light and dark pages, no library, no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 800, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 220, 40, 52
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # told apart by the colour-blind, too
TICKS = 5  # at least so many steps, if round numbers allow
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # round ones, in each power of ten


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn; both axes start at 0."""

    title: str
    across: str
    up: str
    lines: Sequence[Line]


def svg(chart: Chart) -> str:
    """The chart as an SVG document."""
    scale = _Scale(
        max((x for line in chart.lines for x, _ in line.points), default=1.0) or 1.0,
        round_up(max((y for line in chart.lines for _, y in line.points), default=1.0) or 1.0),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{_quoted(chart.title)}" font-family="sans-serif" font-size="13" fill="#777">',
        _text(LEFT, 22, chart.title, size=16),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, chart.across, anchor="middle"),
        f'<g transform="rotate(-90 16 {HEIGHT / 2})">{_text(16, HEIGHT / 2, chart.up, anchor="middle")}</g>',
        *_grid(scale),
        *(_line(line, COLORS[number % len(COLORS)], scale) for number, line in enumerate(chart.lines)),
        *(_legend(line, number) for number, line in enumerate(chart.lines)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _Scale:
    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.most_x

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.most_y


def round_step(most: float) -> float:
    """The largest round step of which at least `TICKS` make `most`, or nearly so."""
    power: float = 10.0 ** floor(log10(most / (TICKS - 1)))
    return max(step * power for step in STEPS if step * power <= most / (TICKS - 1))


def round_up(most: float) -> float:
    """The end of an axis: a whole number of round steps."""
    step = round_step(most)
    return ceil(most / step - 1e-9) * step


def _grid(scale: _Scale) -> list[str]:
    parts = []
    for x in _ticks(scale.most_x):
        parts.append(f'<path d="M{scale.x(x):.1f} {TOP}V{HEIGHT - BOTTOM}" {_stroke(x)}/>')
        parts.append(_text(scale.x(x), HEIGHT - BOTTOM + 18, f"{x:g}", anchor="middle"))
    for y in _ticks(scale.most_y):
        parts.append(f'<path d="M{LEFT} {scale.y(y):.1f}H{WIDTH - RIGHT}" {_stroke(y)}/>')
        parts.append(_text(LEFT - 8, scale.y(y) + 4, f"{y:g}", anchor="end"))
    return parts


def _ticks(most: float) -> list[float]:
    step = round_step(most)
    return [number * step for number in range(int(most / step + 1e-9) + 1)]


def _stroke(value: float) -> str:
    """The axes themselves are drawn stronger than the grid."""
    return 'stroke="#999" stroke-opacity="' + ("0.35" if value else "1") + '"'


def _line(line: Line, color: str, scale: _Scale) -> str:
    points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line.points)
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'


def _legend(line: Line, number: int) -> str:
    y, color = TOP + 14 + 22 * number, COLORS[number % len(COLORS)]
    start = WIDTH - RIGHT + 14
    bar = f'<path d="M{start} {y - 4}h18" stroke="{color}" stroke-width="3"/>'
    return bar + _text(start + 24, y, line.name)


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def _quoted(words: str) -> str:
    return escape(words, {'"': "&quot;"})
