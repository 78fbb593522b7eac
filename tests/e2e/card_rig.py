"""A node with the machine's own card, or with simulated ones where it has none, and pods that use it.

No container toolkit is needed: a CDI file brings the card's device files and the machine's own programs and
libraries into containers, as such a toolkit's file does. The image of the pods holds busybox alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuslice.core.contract import GPU_CORE, GPU_MEM
from gpuslice.core.units import card_units, limit_mib
from gpuslice_demo.ports import free_port
from simcluster import gpu
from tests.e2e import control_plane, node
from tests.e2e.kubelet_rig import DRIVER, GPUSLICE, NODE, REPOSITORY, Cluster, container, pod, start
from tests.e2e.node import Service, until
from tests.gpu import driver, stage

PROGRAMS = REPOSITORY / "tests" / "gpu"
KIND = "nvidia.com/gpu"
LABELS = "cgpu=true"
POD_CGROUPS = {"cgroupsPerQOS": True, "enforceNodeAllocatable": ["pods"]}
"""As on any real node; the rig's kubelet leaves cgroups alone, so that it also runs inside a container."""
SHARED_PLACES = (
    "/usr/bin",
    "/usr/local",
    "/usr/share/zoneinfo",
    "/usr/lib64",
    "/lib64",
    f"/usr/lib/{os.uname().machine}-linux-gnu",
    f"/lib/{os.uname().machine}-linux-gnu",
    *(str(path) for path in Path("/usr/lib").glob("python3*")),
    "/opt",
    "/etc/ld.so.cache",
    "/etc/alternatives",
)
"""What programs of the machine need. Not /usr as a whole: the agent mounts the library below it."""


@dataclass
class CardNode:
    """The node, its cards, and what pods run on them."""

    cluster: Cluster
    cards: Sequence[driver.Card]  # of one kind
    simulated: bool
    program: Sequence[str]  # answers orders, see tests/gpu/torch_program.py
    exporter_port: int = field(default_factory=free_port)
    exporter: Service = field(init=False)

    @property
    def memory_mib(self) -> int:
        """Of one card."""
        return self.cards[0].memory_mib

    @property
    def units(self) -> int:
        return card_units(self.memory_mib)

    def limit_mib(self, units: int) -> int:
        return limit_mib(self.memory_mib, units, self.units)

    @property
    def work(self) -> str:
        return "matrix product" if "torch" in self.program[-1] else "arithmetic kernel"

    @contextmanager
    def tenant(self, name: str, units: int, percent: int = 0, document: Any = None) -> Iterator[Tenant]:
        """A pod with so much of a card, or this `document`, whose program has started."""
        made = Tenant(self, name)
        limits = {GPU_MEM: str(units)} | ({GPU_CORE: str(percent)} if percent else {})
        asking = container(0, self.script(name)) | {"resources": {"limits": limits}}
        self.cluster.create(document or pod(name, asking))
        try:
            made.start()
            yield made
        finally:
            made.close()

    def script(self, name: str) -> str:
        return f"busybox mkdir -p /tmp; exec {' '.join(self.program)} < {self.orders(name)}"

    def orders(self, name: str) -> Path:
        """The pipe by which a tenant of this name is asked."""
        path = self.cluster.places.folder / "orders" / name
        if not path.exists():
            os.mkfifo(path)
        return path

    def says(self, *command: str, codes: tuple[int, ...] = (0,)) -> str:
        """What one of our commands prints."""
        kubeconfig = str(self.cluster.plane.kubeconfig)
        environment = {**os.environ, "KUBECONFIG": kubeconfig, "COLUMNS": "140"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in codes, f"{command}: {done.returncode} {done.stdout} {done.stderr}"
        return done.stdout

    def metrics(self, name: str) -> dict[str, float]:
        """A metric of containers, by pod."""
        url = f"http://127.0.0.1:{self.exporter_port}/metrics"
        page = control_plane.fetch(url).decode()
        found = re.findall(rf'^{name}\{{.*\bpod="([^"]*)".*\}} (\S+)', page, re.MULTILINE)
        return {pod: float(value) for pod, value in found}


@dataclass
class Tenant:
    """A pod whose program is asked by lines and answers in JSON."""

    node: CardNode
    name: str
    _pipe: int = -1
    _heard: int = 0

    def start(self) -> None:
        self._pipe = os.open(self.node.orders(self.name), os.O_RDWR)  # neither waits for the other end
        self.node.cluster.running(self.name)
        self.hear()  # its works

    def say(self, order: str) -> None:
        os.write(self._pipe, order.encode() + b"\n")

    def hear(self) -> Any:
        """Its next answer. The program's end ends the waiting."""

        def ask() -> list[str]:
            answers = self._lines("stdout")
            if len(answers) > self._heard:
                return answers
            phase = self.node.cluster.pod(self.name)["status"]["phase"]
            assert phase == "Running", f"{self.name} is {phase}: {self._lines('stderr')[-20:]}"
            return []

        answer = until(ask, f"{self.name} answers")[self._heard]
        self._heard += 1
        return json.loads(answer)

    def ask(self, order: str) -> Any:
        self.say(order)
        return self.hear()

    def runs(self, *command: str) -> str:
        """What a command prints that is run in its container, as by kubectl exec."""
        done = self.ran(*command)
        assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
        return done.stdout

    def ran(self, *command: str) -> subprocess.CompletedProcess[str]:
        (status,) = self.node.cluster.running(self.name)["status"]["containerStatuses"]
        identity = status["containerID"].removeprefix("containerd://")
        places, name = self.node.cluster.places, os.urandom(4).hex()
        return node.ctr(places, "tasks", "exec", f"--exec-id={name}", identity, *command)

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)

    def _lines(self, stream: str) -> list[str]:
        uid = self.node.cluster.pod(self.name)["metadata"]["uid"]
        folder = self.node.cluster.places.folder / "logs" / f"default_{self.name}_{uid}" / "main"
        text = (folder / "0.log").read_text() if (folder / "0.log").exists() else ""
        words = [line.split(" ", 3) for line in text.splitlines()]
        return [each[3] for each in words if len(each) == 4 and each[1] == stream]


@contextmanager
def card_node() -> Iterator[CardNode]:
    """One node, on this machine's card if it has one."""
    driver.make_findable()
    cards = _own_cards()
    settings = POD_CGROUPS if "GPUSLICE_E2E_POD_CGROUPS" in os.environ else None
    with node.own_folder("gs-card-") as folder, ExitStack() as stack:
        (folder / "orders").mkdir()
        flags = ["--watchdog=stop", f"--cdi-kind={KIND}", f"--unhealthy-file={folder}/unhealthyDevices.json"]
        flags += ["--nvml-library=libnvidia-ml.so.1"] if cards else []
        cluster = start(folder, stack, LABELS, agent_flags=tuple(flags), settings=settings)
        made = CardNode(cluster, cards or _simulated_cards(folder), not cards, _program(not cards))
        _write_cdi(made)
        made.exporter = _exporter(made)
        stack.callback(made.exporter.stop)
        made.exporter.start()
        yield made


def _own_cards() -> list[driver.Card]:
    try:
        return driver.Nvml().cards()
    except driver.NoDriverError:
        return []


def _simulated_cards(folder: Path) -> list[driver.Card]:
    with gpu.Machine(folder / "gpus" / "machine") as machine:
        return [
            driver.Card(each.uuid, each.name, each.total_mib, machine.driver_version)
            for each in machine.cards()
        ]


def _program(simulated: bool) -> list[str]:
    try:
        if not simulated:
            return [stage.torch_python(), str(PROGRAMS / "torch_program.py")]
    except driver.Skip:
        pass
    return [sys.executable, str(PROGRAMS / "driver_program.py")]


def _exporter(made: CardNode) -> Service:
    places = made.cluster.places
    command = ["env", f"GPUSLICE_SIM_STATE={places.folder}/gpus/machine", *GPUSLICE, "exporter"]
    command += [f"--address=127.0.0.1:{made.exporter_port}", f"--node-name={NODE}"]
    command += [f"--kubeconfig={made.cluster.plane.kubeconfig}", f"--root={places.folder}/gpuslice"]
    command += [f"--pod-resources-kubelet-socket={places.pod_resources}"]
    library = f"{DRIVER}/libnvidia-ml.so.1" if made.simulated else "libnvidia-ml.so.1"
    command.append(f"--nvml-library={library}")
    return Service("exporter", places.folder, command)


def _write_cdi(made: CardNode) -> None:
    folder = made.cluster.places.folder
    ask = [made.program[0], "-c", "import sys; print(sys.base_prefix, sys.prefix)"]
    homes: list[str] = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    wanted = [Path(each) for each in (*SHARED_PLACES, *homes)] + [REPOSITORY]
    places = [each for each in dict.fromkeys(wanted) if each.exists() and each != Path("/usr")]
    mounts = [_mount(each, "ro") for each in places if not any(other in each.parents for other in places)]
    mounts.append(_mount(folder / "orders", "rw"))
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    nodes: list[dict[str, str]] = []
    if made.simulated:
        mounts.append(_mount(folder / "gpus", "rw"))
        environment = {
            "PATH": f"{DRIVER}:{environment['PATH']}",
            "LD_LIBRARY_PATH": str(DRIVER),
            "GPUSLICE_SIM_STATE": f"{folder}/gpus/machine",
        }
    else:
        nodes = [{"path": str(path)} for path in Path("/dev").glob("nvidia*") if path.is_char_device()]
    edits = {
        "env": [f"{name}={value}" for name, value in environment.items()],
        "mounts": mounts,
        "deviceNodes": nodes,
    }
    devices = [{"name": each.uuid, "containerEdits": edits} for each in made.cards]
    document = {"cdiVersion": "0.6.0", "kind": KIND, "devices": devices}
    (made.cluster.places.cdi / "driver.json").write_text(json.dumps(document))


def _mount(path: Path, mode: str) -> dict[str, Any]:
    return {"hostPath": str(path), "containerPath": str(path), "options": ["rbind", mode]}
