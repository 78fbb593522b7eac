"""Claims before Kubernetes 1.36, on a real control plane: the webhook in the place of the policy, gates off.

They hold on newer ones too, apart from what the gates leave out there.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
import trustme
import yaml

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.resources import (
    NAMESPACES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
)
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.agent.dra.publisher import NOT_SHARED, SlicePublisher
from gpuslice.apps.claims.main import TemplateController
from gpuslice.apps.claims.settings import ClaimsSettings
from gpuslice.core.claim_shape import ClaimShape, template_spec
from gpuslice.core.claims import Pool
from gpuslice.core.contract import CLAIM_CLASS, CLAIM_DRIVER, LABEL_CLAIMED, LABEL_CLAIMS
from gpuslice.diagnosis.doctor.facts import DEVICE_CLASSES
from tests import HANG_S, tools
from tests.builders import api_node, make_card
from tests.chart import CHART, NAMED
from tests.e2e import control_plane
from tests.e2e.control_plane import ControlPlane
from tests.e2e.marks import WHERE_CLAIMS_ARE_KNOWN
from tests.integration.test_webhook import HOOKS, Certificates, submitted, webhook

T = TypeVar("T")
OLDER = control_plane.missing() == "" and control_plane.minor_version() < 36
pytestmark = WHERE_CLAIMS_ARE_KNOWN
PATIENCE_S = float(HANG_S)
NODE = "n1"


@contextlib.asynccontextmanager
async def on(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    async with HttpTransport(connect({}, kubeconfig=str(plane.kubeconfig))) as transport:
        client = KubeClient(transport)
        made = await client.create(NODES.as_dict(), api_node(NODE, 0, 0))
        conditions = [{"type": "Ready", "status": "True"}]
        amounts = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        status = {"conditions": conditions, "capacity": amounts, "allocatable": amounts}
        await client.patch_status(NODES.as_dict(), made["metadata"]["name"], status)
        untainted = [{"op": "replace", "path": "/spec", "value": {}}]  # no node controller runs that would
        await client.json_patch(NODES, NODE, untainted)
        yield client


@contextlib.asynccontextmanager
async def published(
    client: KubeClient,
    *units: int,
    sick: dict[int, str] | None = None,
    held: Mapping[int, int] = MappingProxyType({}),
    spread: bool = False,
) -> AsyncIterator[SlicePublisher]:
    """The cards of the node, as its agent publishes them; `held` of them may change."""
    cards = tuple(make_card(index, each, node=NODE) for index, each in enumerate(units))
    pool = Pool(NODE, cards, unhealthy=sick or {})
    uid = (await client.get(NODES, NODE)).metadata.uid
    publisher = SlicePublisher(
        client, NODE, lambda: pool.devices(held, spread=spread), lambda: uid, pytest.fail
    )
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.wait([task])


async def eventually(ask: Callable[[], Awaitable[T]], what: str) -> T:
    """The first answer that is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await ask()):  # noqa: ASYNC110 - another process is asked
            await asyncio.sleep(0.1)
        return found


async def devices(client: KubeClient) -> dict[str, dict[str, Any]]:
    found = (await client.list(RESOURCE_SLICES, fields=f"spec.driver={CLAIM_DRIVER}")).items or []
    return {device["name"]: device for each in found for device in each["spec"].get("devices") or ()}


@pytest.mark.skipif(not OLDER, reason="cards can be shared there without a gate")
async def test_without_the_gate_no_card_is_offered_and_the_agent_says_which_gate(tmp_path: Path) -> None:
    with control_plane.api_server(tmp_path) as plane:
        async with on(plane) as client, published(client, 15) as publisher:

            async def given_up() -> bool:
                return publisher.problem == NOT_SHARED and not await devices(client)

            assert await eventually(given_up, "the cards are withdrawn")


async def test_a_sick_card_is_tainted_or_left_out_where_taints_are_not_kept(tmp_path: Path) -> None:
    with control_plane.api_server(tmp_path, flags=control_plane.claim_flags()) as plane:
        async with on(plane) as client, published(client, 15, 15, sick={1: "Xid 79"}) as publisher:

            async def settled() -> bool:
                found = await devices(client)
                return "gpu-0" in found and all(each == "gpu-0" or "taints" in found[each] for each in found)

            assert await eventually(settled, "the sick card is out of the way")
            assert publisher.problem == ""


def hooks(port: int, bundle: str) -> dict[str, Any]:
    """The mutating webhooks that the chart makes for Kubernetes 1.35, pointed at a port of this machine."""
    values = "webhook.enabled=true,dra.enabled=true"
    command = [str(tools.find("helm")), "template", "x", str(CHART), "--kube-version=1.35.0", *NAMED]
    command += ["--namespace=release", f"--set={values}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kind = "MutatingWebhookConfiguration"
    (found,) = [each for each in yaml.safe_load_all(text) if each and each["kind"] == kind]
    for each in found["webhooks"]:
        path = each["clientConfig"]["service"]["path"]
        each["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
    return dict(found)


async def test_the_webhook_turns_unchanged_manifests_into_claims(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, trustme.CA())
    certificates.renew()
    flags = control_plane.claim_flags()
    folder = tmp_path / "plane"
    folder.mkdir()
    with (
        control_plane.api_server(folder, flags=flags) as plane,
        control_plane.scheduler(plane, [], flags=flags),
        control_plane.controller_manager(plane, "resourceclaim-controller", flags=flags),
    ):
        async with (
            on(plane) as client,
            published(client, 15),
            webhook(certificates, accept_hami=True, scheduler_name="ours") as port,
        ):
            selector = {"cel": {"expression": f'device.driver == "{CLAIM_DRIVER}"'}}
            await client.create(
                DEVICE_CLASSES, {"metadata": {"name": CLAIM_CLASS}, "spec": {"selectors": [selector]}}
            )
            for name, labels in (("team", {LABEL_CLAIMS: "true"}), ("others", {})):
                await client.create(NAMESPACES, {"metadata": {"name": name, "labels": labels}})
            await client.create(HOOKS["mutate"], hooks(port, certificates.bundle))
            controller = TemplateController(ClaimsSettings(port=0, host="127.0.0.1"), client)
            stop = asyncio.Event()
            task = asyncio.create_task(controller.run(stop.wait()))
            await eventually(lambda: asked(client), "the API server asks the webhook")
            for number in range(4):
                await client.create(PODS, submitted(f"p{number}", namespace="team", memory="4"))
            own = submitted("own", namespace="others", memory="4", labels={LABEL_CLAIMS: "true"})
            await client.create(PODS, own)
            await client.create(PODS, submitted("as-it-is", namespace="others", memory="4"))

            async def bound() -> list[str]:
                found = (await client.list(PODS)).items or []
                return sorted(each.metadata.name for each in found if each.spec.node_name)

            async def three() -> bool:
                return len(await bound()) == 3

            assert await eventually(three, "three parts of 4 of a card of 15 units")
            claims = (await client.list(RESOURCE_CLAIMS)).items or []
            given = [each.status.allocation for each in claims if each.status.allocation]
            consumed = [result.consumed_capacity for each in given for result in each.devices.results or ()]
            assert [each["memory"] for each in consumed if each] == ["4Gi"] * 3
            kept = await client.get(PODS.as_dict(), "as-it-is", "others")
            assert kept["spec"]["schedulerName"] == "ours"
            assert kept["spec"]["containers"][0]["resources"]["limits"] == {"aliyun.com/gpu-mem": "4"}
            stop.set()
            await task


async def asked(client: KubeClient) -> bool:
    """Whether the API server reads the configuration by now; such a pod is never stored."""
    document = submitted("probe", namespace="team", memory="4")
    made = await client.create(PODS.as_dict(), document)
    await client.delete(PODS, "probe", "team", grace_s=0)
    claiming = (made["metadata"].get("labels") or {}).get(LABEL_CLAIMED) == "true"
    if claiming:
        assert made["spec"]["schedulerName"] == "default-scheduler"
        assert not made["spec"]["containers"][0]["resources"].get("limits")
    return claiming


@contextlib.asynccontextmanager
async def allocating(
    folder: Path, *units: int, held: Mapping[int, int] = MappingProxyType({})
) -> AsyncIterator[KubeClient]:
    """A control plane that gives out the cards of one node to claims."""
    flags = control_plane.claim_flags()
    with (
        control_plane.api_server(folder, flags=flags) as plane,
        control_plane.scheduler(plane, [], flags=flags),
        control_plane.controller_manager(plane, "resourceclaim-controller", flags=flags),
    ):
        async with on(plane) as client, published(client, *units, held=held, spread=OLDER):
            selector = {"cel": {"expression": f'device.driver == "{CLAIM_DRIVER}"'}}
            await client.create(
                DEVICE_CLASSES, {"metadata": {"name": CLAIM_CLASS}, "spec": {"selectors": [selector]}}
            )
            await eventually(lambda: devices(client), "the cards are published")
            yield client


async def claims(client: KubeClient, number: int, spec: dict[str, Any]) -> None:
    """A claim, and a pod that uses it."""
    metadata = {"name": f"c{number}", "namespace": "default"}
    await client.create(RESOURCE_CLAIMS.as_dict(), {"metadata": metadata, "spec": spec})
    pod = submitted(f"p{number}", containers=[{"name": "main", "image": "i"}])
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": f"c{number}"}]
    await client.create(PODS.as_dict(), pod)


async def test_every_card_of_a_node_is_filled(tmp_path: Path) -> None:
    """kube-scheduler 1.34 looks no further than the first card; so that must be the emptiest."""
    held = dict[int, int]()
    async with allocating(tmp_path, 15, 15, held=held) as client:
        for number in range(7):
            await claims(client, number, template_spec(ClaimShape(((5, 0),)), "GiB")["spec"])

        async def filled() -> bool:
            given = await allocated(client)
            held.update({index: 5 * given.count(f"gpu-{index}") for index in (0, 1)})
            return len(given) == 6

        assert await eventually(filled, "six parts of 5 on two cards of 15")
        assert sorted(await allocated(client)) == ["gpu-0"] * 3 + ["gpu-1"] * 3


async def test_a_pod_of_two_cards_gets_two_cards(tmp_path: Path) -> None:
    """kube-scheduler 1.34 gives the same one twice to a claim that does not forbid it."""
    async with allocating(tmp_path, 15, 15) as client:
        await claims(client, 0, template_spec(ClaimShape(((8, 0),), 2), "GiB")["spec"])
        assert sorted(await eventually(lambda: allocated(client), "it is given cards")) == ["gpu-0", "gpu-1"]


async def allocated(client: KubeClient) -> list[str]:
    """The devices that claims were given."""
    found = (await client.list(RESOURCE_CLAIMS)).items or []
    given = (each.status.allocation for each in found if each.status.allocation is not None)
    return [result.device for each in given for result in each.devices.results or ()]
