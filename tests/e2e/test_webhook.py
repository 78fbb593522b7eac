"""The webhook under the judgement of a real API server, with the configuration that the chart installs."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import yaml

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import NAMESPACES, PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.core.contract import GPU_COUNT
from tests import tools
from tests.builders import api_container
from tests.chart import CHART, NAMED, WEBHOOKS
from tests.e2e.control_plane import ControlPlane, api_server, minor_version
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.integration.test_webhook import HOOKS, Certificates, submitted, webhook

pytestmark = ON_A_CONTROL_PLANE

NAMESPACE = "team-a"
MATCH_CONDITIONS_SINCE = 28  # before, the API server asks about every pod


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with api_server(tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.fixture
async def client(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    async with HttpTransport(connect({}, kubeconfig=str(plane.kubeconfig))) as transport:
        made = KubeClient(transport)
        for name in (NAMESPACE, "release"):
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await made.create(NAMESPACES, namespace)
        yield made


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    made = Certificates(tmp_path, trustme.CA())
    made.renew()
    return made


def configurations(port: int, bundle: str) -> dict[str, dict[str, Any]]:
    """What the chart renders, pointed at a port of this machine; by verb."""
    helm = str(tools.find("helm"))
    values = "webhook.enabled=true,webhook.hami.enabled=true"
    command = [helm, "template", "x", str(CHART), "--namespace", "release", *NAMED, "--set", values]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each}
    found = {verb: objects[kind, f"gpuslice-{verb}"] for kind, verb in WEBHOOKS}
    for verb, each in found.items():
        each["webhooks"][0]["clientConfig"] = {
            "url": f"https://127.0.0.1:{port}/{verb}",
            "caBundle": bundle,
        }
    return found


async def install(client: KubeClient, port: int, bundle: str) -> None:
    for verb, document in configurations(port, bundle).items():
        await client.create(HOOKS[verb], document)


async def create(client: KubeClient, name: str, namespace: str = NAMESPACE, **fields: Any) -> dict[str, Any]:
    pod = submitted(name, namespace=namespace, **fields)
    await client.create(PODS, pod)
    return await client.get(PODS.as_dict(), name, namespace)


async def answered(port: int, certificates: Certificates) -> str:
    trust = ssl.create_default_context()
    certificates.authority.configure_trust(trust)
    url = f"https://127.0.0.1:{port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=trust) as answer:
        return await answer.text()


async def test_the_charts_configuration_works_on_a_real_api_server(
    client: KubeClient, certificates: Certificates
) -> None:
    async with webhook(certificates, scheduler_name="ours", accept_hami=True) as port:
        await install(client, port, certificates.bundle)
        own = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
        await until_asked(client)
        stored = await create(client, "own", containers=[api_container("4") | {"env": own}])
        assert stored["spec"]["schedulerName"] == "ours"
        assert "env" not in stored["spec"]["containers"][0]
        hami = await create(client, "hami", containers=[api_container(**{"nvidia.com/gpumem": "4096"})])
        assert hami["spec"]["containers"][0]["resources"]["limits"] == {"aliyun.com/gpu-mem": "4"}
        source = {"envFrom": [{"configMapRef": {"name": "x", "optional": True}}]}
        covered = await create(client, "covered", containers=[api_container("4") | source])
        names = [each["name"] for each in covered["spec"]["containers"][0]["env"]]
        assert "NVIDIA_VISIBLE_DEVICES" in names
        with pytest.raises(KubeError, match="must be a multiple of 2"):
            await create(client, "wrong", memory="7", labels={GPU_COUNT: "2"})
        before = await answered(port, certificates)
        plain = await create(client, "plain", containers=[{"name": "a", "image": "a"}])
        assert plain["spec"]["schedulerName"] == "default-scheduler"
        exempt = await create(client, "exempt", "release")
        assert exempt["spec"]["schedulerName"] == "default-scheduler"
        if minor_version() >= MATCH_CONDITIONS_SINCE:
            assert reviews(await answered(port, certificates)) == reviews(before), "it asked in vain"
    gone = await create(client, "gone")
    assert gone["spec"]["schedulerName"] == "default-scheduler"


def reviews(metrics: str) -> list[str]:
    return [line for line in metrics.splitlines() if line.startswith("gpuslice_webhook_reviews_total")]


async def until_asked(client: KubeClient) -> None:
    """The API server reads new configurations in its own time."""
    for attempt in range(200):
        stored = await create(client, f"probe-{attempt}")
        if stored["spec"]["schedulerName"] == "ours":
            return
    raise AssertionError("the API server never asked the webhook")
