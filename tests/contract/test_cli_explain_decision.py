"""``gpuslice explain`` tells who bound a pod and why there, from the extender's log."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.diagnosis.explain.decisions import decisions_in
from simcluster.cluster.streams import KUBELET_URL
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed

__all__ = ["shell"]

DECIDED = {
    "time": "2026-01-02T03:04:05.678+00:00",
    "level": "info",
    "logger": "gpuslice.apps.extender.pod_records",
    "event": "bind decided",
    "pod": "default/a",
    "node": "n1",
    "cards": {"0": 4},
    "policy": "opportunity-cost",
    "passed": 7,
    "nominated": False,
    "replica": "extender-x",
    "seconds": 0.0123,
    "error": "",
}


@asynccontextmanager
async def kubelet_with(lines: list[Any], status: int = 200) -> AsyncIterator[str]:
    """The log of every container is these lines."""
    app = web.Application()

    async def log(_: web.Request) -> web.Response:
        text = (each if isinstance(each, bytes) else msgspec.json.encode(each) for each in lines)
        return web.Response(body=b"\n".join(text), status=status, content_type="text/plain")

    app.router.add_get("/containerLogs/{tail:.*}", log)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()


async def uid_of(shell: Shell, name: str) -> str:
    async with HttpTransport(Connection(shell.server.url)) as transport:
        return (await KubeClient(transport).get(PODS, name, "default")).metadata.uid


async def with_extender(shell: Shell, kubelet: str) -> str:
    """A cluster with pod a on a card, and an extender whose log that kubelet has; a's uid."""
    extender = api_pod("extender-x", "0", node="master", labels={"app": "gpushare"}, phase="Running")
    extender["metadata"]["labels"]["component"] = "gpushare-schd-extender"
    master = node("master")
    master["metadata"].setdefault("annotations", {})[KUBELET_URL] = kubelet
    await shell.has([node("n1", 15), master], [placed("a", 4, "n1", "0"), extender])
    return await uid_of(shell, "a")


async def test_a_pods_last_bind_is_told_from_the_extenders_log(shell: Shell) -> None:
    lines: list[Any] = []
    async with kubelet_with(lines) as kubelet:
        uid = await with_extender(shell, kubelet)
        earlier = {**DECIDED, "uid": uid, "time": "2026-01-02T03:04:01.000+00:00", "error": "no"}
        other = {**DECIDED, "uid": "another", "node": "n9"}
        lines += [b"not ours", earlier, {**DECIDED, "uid": uid}, other]
        told = (await shell("gpuslice", "explain", "a")).out
        policy = "of 7 nodes that fit, by policy opportunity-cost.\n"
        assert re.search(rf"Bound \d+ d( \d+ h)? ago by extender-x, after 0.0123 s: {policy}", told)
        found = json.loads((await shell("gpuslice", "explain", "a", "-o", "json")).out)["decision"]
        assert (found["node"], found["gpus"], found["passed"]) == ("n1", {"0": 4}, 7)


async def test_without_the_right_to_read_that_log_nothing_is_said_of_it(shell: Shell) -> None:
    async with kubelet_with([b"forbidden"], status=403) as kubelet:
        await with_extender(shell, kubelet)
        told = await shell("gpuslice", "explain", "a")
        assert told.code == 0, told.err
        assert "Bound" not in told.out


def test_lines_that_are_no_decisions_about_the_pod_are_passed_over() -> None:
    good = msgspec.json.encode({**DECIDED, "uid": "u"})
    strange = [b"u", good[:-3], good.replace(b":7", b':"u"'), b"\xff u", b'{"uid":"u"}', b"[" * 9999 + b"u"]
    other = good.replace(b"bind decided", b"something else")
    assert [each.uid for each in decisions_in([*strange, other, good], "u")] == ["u"]
