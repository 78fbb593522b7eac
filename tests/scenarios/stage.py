"""Plays a placement scenario: commands on a ledger and the decisions of the extender, answers as text.

policy NAME                                   which policy decides; binpack without it
node NAME cards=15,15 [placement=spread] [unhealthy=0] [core=100] [core_required=yes]
     [whole=yes]                              its labels say that cards are given out whole
drop NAME                                     the node is gone
place POD UNITS [on=NODE] [cards=2] [core=20] filter, prioritize, bind, as kube-scheduler would
bound POD UNITS NODE CARD                     somebody else bound it; CARD "-" when no annotation says where
terminate POD / finish POD / delete POD
show                                          units held per card
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.wire.extender import Pod as WirePod
from gpuslice.adapters.wire.extender import Questions
from gpuslice.apps.extender.main import WEB_LIMITS, Extender
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.pod_records import PodEvents
from gpuslice.apps.extender.scheduling_cycle import SchedulingCycle
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.core.contract import GPU_CORE, GPU_COUNT, LABEL_MIN_TIER
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import TIERS, Placement, Pod
from gpuslice.core.views import pod_of, pod_requests, with_unhealthy
from tests.builders import api_container, api_pod, make_node, make_placement, make_pod
from tests.speedups import with_speedups
from tests.unit.kube_wire import ScriptedTransport

Options = dict[str, str]


class Told(PodEvents):
    """What owners of pods were told, in order."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def warn(self, pod: Pod, reason: str, message: str) -> bool:
        self.messages.append(message)
        return True


@dataclass
class Stage:
    """One cluster, from the first command of a scenario to its last."""

    ledger: Ledger = field(init=False)
    placer: Placer = field(init=False)
    cycle: SchedulingCycle = field(init=False)
    events: Told = field(default_factory=Told)
    pods: dict[str, Pod] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy("binpack")

    def run(self, line: str) -> str:
        """The answer to one command; an unknown one is an error of the scenario."""
        verb, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        commands: dict[str, Callable[..., str]] = {
            "policy": self.policy,
            "node": self.node,
            "drop": self.drop,
            "place": self.place,
            "bound": self.bound,
            "terminate": self.terminate,
            "finish": self.finish,
            "delete": self.delete,
            "show": self.show,
        }
        return commands[verb](*plain, **options)

    def policy(self, name: str) -> str:
        settings = ExtenderSettings(
            policy=name,  # type: ignore[arg-type]
            filter_best=0,
            nominate=False,
            preemption=False,
        )
        extender = Extender(settings, KubeClient(ScriptedTransport()), with_speedups=with_speedups())
        self.ledger, self.placer = extender.ledger, extender.placer
        self.cycle = SchedulingCycle(
            extender.placer,
            extender.groups,
            extender.evictions,
            extender.binder,
            extender.shortcuts,
            subscribers=(self.events,),
        )
        return "ok"

    def node(self, name: str, cards: str = "", **options: str) -> str:
        numbers = [int(each) for each in cards.split(",") if each]
        unhealthy = frozenset(int(each) for each in options.get("unhealthy", "").split(",") if each)
        node = make_node(
            name,
            numbers,
            shared="whole" not in options,
            packing=options.get("placement", ""),
            compute_percent=int(options.get("core", "0")),
            compute_required="core_required" in options,
            tier=TIERS[options.get("tier", "none")],
        )
        self.ledger.apply_node(with_unhealthy(node, unhealthy))
        return "ok"

    def drop(self, name: str) -> str:
        self.ledger.remove_node(name)
        return "ok"

    def place(
        self, name: str, units: str, *, on: str = "", cards: str = "", core: str = "", min_tier: str = ""
    ) -> str:
        labels = {name: text for name, text in ((GPU_COUNT, cards), (LABEL_MIN_TIER, min_tier)) if text}
        document = api_pod(
            name,
            containers=[api_container(units, **({GPU_CORE: core} if core else {}))],
            labels=labels or None,
        )
        self.ledger.apply_pod(_pod(document))
        names = [on] if on else self.ledger.node_names()
        args = Questions(WEB_LIMITS).decode(msgspec.json.encode({"Pod": document, "NodeNames": names}))
        answer = self.cycle.filter(args)
        passing = msgspec.json.decode(answer.node_names)
        if not passing:
            return self.refused(msgspec.json.decode(b"".join(answer.failed_nodes)))
        scores = msgspec.json.decode(
            self.cycle.prioritize(
                Questions(WEB_LIMITS).decode(msgspec.json.encode({"Pod": document, "NodeNames": passing}))
            )
        )
        best = max(scores, key=lambda each: each["Score"])["Host"]
        return self.bind(_pod(document), best)

    def refused(self, reasons: dict[str, str]) -> str:
        lines = [f"{name}: {reason}" for name, reason in sorted(reasons.items())]
        return "\n".join(["refused", *lines, f"event: {self.events.messages[-1]}"])

    def bind(self, pod: Pod, node: str) -> str:
        assert pod.request is not None
        placement = self.placer.assume(pod, pod.request, node)
        assert isinstance(placement, Placement), placement
        self.pods[pod.name] = replace(pod, node=node, placement=placement)
        self.ledger.apply_pod(self.pods[pod.name])
        return _where(placement)

    def bound(self, name: str, units: str, node: str, card: str) -> str:
        placement = None if card == "-" else make_placement(node, int(units), int(card))
        pod = replace(make_pod(name, int(units), node=node), placement=placement)
        self.pods[name] = pod
        self.ledger.apply_pod(pod)
        return "ok"

    def terminate(self, name: str) -> str:
        return self._change(name, terminating=True)

    def finish(self, name: str) -> str:
        return self._change(name, finished=True)

    def delete(self, name: str) -> str:
        self.ledger.remove_pod(self.pods.pop(name).uid)
        return "ok"

    def show(self) -> str:
        return "\n".join(_row(self.ledger, name) for name in self.ledger.node_names())

    def _change(self, name: str, **fields: bool) -> str:
        self.pods[name] = replace(self.pods[name], **fields)  # type: ignore[arg-type]
        self.ledger.apply_pod(self.pods[name])
        return "ok"


def _pod(document: dict[str, object]) -> Pod:
    wire = msgspec.convert(document, WirePod)
    return pod_of(
        uid=wire.metadata.uid,
        namespace=wire.metadata.namespace,
        name=wire.metadata.name,
        node="",
        phase="Pending",
        terminating=False,
        version="",
        requests=pod_requests(wire.spec, wire.metadata.labels),
        annotations=None,
    )


def _where(placement: Placement) -> str:
    cards = ", ".join(f"{part.card}" for part in placement.slices)
    return f"{placement.node} card {cards}"


def _row(ledger: Ledger, name: str) -> str:
    held = ledger.holds.on(name)
    assert held is not None
    assert held.node is not None
    used = held.used()
    cells = [f"{used.get(gpu.index, 0)}/{gpu.units}" for gpu in held.node.cards]
    unplaced = f" +{held.unplaced_units()} somewhere" if held.unplaced_units() else ""
    return f"{name}  " + ("  ".join(cells) or "no cards") + unplaced
