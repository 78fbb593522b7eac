"""Any order of events, any loss, any death: nothing is given twice, and all end up saying the same.

The invariants of ARCHITECTURE.md that hold at every moment are checked after each step; that everybody agrees
is checked once the world has come to rest.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpuslice.core.contract import ENV_CONTAINER_UNITS, ENV_INDEX, ENV_VISIBLE
from gpuslice.core.ledger import Ledger
from tests.integration.interleaving_node import CARDS, NodeInMemory, Object, uuid_of
from tests.integration.interleaving_rig import World
from tests.integration.virtual import Message

FATES = ["deliver", "deliver", "lose_answer", "lose_request", "delay"]
NAMES = [f"app-{number}" for number in range(5)]
picks = st.integers(0, 1_000_000)
nodes = st.sampled_from(sorted(CARDS))
each_pods_node = st.lists(nodes, min_size=len(NAMES), max_size=len(NAMES))


class Interleavings(RuleBasedStateMachine):
    world: World

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(Path(self.folder.name), seed)

    def teardown(self) -> None:
        try:
            self.settle_everything()
            self.everybody_agrees()
        finally:
            self.world.close()
            self.folder.cleanup()

    # -- users -------------------------------------------------------------------------------------

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1), units=st.sampled_from([1, 2, 2, 3, 3, 4]))
    def create(self, names: set[str], units: int) -> None:
        for name in sorted(names):
            self.world.create(name, units)

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        self.world.delete(name)

    # -- kube-scheduler --------------------------------------------------------------------------------------

    def waiting(self) -> list[Object]:
        return [pod for pod in self.world.pods() if "nodeName" not in pod["spec"]]

    @rule(pick=picks, node=nodes)
    def bind(self, pick: int, node: str) -> None:
        """Any pod, bound or not, to any node, also while another bind of it is under way."""
        pods = self.world.pods()
        if pods:
            self.world.bind(pods[pick % len(pods)], node)

    @rule(pick=picks, node=nodes, fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=4))
    def bind_through_a_bad_network(self, pick: int, node: str, fates: list[str]) -> None:
        """What the extender sends for one bind call, each message with a fate of its own."""
        self.bind(pick, node)
        self.meet_fates(fates)

    def meet_fates(self, fates: list[str]) -> None:
        network = self.world.network
        for fate in fates:
            if sent := [one for one in network.messages if one.sender is self.world.process]:
                getattr(network, fate)(sent[-1])

    @rule(pick=picks)
    def search(self, pick: int) -> None:
        """It looks at all nodes for one pod, and the extender nominates nodes for the others."""
        if waiting := self.waiting():
            self.world.search(waiting[pick % len(waiting)])

    @rule(pick=picks, asks=st.booleans(), fates=st.lists(st.sampled_from(FATES), max_size=4))
    def bind_as_nominated(self, pick: int, asks: bool, fates: list[str]) -> None:
        """Where the pod's status says, with or without asking before."""
        if nominated := [pod for pod in self.waiting() if pod["status"].get("nominatedNodeName")]:
            pod = nominated[pick % len(nominated)]
            node = pod["status"]["nominatedNodeName"]
            if asks:
                self.world.search(pod, node)
            self.world.bind(pod, node)
            self.meet_fates(fates)

    @rule(
        names=st.sets(st.sampled_from(NAMES), min_size=2),
        units=st.sampled_from([1, 2, 3]),
        pick=picks,
        fates=st.lists(st.sampled_from(FATES), max_size=3),
        dies=st.booleans(),
    )
    def queue_up(self, names: set[str], units: int, pick: int, fates: list[str], dies: bool) -> None:
        """Pods that come together, of which one is looked at: the others are nominated, and one is bound."""
        self.everybody_lives()
        self.world.rest(0.5)
        self.create(names, units)
        self.world.network.calm()
        self.search(pick)
        self.world.network.calm()
        self.bind_as_nominated(pick, True, fates)
        if dies:
            self.extender_dies(False)

    @rule(wishes=each_pods_node)
    def bind_all(self, wishes: list[str]) -> None:
        """All that have no node, at once."""
        for pod, node in zip(self.waiting(), wishes, strict=False):
            self.world.bind(pod, node)

    @rule(wishes=each_pods_node, seconds=st.sampled_from([0.0, 6.0]))
    def all_goes_well(self, wishes: list[str], seconds: float) -> None:
        """A while without trouble, so that the next trouble meets a cluster at work."""
        self.everybody_lives()
        self.world.rest(0.5)
        self.bind_all(wishes)
        self.world.rest(seconds)
        for node in self.world.nodes.values():
            self.finish_kubelets_work(node)

    # -- the network -------------------------------------------------------------------------------

    @rule(pick=picks)
    def deliver(self, pick: int) -> None:
        self.with_message(pick, self.world.network.deliver)

    @rule()
    def deliver_all(self) -> None:
        self.world.network.calm()

    @rule(pick=picks)
    def lose_request(self, pick: int) -> None:
        self.with_message(pick, self.world.network.lose_request)

    @rule(pick=picks)
    def lose_answer(self, pick: int) -> None:
        self.with_message(pick, self.world.network.lose_answer)

    @rule(pick=picks)
    def delay(self, pick: int) -> None:
        self.with_message(pick, self.world.network.delay)

    @rule(pick=picks)
    def deliver_line(self, pick: int) -> None:
        if streams := self.world.network.streams:
            self.world.network.deliver_line(streams[pick % len(streams)])

    @rule(pick=picks, compacted=st.booleans())
    def cut(self, pick: int, compacted: bool) -> None:
        if streams := self.world.network.streams:
            self.world.network.cut(streams[pick % len(streams)])
        if compacted:
            self.world.cluster.compact()

    # -- time and death ----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.3, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.world.loop.advance(seconds)

    @rule(stays_dead=st.booleans())
    def extender_dies(self, stays_dead: bool) -> None:
        if self.world.extender is not None:
            self.world.kill_extender()
        if not stays_dead:
            self.world.start_extender()

    @rule(name=nodes, stays_dead=st.booleans())
    def agent_dies(self, name: str, stays_dead: bool) -> None:
        node = self.world.nodes[name]
        if node.agent is not None:
            node.kill_agent()
            self.world.loop.settle()
        if not stays_dead:
            node.start_agent()

    @rule()
    def everybody_lives(self) -> None:
        if self.world.extender is None:
            self.world.start_extender()
        for node in self.world.nodes.values():
            if node.agent is None:
                node.start_agent()

    @rule(name=nodes, keeps_checkpoint=st.booleans())
    def kubelet_dies(self, name: str, keeps_checkpoint: bool) -> None:
        """Without its checkpoint it does not know the containers that go on running."""
        node = self.world.nodes[name]
        if not node.busy:
            node.restart(keeps_checkpoint=keeps_checkpoint)

    @rule(name=nodes, wishes=each_pods_node, units=st.sampled_from([1, 2]))
    def kubelet_forgets_what_runs(self, name: str, wishes: list[str], units: int) -> None:
        """In the middle of work, and equal pods come next: they would get the same ids."""
        self.create(set(NAMES[:3]), units)
        self.all_goes_well(wishes, 6.0)
        self.kubelet_dies(name, keeps_checkpoint=False)
        self.create(set(NAMES[3:]), units)
        self.all_goes_well(wishes, 6.0)

    @rule(name=nodes)
    def machine_dies(self, name: str) -> None:
        node = self.world.nodes[name]
        if not node.busy:
            node.reboot()

    # -- kubelet -----------------------------------------------------------------------------------

    @rule(name=nodes, pick=picks)
    def kubelet_admits(self, name: str, pick: int) -> None:
        node, waiting = self.world.nodes[name], self.world.waiting(name)
        if waiting and not node.busy:
            self.world.play(node, node.admit(waiting[pick % len(waiting)]))

    @rule(name=nodes, pick=picks)
    def kubelet_starts(self, name: str, pick: int) -> None:
        node = self.world.nodes[name]
        held = [uid for uid in node.admitted if node.startable(uid)]
        if held and not node.busy:
            self.world.play(node, node.start(held[pick % len(held)]))

    @rule(name=nodes)
    def kubelet_ends(self, name: str) -> None:
        self.end_terminating(self.world.nodes[name])

    # -- what holds at every moment ----------------------------------------------------------------

    @invariant()
    def no_process_died_by_itself(self) -> None:
        for process in self.world.processes():
            process.check()

    @invariant()
    def no_device_is_given_twice(self) -> None:
        for node in self.world.nodes.values():
            given = Counter(one for held in node.device_manager.assignments() for one in held.ids)
            assert all(count == 1 for count in given.values())

    @invariant()
    def each_container_sits_on_one_card_and_is_told_so(self) -> None:
        for node in self.world.nodes.values():
            for (uid, _), running in node.running.items():
                ((uuid, units),) = node.cards_of(uid).items()
                assert running.environment[ENV_VISIBLE] == uuid
                assert uuid == uuid_of(node.name, int(running.environment[ENV_INDEX]))
                assert int(running.environment[ENV_CONTAINER_UNITS]) == units

    @invariant()
    def what_runs_has_limits_of_its_own_that_nobody_changes(self) -> None:
        for node in self.world.nodes.values():
            folders = Counter(running.folder for running in node.running.values())
            assert all(count == 1 for count in folders.values())
            for running in node.running.values():
                assert running.limits_now() == running.limits

    @invariant()
    def no_card_runs_more_than_it_has(self) -> None:
        for node in self.world.nodes.values():
            used: Counter[str] = Counter()
            for running in node.running.values():
                used[running.environment[ENV_VISIBLE]] += running.units
            for index, units in enumerate(CARDS[node.name]):
                assert used[uuid_of(node.name, index)] <= units

    @invariant()
    def no_card_is_promised_beyond_its_units(self) -> None:
        self.only_kubelet_chose_otherwise(self.world.rebuilt())

    @invariant()
    def the_extender_never_counts_beyond_a_card(self) -> None:
        if self.world.extender is not None:
            self.only_kubelet_chose_otherwise(self.world.extender.ledger)

    def only_kubelet_chose_otherwise(self, ledger: Ledger) -> None:
        """Nothing fences a Binding from kubelet, which may give another pod the card in that moment."""
        moved = {pod["metadata"]["uid"] for pod in self.world.pods() if self.world.network.moved(pod)}
        for node, card, _, _ in ledger.overcommitted():
            on_node = ledger.holds.on(node)
            assert on_node is not None
            on_card = {
                uid
                for uid, each in on_node.by_uid.items()
                if each.placement and card in {part.card for part in each.placement.slices}
            }
            assert moved & on_card

    # -- what holds in the end ---------------------------------------------------------------------

    def everybody_agrees(self) -> None:
        extender = self.world.extender
        assert extender is not None
        rebuilt = self.world.rebuilt()
        for name, node in self.world.nodes.items():
            mine, theirs = rebuilt.state(name), extender.ledger.state(name)
            assert mine is not None
            assert theirs is not None
            assert mine == theirs
            self.kubelet_and_annotations_agree(node)
        assert extender.ledger.assumed() == []
        assert list(rebuilt.overcommitted()) == []

    def kubelet_and_annotations_agree(self, node: NodeInMemory) -> None:
        annotated = {pod.uid: pod for pod in self.world.views() if pod.node == node.name and not pod.finished}
        assert set(annotated) == set(node.admitted)
        for uid, pod in annotated.items():
            assert pod.placement is not None
            said = {uuid_of(node.name, part.card): part.units for part in pod.placement.slices}
            assert said == node.cards_of(uid)
            assert pod.assigned

    def settle_everything(self) -> None:
        """All processes live, all messages arrive, kubelet does its work: the world comes to rest."""
        world = self.world
        self.everybody_lives()
        world.rest(seconds=40.0)
        for node in world.nodes.values():
            self.finish_kubelets_work(node)
        world.rest(seconds=40.0)

    def finish_kubelets_work(self, node: NodeInMemory) -> None:
        self.end_terminating(node)
        for pod in self.world.waiting(node.name):
            self.world.play(node, node.admit(pod))
            self.world.rest()
        for uid in list(node.admitted):
            if node.startable(uid):  # else kubelet forgot it, and does not start it
                self.world.play(node, node.start(uid))
                self.world.rest()

    def end_terminating(self, node: NodeInMemory) -> None:
        for pod in self.world.pods():
            if pod["spec"].get("nodeName") == node.name and "deletionTimestamp" in pod["metadata"]:
                if pod["metadata"]["uid"] in node.admitted:
                    node.finish(pod["metadata"]["uid"])
                else:
                    self.world.remove(pod)
        gone = set(node.admitted) - {pod["metadata"]["uid"] for pod in self.world.pods()}
        for uid in gone:
            node.finish(uid)

    def with_message(self, pick: int, fate: Callable[[Message], None]) -> None:
        if messages := self.world.network.messages:
            fate(messages[pick % len(messages)])


Interleavings.TestCase.settings = settings(
    max_examples=int(os.environ.get("GPUSLICE_INTERLEAVINGS", "30")),  # set it for a long run
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestInterleavings = Interleavings.TestCase
