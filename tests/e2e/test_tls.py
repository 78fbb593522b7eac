"""Mutual TLS between a real kube-scheduler and the extender, with the certificates that the chart makes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ssl
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest
import trustme

from tests import HANG_S
from tests.builders import api_node
from tests.e2e import control_plane
from tests.e2e.cluster import (
    Running,
    cluster,
    extender,
    pod,
    release,
    scheduler_arguments,
    shipped_configuration,
)
from tests.e2e.control_plane import api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE

CARD_UNITS = 16
BIND = {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "n1"}


def ask_to_bind(running: Running, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection("127.0.0.1", running.port, timeout=30, context=context)
    with contextlib.closing(connection):
        connection.request("POST", "/gpushare-scheduler/bind", msgspec.json.encode(BIND))
        return connection.getresponse().status


def without_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context(
        cafile=str(release().files("gpushare-schd-extender-client") / "ca.crt")
    )
    context.check_hostname = False
    return context


async def test_kube_scheduler_binds_over_mutual_tls_and_nobody_else_does(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        context = api_server(tmp_path, without=("TaintNodesByCondition",))
        plane = await asyncio.to_thread(stack.enter_context, context)
        async with cluster(plane, CARD_UNITS) as made:
            node = api_node("n1", CARD_UNITS, 1)
            node["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
            await made.add_nodes([node])
            running = await asyncio.to_thread(stack.enter_context, extender(plane))
            configuration = shipped_configuration(running.url)
            assert configuration["extenders"][0]["enableHTTPS"] is True
            arguments = scheduler_arguments(configuration)
            await asyncio.to_thread(stack.enter_context, control_plane.scheduler(plane, **arguments))
            await made.add_pods([pod("known", 4), pod("of-zero", 0)])  # about which we are asked as well
            await made.until(lambda: made.log.bindings == 2, timeout_s=HANG_S)

            assert await asyncio.to_thread(ask_to_bind, running, without_certificate()) == 403
            stranger = without_certificate()
            trustme.CA().issue_cert("gpuslice-scheduler").configure_cert(stranger)
            with pytest.raises(OSError):
                await asyncio.to_thread(ask_to_bind, running, stranger)
            with pytest.raises(OSError):
                await asyncio.to_thread(urlopen, f"http://127.0.0.1:{running.port}/version", timeout=30)
            assert made.log.bindings == 2
