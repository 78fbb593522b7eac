"""The whole product on the machine's own card: Kubernetes, containerd, our programs, and pods that compute.

Where the machine has no card it plays on the simulated driver. The tests share one node and run in order, and
each leaves it empty. What was seen goes to the output, and to `kubernetes.txt` in the folder that OUT names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuslice.core.contract import ANN_INDEX, NODE_GPUS
from tests.e2e import control_plane, node
from tests.e2e.card_rig import CardNode, Tenant, card_node
from tests.e2e.claims_rig import API, CLAIMS, CLASS, claim, claiming, devices, request, using
from tests.e2e.kubelet_rig import GPUSLICE, NODE, PODS, container, lives, pod
from tests.e2e.node import until
from tests.gpu import driver

MISSING = node.missing() or node.why_no_cdi()
CDI_SINCE = 29  # kubelet passes on what a device plugin names, by default
if not MISSING and control_plane.minor_version("kubelet") < CDI_SINCE:
    MISSING = f"a device plugin's CDI devices need kubelet 1.{CDI_SINCE}"
pytestmark = [pytest.mark.e2e, pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

UNITS = 4  # the vendor's example
CLAIMS_SINCE = 36  # with what is on by default
TOO_OLD = not MISSING and control_plane.minor_version() < CLAIMS_SINCE


@pytest.fixture(scope="module")
def card() -> Iterator[CardNode]:
    with card_node() as made:
        yield made


@pytest.fixture(autouse=True)
def leave_no_pods(card: CardNode) -> Iterator[None]:
    yield
    card.cluster.clear()


def saw(title: str, text: str) -> None:
    print(f"\n== {title}\n{text.rstrip()}")
    if folder := os.environ.get("OUT"):
        with (Path(folder) / "kubernetes.txt").open("a") as file:
            file.write(f"\n== {title}\n{text.rstrip()}\n")


def test_the_node_offers_its_card(card: CardNode) -> None:
    assert card.cluster.offers(len(card.cards) * card.units, len(card.cards))
    told = json.loads(card.cluster.node()["metadata"]["annotations"][NODE_GPUS])
    assert [(each["uuid"], each["memory_mib"]) for each in told] == [
        (each.uuid, each.memory_mib) for each in card.cards
    ]
    versions = card.cluster.node()["status"]["nodeInfo"]
    saw("node", f"{card.cards}\n{json.dumps(versions, indent=1)}")


def test_two_pods_share_a_card_and_neither_gets_more_than_its_part(card: CardNode) -> None:
    limit = card.limit_mib(UNITS)
    with card.tenant("first", UNITS) as first, card.tenant("second", UNITS) as second:
        assert _cards(card, "first") == _cards(card, "second")
        first.ask("hold 512")

        def consistent() -> bool:
            """The driver's own figure of the process, below, is in the container's figure, above."""
            (used, total), *_ = re.findall(r"(\d+)MiB / +(\d+)MiB", first.runs("nvidia-smi"))
            listed = re.findall(r"(\d+)MiB \|$", first.runs("nvidia-smi"), re.MULTILINE)
            assert int(total) == limit
            return abs(int(used) - sum(map(int, listed or [used]))) <= 16

        saw("nvidia-smi in the first pod", first.runs("nvidia-smi"))
        time.sleep(1.2)
        first.ask("hold 32")  # code that the driver loaded is counted by the next allocation after a second
        until(consistent, f"the table's two figures agree: {first.runs('nvidia-smi')}", 20)
        told = second.ask("memory")
        saw("memory of the second pod", json.dumps(told, indent=1))
        assert told["total_mib"] == limit
        assert limit - 1400 < told["got_mib"] <= limit, "a context takes up to some hundred MiB of it"
        assert told["refusal"]
        assert told["went_on"]
        second.ask(f"warm {card.work}")
        alone_s = second.ask(f"time {card.work}")
        first.ask(f"warm {card.work}")
        assert first.ask(f"busy {card.work} 1") > 0, "the neighbour's refusal disturbs nobody"
        saw("one call alone", f"{card.work}: {alone_s * 1000:.3f} ms")


def test_people_and_prometheus_see_who_holds_what(card: CardNode) -> None:
    with card.tenant("large", UNITS) as large, card.tenant("small", UNITS) as small:
        large.ask("hold 2048")
        small.ask("hold 1024")
        for each in (large, small):
            each.ask(f"warm {card.work}")
            each.say(f"busy {card.work} 15")
        used, limits = "gpuslice_container_memory_used_bytes", "gpuslice_container_memory_limit_bytes"
        until(lambda: card.metrics(used).get("small", 0) >= 1024 << 20, f"used: {card.metrics(used)}")
        until(lambda: card.metrics(used).get("large", 0) >= 2048 << 20, f"used: {card.metrics(used)}")
        expected = dict.fromkeys(("large", "small"), float(card.limit_mib(UNITS) << 20))
        until(lambda: card.metrics(limits) == expected, f"limits: {card.metrics(limits)}", 20)
        names = ["memory_used_bytes", "memory_limit_bytes", "memory_peak_bytes", "sm_utilization_ratio"]
        names += ["memory_refused_total", "sm_seconds_total", "processes"]
        time.sleep(3)  # a few samples
        figures = {name: card.metrics(f"gpuslice_container_{name}") for name in names}
        saw("metrics", json.dumps(figures, indent=1))
        assert 2048 << 20 < figures["memory_used_bytes"]["large"] < 3600 << 20
        assert 1024 << 20 < figures["memory_used_bytes"]["small"] < 2600 << 20
        assert all(figures["sm_utilization_ratio"].get(each, 0) > 0.1 for each in ("large", "small"))
        if not card.simulated:
            processes = driver.Nvml().processes(card.cards[0].uuid)
            saw("bytes of processes by NVML", str(processes))
            ours = sorted(figures["memory_used_bytes"].values())
            its = sorted(used for used in processes.values() if used is not None)
            assert [abs(mine - known) <= 64 << 20 for mine, known in zip(ours, its, strict=True)] == [
                True
            ] * 2
        page = f"http://127.0.0.1:{card.exporter_port}/metrics"
        saw("gpuslice top --once", top := card.says(*GPUSLICE, "top", "--once", f"--exporter={page}"))
        assert "large" in top
        assert "small" in top
        saw("kubectl inspect cgpu -d", inspected := _inspect(card))
        assert f"In Cluster:  {2 * UNITS}/{len(card.cards) * card.units} " in inspected
        saw("gpuslice doctor", card.says(*GPUSLICE, "doctor", codes=(0, 3)))
        saw("nvidia-smi of the node", _smi(card))
        assert [each.hear() > 0 for each in (large, small)] == [True, True]


def _inspect(card: CardNode) -> str:
    """By kubectl where there is one, as the vendor's users do."""
    kubectl = control_plane.asset("kubectl")
    if not os.access(kubectl, os.X_OK):
        return card.says(*GPUSLICE, "inspect", "-d")
    plugin = card.cluster.places.folder / "bin" / "kubectl-inspect-cgpu"
    plugin.parent.mkdir()
    code = "from gpuslice.apps.cli.program import inspect_main; inspect_main()"
    plugin.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    plugin.chmod(0o755)
    path = f"{plugin.parent}{os.pathsep}{os.environ['PATH']}"
    return card.says("env", f"PATH={path}", kubectl, "inspect", "cgpu", "-d")


def _smi(card: CardNode) -> str:
    found = shutil.which("nvidia-smi")
    return card.says(found) if found and not card.simulated else "none here"


def test_the_agents_and_kubelets_death_disturb_no_pod_and_lose_no_unit(card: CardNode) -> None:
    cluster = card.cluster
    with card.tenant("first", UNITS) as first, card.tenant("second", UNITS) as second:
        before = lives(cluster, "first", "second")
        first.ask(f"warm {card.work}")
        for service, what in ((cluster.agent, "agent"), (cluster.kubelet, "kubelet")):
            first.say(f"busy {card.work} 4")
            with cluster.registered_again() if what == "kubelet" else _started_again(card):
                service.kill()
                assert second.ask("memory")["total_mib"] == card.limit_mib(UNITS)
                service.start()
            assert first.hear() > 0
            told = second.ask("memory")
            assert told["total_mib"] == card.limit_mib(UNITS)
            assert told["got_mib"] <= card.limit_mib(UNITS)
            assert told["went_on"]
            cluster.offers(len(card.cards) * card.units, len(card.cards))
            _fill_up(card, 2 * UNITS)
            saw(f"after the {what}'s death", f"second gets {told['got_mib']} of {told['total_mib']} MiB")
        assert lives(cluster, "first", "second") == before


@contextmanager
def _started_again(card: CardNode) -> Iterator[None]:
    yield
    card.cluster.registered()


def _fill_up(card: CardNode, held: int) -> None:
    """What is left on the cards can be had, and not a unit more."""
    cluster = card.cluster
    amounts = [card.units - held, *(len(card.cards) - 1) * [card.units]]
    names = [f"rest-{number}" for number in range(len(amounts))]
    for name, amount in zip(names, amounts, strict=True):
        cluster.create(pod(name, container(amount)))
        cluster.running(name)
    cluster.create(pod("over", container(1)))

    def refused() -> str:
        conditions = cluster.pod("over")["status"].get("conditions", [])
        return "".join(each.get("message", "") for each in conditions if each["status"] == "False")

    assert "Insufficient" in until(refused, "a unit more is refused")
    for name in (*names, "over"):
        cluster.api.delete(f"{PODS}/{name}")

    def gone() -> bool:
        left = {each["metadata"]["name"] for each in cluster.api.get(PODS)["items"]}
        return not left & {*names, "over"}

    until(gone, "they are gone")


ESCAPE = """\
import os, pathlib, sys
loader = pathlib.Path("/lib64/ld-linux-x86-64.so.2").read_bytes()
own = pathlib.Path("/tmp/loader")
own.write_bytes(loader.replace(b"/etc/ld.so.preload", b"/etc/ld.so.nothing"))
own.chmod(0o755)
orders = pathlib.Path("/tmp/orders")
orders.write_text(sys.argv[1])
os.dup2(os.open(orders, os.O_RDONLY), 0)
os.execv(own, [str(own), *sys.argv[2:]])
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="it names the loader of x86-64")
def test_the_watchdog_stops_a_program_that_escaped_the_library_and_nothing_else(card: CardNode) -> None:
    """By a loader of its own, which does not read /etc/ld.so.preload."""
    orders = f"hold {card.limit_mib(UNITS) + 2048}\nwarm {card.work}\nbusy {card.work} 60\n"
    with card.tenant("host", UNITS) as host, card.tenant("neighbour", UNITS) as neighbour:
        host.ask("hold 512")
        neighbour.ask("hold 1024")
        began = time.monotonic()
        python, program = card.program
        done = host.ran(python, "-c", ESCAPE, orders, python, program)
        took_s = time.monotonic() - began
        saw(
            "the escaped program",
            f"{done.stdout}ended with {done.returncode} after {took_s:.1f} s\n{done.stderr}",
        )
        assert str(card.limit_mib(UNITS) + 2048) in done.stdout.splitlines(), "it got past the limit"
        assert done.returncode in {143, 137}

        def told_of() -> list[dict[str, Any]]:
            events = card.cluster.api.get("namespaces/default/events")["items"]
            return [each for each in events if each["reason"] == "GPUMemoryPastLimit"]

        (told,) = until(told_of, "the watchdog's event")
        saw("its event", told["message"])
        assert told["involvedObject"]["name"] == "host"
        for each in (host, neighbour):
            assert each.ask("memory")["went_on"]


@pytest.mark.parametrize("policy", ["cap", "fair"])
def test_two_pods_divide_the_compute_of_a_card(card: CardNode, policy: str) -> None:
    labels = {"ack.node.gpu.schedule": "core_mem", "cgpu": None, "gpuslice.io/compute-policy": policy}
    with ExitStack() as stack:
        stack.enter_context(_labelled(card, labels))
        card.cluster.offers(len(card.cards) * card.units, len(card.cards))
        tenants: list[Tenant] = []
        for name, percent in (("thirty", 30), ("seventy", 70)):
            tenants.append(stack.enter_context(card.tenant(name, UNITS, percent)))
        for each in tenants:
            each.ask(f"warm {card.work}")
        for each in tenants:
            each.say(f"busy {card.work} 10")
        time.sleep(6)
        names = ("sm_utilization_ratio", "compute_share_ratio", "throttled_seconds_total")
        figures = {name: card.metrics(f"gpuslice_container_{name}") for name in names}
        page = f"http://127.0.0.1:{card.exporter_port}/metrics"
        saw(
            f"gpuslice top --once, 30 and 70, {policy}",
            card.says(*GPUSLICE, "top", "--once", f"--exporter={page}"),
        )
        rates = [each.hear() for each in tenants]
        alone = [each.ask(f"busy {card.work} 3") for each in tenants]
        saw(
            f"shares, {policy}",
            f"metrics: {json.dumps(figures, indent=1)}\ncalls a second together: {rates}, alone: {alone}",
        )
        assert figures["compute_share_ratio"].items() >= {"thirty": 0.3, "seventy": 0.7}.items()
        width = 0.1 if card.simulated else 0.05
        assert abs(rates[0] / sum(rates) - 0.3) < width
        assert (alone[0] > 1.5 * rates[0]) == (policy == "fair"), "an idle neighbour lends its share, or not"
        card.cluster.clear()


def test_labels_switch_the_node_between_its_modes(card: CardNode) -> None:
    total = len(card.cards) * card.units
    with card.tenant("held", UNITS) as held, _labelled(card, {"gpuslice.io/mode": "exclusive"}):
        until(lambda: card.cluster.allocatable()[0] == str(UNITS), f"{card.cluster.allocatable()}")
        card.cluster.create(pod("new", container(UNITS), nodeName=NODE))
        saw("a new pod on an exclusive node", card.cluster.failed("new"))
        assert held.ask("memory")["total_mib"] == card.limit_mib(UNITS)
    card.cluster.clear()
    with _labelled(card, {"cgpu.disable.isolation": "true"}):
        card.cluster.offers(total, len(card.cards))
        with card.tenant("open", UNITS) as tenant:
            saw("nvidia-smi without isolation", tenant.runs("nvidia-smi"))
            told = tenant.runs("env")
            assert "CGPU_DISABLE=true" in told
            assert tenant.runs("cat", "/proc/1/maps").count("libgpuslice") == 0
        card.cluster.clear()
    with card.tenant("again", UNITS) as tenant:
        assert tenant.ask("memory")["total_mib"] == card.limit_mib(UNITS)


@pytest.mark.skipif(TOO_OLD, reason=f"claims of parts of cards need Kubernetes 1.{CLAIMS_SINCE}")
def test_a_claim_gets_its_part_of_the_card(card: CardNode) -> None:
    with _labelled(card, {"gpuslice.io/mode": "claims"}, registers=False):
        until(lambda: len(devices(card.cluster)) == len(card.cards), "the cards are published")
        card.cluster.api.create(f"{API}/deviceclasses", CLASS)
        claim(card.cluster, "part", request("gpu", f"{UNITS}Gi"))
        document = claiming("claims", "part", using(script=card.script("claims")))
        with card.tenant("claims", 0, document=document) as tenant:
            saw("nvidia-smi of a claim", tenant.runs("nvidia-smi"))
            told = tenant.ask("memory")
            saw("memory of a claim", json.dumps(told, indent=1))
            assert told["total_mib"] == card.limit_mib(UNITS)
            assert told["got_mib"] <= card.limit_mib(UNITS)
            status = card.cluster.api.get(f"{CLAIMS}/part")["status"]
            saw("status of the claim", json.dumps(status.get("devices"), indent=1))
        card.cluster.clear()


@contextmanager
def _labelled(card: CardNode, labels: dict[str, str | None], *, registers: bool = True) -> Iterator[None]:
    """The node with these labels; the agent reads them at its start."""
    cluster = card.cluster
    before = cluster.node()["metadata"]["labels"]

    def relabel(wanted: dict[str, str | None]) -> None:
        cluster.agent.stop()
        cluster.api.patch(f"nodes/{NODE}", {"metadata": {"labels": wanted}})
        cluster.agent.start()

    relabel(labels)
    if registers:
        cluster.registered()
    try:
        yield
    finally:
        relabel({name: before.get(name) for name in labels})
    if registers:
        cluster.registered()
        cluster.offers(len(card.cards) * card.units, len(card.cards))


def _cards(card: CardNode, name: str) -> str:
    found: str = card.cluster.pod(name)["metadata"]["annotations"][ANN_INDEX]
    return found
