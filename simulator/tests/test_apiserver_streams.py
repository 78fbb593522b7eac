"""Logs, exec and webhooks: the API server in the middle between kubectl and somebody who listens."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from aiohttp import WSMsgType, web
from kubectl_rig import Rig, kubectl_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")

_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3


class Kubelet:
    """Answers as the kubelet side of the API server's proxy does."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.protocols: list[str | None] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/containerLogs/{ns}/{pod}/{container}", self._logs)
        app.router.add_get("/exec/{ns}/{pod}/{container}", self._exec)
        return app

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, dict(request.query)))
        if request.query.get("previous"):
            refusal = {"kind": "Status", "status": "Failure", "message": "no previous container", "code": 400}
            return web.json_response(refusal, status=400)
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for line in (b"one\n", b"two\n"):
            await response.write(line)
            await asyncio.sleep(0)
        return response

    async def _exec(self, request: web.Request) -> web.WebSocketResponse:
        """Says its command on stderr, echoes stdin, and ends as the exit code given as first word asks."""
        command = request.query.getall("command")
        socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io", "v4.channel.k8s.io"])
        await socket.prepare(request)
        self.protocols.append(socket.ws_protocol)
        await socket.send_bytes(bytes([_STDERR]) + " ".join(command).encode() + b"\n")
        if request.query.get("stdin"):
            await self._echo(socket)
        await socket.send_bytes(bytes([_STATUS]) + json.dumps(_ended(int(command[0]))).encode())
        await socket.close()
        return socket

    async def _echo(self, socket: web.WebSocketResponse) -> None:
        async for message in socket:
            if message.type != WSMsgType.BINARY or message.data[:1] == b"\xff":
                return
            if message.data[0] == _STDIN:
                await socket.send_bytes(bytes([_STDOUT]) + message.data[1:])


def _ended(code: int) -> dict[str, Any]:
    if not code:
        return {"metadata": {}, "status": "Success"}
    cause = {"reason": "ExitCode", "message": str(code)}
    details = {"causes": [cause]}
    return {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "details": details}


async def _serve(app: web.Application, context: ssl.SSLContext | None = None) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    return runner, runner.addresses[0][1]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def kubelet() -> AsyncIterator[tuple[Kubelet, int]]:
    kubelet = Kubelet()
    runner, port = await _serve(kubelet.app())
    yield kubelet, port
    await runner.cleanup()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, kubelet: tuple[Kubelet, int]) -> AsyncIterator[Rig]:
    async with kubectl_rig(Path(tmp_path_factory.mktemp("streams"))) as made:
        url = f"http://127.0.0.1:{kubelet[1]}"
        metadata = {"name": "n1", "annotations": {"sim.gpuslice.io/kubelet-url": url}}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        lost = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "lost"}}
        for one in (node, lost):
            await made.ok("create", "-f", "-", text=json.dumps(one))
        for name, where in (("p", "n1"), ("away", "lost")):
            await made.ok("run", name, "--image=x:1")
            await made.client.bind("default", name, where)
        yield made


async def test_logs_come_from_the_pods_kubelet_with_every_option(
    rig: Rig, kubelet: tuple[Kubelet, int]
) -> None:
    assert await rig.ok("logs", "p", "-f", "--tail=5") == "one\ntwo\n"
    path, query = kubelet[0].asked[-1]
    assert path == "/containerLogs/default/p/p"
    assert (query["follow"], query["tailLines"]) == ("true", "5")


async def test_what_the_kubelet_refuses_is_refused_in_its_words(rig: Rig) -> None:
    assert "no previous container" in await rig.fails("logs", "p", "--previous")


async def test_a_container_that_is_not_there_is_named(rig: Rig) -> None:
    assert "container nope is not valid for pod p" in await rig.fails("logs", "p", "-c", "nope")


async def test_a_node_without_kubelet_is_an_error_and_not_a_hang(rig: Rig) -> None:
    assert "no kubelet is known for container away on node lost" in await rig.fails("logs", "away")


async def test_exec_carries_all_streams_and_the_exit_code(rig: Rig, kubelet: tuple[Kubelet, int]) -> None:
    outcome = await rig.run("exec", "-i", "p", "--", "7", "words here", text="hello")
    assert (outcome.code, outcome.out) == (7, "hello")
    assert "7 words here" in outcome.err
    assert kubelet[0].protocols[-1] == "v5.channel.k8s.io"
    assert (await rig.run("exec", "p", "--", "0")).code == 0


async def test_a_webhook_behind_a_service_is_called_over_tls(rig: Rig) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("gate.default.svc").configure_cert(context)
    app = web.Application()
    app.router.add_post("/check", _deny_large)
    runner, port = await _serve(app, context)
    try:
        await _register(rig, authority, port)
        await rig.ok("create", "configmap", "small", "--from-literal=size=1")
        complaint = await rig.fails("create", "configmap", "large", "--from-literal=size=9")
        assert 'admission webhook "gate.example.com" denied the request: size 9 is too large' in complaint
    finally:
        await rig.ok("delete", "validatingwebhookconfiguration", "gate")
        await runner.cleanup()


async def _deny_large(request: web.Request) -> web.Response:
    review = await request.json()
    size = review["request"]["object"]["data"]["size"]
    response: dict[str, Any] = {"uid": review["request"]["uid"], "allowed": size < "5"}
    if not response["allowed"]:
        response["status"] = {"message": f"size {size} is too large", "code": 403}
    head = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
    return web.json_response({**head, "response": response})


async def _register(rig: Rig, authority: trustme.CA, port: int) -> None:
    about = {"name": "gate", "namespace": "default"}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": {"ports": [{"port": 443}]}}
    endpoints = {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": about,
        "subsets": [{"addresses": [{"ip": "127.0.0.1"}], "ports": [{"port": port}]}],
    }
    bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
    rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}
    hook = {
        "name": "gate.example.com",
        "clientConfig": {
            "service": {"name": "gate", "namespace": "default", "path": "/check"},
            "caBundle": bundle,
        },
        "rules": [rule],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "gate"},
        "webhooks": [hook],
    }
    for one in (service, endpoints, configuration):
        await rig.ok("create", "-f", "-", text=json.dumps(one))
