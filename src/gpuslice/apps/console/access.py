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
from gpuslice.adapters.kube.reviews import TokenReviews, digest_of
from gpuslice.adapters.limits import Limits
from gpuslice.adapters.web.messages import HttpRequest


@dataclass(slots=True)
class Viewer:
    """The user who is looking. `everything`: pods of all namespaces; `nodes`: may list nodes; else by
    namespace. `complete`: no namespace is left of which it is not known.
    """

    name: str
    everything: bool = True
    nodes: bool = True
    namespaces: dict[str, bool] = field(default_factory=dict)
    complete: bool = True

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
    asked_s: dict[str, float] = field(default_factory=dict)
    """When of each namespace."""


class TokenAccess:
    """Asks TokenReview who it is, and SubjectAccessReview what that user may list.

    A request has it ask a few questions at most, however many namespaces there are.
    """

    def __init__(
        self, client: KubeClient, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._limits = limits
        self._clock = clock
        self._tokens = TokenReviews(client, limits, clock)
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def viewer(self, request: HttpRequest, namespaces: Iterable[str]) -> Viewer | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return None
        key = digest_of(token)
        user = await self._tokens.user_of(token, request.asker)
        known = self._known.get(key)
        if user is None or (known is not None and known.user != user):
            self._known.pop(key, None)
            known = None
        if user is None:
            return None
        if known is None:
            known = self._known[key] = _Known(Viewer(user["user"]), user, float("-inf"))
            while len(self._known) > self._limits.reviews_remembered:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if self._clock() - known.since_s > self._limits.review_lasts_s:
            known.viewer.everything, known.viewer.nodes = await asyncio.gather(
                self._may_list(user, "pods"), self._may_list(user, "nodes")
            )
            known.since_s = self._clock()
        if not known.viewer.everything:
            await self._ask_of_some(known, request.query.get("namespace", ""), set(namespaces))
        return known.viewer

    async def _ask_of_some(self, known: _Known, first: str, namespaces: set[str]) -> None:
        """First of the namespace in question, then of those that are seen, of new ones, and of those that are
        not seen."""
        viewer, now_s, most = known.viewer, self._clock(), self._limits.reviews_each
        lasts_s = self._limits.namespace_lasts_s
        for gone in viewer.namespaces.keys() - namespaces:
            del viewer.namespaces[gone], known.asked_s[gone]
        due = [each for each in namespaces if now_s - known.asked_s.get(each, float("-inf")) > lasts_s]
        due.sort(key=lambda each: (each != first, -viewer.namespaces.get(each, 0.5), each))

        async def ask(namespace: str) -> None:
            viewer.namespaces[namespace] = await self._may_list(known.user, "pods", namespace)
            known.asked_s[namespace] = now_s

        await asyncio.gather(*map(ask, due[:most]))
        for late in due[most:]:  # its last answer does not hold any more
            viewer.namespaces.pop(late, None)
            known.asked_s.pop(late, None)
        viewer.complete = len(due) <= most

    async def _may_list(self, user: dict[str, Any], resource: str, namespace: str = "") -> bool:
        attributes = {"verb": "list", "resource": resource, "version": "v1"}
        if namespace:
            attributes["namespace"] = namespace
        found = await self._client.create(
            ACCESS_REVIEWS, {"spec": {**user, "resourceAttributes": attributes}}
        )
        return bool((found.get("status") or {}).get("allowed"))
