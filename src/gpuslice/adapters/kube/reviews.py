"""Kubernetes' own authentication and authorization, for who shows us a bearer token."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import ACCESS_REVIEWS, DICT, Resource

TOKEN_REVIEWS = Resource("authentication.k8s.io/v1", "tokenreviews", "TokenReview", DICT, namespaced=False)
LASTS_S = 10.0
"""So long an answer of the API server holds: a right that was taken away is gone after it."""
MOST_ANSWERS = 1000
AT_ONCE = 2
"""Reviews in progress: a stranger with many made-up tokens delays himself, not the API server."""
MOST_WAITING = 32
"""For those: who comes then is refused at once, since each that waits is held in memory."""


async def user_of(client: KubeClient, token: str) -> dict[str, Any] | None:
    """Whose token it is, as an access review wants to hear it; None for nobody's. Raises `KubeError`."""
    found = await client.create(TOKEN_REVIEWS, {"spec": {"token": token}})
    status = found.get("status") or {}
    if not status.get("authenticated"):
        return None
    given = status.get("user") or {}
    return {
        "user": given.get("username", ""),
        "uid": given.get("uid", ""),
        "groups": given.get("groups") or [],
        "extra": given.get("extra") or {},
    }


class PathReviews:
    """Whether who has a token may get a path (``nonResourceURLs`` of a role); remembered for a while."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._answers: OrderedDict[tuple[str, str], tuple[bool, float]] = OrderedDict()

    async def allows(self, token: str, path: str) -> bool:
        """No, where the API server does not answer, or too many ask."""
        key = hashlib.sha256(token.encode()).hexdigest(), path  # tokens themselves are not kept
        answer, since_s = self._answers.get(key, (False, float("-inf")))
        if self._clock() - since_s <= LASTS_S:
            return answer
        if self._waiting >= MOST_WAITING:
            return False
        self._waiting += 1
        try:
            async with self._asking:
                user = await user_of(self._client, token)
                answer = False
                if user is not None:
                    attributes = {"path": path, "verb": "get"}
                    review = await self._client.create(
                        ACCESS_REVIEWS, {"spec": {**user, "nonResourceAttributes": attributes}}
                    )
                    answer = bool((review.get("status") or {}).get("allowed"))
        except KubeError:
            return False
        finally:
            self._waiting -= 1
        self._answers[key] = answer, self._clock()
        self._answers.move_to_end(key)
        if len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)
        return answer
