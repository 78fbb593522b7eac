"""The console's page in a browser: every view, with nothing, with much, with enemies, and without a cluster.

Needs Debian's Chromium and Playwright of PyPI, which `make tools` installs; skipped where they are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpuslice.apps.console.rows import Rows
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.faults import Fault
from tests import HANG_S
from tests.builders import api_pod
from tests.integration.console_rig import HOSTILE, V100, Rig, console, node, sample
from tests.tools import axe, playwright

VIEWS = {
    "cards": ("#/cards", "canvas"),
    "waiting": ("#/waiting", "text=The free memory is fragmented"),
    "pod": ("#/pods/vision/over-its-limit", "text=was refused 14 times"),
    "waiting pod": ("#/pods/research/train-0", "text=Why no node takes it"),
    "teams": ("#/teams", "text=Pods that ask for too much or too little"),
    "waste": ("#/waste", "text=notebook-omar"),
    "health": ("#/health", "text=XID 79"),
}
CHINESE = {
    "cards": "canvas",
    "waiting": "text=空闲显存是零散的",
    "pod": "text=被拒绝 14 次",
    "waiting pod": "text=为什么没有节点能放下",
    "teams": "text=申请过多或过少的 Pod",
    "waste": "text=占而未用",
    "health": "text=已从总线脱落",
}


class Page:
    """A tab, and what went wrong in it."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.wrong: list[str] = []
        tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        tab.on(
            "console", lambda message: self.wrong.append(message.text) if message.type == "error" else None
        )
        tab.set_default_timeout(HANG_S * 1000)

    async def open(self, rig: Rig, path: str, shown: str) -> None:
        await self.tab.goto(rig.url + path)
        await self.tab.wait_for_selector(shown, state="attached")

    async def until(self, holds: str) -> None:
        """Until the expression is true. The page's own policy lets nobody wait inside of it with one."""
        async with asyncio.timeout(HANG_S):
            while not await self.tab.evaluate(holds):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def can_be_read_by_everybody(self, name: str) -> None:
        await self.tab.evaluate(axe())
        found = await self.tab.evaluate("axe.run()")
        broken = [(each["id"], [node["html"] for node in each["nodes"]][:2]) for each in found["violations"]]
        assert broken == [], name

    async def text(self, where: str = "body") -> str:
        return str(await self.tab.inner_text(where))


@contextlib.asynccontextmanager
async def page(**context: Any) -> AsyncIterator[Page]:
    made, program = playwright()
    async with made() as driver:
        browser = await driver.chromium.launch(executable_path=str(program), args=["--no-sandbox"])
        try:
            options = {"viewport": {"width": 1380, "height": 860}, "locale": "en-US", **context}
            yield Page(await (await browser.new_context(**options)).new_page())
        finally:
            await browser.close()


def fill(rows: Rows, nodes: int, cards: int, pods: int) -> None:
    """A cluster too large to be made in an API server, straight into what the page follows."""
    held: dict[tuple[int, int], int] = {}
    for number in range(pods):
        on, card = number % nodes, number // nodes % cards
        held[on, card] = held.get((on, card), 0) + 8
        key, namespace = f"pod-{number}", f"team-{number % 12}"
        row = {"namespace": namespace, "name": key, "phase": "Running", "created": "2026-01-01T00:00:00Z"}
        row |= {"units": 8, "node": f"n{on:05}", "slices": [[card, 8]]}  # type: ignore[dict-item]
        rows.put("pods", f"{namespace}/{key}", row, namespace)
    for on in range(nodes):
        listed = [[card, 15, 16130, held.get((on, card), 0), 0] for card in range(cards)]
        rows.put(
            "nodes", f"n{on:05}", {"name": f"n{on:05}", "model": "V100", "shared": True, "cards": listed}
        )


RIGHT_TO_LEFT = "\u202eשלום \u202e"


def put_enemies(rows: Rows) -> None:
    """Pods, nodes and sentences that are HTML, endless, or run from right to left."""
    names = [HOSTILE, "endless-" * 31, RIGHT_TO_LEFT * 5]
    for number, name in enumerate(names):
        pod = {"namespace": name, "name": name, "phase": name, "units": 4, "created": name, "reason": name}
        rows.put("pods", f"x{number}", {**pod, "node": "n1", "slices": [[number, 4]]}, "x")
        usage = {"used": 1, "limit": 4301, "refused": 1, "throttled": 3, "idleSince": 1}
        rows.put("podUsage", f"x{number}", {"namespace": name, "name": name, **usage}, "x")
        row = {"namespace": name, "name": name, "why": name * 3, "help": [name], "never": True}
        rows.put("waiting", f"x{number}", row, "x")
    sick = {"name": "n1", "model": HOSTILE, "state": "cordoned", "sick": [0], "reason": HOSTILE}
    cards = [[index, 15, 16130, 4, 0] for index in range(4)]
    rows.put("nodes", "n1", {**sick, "cards": cards, "shared": True})


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_view_shows_what_it_is_for_and_can_be_read_by_everybody(theme: str) -> None:
    async with sample() as rig, page(color_scheme=theme) as seen:
        for name, (path, shown) in VIEWS.items():
            await seen.open(rig, path, shown)
            await seen.can_be_read_by_everybody(name)
        assert seen.wrong == []


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_an_empty_cluster_says_what_to_do(theme: str) -> None:
    async with console() as rig, page(color_scheme=theme) as seen:
        await seen.open(rig, "#/cards", "text=No node shares its cards")
        assert "kubectl label node NODE cgpu=true" in await seen.text()
        for path, shown in (
            ("waiting", "No pod is waiting"),
            ("teams", "No namespace holds"),
            ("health", "cgpu=true"),
        ):
            await seen.open(rig, f"#/{path}", f"text={shown}")
            await seen.can_be_read_by_everybody(path)
        assert seen.wrong == []


PIXELS_OF = """(name) => {
  const canvas = document.querySelector("canvas");
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  probe.fillRect(0, 0, 1, 1);
  const wanted = new Uint32Array(probe.getImageData(0, 0, 1, 1).data.buffer)[0];
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Uint32Array(data.buffer).filter((each) => each === wanted).length;
}"""


async def test_marks_stand_on_slices_that_were_refused_memory_or_throttled_and_are_explained() -> None:
    async with console([node("n1", 2, V100)]) as rig, page() as seen:
        rows = rig.console.rows
        for card, name in enumerate(("refused", "throttled")):
            pod = {"namespace": "a", "name": name, "units": 8, "node": "n1", "slices": [[card, 8]]}
            rows.put("pods", f"a/{name}", pod, "a")
        await seen.open(rig, "#/cards", "canvas")
        await seen.until("document.querySelector('.legend').textContent.includes('a17 GiB')")
        for name in ("refused", "throttled"):
            assert f"was {name}" not in await seen.text(".legend")
        before = [await seen.tab.evaluate(PIXELS_OF, colour) for colour in ("--bad", "--warn")]
        for mark, (name, sentence) in enumerate(
            (("refused", "memory was refused"), ("throttled", "compute was throttled"))
        ):
            usage = {"namespace": "a", "name": name, "used": 100, "limit": 8602, name: 3}
            rows.put("podUsage", f"a/{name}", usage, "a")
            await seen.tab.wait_for_selector(f".legend >> text={sentence}")
            colour = ("--bad", "--warn")[mark]
            assert await seen.tab.evaluate(PIXELS_OF, colour) > before[mark]
        assert "full: used, pale: held" in await seen.text(".legend")


async def test_each_of_the_largest_namespaces_has_a_colour_and_the_rest_share_one() -> None:
    async with console() as rig, page() as seen:
        fill(rig.console.rows, 10, 8, 48)
        await seen.open(rig, "#/cards", "canvas")
        await seen.tab.wait_for_selector(".legend >> text=4 more")
        dots = "[...document.querySelectorAll('.legend .dot')]"
        found = await seen.tab.evaluate(f"{dots}.map((each) => each.style.getPropertyValue('--hue'))")
        assert found[:9] == [f"var(--hue{number})" for number in range(9)]


async def test_who_wastes_most_and_why_a_pod_waits_are_two_clicks_away() -> None:
    async with sample() as rig, page() as seen:
        await seen.open(rig, "#/cards", "text=Held, not used")
        await seen.tab.click("text=Held, not used")
        await seen.tab.wait_for_selector("tbody tr:first-child >> text=notebook-omar")
        first = await seen.tab.inner_text("tbody tr:first-child")
        assert "8.6 GiB" in first  # of 10 units of the card, 18 % are used
        await seen.tab.click("tbody tr:first-child >> text=notebook-omar")
        await seen.until("location.hash === '#/pods/notebooks/notebook-omar'")
        await seen.tab.fill("input[type=search]", "llm-serve")
        await seen.tab.keyboard.press("Enter")
        await seen.until("location.hash === '#/pods/nlp/llm-serve-0'")
        await seen.tab.evaluate("document.activeElement.blur()")
        await seen.tab.keyboard.press("1")
        await seen.tab.click("a.figure >> text=Waiting pods")
        await seen.tab.wait_for_selector("text=The free memory is fragmented")
        await seen.tab.wait_for_selector(
            "#nav a[href='#/health'] >> text=2"
        )  # a card out of use, and no extender


async def test_what_changes_is_seen_without_a_reload() -> None:
    async with console([node("n1", 1, V100)]) as rig, page() as seen:
        await seen.open(rig, "#/cards", "canvas")
        rig.console.rows.put(
            "pods", "a/b", {"namespace": "a", "name": "b", "units": 4, "phase": "Pending"}, "a"
        )
        row = {"namespace": "a", "name": "b", "why": "It waits for a test.", "help": [], "never": False}
        rig.console.rows.put("waiting", "a/b", row, "a")
        await seen.tab.wait_for_selector("#nav .count")
        await seen.tab.keyboard.press("2")
        await seen.tab.wait_for_selector("text=It waits for a test.")
        rig.console.rows.drop("waiting", "a/b")
        await seen.tab.wait_for_selector("text=No pod is waiting")


async def test_forty_thousand_cards_fit_and_one_is_found() -> None:
    async with console() as rig, page() as seen:
        fill(rig.console.rows, 5000, 8, 20_000)
        await seen.open(rig, "#/cards", "canvas")
        await seen.until("document.querySelector('canvas').width > 400")
        assert "40,000" in await seen.text(".figures")
        box = await seen.tab.locator("canvas").bounding_box()
        assert box["height"] < 2000
        await seen.tab.mouse.click(box["x"] + 5, box["y"] + 5)
        await seen.tab.wait_for_selector(".crumbs >> text=n00000")
        await seen.tab.wait_for_selector("aside >> text=team-0/pod-0")
        assert seen.wrong == []


async def test_a_window_of_any_width_shows_the_wall_and_a_wide_one_larger_cards() -> None:
    async with console([node("n1", 1, V100)]) as rig:
        widths = []
        for width in (360, 1280, 1443, 1917, 2560):
            async with page(viewport={"width": width, "height": 1200}) as seen:
                await seen.open(rig, "#/cards", "canvas")
                await seen.until("document.querySelector('canvas').style.width !== ''")
                box = await seen.tab.locator("canvas").bounding_box()
                widths.append(box["width"])
        assert widths == sorted(widths)
        assert widths[-1] > 1.5 * widths[1]


@pytest.mark.parametrize("width", [390, 1280])
async def test_names_and_messages_of_enemies_are_text(width: int) -> None:
    size = {"width": width, "height": 860}
    async with console([node("n1", 1, V100)]) as rig, page(viewport=size) as seen:
        put_enemies(rig.console.rows)
        for name in ("cards", "waiting", "teams", "health"):
            await seen.open(rig, f"#/{name}", "#main .page")
            await seen.until("document.querySelector('#main .page').childElementCount > 0")
            assert await seen.tab.locator("#main img, #main script, .tip img").count() == 0
            assert not re.match(r"[12]$", await seen.tab.title())
            cells = "[...document.querySelectorAll('#main td')]"
            cut = f"{cells}.filter((each) => each.scrollWidth > each.clientWidth + 1)"
            assert await seen.tab.evaluate(f"{cut}.length") == 0, f"{name}: a cell's words lie over the next"
            wide = "[document.documentElement.scrollWidth, innerWidth]"
            assert len(set(await seen.tab.evaluate(wide))) == 1, f"{name} is wider than the window"
        assert "<script>" in await seen.text("#main")
        assert seen.wrong == []


async def test_a_lost_api_server_and_a_lost_console_are_told_apart() -> None:
    async with page() as seen:
        async with console([node("n1", 1, V100)]) as rig:
            await seen.open(rig, "#/cards", "canvas")
            await rig.server.__aexit__(None, None, None)
            await seen.tab.wait_for_selector("#banner >> text=The API server cannot be read")
            await seen.can_be_read_by_everybody("lost")
        await seen.tab.wait_for_selector("#banner >> text=The console does not answer")
        assert await seen.tab.locator("canvas").count() == 1


def refusing(path: str) -> Cluster:
    cluster = Cluster()
    cluster.faults.add(Fault("GET", path, 403))
    return cluster


async def test_who_may_list_nothing_is_told_that_and_not_that_nothing_waits() -> None:
    async with console(cluster=refusing("/api/v1/pods")) as rig, page() as seen:
        for name in ("cards", "waiting", "teams", "health"):
            await seen.open(rig, f"#/{name}", "text=The cluster cannot be read")
            assert "gpuslice console -n NAMESPACE" in await seen.text()
            assert "Nothing" not in await seen.text()
        rig.server.cluster.faults.clear()
        await seen.tab.wait_for_selector("text=no node is labelled")


async def test_what_is_wrong_with_many_pods_is_one_finding_and_found_by_each_of_its_names() -> None:
    async with sample() as rig, page() as seen:
        await seen.open(rig, "#/health", "text=9 pods")
        finding = await seen.text(".finding:has-text('9 pods')")
        assert "research/train-7 1 more" in finding
        assert "gpuslice explain NAMESPACE/POD" in finding
        await seen.tab.fill("input[type=search]", "train-8")
        await seen.until("document.querySelectorAll('.finding').length === 1")
        assert seen.wrong == []


async def test_who_may_not_list_nodes_sees_pods_that_wait_without_a_reason() -> None:
    mine = api_pod("mine", "4")
    async with console([], [mine], cluster=refusing("/api/v1/nodes")) as rig, page() as seen:
        await seen.open(rig, "#/waiting", "text=You may not list nodes, so why is not told here.")
        assert "default/mine" in await seen.text()
        await seen.open(rig, "#/cards", "text=the wall of cards is not shown")
        await seen.open(rig, "#/health", "text=findings of your own pods")
        assert "labelled" not in await seen.text()
        assert not await seen.text("#banner")


async def test_keys_lead_everywhere() -> None:
    async with sample() as rig, page() as seen:
        keys = seen.tab.keyboard
        await seen.open(rig, "#/cards", "canvas")
        await seen.tab.focus("canvas")
        await keys.press("ArrowRight")
        await seen.tab.wait_for_selector("aside >> text=nlp/embed-0")
        assert "gpu-a1, Card 1" in await seen.text("#announcer")
        await keys.press("Enter")
        await keys.press("Enter")
        await seen.tab.wait_for_selector(".way")
        await keys.press("Escape")
        await seen.tab.wait_for_selector("canvas")
        await keys.press("3")
        await seen.tab.wait_for_selector("h1 >> text=Teams")
        await keys.press("/")
        await keys.type("notebooks")
        await seen.until("document.querySelectorAll('tbody')[0].childElementCount === 1")


async def test_an_address_that_somebody_mistyped_leads_to_the_cards() -> None:
    async with console([node("n1", 1, V100)]) as rig, page() as seen:
        for path in ("#/constructor", "#/cards/%E0%A4%A", "#/nowhere/at/all", "#/%"):
            await seen.open(rig, path, "nav [aria-current]")
            assert await seen.tab.get_attribute("nav [aria-current]", "href") == "#/cards"
        await seen.open(rig, "#/pods/%", "text=There is no such pod")
        assert [each for each in seen.wrong if "404" not in each] == []


async def test_language_and_theme_are_chosen_and_kept() -> None:
    async with sample() as rig, page() as seen:
        await seen.open(rig, "#/waiting", "text=Waits for a card")
        await seen.tab.click("text=中文")
        await seen.tab.wait_for_selector("h1 >> text=等待显卡")
        await seen.tab.click("#theme")
        await seen.tab.click("#theme")
        await seen.tab.reload()
        await seen.tab.wait_for_selector("h1 >> text=等待显卡")
        assert await seen.tab.evaluate("document.documentElement.dataset.theme") == "dark"
        assert await seen.tab.evaluate("document.documentElement.lang") == "zh-CN"


COLOURS = (
    """(where, which) => [...document.querySelectorAll(where)].map((each) => getComputedStyle(each)[which])"""
)


async def test_where_the_system_chooses_the_colours_what_they_tell_is_still_seen() -> None:
    """As with the contrast themes of Windows: every background becomes one colour, clear lines visible."""
    async with sample() as rig, page(forced_colors="active") as seen:
        await seen.open(rig, "#/teams", "text=notebooks")
        assert len(set(await seen.tab.evaluate(f"({COLOURS})('.dot', 'backgroundColor')"))) > 4
        assert len(set(await seen.tab.evaluate(f"({COLOURS})('.bar, .bar > *', 'backgroundColor')"))) > 4
        assert len(set(await seen.tab.evaluate(f"({COLOURS})('#nav a', 'borderBottomColor')"))) == 2
        await seen.open(rig, "#/cards", "canvas")
        assert len(set(await seen.tab.evaluate(f"({COLOURS})('.choice button', 'backgroundColor')"))) == 2


STILL_ENGLISH = """[...document.querySelectorAll("#main *")]
  .filter((each) => !each.closest("code, .events") && [...each.childNodes].some(
    (node) => node.nodeType === 3
      && /[a-z]{2,} [a-z]{2,} [a-z]{2,}/.test(node.data.replace(/(kubectl|gpuslice) .*/, ""))))
  .map((each) => each.textContent)"""


async def test_no_view_in_chinese_shows_an_english_sentence() -> None:
    async with sample() as rig, page(locale="zh-CN") as seen:
        for name, (path, _) in VIEWS.items():
            await seen.open(rig, path, CHINESE[name])
            assert await seen.tab.evaluate(STILL_ENGLISH) == [], name
        assert seen.wrong == []


async def test_in_a_cluster_the_page_asks_for_a_token() -> None:
    async with console([node("n1", 1, V100)], access="token") as rig, page() as seen:
        await seen.open(rig, "", "#token")
        await seen.can_be_read_by_everybody("login")
        await seen.tab.fill("#token", "anything")
        await seen.tab.click("button >> text=Show the cluster")
        await seen.tab.wait_for_selector("canvas")
        await seen.tab.reload()
        await seen.tab.wait_for_selector("canvas")
