"""What the processes of a control plane have used: CPU, requests, and time by their own histograms."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tests.e2e import control_plane

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
REQUESTS = "gpuslice_extender_requests_total"
NOMINATIONS = "gpuslice_extender_nominations_total"
Figures = dict[str, float]


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor seconds of each process so far, user and system."""
    found = {}
    for name, pid in pids.items():
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(words[11]) + int(words[12])) / TICKS_PER_S
    return found


def requests(plane: control_plane.ControlPlane) -> Figures:
    """Requests that the API server has answered so far, by verb, resource and subresource; no watches."""
    text, found = control_plane.fetch(f"{plane.url}/metrics").decode(), dict[str, float]()
    for names, value in re.findall(r"^apiserver_request_total\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        name = dict(re.findall(r'(\w+)="([^"]*)"', names))
        if name["verb"] not in ("WATCH", "LIST", "DELETECOLLECTION"):
            failed = f" {name['code']}" if not name["code"].startswith("2") else ""
            what = "/".join(filter(None, (name["resource"], name["subresource"])))
            asked = f"{name['verb']} {what or 'other'}{failed}"
            found[asked] = found.get(asked, 0.0) + float(value)
    return found


def where(scheduler: str, ours: str) -> Figures:
    """Milliseconds per pod by the scheduler's own histograms, and by ours if there is an extender.

    `scheduling` is the single-threaded cycle, whose length determines the throughput; the part of it that the
    other lines do not explain is kube-scheduler's side of the calls (JSON, HTTP) and its bookkeeping.
    """
    points_family = "scheduler_framework_extension_point_duration_seconds"
    points = {
        "scheduling": ("scheduler_scheduling_algorithm_duration_seconds", ""),
        "in-tree prefilter": (points_family, 'extension_point="PreFilter"'),
        "in-tree filter": (points_family, 'extension_point="Filter"'),
        "in-tree score": (points_family, 'extension_point="Score"'),
        "in-tree reserve": (points_family, 'extension_point="Reserve"'),
        "in-tree prebind": (points_family, 'extension_point="PreBind"'),
        "attempt, with bind": ("scheduler_scheduling_attempt_duration_seconds", 'result="scheduled"'),
    }
    found = {name: _mean_ms(scheduler, family, label) for name, (family, label) in points.items()}
    for verb in ("filter", "prioritize", "bind"):
        seconds = _sum(ours, "gpuslice_extender_request_seconds_sum", f'verb="{verb}"')
        calls = _sum(ours, REQUESTS, f'verb="{verb}"')
        if calls:
            found[f"extender {verb}"] = round(seconds * 1e3 / calls, 3)
    for result in ("used", "late", "missed"):
        if ours:
            found[f"pods {result}"] = _sum(ours, NOMINATIONS, f'result="{result}"')
    if ours:
        found["binds refused, in all"] = _sum(ours, REQUESTS, 'verb="bind",result="no"')
    return found


def totals(text: str, family: str, label: str) -> Figures:
    """The sum of a counter's or gauge's rows for each value of one label."""
    found = dict[str, float]()
    for names, value in re.findall(rf"^{re.escape(family)}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE):
        of = dict(re.findall(r'(\w+)="([^"]*)"', names))[label]
        found[of] = found.get(of, 0.0) + float(value)
    return found


def _mean_ms(text: str, family: str, label: str) -> float:
    count = _sum(text, f"{family}_count", label)
    return round(_sum(text, f"{family}_sum", label) * 1e3 / count, 3) if count else 0.0


def _sum(text: str, name: str, label: str) -> float:
    rows = re.findall(rf"^{re.escape(name)}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in rows if label in labels)
