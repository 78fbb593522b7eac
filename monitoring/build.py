"""Writes everything below ``monitoring/`` and the metrics' documentation: ``python -m monitoring.build``.

`files()` returns the expected contents; a test compares them with the files.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.apps.exporter.catalogue import Group, groups
from monitoring.boards import dashboards
from monitoring.cases import rule_tests
from monitoring.panels import document
from monitoring.records import RECORDED
from monitoring.rules import ALERTS
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
        "examples/scaling/hpa.yaml": _yaml(
            autoscaler(),
            "By the GPU time that the replicas use; needs Prometheus "
            "Adapter with monitoring/adapter/prometheus-adapter-values.yaml.",
        ),
        "examples/scaling/keda.yaml": _yaml(
            scaled_object(), "The same by KEDA, which asks Prometheus itself."
        ),
        "docs/reference/metrics.md": metrics_page(),
    }
    carried = [path for path in found if path.startswith("monitoring/dashboards/") or path == RULES]
    chart = {f"charts/gpuslice/{path}": found[path] for path in carried}  # charts read their own folder
    return found | chart | {"monitoring/alerts/tests.yaml": _yaml(rule_tests())}


def rule_groups() -> dict[str, Any]:
    """A Prometheus rule file."""
    recorded = [{"record": name, "expr": expression} for name, expression in RECORDED.items()]
    return {
        "groups": [
            {"name": "gpuslice.records", "rules": recorded},
            {"name": "gpuslice.alerts", "rules": [alert.rule() for alert in ALERTS]},
        ]
    }


OBVIOUS = ("the exporter", "as above")
MOST_WITHOUT = 2
"""Metrics of a group that may lack a label for it to be called common."""


def metrics_page() -> str:
    """The reference of every metric."""
    lines = [
        "# Metrics",
        "",
        "The metrics of `gpuslice exporter`. It also exports the fields of the counter file under",
        "dcgm-exporter's names ([replacing dcgm-exporter](dcgm-exporter.md)). What ends in `_total` is a",
        "counter, anything else a gauge; before that stands the base unit, and a `_ratio` is 0 to 1. A value",
        "that cannot be read is absent, and `gpuslice_unavailable` says why. In parentheses: its source.",
        "",
    ]
    for group in groups():
        lines += _group(group)
    lines += [
        "## Card time",
        "",
        "`gpuslice_container_sm_utilization_ratio` is NVML's percentage of the container's processes. Where",
        "these exceed the card's utilization by more than 5 points over ten seconds, they include waits for",
        "others' turns: then the card's utilization is divided by what the interposer charged each, at most",
        "up to its percentage. NVML's own figure is `DCGM_CUSTOM_PROCESS_SM_UTIL` (`--ack-metrics`).",
        "",
        "## Every process",
        "",
        "Extender, agent, exporter, webhook, claims controller and console also export these.",
        "",
        "| metric | meaning |",
        "|---|---|",
    ]
    for each in ProcessMetrics().families():
        kind = " (histogram)" if each.kind == "histogram" else ""
        lines.append(f"| `{each.name}` | {each.help}{kind} |")
    lines += [
        "",
        "## Formats",
        "",
        "`/metrics` answers in OpenMetrics 1.0.0, in Prometheus' protobuf format or in the text format",
        "0.0.4, whichever the client's `Accept` prefers, with gzip if the client accepts it. In OpenMetrics",
        "the counters of the counter file are of type `unknown`.",
        "",
        "Durations are classic histograms; the protobuf format also has native buckets (schema 3). To have",
        "Prometheus store them, set `monitoring.nativeHistograms: true` in the chart, or in the scrape",
        "configuration `scrape_native_histograms: true` and `always_scrape_classic_histograms: true`, which",
        "dashboards and alerts use.",
    ]
    return "\n".join([*lines, ""])


def _group(group: Group) -> list[str]:
    """A table; labels common to nearly all of its metrics are listed above it."""
    counts = Counter(name for metric in group.metrics for name in metric.labels)
    common = [name for name, count in counts.items() if count >= len(group.metrics) - MOST_WITHOUT > 1]
    lines = [f"## {group.title}", ""]
    if common:
        lines += [f"Labels: {', '.join(f'`{name}`' for name in common)}, and what is named in the table.", ""]
    lines += ["| metric | more labels | meaning |", "|---|---|---|"]
    for metric in group.metrics:
        lacking = [name for name in common if name not in metric.labels]
        more = ", ".join(name for name in metric.labels if lacking or name not in common)
        meaning = metric.help if metric.source in OBVIOUS else f"{metric.help[:-1]} ({metric.source})"
        lines.append(f"| `{metric.name}` | {'only ' if lacking else ''}{more} | {meaning} |")
    return [*lines, ""]


def _yaml(document: Any, about: str = "") -> str:
    plain = json.loads(json.dumps(document))  # no object occurs twice, so YAML needs no anchors
    about = f"# {about}\n" if about else ""
    return about + _NOTE + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110)


def main() -> None:
    for name, text in files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
