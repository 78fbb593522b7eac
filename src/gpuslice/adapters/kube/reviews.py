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
from gpuslice.adapters.limits import Limits
from gpuslice.adapters.turns import Asker, TooManyError, Turns

TOKEN_REVIEWS = Resource("authentication.k8s.io/v1", "tokenreviews", "TokenReview", DICT, namespaced=False)


class TokenReviews:
    """Whose a token is; remembered for a while, also that it is nobody's."""

    def __init__(
        self, client: KubeClient, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._limits = limits
        self._clock = clock
        self._turns = Turns(limits, clock)
        self._answers: OrderedDict[str, tuple[dict[str, Any] | None, float]] = OrderedDict()

    async def user_of(self, token: str, asker: Asker) -> dict[str, Any] | None:
        """As an access review wants to hear it; None for nobody's. Raises `KubeError`."""
        key = digest_of(token)
        user, since_s = self._answers.get(key, (None, float("-inf")))
        if self._clock() - since_s <= self._limits.review_lasts_s:
            return user
        if user is not None:  # it was known a moment ago: no stranger
            user = await user_of(self._client, token)
        else:
            try:
                async with self._turns.turn(asker):
                    user = await user_of(self._client, token)
            except TooManyError as error:
                raise UnavailableError(str(error), outcome_unknown=False) from error
        if user is None:
            self._turns.was_wrong(asker)
        self._answers[key] = user, self._clock()
        self._answers.move_to_end(key)
        if len(self._answers) > self._limits.reviews_remembered:
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

    def __init__(
        self, client: KubeClient, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._limits = limits
        self._clock = clock
        self._tokens = TokenReviews(client, limits, clock)
        self._answers: OrderedDict[tuple[str, str], tuple[bool, float]] = OrderedDict()

    async def allows(self, token: str, path: str, asker: Asker) -> bool:
        """No, where the API server does not answer, or too many ask."""
        key = digest_of(token), path
        answer, since_s = self._answers.get(key, (False, float("-inf")))
        if self._clock() - since_s <= self._limits.review_lasts_s:
            return answer
        try:
            user = await self._tokens.user_of(token, asker)
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
        if len(self._answers) > self._limits.reviews_remembered:
            self._answers.popitem(last=False)
        return answer
