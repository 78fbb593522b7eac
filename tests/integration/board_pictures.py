"""Pictures of the boards with a cluster's figures: `python -m tests.integration.board_pictures FOLDER`.

KUBECONFIG names a cluster that wants no credentials, such as the demo's (`gpuslice demo --keep --nodes 3`).
A Prometheus of its own scrapes what says prometheus.io/port there, through the API server, and what `--scrape
127.0.0.1:PORT` adds (extender, console), for some minutes; then every panel's queries are asked,
drawn where Grafana would put them, and photographed. Grafana is not needed: looked at are units, legends, and
whether there is anything to see. Panels without data are named.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import pytest
import yaml
from monitoring.boards import dashboards
from monitoring.build import ROOT, RULES
from monitoring.panels import WIDTH, Dashboard, Panel, document

from gpuslice.adapters.kube.config import Connection, connect
from gpuslice.adapters.kube.resources import PODS
from gpuslice_demo.ports import free_port
from tests.blocking import asked
from tests.tools import find, playwright

COLUMN, ROW = 66, 36  # pixels of Grafana's grid
COLOURS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0")
MOST_LINES = 8
HIDDEN = frozenset({"__name__", "job", "instance", "gpu_uuid"})
STYLE = """
body { margin: 0; background: #111217; color: #ccccdc; font: 13px "DejaVu Sans", sans-serif; }
h1 { font-size: 18px; margin: 16px; } h2 { font-size: 13px; margin: 0 0 6px; font-weight: 600; }
.panel { position: absolute; box-sizing: border-box; padding: 8px 10px; background: #181b1f; }
.panel { overflow: hidden; border: 1px solid #2c3235; } .big { font-size: 30px; }
.body { display: flex; gap: 10px; } svg { flex: none; }
table { border-collapse: collapse; font-size: 11px; } td, th { text-align: left; padding: 1px 7px 1px 0; }
td { white-space: nowrap; } .none { color: #ff7383; } small { color: #8e8ea0; }
"""


def scraped(connection: Connection) -> list[dict[str, Any]]:
    """Prometheus' targets: each pod that says where its metrics are, by way of the API server."""
    server, found = urlsplit(connection.server), []
    for pod in asked(connection, lambda client: client.all(PODS)):
        if port := (pod.metadata.annotations or {}).get("prometheus.io/port"):
            path = f"{PODS.path(pod.metadata.namespace)}/{pod.metadata.name}:{port}/proxy/metrics"
            labels = {"__metrics_path__": path, "__scheme__": server.scheme, "instance": pod.metadata.name}
            found.append({"targets": [server.netloc], "labels": labels})
    return found


def configuration(connection: Connection, addresses: Sequence[str]) -> dict[str, Any]:
    job: dict[str, Any] = {"job_name": "cluster", "honor_labels": True}
    job["static_configs"] = [*scraped(connection), {"targets": list(addresses)}]
    timing = {"scrape_interval": "10s", "evaluation_interval": "10s"}
    return {"global": timing, "rule_files": [str(ROOT / RULES)], "scrape_configs": [job]}


class Source:
    """A Prometheus, asked as Grafana asks it."""

    def __init__(self, url: str, board: Dashboard) -> None:
        self._url = url
        self._values = {entry.name: entry.value for entry in board.entries} | {"__range": "1h"}

    def ask(self, verb: str, expression: str, **frame: str) -> list[dict[str, Any]]:
        chosen = re.sub(r"\$\{?(\w+)\}?", lambda name: self._values.get(name[1], ".*"), expression)
        with urlopen(f"{self._url}/api/v1/{verb}?{urlencode({'query': chosen, **frame})}") as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result

    def curves(self, expression: str, minutes: float) -> list[tuple[dict[str, str], list[list[float]]]]:
        now = time.time()
        frame = {"start": f"{now - 60 * minutes:.0f}", "end": f"{now:.0f}", "step": "10"}
        rows = self.ask("query_range", expression, **frame)
        found = [
            (row["metric"], [[at, float(value)] for at, value in row["values"] if value != "NaN"])
            for row in rows
        ]
        return [(labels, points) for labels, points in found if points]


SCALES = {
    "bytes": (1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "mbytes": (1024, ("MiB", "GiB", "TiB")),
    "Bps": (1000, ("B/s", "kB/s", "MB/s", "GB/s")),
    "MBs": (1000, ("MB/s", "GB/s")),
    "hertz": (1000, ("Hz", "kHz", "MHz", "GHz")),
    "short": (1000, ("", "K", "Mil", "Bil")),
    "reqps": (1000, ("req/s", "K req/s")),
    "s": (1000, ("s",)),
    "celsius": (1000, ("°C",)),
    "watt": (1000, ("W", "kW", "MW")),
    "percent": (1000, ("%",)),
}


def shown(value: float, unit: str) -> str:
    """A figure as Grafana writes it in this unit."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s" and value < 1:
        return f"{value * 1000:.3g} ms"
    base, names = SCALES.get(unit, (1000, ("",)))
    at = 0
    while abs(value) >= base and at < len(names) - 1:
        value, at = value / base, at + 1
    return f"{value:.4g} {names[at]}".strip()


def legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), template) or str(labels)


def drawn(panel: Panel, source: Source, minutes: float, width: int, height: int) -> str:
    """The inside of a panel; one of class none where there is nothing to show."""
    if panel.kind == "table":
        return rows_of(panel, source)
    if panel.kind != "timeseries":
        found = source.ask("query", panel.queries[0].expression)
        figures = [shown(float(row["value"][1]), panel.unit) for row in found]
        return (
            f'<div class="big">{", ".join(figures)}</div>' if figures else '<div class="none">No data</div>'
        )
    lines = [
        (legend(query.legend, labels), points)
        for query in panel.queries
        for labels, points in source.curves(query.expression, minutes)
    ]
    if not lines:
        return '<div class="none">No data</div>'
    top = max(panel.highest or 0, *(value for _, points in lines for _, value in points)) * 1.05 or 1
    first = min(points[0][0] for _, points in lines)
    last = max([first + 1, *(points[-1][0] for _, points in lines)])
    wide, high = width // 2, height - 60
    axis = "".join(
        f'<text y="{max(9, high - part * high):.0f}" fill="#8e8ea0" font-size="10">'
        f"{shown(top * part, panel.unit)}</text>"
        for part in (0, 0.5, 1)
    )
    curves, told = "", ""
    for number, (name, points) in enumerate(lines):
        colour, values = COLOURS[number % len(COLOURS)], [value for _, value in points]
        placed = " ".join(
            f"{60 + (at - first) / (last - first) * (wide - 62):.0f},{high - value / top * high:.1f}"
            for at, value in points
        )
        curves += f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{placed}"/>'
        if number < MOST_LINES:
            told_of = (sum(values) / len(values), values[-1], max(values))
            cells = "".join(f"<td>{shown(value, panel.unit)}</td>" for value in told_of)
            told += f'<tr><td style="color:{colour}">▬ {html.escape(name)}</td>{cells}</tr>'
    if len(lines) > MOST_LINES:
        told += f"<tr><td><small>and {len(lines) - MOST_LINES} more</small></td></tr>"
    return (
        f'<div class="body"><svg width="{wide}" height="{high + 4}">{axis}{curves}</svg>'
        f"<table><tr><th>Name</th><th>Mean</th><th>Last</th><th>Max</th></tr>{told}</table></div>"
    )


def rows_of(panel: Panel, source: Source) -> str:
    """One row for each set of labels, as Grafana merges the queries' answers."""
    found: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for query in panel.queries:
        for row in source.ask("query", query.expression):
            seen = tuple(sorted((name, value) for name, value in row["metric"].items() if name not in HIDDEN))
            figure = shown(float(row["value"][1]), panel.units[query.legend])
            found.setdefault(seen, {})[query.legend] = figure
    if not found:
        return '<div class="none">No data</div>'
    names = sorted({name for seen in found for name, _ in seen})
    heads = "".join(f"<th>{each}</th>" for each in (*names, *(query.legend for query in panel.queries)))
    body = ""
    for seen, figures in found.items():
        cells = [dict(seen).get(name, "") for name in names]
        cells += [figures.get(query.legend, "") for query in panel.queries]
        body += "<tr>" + "".join(f"<td>{html.escape(each)}</td>" for each in cells) + "</tr>"
    return f"<table><tr>{heads}</tr>{body}</table>"


def board_page(board: Dashboard, source: Source, minutes: float) -> tuple[str, int, list[str]]:
    """HTML, its height, and the titles of panels without data."""
    parts, blind, bottom = [], [], 0
    for panel, made in zip(board.panels, document(board)["panels"], strict=True):
        place = made["gridPos"]
        width, height = place["w"] * COLUMN - 8, place["h"] * ROW - 8
        inside = drawn(panel, source, minutes, width, height)
        if 'class="none"' in inside:
            blind.append(panel.title)
        style = (
            f"left:{place['x'] * COLUMN}px;top:{56 + place['y'] * ROW}px;width:{width}px;height:{height}px"
        )
        parts.append(f'<div class="panel" style="{style}"><h2>{html.escape(panel.title)}</h2>{inside}</div>')
        bottom = max(bottom, 56 + (place["y"] + place["h"]) * ROW)
    page = f'<meta charset="utf-8"><style>{STYLE}</style><h1>{board.title}</h1>{"".join(parts)}'
    return page, bottom + 8, blind


async def photograph(browsers: tuple[Any, Path], pages: dict[str, tuple[str, int]], folder: Path) -> None:
    made, program = browsers
    async with made() as driver:
        browser = await driver.chromium.launch(executable_path=str(program), args=["--no-sandbox"])
        for name, (page, height) in pages.items():
            tab = await browser.new_page(viewport={"width": WIDTH * COLUMN, "height": height})
            await tab.set_content(page)
            await tab.screenshot(path=folder / f"board-{name}.png")
        await browser.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--scrape", action="append", default=[], metavar="HOST:PORT")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        browsers = playwright()  # not after minutes of scraping
    except pytest.skip.Exception as missing:
        parser.error(str(missing))
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prometheus.yaml"
        file.write_text(yaml.safe_dump(configuration(connect(os.environ), given.scrape)))
        flags = [
            f"--config.file={file}",
            f"--storage.tsdb.path={folder}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        prometheus = subprocess.Popen([find("prometheus"), *flags], stderr=subprocess.DEVNULL)
        try:
            time.sleep(60 * given.minutes)
            pages = {}
            for name, board in dashboards().items():
                source = Source(f"http://127.0.0.1:{port}", board)
                page, height, blind = board_page(board, source, given.minutes)
                pages[name] = page, height
                print(f"{name}: {len(board.panels)} panels, without data: {', '.join(blind) or 'none'}")
        finally:
            prometheus.terminate()
            prometheus.wait()
    asyncio.run(photograph(browsers, pages, given.folder))


if __name__ == "__main__":
    main()
