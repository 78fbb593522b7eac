"""A pod starts on the cards where it was placed, whatever kubelet's topology manager is set to.

The agent's list of devices and its choices are the real ones; pods are placed as an extender may place them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.kube import views
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.device_list import DeviceList
from gpuslice.apps.agent.pods import AgentPod, node_pod
from gpuslice.core import device_assignment
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.contract import GPU_COUNT, GPU_MEM
from gpuslice.core.model import CardSlice, Placement, Refusal
from simcluster.kubelet.admission import demands_of
from simcluster.kubelet.devices import Device, DeviceAssignments, Options, TopologyAffinityError
from simcluster.kubelet.plugin_calls import Call, PluginError, PreferredCall, Response, carry_out
from simcluster.kubelet.plugins import device_of
from simcluster.kubelet.topology import Hint, Hints, Policy, Scope, TopologyManager, numa_sets
from tests.builders import api_container, api_pod, make_node
from tests.integration.agent_bench import Bench, uuid


@dataclass(frozen=True)
class PodOfTest:
    """Units on each of `cards` cards in each container; `cpus`: what the manager of CPUs says of it."""

    containers: tuple[int, ...]
    cards: int
    init_units: int
    cpus: tuple[Hint, ...]


@st.composite
def machines(draw: st.DrawFn) -> tuple[tuple[int, ...], TopologyManager]:
    """Units of each card, and the topology manager of a node of so many sockets."""
    cards = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=8)))
    numa_nodes = tuple(range(draw(st.integers(1, 4))))
    topology = TopologyManager(
        draw(st.sampled_from(list(Policy))), draw(st.sampled_from(list(Scope))), numa_nodes
    )
    return cards, topology


def pods_for(numa_nodes: tuple[int, ...]) -> st.SearchStrategy[PodOfTest]:
    hint = st.builds(Hint, st.sampled_from(list(numa_sets(numa_nodes))), st.booleans())
    return st.builds(
        PodOfTest,
        st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
        st.integers(1, 3),
        st.integers(0, 4),
        st.lists(hint, max_size=3).map(tuple),
    )


class NodeOfTest:
    """kubelet's device manager on one side, the agent's knowledge on the other, and no time in between."""

    def __init__(self, cards: tuple[int, ...], topology: TopologyManager, seed: int = 0) -> None:
        self.node = make_node("n1", cards)
        self.state = AllocationState(self.node, clock=lambda: 0.0, now_ns=lambda: 1)
        self.devices = DeviceList(self.state)
        self.kubelet = DeviceAssignments(topology=topology)
        self.kubelet.rng.seed(seed)
        self.cpus: list[Hints] = []  # what kubelet's manager of CPUs says of the pod
        self.kubelet.other_hints = lambda pod_uid, container: self.cpus
        self.free = {card.index: card.units for card in self.node.cards}
        self.names: dict[str, str] = {}  # of the pods that kubelet knows, by uid

    async def register(self) -> None:
        await self.devices.update(self.node.cards, ())
        async with contextlib.aclosing(self.devices.messages()) as messages:
            listed = await anext(messages)
        generation = self.kubelet.register(GPU_MEM, Options(preferred_allocation=True))
        self.kubelet.update(GPU_MEM, generation, map(device_of, listed.devices))

    def place(self, name: str, of: PodOfTest, choice: list[int]) -> dict[str, Any] | None:
        """The pod, bound to the first cards in the order of `choice` that hold it; None if none do."""
        count, whole = of.cards, sum(of.containers)
        cards = [card for card in choice if self.free.get(card, 0) >= whole][:count]
        if len(cards) < count:
            return None
        containers = [api_container(units * count, f"c{at}") for at, units in enumerate(of.containers)]
        labels = {GPU_COUNT: str(count)} if count > 1 else {}
        pod = api_pod(name, node="n1", containers=containers, labels=labels)
        if count == 1 and 0 < of.init_units <= whole:  # of several cards kubelet reuses any mix of units
            pod["spec"]["initContainers"] = [api_container(of.init_units, "setup")]
        request = views.pod_view(msgspec.convert(pod, AgentPod)).request
        assert request is not None
        placement = Placement("n1", tuple(CardSlice(card, whole) for card in sorted(cards)))
        pod["metadata"]["annotations"] = placement_annotations(
            placement, request, self.node, len(self.names) + 1
        )
        for card in cards:
            self.free[card] -= whole
        self.names[pod["metadata"]["uid"]] = name
        self.state.pod_changed(node_pod(msgspec.convert(pod, AgentPod)))
        return pod

    async def admit(self, pod: dict[str, Any]) -> set[int]:
        """The cards that it has. Raises AdmissionError."""
        uid, demands = pod["metadata"]["uid"], demands_of(pod)
        self.kubelet.align_pod(uid, demands, self.names)
        for demand in demands:
            await carry_out(self.kubelet.allocate(uid, demand, self.names), self._answer)
        index_of = {card.uuid: card.index for card in self.node.cards}
        held = [one for one in self.kubelet.assignments() if one.pod_uid == uid]
        per_card: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for one in held:
            for each in one.ids:
                per_card[one.container][index_of[each.rpartition("-_-")[0]]] += 1
        assert all(len(set(found.values())) == 1 for found in per_card.values()), "unequal parts of cards"
        self.state.assignments_read(
            [
                device_assignment.DeviceAssignment("default", self.names[one.pod_uid], one.container, one.ids)
                for one in self.kubelet.assignments()
            ],
            1.0,
        )
        return {card for found in per_card.values() for card in found}

    def leave(self, pod: dict[str, Any]) -> None:
        del self.names[pod["metadata"]["uid"]]
        self.state.pod_gone(pod["metadata"]["uid"])

    async def _answer(self, call: Call) -> Response:
        if isinstance(call, PreferredCall):
            proposal = self.state.propose(call.available, call.must_include, call.size)
            if isinstance(proposal, Refusal):
                raise PluginError(proposal.reason)
            return proposal.ids
        ids = frozenset(call.ids)
        recipient = self.state.recipient(ids)
        if isinstance(recipient, Refusal):
            raise PluginError(recipient.reason)
        self.state.granted(ids, recipient)
        return b""


@given(st.data())
def test_every_pod_starts_on_its_cards_unless_other_resources_forbid_it(data: st.DataObject) -> None:
    cards, topology = data.draw(machines())
    node = NodeOfTest(cards, topology, data.draw(st.integers(0, 99)))

    async def play() -> None:
        await node.register()
        for number in range(data.draw(st.integers(1, 8))):
            of = data.draw(pods_for(topology.numa_nodes))
            pod = node.place(f"p{number}", of, data.draw(st.permutations(range(len(cards)))))
            if pod is None:
                continue
            cpus: list[Hints] = [{"cpu": of.cpus}] if of.cpus else []
            node.cpus = cpus
            placed = node.state.pod(pod["metadata"]["uid"])
            assert placed is not None
            assert placed.meant is not None
            meant = {part.card for part in placed.meant.slices}
            if topology.merged(cpus) is None:  # then it is not for us to say
                with pytest.raises(TopologyAffinityError):
                    await node.admit(pod)
                node.leave(pod)
                for card in meant:
                    node.free[card] += sum(of.containers)
                continue
            assert await node.admit(pod) == meant

    asyncio.run(play())


# -- the simulated kubelet is as strict as the real one -----------------------------------------------------
def kubelet_of_sockets(sockets: int = 2, **settings: Any) -> DeviceAssignments:
    """Its plugin names the NUMA node of each device: 20 on each socket, all of them free."""
    topology = TopologyManager(numa_nodes=tuple(range(sockets)), **settings)
    return listing(topology, {f"{numa}-{unit}": (numa,) for numa in range(sockets) for unit in range(20)})


def listing(topology: TopologyManager, devices: Mapping[str, tuple[int, ...] | None]) -> DeviceAssignments:
    kubelet = DeviceAssignments(topology=topology)
    generation = kubelet.register(GPU_MEM, Options(preferred_allocation=True))
    kubelet.update(
        GPU_MEM, generation, [Device(one, True, numa or (), numa == ()) for one, numa in devices.items()]
    )
    return kubelet


async def sockets_of(
    kubelet: DeviceAssignments, uid: str, units: int, wish: str = "", *, init: int = 0, second: int = 0
) -> dict[str, int]:
    """How many devices the pod gets of each socket if its plugin wishes those of one."""
    pod = api_pod(uid, containers=[api_container(units), *([api_container(second, "b")] if second else [])])
    pod["spec"]["initContainers"] = [api_container(init, "setup")] if init else []
    active = {one.pod_uid for one in kubelet.assignments()} | {uid}

    async def answer(call: Call) -> Response:
        if not isinstance(call, PreferredCall):
            return b""
        wished = [*call.must_include, *(one for one in sorted(call.available) if one.startswith(f"{wish}-"))]
        return [*dict.fromkeys(wished)][: call.size]

    kubelet.align_pod(uid, demands_of(pod), active)
    for demand in demands_of(pod):
        await carry_out(kubelet.allocate(uid, demand, active), answer)
    held = {one for each in kubelet.assignments() if each.pod_uid == uid for one in each.ids}
    return Counter(one.partition("-")[0] for one in held)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("policy", list(Policy))
async def test_a_plugin_that_names_numa_nodes_is_offered_one_socket(policy: Policy, scope: Scope) -> None:
    kubelet = kubelet_of_sockets(policy=policy, scope=scope)
    assert await sockets_of(kubelet, "p", 4, wish="1") == ({"1": 4} if policy is Policy.NONE else {"0": 4})


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        (Policy.BEST_EFFORT, {"0": 5, "1": 3}),
        (Policy.RESTRICTED, None),
        (Policy.SINGLE_NUMA_NODE, None),
    ],
)
async def test_free_devices_of_two_sockets_are_a_bad_choice_if_one_could_hold_them(
    policy: Policy, outcome: dict[str, int] | None
) -> None:
    kubelet = kubelet_of_sockets(policy=policy)
    for uid in ("x", "y"):
        assert len(await sockets_of(kubelet, uid, 15)) == 1
    if outcome is None:
        with pytest.raises(TopologyAffinityError, match="cannot be allocated with Topology locality"):
            await sockets_of(kubelet, "p", 8)
    else:
        assert sorted((await sockets_of(kubelet, "p", 8, wish="0")).values()) == [3, 5]


async def test_what_no_socket_could_hold_may_come_from_two_unless_one_is_required() -> None:
    assert len(await sockets_of(kubelet_of_sockets(policy=Policy.RESTRICTED), "p", 30)) == 2
    with pytest.raises(TopologyAffinityError):
        await sockets_of(kubelet_of_sockets(policy=Policy.SINGLE_NUMA_NODE), "p", 30)


@pytest.mark.parametrize(("scope", "sockets"), [(Scope.CONTAINER, [12, 14]), (Scope.POD, None)])
async def test_by_the_pods_scope_all_containers_come_from_one_socket(
    scope: Scope, sockets: list[int] | None
) -> None:
    kubelet = kubelet_of_sockets(policy=Policy.SINGLE_NUMA_NODE, scope=scope)
    if sockets is None:
        with pytest.raises(TopologyAffinityError):
            await sockets_of(kubelet, "p", 12, second=14)
    else:
        assert sorted((await sockets_of(kubelet, "p", 12, second=14)).values()) == sockets


async def test_an_init_containers_devices_bind_the_app_container_to_their_socket() -> None:
    kubelet = kubelet_of_sockets(policy=Policy.RESTRICTED)
    kubelet.other_hints = lambda uid, container: (
        [{"cpu": [Hint(frozenset({1}), True)]}] if container == "setup" else []
    )
    assert await sockets_of(kubelet, "p", 6, init=3) == {"1": 6}


async def test_other_resources_choose_the_socket_only_for_devices_that_name_theirs() -> None:
    topology = TopologyManager(Policy.SINGLE_NUMA_NODE, numa_nodes=(0, 1))
    for numa, expected in (((0,), "1"), (None, "0")):
        devices = {f"{at}-{unit}": None if numa is None else (at,) for at in (0, 1) for unit in range(20)}
        kubelet = listing(topology, devices)
        kubelet.other_hints = lambda uid, container: [{"cpu": [Hint(frozenset({1}), True)]}]
        assert await sockets_of(kubelet, "p", 4, wish="0") == {expected: 4}


async def test_devices_whose_topology_is_empty_are_of_no_use_where_alignment_is_required() -> None:
    topology = TopologyManager(Policy.RESTRICTED, numa_nodes=(0, 1))
    with pytest.raises(TopologyAffinityError):
        await sockets_of(listing(topology, {f"0-{unit}": () for unit in range(9)}), "p", 4)


# -- over the sockets of a running agent --------------------------------------------------------------------
@pytest.mark.parametrize("policy", [Policy.BEST_EFFORT, Policy.SINGLE_NUMA_NODE])
async def test_an_agents_pods_start_on_an_empty_card_though_two_others_have_enough_units(
    tmp_path: Path, policy: Policy
) -> None:
    bench = Bench(tmp_path, dict.fromkeys(range(4), 16130))
    bench.kubelet.topology = TopologyManager(policy, numa_nodes=(0, 1))
    async with bench.running() as node:
        for card in (0, 1):
            await node.kubelet.admit(await node.place(f"full{card}", 12, card))
        for units in (2, 4, 6):
            pod = await node.place(f"p{units}", units, 2)
            await node.kubelet.admit(pod)
            assert node.kubelet.cards(pod) == {uuid(2)}
            await node.kubelet.start_container(pod)
