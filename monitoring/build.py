"""Writes everything below ``monitoring/`` and the metrics' documentation: ``python -m monitoring.build``.

`files()` is what should be there; a test compares it with what is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.apps.exporter.catalogue import Group, groups
from monitoring.boards import dashboards
from monitoring.cases import rule_tests
from monitoring.panels import document
from monitoring.rules import ALERTS, rule_groups
from monitoring.scaling import adapter_values, autoscaler, scaled_object

ROOT = Path(__file__).resolve().parent.parent
RULES = "monitoring/alerts/gpuslice.rules.yaml"
_NOTE = "# Written by `python -m monitoring.build`.\n"


def files() -> dict[str, str]:
    """Path from the repository's root → text."""
    found = {
        f"monitoring/dashboards/{name}.json": json.dumps(document(board), indent=1) + "\n"
        for name, board in dashboards().items()
    }
    found |= {
        RULES: _yaml(rule_groups()),
        "monitoring/adapter/prometheus-adapter-values.yaml": _yaml(adapter_values()),
        "monitoring/adapter/hpa.yaml": _yaml(autoscaler()),
        "monitoring/adapter/keda.yaml": _yaml(scaled_object()),
        "docs/reference/metrics.md": metrics_page(),
    }
    carried = [path for path in found if path.startswith("monitoring/dashboards/") or path == RULES]
    chart = {f"charts/gpuslice/{path}": found[path] for path in carried}  # a chart reads its own folder only
    return found | chart | {"monitoring/alerts/tests.yaml": _yaml(rule_tests())}


def metrics_page() -> str:
    """The reference of every metric and alert."""
    lines = [
        "# Metrics",
        "",
        "These are the metrics of `gpuslice exporter` itself. In addition it exports the fields of the",
        "counter file under dcgm-exporter's names, with device labels only",
        "([replacing dcgm-exporter](dcgm-exporter.md)). Names end with the base unit; a `_ratio` is 0 to 1.",
        "A value that could not be read is absent and counted in `gpuslice_unavailable`.",
        "",
        "All processes answer `/metrics` in OpenMetrics 1.0.0 to who asks for it by `Accept`, as Prometheus",
        "does, else in the text format 0.0.4, with the same series. OpenMetrics knows no counter whose name",
        "does not end in `_total`: such counters of the counter file are `unknown` there.",
        "",
    ]
    for group in groups():
        lines += _group(group)
    lines += [
        "## Every process",
        "",
        "Extender, agent, exporter, webhook, claims controller and console have these behind their own.",
        "Durations are classic histograms in the text formats. Who asks for Prometheus' protobuf format",
        "(`application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited`)",
        "gets the whole page in it, with native buckets beside the classic ones: schema 3, a bucket ends 9 %",
        "above the one before, from a microsecond to half a year. Prometheus asks for it where its scrape",
        "configuration says `scrape_native_histograms: true` (3.8; before, with the feature",
        "`native-histograms`). It then leaves out the classic buckets, which our boards and alerts ask",
        "for, unless `always_scrape_classic_histograms: true` stands there too. The chart's monitors say",
        "both with `monitoring.nativeHistograms: true` (prometheus-operator 0.88).",
        "",
        "| metric | type | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{each.name}` | {each.kind} | {each.help} |" for each in ProcessMetrics().families()]
    lines += [
        "",
        "## Alerts",
        "",
        "| alert | severity | for | what it says | what to do |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {a.name} | {a.severity} | {a.lasting} | {a.summary} | {a.action} |" for a in ALERTS]
    return "\n".join([*lines, ""])


def _group(group: Group) -> list[str]:
    head = [f"## {group.title}", "", "| metric | type | labels | meaning | from |", "|---|---|---|---|---|"]
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.help} | {m.source} |" for m in group.metrics
    ]
    return [*head, *rows, ""]


def _yaml(document: Any) -> str:
    plain = json.loads(json.dumps(document))  # nothing is the same object twice: no anchors
    return _NOTE + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110)


def main() -> None:
    for name, text in files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
