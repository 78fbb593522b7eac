"""Calls admission webhooks over HTTP(S)."""

from __future__ import annotations

import base64
import ssl
from dataclasses import dataclass

import aiohttp
import msgspec

from simcluster.cluster.admission import WebhookAnswer, WebhookCall
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.request import Object
from simcluster.network import loopback_of


@dataclass(frozen=True, slots=True)
class _Place:
    url: str
    server_name: str | None = None


async def ask_webhook(session: aiohttp.ClientSession, cluster: Cluster, call: WebhookCall) -> WebhookAnswer:
    """Posts the review; any failure becomes an answer with ``error``."""
    try:
        place = _place(cluster, call.client_config)
        bundle, authority = call.client_config.get("caBundle"), None
        if bundle and place.url.startswith("https:"):
            authority = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
        async with session.post(
            place.url,
            data=msgspec.json.encode(call.review),
            headers={"content-type": "application/json"},
            ssl=authority or True,  # without a CA bundle of its own, the system's
            server_hostname=place.server_name,
            timeout=aiohttp.ClientTimeout(total=call.timeout_s),
        ) as answer:
            status = answer.status
            body = await answer.read()
            if status != 200:
                return WebhookAnswer(
                    error=f"the server answered {status}: {body[:200].decode(errors='replace')}"
                )
            review = msgspec.json.decode(body)
            response = review.get("response") if isinstance(review, dict) else None
            if not isinstance(response, dict) or response.get("uid") != call.review["request"]["uid"]:
                return WebhookAnswer(error="expected response.uid to be the request's uid")
            return WebhookAnswer(response)
    except (aiohttp.ClientError, TimeoutError, ValueError, ssl.SSLError) as error:
        return WebhookAnswer(error=str(error) or type(error).__name__)


def _place(cluster: Cluster, config: Object) -> _Place:
    if url := config.get("url"):
        return _Place(str(url))
    service = config.get("service") or {}
    namespace, name = service.get("namespace", ""), service.get("name", "")
    entry = cluster.store.get("services", (namespace, name))
    if entry is None:
        raise ValueError(f'service "{name}" not found')
    wanted = int(service.get("port") or 443)
    ports = [port for port in entry.obj["spec"].get("ports") or [] if port["port"] == wanted]
    found = cluster.store.get("endpoints", (namespace, name))
    for subset in (found.obj.get("subsets") or []) if found and ports else []:
        served = {port.get("name", ""): port["port"] for port in subset.get("ports") or []}
        for address in subset.get("addresses") or []:
            target = address.get("targetRef") or {}
            pod = cluster.store.get("pods", (target.get("namespace", ""), target.get("name", "")))
            host = loopback_of(pod.obj) if pod else address["ip"]
            port = served.get(ports[0].get("name", ""))
            url = f"https://{host}:{port}{service.get('path') or '/'}"
            return _Place(url, f"{name}.{namespace}.svc")
    raise ValueError(f'no endpoints available for service "{name}"')
