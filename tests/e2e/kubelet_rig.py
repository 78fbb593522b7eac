"""A node with a real kubelet, one of our agents on it, and what tests ask them."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuslice.core.contract import ANN_ASSIGNED, ANN_INDEX, ANN_POD_UNITS, GPU_COUNT, GPU_MEM
from gpuslice.core.units import card_units, limit_bytes
from gpuslice_demo.ports import free_port
from simcluster import gpu
from tests import tools
from tests.chart import extenders
from tests.e2e import control_plane, node
from tests.e2e.images import needed_libraries
from tests.e2e.node import Api, Places, Service, until

REPOSITORY = Path(__file__).resolve().parents[2]
DRIVER = REPOSITORY / "native" / "build" / "sim"
LIBRARY = REPOSITORY / "native" / "build" / "lib" / "libgpuslice.so"
GPUSLICE = [sys.executable, "-c", "from gpuslice.apps.cli.main import main; main()"]
NODE = "node-1"
CARD_MIB = 16130
UNITS = card_units(CARD_MIB)
PLAIN, CUDA = "localhost/plain:1", "localhost/cuda:1"
PODS = "namespaces/default/pods"
STAY = "trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done"
SHOW = f"env; cat /etc/gpuslice/limits /etc/ld.so.preload; ls -l /usr/lib/gpuslice; echo complete; {STAY}"


@dataclass
class Cluster:
    """The node's programs and the questions that tests ask."""

    plane: control_plane.ControlPlane
    api: Api
    places: Places
    kubelet: Service
    agent: Service
    next_agent: Service  # as an update brings it; not started
    extender: Service
    extender_port: int
    containerd: int = field(init=False, default=0)  # its pid, whose end is the end of every container

    # -- pods -----------------------------------------------------------------------------------------

    def create(self, document: dict[str, Any]) -> None:
        self.api.create(PODS, document)

    def settle(self) -> None:
        """A pod comes and goes: kubelet frees what has ended when it gives something, not at its start."""
        self.create(pod("first", container(1)))
        self.running("first")
        self.clear()

    def pod(self, name: str) -> dict[str, Any]:
        return self.api.get(f"{PODS}/{name}")

    def running(self, name: str) -> dict[str, Any]:
        """The pod once all its containers run; fails at once when it was rejected."""

        def ask() -> dict[str, Any]:
            found = self.pod(name)
            phase = found["status"].get("phase")
            assert phase != "Failed", found["status"]
            containers = found["status"].get("containerStatuses", [])
            ready = len(containers) == len(found["spec"]["containers"])
            return found if ready and all("running" in each["state"] for each in containers) else {}

        return until(ask, f"{name} runs; {self.pod(name)['status']}")

    def bound(self, name: str) -> bool:
        return "nodeName" in self.pod(name)["spec"]

    def failed(self, name: str) -> str:
        """Why kubelet refused the pod, once it did."""
        until(lambda: self.pod(name)["status"].get("phase") == "Failed", f"{name} is refused")
        status = self.pod(name)["status"]
        return f"{status.get('reason')}: {status.get('message')}"

    def said(self, name: str, container: str = "main", end: str = "complete") -> list[str]:
        """The lines that a container wrote, once it wrote the line `end`."""
        uid = self.pod(name)["metadata"]["uid"]
        file = self.places.folder / "logs" / f"default_{name}_{uid}" / container / "0.log"

        def ask() -> list[str]:
            text = file.read_text() if file.exists() else ""
            lines = [line.split(" ", 3)[-1] for line in text.splitlines()]
            return lines if end in lines else []

        return until(ask, f'{name}/{container} says "{end}"')

    def clear(self) -> None:
        """Delete every pod as users do, and wait until kubelet has let go of them."""
        for each in self.api.get(PODS)["items"]:
            self.api.delete(f"{PODS}/{each['metadata']['name']}")
        until(lambda: not self.api.get(PODS)["items"], "all pods are gone")

    @contextmanager
    def adding_up(self) -> Iterator[list[int]]:
        """While inside, the units promised of each card, as anybody sees them who asks all the time."""
        sums: list[int] = []
        done = threading.Event()

        def ask() -> None:
            api = Api(self.plane)
            while not done.is_set():
                sums.extend(promised(api.get(PODS)["items"]).values())
            api.close()

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                yield sums
            finally:
                done.set()
            asking.result()

    # -- the node -------------------------------------------------------------------------------------

    def node(self) -> dict[str, Any]:
        return self.api.get(f"nodes/{NODE}")

    def allocatable(self) -> tuple[str | None, str | None]:
        amounts = self.node()["status"]["allocatable"]
        return amounts.get(GPU_MEM), amounts.get(GPU_COUNT)

    def offers(self, memory: int, cards: int = 2) -> bool:
        until(lambda: self.allocatable() == (str(memory), str(cards)), f"the node offers {memory}")
        return True

    def registered(self) -> None:
        until(lambda: "registered with kubelet" in self.agent.log(), "the agent registers")

    @contextmanager
    def registered_again(self) -> Iterator[None]:
        """Left once the agent has registered once more because of what happened inside."""
        before = self.agent.log().count("registered with kubelet")
        yield
        until(
            lambda: self.agent.log().count("registered with kubelet") > before,
            "the agent registers again",
            20,
        )


@contextmanager
def one_node() -> Iterator[Cluster]:
    """`start` in a folder of its own."""
    with node.own_folder("gs-node-") as folder, ExitStack() as stack:
        yield start(folder, stack)


def start(
    folder: Path,
    stack: ExitStack,
    labels: str = "cgpu=true",
    *,
    flags: tuple[str, ...] = (),
    agent_flags: tuple[str, ...] = (),
    settings: Mapping[str, Any] | None = None,
    driver: str = "",
    cgroups: bool = False,
    cards: int = 2,
    sockets: int = 1,
    way: Callable[[control_plane.ControlPlane], Path] = lambda plane: plane.kubeconfig,
) -> Cluster:
    """One node, with `cards` and, as kubelet sees it, so many `sockets`.

    `flags` are of Kubernetes' programs, `agent_flags` ours, `settings` kubelet's.

    `driver`: the branch of the simulated one. `cgroups`: of version 2, with the agent among them.
    `way`: the kubeconfig by which our own processes reach the API server.
    """
    places = Places(folder)
    places.make()
    make_cards(folder, cards, driver)
    plane = stack.enter_context(control_plane.api_server(folder, flags=flags))
    pid = stack.enter_context(node.containerd(places, cgroups=cgroups, sockets=sockets))
    node.load_image(places, node.SANDBOX_IMAGE, ["sleep", "1000000"], {})
    node.load_image(places, PLAIN, ["sh"], {})
    node.load_image(places, CUDA, ["sh"], cuda_files())
    port = free_port()
    kubeconfig = way(plane)
    command = [*GPUSLICE, "extender", f"--port={port}", "--host=127.0.0.1", f"--kubeconfig={kubeconfig}"]
    extender = Service("extender", folder, command)
    stack.callback(extender.stop)
    extender.start()
    called = extenders(str(tools.find("helm")), port)
    stack.enter_context(control_plane.scheduler(plane, called, flags=flags, percentageOfNodesToScore=100))
    api = Api(plane)
    stack.callback(api.close)
    within = pid if cgroups else 0
    agent, next_agent = (
        _agent(kubeconfig, places, name, agent_flags, within) for name in ("agent", "next-agent")
    )
    kubelet = node.kubelet(plane, places, pid, NODE, labels, settings=settings, flags=flags)
    found = Cluster(plane, api, places, kubelet, agent, next_agent, extender, port)
    found.containerd = pid

    def stop_kubelet() -> None:  # whichever it is then
        found.kubelet.stop()

    stack.callback(stop_kubelet)
    for service in (found.next_agent, found.agent):
        stack.callback(service.stop)
    for service in (found.kubelet, found.agent):
        service.start()
    until(lambda: _nodes(api), "kubelet registers the node")
    api.patch(f"nodes/{NODE}", {"spec": {"taints": None}})  # no node controller runs that would
    return found


def _nodes(api: Api) -> bool:
    return any(
        each["type"] == "Ready" and each["status"] == "True"
        for item in api.get("nodes")["items"]
        for each in item["status"].get("conditions", [])
    )


def make_cards(folder: Path, cards: int = 2, driver: str = "") -> None:
    """Cards that every user of the node may use, as device files of a driver are."""
    (folder / "gpus").mkdir()
    state = gpu.create(folder / "gpus" / "machine", ["V100-SXM2-16GB"] * cards, seed="e2e", driver=driver)
    Path(f"{state}.alive").touch()
    for path in (folder / "gpus", state, Path(f"{state}.alive")):
        path.chmod(0o777)


def cuda_files() -> dict[str, Path]:
    """The driver's programs and libraries where the loader of the host's libc finds them."""
    programs = {
        f"/usr/bin/{name}": DRIVER / name for name in ("nvidia-smi", "cuda_malloc", "cuda_malloc_static")
    }
    host = needed_libraries(DRIVER / "nvidia-smi")
    libc = next(path for path in host if path.name == "libc.so.6")
    driver = {str(libc.parent / name): DRIVER / name for name in ("libcuda.so.1", "libnvidia-ml.so.1")}
    return {**programs, **driver, **{str(path): path for path in host}}


def _agent(kubeconfig: Path, places: Places, name: str, flags: tuple[str, ...], within: int = 0) -> Service:
    """`within`: the process in whose namespaces it runs."""
    command = ["nsenter", f"--target={within}", "--mount", "--pid", "--"] if within else []
    command += ["env", f"GPUSLICE_SIM_STATE={places.folder}/gpus/machine", *GPUSLICE, "agent"]
    command += [f"--node-name={NODE}", f"--kubeconfig={kubeconfig}", "--host=127.0.0.1", "--port=0"]
    command += [f"--device-plugin-folder={places.plugins}", f"--pod-resources-socket={places.pod_resources}"]
    command += [f"--root={places.folder}/gpuslice", f"--library={LIBRARY}"]
    command += [f"--nvml-library={DRIVER}/libnvidia-ml.so.1", f"--cdi-folder={places.cdi}"]
    command += [f"--dra-plugins={places.kubelet}/plugins"]
    command += [f"--dra-registry={places.kubelet}/plugins_registry", *flags]
    return Service(name, places.folder, command, entered=bool(within))


def checked(cluster: Cluster, name: str, units: int) -> str:
    """The card of a running pod of one container, after a look at everything it was given."""
    cluster.running(name)
    lines = cluster.said(name)
    seen = variables(lines)
    annotations = cluster.pod(name)["metadata"]["annotations"]
    assert annotations[ANN_ASSIGNED] == "true"
    assert seen["ALIYUN_COM_GPU_MEM_IDX"] == annotations[ANN_INDEX]
    visible = seen["NVIDIA_VISIBLE_DEVICES"].split(",")
    assert limits_of(lines) == dict.fromkeys(visible, limit_bytes(CARD_MIB, units // len(visible), UNITS))
    assert "/usr/lib/gpuslice/libgpuslice.so" in lines
    return seen["ALIYUN_COM_GPU_MEM_IDX"]


# -- documents -------------------------------------------------------------------------------------------


def container(units: int = 0, script: str = SHOW, name: str = "main", **fields: Any) -> dict[str, Any]:
    limits = {"resources": {"limits": {GPU_MEM: str(units)}}} if units else {}
    command = {"name": name, "image": PLAIN, "command": ["sh", "-c", script]}
    return {**command, "imagePullPolicy": "Never", **limits, **fields}


def cuda_container(units: int, script: str, **fields: Any) -> dict[str, Any]:
    """A container with the driver, as the vendor's runtime would bring it in."""
    return container(units, script, image=CUDA) | {
        "env": [{"name": "GPUSLICE_SIM_STATE", "value": "/run/gpus/machine"}],
        "volumeMounts": [{"name": "gpus", "mountPath": "/run/gpus"}],
        **fields,
    }


def pod(name: str, *containers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    spec = {
        "hostNetwork": True,  # no network plugin is needed
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "restartPolicy": "Never",
        "containers": list(containers),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {**spec, **fields}}


def promised(pods: Sequence[dict[str, Any]]) -> Counter[str]:
    """Units by card, as the annotations of pods that have not ended say."""
    sums: Counter[str] = Counter()
    for each in pods:
        annotations = each["metadata"].get("annotations", {})
        if ANN_INDEX in annotations and each["status"].get("phase") not in {"Succeeded", "Failed"}:
            sums[annotations[ANN_INDEX]] += int(annotations[ANN_POD_UNITS])
    return sums


def variables(lines: Sequence[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines if "=" in line and " " not in line.split("=", 1)[0])


def lives(cluster: Cluster, *names: str) -> list[tuple[str, str, int]]:
    """What changes when a container is started anew."""
    states = [cluster.running(name)["status"]["containerStatuses"][0] for name in names]
    return [
        (each["containerID"], each["state"]["running"]["startedAt"], each["restartCount"]) for each in states
    ]


def limits_of(lines: Sequence[str]) -> dict[str, int]:
    """Bytes by card, from the limits file that the container showed."""
    found = [line.split() for line in lines if " memory=" in line]
    return {uuid: int(memory.removeprefix("memory=")) for uuid, memory, _ in found}
