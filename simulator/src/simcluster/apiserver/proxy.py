"""Logs, exec and port-forward, passed on to the kubelet that has the container."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web
from yarl import URL

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io", "SPDY/3.1+portforward.k8s.io")
_MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024


async def proxy_stream(session: aiohttp.ClientSession, incoming: web.Request, url: str) -> web.StreamResponse:
    """The kubelet's answer, chunk by chunk."""
    try:
        async with session.get(_with_query(url, incoming)) as answer:
            outgoing = web.StreamResponse(status=answer.status)
            outgoing.content_type = answer.content_type
            outgoing.enable_chunked_encoding()
            await outgoing.prepare(incoming)
            async for chunk in answer.content.iter_any():
                await outgoing.write(chunk)
            return outgoing
    except aiohttp.ClientConnectionError as error:
        return _unreachable(url, error)


def _with_query(url: str, incoming: web.Request) -> URL:
    """The query as received: if decoded, an & in a command would end the parameter."""
    return URL(f"{url}?{incoming.rel_url.raw_query_string}", encoded=True)


def _unreachable(url: str, error: Exception) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f'Get "{url}": {error}',
        "reason": "InternalError",
        "code": 500,
    }
    return web.json_response(body, status=500)


async def proxy_websocket(
    session: aiohttp.ClientSession, incoming: web.Request, url: str
) -> web.StreamResponse:
    """Both directions of an exec or port-forward, with the sub-protocol client and kubelet agree on."""
    offered = [p.strip() for p in incoming.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    protocols = [protocol for protocol in PROTOCOLS if protocol in offered]
    if not protocols:
        text = f"this must be a WebSocket with one of the sub-protocols {', '.join(PROTOCOLS)}"
        return web.Response(status=400, text=text)
    try:
        kubelet = await session.ws_connect(
            _with_query(url, incoming), protocols=protocols, max_msg_size=_MESSAGE_LIMIT_BYTES
        )
    except (aiohttp.ClientConnectionError, aiohttp.WSServerHandshakeError) as error:
        return _unreachable(url, error)
    async with kubelet:
        client = web.WebSocketResponse(
            protocols=[kubelet.protocol or protocols[0]], max_msg_size=_MESSAGE_LIMIT_BYTES
        )
        await client.prepare(incoming)
        # until either side closes
        tasks = [
            asyncio.create_task(_copy(client, kubelet.send_bytes), name="exec to kubelet"),
            asyncio.create_task(_copy(kubelet, client.send_bytes), name="exec to client"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
    return client


async def _copy(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse, send: Callable[[bytes], Awaitable[None]]
) -> None:
    async for message in source:
        if message.type == aiohttp.WSMsgType.BINARY:
            await send(message.data)
        elif message.type == aiohttp.WSMsgType.TEXT:
            await send(message.data.encode())
