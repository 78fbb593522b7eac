"""Dashboards, alerts and scaling rules: made from the catalogue, and understood by Prometheus itself."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from monitoring.alert import RUNBOOK
from monitoring.boards import dashboards
from monitoring.build import ROOT, RULES, files, rule_groups
from monitoring.cases import CASES, FURTHER
from monitoring.panels import WIDTH, document
from monitoring.records import RECORDED
from monitoring.rules import ALERTS
from monitoring.scaling import adapter_values, autoscaler, scaled_object
from monitoring.selectors import MOST
from monitoring.series import OF_OTHERS

from gpuslice.apps.exporter.ack import LEGACY
from gpuslice.apps.exporter.catalogue import CONTAINER_INFO, METRICS, SM_UTILIZATION, groups
from tests.tools import find

_OURS = re.compile(r"\bgpuslice_[a-z_]+")


def expressions() -> list[tuple[str, str]]:
    """(where, expression) of every panel and rule."""
    found = [
        (f"{name}: {panel.title}", query.expression)
        for name, board in dashboards().items()
        for panel in board.panels
        for query in panel.queries
    ]
    found += [(alert.name, alert.expression) for alert in ALERTS]
    return found + list(RECORDED.items())


def test_what_is_committed_is_what_the_catalogue_makes() -> None:
    old = {path for path, text in files().items() if not same(ROOT / path, text)}
    assert not old, f"run `python -m monitoring.build`: {sorted(old)}"


def same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def test_every_metric_is_documented_once() -> None:
    listed = [metric.name for group in groups() for metric in group.metrics]
    assert sorted(listed) == sorted(metric.name for metric in METRICS)


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda value: str(value)[:40])
def test_rules_and_panels_name_only_metrics_that_exist(where: str, expression: str) -> None:
    known = {metric.name for metric in METRICS} | OF_OTHERS
    others = ("gpuslice_extender_", "gpuslice_console_")  # which their own pages document
    for recorded in RECORDED:
        expression = expression.replace(recorded, "recorded")
    ours = {name for name in _OURS.findall(expression) if not name.startswith(others)}
    assert ours <= known, where


@pytest.mark.parametrize("name", dashboards())
def test_what_is_summed_over_the_chosen_time_is_what_is_recorded(name: str) -> None:
    """Of thousands of containers a month is more than the 50 million samples of one query."""
    asked = str([query.expression for panel in dashboards()[name].panels for query in panel.queries])
    over_time = re.findall(r"([\w:]+)\{[^}]*\}\[\$__range", asked)
    assert set(over_time) <= RECORDED.keys()
    assert bool(over_time) == (name == "gpu-teams")


def test_what_alerts_ask_of_agent_and_extender_is_what_those_document() -> None:
    pages = [
        (ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in ("agent", "extender", "metrics")
    ]
    assert {name for name in OF_OTHERS if not any(f"`{name}" in page for page in pages)} == set()


def test_each_alert_leads_to_its_section_of_the_page_for_the_person_on_call() -> None:
    sections = re.findall(r"^## (Gpu\w+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(alert.name for alert in ALERTS)
    assert all(alert.runbook == f"{RUNBOOK}#{alert.name.lower()}" for alert in ALERTS)


@pytest.mark.parametrize("name", dashboards())
def test_panels_of_a_dashboard_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in document(dashboards()[name])["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_identifiers_are_unique_and_short_enough_for_grafana() -> None:
    boards = [document(board) for board in dashboards().values()]
    assert len({board["uid"] for board in boards}) == len(boards)
    for board in boards:
        assert len(board["uid"]) <= 40
        numbers = [panel["id"] for panel in board["panels"]]
        assert len(set(numbers)) == len(numbers)
        assert json.loads(json.dumps(board)) == board


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}
    folder = ROOT / "monitoring" / "alerts"
    told = subprocess.run(
        [find("promtool"), "test", "rules", "tests.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_alerts_are_tried_with_series_as_the_exporter_writes_them() -> None:
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    tried = {series for cases in CASES.values() for case in cases for series in case}
    tried |= {series for _, case, _ in FURTHER for series in case}
    names = {series.partition("{")[0] for series in tried}
    assert len(names & labels.keys()) > 20
    for series in tried:
        name, _, written = series.partition("{")
        if name in labels:
            assert set(re.findall(r'(\w+)="', written)) - {"instance"} == labels[name], series


def test_each_alert_says_what_to_do() -> None:
    rules = [rule for group in rule_groups()["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(rules) == len(ALERTS)
    for rule in rules:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert all(rule["annotations"][word].endswith(".") for word in ("summary", "description")), rule[
            "alert"
        ]


def test_promtool_accepts_the_rules() -> None:
    told = subprocess.run(
        [find("promtool"), "check", "rules", ROOT / RULES], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_fragmentation_is_what_is_free_and_not_on_the_freest_card(tmp_path: Path) -> None:
    """Of cards in parts or empty 2, 10 and 12 are free; one that is given out whole does not count."""
    (panel,) = (each for each in dashboards()["gpu-sharing"].panels if each.title == "Fragmentation")
    series = []
    for card, (mode, given) in enumerate(((2, 14), (2, 6), (0, 4), (1, 0))):
        labels = f'cluster="c",node="n1",gpu="{card}"'
        for name, value in (
            ("allocate_mode", mode),
            ("memory_total_bytes", 16),
            ("memory_allocated_bytes", given),
        ):
            series.append({"series": f"gpuslice_gpu_{name}{{{labels}}}", "values": str(value)})
    expression = re.sub(r"\$\w+", ".*", panel.queries[0].expression)
    expected = {"expr": expression, "eval_time": "0s", "exp_samples": [{"labels": "{}", "value": 0.5}]}
    case = {"interval": "1m", "input_series": series, "promql_expr_test": [expected]}
    assert_promtool_finds(case, tmp_path)


@pytest.mark.parametrize("name", sorted(dashboards().keys() - {"gpu-scheduling"}))
def test_a_panel_draws_what_can_be_read_of_a_large_cluster(name: str, tmp_path: Path) -> None:
    """Not a line for each of thousands of cards: a browser stands still over that, and nobody reads it."""
    board = dashboards()[name]
    asked = set(re.findall(r"DCGM_\w+", str(board.panels))) | {metric.name for metric in METRICS}
    labels = {metric.name: metric.labels for metric in METRICS if metric.labels[-1] != "label_*"}
    series = []
    for metric in asked:
        for card in range(2 * MOST):
            own = {each: f"{each}{card}" for each in labels.get(metric, ("instance", "gpu"))} | {
                "cluster": "c"
            }
            text = ",".join(f'{each}="{value}"' for each, value in own.items())
            series.append({"series": f"{metric}{{{text}}}", "values": "0+1x10"})
    wanted = [
        {"expr": f"count({filled}) <= bool {MOST}", "eval_time": "10m", "exp_samples": [one]}
        for one in [{"labels": "{}", "value": 1}]
        for panel in board.panels
        for query in panel.queries
        for filled in [
            re.sub(r"\$\w+", ".*", query.expression.replace("$__range", "5m").replace("$price", "1"))
        ]
        if panel.kind == "timeseries" or "topk" in filled
    ]
    assert wanted
    case = {"interval": "1m", "input_series": series, "promql_expr_test": wanted}
    assert_promtool_finds(case, tmp_path)


def test_cards_given_out_are_counted_and_unknown_where_none_is_known(tmp_path: Path) -> None:
    (panel,) = (each for each in dashboards()["gpu-node"].panels if each.title == "GPUs given out")
    expression = re.sub(r"\$\w+", ".*", panel.queries[0].expression)
    modes = [f'gpuslice_gpu_allocate_mode{{cluster="c",node="n1",gpu="{card}"}}' for card in range(3)]
    given = [{"series": one, "values": f"_x4 {mode}x4"} for one, mode in zip(modes, (0, 1, 2), strict=True)]
    counted = [{"labels": "{}", "value": 2}]
    case = {
        "interval": "1m",
        "input_series": given,
        "promql_expr_test": [
            {"expr": expression, "eval_time": "1m", "exp_samples": []},
            {"expr": expression, "eval_time": "6m", "exp_samples": counted},
        ],
    }
    assert_promtool_finds(case, tmp_path)


def assert_promtool_finds(case: dict[str, Any], folder: Path) -> None:
    (folder / "tests.yaml").write_text(json.dumps({"tests": [case]}))
    told = subprocess.run(
        [find("promtool"), "test", "rules", folder / "tests.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_adapter_asks_for_series_that_name_their_pod() -> None:
    for rule in adapter_values()["rules"]["custom"]:
        name = rule["seriesQuery"].partition("{")[0]
        labels = next((set(each.labels) for each in METRICS if each.name == name), None)
        if labels is None:  # of the vendor's set
            assert name in LEGACY
            labels = {"namespace_name", "pod_name"}
        assert set(rule["resources"]["overrides"]) <= labels


# Grafana's names of units and of panels that it still has.
UNITS = {
    "Bps", "MBs", "bytes", "celsius", "hertz", "mbytes", "none", "percent", "percentunit", "reqps", "s",
    "short", "watt",
}  # fmt: skip
PANELS = {"gauge", "stat", "table", "timeseries"}


@pytest.mark.parametrize("name", dashboards())
def test_a_dashboard_is_what_grafana_imports(name: str) -> None:
    board = json.loads((ROOT / "monitoring" / "dashboards" / f"{name}.json").read_text())
    assert board["schemaVersion"] >= 36  # data sources are named by type and uid since
    assert [link["tags"] for link in board["links"]] == [["gpuslice"]]  # from one to the others
    assert "gpuslice" in board["tags"]
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    asked = {*map(str, re.findall(r"\$\{?(\w+)", json.dumps(board)))}
    assert asked <= variables.keys() | {"__rate_interval", "__range", "__url_time_range", "__field"}, asked
    assert "cluster" in variables or name == "nvidia-dcgm"
    for address in re.findall(r'"url": "(/d/[^"]+)"', json.dumps(board)):
        target = next(each for each in dashboards().values() if address.startswith(f"/d/{each.uid}?"))
        carried = re.findall(r"var-(\w+)=", address)
        assert set(carried) <= {each.name for each in target.variables}, address
    for panel in board["panels"]:
        assert panel["type"] in PANELS
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        first, *above = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert first["value"] is None  # else Grafana's own: red from 80, whatever of
        assert [each["value"] for each in above] == sorted(each["value"] for each in above)
        if panel["type"] == "timeseries":
            whole = name in {"gpu-sharing", "gpu-scheduling"}  # curves of a whole cluster have names
            assert all("{{" in each["legendFormat"] for each in panel["targets"]) or whole
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
        for where in (panel, *panel["targets"]):
            assert where["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("name", dashboards())
def test_a_tables_columns_have_headings_and_units(name: str) -> None:
    for panel in dashboards()[name].panels:
        if panel.kind == "table":
            assert {query.legend for query in panel.queries} == panel.units.keys(), panel.title
            assert set(panel.units.values()) <= UNITS


def test_what_boards_ask_of_extender_and_console_is_what_those_document() -> None:
    page = "".join(
        (ROOT / "docs" / name).read_text() for name in ("reference/extender.md", "operate/console.md")
    )
    asked = set(re.findall(r"gpuslice_(?:extender|console)_\w+", str(expressions())))
    asked = {name.removesuffix("_bucket") for name in asked}  # of a histogram
    assert len(asked) > 8
    assert {name for name in asked if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("name", dashboards())
def test_a_panels_unit_is_its_metrics_unit(name: str) -> None:
    """By the last part of the name, where the expression does not make something else of it."""
    of_name = {"bytes": "bytes", "celsius": "celsius", "watts": "watt", "ratio": "percentunit"}
    for panel in dashboards()[name].panels:
        for each in panel.queries:
            plain = re.match(
                r"(?:(?:sum|avg|topk)\((?:\d+, )?)?(?:max by \([^)]*\) \()?(gpuslice_\w+)\{[^}]*\}\)*$",
                each.expression,
            )
            unit = of_name.get(plain[1].rpartition("_")[2]) if plain else None
            assert unit in {None, panel.unit}, panel.title


def test_what_scales_is_what_the_adapter_offers() -> None:
    (metric,) = autoscaler()["spec"]["metrics"]
    offered = {rule["name"]["as"] for rule in adapter_values()["rules"]["custom"]}
    assert metric["pods"]["metric"]["name"] in offered


@pytest.mark.parametrize(
    ("containers", "percent"),
    [
        ({"a": 0, "b": 0}, 100),  # two containers on one card
        ({"a": 0}, 50),
        ({"a": (0, 1)}, 50),  # one on two cards, both half busy
        ({}, None),  # nobody knows: neither 0 nor anything else
    ],
)
def test_a_pod_is_as_busy_as_its_containers_together(
    containers: dict[str, Any], percent: float | None, tmp_path: Path
) -> None:
    held = [
        (name, card) for name, on in containers.items() for card in (on if isinstance(on, tuple) else (on,))
    ]
    labels = 'node="n1",namespace="default",pod="infer-6d4cf56db6-x2x7k"'
    series = [
        {
            "series": f'{SM_UTILIZATION.name}{{{labels},container="{name}",gpu_uuid="{card}"}}',
            "values": "0.5x10",
        }
        for name, card in held
    ]
    # another owner's pods may have names that begin alike: only this one's are counted
    other = labels.replace("infer-6d4cf56db6-x2x7k", "infer-batch-x2x7k") + ',container="a",gpu_uuid="9"'
    series.append({"series": f"{SM_UTILIZATION.name}{{{other}}}", "values": "0x10"})
    for where, kind, name in ((labels, "Deployment", "infer"), (other, "Job", "infer-batch")):
        owned = f'{CONTAINER_INFO.name}{{{where},workload_kind="{kind}",workload="{name}"}}'
        series.append({"series": owned, "values": "1x10"})
    (trigger,) = scaled_object()["spec"]["triggers"]
    rule = adapter_values()["rules"]["custom"][0]["metricsQuery"]
    asked = rule.replace("<<.GroupBy>>", "pod").replace(
        "<<.LabelMatchers>>", 'namespace="default",pod="infer-6d4cf56db6-x2x7k"'
    )
    of_pod = [{"labels": '{pod="infer-6d4cf56db6-x2x7k"}', "value": percent}]
    of_all = [{"labels": "{}", "value": percent}]
    cases = [(asked, of_pod), (trigger["metadata"]["query"], of_all)]
    wanted = [
        {"expr": query, "eval_time": "2m", "exp_samples": found if percent is not None else []}
        for query, found in cases
    ]
    assert_promtool_finds({"interval": "15s", "input_series": series, "promql_expr_test": wanted}, tmp_path)
    assert trigger["metadata"]["ignoreNullValues"] == "false"
