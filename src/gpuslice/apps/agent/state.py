"""What the agent tells about itself: metrics, and its whole knowledge as JSON for a bug report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.apps.agent.repair import wished_cards
from gpuslice.core.model import Card

if TYPE_CHECKING:
    from gpuslice.apps.agent.main import Agent


def families(agent: Agent) -> Iterator[Family]:
    """The agent's metrics."""
    yield from agent.counters.families()
    yield _gauge(
        "gpuslice_agent_registered", "1 while kubelet follows the device list.", agent.server.registered
    )
    yield _gauge(
        "gpuslice_agent_registrations", "Registrations with kubelet so far.", agent.server.registrations
    )
    yield _gauge(
        "gpuslice_agent_waiting_containers", "Containers without devices.", len(agent.desk.waiting())
    )
    yield _gauge(
        "gpuslice_agent_forgotten_containers",
        "Running containers that kubelet does not know any more.",
        len(agent.desk.forgotten()),
    )
    yield _gauge(
        "gpuslice_agent_pods_without_devices",
        "Pods that run without the devices they ask for.",
        agent.bookkeeper.bare,
    )
    devices = Family("gpuslice_agent_devices", MetricKind.GAUGE, "Devices told to kubelet, by health.")
    for health, count in agent.devices.counts().items():
        devices.add(count, labels({"health": health.lower()}))
    yield devices
    cards = Family("gpuslice_agent_card_healthy", MetricKind.GAUGE, "0 for a card that is not given out.")
    bad = agent.cards.reasons()
    for gpu in agent.cards.cards:
        cards.add(float(gpu.index not in bad), labels({"gpu": str(gpu.index), "uuid": gpu.uuid}))
    yield cards


def agent_state(agent: Agent, settings: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    """Everything that a decision of the agent depends on."""
    desk = agent.desk
    return {
        "settings": dict(settings),
        "not_ready": agent.not_ready(),
        "rules": {
            "mode": str(agent.node.rules.mode),
            "divides_compute": agent.node.rules.divides_compute,
        },
        "driver_version": agent.cards.driver_version,
        "cards": [_card(card, agent.cards.reasons()) for card in agent.cards.cards],
        "cards_problem": agent.cards.problem,
        "book_problem": agent.bookkeeper.problem,
        "book": [
            {"pod": each.pod_key, "container": each.container, "ids": sorted(each.ids)}
            for each in desk.book or ()
        ],
        "granted": [
            {
                "uid": each.uid,
                "container": each.container,
                "ids": sorted(each.ids),
                "age_s": now_s - each.at_s,
            }
            for each in desk.guesses
        ],
        "waiting": [
            {
                "pod": want.pod.view.key,
                "container": want.container.name,
                "units": want.units,
                "cards": want.cards,
            }
            for want in desk.waiting()
        ],
        "forgotten": [
            {"uid": each.uid, "container": each.container, "folder": each.folder, "ids": sorted(each.ids)}
            for each in desk.inhabited()
        ],
        "wishes": {uid: wished_cards(placement) for uid, placement in desk.wishes.items()},
    }


def _card(card: Card, reasons: Mapping[int, str]) -> dict[str, Any]:
    return {
        "index": card.index,
        "uuid": card.uuid,
        "memory_mib": card.memory_mib,
        "units": card.units,
        "model": card.model,
        "unhealthy": reasons.get(card.index, ""),
    }


def _gauge(name: str, about: str, value: float) -> Family:
    return Family(name, MetricKind.GAUGE, about, [("", float(value))])
