"""The demo's story on a real control plane: kube-apiserver, etcd and kube-scheduler are the real ones.

Kubelets stay simulated here, so what a real API server would have to fetch from a kubelet over TLS (exec and
logs) is left out of the story; everything that decides is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice_demo import guard
from gpuslice_demo.expected import containing
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.places import LONGEST_FOLDER, Places, find_places
from gpuslice_demo.player import Player, Score
from gpuslice_demo.steps import Step, Story
from gpuslice_demo.stories import STORIES
from gpuslice_demo.stories.installing import VALUES
from gpuslice_demo.world import CONNECTIONS, World
from simcluster.kubelet.settings import KubeletSettings
from simcluster.network import loopback_of
from tests import tools
from tests.chart import extenders
from tests.e2e import control_plane
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE
PATIENCE_S = 120.0
EXTENDER_PORT = 12345
AGENTS_READY = Step(
    "",
    "kubectl rollout status daemonset/gpushare-device-plugin-ds -n kube-system",
    containing("successfully rolled out"),
    within_s=PATIENCE_S,
)
CLAIMS_SINCE = 36  # without a webhook
NEEDS_KUBELET_API = ("kubectl exec", "kubectl logs", "gpuslice top --once")


class RealWorld(World):
    """A story's cluster whose API server and scheduler are Kubernetes' own."""

    async def _api_server(self) -> HttpTransport:
        folder = self.places.folder / "plane"
        folder.mkdir()
        self._sync = contextlib.ExitStack()
        self._stack.callback(self._sync.close)
        plane = control_plane.api_server(folder, flags=self._api_flags())
        self._plane = await asyncio.to_thread(self._sync.enter_context, plane)
        shutil.copy(self._plane.kubeconfig, self.places.kubeconfig)
        connection = connect(os.environ, kubeconfig=str(self.places.kubeconfig))
        return HttpTransport(connection, connections=CONNECTIONS)

    async def _start_scheduler(self) -> None:
        address = loopback_of({"spec": {"hostNetwork": True, "nodeName": self._plans[0].name}})
        found = [
            {**each, "urlPrefix": each["urlPrefix"].replace("127.0.0.1", address)}
            for each in extenders(str(tools.find("helm")), EXTENDER_PORT)
        ]
        context = control_plane.scheduler(
            self._plane, found, flags=self._flags(), percentageOfNodesToScore=100
        )
        await asyncio.to_thread(self._sync.enter_context, context)

    def _api_flags(self) -> tuple[str, ...]:
        return self._flags()

    def _settings(self, plan: NodePlan, folder: Path) -> KubeletSettings:
        """This API server knows no simulated tokens: pods are administrators."""
        settings = super()._settings(plan, folder)
        environ = {**settings.environ, "KUBECONFIG": str(self.places.kubeconfig)}
        return replace(settings, environ=environ, api_server="")

    @staticmethod
    def _flags() -> tuple[str, ...]:
        return control_plane.claim_flags() if control_plane.minor_version() >= CLAIMS_SINCE else ()


@pytest.fixture
def places() -> Iterator[Places]:
    found = find_places()
    yield found
    guard.end(found.mark.encode())
    shutil.rmtree(found.root, ignore_errors=True)


def values_for(node: str) -> str:
    """What the chart needs here: a real API server and scheduler reach no pods of simulated nodes.

    There is no webhook, and the extender is at the address of the node.
    """
    return (
        "webhook.enabled=false,scheduler.enabled=false,extender.certificate.source=none,extender.hostNetwork=true,"
        rf"extender.nodeSelector.kubernetes\.io/hostname={node}"
    )


def deciding(story: Story) -> Story:
    """The story without what needs the kubelet's own API, and with patience for a busy machine."""
    more = f"{VALUES} --set '{values_for(story.nodes[0].name)}'"
    steps = tuple(
        replace(step, within_s=PATIENCE_S, command=step.command.replace(VALUES, more))
        for step in story.steps
        if not any(part in step.command for part in NEEDS_KUBELET_API)
    )
    return replace(
        story, steps=tuple(AGENTS_READY if "daemonset,deployment" in each.command else each for each in steps)
    )


@pytest.mark.parametrize("name", list(STORIES))
async def test_the_story_comes_out_on_a_real_control_plane(
    name: str, places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "claims" and control_plane.minor_version() < CLAIMS_SINCE:
        pytest.skip(f"claims of parts of cards need Kubernetes 1.{CLAIMS_SINCE}")
    story, score = deciding(STORIES[name]), Score()
    here = places.below(name)
    async with RealWorld(here, story.nodes) as world:
        await Player(here, score, colour=False).play(story, world)
    assert score.wrong == [], capsys.readouterr().out
    assert score.right == len(story.steps)


def test_the_places_of_the_story_are_short(places: Places) -> None:
    assert len(str(places.folder)) <= LONGEST_FOLDER
    assert Path(places.folder).is_dir()
