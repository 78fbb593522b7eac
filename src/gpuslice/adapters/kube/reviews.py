"""Kubernetes' own authentication and authorization, for who shows us a bearer token."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, UnavailableError
from gpuslice.adapters.kube.resources import ACCESS_REVIEWS, DICT, Resource
from gpuslice.adapters.turns import NewestFirst, TooManyError

TOKEN_REVIEWS = Resource("authentication.k8s.io/v1", "tokenreviews", "TokenReview", DICT, namespaced=False)
LASTS_S = 10.0
"""So long an answer of the API server holds: a right that was taken away is gone after it."""
MOST_ANSWERS = 1000
AT_ONCE = 2
"""Reviews of unknown tokens in progress: who has many made-up ones delays himself, not the API server."""
MOST_WAITING = 32
"""For those and with them: each is held in memory. The oldest is refused, the newest is next."""


class TokenReviews:
    """Whose a token is; remembered for a while, also that it is nobody's."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._turns = NewestFirst(AT_ONCE, MOST_WAITING)
        self._answers: OrderedDict[str, tuple[dict[str, Any] | None, float]] = OrderedDict()

    async def user_of(self, token: str) -> dict[str, Any] | None:
        """As an access review wants to hear it; None for nobody's. Raises `KubeError`."""
        key = digest_of(token)
        user, since_s = self._answers.get(key, (None, float("-inf")))
        if self._clock() - since_s <= LASTS_S:
            return user
        if user is not None:  # it was known a moment ago: no stranger
            user = await user_of(self._client, token)
        else:
            try:
                async with self._turns:
                    user = await user_of(self._client, token)
            except TooManyError as error:
                raise UnavailableError(str(error), outcome_unknown=False) from error
        self._answers[key] = user, self._clock()
        self._answers.move_to_end(key)
        if len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)
        return user


def digest_of(token: str) -> str:
    """What is remembered of a token: not itself."""
    return hashlib.sha256(token.encode()).hexdigest()


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
        self._tokens = TokenReviews(client, clock)
        self._answers: OrderedDict[tuple[str, str], tuple[bool, float]] = OrderedDict()

    async def allows(self, token: str, path: str) -> bool:
        """No, where the API server does not answer, or too many ask."""
        key = digest_of(token), path
        answer, since_s = self._answers.get(key, (False, float("-inf")))
        if self._clock() - since_s <= LASTS_S:
            return answer
        try:
            user = await self._tokens.user_of(token)
            if user is None:
                return False
            attributes = {"path": path, "verb": "get"}
            review = await self._client.create(
                ACCESS_REVIEWS, {"spec": {**user, "nonResourceAttributes": attributes}}
            )
        except KubeError:
            return False
        answer = bool((review.get("status") or {}).get("allowed"))
        self._answers[key] = answer, self._clock()
        self._answers.move_to_end(key)
        if len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)
        return answer
