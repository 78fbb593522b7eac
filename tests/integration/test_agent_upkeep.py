"""What the agent owns comes back within 5 s, whatever others do to it while it runs or while it does not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import CONFIG_MAPS, EVENTS, NODES, PODS, RESOURCE_SLICES
from gpuslice.adapters.region import layout
from gpuslice.apps.agent.folder_upkeep import EVERY_S
from gpuslice.core.contract import NODE_GPUS, NODE_KUBELET_AWAY, NODE_LINKS, NODE_TIER
from simcluster.cluster.faults import Fault
from tests.integration.agent_bench import NODE, Bench, container, eventually, uuid
from tests.integration.claims_rig import ClaimBench, claim_node, result

V100 = 16130
WITHIN_S = 5.0
LINKS = ((0, 1, 1), (0, 2, 3), (1, 2, 1))
DAMAGES = ("deleted", "emptied", "changed", "restored")
Damage = str


class Thing:
    """One thing that the agent owns: what it is now, and what others can make of it."""

    def __init__(
        self, read: Callable[[], Awaitable[Any]], damage: Callable[[Damage, Any], Awaitable[None]]
    ) -> None:
        self.read = read
        self.damage = damage


# -- in the API ---------------------------------------------------------------------------------------------
def annotation(node: Bench, name: str) -> Thing:
    async def read() -> Any:
        return ((await node.node_object())["metadata"].get("annotations") or {}).get(name)

    async def damage(how: Damage, now: Any) -> None:
        text = {"deleted": None, "emptied": "", "changed": f"{now}x", "restored": "an older text"}[how]
        await node.client.merge_patch(NODES, NODE, {"metadata": {"annotations": {name: text}}})

    return Thing(read, damage)


def amount(node: Bench, side: str) -> Thing:
    async def read() -> Any:
        return (await node.node_object())["status"][side].get("aliyun.com/gpu-count")

    async def damage(how: Damage, now: Any) -> None:
        text = {"deleted": None, "emptied": "0", "changed": "7", "restored": "1"}[how]
        await node.client.patch_status(NODES, NODE, {side: {"aliyun.com/gpu-count": text}})

    return Thing(read, damage)


def pod_annotation(node: Bench, name: str) -> Thing:
    async def read() -> Any:
        return (await node.annotations("p")).get(name)

    async def damage(how: Damage, now: Any) -> None:
        text = {"deleted": None, "emptied": "", "changed": "2", "restored": "1"}[how]
        await node.client.merge_patch(PODS, "p", {"metadata": {"annotations": {name: text}}}, "default")

    return Thing(read, damage)


def sick_cards(node: Bench) -> Thing:
    name = f"unhealthy-gpu-{NODE}"

    async def read() -> Any:
        with contextlib.suppress(NotFoundError):
            return (await node.client.get(CONFIG_MAPS, name, "kube-system")).data

    async def damage(how: Damage, now: Any) -> None:
        if how == "deleted":
            await node.client.delete(CONFIG_MAPS, name, "kube-system")
            return
        data = {
            "emptied": None,
            "changed": {**now, "gpus": "", "agent": "", "reasons": "none"},
            "restored": {"gpus": "0", "agent": "0", "faults": uuid(0), "reasons": "0: Xid 79"},
        }[how]
        await node.client.merge_patch(CONFIG_MAPS, name, {"data": data}, "kube-system")

    return Thing(read, damage)


def slices(bench: ClaimBench) -> Thing:
    async def read() -> Any:
        found = await bench.slices()
        return [(each["spec"].get("devices"), each["metadata"].get("ownerReferences")) for each in found]

    async def damage(how: Damage, now: Any) -> None:
        (found,) = await bench.slices()
        if how == "deleted":
            await bench.node.client.delete(RESOURCE_SLICES, found["metadata"]["name"])
            return
        if how == "emptied":
            found["spec"]["devices"] = []
        elif how == "changed":
            del found["metadata"]["ownerReferences"]
        else:
            found["spec"]["devices"] = found["spec"]["devices"][:1]
        await bench.node.client.replace(RESOURCE_SLICES, found)

    return Thing(read, damage)


# -- on the disk --------------------------------------------------------------------------------------------
def file(path: Path, older: bytes = b"older") -> Thing:
    async def read() -> Any:
        with contextlib.suppress(OSError):
            return path.read_bytes(), path.stat().st_mode & 0o777

    async def damage(how: Damage, now: Any) -> None:
        if how == "deleted":
            path.unlink()
        elif how == "emptied":
            os.truncate(path, 0)
        elif how == "changed":
            path.write_bytes(now[0][:-1] + b"x")
            path.chmod(0o666)
        else:
            path.unlink()
            path.write_bytes(older)

    return Thing(read, damage)


def folder(path: Path) -> Thing:
    def tree() -> Any:
        if not path.is_dir():
            return None
        return path.stat().st_mode & 0o7777, sorted(str(each.relative_to(path)) for each in path.rglob("*"))

    async def read() -> Any:
        return tree()

    async def damage(how: Damage, now: Any) -> None:
        if how == "changed":
            path.chmod(0o777 if now[0] != 0o777 else 0o755)
        else:
            shutil.rmtree(path)
        if how == "emptied":
            path.mkdir()
        elif how == "restored":
            path.write_bytes(b"of an older node")

    return Thing(read, damage)


def shared_of(node: Bench) -> dict[str, Thing]:
    """What a node that shares its cards owns, beside a running container and a sick card."""
    root = node.folder / "host"
    (home,) = (each for each in (root / "containers").glob("*") if each.name != ".trash")
    (library,) = (root / "lib").glob("*")
    (claim,) = (root / "cards").glob("*/*/claim")
    return {
        "annotation of the cards": annotation(node, NODE_GPUS),
        "annotation of the tier": annotation(node, NODE_TIER),
        "annotation of the links": annotation(node, NODE_LINKS),
        "capacity": amount(node, "capacity"),
        "allocatable": amount(node, "allocatable"),
        "ConfigMap of sick cards": sick_cards(node),
        "annotation of a pod's card": pod_annotation(node, "ALIYUN_COM_GPU_MEM_IDX"),
        "annotation of a pod's start": pod_annotation(node, "ALIYUN_COM_GPU_MEM_ASSIGNED"),
        "limits": file(home / "etc" / "limits", f"gpuslice 1\n{uuid(0)} memory=9 share=-\nend 1\n".encode()),
        "owner": file(home / "owner.json", json.dumps({"ids": ["other"], "uid": "u", "pod": "q"}).encode()),
        "preloaded": file(home / "ld.so.preload"),
        "library": file(library / "libgpuslice.so"),
        "folder of the library": folder(library),
        "folder of a container": folder(home),
        "folder of limits": folder(home / "etc"),
        "folder of the region": folder(home / "var"),
        "folder of containers": folder(root / "containers"),
        "claim of compute": folder(claim.parent),
        "folder of claims of compute": folder(root / "cards"),
        "folder of the lock": folder(root / "active"),
    }


MODES_LEFT_ALONE = {
    "folder of CDI files", "folder of records", "folder of the library", "folder of a container",
    "folder of limits", "claim of compute",
}  # fmt: skip
"""Nobody but root gets into the folders above them."""
SHARED = sorted(
    {
        "annotation of the cards", "annotation of the tier", "annotation of the links", "capacity",
        "allocatable", "ConfigMap of sick cards", "annotation of a pod's card", "annotation of a pod's start",
        "limits", "owner", "preloaded", "library", "folder of the library", "folder of a container",
        "folder of limits", "folder of the region", "folder of containers", "claim of compute",
        "folder of claims of compute", "folder of the lock",
    }
)  # fmt: skip


@contextlib.asynccontextmanager
async def sharing(tmp_path: Path) -> AsyncIterator[Bench]:
    cards = dict.fromkeys(range(3), V100)
    labels = {"ack.node.gpu.schedule": "core_mem"}
    settings = {"recovery_s": 600.0}
    async with Bench(tmp_path, cards, labels, settings).running() as node:
        links = [{"uuid": uuid(one), "other": uuid(two), "link": link} for one, two, link in LINKS]
        node.record(cards, events=[{"xid": 79, "uuid": uuid(2)}], links=links)
        main = container(4, **{"aliyun.com/gpu-core.percentage": "30"})
        pod = await node.place("p", 4, 0, containers=[main])
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        await runs(node, "p")
        await node.annotated("p", ASSIGNED="true", IDX="0")
        await eventually(node.unhealthy, "the ConfigMap of sick cards")
        yield node


async def runs(node: Bench, name: str) -> None:
    """As kubelet reports after it has started the container."""
    status = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}
    await node.client.patch_status(PODS, name, status, "default")


async def comes_back(thing: Thing, before: Any, what: str) -> None:
    async def is_back() -> bool:
        return bool(await thing.read() == before)

    await eventually(is_back, f"{what} is as it was", WITHIN_S)


def hurried(bench: Bench) -> None:
    """It looks more often than it does on a real node, so that the tests take less time."""
    assert EVERY_S < WITHIN_S - 1
    for each in (bench.agent.files, bench.agent.node.upkeep, bench.agent.cards.upkeep):
        each.every_s = 0.1
        each.wake()


async def withstands(thing: Thing, what: str, bench: Bench, *, restarted: bool) -> None:
    """Each damage is made good, by the agent that runs or by the next one."""
    hurried(bench)
    before = await eventually(thing.read, f"{what} is there")
    for how in DAMAGES:
        if how == "changed" and what in MODES_LEFT_ALONE:
            continue
        if how == "restored" and what == "ConfigMap of sick cards" and restarted:
            continue  # it is all that an agent knows of faults that an earlier one found
        if restarted:
            await eventually(lambda: not bench.agent.not_ready(), "the agent serves kubelet")
            await bench.kill_agent()
        await thing.damage(how, before)
        if restarted:
            await bench.start_agent()
            hurried(bench)
        await comes_back(thing, before, f"{how}: {what}")
    await eventually(lambda: not bench.agent.not_ready(), "the agent serves kubelet")


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("what", SHARED)
async def test_what_the_agent_of_a_shared_node_owns_comes_back(
    tmp_path: Path, what: str, restarted: bool
) -> None:
    async with sharing(tmp_path) as node:
        things = shared_of(node)
        assert things.keys() == set(SHARED)
        await withstands(things[what], what, node, restarted=restarted)


CLAIMED = (
    "CDI file",
    "record",
    "ResourceSlices",
    "folder of CDI files",
    "folder of records",
    "limits",
    "owner",
)


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("what", CLAIMED)
async def test_what_the_agent_of_a_node_of_claims_owns_comes_back(
    tmp_path: Path, what: str, restarted: bool
) -> None:
    async with claim_node(tmp_path) as bench:
        await bench.offered("gpu-0")
        pod = await bench.pod("p", "a", ("main", ""))
        claim = await bench.claim("a", result("4Gi"), pod=pod)
        assert not (await bench.prepare(claim)).error
        await eventually(lambda: _says_less(bench), "what the claim holds is published")
        root = bench.node.folder / "host"
        (record,) = (root / "claims").glob("*.json")
        (home,) = (root / "containers").glob("claim-*")
        (cdi,) = bench.cdi.iterdir()
        things = {
            "CDI file": file(cdi),
            "record": file(record),
            "ResourceSlices": slices(bench),
            "folder of CDI files": folder(bench.cdi),
            "folder of records": folder(record.parent),
            "limits": file(home / "etc" / "limits"),
            "owner": file(home / "owner.json"),
        }
        await withstands(things[what], what, bench.node, restarted=restarted)


async def _says_less(bench: ClaimBench) -> bool:
    return len(await bench.slices()) == 1 and bench.node.agent.claims.publisher.upkeep.settled


# -- what cannot be put back, and what it costs -------------------------------------------------------------
async def told(node: Bench) -> list[tuple[str, int]]:
    """The events about what cannot be repaired, with how often each was told."""
    events = (await node.client.list(EVENTS, "default")).items or []
    return [(each.message, each.count) for each in events if each.reason == "GPUNotRepaired"]


async def test_what_the_agent_may_not_write_is_told_once_and_written_when_it_may(tmp_path: Path) -> None:
    async with sharing(tmp_path) as node:
        hurried(node)
        refused = Fault(method="PATCH", path="/api/v1/nodes/.*", code=403, times=1000)
        node.cluster.add_fault(refused)
        await node.kubelet.stop()
        what = f"annotation {NODE_KUBELET_AWAY} of the node"
        await eventually(lambda: what in node.agent.node.upkeep.problems, "it cannot be written")

        async def counts() -> list[int]:  # what else cannot be written has events of its own
            return [count for message, count in await told(node) if message.startswith(f"{what}: ")]

        await eventually(counts, "an event")
        await eventually(lambda: refused.times is not None and refused.times < 998, "tried again")
        assert await counts() == [1]
        assert f'gpuslice_agent_not_repaired{{what="{what}"}} 1' in page(node)
        node.cluster.faults.clear()
        await comes_back(annotation(node, NODE_KUBELET_AWAY), "true", "the annotation")
        await eventually(lambda: "gpuslice_agent_not_repaired{" not in page(node), "nothing is wrong")
        await node.kubelet.start()


@pytest.mark.parametrize("trap", [".region.{pid}", "region"])
async def test_a_region_that_a_tenant_removes_comes_back_and_its_links_lead_nowhere(
    tmp_path: Path, trap: str
) -> None:
    async with sharing(tmp_path) as node:
        (var,) = (node.folder / "host" / "containers").glob("*/var")
        victim = tmp_path / "of-the-host"
        victim.write_bytes(b"as it was")
        victim.chmod(0o640)
        (var / "region").unlink()
        (var / trap.format(pid=os.getpid())).symlink_to(victim)
        hurried(node)
        region = var / "region"
        await eventually(lambda: region.is_file() and not region.is_symlink(), "a region")
        assert victim.read_bytes() == b"as it was"
        assert stat.S_IMODE(victim.stat().st_mode) == 0o640
        assert (region.stat().st_size, stat.S_IMODE(region.stat().st_mode)) == (layout.REGION_BYTES, 0o666)


async def test_a_library_of_an_older_agent_that_is_damaged_is_told(tmp_path: Path) -> None:
    async with sharing(tmp_path) as node:
        (path,) = (node.folder / "host" / "lib").glob("*/libgpuslice.so")
        older = path.parent.with_name("0123456789abcdef") / path.name
        older.parent.mkdir()
        older.write_bytes(b"not what its name says")
        (owner,) = (node.folder / "host" / "containers").glob("*/owner.json")
        name, known = owner.parent.name, node.agent.folders.records[owner.parent.name]
        node.agent.folders.records[name] = msgspec.structs.replace(known, library=older.parent.name)
        hurried(node)
        ((message, _),) = await eventually(lambda: told(node), "an event")
        assert message == (
            f"library {older}: only an agent of that version could restore it; recreate the pods that use it"
        )


async def test_what_is_as_it_ought_to_be_costs_the_api_server_nothing(tmp_path: Path) -> None:
    async with sharing(tmp_path) as node:
        hurried(node)
        upkeeps = (node.agent.files, node.agent.node.upkeep, node.agent.cards.upkeep)
        await eventually(lambda: all(each.settled for each in upkeeps), "everything is as it ought to be")
        # delays by nothing; of what was made good before, events may still be on their way
        counting = Fault(path=r"(?!.*/events).*", times=1000)
        node.cluster.add_fault(counting)
        for _ in range(20):
            for each in upkeeps:
                await each.round()
        assert all(each.settled for each in upkeeps)
        assert counting.times == 1000


def page(node: Bench) -> str:
    return "".join(
        f"{family.name}{labels} {value:g}\n"
        for family in node.agent.status().families()
        for labels, value in family.samples
    )
