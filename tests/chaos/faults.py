"""What goes wrong: each fault is a function that does it once, or says that there is nothing to do it to."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS
from gpuslice.core.contract import (
    ANN_ALLOCATION,
    ANN_ASSIGNED,
    ANN_ASSUME_TIME,
    ANN_CARD_UNITS,
    ANN_CORE,
    ANN_INDEX,
    ANN_MEANT,
    ANN_POD_UNITS,
    ANN_VISIBLE,
    GPU_COUNT,
    NODE_ANNOTATION_WRITERS,
)
from simcluster.cluster.faults import Fault
from tests.chaos.world import ChaosWorld
from tests.integration.interleaving_node import NodeInMemory
from tests.integration.virtual import Message, Process

Break = Callable[[ChaosWorld], bool]
STATUSES = (409, 410, 429, 500, 503, 504)


def message(fate: str) -> Break:
    """Something happens to one request that is on its way."""

    def breaks(world: ChaosWorld) -> bool:
        if not world.network.messages:
            return False
        getattr(world.network, fate)(_newest(world))
        return True

    return breaks


def _newest(world: ChaosWorld) -> Message:
    """Mostly a new one: an old one was waited for already."""
    messages = world.network.messages
    return messages[-1] if world.dice.random() < 0.6 else world.dice.choice(messages)


def answered(status: int) -> Break:
    """The API server says so; of a 5xx, now and then after it did what was asked."""

    def breaks(world: ChaosWorld) -> bool:
        if not world.network.messages:
            return False
        after = status >= 500 and world.dice.random() < 0.5
        pause_s = world.dice.choice((0, 1, 1, 10)) if status == 429 else 0
        fault = Fault(code=status, times=1, after=after, retry_after_s=pause_s)
        world.cluster.add_fault(fault)
        world.network.deliver(_newest(world))
        world.cluster.faults.clear()
        return True

    return breaks


def watch_is_cut(world: ChaosWorld) -> bool:
    if not world.network.streams:
        return False
    world.network.cut(world.dice.choice(world.network.streams))
    return True


def history_is_compacted(world: ChaosWorld) -> bool:
    """And a watch is cut, which then continues from a version that nobody knows any more."""
    world.cluster.compact()
    return watch_is_cut(world)


def in_the_middle(world: ChaosWorld) -> None:
    """Let the loop run some turns, so that whoever dies or stops now does so at any await."""
    if world.network.messages and world.dice.random() < 0.7:
        message = world.dice.choice(world.network.messages)
        world.network.messages.remove(message)
        answer = world.cluster.handle(message.request)
        if message.sender.alive and not message.answer.done():
            message.answer.set_result(answer)
        elif answer.watch is not None:
            answer.watch.end()
    for _ in range(world.dice.randrange(6)):
        world.loop.turn()


def extender_is_killed(world: ChaosWorld) -> bool:
    if not world.replicas:
        return False
    in_the_middle(world)
    world.kill_replica(world.dice.choice(sorted(world.replicas)))
    if world.dice.random() < 0.8:
        world.start_extender()
    return True


def agent_is_killed(world: ChaosWorld) -> bool:
    node = _some_node(world)
    if node.agent is None:
        return False
    in_the_middle(world)
    world.kill_agent(node)
    if world.dice.random() < 0.8:
        node.start_agent()
    return True


def dead_come_back(world: ChaosWorld) -> bool:
    """All at once, as after a power cut."""
    dead = [node for node in world.nodes.values() if node.agent is None]
    world.start_extender()
    for node in dead:
        node.start_agent()
    return bool(dead)


def process_is_frozen(world: ChaosWorld) -> bool:
    """The leader, as after SIGSTOP or on a machine without breath; or an agent."""
    leaders = [process for extender, process, _ in world.replicas.values() if not extender.not_ready()]
    agents = [node.process for node in world.nodes.values() if node.agent is not None and not node.busy]
    awake: list[Process] = [each for each in [*leaders * 3, *agents] if each and each not in world.frozen]
    if not awake:
        return False
    in_the_middle(world)
    chosen = world.dice.choice(awake)
    world.loop.freeze(chosen)
    world.frozen[chosen] = world.loop.time() + world.dice.choice((1.0, 5.0, 12.0, 20.0, 40.0))
    return True


def clock_jumps(world: ChaosWorld) -> bool:
    machine = world.dice.choice([*world.nodes, *world.replicas])
    world.clocks_ahead_s[machine] = world.dice.choice(
        (-86_400.0, -3600.0, -15.0, -0.5, 0.5, 15.0, 3600.0, 86_400.0)
    )
    return True


def disk_is_full(world: ChaosWorld) -> bool:
    if world.disk_full_until_s:
        return False
    world.fill_disk(world.dice.choice((0.3, 2.0, 8.0)))
    return True


def credentials_are_withdrawn(world: ChaosWorld) -> bool:
    """For a while, and then come back: a token that was rotated too late, a role that was edited."""
    sound = [each for each in world.processes() if each not in world.withdrawn_until_s]
    if not sound:
        return False
    in_the_middle(world)
    code, seconds = world.dice.choice((401, 403)), world.dice.choice((1.0, 10.0, 40.0))
    world.withdraw(world.dice.choice(sound), code, seconds)
    return True


def record_of_a_node_is_edited(world: ChaosWorld) -> bool:
    """By an administrator, or a tool that writes back what it read long ago."""
    name, record = world.dice.choice(sorted(world.nodes)), world.dice.choice(sorted(NODE_ANNOTATION_WRITERS))
    text = world.dice.choice((None, "", "[", "[]", "none", "0,1", "true"))
    body = {"metadata": {"annotations": {record: text}}}
    world.call("PATCH", f"/api/v1/nodes/{name}", body, "application/merge-patch+json")
    return True


def pod_is_deleted_by_force(world: ChaosWorld) -> bool:
    """Its containers go on for a while, and nothing in the API says whose they are."""
    running = {uid for node in world.nodes.values() for uid, _ in node.running}
    there = [pod for pod in world.pods() if pod["metadata"]["uid"] in running]
    if not there:
        return False
    world.remove(world.dice.choice(there))
    return True


def kubelet_restarts(world: ChaosWorld) -> bool:
    node = _some_node(world)
    if node.busy:
        return False
    node.restart(keeps_checkpoint=True)
    return True


def kubelet_loses_its_checkpoint(world: ChaosWorld) -> bool:
    node = _some_node(world)
    if node.busy:
        return False
    node.restart(keeps_checkpoint=False)
    return True


def kubelet_refuses(world: ChaosWorld) -> bool:
    """All that is sent there, for a reason that nobody knows, or no more."""
    node = world.nodes[world.dice.choice(sorted(world.nodes))]
    node.refuses = not node.refuses
    return True


def machine_restarts(world: ChaosWorld) -> bool:
    node = _some_node(world)
    if node.busy:
        return False
    if node.process is not None:
        world.frozen.pop(node.process, None)
    node.reboot()
    return True


def region_is_hostile(world: ChaosWorld) -> bool:
    """A tenant does what it likes in the one folder that it may write in."""
    folders = [
        running.folder.parent / "var" for node in world.nodes.values() for running in node.running.values()
    ]
    there = [each for each in folders if each.is_dir()]
    if not there or world.disk_full_until_s:
        return False
    world.dice.choice(TRICKS)(world.dice.choice(there), world.dice)
    return True


def _noise(folder: Path, dice: random.Random) -> None:
    _clear(folder / "region")
    (folder / "region").write_bytes(dice.randbytes(dice.choice((0, 1, 4096, 70_000))))


def _flipped(folder: Path, dice: random.Random) -> None:
    region = folder / "region"
    if region.is_file() and not region.is_symlink() and region.stat().st_size < 1 << 24:
        content = bytearray(region.read_bytes() or b"\0")
        for _ in range(8):
            content[dice.randrange(len(content))] = dice.randrange(256)
        region.write_bytes(content)


def _sparse(folder: Path, dice: random.Random) -> None:
    _clear(folder / "region")
    with (folder / "region").open("wb") as region:
        region.truncate(1 << dice.randrange(20, 40))


def _elsewhere(folder: Path, dice: random.Random) -> None:
    _clear(folder / "region")
    (folder / "region").symlink_to(
        dice.choice(("/dev/zero", "/proc/self/mem", "region", "/nowhere", "../etc/limits"))
    )


def _pipe(folder: Path, _: random.Random) -> None:
    _clear(folder / "region")
    os.mkfifo(folder / "region")


def _deep(folder: Path, dice: random.Random) -> None:
    """Folders in folders, deeper than any path may be long."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(dice.choice((10, 300, 1500))):
        with contextlib.suppress(FileExistsError):
            os.mkdir("d" * 10, dir_fd=handle)
        below = os.open("d" * 10, os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)


def _many(folder: Path, dice: random.Random) -> None:
    for number in range(dice.choice((5, 100))):
        (folder / f"file {number}\n\udcff").touch()


def _gone(folder: Path, _: random.Random) -> None:
    _clear(folder / "region")


def _clear(path: Path) -> None:
    if path.is_symlink() or path.is_file() or path.is_fifo():
        path.unlink()


TRICKS = (_noise, _noise, _flipped, _flipped, _sparse, _elsewhere, _pipe, _deep, _many, _gone)


def placement_is_tampered_with(world: ChaosWorld) -> bool:
    """Its owner writes what a pod says of its cards, where no webhook keeps them from it."""
    pods = [pod for pod in world.pods() if pod["status"].get("phase") not in ("Failed", "Succeeded")]
    if not pods:
        return False
    pod = world.dice.choice(pods)
    change: dict[str, dict[str, str | None]] = {"annotations": lies(world.dice)}
    if "nodeName" in pod["spec"] and world.dice.random() < 0.3:  # of a pod that waits it is a request
        change["labels"] = {GPU_COUNT: world.dice.choice((None, "1", "2", "3", "many"))}
    world.tamper(pod, change)
    return True


def pod_is_bound_by_hand(world: ChaosWorld) -> bool:
    """Past every scheduler, and with a card of its own choice."""
    missing = set(world.names) - {pod["metadata"]["name"] for pod in world.pods()}
    if not missing:
        return False
    said = {name: text for name, text in lies(world.dice).items() if text is not None}
    node = world.dice.choice(sorted(world.nodes))
    pod = world.submit(world.dice.choice(sorted(missing)), node=node, annotations=said)
    world.tampered.add(pod["metadata"]["uid"])
    return True


def lies(dice: random.Random) -> dict[str, str | None]:
    """Values of placement annotations, None for one to take away."""
    if dice.random() < 0.2:
        return dict.fromkeys(PLACEMENT_ANNOTATIONS)
    card = dice.choice(("0", "1", "2", "0,1", "77"))
    amounts = {each: dice.choice((0, 1, 4, 999_999_999)) for each in card.split(",")}
    choices: dict[str, tuple[str | None, ...]] = {
        ANN_INDEX: (card, None, "", "x", "-1"),
        ANN_POD_UNITS: ("1", "999999999", None, "-3"),
        ANN_CARD_UNITS: ("1", None, "x"),
        ANN_ASSUME_TIME: ("0", "99999999999999999999", None, "x"),
        ANN_ASSIGNED: ("true", "false", None, "yes"),
        ANN_ALLOCATION: (json.dumps({"0": amounts}), json.dumps({"9": {"x": -1}}), None, "[", "{}"),
        ANN_CORE: (json.dumps({"0": {card: 100}}), "x", None),
        ANN_VISIBLE: ("GPU-n2-0", "all", None),
        ANN_MEANT: (card, "x", None),
    }
    names = dice.sample(sorted(choices), dice.choice((1, 1, 2, 5)))
    return {name: dice.choice(choices[name]) for name in names}


def _some_node(world: ChaosWorld) -> NodeInMemory:
    return world.nodes[world.dice.choice(sorted(world.nodes))]


FAULTS: dict[str, tuple[float, Break]] = {
    "request lost": (10, message("lose_request")),
    "answer lost": (10, message("lose_answer")),
    "request late": (10, message("delay")),
    "request repeated": (10, message("repeat")),
    **{f"answered {status}": (4.0, answered(status)) for status in STATUSES},
    "watch cut": (4, watch_is_cut),
    "history compacted": (2, history_is_compacted),
    "extender killed": (1.5, extender_is_killed),
    "agent killed": (1.5, agent_is_killed),
    "all started at once": (1, dead_come_back),
    "process frozen": (1, process_is_frozen),
    "clock jumped": (2, clock_jumps),
    "disk full": (1, disk_is_full),
    "credentials withdrawn": (1, credentials_are_withdrawn),
    "node's record edited": (2, record_of_a_node_is_edited),
    "pod deleted by force": (1, pod_is_deleted_by_force),
    "kubelet restarted": (1, kubelet_restarts),
    "kubelet lost its checkpoint": (0.5, kubelet_loses_its_checkpoint),
    "kubelet refuses": (1.5, kubelet_refuses),
    "machine restarted": (0.4, machine_restarts),
    "hostile region": (5, region_is_hostile),
    "placement tampered with": (3, placement_is_tampered_with),
    "pod bound by hand": (0.5, pod_is_bound_by_hand),
}
"""By what it is called in the report: how often of all, and what does it."""
