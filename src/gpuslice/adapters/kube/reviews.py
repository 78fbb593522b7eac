"""Kubernetes' own authentication and authorization, for who shows us a bearer token."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, UnavailableError
from gpuslice.adapters.kube.resources import ACCESS_REVIEWS, DICT, Resource

TOKEN_REVIEWS = Resource("authentication.k8s.io/v1", "tokenreviews", "TokenReview", DICT, namespaced=False)
LASTS_S = 10.0
"""So long an answer of the API server holds: a right that was taken away is gone after it."""
MOST_ANSWERS = 1000
AT_ONCE = 2
"""Reviews of unknown tokens in progress: who has many made-up ones delays himself, not the API server."""
MOST_WAITING = 32
"""For those and with them: each is held in memory. The oldest is refused, the newest is next."""


class NewestFirst:
    """Lets `at_once` go on at a time. Of those that wait the newest is next, so that whoever floods us with
    questions waits behind himself, and others hardly at all; the oldest is refused if there are too many."""

    def __init__(self, at_once: int = AT_ONCE, most: int = MOST_WAITING) -> None:
        self._free = at_once
        self._most_waiting = most - at_once
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def __aenter__(self) -> None:
        """Raises `UnavailableError` if it is refused."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if len(self._waiting) > self._most_waiting:
            self._waiting.popleft().set_result(False)
        try:
            if not await turn:
                raise UnavailableError("too many ask at once; try again", outcome_unknown=False)
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.result():
                self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1


class TokenReviews:
    """Whose a token is; remembered for a while, also that it is nobody's."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._turns = NewestFirst()
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
            async with self._turns:
                user = await user_of(self._client, token)
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
