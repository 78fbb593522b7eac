"""What is charged, idle and nobody's is what the cards have, over days on which everything comes and goes.

Prometheus' own rule tests evaluate the rules from minute to minute. What is expected is kept beside.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from monitoring.charges import CHARGES

from gpuslice.diagnosis import bill
from tests.tools import find

DAY = 1440  # minutes
GIB = 1 << 30
CARD_GIB, RESERVED_GIB = 80, 1
TOLERANCE = 0.001
FOR_RATES = 0.04
"""Device time is taken from counters that start with each exporter: some seconds are lost with each."""


@dataclass
class Machine:
    """A node with its cards; its exporter answers or not, is replaced, and for a while there are two."""

    name: str
    cards: int
    exporters: list[str] = field(default_factory=list)
    sm: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    joules: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    away: dict[int, int] = field(default_factory=dict)  # card → until when it does not answer


@dataclass
class Tenant:
    name: str
    namespace: str
    machine: Machine
    cards: tuple[int, ...]
    guaranteed_gib: int
    until: int
    used_gib: float = 0.0
    sm: float = 0.0


class Day:
    """What Prometheus scrapes, a value a minute, and what is true of it."""

    def __init__(self, luck: random.Random, isolated: bool) -> None:
        self._luck, self._isolated = luck, isolated
        self._machines = [Machine(f"n{number}", luck.choice((1, 2))) for number in range(2)]
        self._tenants: list[Tenant] = []
        self._series: dict[str, list[str]] = {}
        self.expected: dict[tuple[str, str], float] = defaultdict(float)
        for minute in range(DAY):
            self._change(minute)
            self._scrape(minute)

    def series(self) -> list[dict[str, str]]:
        return [
            {"series": name, "values": " ".join([*values, *["_"] * (DAY - len(values))])}
            for name, values in self._series.items()
        ]

    def _change(self, minute: int) -> None:
        luck = self._luck
        self._tenants = [each for each in self._tenants if each.until > minute]
        for each in self._tenants:
            if luck.random() < 0.1:
                beyond = 1.0 if luck.random() < 0.8 else 1.5
                each.used_gib = round(luck.uniform(0, beyond) * each.guaranteed_gib, 3)
                each.sm = round(luck.choice((0.0, luck.random() * 0.5)), 3)
        for machine in self._machines:
            for card in [card for card, until in machine.away.items() if until <= minute]:
                del machine.away[card]
            if luck.random() < 0.002:
                machine.away[luck.randrange(machine.cards)] = minute + luck.randrange(1, 90)
            if luck.random() < 0.03:
                cards = tuple(luck.sample(range(machine.cards), luck.randint(1, machine.cards)))
                size = luck.randint(1, 40)
                held = [sum(t.guaranteed_gib for t in self._on(machine, card)) for card in cards]
                if not self._isolated or max(held) + size <= CARD_GIB - RESERVED_GIB:
                    name, space = f"p{minute}", luck.choice(("team-a", "team-b"))
                    until = minute + int(luck.expovariate(1 / 90)) + 1
                    self._tenants.append(Tenant(name, space, machine, cards, size, until))

    def _on(self, machine: Machine, card: int) -> list[Tenant]:
        return [each for each in self._tenants if each.machine is machine and card in each.cards]

    def _scrape(self, minute: int) -> None:
        luck = self._luck
        now: dict[str, float] = {}
        for machine in self._machines:
            if not machine.exporters or luck.random() < 0.002:
                machine.exporters.append(f"10.0.0.{minute}:9400")
            if len(machine.exporters) > 1 and luck.random() < 0.5:
                machine.exporters.pop(0)
            answers = luck.random() > 0.01
            for card in range(machine.cards):
                if card in machine.away:
                    continue
                tenants = self._on(machine, card)
                busy = sum(each.sm for each in tenants)
                stranger = 0.02
                machine.joules[card] += 60 * (100 + 300 * min(1.0, busy))
                for exporter in machine.exporters:
                    for each in tenants:
                        machine.sm[exporter, f"{each.name} {card}"] += 60 * each.sm
                if answers:
                    self._expect(machine, card, tenants, busy)
                    for exporter in machine.exporters:
                        now |= self._page(machine, card, tenants, exporter, stranger)
        for name, value in now.items():
            values = self._series.setdefault(name, [])
            values += ["_"] * (minute - len(values))
            values.append(f"{value:g}" if value < 1e6 else f"{value:.0f}")
        for name, values in self._series.items():
            if name not in now and len(values) == minute and values[-1] != "stale":
                values.append("stale")

    def _expect(self, machine: Machine, card: int, tenants: list[Tenant], busy: float) -> None:
        held = {each.name: max(each.guaranteed_gib, each.used_gib) for each in tenants}
        over = max(1.0, sum(held.values()) / CARD_GIB)
        for each in tenants:
            self.expected[bill.MEMORY.charged, each.namespace] += held[each.name] / over * GIB
            self.expected[bill.GUARANTEED, each.namespace] += each.guaranteed_gib * GIB
            self.expected[bill.USED, each.namespace] += each.used_gib * GIB
            beyond = max(0.0, each.used_gib - each.guaranteed_gib)
            self.expected[bill.BORROWED, each.namespace] += beyond * GIB
            self.expected[bill.SM.charged, each.namespace] += each.sm / max(1.0, busy)
        self.expected[bill.MEMORY.card, ""] += CARD_GIB * GIB
        self.expected[bill.SM.card, ""] += 1
        self.expected[bill.POWER.card, ""] += 100 + 300 * min(1.0, busy)

    def _page(
        self, machine: Machine, card: int, tenants: list[Tenant], exporter: str, stranger: float
    ) -> dict[str, float]:
        at = f'instance="{exporter}",node="{machine.name}",gpu="{card}",gpu_uuid="{machine.name}-{card}"'
        found = {
            f"gpuslice_gpu_memory_total_bytes{{{at}}}": CARD_GIB * GIB,
            f"gpuslice_gpu_memory_reserved_bytes{{{at}}}": RESERVED_GIB * GIB,
            f"gpuslice_gpu_energy_joules_total{{{at}}}": machine.joules[card],
            f'gpuslice_unattributed_memory_bytes{{{at},reason="driver"}}': 0.3 * GIB,
            f'gpuslice_unattributed_sm_utilization_ratio{{{at},reason="host"}}': stranger,
        }
        for each in tenants:
            who = f'{at},namespace="{each.namespace}",pod="{each.name}",container="main"'
            found |= {
                f"gpuslice_container_memory_allocated_bytes{{{who}}}": each.guaranteed_gib * GIB,
                f"gpuslice_container_memory_used_bytes{{{who}}}": each.used_gib * GIB,
                f"gpuslice_container_sm_seconds_total{{{who}}}": machine.sm[exporter, f"{each.name} {card}"],
            }
        return found


def _gap(meter: bill.Meter) -> str:
    """By how much the parts of a card differ from the card, at one moment, where they differ most."""
    on = "on (node, gpu_uuid)"
    card = f"sum by (node, gpu_uuid) ({meter.card})"
    parts = f"(sum by (node, gpu_uuid) ({meter.charged}) or 0 * {card}) + {on} {meter.idle}"
    return f"max(abs(({parts} + {on} {meter.unattributed} - {on} {card}) / {on} {card}))"


GAPS = {f"gap:{name}": _gap(meter) for name, meter in bill.METERS.items()}
SERIES = (
    *(bill.GUARANTEED, bill.BORROWED, bill.USED, bill.MEMORY.charged, bill.SM.charged),
    *(meter.card for meter in bill.METERS.values()),
)
SUMS = {series: f"sum:{number}" for number, series in enumerate(SERIES)}
"""promtool holds few samples: what a day is asked about is recorded as one series."""


def _is(series: str, namespace: str, expected: float) -> str:
    tolerance = FOR_RATES if series in {bill.SM.charged, bill.POWER.card} else TOLERANCE
    over_day = f'sum(sum_over_time({SUMS[series]}{{namespace="{namespace}"}}[{DAY * 60 - 1}s:1m]))'
    return f"abs({over_day} / {expected:.6f} - 1) < bool {tolerance}"


@settings(max_examples=2, deadline=None, phases=(Phase.generate,))  # each is a day, and takes seconds
@given(st.integers(0, 1 << 32), st.booleans())
def test_parts_of_random_days_are_the_cards(seed: int, isolated: bool) -> None:
    day = Day(random.Random(seed), isolated)
    asked = [f"max(max_over_time({gap}[{DAY}m])) < bool {TOLERANCE}" for gap in GAPS]
    asked += [
        _is(series, namespace, amount) for (series, namespace), amount in day.expected.items() if amount
    ]
    wanted = [
        {"expr": each, "eval_time": f"{DAY - 1}m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for each in asked
    ]
    sums = {name: f"sum by (namespace) ({series})" for series, name in SUMS.items()}
    recorded = {**CHARGES, **GAPS, **sums}
    rules = [{"record": name, "expr": expression} for name, expression in recorded.items()]
    case: dict[str, Any] = {"interval": "1m", "input_series": day.series(), "promql_expr_test": wanted}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "bill", "rules": rules}]}))
        tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
        (folder / "tests.yaml").write_text(json.dumps(tests))
        command = [str(find("promtool")), "test", "rules", str(folder / "tests.yaml")]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout + told.stderr
