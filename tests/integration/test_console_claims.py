"""The console in front of nodes of claims: the same rows and pages as of the extended resource."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.resources import NODES, PODS, QUOTAS, RESOURCE_CLAIMS, RESOURCE_SLICES
from gpuslice.core.annotations import encode_cards
from gpuslice.core.claims import Pool
from gpuslice.core.contract import CLAIM_CLASS, CLAIM_DRIVER, LABEL_MODE, NODE_GPUS
from gpuslice.core.model import Card
from tests.builders import api_node, api_pod
from tests.integration.console_rig import V100, console, node
from tests.integration.test_console import by, http, read, until

__all__ = ["http"]

Ask = Callable[[Any], bool]
CARDS = tuple(Card(index, f"GPU-c1-{index}", V100[1], V100[2], V100[0]) for index in range(2))


def node_of_claims() -> dict[str, Any]:
    labels = {"cgpu": "true", LABEL_MODE: "claims"}
    made = api_node("c1", 0, 0, annotations={NODE_GPUS: encode_cards(CARDS)}, labels=labels)
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return made


def claiming(name: str, **fields: Any) -> dict[str, Any]:
    return api_pod(name, None, resourceClaims=[{"name": "gpu", "resourceClaimName": name}], **fields)


async def offer(client: KubeClient) -> None:
    pool = {"name": "c1", "generation": 1, "resourceSliceCount": 1}
    devices = Pool("c1", CARDS).devices({})
    spec = {"driver": CLAIM_DRIVER, "nodeName": "c1", "pool": pool, "devices": devices}
    await client.create(RESOURCE_SLICES, {"metadata": {"name": "c1-cards"}, "spec": spec})


async def claim(client: KubeClient, name: str, units: int, *, card: int | None, pod: str = "") -> None:
    """A claim, allocated on `card` for the pod of its name unless that is None."""
    exactly = {"deviceClassName": CLAIM_CLASS, "capacity": {"requests": {"memory": f"{units}Gi"}}}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    made = RESOURCE_CLAIMS.as_dict()
    await client.create(made, {"metadata": {"name": name, "namespace": "default"}, "spec": spec})
    if card is not None:
        uid = (await client.get(PODS, name, "default")).metadata.uid
        result: dict[str, Any] = {
            "request": "gpu",
            "driver": CLAIM_DRIVER,
            "pool": "c1",
            "device": f"gpu-{card}",
        }
        result |= {"shareID": "s", "consumedCapacity": {"memory": f"{units}Gi", "compute": "25"}}
        status = {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": uid}],
        }
        await client.patch_status(made, name, status, "default")


async def test_a_node_of_claims_looks_as_any_other(http: aiohttp.ClientSession) -> None:
    pods = [claiming("holds", node="c1", phase="Running"), claiming("waits"), api_pod("plain", "4")]
    async with console([node_of_claims(), node("n1", 1, V100)], pods) as rig:
        await offer(rig.client)
        await claim(rig.client, "holds", 12, card=0)
        await claim(rig.client, "waits", 16, card=None)
        shared: Ask = lambda found: bool(by(found["nodes"], "c1").get("shared"))  # noqa: E731
        cards = [[0, 15, 16130, 12, 25], [1, 15, 16130, 0, 0]]
        ready: Ask = lambda found: shared(found) and by(found["nodes"], "c1")["cards"] == cards  # noqa: E731
        await until(lambda: read(http, rig, "cluster"), ready)
        both: Ask = lambda found: len([each for each in found.get("waiting", ()) if each["never"]]) == 1  # noqa: E731
        found = await until(lambda: read(http, rig, "cluster"), both)
        holds = by(found["pods"], "holds")
        assert (holds["units"], holds["node"], holds["slices"]) == (12, "c1", [[0, 12]])
        assert by(found["pods"], "waits")["units"] == 16
        assert "It will never fit here: it asks for 16 units" in by(found["waiting"], "waits")["why"]
        page = await read(http, rig, "pod?namespace=default&name=holds")
        assert page["gpus"] == {"0": 12}
        assert page["card"] == {"units": 15, "memoryMiB": V100[1], "model": V100[0]}
        assert [step["step"] for step in page["way"] if step["done"]][-1] == "allocated"
        waits = await read(http, rig, "pod?namespace=default&name=waits")
        assert [(each["nodes"], each["never"]) for each in waits["classes"]] == [
            (["c1"], True),
            (["n1"], True),
        ]

        await rig.client.delete(PODS, "holds", "default", grace_s=0)
        await rig.client.delete(RESOURCE_CLAIMS, "holds", "default")
        free: Ask = lambda found: by(found["nodes"], "c1")["cards"][0][3] == 0  # noqa: E731
        found = await until(lambda: read(http, rig, "cluster"), free)
        assert "holds" not in {each["name"] for each in found["pods"]}


async def test_what_placing_anew_would_change_is_told_of_claims_too(http: aiohttp.ClientSession) -> None:
    """Two parts on two cards of one node, and a third pod that wants a card of its own."""
    pods = [claiming(name, node="c1", phase="Running") for name in ("one", "two")]
    async with console([node_of_claims(), node("n1", 0, V100)], [*pods, claiming("waits")]) as rig:
        await offer(rig.client)
        for card, name in enumerate(("one", "two")):
            await claim(rig.client, name, 4, card=card)
        await claim(rig.client, "waits", 15, card=None)
        tells: Ask = lambda found: found.get("pods") == 3  # noqa: E731
        found = await until(lambda: read(http, rig, "simulation"), tells)
        assert (found["waiting"], found["placed"], found["never"]) == (1, 3, 0)


async def test_quotas_of_claims_say_what_they_count(http: aiohttp.ClientSession) -> None:
    async with console([node_of_claims()]) as rig:
        counted = {
            "count/resourceclaims.resource.k8s.io": "5",
            f"{CLAIM_CLASS}.deviceclass.resource.k8s.io/devices": "8",
        }
        metadata = {"name": "claims", "namespace": "default"}
        await rig.client.create(QUOTAS, {"metadata": metadata, "spec": {"hard": counted}})
        used = {"count/resourceclaims.resource.k8s.io": "2"}
        await rig.client.patch_status(QUOTAS, "claims", {"hard": counted, "used": used}, "default")
        both: Ask = lambda found: len(found.get("quotas", ())) == 2  # noqa: E731
        found = await until(lambda: read(http, rig, "cluster"), both)
        assert {each["of"]: (each["used"], each["hard"]) for each in found["quotas"]} == {
            "claims": ("2", "5"),
            "devices": ("0", "8"),
        }
        await rig.client.delete(QUOTAS, "claims", "default")
        await until(lambda: read(http, rig, "cluster"), lambda found: not found.get("quotas"))


async def test_what_has_nothing_to_do_with_claims_is_not_asked_for_them(http: aiohttp.ClientSession) -> None:
    async with console([node("n1", 1, V100)], [api_pod("plain", "40")]) as rig:
        await until(lambda: read(http, rig, "cluster"), lambda found: "waiting" in found)
        assert not [each for each in rig.asked if "resource.k8s.io" in each]


async def test_a_claim_of_something_else_shows_no_pod(http: aiohttp.ClientSession) -> None:
    async with console([node_of_claims()], [claiming("theirs"), claiming("ours")]) as rig:
        await offer(rig.client)
        await claim(rig.client, "ours", 4, card=None)
        spec = {"devices": {"requests": [{"name": "nic", "exactly": {"deviceClassName": "nics"}}]}}
        made = {"metadata": {"name": "theirs", "namespace": "default"}, "spec": spec}
        await rig.client.create(RESOURCE_CLAIMS.as_dict(), made)
        found = await until(lambda: read(http, rig, "cluster"), lambda found: "pods" in found)
        assert {each["name"] for each in found["pods"]} == {"ours"}


async def test_a_sick_card_of_claims_and_a_label_taken_away_are_seen(http: aiohttp.ClientSession) -> None:
    async with console([node_of_claims()]) as rig:
        await offer(rig.client)
        await until(
            lambda: read(http, rig, "cluster"), lambda found: bool(by(found["nodes"], "c1").get("shared"))
        )
        (slice_,) = (await rig.client.list(RESOURCE_SLICES)).items or [{}]
        spec = {**slice_["spec"], "devices": Pool("c1", CARDS, unhealthy={1: "XID 79"}).devices({})}
        await rig.client.replace(RESOURCE_SLICES, {**slice_, "spec": spec})
        await until(
            lambda: read(http, rig, "cluster"), lambda found: by(found["nodes"], "c1").get("sick") == [1]
        )
        await rig.client.merge_patch(NODES, "c1", {"metadata": {"labels": {LABEL_MODE: None}}})
        await rig.client.delete(RESOURCE_SLICES, "c1-cards")
        gone: Ask = lambda found: by(found["nodes"], "c1").get("sick") is None  # noqa: E731
        await until(lambda: read(http, rig, "cluster"), gone)
