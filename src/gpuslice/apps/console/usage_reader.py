"""Reads what cards and containers use, from Prometheus or from the exporters one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpuslice.apps.console.cluster_state import ClusterState
from gpuslice.apps.console.usage_history import Point, UsageHistory
from gpuslice.core.sizing import Suggestion
from gpuslice.core.units import MIB
from gpuslice.diagnosis.advise.facts import suggestion_of
from gpuslice.diagnosis.exporters import Exporters, Fetch
from gpuslice.diagnosis.prometheus import Prometheus, PrometheusError, TeamHours
from gpuslice.diagnosis.usage import CardUsage, ContainerUsage, UsageByPod, gpu_order, least, total

AT_ONCE = 8
GIB = 1 << 30
NOT_YET_S = 0.2
BREATH = 500
"""After this many pods, yields to other tasks."""
HOURS_HOLD_S, DAY_S = 60.0, 86400.0
STEADY_S = 30.0
IDLE_SM = 0.01
"""Below this fraction of the SMs a container counts as idle."""


class UsageReader:
    """Keeps the latest usage of each pod, writes its rows, and remembers an hour."""

    def __init__(
        self,
        state: ClusterState,
        fetch: Fetch,
        *,
        prometheus: Prometheus | None = None,
        interval_s: float = 15.0,
    ) -> None:
        self.history = UsageHistory()
        self.prometheus = prometheus
        self.problem = ""
        self.read_at_s: float | None = None
        self.containers = UsageByPod()
        self._refused: dict[str, float] = {}  # in total, as of the last step
        self._hours: tuple[float, dict[str, TeamHours]] = (0.0, {})
        self._hours_at_s = 0.0
        self.idle_at_s: dict[str, float] = {}  # since when a pod has been idle
        self._state = state
        self._interval_s = interval_s
        self._exporters = Exporters(fetch, AT_ONCE)

    async def run(self) -> None:
        """Read repeatedly until cancelled."""
        loop_time = asyncio.get_running_loop().time  # not the time of day, which may be set
        while True:
            if not self._state.synced:
                await asyncio.sleep(NOT_YET_S)
                continue
            due_s = loop_time() + self._interval_s
            await self.read()
            await asyncio.sleep(max(1.0, due_s - loop_time()))

    async def read(self) -> None:
        """Read once; the rows of a source that does not answer are removed."""
        if self.prometheus is not None:
            try:
                # cards are freed before containers are read: both at once take much memory
                self._take_cards(await asyncio.to_thread(self.prometheus.cards))
                await self._take(await asyncio.to_thread(self.prometheus.containers), time.time())
                self.problem = ""
            except PrometheusError as error:
                self.problem = str(error)
            return
        found = await self._exporters.read(self._state.exporters.values())
        self.problem = next(iter(found.problems), "" if self._state.exporters else "no exporter runs")
        self._take_cards(found.cards)
        await self._take(found.containers, time.time())

    async def team_hours(self) -> tuple[float, dict[str, TeamHours]]:
        """Over how many seconds, and by namespace; for the last day if Prometheus has it."""
        if self.prometheus is None:
            return self.history.team_hours()
        if not self._hours[1] or time.time() - self._hours_at_s > HOURS_HOLD_S:
            self._hours = (DAY_S, await asyncio.to_thread(self.prometheus.team_hours))
            self._hours_at_s = time.time()
        return self._hours

    def _take_cards(self, found: Sequence[CardUsage]) -> None:
        """Write rows for what was found; others are removed, as their values are no longer valid."""
        rows, cards = self._state.rows, dict[str, list[list[Any]]]()
        for card in found:
            figures = (card.used_bytes and card.used_bytes / MIB, card.utilization_ratio)
            rounded = [None if each is None else round(each, 2) for each in figures]
            cards.setdefault(card.node, []).append([gpu_order(card.gpu)[0], card.up, *rounded])
        for name, figured in cards.items():
            rows.put("cardUsage", name, {"name": name, "cards": figured})
        for name in set(rows.keys("cardUsage")) - cards.keys():
            rows.drop("cardUsage", name)

    async def _take(self, found: Sequence[ContainerUsage], at_s: float) -> None:
        """The same for pods, and the history; Prometheus keeps a better one."""
        rows, stepped = self._state.rows, self.prometheus is None and self.history.step(at_s)
        self.containers = UsageByPod(found)
        self.read_at_s = at_s
        for number, (key, containers) in enumerate(self.containers.items()):
            if number % BREATH == 0:
                await asyncio.sleep(0)
            namespace, _, name = key.partition("/")
            sm = total(each.sm_ratio for each in containers)
            self._note_idle(key, containers, sm, at_s)
            used = total(each.used_bytes for each in containers)
            if stepped:
                percent = None if sm is None else round(sm * 100)
                in_all = sum(each.refused or 0 for each in containers)
                refused = max(0, round(in_all - self._refused.get(key, in_all)))
                self._refused[key] = in_all
                self.history.put(key, Point(None if used is None else round(used / MIB), percent, refused))
            if key in self._state.pods:
                row = self._row(key, containers, used, sm)
                rows.put("podUsage", key, {"namespace": namespace, "name": name, **row}, namespace)
        for key in set(rows.keys("podUsage")) - self.containers.keys():
            rows.drop("podUsage", key)
        for known in (self.idle_at_s, self._refused):
            for key in known.keys() - self.containers.keys() - self._state.pods.keys():
                del known[key]  # a pod that is missing from one reading is still there
        if stepped:
            self.history.put_teams(at_s, _by_namespace(self.containers))

    def _note_idle(
        self, key: str, containers: Sequence[ContainerUsage], sm: float | None, at_s: float
    ) -> None:
        """The exporter knows since when, over restarts of this process; an old one does not tell."""
        if (idle_s := least([each.idle_seconds for each in containers])) is not None:
            since_s = at_s - idle_s
            before_s = self.idle_at_s.get(key)
            if before_s is None or abs(before_s - since_s) > STEADY_S:  # a row that changes is sent again
                self.idle_at_s[key] = since_s
        elif sm is None or sm >= IDLE_SM:
            self.idle_at_s.pop(key, None)
        else:
            self.idle_at_s.setdefault(key, at_s)

    def _row(
        self, key: str, containers: Sequence[ContainerUsage], used: float | None, sm: float | None
    ) -> dict[str, Any]:
        sums = {
            "used": used,
            "limit": total(each.limit_bytes for each in containers),
            "peak": total(each.peak_bytes for each in containers),
        }
        lent = [each.borrowed_bytes for each in containers if each.borrowed_bytes is not None]
        sums["borrowed"] = sum(lent) if lent else None
        row: dict[str, Any] = {name: round(each / MIB) for name, each in sums.items() if each is not None}
        if sm is not None:
            row["sm"] = round(sm, 2)
        if refused := sum(each.refused or 0 for each in containers):
            row["refused"] = round(refused)
        if throttled := sum(each.throttled_seconds or 0 for each in containers):
            row["throttled"] = round(throttled)
        if key in self.idle_at_s and (sm is None or sm < IDLE_SM):
            row["idleSince"] = round(self.idle_at_s[key])
        if (held := total(each.allocated_bytes for each in containers)) is not None:
            row["held"] = round(held / MIB)
        if owner := next((each.workload for each in containers if each.workload), ""):
            row["owner"] = owner
        if (better := self.suggestion(key)) is not None:
            row["suggest"] = [better.units, better.limit_mib, better.more]
        return row

    def suggestion(self, key: str) -> Suggestion | None:
        """A better size for a pod, as in `explain`."""
        found = self._state.pods.get(key)
        pod = self._state.view(found) if found is not None else None
        if pod is None:
            return None
        return suggestion_of(self._state.ledger_of(pod.node), pod, self.containers.get(key, ()))


def _by_namespace(containers: Mapping[str, Sequence[ContainerUsage]]) -> dict[str, TeamHours]:
    """The present amounts of each namespace, in GiB and in busy cards."""
    found: dict[str, list[ContainerUsage]] = {}
    for key, each in containers.items():
        found.setdefault(key.partition("/")[0], []).extend(each)
    teams = {}
    for namespace, rows in found.items():
        held = sum((each.allocated_bytes or each.limit_bytes or 0) for each in rows)
        used, sm = total(each.used_bytes for each in rows), total(each.sm_ratio for each in rows)
        teams[namespace] = TeamHours(held / GIB, None if used is None else used / GIB, sm)
    return teams
