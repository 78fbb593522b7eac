"""Sends spans to a collector in the background: who makes them never waits, whatever becomes of it.

Our own few lines, and not OpenTelemetry's SDK: that is 15 packages, a thread and 16 MiB in each process, on
every node, for four spans of a pod.
"""

from __future__ import annotations

import asyncio
import logging
import re
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from http.client import HTTPException, InvalidURL
from urllib.parse import unquote

import msgspec

import gpuslice
from gpuslice.adapters.otlp.spans import Span, as_otlp
from gpuslice.core.errors import GpusliceError, shown, words_of

_log = logging.getLogger(__name__)

KEPT = 2048  # spans that wait; the oldest go when more come
BATCH = 512
GATHER_S = 1.0
RETRY_S = 10.0
ANSWER_S = 10.0
PATH = "/v1/traces"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.1

Post = Callable[[str, bytes, Mapping[str, str]], Awaitable[None]]


class HeaderError(GpusliceError):
    """A header for the collector cannot be sent. The message shows no value: it may be a secret."""


class SpanExporter:
    """Spans to the collector at `endpoint`, such as ``http://collector:4318``. `service`: who we are."""

    def __init__(
        self,
        endpoint: str,
        service: str,
        *,
        headers: Mapping[str, str],
        post: Post | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.dropped = 0
        self._url = endpoint.rstrip("/") + PATH
        self._headers = {"Content-Type": "application/json", **headers}
        self._resource = {"service.name": service, "service.version": gpuslice.__version__}
        self._post = post or _post
        self._sleep = sleep
        self._waiting: deque[Span] = deque()
        self._came = asyncio.Event()

    def add(self, span: Span) -> None:
        """Send it soon."""
        if len(self._waiting) >= KEPT:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(span)
        self._came.set()

    async def run(self) -> None:
        """For ever. What the collector does not take is kept for it, as far as there is room."""
        problem = ""
        while True:
            await self._came.wait()
            await self._sleep(GATHER_S)
            self._came.clear()
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            try:
                body = msgspec.json.encode(as_otlp(batch, self._resource, gpuslice.__version__))
                await self._post(self._url, body, self._headers)
                problem = ""
            except OSError as error:
                if words_of(error) != problem:
                    problem = words_of(error)
                    _log.warning("traces not sent", extra={"to": self._url, "error": problem})
                room = KEPT - len(self._waiting)
                self.dropped += max(0, len(batch) - room)
                self._waiting.extendleft(reversed(batch[-room:] if room else ()))
                await self._sleep(RETRY_S)
            if self._waiting:
                self._came.set()


def exporter_to(endpoint: str, headers: str, service: str) -> SpanExporter | None:
    """None without an endpoint. `headers`: ``a=b,c=d``, as ``OTEL_EXPORTER_OTLP_HEADERS`` has them.

    Raises `HeaderError`.
    """
    if not endpoint:
        return None
    pairs = [each.partition("=") for each in headers.split(",") if each.strip()]
    given = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    for name, value in given.items():
        if not (_NAME.fullmatch(name) and value.isascii() and value.isprintable()):
            raise HeaderError(
                f'otlp-headers: "{shown(name)}" has a name or a value that no HTTP header can have'
            )
    return SpanExporter(endpoint, service, headers=given)


async def _post(url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """OSError when the collector does not take it."""

    def send() -> None:
        try:
            request = urllib.request.Request(url, data=body, headers=dict(headers))
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                answer.read()
        except (InvalidURL, ValueError) as error:  # the latter also of a host's name
            raise OSError(str(error)) from error
        except HTTPException as error:
            raise OSError("the answer is not HTTP/1.1: OTLP over HTTP is port 4318, not 4317") from error

    await asyncio.to_thread(send)
