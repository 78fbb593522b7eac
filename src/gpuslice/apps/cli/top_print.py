"""What ``gpuslice top`` shows: the columns, their figures, and the tables that are printed once.

The live view (`top_app`) shows the same columns; which of them fit a terminal is decided here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuslice.core.words import counted, lasting
from gpuslice.diagnosis.table import COMFORTABLE, LEAST, widths_within
from gpuslice.diagnosis.usage import CardUsage, ClusterUsage, ContainerUsage

GIB = 1 << 30
KEPT = 24
PIPE_WIDTH = 1000
_BARS = "▁▂▃▄▅▆▇█"
GAP = 2
HISTORY = "HISTORY"
WORDS = {"NODE", "MODEL", "NAMESPACE", "POD", "CONTAINER", HISTORY}
CARD_COLUMNS = ("NODE", "GPU", "MODEL", "UTIL", "MEMORY", "GIVEN OUT", "TEMP", "POWER", HISTORY)
CONTAINER_COLUMNS = (
    *("NAMESPACE", "POD", "CONTAINER", "NODE", "GPU"),
    *("MEMORY", "OF LIMIT", "SM", "IDLE", "REFUSED", HISTORY),
)
NOT_NEEDED = ("MODEL", "CONTAINER", "POWER", "GIVEN OUT", HISTORY, "IDLE", "TEMP", "NODE")
"""Columns that a narrow terminal omits, the first of them first: figures are never cut off."""
NEARLY_FULL = 0.95
HOT_CELSIUS = 85.0

Cells = dict[str, Text]
Key = tuple[str, ...]


def key_of(row: CardUsage | ContainerUsage) -> Key:
    if isinstance(row, CardUsage):
        return (row.uuid,)
    return row.node, row.gpu, row.namespace, row.pod, row.container


@dataclass(slots=True)
class History:
    """The recent figures of each row: 0…1 for its sparkline, and refusals, of which only new ones are
    highlighted.
    """

    seen: dict[Key, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))
    busy: dict[Key, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))
    refused: dict[Key, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))

    def take(self, found: ClusterUsage) -> None:
        """Add a reading. Rows that are gone are forgotten."""
        here = {*map(key_of, found.cards), *map(key_of, found.containers)}
        for figures in (self.seen, self.busy, self.refused):
            for key in figures.keys() - here:
                del figures[key]
        for card in found.cards:
            _append(self.seen[key_of(card)], card.utilization_ratio)
        for each in found.containers:
            _append(self.seen[key_of(each)], ratio(each.used_bytes, each.promised_bytes))
            _append(self.busy[key_of(each)], each.sm_ratio)
            _append(self.refused[key_of(each)], each.refused)

    def newly_refused(self, key: Key) -> int:
        """How many within the kept readings; a counter that was reset counts from there."""
        seen = self.refused.get(key) or (0.0,)
        return int(max(0.0, seen[-1] - seen[0]))


def _append(figures: deque[float], value: float | None) -> None:
    if value is not None:
        figures.append(value)


def sparkline(figures: Iterable[float]) -> str:
    return "".join(_BARS[max(0, min(len(_BARS) - 1, int(each * len(_BARS))))] for each in figures)


def card_cells(row: CardUsage, history: History) -> Cells:
    """Red: it does not answer. Yellow: it is nearly full, or hot. Past events are not coloured."""
    used = ratio(row.used_bytes, row.total_bytes)
    hot = row.temperature_celsius is not None and row.temperature_celsius >= HOT_CELSIUS
    return {
        "NODE": Text(row.node),
        "GPU": Text(row.gpu),
        "MODEL": Text(row.model),
        "UTIL": Text(percent(row.utilization_ratio)) if row.up else Text("lost", "bold red"),
        "MEMORY": Text(f"{gib(row.used_bytes)}/{gib(row.total_bytes)}", _warning((used or 0) >= NEARLY_FULL)),
        "GIVEN OUT": Text(percent(ratio(row.allocated_bytes, row.total_bytes))),
        "TEMP": Text(shown(row.temperature_celsius, "C"), _warning(hot)),
        "POWER": Text(shown(row.power_watts, "W")),
        HISTORY: Text(sparkline(history.seen.get(key_of(row), ())), "cyan"),
    }


def container_cells(row: ContainerUsage, history: History) -> Cells:
    """Red: it uses more than it asked for, or was refused memory within the last readings. Yellow: nearly
    all of its limit is used. After a +: what it borrowed beyond its request."""
    key, used = key_of(row), ratio(row.used_bytes, row.promised_bytes)
    style = "bold red" if row.excess_bytes else _warning((used or 0) >= NEARLY_FULL)
    new = history.newly_refused(key)
    borrowed = f" +{gib(row.borrowed_bytes)}" if row.borrowed_bytes else ""
    refused = Text(f"{shown(row.refused, '')} (+{new})", "bold red") if new else Text(shown(row.refused, ""))
    return {
        "NAMESPACE": Text(row.namespace),
        "POD": Text(row.pod),
        "CONTAINER": Text(row.container),
        "NODE": Text(row.node),
        "GPU": Text(row.gpu),
        "MEMORY": Text(f"{gib(row.used_bytes)}/{gib(row.promised_bytes)}{borrowed}"),
        "OF LIMIT": Text(percent(used), style),
        "SM": Text(percent(row.sm_ratio)),
        "IDLE": Text("-" if row.idle_seconds is None else lasting(row.idle_seconds)),
        "REFUSED": refused,
        HISTORY: Text(sparkline(history.seen.get(key, ())), "cyan"),
    }


def _warning(is_on: bool) -> str:
    return "yellow" if is_on else ""


def widths_for(rows: Sequence[Cells], columns: Iterable[str], width: int) -> Mapping[str, int]:
    """Column → width, for the columns that fit a terminal of `width`; names are cut to their column."""
    widths = {name: max(map(cell_len, (name, *(cells[name].plain for cells in rows)))) for name in columns}
    bars = widths[HISTORY]
    widths[HISTORY] = len(HISTORY)  # a history cut to its newest part still serves
    # of the last, MEMORY shows both figures
    drop = dict.fromkeys(NOT_NEEDED, COMFORTABLE) | {"OF LIMIT": LEAST}
    widths = widths_within(width, widths, WORDS, drop)
    if HISTORY in widths:
        spare = width - sum(widths.values()) - GAP * (len(widths) - 1)
        widths[HISTORY] += max(0, min(bars - len(HISTORY), spare))
    return widths


def fitted(cells: Cells, widths: Mapping[str, int]) -> list[Text]:
    """The cells of one row for these columns; of the history, the newest part."""
    bars = cells[HISTORY]
    return [
        bars[-wide:] if name == HISTORY and len(bars) else _cut(cells[name], wide)
        for name, wide in widths.items()
    ]


def _cut(name: Text, width: int) -> Text:
    """Keeps its beginning and its end, which distinguish replicas and nodes."""
    if cell_len(name.plain) <= width:
        return name
    tail = width // 3
    return Text(f"{set_cell_size(name.plain, width - tail - 1)}…{name.plain[-tail:]}", name.style)


def headline(found: ClusterUsage, context: str = "") -> str:
    """The whole cluster in one line."""
    cards, up = found.cards, [card for card in found.cards if card.up]
    nodes = {card.node for card in cards}
    lost = f" ({len(cards) - len(up)} lost)" if len(up) < len(cards) else ""
    total = sum(card.total_bytes or 0 for card in up)
    used = sum(card.used_bytes or 0 for card in up)
    given = sum(card.allocated_bytes or 0 for card in up)
    busy = [card.utilization_ratio for card in up if card.utilization_ratio is not None]
    parts = [
        f"{counted(len(nodes), 'node')}, {counted(len(cards), 'card')}{lost}",
        f"memory {gib(used)}/{gib(total)} used ({percent(ratio(used, total))})",
        f"{percent(ratio(given, total))} given out",
        f"busy {percent(sum(busy) / len(busy)) if busy else '-'}",
        counted(len(found.containers), "container"),
    ]
    return " · ".join([context, *parts] if context else parts)


def show_once(found: ClusterUsage, console: Console | None = None) -> None:
    """Cards above, containers below, errors at the end."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH, file=console.file)  # a file or a pipe has no width to cut to
    history = History()
    history.take(found)
    if found.cards or found.containers:
        console.print(table([card_cells(row, history) for row in found.cards], CARD_COLUMNS, console.width))
        rows = [container_cells(row, history) for row in found.containers]
        console.print(table(rows, CONTAINER_COLUMNS, console.width))
    for sentence in found.problem_lines:
        console.print(Text(sentence, style="yellow"))


def table(rows: Sequence[Cells], columns: Iterable[str], width: int) -> Table:
    widths = widths_for(rows, columns, width)
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name in widths:
        made.add_column(name, justify="left" if name in WORDS else "right", no_wrap=True)
    for cells in rows:
        made.add_row(*fitted(cells, widths))
    return made


SORTED_BY = {"MEMORY": "used", "SM": "sm", "IDLE": "idle", "REFUSED": "refused"}
"""Columns of figures, by what of `usage.ORDERS` they show. All others are sorted alphabetically."""


def gib(amount: float | None) -> str:
    return "-" if amount is None else f"{amount / GIB:.1f}G"


def percent(part: float | None) -> str:
    return "-" if part is None else f"{part * 100:.0f}%"


def shown(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
