"""The live view of ``gpuslice top``: cards above, containers below; sorted, filtered, or as a tree.

Textual draws and reads the keyboard; the content comes from `top_print`. Imported only if there is a
terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.terminal_theme import TerminalTheme
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Input, Static

from gpuslice.apps.cli.top_print import (
    CARD_COLUMNS,
    CONTAINER_COLUMNS,
    SORTED_BY,
    WORDS,
    Cells,
    History,
    card_cells,
    container_cells,
    fitted,
    gib,
    headline,
    ratio,
    widths_for,
)
from gpuslice.apps.cli.top_screens import HelpScreen, PodScreen
from gpuslice.core.errors import GpusliceError
from gpuslice.diagnosis.cluster import UsageSource
from gpuslice.diagnosis.usage import ORDERS, CardUsage, ClusterUsage, ContainerUsage, by_most

CELL_GAP = 2  # textual's own: one blank on either side
SCROLLBAR = 1
DARK, LIGHT = "textual-dark", "textual-light"
LIGHT_COLOURS = (
    (0, 0, 0), (170, 28, 28), (30, 110, 30), (128, 82, 0), (30, 70, 180), (122, 62, 157), (0, 95, 130),
    (200, 200, 200),
)  # fmt: skip
"""The eight ANSI colours on a light background, where textual's own yellow is hardly readable."""


class TopApp(App[None]):
    """Reads `source` every `every_s`; `explain`, if given, explains NAMESPACE/POD, on a thread."""

    TITLE = "gpuslice top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { height: auto; max-height: 2; text-style: bold; }
    #status { height: 1; color: $text-muted; }
    #problems { height: auto; max-height: 4; color: $warning; }
    #filter { display: none; height: 1; border: none; }
    #cards { height: auto; max-height: 45%; }
    #containers { height: 1fr; }
    #title { height: 1; }
    #help { width: 90%; height: auto; max-height: 100%; padding: 0 2; }
    #help { border: round $primary; background: $surface; }
    HelpScreen { align: center middle; }
    DataTable { background: $background; }
    DataTable, VerticalScroll { scrollbar-size: 1 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit", key_display="q"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("enter", "open", "Pod"),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", "Sort back", show=False),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("n", "namespace", "Namespace"),
        Binding("t", "tree", "Tree"),
        Binding("p", "pause", "Pause"),
        Binding("d", "ground", "Dark", show=False),
        Binding("escape", "clear", "Clear", show=False),
    ]

    def __init__(
        self,
        source: UsageSource,
        every_s: float,
        *,
        context: str = "",
        namespace: str = "",
        explain: Callable[[str], str] | None = None,
        light: bool = False,
        sort: str = "",
    ) -> None:
        super().__init__()
        self.ansi_theme_light = TerminalTheme((224, 224, 224), (31, 31, 31), list(LIGHT_COLOURS))
        self.theme = LIGHT if light else DARK
        self._source = source
        self._every_s = every_s
        self._cluster = context
        self._explain = explain
        self._history = History()
        self._found = ClusterUsage((), ())
        self._read_at = ""
        self._rows: list[ContainerUsage | None] = []  # of the lower table; None for a line of the tree
        self._sort, self._reverse = sort, False
        self._namespace = namespace
        self._filter = ""
        self._tree = False
        self._paused = False

    # -- the screen -----------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static("reading the exporters …", id="headline", markup=False)
        yield DataTable(id="cards", cursor_type="row", zebra_stripes=False)
        yield Input(placeholder="part of a namespace, pod, container, node or model", id="filter")
        yield Static("", id="status", markup=False)
        yield DataTable(id="containers", cursor_type="row")
        yield Static("", id="problems", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#containers", DataTable).focus()
        self.read_now()
        self.set_interval(self._every_s, lambda: None if self._paused else self.read_now())

    def on_resize(self) -> None:
        self._show()

    @work(exclusive=True, group="read")
    async def read_now(self) -> None:
        """Read again; if that fails, the old figures stay on the screen, with a message."""
        try:
            found = await self._source.read()
        except GpusliceError as error:
            sentence = f"{time.strftime('%H:%M:%S')}, shown as it was before: {error}"
            found = replace(self._found, problems=(sentence,))
        else:
            self._history.take(found)
        self.take(found)

    def take(self, found: ClusterUsage) -> None:
        """Show a new reading."""
        self._found, self._read_at = found, time.strftime("%H:%M:%S")
        self._show()
        if isinstance(self.screen, PodScreen):
            self.screen.refresh_usage(found)

    def _show(self) -> None:
        found, main = self._found, self.screen_stack[0] if self.screen_stack else self.screen
        if not self._read_at:
            return
        main.query_one("#headline", Static).update(f"{headline(found, self._cluster)} · {self._read_at}")
        main.query_one("#problems", Static).update("\n".join(found.problem_lines))
        containers, cards = self._chosen()
        order = f"by {self._sort or 'node'}{', reversed' if self._reverse else ''}"
        chosen = [
            f"namespace {self._namespace}" if self._namespace else "all namespaces",
            "as a tree" if self._tree else order,
            *([f'filter "{self._filter}"'] if self._filter else []),
            *([f"{len(containers)} of {len(found.containers)} containers"] if containers else []),
            *(["paused"] if self._paused else []),
        ]
        main.query_one("#status", Static).update(" · ".join(chosen))

        width = self.size.width
        upper, lower = main.query_one("#cards", DataTable), main.query_one("#containers", DataTable)
        upper.display = not self._tree
        self._fill(upper, [card_cells(row, self._history) for row in cards], CARD_COLUMNS, width)
        self._rows, lines = [], []
        for row in self._tree_rows(cards, containers) if self._tree else containers:
            if isinstance(row, ContainerUsage):
                cells = container_cells(row, self._history)
                if self._tree:
                    cells["POD"] = Text(f"    {row.namespace}/{row.pod}")
                lines.append(cells)
                self._rows.append(row)
            else:
                lines.append(row)
                self._rows.append(None)
        columns = [name for name in CONTAINER_COLUMNS if not self._tree or name not in {"NAMESPACE", "NODE"}]
        self._fill(lower, lines, columns, width)

    def _fill(
        self, table: DataTable[Text], rows: Sequence[Cells], columns: Sequence[str], width: int
    ) -> None:
        """Rebuild the table, keeping the cursor and the scroll position."""
        at, left, top = table.cursor_row, table.scroll_x, table.scroll_y
        sorted_by = self._sort if table.id == "containers" else ""
        mark = ("▲" if self._reverse else "▼") if sorted_by else ""
        room = width - SCROLLBAR - CELL_GAP - len(mark)
        widths = widths_for(rows, columns, room)
        table.clear(columns=True)
        for name, wide in widths.items():
            head = Text(
                name + mark if name == sorted_by else name, justify="left" if name in WORDS else "right"
            )
            table.add_column(head, width=max(wide, len(head)), key=name)
        for cells in rows:
            aligned = []
            for name, cell in zip(widths, fitted(cells, widths), strict=True):
                cell.justify = "left" if name in WORDS else "right"
                aligned.append(cell)
            table.add_row(*aligned)
        if rows:
            table.move_cursor(row=min(at, len(rows) - 1), animate=False, scroll=False)
            table.scroll_to(left, top, animate=False)

    def _chosen(self) -> tuple[list[ContainerUsage], list[CardUsage]]:
        """The rows that namespace and filter leave, sorted."""
        models = {(card.node, card.gpu): card.model for card in self._found.cards}
        word = self._filter.lower()

        def has_word(*texts: str) -> bool:
            return any(word in text.lower() for text in texts)

        containers = [
            row
            for row in self._found.containers
            if (not self._namespace or row.namespace == self._namespace)
            and has_word(row.namespace, row.pod, row.container, row.node, models.get((row.node, row.gpu), ""))
        ]
        if order := SORTED_BY.get(self._sort, self._sort if self._sort in ORDERS else ""):
            containers = by_most(containers, order, least=self._reverse)
        elif self._sort == "OF LIMIT":
            containers.sort(
                key=lambda row: ratio(row.used_bytes, row.promised_bytes) or 0, reverse=not self._reverse
            )
        elif self._sort:
            attribute = self._sort.lower()
            containers.sort(key=lambda row: str(getattr(row, attribute)), reverse=self._reverse)
        elif self._reverse:
            containers.reverse()
        where = {(row.node, row.gpu) for row in containers}
        cards = [
            card
            for card in self._found.cards
            if (not self._namespace and has_word(card.node, card.model)) or (card.node, card.gpu) in where
        ]
        return containers, cards

    def _tree_rows(
        self, cards: Sequence[CardUsage], containers: Sequence[ContainerUsage]
    ) -> list[Cells | ContainerUsage]:
        """A line for each node and each card, and below it the containers that use it."""
        rows: list[Cells | ContainerUsage] = []
        empty = {name: Text("") for name in CONTAINER_COLUMNS}
        for node in dict.fromkeys(card.node for card in cards):
            here = [card for card in cards if card.node == node]
            used = sum(each.used_bytes or 0 for each in here)
            total = sum(each.total_bytes or 0 for each in here)
            memory = Text(f"{gib(used)}/{gib(total)}", "bold")
            rows.append({**empty, "POD": Text(node, "bold"), "NODE": Text(node), "MEMORY": memory})
            for card in here:
                cells = card_cells(card, self._history)
                name = Text(f"  card {card.gpu} {card.model}", "" if card.up else "red")
                copied = {"MEMORY": cells["MEMORY"], "SM": cells["UTIL"], "HISTORY": cells["HISTORY"]}
                rows.append({**empty, "POD": name, "NODE": Text(node), "GPU": Text(card.gpu), **copied})
                rows += [row for row in containers if (row.node, row.gpu) == (node, card.gpu)]
        return rows

    # -- keys -----------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """On a page of its own, only its own keys are shown and active."""
        return len(self.screen_stack) < 2 or action in {"pop_screen", "quit"}

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_open(self) -> None:
        at = self.query_one("#containers", DataTable).cursor_row
        row = self._rows[at] if 0 <= at < len(self._rows) else None
        if row is not None:
            self.push_screen(PodScreen(row, self._history, self._explain))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter in a table arrives as this event."""
        if event.data_table.id == "containers":
            self.action_open()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        name = str(event.column_key.value)
        if event.data_table.id == "containers" and name != "HISTORY":
            self._reverse = not self._reverse if name == self._sort else False
            self._sort = name
            self._show()

    def action_sort(self, step: int) -> None:
        columns = ["", *(name for name in CONTAINER_COLUMNS if name != "HISTORY")]
        at = columns.index(self._sort) if self._sort in columns else 0  # else an order of --sort
        self._sort = columns[(at + step) % len(columns)]
        self._show()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._show()

    def action_tree(self) -> None:
        self._tree = not self._tree
        self._show()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._show()

    def action_ground(self) -> None:
        self.theme = DARK if self.theme == LIGHT else LIGHT

    def action_namespace(self) -> None:
        names = ["", *sorted({row.namespace for row in self._found.containers})]
        at = names.index(self._namespace) if self._namespace in names else 0
        self._namespace = names[(at + 1) % len(names)]
        self._show()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value
        self._show()

    def on_input_submitted(self) -> None:
        self.query_one("#filter", Input).display = False
        self.query_one("#containers", DataTable).focus()

    def action_clear(self) -> None:
        """Clear filter and namespace."""
        box = self.query_one("#filter", Input)
        box.value, box.display, self._namespace = "", False, ""
        self.query_one("#containers", DataTable).focus()
        self._show()
