"""The pages of ``gpuslice top`` beside its tables: the keys, and one container."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Static

from gpuslice.apps.cli.top_print import History, gib, key_of, percent, shown, sparkline
from gpuslice.core.errors import GpusliceError
from gpuslice.diagnosis.usage import ClusterUsage, ContainerUsage

HELP = """\
↑ ↓ PgUp PgDn  move
Enter          the container's page, with `gpuslice explain`
s, S, r        sort by the next column, the one before; reversed
               a click on a heading sorts by it
/              filter by a part of a namespace, pod, container,
               node or model; Esc shows all again
n              the next namespace, in the end all of them again
t              tree: nodes, their cards, and who is on them
Tab            between cards and containers
p              pause, and go on
d              dark or light
?, q           this page; quit

UTIL, SM       how busy the card is; the container's part of it
MEMORY         used of all there is; of the container's limit
GIVEN OUT      how much of the card containers may use
REFUSED        requests for memory beyond the limit
red            wrong now: a card that does not answer, memory
               that was refused within the last readings
yellow         soon: 95 % of a card or limit, a card of 85 °C
"""


class HelpScreen(ModalScreen[None]):
    """The keys, and the meaning of figures and colours."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "app.pop_screen", "Back")
    ]

    def compose(self) -> ComposeResult:
        yield VerticalScroll(Static(HELP, markup=False), id="help")
        yield Footer()  # otherwise that of the page below is seen, where q quits


class PodScreen(Screen[None]):
    """One container: its figures, their history, and what `explain` says about its pod."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,backspace", "app.pop_screen", "Back")]

    def __init__(self, row: ContainerUsage, history: History, explain: Callable[[str], str] | None) -> None:
        super().__init__()
        self._row = row
        self._history = history
        self._explain = explain

    def compose(self) -> ComposeResult:
        row = self._row
        yield Static(Text(f"{row.namespace}/{row.pod}, container {row.container}", "bold"), id="title")
        with VerticalScroll():
            yield Static(self._figures(), id="figures")
            yield Static("asking the cluster …" if self._explain else "", id="explanation")
        yield Footer()

    def on_mount(self) -> None:
        if self._explain is not None:
            self._ask(self._explain)

    def refresh_usage(self, found: ClusterUsage) -> None:
        """Show its current usage, or the last known if it is gone."""
        self._row = next((row for row in found.containers if key_of(row) == key_of(self._row)), self._row)
        self.query_one("#figures", Static).update(self._figures())

    @work(thread=True)
    def _ask(self, explain: Callable[[str], str]) -> None:
        try:
            text = explain(f"{self._row.namespace}/{self._row.pod}")
        except GpusliceError as error:
            text = f"not known: {error}"
        self.app.call_from_thread(self.query_one("#explanation", Static).update, Text(text))

    def _figures(self) -> Text:
        row, key = self._row, key_of(self._row)
        used, busy = self._history.seen.get(key, ()), self._history.busy.get(key, ())
        peak = f", {gib(row.peak_bytes)} at its peak" if row.peak_bytes is not None else ""
        borrowed = f", {gib(row.borrowed_bytes)} of it borrowed" if row.borrowed_bytes else ""
        lines = [
            f"on         node {row.node}, card {row.gpu}",
            f"memory     {gib(row.used_bytes)} of {gib(row.limit_bytes)}{borrowed}{peak}   {sparkline(used)}",
            f"compute    {percent(row.sm_ratio)} of the card's SMs   {sparkline(busy)}",
            f"refused    {shown(row.refused, '')} requests for memory",
            f"waited     {shown(row.throttled_seconds, ' s')} for its share of compute",
            f"processes  {shown(row.processes, '')}",
        ]
        return Text("\n".join(lines) + "\n")
