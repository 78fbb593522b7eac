"""The extender as kube-scheduler and the vendor's tools know it: paths, keys, texts, card choice."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpuslice.core.contract import (
    ANN_ALLOCATION,
    ANN_ASSIGNED,
    ANN_ASSUME_TIME,
    ANN_CARD_UNITS,
    ANN_CORE,
    ANN_INDEX,
    ANN_POD_UNITS,
    GPU_CORE,
    GPU_COUNT,
    GPU_MEM,
)
from tests.builders import api_container, api_pod
from tests.integration.extender_rig import PREFIX, Api, cluster, rig, until

NO_ROOM = "Insufficient GPU Memory in one device"


async def test_version_is_plain_text() -> None:
    async with rig() as extender:
        assert await extender.get("/version") == (200, "0.1.0")
        assert (await extender.get("/healthz"))[0] == 200
        assert await extender.get("/readyz") == (200, "ok")


async def test_filter_names_the_nodes_that_hold_it() -> None:
    """kube-scheduler has no use for the reasons of others while one passes: they would cost it more."""
    async with rig(cluster(n1=(15, 1), n2=(4, 1))) as extender:
        answer = await extender.filter(api_pod(memory="8"), "n1", "n2", "ghost")
        assert set(answer) == {"Nodes", "NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "Error"}
        assert answer["NodeNames"] == ["n1"]
        assert answer["FailedNodes"] == answer["FailedAndUnresolvableNodes"] == {}


async def test_filter_says_why_where_none_does() -> None:
    async with rig(cluster(n2=(4, 1), n3=(0, 0))) as extender:
        answer = await extender.filter(api_pod(memory="8"), "n2", "n3", "ghost")
        assert answer["NodeNames"] == []
        assert answer["FailedNodes"] == {
            "n2": NO_ROOM,
            "n3": "The node n3 is not for GPU share, need skip",
            "ghost": "The node ghost is not for GPU share, need skip",
        }
        assert set(answer["FailedAndUnresolvableNodes"]) == {"n2", "n3", "ghost"}  # 4 units never hold 8
        assert (answer["Nodes"], answer["Error"]) == (None, "")


async def test_a_full_node_may_be_helped_by_preemption() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await extender.add_and_bind("a", "10")
        answer = await extender.filter(api_pod(memory="8"), "n1")
        assert answer["NodeNames"] == []
        assert answer["FailedNodes"] == {"n1": NO_ROOM}
        assert answer["FailedAndUnresolvableNodes"] == {}


async def test_filter_takes_whole_nodes_and_gives_them_back() -> None:
    async with rig(cluster(n1=(15, 1), n2=(4, 1))) as extender:
        items = [{"metadata": {"name": name, "labels": {"a": "b"}}} for name in ("n1", "n2")]
        body = {"Pod": api_pod(memory="8"), "Nodes": {"metadata": {}, "items": items}, "NodeNames": None}
        answer = await extender.post("filter", body)
        assert answer["NodeNames"] == ["n1"]
        assert answer["Nodes"]["items"] == [items[0]]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"Pod": None, "NodeNames": ["n1"]}, "arg or pod is nil"),
        ({}, "arg or pod is nil"),
        ({"Pod": api_pod(), "Nodes": None, "NodeNames": None}, "cannot get node names"),
        (b"{not json", "the request body cannot be read"),
        (b"[]", "the request body cannot be read"),
        (b"", "the request body cannot be read"),
        ({"Pod": api_pod(), "NodeNames": "n1"}, "the request body cannot be read"),
        (b"\xff\xfe", "the request body cannot be read"),
    ],
)
async def test_a_malformed_filter_gets_a_sentence(body: Any, error: str) -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        answer = await extender.post("filter", body)
        assert answer["Error"].startswith(error)
        assert await extender.prioritize(api_pod(), "n1") == {"n1": 10}  # still alive


async def test_malformed_prioritize_and_bind_are_answered_too() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        assert await extender.post("prioritize", b"{not json") == []
        assert await extender.post("prioritize", {}) == []
        assert "cannot be read" in (await extender.post("bind", b"nonsense"))["Error"]
        assert (await extender.post("bind", {"PodName": "p", "PodUID": "u"}))[
            "Error"
        ] == "PodNamespace is empty, must be a name"


async def test_outer_keys_are_read_in_any_case() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        answer = await extender.post("filter", {"pod": api_pod(), "NODENAMES": ["n1"], "other": 1})
        assert answer["NodeNames"] == ["n1"]
        pod = extender.api.add_pod()
        await extender.filter(pod, "n1")
        args = {"podname": "p", "podNamespace": "default", "poduid": pod["metadata"]["uid"], "NODE": "n1"}
        assert await extender.post("bind", args) == {"Error": ""}


@pytest.mark.parametrize("value", ["-1", "4.5", "abc", "1000000000000", "4Gi"])
async def test_a_wrong_request_names_container_and_field(value: str) -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        answer = await extender.filter(api_pod(memory=value), "n1")
        text = f'container "main": limits["aliyun.com/gpu-mem"] is "{value}", must be a whole number'
        assert answer["FailedAndUnresolvableNodes"]["n1"].startswith(text)
        assert answer["FailedNodes"]["n1"].startswith(text)
        assert (answer["NodeNames"], answer["Error"]) == ([], "")


async def test_room_split_over_two_cards_is_no_room() -> None:
    async with rig(cluster(split=(16276, 2), whole=(16276, 2))) as extender:
        await extender.add_and_bind("b", "8138", "whole")
        for card in (0, 1):
            annotations = {ANN_INDEX: str(card), ANN_POD_UNITS: "4069"}
            extender.api.add_pod(f"half-{card}", "4069", node="split", annotations=annotations)
        await extender.caught_up()
        assert (await extender.filter(api_pod(memory="8138"), "split", "whole"))["NodeNames"] == ["whole"]
        answer = await extender.filter(api_pod(memory="8138"), "split")
        assert answer["FailedNodes"] == {"split": NO_ROOM}


@pytest.mark.parametrize("policy", ["binpack", "opportunity-cost"])
async def test_bind_takes_the_fullest_card_that_fits(policy: str) -> None:
    """Free 12207/8138/4069/16276: a request of 8138 goes to card 1."""
    api = cluster(n1=(4 * 16276, 4))
    held = {0: 4069, 1: 8138, 2: 12207}
    for card, units in held.items():
        annotations = {ANN_INDEX: str(card), ANN_POD_UNITS: str(units)}
        api.add_pod(f"held-{card}", str(units), node="n1", annotations=annotations)
    async with rig(api, policy=policy) as extender:
        assert await extender.add_and_bind("p", "8138") == "1"


async def test_ties_pick_the_lowest_index() -> None:
    async with rig(cluster(n1=(60, 4))) as extender:
        assert await extender.add_and_bind("p", "8") == "0"


async def test_a_nodes_label_spreads_its_pods() -> None:
    api = Api()
    api.add_node("n1", 60, 4, labels={"ack.node.gpu.placement": "spread"})
    api.add_node("n2", 60, 4, labels={"ack.node.gpu.placement": "binpack"})
    async with rig(api, policy="opportunity-cost") as extender:
        spread = [await extender.add_and_bind(f"s{n}", "4", "n1") for n in range(4)]
        packed = [await extender.add_and_bind(f"b{n}", "4", "n2") for n in range(4)]
        assert spread == ["0", "1", "2", "3"]
        assert packed == ["0", "0", "0", "1"]


async def test_bind_annotates_and_binds() -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        assert await extender.add_and_bind("p", "4") == "0"
        annotations = extender.api.annotations()
        assume_time = annotations.pop(ANN_ASSUME_TIME)
        assert assume_time.isdecimal()
        assert len(assume_time) == 19
        vendors = {name: value for name, value in annotations.items() if not name.startswith("gpuslice.io/")}
        assert vendors == {
            ANN_INDEX: "0",
            ANN_POD_UNITS: "4",
            ANN_CARD_UNITS: "15",
            ANN_ASSIGNED: "false",
            ANN_ALLOCATION: '{"0":{"0":4}}',
        }
        assert extender.api.bound_to() == "n1"


async def test_a_pod_on_several_cards() -> None:
    async with rig(cluster(n1=(60, 4), n2=(30, 2))) as extender:
        pod = extender.api.add_pod("p", "8", labels={GPU_COUNT: "4"})
        answer = await extender.filter(pod, "n2")
        assert answer["FailedAndUnresolvableNodes"] == {"n2": "Insufficient GPU Memory in 4 devices"}
        assert (await extender.filter(pod, "n1", "n2"))["NodeNames"] == ["n1"]
        assert await extender.bind(pod) == ""
        assert extender.api.card() == "0,1,2,3"
        assert json.loads(extender.api.annotations()[ANN_ALLOCATION]) == {
            "0": {"0": 2, "1": 2, "2": 2, "3": 2}
        }
        assert await extender.used() == {0: 2, 1: 2, 2: 2, 3: 2}


async def test_an_amount_that_does_not_divide_by_the_cards_is_refused() -> None:
    async with rig(cluster(n1=(60, 4))) as extender:
        pod = extender.api.add_pod("p", "6", labels={GPU_COUNT: "4"})
        answer = await extender.filter(pod, "n1")
        assert 'is "6", must be a multiple of 4' in answer["FailedAndUnresolvableNodes"]["n1"]
        assert "filter has not let node n1 pass" in await extender.bind(pod)


async def test_shares_of_compute_are_counted_per_card() -> None:
    api = Api()
    api.add_node("n1", 30, 2)
    api.set_node("n1", {"capacity": {GPU_CORE: "200"}, "allocatable": {GPU_CORE: "200"}})
    api.add_node("n2", 30, 2)
    async with rig(api) as extender:
        whole = [api_container("2", **{GPU_CORE: "60"})]
        cards = [await extender.add_and_bind(f"p{n}", containers=whole) for n in range(2)]
        assert cards == ["0", "1"]
        assert extender.api.annotations("p1")[ANN_CORE] == '{"0":{"1":60}}'
        answer = await extender.filter(api_pod(containers=whole), "n1", "n2")
        text = "Insufficient aliyun.com/gpu-core.percentage in one device"
        assert answer["FailedNodes"] == {"n1": text, "n2": text}


async def test_inspect_shows_cards_and_pods_in_order() -> None:
    async with rig(cluster(n2=(15, 1), n1=(30, 2), plain=(0, 0))) as extender:
        await extender.add_and_bind("b", "4")
        await extender.add_and_bind("a", "3")
        assert await extender.inspect() == {
            "nodes": [
                {
                    "name": "n1",
                    "totalGPU": 30,
                    "usedGPU": 7,
                    "devs": [
                        {
                            "id": 0,
                            "totalGPU": 15,
                            "usedGPU": 7,
                            "pods": [
                                {"name": "a", "namespace": "default", "usedGPU": 3},
                                {"name": "b", "namespace": "default", "usedGPU": 4},
                            ],
                        },
                        {"id": 1, "totalGPU": 15, "usedGPU": 0, "pods": []},
                    ],
                },
                {
                    "name": "n2",
                    "totalGPU": 15,
                    "usedGPU": 0,
                    "devs": [{"id": 0, "totalGPU": 15, "usedGPU": 0, "pods": []}],
                },
            ]
        }
        status, text = await extender.get(f"{PREFIX}/inspect/n2")
        assert (status, [each["name"] for each in msgspec.json.decode(text)["nodes"]]) == (200, ["n2"])


async def test_inspecting_an_unknown_node_says_so() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        status, text = await extender.get(f"{PREFIX}/inspect/ghost")
        assert status == 404
        assert msgspec.json.decode(text)["error"].startswith("node ghost is not known")


async def test_the_true_size_of_each_card_counts() -> None:
    api = Api()
    cards = [
        {"index": 0, "uuid": "GPU-a", "memory_mib": 16130, "units": 15},
        {"index": 2, "uuid": "GPU-b", "memory_mib": 24000, "units": 23},
    ]
    api.add_node("n1", 38, 2, annotations={"gpuslice.io/gpus": json.dumps(cards)})
    async with rig(api) as extender:
        assert await extender.add_and_bind("p", "20") == "2"
        assert extender.api.annotations()[ANN_CARD_UNITS] == "23"
        assert await extender.used() == {0: 0, 2: 20}


async def test_prioritize_has_one_winner() -> None:
    async with rig(cluster(n1=(30, 2), n2=(30, 2), n3=(4, 1))) as extender:
        await extender.add_and_bind("a", "8", "n2")
        scores = await extender.prioritize(api_pod(memory="6"), "n1", "n2", "n3")
        assert scores["n2"] == 10
        assert scores["n1"] < 10
        assert scores["n3"] == 0


async def test_filter_can_let_only_the_best_pass() -> None:
    async with rig(cluster(n1=(30, 2), n2=(30, 2), n3=(4, 1)), filter_best=1) as extender:
        await extender.add_and_bind("a", "8", "n2")
        answer = await extender.filter(api_pod(memory="6"), "n1", "n2", "n3")
        assert answer["NodeNames"] == ["n2"]


async def test_of_many_fitting_nodes_the_best_pass() -> None:
    names = [f"n{number}" for number in range(100)]
    async with rig(cluster(**dict.fromkeys(names, (30, 2)))) as extender:
        await extender.add_and_bind("a", "8", "n70")
        answer = await extender.filter(api_pod(memory="6"), *names)
        assert len(answer["NodeNames"]) == 64
        assert "n70" in answer["NodeNames"]


ZONES = {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 1, "labelSelector": {}}
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("spec", "passing"),
    [
        ({"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {}}]}}}, 3),
        ({"affinity": {"podAntiAffinity": {PREFERRED: [{"weight": 1, "podAffinityTerm": {}}]}}}, 3),
        ({"topologySpreadConstraints": [{**ZONES, "whenUnsatisfiable": "ScheduleAnyway"}]}, 3),
        ({"topologySpreadConstraints": [{**ZONES, "whenUnsatisfiable": "DoNotSchedule"}]}, 1),
        ({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}}, 1),
        ({"affinity": None}, 1),
    ],
)
async def test_a_pod_that_prefers_nodes_gets_all_that_fit(spec: dict[str, Any], passing: int) -> None:
    async with rig(cluster(n1=(30, 2), n2=(30, 2), n3=(30, 2)), filter_best=1) as extender:
        answer = await extender.filter(api_pod(memory="6", **spec), "n1", "n2", "n3")
        assert len(answer["NodeNames"]) == passing


async def test_a_refusal_is_explained_on_the_pod() -> None:
    async with rig(cluster(n1=(15, 1), n2=(15, 1))) as extender:
        await extender.add_and_bind("a", "9", "n1")
        await extender.add_and_bind("b", "11", "n2")
        pod = extender.api.add_pod("c", "8")
        await extender.caught_up()
        await extender.filter(pod, "n1", "n2")
        (event,) = await events(extender.api, "InsufficientGPU")
        assert event["involvedObject"]["name"] == "c"
        assert event["message"] == (
            "asked for 8 units on one card; the most free on one card of n1 is 6 of 15 (card 0), "
            "its largest card has 15 (2 nodes with shared cards looked at)"
        )


async def test_reasons_can_carry_the_explanation() -> None:
    async with rig(cluster(n1=(15, 1)), explain_refusals=True) as extender:
        await extender.add_and_bind("a", "9")
        answer = await extender.filter(api_pod(memory="8"), "n1")
        assert answer["FailedNodes"]["n1"].startswith(
            f"{NO_ROOM}: asked for 8 units on one card; the most free"
        )


async def test_a_pod_that_asks_for_nothing_of_ours_passes_everywhere() -> None:
    async with rig(cluster(n1=(15, 1), n2=(0, 0))) as extender:
        pod = extender.api.add_pod("web", containers=[{"name": "web", "image": "web"}])
        assert (await extender.filter(pod, "n1", "n2"))["NodeNames"] == ["n1", "n2"]


async def test_a_bind_is_seen_in_the_queue_at_the_api_server_and_in_the_watch() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await extender.add_and_bind("a", "4")
        await extender.caught_up()
        await until(lambda: extender.extender.metrics.pods.longest_unshown_s() == 0)
        _, text = await extender.get("/metrics")
        for line in (
            "gpuslice_extender_queue_seconds_count 1",
            "gpuslice_extender_watch_delay_seconds_count 1",
            "gpuslice_extender_watch_late_seconds 0",
            'gpuslice_extender_request_seconds_count{verb="bind"} 1',
            'gpuslice_extender_api_request_seconds_count{method="POST",resource="pods/binding"} 1',
        ):
            assert line in text.splitlines(), line


async def test_a_pod_behind_a_gate_does_not_wait_for_kube_scheduler() -> None:
    """Or a queue that holds pods back would look like a kube-scheduler that does not come."""
    async with rig(cluster(n1=(15, 1))) as extender:
        extender.api.add_pod("waits", 4)
        extender.api.add_pod("held-back", 4, schedulingGates=[{"name": "kueue.x-k8s.io/admission"}])
        await until(lambda: len(extender.extender.ledger.pods) == 2)
        _, text = await extender.get("/metrics")
        assert "gpuslice_extender_waiting_pods 1\n" in text
        assert "gpuslice_extender_gated_pods 1\n" in text


async def test_metrics_and_state_tell_what_happened() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await extender.add_and_bind("a", "9")
        await extender.filter(api_pod(memory="8"), "n1")
        _, text = await extender.get("/metrics")
        assert 'gpuslice_extender_requests_total{verb="bind",result="yes"} 1\n' in text
        assert 'gpuslice_extender_requests_total{verb="filter",result="no"} 1\n' in text
        assert "gpuslice_extender_free_units 6\n" in text
        _, state = await extender.get("/debug/state")
        (node,) = msgspec.json.decode(state)["nodes"]
        assert node["gpus"][0]["left"] == 6
        assert node["pods"][0]["name"] == "default/a"


async def events(api: Api, reason: str) -> list[dict[str, Any]]:
    await until(lambda: bool(api.events(reason)))
    return api.events(reason)


async def test_requests_of_init_containers_and_sidecars_count_like_kubelet_counts() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        init = [api_container("9", "warm-up"), {**api_container("2", "proxy"), "restartPolicy": "Always"}]
        assert await extender.add_and_bind("p", "4", initContainers=init) == "0"
        assert extender.api.annotations()[ANN_POD_UNITS] == "9"
        assert await extender.used() == {0: 9}
        assert GPU_MEM in extender.api.pod()["spec"]["containers"][0]["resources"]["limits"]


async def test_a_pod_refused_on_a_sample_of_the_nodes_is_told_why() -> None:
    api = cluster(**{f"n{number:03d}": (4, 1) for number in range(249)}, roomy=(15, 1))
    async with rig(api) as extender:
        sample = [f"n{number:03d}" for number in range(120)]  # 48 % of 250, as kube-scheduler samples
        answer = await extender.filter(extender.api.add_pod("p", "8"), *sample)
        assert answer["NodeNames"] == []
        (event,) = await events(extender.api, "InsufficientGPU")
        assert "set percentageOfNodesToScore: 100" in event["message"]
        _, text = await extender.get("/metrics")
        assert "gpuslice_extender_sampled_pods_total 1\n" in text
        await extender.filter(extender.api.add_pod("q", "8"), *sample[:50])
        _, text = await extender.get("/metrics")
        assert "gpuslice_extender_sampled_pods_total 1\n" in text
