"""The webhook as the API server meets it: over HTTPS, for each pod that is created or changed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import PODS, Resource
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.web.app import Probes, make_app
from gpuslice.adapters.web.serve import Listen, serving
from gpuslice.apps.webhook.agents import Agents
from gpuslice.apps.webhook.main import Webhook
from gpuslice.apps.webhook.settings import WebhookSettings
from gpuslice.core.contract import GPU_COUNT
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from tests import HANG_S
from tests.builders import api_container, api_pod

GROUP = "admissionregistration.k8s.io/v1"


@dataclass(frozen=True)
class Certificates:
    """Where a server's certificate lies; `renew` replaces it as a Secret volume does, by renaming."""

    folder: Path
    authority: trustme.CA

    def renew(self, *names: str) -> None:
        issued = self.authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
        for name, blob in (("tls.crt", issued.cert_chain_pems[0]), ("tls.key", issued.private_key_pem)):
            fresh = self.folder / f".{name}"
            fresh.write_bytes(blob.bytes())
            os.replace(fresh, self.folder / name)

    @property
    def files(self) -> tuple[str, str]:
        return str(self.folder / "tls.crt"), str(self.folder / "tls.key")

    @property
    def bundle(self) -> str:
        return base64.b64encode(self.authority.cert_pem.bytes()).decode()


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    made = Certificates(tmp_path, trustme.CA())
    made.renew()
    return made


@contextlib.asynccontextmanager
async def webhook(
    certificates: Certificates, agents: Agents | None = None, **settings: Any
) -> AsyncIterator[int]:
    certificate, key = certificates.files
    chosen = WebhookSettings(
        **{"port": 0, "host": "127.0.0.1", "tls_certificate": certificate, "tls_key": key, **settings}
    )
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stopped = asyncio.Event()
    task = asyncio.create_task(Webhook(chosen, agents).run(_wait(stopped), port.set_result))
    try:
        yield await port
    finally:
        stopped.set()
        await task


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def configuration(kind: str, verb: str, port: int, bundle: str, *, policy: str = "Fail") -> dict[str, Any]:
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": ["pods"],
        "operations": ["CREATE"] if verb == "mutate" else ["CREATE", "UPDATE"],
    }
    hook = {
        "name": f"{verb}.gpuslice.io",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/{verb}", "caBundle": bundle},
        "rules": [rule],
        "failurePolicy": policy,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 5,
    }
    return {"apiVersion": GROUP, "kind": kind, "metadata": {"name": f"gpuslice-{verb}"}, "webhooks": [hook]}


HOOKS = {
    "mutate": Resource(
        GROUP, "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", dict[str, Any], False
    ),
    "validate": Resource(
        GROUP, "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", dict[str, Any], False
    ),
}


async def register(client: KubeClient, port: int, bundle: str, *, policy: str = "Fail") -> None:
    for verb, resource in HOOKS.items():
        await client.create(resource, configuration(resource.kind, verb, port, bundle, policy=policy))


@contextlib.asynccontextmanager
async def cluster(
    certificates: Certificates, *, policy: str = "Fail", **settings: Any
) -> AsyncIterator[KubeClient]:
    """An API server that asks a webhook."""
    async with (
        ApiServer(Cluster()) as server,
        webhook(certificates, **settings) as port,
        HttpTransport(Connection(server.url)) as transport,
    ):
        client = KubeClient(transport)
        await register(client, port, certificates.bundle, policy=policy)
        yield client


def submitted(name: str = "p", memory: Any = "4", **fields: Any) -> dict[str, Any]:
    pod = api_pod(name, memory, **fields)
    del pod["metadata"]["uid"], pod["status"]
    return pod


async def test_a_pod_is_completed_before_it_is_stored(certificates: Certificates) -> None:
    async with cluster(certificates, scheduler_name="gpuslice-scheduler") as client:
        own = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "b"}]
        await client.create(PODS, submitted(containers=[api_container("4") | {"env": own}]))
        stored = await client.get(PODS.as_dict(), "p", "default")
    assert stored["spec"]["schedulerName"] == "gpuslice-scheduler"
    assert stored["spec"]["containers"][0]["env"] == [{"name": "A", "value": "b"}]


async def test_a_denial_reaches_the_author_with_the_field(certificates: Certificates) -> None:
    async with cluster(certificates) as client:
        with pytest.raises(
            KubeError, match=r'limits\["aliyun.com/gpu-mem"\] is "7", must be a multiple of 2'
        ):
            await client.create(PODS, submitted(memory="7", labels={GPU_COUNT: "2"}))
        assert (await client.list(PODS)).items == []


async def test_a_change_is_judged_by_what_changes(certificates: Certificates) -> None:
    async with cluster(certificates) as client:
        await client.create(PODS, submitted(memory="8", labels={GPU_COUNT: "2"}))
        await client.merge_patch(PODS, "p", {"metadata": {"labels": {"team": "a"}}}, "default")
        with pytest.raises(KubeError, match="as at creation"):
            await client.merge_patch(PODS, "p", {"metadata": {"labels": {GPU_COUNT: "4"}}}, "default")


async def test_hamis_names_are_taken_when_the_door_is_open(certificates: Certificates) -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "4096"}
    async with cluster(certificates, accept_hami=True) as client:
        await client.create(PODS, submitted(containers=[api_container(**limits)]))
        stored = await client.get(PODS.as_dict(), "p", "default")
    assert stored["spec"]["containers"][0]["resources"]["limits"] == {"aliyun.com/gpu-mem": "4"}


async def test_a_webhook_that_is_gone_locks_nobody_out(certificates: Certificates) -> None:
    async with ApiServer(Cluster()) as server, HttpTransport(Connection(server.url)) as transport:
        client = KubeClient(transport)
        async with webhook(certificates) as port:
            await register(client, port, certificates.bundle, policy="Ignore")
        await client.create(PODS, submitted())
        assert len((await client.list(PODS)).items or []) == 1


async def test_what_is_no_review_is_answered_400_and_counted(certificates: Certificates) -> None:
    trust = ssl.create_default_context()
    certificates.authority.configure_trust(trust)
    async with webhook(certificates) as port, aiohttp.ClientSession() as session:
        url = f"https://127.0.0.1:{port}"
        async with session.post(f"{url}/mutate", data=b"{}", ssl=trust) as answer:
            assert answer.status == 400
            assert "must be AdmissionReview" in (await answer.json())["error"]
        deep = b'{"request":{"object":' + b"[" * 100_000
        async with session.post(f"{url}/mutate", data=deep, ssl=trust) as answer:
            assert answer.status == 400
            assert "cannot be read" in (await answer.json())["error"]
        async with session.get(f"{url}/metrics", ssl=trust) as answer:
            assert (
                'gpuslice_webhook_reviews_total{verb="mutate",outcome="malformed"} 2' in await answer.text()
            )


async def test_a_renewed_certificate_is_shown_while_old_connections_go_on(certificates: Certificates) -> None:
    app = make_app(Probes("1", lambda: "", lambda _: []))
    certificate, key = certificates.files
    listen = Listen(0, "127.0.0.1", certificate, key, reload_every_s=0.02)
    trust = ssl.create_default_context()
    certificates.authority.configure_trust(trust)
    async with serving(app, listen) as port:
        before = await _Line.open(port, trust)
        assert await before.get("/healthz") == 200
        certificates.renew("127.0.0.1", "localhost")
        async with asyncio.timeout(HANG_S):
            while True:
                after = await _Line.open(port, trust)
                await after.get("/healthz")
                after.close()
                if after.serial != before.serial:
                    break
        assert await before.get("/healthz") == 200
        before.close()


async def test_a_half_written_certificate_changes_nothing(certificates: Certificates) -> None:
    app = make_app(Probes("1", lambda: "", lambda _: []))
    certificate, key = certificates.files
    trust = ssl.create_default_context()
    certificates.authority.configure_trust(trust)
    async with serving(app, Listen(0, "127.0.0.1", certificate, key, reload_every_s=0.01)) as port:
        first = await _Line.open(port, trust)
        Path(certificate).write_text("-----BEGIN CERTIFICATE-----\n")
        for _ in range(20):
            line = await _Line.open(port, trust)
            assert line.serial == first.serial
            line.close()
        certificates.renew()
        async with asyncio.timeout(HANG_S):
            while (line := await _Line.open(port, trust)).serial == first.serial:
                line.close()
        line.close()
        first.close()


@dataclass
class _Line:
    """One TLS connection that is kept, and the serial number of the certificate it saw."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    serial: str

    @classmethod
    async def open(cls, port: int, trust: ssl.SSLContext) -> _Line:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        shown = writer.get_extra_info("ssl_object").getpeercert()
        return cls(reader, writer, shown["serialNumber"])

    async def get(self, path: str) -> int:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")
        )
        await self.reader.readexactly(length)
        return int(head.split()[1])

    def close(self) -> None:
        self.writer.close()
