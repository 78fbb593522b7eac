"""A request and its answer, as the API server sees them, whatever carried them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from simcluster.cluster.watch import Watch

JSON = "application/json"
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """``path`` is decoded and has no query; ``headers`` have lower-case names."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def accept(self) -> str:
        return self.headers.get("accept", "")

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", JSON).split(";")[0].strip()

    @property
    def user_agent(self) -> str:
        return self.headers.get("user-agent", "unknown")

    def flag(self, name: str) -> bool:
        """A boolean query parameter: ``1`` and ``true`` are yes."""
        return self.query.get(name, "").lower() in ("1", "true")


@dataclass(frozen=True, slots=True)
class Proxy:
    """The answer has to be fetched from a kubelet: ``url`` is where the pod's node listens."""

    url: str
    websocket: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """Either a body, or a watch that goes on, or a pointer to the kubelet that has the answer."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": JSON})
    watch: Watch | None = None
    proxy: Proxy | None = None


def json_response(value: Any, status: int = 200, content_type: str = JSON) -> Response:
    return Response(status, msgspec.json.encode(value), {"content-type": content_type})
