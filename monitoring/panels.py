"""Grafana dashboards as plain values: only what we use of Grafana's schema (version 39)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 24
TAG = "gpuslice"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression; `legend` is a template of labels."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `unit` is Grafana's name of the unit that all its queries have."""

    title: str
    kind: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 12
    height: int = 8
    about: str = ""
    highest: float | None = None
    warns_at: float | None = None  # and from here to `bad_at` it is orange, then red
    bad_at: float | None = None


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down filled with the values of a label; `query` is Prometheus' label_values(…)."""

    name: str
    query: str
    many: bool = True


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    about: str
    variables: tuple[Variable, ...]
    panels: tuple[Panel, ...]


def series(title: str, unit: str, *queries: Query, **more: Any) -> Panel:
    return Panel(title, "timeseries", unit, queries, **more)


def stat(title: str, unit: str, expression: str, **more: Any) -> Panel:
    return Panel(title, "stat", unit, (Query(expression),), **{"width": 6, "height": 4, **more})


def gauge(title: str, unit: str, expression: str, **more: Any) -> Panel:
    return Panel(title, "gauge", unit, (Query(expression),), **{"width": 6, "height": 8, **more})


def document(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it, for any Prometheus data source."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["gpu", TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [_others()],
        "templating": {"list": [_source(), *map(_variable, dashboard.variables)]},
        "panels": list(_placed(dashboard.panels)),
    }


def _placed(panels: Sequence[Panel]) -> Iterable[dict[str, Any]]:
    """Left to right, then down; a row is as high as its highest panel."""
    across = down = row_height = 0
    for number, panel in enumerate(panels, start=1):
        if across + panel.width > WIDTH:
            across, down, row_height = 0, down + row_height, 0
        place = {"x": across, "y": down, "w": panel.width, "h": panel.height}
        yield _panel(number, panel, place)
        across, row_height = across + panel.width, max(row_height, panel.height)


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": _thresholds(panel)}
    if panel.highest is not None:
        defaults["max"] = panel.highest
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [_target(chr(65 + n), query, panel.kind) for n, query in enumerate(panel.queries)],
    }


def _thresholds(panel: Panel) -> dict[str, Any]:
    """Written out: where there are none, Grafana takes 80 for too much, whatever the unit."""
    steps: list[dict[str, Any]] = [{"color": "blue" if panel.bad_at is None else "green", "value": None}]
    for color, value in (("orange", panel.warns_at), ("red", panel.bad_at)):
        if value is not None:
            steps.append({"color": color, "value": value})
    return {"mode": "absolute", "steps": steps}


def _others() -> dict[str, Any]:
    """A drop-down of our other dashboards, which takes the time and what was chosen along."""
    return {
        "type": "dashboards",
        "title": "GPU",
        "tags": [TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "icon": "external link",
    }


def _options(kind: str) -> dict[str, Any]:
    if kind == "timeseries":
        legend = {"displayMode": "table", "placement": "right", "showLegend": True}
        return {"legend": {**legend, "calcs": ["mean", "lastNotNull", "max"]}, "tooltip": {"mode": "multi"}}
    if kind == "table":
        return {"showHeader": True}
    return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}


def _target(letter: str, query: Query, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"refId": letter, "datasource": SOURCE, "expr": query.expression}
    found["legendFormat"] = query.legend or "__auto"
    if kind == "table":
        found |= {"instant": True, "format": "table"}
    return found


def _source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "type": "query",
        "datasource": SOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": variable.many,
        "includeAll": variable.many,
        "allValue": ".*" if variable.many else None,
        "current": {},
        "hide": 0,
    }
