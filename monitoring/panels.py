"""Grafana dashboards as plain values, written with Grafana's own Foundation SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import gauge as gauges
from grafana_foundation_sdk.builders import stat as stats
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

WIDTH = 24
TAG = "gpuslice"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True)
class Query:
    """One expression; `legend`: a template of labels, or the heading of a table's column."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `unit`: Grafana's name of the unit of all its queries; a table's columns have their own in
    `units`, by heading. `link`: title and address that a click on a value opens.
    """

    title: str
    kind: str
    unit: str
    queries: tuple[Query, ...]
    about: str
    width: int = 12
    height: int = 8
    highest: float | None = None
    warns_at: float | None = None  # from here to `bad_at` it is orange, above that red
    bad_at: float | None = None
    units: Mapping[str, str] = field(default_factory=dict)
    link: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down list of the values of a label; `query` is Prometheus' label_values(…)."""

    name: str
    query: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """An input field for a number."""

    name: str
    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    about: str
    variables: tuple[Variable, ...]
    panels: tuple[Panel, ...]
    entries: tuple[Entry, ...] = ()


def series(title: str, unit: str, *queries: Query, about: str, **more: Any) -> Panel:
    return Panel(title, "timeseries", unit, queries, about, **more)


def stat(title: str, unit: str, expression: str, *, about: str, **more: Any) -> Panel:
    return Panel(title, "stat", unit, (Query(expression),), about, **{"width": 6, "height": 4, **more})


def gauge(title: str, unit: str, expression: str, *, about: str, **more: Any) -> Panel:
    return Panel(title, "gauge", unit, (Query(expression),), about, **{"width": 6, "height": 8, **more})


def table(title: str, *queries: Query, about: str, units: Mapping[str, str], **more: Any) -> Panel:
    """One row for each set of labels, one column for each query."""
    return Panel(title, "table", "short", queries, about, units=units, **{"width": WIDTH, **more})


def document(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it, for any Prometheus data source."""
    others = (  # a drop-down list of our other dashboards, which keep the time range and the selection
        dashboards.DashboardLink("GPU")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
        .icon("external link")
    )
    made = (
        dashboards.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .description(dashboard.about)
        .tags(["gpu", TAG])
        .version(1)
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(others)
        .with_variable(dashboards.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for each in dashboard.variables:
        made.with_variable(
            dashboards.QueryVariable(each.name)
            .label(each.label or each.name)
            .datasource(SOURCE)
            .query({"query": each.query, "refId": each.name})
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    for entry in dashboard.entries:
        made.with_variable(
            dashboards.TextBoxVariable(entry.name).label(entry.label).default_value(entry.value)
        )
    across = down = row_height = 0  # left to right, then down; a row is as high as its highest panel
    for number, panel in enumerate(dashboard.panels, start=1):
        if across + panel.width > WIDTH:
            across, down, row_height = 0, down + row_height, 0
        place = models.GridPos(h=panel.height, w=panel.width, x=across, y=down)
        made.with_panel(_panel(number, panel).grid_pos(place))
        across, row_height = across + panel.width, max(row_height, panel.height)
    found: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return found


def _panel(number: int, panel: Panel) -> Any:
    """A builder for the panel's kind. Thresholds are always written: without any, Grafana treats 80 as too
    much, whatever the unit.
    """
    kind: Any = {
        "timeseries": timeseries.Panel,
        "stat": stats.Panel,
        "gauge": gauges.Panel,
        "table": tables.Panel,
    }[panel.kind]
    made: Any = kind()
    steps = [models.Threshold(color="blue" if panel.bad_at is None else "green", value=None)]
    for color, value in (("orange", panel.warns_at), ("red", panel.bad_at)):
        if value is not None:
            steps.append(models.Threshold(color=color, value=value))
    levels = dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    bounded = panel.kind == "timeseries" and any("topk(" in query.expression for query in panel.queries)
    about = f"{panel.about} The highest are drawn; choose less to see all." if bounded else panel.about
    made.id(number).title(panel.title).description(about).datasource(SOURCE)
    made.unit(panel.unit).min(0).thresholds(levels)
    if panel.highest is not None:
        made.max(panel.highest)
    if panel.link is not None:
        title, address = panel.link
        made.data_links([dashboards.DashboardLink(title).url(address)])
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(query.expression)
        if panel.kind == "table":
            target.instant().format(PromQueryFormat.TABLE)
        made.with_target(target.legend_format(query.legend or "__auto"))
    if panel.kind == "timeseries":
        made.legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.TABLE)
            .placement(kinds.LegendPlacement.RIGHT)
            .show_legend(True)
            .calcs(["mean", "lastNotNull", "max"])
        ).tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    elif panel.kind == "table":
        made.show_header(True)
        _columns(made, panel.queries, panel.units)
    else:
        made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return made


def _columns(made: Any, queries: Sequence[Query], units: Mapping[str, str]) -> None:
    """The queries' rows side by side, with headings instead of "Value #A"."""
    made.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    names = {f"Value #{letter}": query.legend for letter, query in zip("ABCDEFGH", queries, strict=False)}
    if len(queries) == 1:
        names = {"Value": queries[0].legend}
    hidden = dict.fromkeys(("Time", "__name__", "instance", "job", "gpu_uuid"), True)
    options = {"excludeByName": hidden, "renameByName": names}
    made.with_transformation(models.DataTransformerConfig(id_val="organize", options=options))
    for heading, unit in units.items():
        made.override_by_name(heading, [models.DynamicConfigValue(id_val="unit", value=unit)])
