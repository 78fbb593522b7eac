"""What containers hold whose pods are gone is shown on the node, and nothing is granted beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import NODES, PODS
from gpuslice.core.contract import NODE_ORPHANS
from simcluster.kubelet.devices import AdmissionError
from tests.integration.agent_bench import NODE, Bench, Pod, eventually

TWO = {0: 16130, 1: 16130}


async def shown(node: Bench) -> Any:
    text = ((await node.node_object())["metadata"].get("annotations") or {}).get(NODE_ORPHANS)
    return json.loads(text) if text else None


async def eventually_shown(node: Bench, wanted: Any) -> None:
    async def says() -> bool:
        return bool(await shown(node) == wanted)

    await eventually(says, f"annotated {wanted}")


async def force_deleted(node: Bench, pod: Pod) -> None:
    await node.client.delete(PODS, pod["metadata"]["name"], "default", grace_s=0)
    await eventually(lambda: node.agent.state.pod(pod["metadata"]["uid"]) is None)


def in_container(node: Bench, pod: Pod, pid: int = 4711) -> Path:
    """A process of the pod, as the node's /proc shows it."""
    place = node.folder / "proc" / str(pid)
    place.mkdir(parents=True)
    uid = pod["metadata"]["uid"].replace("-", "_")
    path = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice"
    (place / "cgroup").write_text(f"0::{path}/cri-containerd-{'ab' * 32}.scope\n")
    return place


def ended(place: Path) -> None:
    (place / "cgroup").unlink()
    place.rmdir()


async def started(node: Bench, name: str, memory: int, *cards: int) -> Pod:
    pod = await node.place(name, memory, *cards)
    await node.kubelet.admit(pod)
    await node.kubelet.start_container(pod)
    return pod


async def test_what_kubelet_lists_for_a_pod_that_is_gone_is_shown_until_it_does_not(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await started(node, "stuck", 12, 1)
        await force_deleted(node, pod)
        await eventually_shown(node, [{"pod": "default/stuck", "cards": {"1": 12}}])
        node.kubelet.remove(pod)
        await eventually_shown(node, None)


@pytest.mark.parametrize("lists", [True, False])
async def test_a_process_that_lives_on_is_shown_whether_or_not_kubelet_counts_it(
    tmp_path: Path, lists: bool
) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await started(node, "stuck", 15, 0)
        process = in_container(node, pod)
        await force_deleted(node, pod)
        if not lists:
            node.kubelet.remove(pod)
        await eventually_shown(node, [{"pod": "default/stuck", "cards": {"0": 15}}])
        if lists:
            node.kubelet.remove(pod)
            await eventually(lambda: node.agent.state.orphans)
        assert await shown(node) == [{"pod": "default/stuck", "cards": {"0": 15}}]
        ended(process)
        await eventually_shown(node, None)


async def test_nothing_is_granted_beside_a_process_that_kubelet_does_not_count(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        pod = await started(node, "stuck", 12, 0)
        process = in_container(node, pod)
        await force_deleted(node, pod)
        node.kubelet.remove(pod)
        await eventually(lambda: node.agent.state.orphans)
        late = await node.place("late", 4, 0)
        with pytest.raises(AdmissionError, match="no room for 4 units"):
            await node.kubelet.admit(late)
        small = await node.place("small", 3, 0)
        await node.kubelet.admit(small)
        ended(process)
        await eventually(lambda: not node.agent.state.orphans)
        await node.kubelet.admit(await node.place("next", 12, 0))


async def test_a_new_agent_finds_it_again_and_shows_nothing_else_meanwhile(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await started(node, "stuck", 12, 1)
        in_container(node, pod)
        await force_deleted(node, pod)
        there = [{"pod": "default/stuck", "cards": {"1": 12}}]
        await eventually_shown(node, there)
        before = (await node.node_object())["metadata"]["annotations"]
        await node.restart_agent()
        await eventually(lambda: node.agent.node.orphans)
        assert (await node.node_object())["metadata"]["annotations"] == before


async def test_what_somebody_changes_in_the_annotation_is_put_right(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        forged = {"metadata": {"annotations": {NODE_ORPHANS: '[{"pod":"default/nobody","cards":{"0":15}}]'}}}
        await node.client.merge_patch(NODES, NODE, forged)
        await eventually_shown(node, None)
        pod = await started(node, "stuck", 12, 1)
        await force_deleted(node, pod)
        await eventually_shown(node, [{"pod": "default/stuck", "cards": {"1": 12}}])
        await node.client.merge_patch(NODES, NODE, {"metadata": {"annotations": {NODE_ORPHANS: None}}})
        await eventually_shown(node, [{"pod": "default/stuck", "cards": {"1": 12}}])


async def test_a_pod_that_the_watch_shows_late_is_none(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await started(node, "known", 4, 0)
        node.agent.state.pod_gone(pod["metadata"]["uid"])  # as before the watch has shown it
        node.agent.state._gone_s.clear()
        for _ in range(3):
            await node.agent.orphans.look()
        assert node.agent.node.orphans == ()


async def test_a_pod_that_ends_as_usual_leaves_nothing(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        for number in range(3):
            pod = await started(node, f"p{number}", 15, 0)
            process = in_container(node, pod)
            ended(process)
            node.kubelet.remove(pod)
            await force_deleted(node, pod)
            for _ in range(3):
                await node.agent.reconciler.read()
                await node.agent.orphans.look()
            assert node.agent.node.orphans == ()
