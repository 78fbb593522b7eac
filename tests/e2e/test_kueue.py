"""The shipped examples of Kueue with Kueue's own controller: quotas in GiB of cards, charged and kept."""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuslice.adapters.kube.resources import NODES
from gpuslice.core.contract import GPU_MEM
from gpuslice_demo.ports import free_port
from tests import tools
from tests.builders import api_node
from tests.chart import extenders
from tests.contract.test_examples import EXAMPLES
from tests.e2e import control_plane, kueue, node
from tests.e2e.claims_rig import CLASS
from tests.e2e.control_plane import ControlPlane
from tests.e2e.kubelet_rig import GPUSLICE
from tests.e2e.marks import ON_A_CONTROL_PLANE, WHERE_CLAIMS_ARE_KNOWN
from tests.e2e.test_older_claims import on, published

pytestmark = [
    *ON_A_CONTROL_PLANE,
    pytest.mark.skipif(bool(kueue.missing()), reason=kueue.missing()),
]
QUEUES = EXAMPLES / "queues"


def test_a_queue_is_charged_the_cards_memory_that_its_pods_ask_for(tmp_path: Path) -> None:
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane.api_server(tmp_path, without=("TaintNodesByCondition",)))
        extender(stack, plane)
        stack.enter_context(control_plane.controller_manager(plane, *kueue.CONTROLLERS))
        kubectl = stack.enter_context(kueue.kueue(plane, {}))
        made = api_node("n1", 64, 4, labels={"cgpu": "true"})
        made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        kubectl("create", "-f", "-", given=yaml.safe_dump(made))
        kueue.play(kubectl, QUEUES / "kueue.yaml", "research", GPU_MEM, ("16", "32"))


def extender(stack: ExitStack, plane: ControlPlane, *flags: str) -> None:
    """Ours, and the cluster's own scheduler that calls it."""
    port = free_port()
    command = [
        *GPUSLICE,
        "extender",
        f"--port={port}",
        "--host=127.0.0.1",
        f"--kubeconfig={plane.kubeconfig}",
        *flags,
    ]
    service = node.Service("extender", plane.folder, command)
    stack.callback(service.stop)
    service.start()
    found = extenders(str(tools.find("helm")), port)
    stack.enter_context(control_plane.scheduler(plane, found, percentageOfNodesToScore=100))


def settings_of(example: Path) -> dict[str, Any]:
    """What the comment at the example's head would have people write into Kueue's configuration."""
    head = example.read_text().partition("apiVersion")[0]
    found: dict[str, Any] = yaml.safe_load("".join(re.findall(r"^#   ( *\S.*\n)", head, re.MULTILINE)))
    return found


@WHERE_CLAIMS_ARE_KNOWN[-1]
async def test_a_queue_is_charged_what_claims_ask_for(tmp_path: Path) -> None:
    example = QUEUES / "kueue-claims.yaml"
    flags = control_plane.claim_flags()
    controllers = ("resourceclaim-controller", *kueue.CONTROLLERS)
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane.api_server(tmp_path, flags=flags))
        stack.enter_context(control_plane.scheduler(plane, [], flags=flags))
        stack.enter_context(control_plane.controller_manager(plane, *controllers, flags=flags))
        kubectl = stack.enter_context(kueue.kueue(plane, settings_of(example)))
        kubectl("create", "-f", "-", given=yaml.safe_dump(CLASS))
        async with on(plane) as client, published(client, 16, 16, 16, 16):
            await client.merge_patch(NODES, "n1", {"metadata": {"labels": {"gpuslice.io/mode": "claims"}}})
            charges = ("16Gi", "32Gi")
            await asyncio.to_thread(
                kueue.play, kubectl, example, "research-claims", "shared-card-memory", charges
            )
