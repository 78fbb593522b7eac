"""What ``gpuslice doctor`` finds in what the console watches anyway, and the alerts of Prometheus."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gpuslice.apps.console.access import Viewer
from gpuslice.apps.console.cluster_state import ClusterState
from gpuslice.apps.console.usage_reader import UsageReader
from gpuslice.diagnosis.doctor.checks import WATCHED_CHECKS, worst_first
from gpuslice.diagnosis.doctor.facts import Facts, Finding
from gpuslice.diagnosis.doctor.groups import Group, grouped
from gpuslice.diagnosis.prometheus import Prometheus, PrometheusError

HOLDS_S = 10.0


class Health:
    """The findings, at most a few seconds old; a large cluster is examined on a thread."""

    def __init__(
        self,
        state: ClusterState,
        node_label: str,
        usage: UsageReader,
        prometheus: Prometheus | None = None,
    ) -> None:
        self._state = state
        self._usage = usage
        self._prometheus = prometheus
        self._alerts: list[dict[str, Any]] = []
        self._problem = ""  # why alerts are unknown
        self._node_label = node_label
        self._looked_at = Facts()
        self._found: list[Finding] = []
        self._groups: list[Group] = []  # of all findings
        self._at_s = 0.0
        self._looking = asyncio.Lock()

    async def document(self, viewer: Viewer) -> dict[str, Any]:
        """Users without access to the whole cluster see only findings about their own pods."""
        async with self._looking:
            if not (self._state.synced and self._state.may_list_nodes):
                self._found, self._groups = [], []
            elif time.monotonic() - self._at_s > HOLDS_S:
                self._looked_at = self._facts()
                self._found, self._groups = await asyncio.to_thread(_look, self._looked_at)
                await self._read_alerts()
                self._at_s = time.monotonic()
        whole = viewer.everything and viewer.nodes

        def may_see(where: str) -> bool:
            kind, _, key = where.partition(" ")
            return whole or (kind == "pod" and viewer.sees(key.partition("/")[0]))

        groups = self._groups
        if not whole:
            visible = [each for each in self._found if may_see(each.where)]
            groups = await asyncio.to_thread(grouped, visible, self._looked_at)
        return {
            "findings": [
                {"level": str(each.level), "wheres": each.wheres, "what": each.what, "fix": each.fix}
                for each in groups
            ],
            "alerts": [
                each
                for each in self._alerts
                if whole or (each["namespace"] and viewer.sees(each["namespace"]))
            ],
            "alertsProblem": self._problem,
            "alertsKnown": self._prometheus is not None,
            "whole": whole,
        }

    async def _read_alerts(self) -> None:
        """Prometheus' present alerts; if it does not answer, earlier ones are no longer valid."""
        if self._prometheus is None:
            return
        self._alerts, self._problem = [], ""
        try:
            for alert in await asyncio.to_thread(self._prometheus.alerts):
                labels, notes = alert["labels"], alert.get("annotations") or {}
                names = ("node", "gpu", "namespace", "pod", "container", "instance")
                self._alerts.append(
                    {
                        "name": labels["alertname"],
                        "severity": labels.get("severity", ""),
                        "state": alert.get("state", ""),
                        "since": alert.get("activeAt"),
                        "where": ", ".join(f"{name} {labels[name]}" for name in names if labels.get(name)),
                        "namespace": labels.get("namespace", ""),
                        "what": notes.get("summary", ""),
                        "fix": notes.get("description", ""),
                    }
                )
        except PrometheusError as error:
            self._problem = str(error)
        order = {"critical": 0, "warning": 1}
        self._alerts.sort(key=lambda each: (order.get(each["severity"], 2), each["name"], each["where"]))

    def _facts(self) -> Facts:
        state = self._state
        small = (state.services, state.slices, *state.hooks)
        cluster = state.cluster(self._usage.containers)
        known = cluster.fields()
        known["unreadable"] = [each.plural for each in small if not each.synced]
        known["followed"] = None  # it changes while a thread looks
        known["claims"] = state.claims if state.follows_claims else None
        return Facts(
            **known,
            plugins=list(state.plugins.values()),
            services=state.services.objects(),
            slices=state.slices.objects(),
            hooks=state.own_hooks(),
            node_label=self._node_label,
        )


def _look(facts: Facts) -> tuple[list[Finding], list[Group]]:
    found = worst_first([each for check in WATCHED_CHECKS for each in check(facts)])
    return found, grouped(found, facts)
