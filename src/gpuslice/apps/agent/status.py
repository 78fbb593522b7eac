"""What the agent tells about itself: counts of its own work, metrics, and what it knows, for a bug report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.adapters.web.histogram import Histogram
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.repair import units_by_card
from gpuslice.core.model import Pod, Tier

REFUSALS = ("no room", "no match", "foreign device", "host", "crowded", "tier")
REPAIRS = ("written", "gone", "failed")
IDENTIFIED = ("exactly", "by its pod", "no")
MOVES = ("parked", "refused", "woken")
SIGNALS = ("SIGTERM", "SIGKILL")


class ParkingCounters:
    """What was taken off cards and put back."""

    def __init__(self) -> None:
        self.waiting = 0  # containers that wait for their own memory now
        self.moves = Counter(dict.fromkeys(MOVES, 0))
        self.seconds = Histogram(
            "gpuslice_agent_parking_seconds",
            "Time to take a container off its cards, to wait for its room, and to put it back with that.",
            ("step",),
        )

    def parked(self, took_s: float) -> None:
        self.moves["parked"] += 1
        self.seconds.observe(took_s, "park")

    def woken(self, waited_s: float, took_s: float) -> None:
        self.moves["woken"] += 1
        self.seconds.observe(waited_s, "room")
        self.seconds.observe(took_s, "wake")


class Counters:
    """Counts since the start; one instance a process, handed to all that count.

    Each series starts at 0: Prometheus does not see the increase of one that appears with its first count, so
    an alert would miss ten refusals between two scrapes.
    """

    def __init__(self) -> None:
        self.granted = 0
        self.calls = Histogram(
            "gpuslice_agent_request_seconds", "Time of a call of kubelet's device manager.", ("call",)
        )
        self.api = Histogram(
            "gpuslice_agent_api_request_seconds",
            "Time of a request to the API server.",
            ("method", "resource"),
        )
        self.refused = Counter(dict.fromkeys(REFUSALS, 0))
        self.repaired = Counter(dict.fromkeys(REPAIRS, 0))
        self.started = Counter(dict.fromkeys(IDENTIFIED, 0))
        self.past_limit = 0
        self.borrowers_ended = 0
        self.parking = ParkingCounters()
        self.ended = Counter(dict.fromkeys(SIGNALS, 0))

    def families(self) -> Iterator[Family]:
        def counted(name: str, about: str, samples: Mapping[str, float]) -> Family:
            return Family(name, MetricKind.COUNTER, about, [*sorted(samples.items())])

        def by(label: str, counts: Counter[str]) -> dict[str, float]:
            return {labels({label: key}): float(value) for key, value in counts.items()}

        granted = {"": float(self.granted)}
        yield counted("gpuslice_agent_grants_total", "Containers that were granted devices.", granted)
        yield from (self.calls.family(), self.api.family())
        refused, repairs = by("reason", self.refused), by("result", self.repaired)
        yield counted("gpuslice_agent_refusals_total", "Requests of kubelet refused.", refused)
        yield counted("gpuslice_agent_repairs_total", "Pod annotations written.", repairs)
        parking = self.parking
        moves = by("result", parking.moves)
        yield counted(
            "gpuslice_agent_parking_moves_total", "Containers parked, not parked, and woken.", moves
        )
        yield parking.seconds.family()
        about = "Parked containers that wait for their own memory, which others still hold."
        yield Family("gpuslice_agent_parked_waiting", MetricKind.GAUGE, about, [("", float(parking.waiting))])
        about = "Container starts prepared, by how the container was identified."
        yield counted("gpuslice_agent_starts_total", about, by("identified", self.started))
        past, ended = {"": float(self.past_limit)}, by("signal", self.ended)
        yield counted("gpuslice_agent_limit_excesses_total", "Containers found past their limit.", past)
        about = "Containers some of whose processes were ended, since they kept what they had borrowed."
        yield counted("gpuslice_agent_borrowers_ended_total", about, {"": float(self.borrowers_ended)})
        yield counted("gpuslice_agent_processes_ended_total", "Processes ended for being past it.", ended)


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The parts of an agent as they are now, as plain values."""

    state: AllocationState
    registered: bool
    registrations: int
    not_ready: str
    devices: Mapping[str, int]  # by health
    out_of_use: Mapping[int, str]  # cards by index
    without_devices: Sequence[Pod]
    containers_past_limit: int
    tiers: Sequence[tuple[NodePod, str, Tier]]  # of containers, what holds their limits
    not_repaired: Mapping[str, str]  # why, by what is not as it ought to be
    units_wait: str  # which settings are not in force yet
    driver_version: str
    not_by_driver: Mapping[str, str]  # by uuid, why the driver does not enforce limits; "" where it does
    cards_problem: str
    assignments_problem: str

    def families(self) -> Iterator[Family]:
        """The agent's metrics beside its counters."""
        state = self.state
        for name, about, value in (
            ("gpuslice_agent_registered", "1 while kubelet follows the device list.", self.registered),
            ("gpuslice_agent_registrations", "Registrations with kubelet so far.", self.registrations),
            ("gpuslice_agent_waiting_containers", "Containers without devices.", len(state.waiting())),
            (
                "gpuslice_agent_containers_past_limit",
                "Containers that hold more of a card than their limit, by the driver.",
                self.containers_past_limit,
            ),
        ):
            yield Family(name, MetricKind.GAUGE, about, [("", float(value))])
        forgotten = Family(
            "gpuslice_agent_container_forgotten",
            MetricKind.GAUGE,
            "1 for a running container that kubelet does not know any more.",
        )
        for each in (each.assignment for each in state.forgotten()):
            of = {"namespace": each.namespace, "pod": each.pod, "container": each.container}
            forgotten.add(1.0, labels(of))
        yield forgotten
        bare = Family(
            "gpuslice_agent_pod_without_devices",
            MetricKind.GAUGE,
            "1 for a pod that runs without the devices it asks for.",
        )
        for pod in self.without_devices:
            bare.add(1.0, labels({"namespace": pod.namespace, "pod": pod.name}))
        yield bare
        tiers = Family(
            "gpuslice_agent_container_tier", MetricKind.GAUGE, "1 for the tier that enforces the limits."
        )
        for held, name, tier in self.tiers:
            of = {"namespace": held.view.namespace, "pod": held.view.name, "container": name}
            tiers.add(1.0, labels({**of, "tier": tier.word}))
        yield tiers
        devices = Family("gpuslice_agent_devices", MetricKind.GAUGE, "Devices listed to kubelet, by health.")
        for health, count in self.devices.items():
            devices.add(count, labels({"health": health.lower()}))
        yield devices
        about = "1 for something that the agent owns, is not as it ought to be and cannot be written."
        damaged = Family("gpuslice_agent_not_repaired", MetricKind.GAUGE, about)
        for what in self.not_repaired:
            damaged.add(1.0, labels({"what": what}))
        yield damaged
        cards = Family("gpuslice_agent_card_healthy", MetricKind.GAUGE, "0 for a card that is not given out.")
        for card in state.node.cards:
            healthy = float(card.index not in self.out_of_use)
            cards.add(healthy, labels({"gpu": str(card.index), "gpu_uuid": card.uuid}))
        yield cards

    def as_json(self, settings: Mapping[str, Any], now_s: float) -> dict[str, Any]:
        """Everything that a decision of the agent depends on."""
        state = self.state
        return {
            "settings": dict(settings),
            "not_ready": self.not_ready,
            "rules": {"mode": str(state.rules.mode), "divides_compute": state.rules.divides_compute},
            "driver_version": self.driver_version,
            "cards": [
                {
                    "index": card.index,
                    "uuid": card.uuid,
                    "memory_mib": card.memory_mib,
                    "units": card.units,
                    "model": card.model,
                    "unhealthy": self.out_of_use.get(card.index, ""),
                    "not_by_driver": self.not_by_driver.get(card.uuid, ""),
                }
                for card in state.node.cards
            ],
            "not_repaired": dict(self.not_repaired),
            "units_wait": self.units_wait,
            "cards_problem": self.cards_problem,
            "assignments_problem": self.assignments_problem,
            "assignments": [
                {"pod": each.pod_key, "container": each.container, "ids": sorted(each.ids)}
                for each in state.assignments or ()
            ],
            "granted": [
                {
                    "uid": each.uid,
                    "container": each.container,
                    "ids": sorted(each.ids),
                    "age_s": now_s - each.at_s,
                }
                for each in state.tentative
            ],
            "waiting": [
                {
                    "pod": each.pod.view.key,
                    "container": each.container.name,
                    "units": each.units,
                    "cards": each.cards,
                }
                for each in state.waiting()
            ],
            "forgotten": [
                {
                    "uid": each.uid,
                    "container": each.assignment.container,
                    "folder": each.folder,
                    "ids": sorted(each.assignment.ids),
                }
                for each in state.maybe_forgotten()
            ],
            "targets": {uid: units_by_card(placement) for uid, placement in state.targets.items()},
        }
