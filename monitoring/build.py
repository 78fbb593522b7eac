"""Writes everything below ``monitoring/`` and the metrics' documentation: ``python -m monitoring.build``.

`files()` returns the expected contents; a test compares them with the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.apps.exporter.catalogue import CARD, Group, groups
from monitoring.boards import dashboards
from monitoring.cases import rule_tests
from monitoring.panels import document
from monitoring.rules import rule_groups
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


def metrics_page() -> str:
    """The reference of every metric."""
    lines = [
        "# Metrics",
        "",
        "The metrics of `gpuslice exporter`. It also exports the fields of the counter file under",
        "dcgm-exporter's names ([replacing dcgm-exporter](dcgm-exporter.md)). A name ends with its base",
        "unit; a `_ratio` is 0 to 1. A value that cannot be read is absent, and `gpuslice_unavailable` says",
        "why. Alerts are described on [a separate page](../operate/alerts.md).",
        "",
    ]
    for group in groups():
        lines += _group(group)
    lines += [
        "## Card time",
        "",
        "`gpuslice_container_sm_utilization_ratio` is NVML's percentage of the container's processes,",
        "unless these percentages together exceed the card's utilization by more than 5 points over about",
        "ten seconds: then they include waits for other processes' turns. In that case the card's",
        "utilization is divided among containers and other processes by what the interposer charged each",
        "of them, at most up to its percentage; who was charged little or nothing for its percentage has",
        "its part of the rest. NVML's own figure of each process is `DCGM_CUSTOM_PROCESS_SM_UTIL`",
        "(`--ack-metrics`).",
        "",
        "## Every process",
        "",
        "Extender, agent, exporter, webhook, claims controller and console also export these.",
        "",
        "| metric | type | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{each.name}` | {each.kind} | {each.help} |" for each in ProcessMetrics().families()]
    lines += [
        "",
        "## Formats",
        "",
        "`/metrics` answers in OpenMetrics 1.0.0, in Prometheus' protobuf format or in the text format",
        "0.0.4, whichever the client's `Accept` prefers, with gzip if the client accepts it. The series",
        "are the same. In OpenMetrics a counter's name ends in `_total`: counters of the counter file are",
        "of type `unknown` there.",
        "",
        "Durations are classic histograms. The protobuf format also has native buckets (schema 3). To have",
        "Prometheus store them, set `scrape_native_histograms: true` in its scrape configuration (3.8;",
        "earlier, the feature `native-histograms`), and `always_scrape_classic_histograms: true`: dashboards",
        "and alerts use the classic buckets. The chart sets both with `monitoring.nativeHistograms: true`",
        "(prometheus-operator 0.88).",
    ]
    return "\n".join([*lines, ""])


def _group(group: Group) -> list[str]:
    """A table; labels common to all of its metrics are listed above it."""
    common = [name for name in CARD if all(name in metric.labels for metric in group.metrics)]
    lines = [f"## {group.title}", ""]
    if common:
        lines += [f"Each has the labels {', '.join(f'`{name}`' for name in common)}.", ""]
    lines += ["| metric | type | labels | meaning | from |", "|---|---|---|---|---|"]
    for metric in group.metrics:
        more = ", ".join(name for name in metric.labels if name not in common)
        lines.append(f"| `{metric.name}` | {metric.kind} | {more} | {metric.help} | {metric.source} |")
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
