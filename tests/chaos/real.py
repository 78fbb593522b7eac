"""The same on a real control plane, kubelet, containerd and runc: `make chaos ARGS="--real 1000"`.

Time is real here, so a story is not played again by its seed. Who judges is the same checker; since it cannot
read the API server, the checkpoint and the containers at one moment, a breach has to be seen by two looks.
What a container was started with is read from its mounts: kubelet may have forgotten it, or say otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.errors import KubeError
from tests.chaos.bad_network import BadNetwork
from tests.chaos.checker import Breach, CardSize, Checker, NodeFiles, Wrong, token_of
from tests.chaos.faults import lies
from tests.chaos.story import Stuck, Told
from tests.e2e.kubelet_rig import CARD_MIB, NODE, PODS, STAY, UNITS, Cluster, container, pod, start
from tests.e2e.node import Service

BOUT = 50
PATIENCE_S = 180.0
AGAIN_S = 3.0
"""After which a second look has to show a breach as well."""
NAMES = [f"app-{number}" for number in range(6)]
SIZES = (2, 3, 4, 5, 7, 10)
CHECKPOINT = "kubelet_internal_checkpoint"
LIMITS, LOG = "/etc/gpuslice", "/dev/termination-log"  # kubelet's mount of a pod's own, .../pods/UID/...
NOTHING = b'{"Data": {"PodDeviceEntries": null}}'


class RealStory:
    """Users go on, things go wrong, and after each bout everything has to come right."""

    def __init__(self, cluster: Cluster, network: BadNetwork, seed: int) -> None:
        self.cluster, self.network = cluster, network
        self.dice = random.Random(seed)
        self.told = Told()
        self.moments: Counter[str] = Counter()  # what one look showed and the next did not
        cards = json.loads(cluster.node()["metadata"]["annotations"]["gpuslice.io/gpus"])
        sizes = {(NODE, each["index"]): CardSize(each["uuid"], UNITS, CARD_MIB) for each in cards}
        self._checker = Checker(sizes)
        self._since_s: dict[Wrong, float] = {}
        self._seen: set[str] = set()
        self._bound: set[str] = set()

    def play(self, faults: int) -> Told:
        began_s = time.monotonic()
        try:
            while (done := self.told.faults.total()) < faults:
                for _ in range(min(BOUT, faults - done)):
                    self._users_act()
                    self._one_fault()
                    if self.dice.random() < 0.3:
                        self._look(self.told.longest_wrong_s)
                    time.sleep(self.dice.uniform(0.0, 0.4))
                self._recover()
                seconds = time.monotonic() - began_s
                print(f"{self.told.faults.total()} real faults, {seconds:.0f} s", file=sys.stderr, flush=True)
        finally:
            self.told.pods, self.told.binds = len(self._seen), len(self._bound)
        return self.told

    # -- users -----------------------------------------------------------------------------------------------

    def _users_act(self) -> None:
        with contextlib.suppress(KubeError):
            there = {each["metadata"]["name"]: each for each in self._pods()}
            failed = [name for name, each in there.items() if each["status"].get("phase") == "Failed"]
            draw = self.dice.random()
            if failed or (there and draw < 0.15):
                self.cluster.api.delete(f"{PODS}/{self.dice.choice(failed or sorted(there))}")
            elif draw < 0.5 and (missing := [name for name in NAMES if name not in there]):
                work = container(self.dice.choice(SIZES), STAY)
                fields = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 1}
                self.cluster.create(pod(self.dice.choice(missing), work, **fields))

    def _pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cluster.api.get(PODS)["items"]
        return found

    # -- faults ----------------------------------------------------------------------------------------------

    def _one_fault(self) -> None:
        cluster, dice = self.cluster, self.dice
        extender, agent, kubelet = cluster.extender, cluster.agent, cluster.kubelet
        server = cluster.plane.pids["kube-apiserver"]
        faults: dict[str, tuple[float, Callable[[], bool]]] = {
            "connection cut": (30, lambda: self.network.cut(dice)),
            "answer lost": (25, lambda: self.network.lose_answer(dice)),
            "connection stopped": (15, lambda: self.network.stop(dice, dice.choice((0.5, 2.0, 12.0)))),
            "container's process killed": (8, self._kill_container),
            "extender killed": (6, lambda: self._kill(extender)),
            "agent killed": (6, lambda: self._kill(agent)),
            "placement tampered with": (6, self._tamper),
            "kubelet killed": (2, lambda: self._kill(kubelet)),
            "kubelet lost its checkpoint": (2, self._lose_checkpoint),
            "extender frozen": (3, lambda: self._freeze(extender.signal)),
            "agent frozen": (3, lambda: self._freeze(agent.signal)),
            "kubelet frozen": (2, lambda: self._freeze(kubelet.signal)),
            "API server frozen": (2, lambda: self._freeze(partial(os.kill, server))),
        }
        weights = [weight for weight, _ in faults.values()]
        while True:
            (name,) = dice.choices(list(faults), weights)
            if faults[name][1]():
                self.told.faults[name] += 1
                return

    def _tamper(self) -> bool:
        """A pod's owner writes what it says of its cards; there is no webhook here."""
        with contextlib.suppress(KubeError):
            if names := [each["metadata"]["name"] for each in self._pods()]:
                change = {"metadata": {"annotations": lies(self.dice)}}
                self.cluster.api.patch(f"{PODS}/{self.dice.choice(names)}", change)
                return True
        return False

    @staticmethod
    def _kill(one: Service) -> bool:
        one.kill()
        one.start()
        return True

    def _lose_checkpoint(self) -> bool:
        self.cluster.kubelet.kill()
        (self.cluster.places.plugins / CHECKPOINT).unlink(missing_ok=True)
        self.cluster.kubelet.start()
        return True

    def _freeze(self, send: Callable[[signal.Signals], None]) -> bool:
        send(signal.SIGSTOP)
        time.sleep(self.dice.choice((0.3, 1.0, 3.0)))
        send(signal.SIGCONT)
        return True

    def _kill_container(self) -> bool:
        """As by the kernel for want of memory: kubelet starts it again."""
        works = [int(each.name) for each in _works()]
        if works:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.dice.choice(works), signal.SIGKILL)
        return bool(works)

    # -- judging ---------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        self.told.bouts += 1
        self._since_s = {}
        began_s = time.monotonic()
        while wrong := self._look(self.told.longest_recovery_s):
            if time.monotonic() - began_s > PATIENCE_S:
                raise Stuck(f"after {PATIENCE_S:g} s of peace: {sorted(map(str, wrong))}")
            with contextlib.suppress(KubeError):
                for each in self._pods():
                    if each["status"].get("phase") == "Failed":
                        self.cluster.api.delete(f"{PODS}/{each['metadata']['name']}")
            time.sleep(0.5)

    def _look(self, longest: dict[str, float]) -> set[Wrong]:
        try:
            wrong = self._check()
        except Breach as breach:
            self.moments[str(breach)] += 1
            time.sleep(AGAIN_S)
            wrong = self._check()
        now_s = time.monotonic()
        self.told.checks += 1
        self._since_s = {each: self._since_s.get(each, now_s) for each in wrong}
        for each, since_s in self._since_s.items():
            longest[each.what] = max(longest.get(each.what, 0.0), now_s - since_s)
        return wrong

    def _check(self) -> set[Wrong]:
        """Raises `Breach`. A card promised beyond its units is timed: who was moved is not known."""
        places = self.cluster.places
        pods = self._pods()
        file = places.plugins / CHECKPOINT
        checkpoint = file.read_bytes() if file.exists() else NOTHING
        running: dict[tuple[str, str], frozenset[str]] = {}
        for process in _works():
            with contextlib.suppress(OSError):
                uid, limits = started_with(process)
                if limits.is_relative_to(places.folder):  # not of another test beside this one
                    running[uid, "main"] = ids_of(limits.parent)
        for each in pods:
            self._seen.add(each["metadata"]["uid"])
            if each["spec"].get("nodeName"):
                self._bound.add(each["metadata"]["uid"])
        files = NodeFiles(checkpoint, places.folder / "gpuslice" / "containers", running)
        wrong = self._checker.check(pods, {NODE: files}, moved={each["metadata"]["uid"] for each in pods})
        url = f"http://127.0.0.1:{self.cluster.extender_port}/gpushare-scheduler/inspect"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return wrong | self._checker.check_ledgers(pods, {"extender": json.load(answer)})
        except OSError:
            return wrong | {Wrong("a ledger that says otherwise", "extender")}


def _works() -> list[Path]:
    """The processes that the pods' containers began with, in /proc."""
    each_process = (each for each in Path("/proc").iterdir() if each.name.isdecimal())
    return [each for each in each_process if _command(each) == ["sh", "-c", STAY]]


def started_with(process: Path) -> tuple[str, Path]:
    """The uid of a container's pod, and the host's folder whose limits were mounted into it.

    Raises `OSError` where the process has just ended.
    """
    mounts = {}
    for line in (process / "mountinfo").read_text().splitlines():
        source, target = line.split()[3:5]  # proc_pid_mountinfo(5)
        mounts[target] = Path(source)
    if not {LIMITS, LOG} <= mounts.keys():
        raise ProcessLookupError(process.name)
    return mounts[LOG].parts[-4], mounts[LIMITS]


def ids_of(folder: Path) -> frozenset[str]:
    """The device ids of a container's folder, which its name must bear out."""
    ids = json.loads((folder / "owner.json").read_text())["ids"]
    if not folder.name.startswith(token_of(ids)):
        raise Breach(f"{folder.name} says that it is of {ids}")
    return frozenset(ids)


def _command(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().split("\0")[:-1]
    except (OSError, UnicodeDecodeError):
        return []


def play_real(faults: int, seed: int) -> tuple[Told, list[str], Counter[str]]:
    """What was seen, what failed, and what one look showed and the next did not.

    The folder with all logs stays where GPUSLICE_E2E_KEEP is set.
    """
    folder = Path(tempfile.mkdtemp(prefix="gs-chaos-"))  # sockets need a short path
    folder.chmod(0o755)
    failures: list[str] = []
    network = BadNetwork()
    try:
        with ExitStack() as stack:
            stack.enter_context(network.open())
            cluster = start(folder, stack, way=network.kubeconfig)
            cluster.offers(2 * UNITS)
            story = RealStory(cluster, network, seed)
            try:
                story.play(faults)
            except (Breach, Stuck) as error:
                failures.append(f"{type(error).__name__} after {story.told.faults.total()}: {error}")
            return story.told, failures, story.moments
    finally:
        if "GPUSLICE_E2E_KEEP" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)
