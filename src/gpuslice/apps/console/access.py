"""Who sees what: the kubeconfig's owner sees everything, a bearer token what the cluster lets it list."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.resources import ACCESS_REVIEWS
from gpuslice.adapters.kube.reviews import LASTS_S, user_of
from gpuslice.adapters.web.messages import HttpRequest

MOST_TOKENS = 1000
AT_ONCE = 20


@dataclass(slots=True)
class Viewer:
    """The user who is looking. `everything`: pods of all namespaces; `nodes`: may list nodes; else by
    namespace.
    """

    name: str
    everything: bool = True
    nodes: bool = True
    namespaces: dict[str, bool] = field(default_factory=dict)

    def sees(self, namespace: str) -> bool:
        """Whether it may see pods of a namespace; the empty one stands for the cluster's own rows."""
        if not namespace:
            return self.nodes
        return self.everything or self.namespaces.get(namespace, False)

    @property
    def fingerprint(self) -> str:
        """Changes with the set of what is seen: a document sent before the change is then incomplete."""
        if self.everything:
            return "a" if self.nodes else "p"
        seen = ",".join(sorted(name for name, allowed in self.namespaces.items() if allowed))
        return hashlib.sha256(f"{self.nodes}|{seen}".encode()).hexdigest()[:12]


class Access(Protocol):
    """Determines who sends a request."""

    async def viewer(self, request: HttpRequest, namespaces: Iterable[str]) -> Viewer | None:
        """None if a token is required first. KubeError if the API server does not answer."""
        ...


class OnePerson:
    """Anyone who knows the path counts as the owner of the kubeconfig, who may or may not list nodes."""

    def __init__(self, may_list_nodes: Callable[[], bool]) -> None:
        self._may_list_nodes = may_list_nodes

    async def viewer(self, request: HttpRequest, namespaces: Iterable[str]) -> Viewer | None:
        return Viewer("", nodes=self._may_list_nodes())


@dataclass(slots=True)
class _Known:
    viewer: Viewer
    user: dict[str, Any]
    since_s: float


class TokenAccess:
    """Asks TokenReview who it is, and SubjectAccessReview what that user may list."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def viewer(self, request: HttpRequest, namespaces: Iterable[str]) -> Viewer | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return None
        key = hashlib.sha256(token.encode()).hexdigest()  # tokens themselves are not stored
        known = self._known.get(key)
        if known is None or self._clock() - known.since_s > LASTS_S:
            user = await user_of(self._client, token)
            if user is None:
                self._known.pop(key, None)
                return None
            everything, nodes = await asyncio.gather(
                self._may_list(user, "pods"), self._may_list(user, "nodes")
            )
            known = _Known(Viewer(user["user"], everything, nodes), user, self._clock())
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > MOST_TOKENS:
                self._known.popitem(last=False)
        if not known.viewer.everything:
            slots, user, allowed = asyncio.Semaphore(AT_ONCE), known.user, known.viewer.namespaces

            async def ask(namespace: str) -> None:
                async with slots:
                    allowed[namespace] = await self._may_list(user, "pods", namespace)

            await asyncio.gather(*(ask(each) for each in sorted(set(namespaces) - allowed.keys())))
        return known.viewer

    async def _may_list(self, user: dict[str, Any], resource: str, namespace: str = "") -> bool:
        attributes = {"verb": "list", "resource": resource, "version": "v1"}
        if namespace:
            attributes["namespace"] = namespace
        found = await self._client.create(
            ACCESS_REVIEWS, {"spec": {**user, "resourceAttributes": attributes}}
        )
        return bool((found.get("status") or {}).get("allowed"))
