"""``gpuslice top`` in terminals of all sizes, and when nothing can be read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static
from textual.widgets._footer import FooterKey

from gpuslice.adapters.kube.errors import KubeError
from gpuslice.apps.cli.top import SORTS
from gpuslice.apps.cli.top_app import CELL_GAP, SCROLLBAR, TopApp
from gpuslice.apps.cli.top_print import History, container_cells, show_once
from gpuslice.apps.cli.top_screens import HelpScreen, PodScreen
from gpuslice.diagnosis.exporters import UrlSource
from gpuslice.diagnosis.usage import ORDERS, CardUsage, ClusterUsage, ContainerUsage, by_most

GIB = 1 << 30
NODE = "cn-hangzhou.192.168.2.167"


def shown(found: ClusterUsage, width: int = 120) -> list[str]:
    """The lines that are printed into a terminal of this width."""
    console = Console(width=width, file=StringIO(), force_terminal=True, color_system=None)
    show_once(found, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def card(number: int, busy: float = 0.25) -> CardUsage:
    return CardUsage(
        NODE, str(number), f"GPU-{number}", "NVIDIA H100 80GB HBM3", True, busy, 60 * GIB, 70 * GIB, 80 * GIB
    )


def container(
    number: int, sm_ratio: float = 0.5, *, namespace: str = "default", gpu: str = "0", refused: int = 17
) -> ContainerUsage:
    return ContainerUsage(
        *(NODE, gpu, namespace, f"app-{number}", "main"),
        used_bytes=3 * GIB,
        limit_bytes=4 * GIB,
        allocated_bytes=4 * GIB,
        peak_bytes=3.5 * GIB,
        sm_ratio=sm_ratio,
        refused=refused,
        throttled_seconds=2,
        processes=1,
    )


ONE = ClusterUsage((card(0),), (container(0),))


@given(st.integers(60, 300))
def test_figures_are_whole_in_any_terminal(width: int) -> None:
    lines = shown(ONE, width)
    assert all(len(line) <= width for line in lines)
    for figure in ("25%", "60.0G/80.0G", "app-0", "3.0G/4.0G", "75%", "50%", "17"):
        assert any(figure in line for line in lines), (figure, lines)


def test_what_is_borrowed_is_shown_beside_what_is_used() -> None:
    borrower = replace(container(0), used_bytes=6 * GIB, limit_bytes=8 * GIB, borrowed_bytes=2 * GIB)
    lines = shown(ClusterUsage((card(0),), (borrower,)), 120)
    assert any("6.0G/8.0G +2.0G" in line for line in lines), lines
    assert borrower.wasted_bytes == 0


def test_a_terminal_of_80_columns_still_tells_the_namespace() -> None:
    assert any(line.startswith("default") and "app-0" in line for line in shown(ONE, 80))


LONG_NAMES = ClusterUsage(
    (card(0),),
    tuple(
        replace(
            container(number),
            namespace=f"notebooks-of-the-whole-department-{number}",
            pod=f"{'x' * 40}-{number}",
        )
        for number in range(30)
    ),
)


def test_a_long_name_is_cut_in_its_middle_and_drives_out_no_column() -> None:
    (heads,) = [line for line in shown(LONG_NAMES, 80) if line.startswith("NAMESPACE")]
    assert heads.split() == ["NAMESPACE", "POD", "GPU", "MEMORY", "OF", "LIMIT", "SM", "REFUSED"]
    assert any(re.match(r"notebooks-\S*…\S+ent-7 +x+…x+-7 ", line) for line in shown(LONG_NAMES, 80))
    assert any("notebooks-of-the-whole-department-7" in line for line in shown(LONG_NAMES, 200))


def test_beside_long_names_figures_are_whole_in_60_columns() -> None:
    lines = shown(LONG_NAMES, 60 - SCROLLBAR - CELL_GAP)  # what the live view leaves
    (heads,) = [line for line in lines if line.startswith("NAMESPACE")]
    assert heads.split() == ["NAMESPACE", "POD", "GPU", "MEMORY", "SM", "REFUSED"]
    assert any(re.search(r"…\S+-7 +0 +3.0G/4.0G +50% +17$", line.rstrip()) for line in lines), lines


def test_a_wide_terminal_shows_everything() -> None:
    text = "\n".join(shown(ONE, 160))
    for part in (NODE, "NVIDIA H100 80GB HBM3", "88%", "default", "main", "▃", "▇"):
        assert part in text


def test_only_what_was_refused_of_late_is_alarming() -> None:
    history = History()
    history.take(ClusterUsage((), (container(0, refused=17),)))
    assert container_cells(container(0, refused=17), history)["REFUSED"].plain == "17"
    history.take(ClusterUsage((), (container(0, refused=19),)))
    cell = container_cells(container(0, refused=19), history)["REFUSED"]
    assert (cell.plain, cell.style) == ("19 (+2)", "bold red")
    for _ in range(30):
        history.take(ClusterUsage((), (container(0, refused=19),)))
    cell = container_cells(container(0, refused=19), history)["REFUSED"]
    assert (cell.plain, cell.style) == ("19", "")


def test_unknown_is_not_nought() -> None:
    found = ClusterUsage((CardUsage(NODE, "0", "GPU-0", up=False),), ())
    assert "lost" in shown(found)[1]
    assert "-/-" in shown(found)[1]


async def test_where_nothing_can_be_read_there_is_only_the_reason() -> None:
    found = await UrlSource(["127.0.0.1:1"]).read()
    assert shown(found) == ["http://127.0.0.1:1/metrics: Connection refused"]


# -- the live view ----------------------------------------------------------------------------------------


class Playing:
    """A source that gives these, then the last of them again and again."""

    def __init__(self, *readings: ClusterUsage | Exception) -> None:
        self.readings = list(readings)

    async def read(self) -> ClusterUsage:
        found = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if isinstance(found, Exception):
            raise found
        return found


MANY = ClusterUsage(
    (card(0), card(1, busy=0.9)),
    (
        container(0, 0.5, namespace="team-a"),
        container(1, 0.9, namespace="team-b", gpu="1"),
        container(2, 0.1, namespace="team-b", gpu="1"),
    ),
)
NEVER_S = 3600.0  # the test reads when it wants to


class Screen:
    """The app at work, and what stands on its screen."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.settled()

    async def settled(self) -> None:
        await self.app.workers.wait_for_complete()
        await self.pilot.pause()

    def text(self, name: str) -> str:
        return str(self.app.screen.query_one(name, Static).render())

    def rows(self, name: str = "#containers") -> list[list[str]]:
        table = self.app.screen_stack[0].query_one(name, DataTable)
        return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]

    def pods(self) -> list[str]:
        return [next(cell for cell in row if "app-" in cell) for row in self.rows()]

    def columns(self, name: str = "#containers") -> list[str]:
        table = self.app.screen_stack[0].query_one(name, DataTable)
        return [str(column.label) for column in table.ordered_columns]


@contextlib.asynccontextmanager
async def running(
    *readings: ClusterUsage | Exception,
    width: int = 120,
    explain: Callable[[str], str] | None = None,
    light: bool = False,
    sort: str = "",
) -> AsyncIterator[Screen]:
    app = TopApp(Playing(*readings), NEVER_S, context="lab", explain=explain, light=light, sort=sort)
    async with app.run_test(size=(width, 30)) as pilot:
        screen = Screen(app, pilot)
        await screen.settled()
        yield screen


async def test_the_head_counts_the_whole_cluster() -> None:
    async with running(MANY) as screen:
        head = "lab · 1 node, 2 cards · memory 120.0G/160.0G used (75%) · 88% given out · busy 57%"
        assert screen.text("#headline").startswith(f"{head} · 3 containers")


async def test_it_sorts_by_the_next_column_and_the_other_way_round() -> None:
    async with running(MANY) as screen:
        assert screen.pods() == ["app-0", "app-1", "app-2"]
        for _ in range(8):  # NAMESPACE … SM
            await screen.press("s")
        assert "by SM" in screen.text("#status")
        assert screen.pods() == ["app-1", "app-0", "app-2"]
        await screen.press("r")
        assert screen.pods() == ["app-2", "app-0", "app-1"]


async def test_it_begins_in_the_order_that_was_asked_for() -> None:
    async with running(MANY, sort="sm") as screen:
        assert "by sm" in screen.text("#status")
        assert screen.pods() == ["app-1", "app-0", "app-2"]
        await screen.press("s")
        assert "by NAMESPACE" in screen.text("#status")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("least", [False, True])
def test_what_is_not_known_comes_last_in_every_order(order: str, least: bool) -> None:
    unknown = ContainerUsage(NODE, "0", "default", "unknown", "main")
    figures: dict[str, Any] = {
        "used_bytes": 3.0,
        "limit_bytes": 2.0,
        "peak_bytes": 3.0,
        "idle_seconds": 9.0,
        "sm_ratio": 0.5,
    }
    some = replace(unknown, pod="some", **figures, refused=1.0)
    zeros: dict[str, Any] = dict.fromkeys(figures, 0.0)
    none = replace(unknown, pod="none", **zeros, refused=0.0)
    found = [each.pod for each in by_most([unknown, none, some], order, least=least)]
    known = [each for each in found if each != "unknown" or order == "excess"]
    assert (found[-1] == "unknown" or order == "excess", len(known)) == (True, 2 + (order == "excess"))
    assert order == "wasted" or (found.index("some") > found.index("none")) is least


def test_the_command_knows_every_order() -> None:
    assert set(SORTS) == set(ORDERS)


async def test_it_filters_while_one_types_and_shows_all_again_after_escape() -> None:
    async with running(MANY) as screen:
        await screen.press("slash", *"team-b")
        assert screen.pods() == ["app-1", "app-2"]
        assert len(screen.rows("#cards")) == 1
        await screen.press("enter")
        assert not screen.app.query_one("#filter", Input).display
        assert 'filter "team-b"' in screen.text("#status")
        await screen.press("escape")
        assert screen.pods() == ["app-0", "app-1", "app-2"]


async def test_n_goes_through_the_namespaces() -> None:
    async with running(MANY) as screen:
        await screen.press("n")
        assert screen.pods() == ["app-0"]
        await screen.press("n")
        assert screen.pods() == ["app-1", "app-2"]
        await screen.press("n")
        assert screen.pods() == ["app-0", "app-1", "app-2"]


async def test_the_tree_puts_containers_under_their_cards() -> None:
    async with running(MANY) as screen:
        await screen.press("t")
        at = screen.columns().index("POD")
        assert [row[at] for row in screen.rows()] == [
            NODE,
            "  card 0 NVIDIA H100 80GB HBM3",
            "    team-a/app-0",
            "  card 1 NVIDIA H100 80GB HBM3",
            "    team-b/app-1",
            "    team-b/app-2",
        ]
        await screen.press("enter")  # a line that is no container has no page
        assert not isinstance(screen.app.screen, PodScreen)


async def test_enter_opens_the_pods_page_with_what_explain_says() -> None:
    asked: list[str] = []

    def explain(name: str) -> str:
        asked.append(name)
        return f"Pod {name} is Running [on] n1."

    async with running(MANY, explain=explain) as screen:
        await screen.press("down", "enter")
        assert isinstance(screen.app.screen, PodScreen)
        assert asked == ["team-b/app-1"]
        assert "Pod team-b/app-1 is Running [on] n1." in screen.text("#explanation")
        assert "3.0G of 4.0G, 3.5G at its peak" in screen.text("#figures")
        await screen.press("escape")
        assert not isinstance(screen.app.screen, PodScreen)


async def test_a_pod_that_cannot_be_explained_says_why() -> None:
    def explain(name: str) -> str:
        raise KubeError("pods is forbidden")

    async with running(MANY, explain=explain) as screen:
        await screen.press("enter")
        assert "not known: pods is forbidden" in screen.text("#explanation")


async def test_question_mark_helps_and_q_goes() -> None:
    async with running(MANY) as screen:
        await screen.press("question_mark")
        assert isinstance(screen.app.screen, HelpScreen)
        assert [key.description for key in screen.app.screen.query(FooterKey)] == ["Back"]
        await screen.press("q")
        assert not isinstance(screen.app.screen, HelpScreen)
        await screen.pilot.press("q")
    assert screen.app.return_code == 0


@pytest.mark.parametrize("width", [80, 120, 200])
async def test_it_fits_the_terminal(width: int) -> None:
    async with running(MANY, width=width) as screen:
        table = screen.app.query_one("#containers", DataTable)
        assert table.virtual_size.width <= width
        assert {"NAMESPACE", "POD", "MEMORY", "OF LIMIT", "SM", "REFUSED"} <= set(screen.columns())
        assert ("NODE" in screen.columns()) is (width >= 120)


@pytest.mark.parametrize("keys", [(), ("t",), ("s", "s"), ("slash", "7")])
async def test_long_names_and_many_rows_fit_80_columns(keys: tuple[str, ...]) -> None:
    async with running(LONG_NAMES, width=80) as screen:
        await screen.press(*keys)
        table = screen.app.query_one("#containers", DataTable)
        assert not table.show_horizontal_scrollbar
        shown_whole = {column.key.value: column.width for column in table.ordered_columns}
        assert shown_whole["MEMORY"] >= len("3.0G/4.0G")  # of the row, not of the heading alone
        assert {"MEMORY", "OF LIMIT", "SM", "REFUSED"} <= set(shown_whole)


async def test_it_begins_on_the_ground_of_the_terminal_and_d_changes_it() -> None:
    async with running(MANY, light=True) as screen:
        assert not screen.app.current_theme.dark
        await screen.press("d")
        assert screen.app.current_theme.dark


async def test_a_lost_api_server_leaves_the_last_figures_and_says_so() -> None:
    async with running(MANY, KubeError("GET /api/v1/pods: Connection refused"), MANY) as screen:
        screen.app.read_now()
        await screen.settled()
        assert "shown as it was before: GET /api/v1/pods: Connection refused" in screen.text("#problems")
        assert screen.pods() == ["app-0", "app-1", "app-2"]
        screen.app.read_now()
        await screen.settled()
        assert screen.text("#problems") == ""


async def test_where_it_stands_is_kept_when_figures_change() -> None:
    rows = tuple(container(number) for number in range(100))
    async with running(ClusterUsage((card(0),), rows)) as screen:
        await screen.press(*["down"] * 40)
        screen.app.read_now()
        await screen.settled()
        assert screen.app.query_one("#containers", DataTable).cursor_row == 40
