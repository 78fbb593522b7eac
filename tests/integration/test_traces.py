"""A pod's way as one trace: filter, bind, allocate, start, told to a collector by OTLP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpuslice.adapters.otlp.exporter import BATCH, KEPT, HeaderError, SpanExporter, exporter_to
from gpuslice.adapters.otlp.spans import Span, SpanContext, parsed, trace_of
from gpuslice.core.contract import ANN_TRACEPARENT
from simcluster.cluster.cluster import Cluster
from tests.builders import api_node
from tests.integration.agent_bench import NODE, Bench, eventually
from tests.integration.extender_rig import Api, cluster, rig

UID = "3f2c8a50-7c1e-4c50-9d1b-0a1b2c3d4e5f"


class Collector:
    """What an OpenTelemetry collector takes, kept as it came."""

    def __init__(self) -> None:
        self.requests: list[tuple[Mapping[str, str], dict[str, Any]]] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.requests.append((request.headers, json.loads(await request.read())))
        return web.json_response({"partialSuccess": {}})

    def spans(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return {
            span["name"]: span
            for _, document in self.requests
            for of_resource in document["resourceSpans"]
            for of_scope in of_resource["scopeSpans"]
            for span in of_scope["spans"]
        }


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield found
    finally:
        await runner.cleanup()


async def test_a_pods_way_is_one_trace_over_both_processes(tmp_path: Path) -> None:
    async with collector() as collected, contextlib.AsyncExitStack() as stack:
        to: dict[str, Any] = {"otlp_endpoint": collected.url, "otlp_headers": "authorization=Bearer%20x"}
        bench = Bench(tmp_path, {0: 16130}, settings=to, cluster=Cluster())
        node = await stack.enter_async_context(bench.running())
        api = Api(node.cluster)
        api.set_node(NODE, api_node(NODE, 15, 1)["status"])
        extender = await stack.enter_async_context(rig(api, **to))
        pod = api.add_pod("p", "4")
        await extender.caught_up()
        assert await extender.bind(pod) == ""
        bound = api.pod("p")
        await eventually(node.agent.state.waiting, "the agent knows the pod")
        await node.kubelet.admit(bound)
        await node.kubelet.start_container(bound)
        await eventually(lambda: len(collected.spans()) == 4, "all four spans")

    filtered, bind, allocate, start = (
        collected.spans()[name] for name in ("filter", "bind", "allocate", "start")
    )
    uid = pod["metadata"]["uid"]
    assert {each["traceId"] for each in (filtered, bind, allocate, start)} == {uid.replace("-", "")}
    assert filtered["parentSpanId"] == ""
    assert bind["parentSpanId"] == filtered["spanId"]
    assert {allocate["parentSpanId"], start["parentSpanId"]} == {bind["spanId"]}
    traceparent = bound["metadata"]["annotations"][ANN_TRACEPARENT]
    assert traceparent == f"00-{bind['traceId']}-{bind['spanId']}-01"
    for each in (filtered, bind, allocate, start):
        assert int(each["startTimeUnixNano"]) <= int(each["endTimeUnixNano"])
        about = {one["key"]: one["value"] for one in each["attributes"]}
        assert about["k8s.pod.uid"] == {"stringValue": uid}
        assert about["k8s.pod.name"] == {"stringValue": "p"}
    ends = [int(each["endTimeUnixNano"]) for each in (filtered, bind, allocate, start)]
    assert ends == sorted(ends)
    services = set()
    for headers, document in collected.requests:
        assert headers["Content-Type"] == "application/json"
        assert headers["Authorization"] == "Bearer x"
        (of_resource,) = document["resourceSpans"]
        services |= {
            one["value"]["stringValue"]
            for one in of_resource["resource"]["attributes"]
            if one["key"] == "service.name"
        }
    assert services == {"gpushare-schd-extender", "gpushare-device-plugin"}


async def test_a_bind_that_fails_says_why_and_the_next_one_belongs_to_the_same_trace() -> None:
    async with collector() as collected, rig(cluster(n1=(15, 1)), otlp_endpoint=collected.url) as extender:
        pod = extender.api.add_pod("p", "4")
        assert "uid" in await extender.bind(pod, uid=UID)
        await eventually(lambda: "bind" in collected.spans(), "a span")
    assert collected.spans()["bind"]["status"]["code"] == 2
    assert "uid" in collected.spans()["bind"]["status"]["message"]
    assert collected.spans()["bind"]["traceId"] == UID.replace("-", "")


async def test_without_an_endpoint_there_is_neither_an_exporter_nor_an_annotation() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await extender.add_and_bind("p")
        assert extender.extender.spans is None
        assert ANN_TRACEPARENT not in extender.api.annotations("p")
    assert exporter_to("", "", "x") is None


def span(number: int) -> Span:
    return Span(f"{number}", SpanContext(trace_of(UID)), 1, 2)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00\r\n",  # HTTP/2: the port for gRPC
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        b"",
    ],
)
async def test_whatever_answers_in_a_collectors_place_ends_no_process(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        exporter = SpanExporter(f"http://127.0.0.1:{port}", "x", headers={})
        exporter.add(Span("a", SpanContext(trace_of(UID)), 1, 2))
        running = asyncio.create_task(exporter.run())
        await eventually(lambda: running.done() or "traces not sent" in caplog.text, "an answer")
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.parametrize("endpoint", [f"http://{'a' * 64}.example", "http://[::1", "http://collector:http"])
async def test_an_endpoint_that_is_no_address_ends_no_process(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = SpanExporter(endpoint, "x", headers={})
    exporter.add(span(1))
    running = asyncio.create_task(exporter.run())
    await eventually(lambda: running.done() or "traces not sent" in caplog.text, "an attempt")
    assert not running.done()
    assert "4317" not in caplog.text  # nobody has answered
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.parametrize(
    "headers", ["authorization=Bearer%20secret%0A", "authorization=secret\u4f60", "=secret"]
)
def test_a_header_that_no_request_can_carry_is_refused_at_the_start_without_its_value(headers: str) -> None:
    with pytest.raises(HeaderError, match="otlp-headers") as refused:
        exporter_to("http://collector:4318", headers, "x")
    assert "secret" not in str(refused.value)


async def test_a_collector_that_is_away_gets_what_there_is_room_for() -> None:
    sent: list[list[str]] = []
    away = True

    async def post(url: str, body: bytes, headers: Mapping[str, str]) -> None:
        if away:
            raise ConnectionRefusedError("refused")
        (of_resource,) = json.loads(body)["resourceSpans"]
        sent.append([each["name"] for each in of_resource["scopeSpans"][0]["spans"]])

    async def at_once(_: float) -> None:
        await asyncio.sleep(0)

    exporter = SpanExporter("http://c", "x", headers={}, post=post, sleep=at_once)
    for number in range(KEPT + 3):
        exporter.add(span(number))
    running = asyncio.create_task(exporter.run())
    for _ in range(20):
        await asyncio.sleep(0)
    away = False
    await eventually(lambda: sum(map(len, sent)) == KEPT, "the rest")
    running.cancel()
    assert exporter.dropped == 3
    assert [name for batch in sent for name in batch] == [str(each) for each in range(3, KEPT + 3)]
    assert max(map(len, sent)) == BATCH


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-1-2-01",
        f"00-{'0' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        f"01-{'1' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'1' * 16}-01\n",
        f"00-{'A' * 32}-{'1' * 16}-01",
    ],
)
def test_what_is_no_trace_context_is_taken_for_none(text: str) -> None:
    assert parsed(text) is None


def test_a_trace_context_is_read_back() -> None:
    context = SpanContext(trace_of(UID))
    assert parsed(context.traceparent) == context
    assert len(trace_of("uid-p")) == 32  # no uuid: any trace will do
