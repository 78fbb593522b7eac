"""The agent on the way of one pod: from kubelet's question to the limits and the annotations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gpuslice.adapters.kube.resources import NODES, PODS
from gpuslice.adapters.region import layout
from gpuslice.adapters.region.reader import Counts, prepare_region, read_region
from gpuslice.apps.exporter.isolation import CHECK_EVERY, Isolation, IsolationReader
from gpuslice.core.attribution import ContainerKey
from simcluster.kubelet.devices import AdmissionError
from tests.builders import api_container
from tests.integration.agent_bench import Bench, Pod, container, eventually, uuid

V100 = 16130
T4 = 15079


async def test_a_pod_gets_its_annotated_card_env_mounts_and_limit(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: V100, 1: V100}).running() as node:
        pod = await node.place("p", 4, 1)
        granted = (await node.kubelet.admit(pod))["main"]
        assert dict(granted.envs) == {
            "NVIDIA_VISIBLE_DEVICES": uuid(1),
            "ALIYUN_COM_GPU_MEM_IDX": "1",
            "ALIYUN_COM_GPU_MEM_POD": "4",
            "ALIYUN_COM_GPU_MEM_CONTAINER": "4",
            "ALIYUN_COM_GPU_MEM_DEV": "15",
        }
        mounts = {mount.container_path: (mount.host_path, mount.read_only) for mount in granted.mounts}
        preload, read_only = mounts["/etc/ld.so.preload"]
        assert read_only
        assert Path(preload).read_text() == "/usr/lib/gpuslice/libgpuslice.so\n"
        assert (Path(mounts["/usr/lib/gpuslice"][0]) / "libgpuslice.so").read_bytes() == b"the library"
        etc, var = Path(mounts["/etc/gpuslice"][0]), Path(mounts["/var/lib/gpuslice"][0])
        assert list(etc.iterdir()) == []
        assert not mounts["/var/lib/gpuslice"][1]
        await node.kubelet.start_container(pod)
        assert (etc / "limits").read_text() == (
            f"gpuslice 1\n{uuid(1)} memory=4509925376 share=-\nend 1\n"  # 4301 MiB
        )
        assert var.stat().st_mode & 0o777 == 0o777
        said = await node.annotations("p")
        assert said["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"
        assert int(said["ALIYUN_COM_GPU_MEM_ASSUME_TIME"]) > 1_700_000_000_000_000_000
        assert said["ALIYUN_COM_GPU_MEM_IDX"] == "1"


async def test_cards_are_cut_by_their_own_size_and_keep_their_minor_numbers(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: V100, 2: T4}).running() as node:
        assert node.kubelet.healthy() == 15 + 14
        pod = await node.place("p", 14, 2)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["ALIYUN_COM_GPU_MEM_IDX"] == "2"
        assert granted.envs["ALIYUN_COM_GPU_MEM_DEV"] == "14"


async def test_the_node_says_which_cards_it_has_and_says_it_again(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: V100, 2: T4}, {"ack.node.gpu.schedule": "core_mem"}).running() as node:

        async def status() -> bool:
            found = (await node.node_object()).get("status", {})
            wanted = {"aliyun.com/gpu-count": "2", "aliyun.com/gpu-core.percentage": "200"}
            return all(wanted.items() <= found.get(side, {}).items() for side in ("capacity", "allocatable"))

        await eventually(status, "gpu-count in node status")
        zeroed = {"aliyun.com/gpu-count": "0", "aliyun.com/gpu-core.percentage": "0"}
        await node.client.patch_status(NODES, "n1", {"capacity": zeroed, "allocatable": zeroed})
        await eventually(status, "gpu-count again")
        cards = json.loads((await node.node_object())["metadata"]["annotations"]["gpuslice.io/gpus"])
        assert [(card["index"], card["memory_mib"], card["units"]) for card in cards] == [
            (0, V100, 15),
            (2, T4, 14),
        ]


async def test_a_node_offers_its_cards_under_the_names_that_were_chosen(tmp_path: Path) -> None:
    settings = {"resource_names": "gpuslice.io"}
    labels = {"ack.node.gpu.schedule": "core_mem"}
    async with Bench(tmp_path, {0: V100, 1: V100}, labels, settings).running() as node:

        async def status() -> bool:
            amounts = (await node.node_object()).get("status", {}).get("capacity", {})
            return all(
                amounts.get(f"gpuslice.io/{n}") == v for n, v in {"cards": "2", "compute": "200"}.items()
            )

        await eventually(status, "the neutral names in node status")
        limits = {"gpuslice.io/memory": "4", "gpuslice.io/compute": "30"}
        pod = await node.place("p", 4, 1, containers=[api_container(**limits)])
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["NVIDIA_VISIBLE_DEVICES"] == uuid(1)
        await node.kubelet.start_container(pod)
        assert (await node.annotations("p"))["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"
        (limits_file,) = (tmp_path / "host" / "containers").glob("*/etc/limits")
        assert " memory=4509925376 share=30" in limits_file.read_text()


async def test_a_pod_with_two_containers_gets_both_on_its_card(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: V100, 1: V100}).running() as node:
        pod = await node.place("p", 0, 1, containers=[container(2, "a"), container(3, "b")])
        granted = await node.kubelet.admit(pod)
        assert [granted[name].envs["ALIYUN_COM_GPU_MEM_CONTAINER"] for name in "ab"] == ["2", "3"]
        assert {granted[name].envs["ALIYUN_COM_GPU_MEM_POD"] for name in "ab"} == {"5"}
        assert node.kubelet.cards(pod, "a") == node.kubelet.cards(pod, "b") == {uuid(1)}
        await node.kubelet.start_container(pod, "a")
        said = await node.annotations("p")
        assert json.loads(said["scheduler.framework.gpushare.allocation"]) == {"0": {"1": 2}, "1": {"1": 3}}


async def test_a_pod_on_four_cards_gets_the_same_from_each(tmp_path: Path) -> None:
    cards = {0: V100, 1: V100, 2: V100, 3: V100, 4: V100}
    async with Bench(tmp_path, cards).running() as node:
        pod = await node.place("p", 8, 0, 1, 3, 4, labels={"aliyun.com/gpu-count": "4"})
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuid(card) for card in (0, 1, 3, 4))
        assert granted.envs["ALIYUN_COM_GPU_MEM_IDX"] == "0,1,3,4"
        assert granted.envs["ALIYUN_COM_GPU_MEM_CONTAINER"] == "2"
        assert granted.envs["ALIYUN_COM_GPU_MEM_POD"] == "8"
        await node.kubelet.start_container(pod)
        (limits,) = (tmp_path / "host" / "containers").glob("*/etc/limits")
        assert limits.read_text().count(f" memory={2150 << 20} ") == 4


async def test_an_init_container_and_a_sidecar_stay_on_the_pods_card(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: V100, 1: V100}).running() as node:
        init = [container(6, "init"), {**container(2, "side"), "restartPolicy": "Always"}]
        pod = await node.place("p", 0, 1, containers=[container(3, "app")], initContainers=init)
        await node.kubelet.admit(pod)
        for name in ("init", "side", "app"):
            assert node.kubelet.cards(pod, name) == {uuid(1)}
        assert node.kubelet.ids(pod, "app") <= node.kubelet.ids(pod, "init")
        for name, mib in (("init", 6452), ("side", 2150), ("app", 3226)):
            await node.kubelet.start_container(pod, name)
            written = list((tmp_path / "host" / "containers").glob("*/etc/limits"))
            assert any(f"memory={mib << 20} " in path.read_text() for path in written), name
        owners = (tmp_path / "host" / "containers").glob("*/owner.json")
        assert {json.loads(owner.read_text())["container"] for owner in owners} == {"init", "side", "app"}
        said = await node.annotated("p", ASSIGNED="true", IDX="1")
        assert said["ALIYUN_COM_GPU_MEM_POD"] == "6"


async def placed_on_two_cards(node: Bench, *containers: Pod) -> Pod:
    """With an init container of two units of each."""
    init, labels = [container(4, "init")], {"aliyun.com/gpu-count": "2"}
    return await node.place("p", 0, 0, 2, containers=[*containers], initContainers=init, labels=labels)


@pytest.mark.parametrize("seed", range(4))
async def test_on_several_cards_containers_may_use_an_init_containers_devices_again(
    tmp_path: Path, seed: int
) -> None:
    """kubelet takes any of them, perhaps all of one card; the other containers are spread as asked for."""
    async with Bench(tmp_path, {0: V100, 1: V100, 2: V100}, seed=seed).running() as node:
        pod = await placed_on_two_cards(node, container(2, "a"), container(6, "b"))
        granted = await node.kubelet.admit(pod)
        assert node.kubelet.ids(pod, "a") <= node.kubelet.ids(pod, "init")
        for name in ("init", "a", "b"):
            assert node.kubelet.cards(pod, name) <= {uuid(0), uuid(2)}
            seen = set(granted[name].envs["NVIDIA_VISIBLE_DEVICES"].split(","))
            assert seen == node.kubelet.cards(pod, name)
            await node.kubelet.start_container(pod, name)


@pytest.mark.parametrize("seed", range(6))
async def test_what_an_init_container_alone_holds_stays_counted_on_its_cards(
    tmp_path: Path, seed: int
) -> None:
    """kubelet may have given the app container both units of one card; it keeps the others for the pod."""
    async with Bench(tmp_path, {0: V100, 1: V100, 2: V100}, seed=seed).running() as node:
        await node.kubelet.admit(await placed_on_two_cards(node, container(2, "app")))
        said = await node.annotated("p", ASSIGNED="true")
        sums = Counter[str]()
        for cards in json.loads(said["scheduler.framework.gpushare.allocation"]).values():
            sums.update(cards)
        assert sums == {"0": 2, "2": 2}
        assert said["ALIYUN_COM_GPU_MEM_IDX"] == "0,2"


async def test_a_share_of_compute_is_written_into_the_limits(tmp_path: Path) -> None:
    async with Bench(tmp_path, labels={"ack.node.gpu.schedule": "core_mem"}).running() as node:
        spec = container(4, **{"aliyun.com/gpu-core.percentage": "30"})
        pod = await node.place("p", 0, 0, containers=[spec])
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        (limits,) = (tmp_path / "host" / "containers").glob("*/etc/limits")
        assert " share=30\n" in limits.read_text()


@pytest.mark.parametrize("labels", [{"cgpu.disable.isolation": "true"}, {"ack.node.gpu.schedule": "share"}])
async def test_without_isolation_the_env_says_so_and_nothing_is_mounted(
    tmp_path: Path, labels: dict[str, str]
) -> None:
    async with Bench(tmp_path, labels=labels).running() as node:
        pod = await node.place("p", 3, 0)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["CGPU_DISABLE"] == "true"
        assert granted.envs["ALIYUN_COM_GPU_MEM_CONTAINER"] == "3"
        assert not granted.mounts
        await node.kubelet.start_container(pod)
        assert (await node.annotations("p"))["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"


@pytest.mark.parametrize(("allowed", "limit"), [(True, "-"), (False, "3382706176")])
async def test_a_container_may_exempt_itself_from_the_limit_where_that_is_allowed(
    tmp_path: Path, allowed: bool, limit: str
) -> None:
    async with Bench(tmp_path, settings={"allow_cgpu_disable": allowed}).running() as node:
        spec = {**container(3), "env": [{"name": "CGPU_DISABLE", "value": "true"}]}
        pod = await node.place("p", 0, 0, containers=[spec])
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        (limits,) = (tmp_path / "host" / "containers").glob("*/etc/limits")
        assert f"{uuid(0)} memory={limit} share=-\n" in limits.read_text()


async def test_on_a_node_with_one_card_a_pod_that_nobody_placed_gets_it_and_the_annotation(
    tmp_path: Path,
) -> None:
    async with Bench(tmp_path).running() as node:
        pod = await node.place("p", 4)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["NVIDIA_VISIBLE_DEVICES"] == uuid(0)
        said = await node.annotated("p", IDX="0", POD="4", DEV="15", ASSIGNED="true")
        assert json.loads(said["scheduler.framework.gpushare.allocation"]) == {"0": {"0": 4}}


async def test_on_a_node_with_several_cards_such_a_pod_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: V100, 1: V100}).running() as node:
        pod = await node.place("p", 4)
        with pytest.raises(AdmissionError, match="no pod that waits on node n1 was placed with 4 units"):
            await node.kubelet.admit(pod)


async def test_as_an_option_the_refusal_is_the_vendors_poison(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {0: V100, 1: V100}, settings={"legacy_poison_env": True})
    async with bench.running() as node:
        pod = await node.place("p", 4)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["NVIDIA_VISIBLE_DEVICES"] == "no-gpu-has-4GiB-to-run"
        assert granted.envs["ALIYUN_COM_GPU_MEM_IDX"] == "-1"


async def test_a_pod_that_no_card_can_hold_is_told_what_is_free(tmp_path: Path) -> None:
    async with Bench(tmp_path, {0: V100, 1: V100}).running() as node:
        for name, card in (("a", 0), ("b", 1)):
            await node.kubelet.admit(await node.place(name, 12, card))
        pod = await node.place("c", 4, 0)
        with pytest.raises(
            AdmissionError, match=r"no room for 4 units .* \(free units: card 0: 3, card 1: 3\)"
        ):
            await node.kubelet.admit(pod)


async def test_a_container_that_starts_again_gets_a_fresh_region(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        pod = await node.place("p", 4, 0)
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        (folder,) = (tmp_path / "host" / "containers").iterdir()
        (folder / "var" / "region").write_bytes(b"of the first life")
        await node.kubelet.start_container(pod)
        assert [each.name for each in (folder / "var").iterdir()] == ["region"]
        assert read_region(folder / "var" / "region") is None  # nobody has written in it
        owner = json.loads((folder / "owner.json").read_text())
        assert (owner["namespace"], owner["pod"], owner["container"]) == ("default", "p", "main")


async def test_the_counters_of_a_container_that_crashes_again_and_again_go_on(tmp_path: Path) -> None:
    """An alert looks for their growth: one refusal a life must not look like one refusal ever."""
    async with Bench(tmp_path).running() as node:
        pod = await node.place("p", 4, 0)
        await node.kubelet.admit(pod)
        exporter, key = IsolationReader(tmp_path / "host"), ContainerKey("default", "p", "main")
        seen = []
        for _ in range(3):
            await node.kubelet.start_container(pod)
            (folder,) = (tmp_path / "host" / "containers").iterdir()
            seen += [(await looked_at_closely(exporter)).counts(key, uuid(0))]
            write_one_refusal(folder / "var" / "region")
        seen += [(await looked_at_closely(exporter)).counts(key, uuid(0))]
        assert seen == [Counts(0, 0), Counts(1, 500), Counts(2, 1000), Counts(3, 1500)]


async def test_the_counters_of_another_pod_with_the_same_ids_begin_at_nothing(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        first = await node.place("p", 15, 0)
        await node.kubelet.admit(first)
        await node.kubelet.start_container(first)
        (folder,) = (tmp_path / "host" / "containers").iterdir()
        write_one_refusal(folder / "var" / "region")
        node.kubelet.remove(first)
        await node.client.delete(PODS, "p", "default", grace_s=0)
        second = await node.place("q", 15, 0)
        await node.kubelet.admit(second)
        await node.kubelet.start_container(second)
        found = await looked_at_closely(IsolationReader(tmp_path / "host"))
        assert found.counts(ContainerKey("default", "q", "main"), uuid(0)) == Counts(0, 0)


async def looked_at_closely(exporter: IsolationReader) -> Isolation:
    for _ in range(CHECK_EVERY - 1):
        await exporter.read()
    return await exporter.read()


def write_one_refusal(region: Path) -> None:
    """As the library would: one refused allocation, and 500 ns of waiting."""
    prepare_region(region)
    head = layout.RegionHead(magic=layout.MAGIC | layout.VERSION)
    head.cards[0].key, head.cards[0].uuid = 1, uuid(0).encode()
    head.cards[0].refused, head.cards[0].throttled_ns = 1, 500
    with region.open("r+b") as file:
        file.write(bytes(head))


async def test_the_folder_of_a_pod_that_is_gone_is_swept(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings={"sweep_after_s": 1.0}).running() as node:
        stays, goes = await node.place("stays", 4, 0), await node.place("goes", 5, 0)
        for pod in (stays, goes):
            await node.kubelet.admit(pod)
            await node.kubelet.start_container(pod)
        containers = tmp_path / "host" / "containers"
        assert len(list(containers.iterdir())) == 2
        node.kubelet.remove(goes)
        await node.client.delete(PODS, "goes", "default", grace_s=0)
        await eventually(lambda: len(list(containers.iterdir())) == 1, "the folder is swept")
        (left,) = containers.iterdir()
        assert json.loads((left / "owner.json").read_text())["pod"] == "stays"
