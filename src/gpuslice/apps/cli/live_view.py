"""The tables of ``gpuslice top``: as wide and as high as the terminal, whatever there is to show."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuslice.adapters.kube.errors import KubeError
from gpuslice.apps.cli.live import CardRow, ContainerRow, Picture, Source

R = TypeVar("R")
GIB = 1 << 30
KEPT = 24
_PIPE = ConsoleDimensions(1000, 100_000)  # a file or a pipe has no size to be cut to
_BARS = "▁▂▃▄▅▆▇█"
_GAP = 2
_HISTORY = "HISTORY"
_WORDS = {"NODE", "MODEL", "NAMESPACE", "POD", "CONTAINER", _HISTORY}
_NOT_NEEDED = ("MODEL", "CONTAINER", "POWER", "GIVEN OUT", "NAMESPACE", _HISTORY, "TEMP", "NODE")
"""Columns that a narrow terminal goes without, the first of them first: figures are never cut."""

CARD_COLUMNS = ("NODE", "GPU", "MODEL", "UTIL", "MEMORY", "GIVEN OUT", "TEMP", "POWER", _HISTORY)
CONTAINER_COLUMNS = (
    *("NAMESPACE", "POD", "CONTAINER", "NODE", "GPU"),
    *("MEMORY", "OF LIMIT", "SM", "REFUSED", _HISTORY),
)

_Key = tuple[str, ...]
_Line = tuple[dict[str, str], str]  # what stands in each column, and the line's style


def show_once(found: Picture) -> None:
    console, history = Console(), History()
    if not console.is_terminal:
        console = Console(width=_PIPE.width)
    history.take(found)
    console.print(view(found, history, ConsoleDimensions(console.width, _PIPE.height)))


def watch(source: Source, every_s: float) -> None:
    """Until interrupted. What cannot be read for a while stays as it was, and that is said."""
    console, history, found = Console(), History(), source.read()
    history.take(found)
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        try:
            while True:
                screen.update(view(found, history, console.size), refresh=True)
                time.sleep(every_s)
                found = _look(source, history, found)
        except KeyboardInterrupt:
            return


def _look(source: Source, history: History, last: Picture) -> Picture:
    try:
        found = source.read()
    except KubeError as error:
        return replace(last, problems=(f"{time.strftime('%H:%M:%S')}, shown as it was before: {error}",))
    history.take(found)
    return found


@dataclass(slots=True)
class History:
    """The last figures of each row, 0…1, for its sparkline."""

    seen: dict[_Key, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))

    def take(self, found: Picture) -> None:
        for card in found.cards:
            self._add((card.uuid,), card.utilization_ratio)
        for container in found.containers:
            self._add(_key(container), _ratio(container.used_bytes, container.limit_bytes))

    def drawn(self, key: _Key) -> str:
        return "".join(_BARS[min(len(_BARS) - 1, int(each * len(_BARS)))] for each in self.seen[key])

    def _add(self, key: _Key, value: float | None) -> None:
        if value is not None:
            self.seen[key].append(value)


def _key(row: ContainerRow) -> _Key:
    return row.node, row.gpu, row.namespace, row.pod, row.container


def view(found: Picture, history: History, size: ConsoleDimensions) -> Group:
    """Cards above, containers below, what went wrong at the end."""
    problems = [Text(sentence, style="yellow") for sentence in found.problems]
    if not found.cards and not found.containers:
        return Group(*problems)
    room = size.height - len(problems) - 2
    for_cards = min(len(found.cards), max(room // 2, room - len(found.containers)))
    cards, more_cards = _chosen(found.cards, for_cards, _card_weight)
    containers, more = _chosen(found.containers, room - for_cards, _container_weight)
    return Group(
        _table([_card_line(row, history) for row in cards], CARD_COLUMNS, size.width),
        *_more(more_cards, "cards"),
        _table([_container_line(row, history) for row in containers], CONTAINER_COLUMNS, size.width),
        *_more(more, "containers"),
        *problems,
    )


def _chosen(rows: Sequence[R], room: int, weight: Callable[[R], tuple[float, ...]]) -> tuple[list[R], int]:
    """The weightiest that there is room for, in their order, and how many are not among them."""
    if len(rows) <= room:
        return list(rows), 0
    places = sorted(range(len(rows)), key=lambda place: weight(rows[place]), reverse=True)[: max(room - 1, 0)]
    return [rows[place] for place in sorted(places)], len(rows) - len(places)


def _card_weight(row: CardRow) -> tuple[float, ...]:
    return float(not row.up), row.utilization_ratio or 0, row.used_bytes or 0


def _container_weight(row: ContainerRow) -> tuple[float, ...]:
    return row.sm_ratio or 0, row.used_bytes or 0


def _more(count: int, what: str) -> list[RenderableType]:
    return [Text(f"… and {count} {what} that use less", style="dim")] if count else []


def _card_line(row: CardRow, history: History) -> _Line:
    cells = (
        row.node,
        row.gpu,
        row.model,
        _percent(row.utilization_ratio) if row.up else "lost",
        f"{_gib(row.used_bytes)}/{_gib(row.total_bytes)}",
        _percent(_ratio(row.allocated_bytes, row.total_bytes)),
        _shown(row.temperature_celsius, "C"),
        _shown(row.power_watts, "W"),
        history.drawn((row.uuid,)),
    )
    return dict(zip(CARD_COLUMNS, cells, strict=True)), "" if row.up else "red"


def _container_line(row: ContainerRow, history: History) -> _Line:
    cells = (
        row.namespace,
        row.pod,
        row.container,
        row.node,
        row.gpu,
        f"{_gib(row.used_bytes)}/{_gib(row.limit_bytes)}",
        _percent(_ratio(row.used_bytes, row.limit_bytes)),
        _percent(row.sm_ratio),
        _shown(row.refused, ""),
        history.drawn(_key(row)),
    )
    return dict(zip(CONTAINER_COLUMNS, cells, strict=True)), "red" if row.refused else ""


def _table(lines: Sequence[_Line], columns: Iterable[str], width: int) -> Table:
    widths = {name: max(map(cell_len, (name, *(cells[name] for cells, _ in lines)))) for name in columns}
    bars = widths[_HISTORY]
    widths[_HISTORY] = len(_HISTORY)  # of it, the newest part is as good
    for name in _NOT_NEEDED:
        if _total(widths) > width:
            widths.pop(name, None)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name in widths:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    room = min(bars, len(_HISTORY) + width - _total(widths))
    for cells, style in lines:
        shown = {**cells, _HISTORY: cells[_HISTORY][-room:]}
        table.add_row(*(shown[name] for name in widths), style=style)
    return table


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _gib(amount: float | None) -> str:
    return "-" if amount is None else f"{amount / GIB:.1f}G"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio * 100:.0f}%"


def _shown(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
