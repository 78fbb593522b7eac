"""A transport that answers from a script, and time that passes only when somebody sleeps."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuslice.adapters.kube.errors import KubeError, error_of
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse


def answer(document: Any, status: int = 200) -> ApiResponse:
    return ApiResponse(status, {}, json.dumps(document).encode())


def failure(status: int, reason: str, message: str = "", **details: Any) -> ApiResponse:
    document = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}
    return answer({**document, **({"details": details} if details else {})}, status)


def page(version: str, *items: Mapping[str, Any], more: str = "") -> ApiResponse:
    return answer({"metadata": {"resourceVersion": version, "continue": more}, "items": list(items)})


def pod(name: str, version: str, uid: str = "", namespace: str = "default") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": uid or f"uid-{name}", "resourceVersion": version}
    return {"metadata": metadata}


def line(kind: str, item: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode()


@dataclass
class VirtualTime:
    """A clock and a sleep. `slept` are the waits, in seconds."""

    now_s: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class EndOfScriptError(Exception):
    """Everything scripted has been said; ends the loop under test."""


class ScriptedTransport:
    """Answers each request with the next entry: a Response, lines of a stream, or an error to raise."""

    def __init__(self, *script: ApiResponse | list[Any] | KubeError) -> None:
        self.requests: list[ApiRequest] = []
        self._script: Iterator[Any] = iter(script)

    def _next(self, request: ApiRequest) -> Any:
        self.requests.append(request)
        try:
            entry = next(self._script)
        except StopIteration:
            raise EndOfScriptError from None
        if isinstance(entry, Exception):
            raise entry
        return entry

    async def request(self, request: ApiRequest) -> ApiResponse:
        entry = self._next(request)
        assert isinstance(entry, ApiResponse), f"{request} got a stream"
        return entry

    async def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        entry = self._next(request)
        if isinstance(entry, ApiResponse):
            raise error_of(entry.status, entry.body, entry.headers)
        for item in entry:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Callable):  # type: ignore[arg-type]
                item()
                continue
            yield item
