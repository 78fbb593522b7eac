"""Leader election with a Lease of coordination.k8s.io/v1, as client-go does it.

Clocks of different machines are never compared: a lease has expired once *we* have seen it unchanged for its
whole duration. The leader stops leading before anybody else may start: `leading` becomes False by our own
clock after `renew_deadline_s` without a renewal, even while the event loop is blocked in a call.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError
from gpuslice.adapters.kube.objects import Lease, LeaseSpec, Metadata
from gpuslice.adapters.kube.resources import LEASES

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Which lease, and its times in seconds: duration > renew deadline > retry, as client-go demands."""

    name: str
    namespace: str
    identity: str
    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.duration_s > self.renew_deadline_s > self.retry_s > 0:
            raise ValueError(
                f"lease {self.name}: duration {self.duration_s:g} s, renew deadline "
                f"{self.renew_deadline_s:g} s and retry {self.retry_s:g} s must each be longer than the next"
            )
        if not self.identity:
            raise ValueError(
                f"lease {self.name}: identity is empty, must be a name that no other replica has"
            )


class LeaseElector:
    """Tries to hold one lease while `run` runs; `changed` is called with True and False."""

    def __init__(
        self,
        client: KubeClient,
        settings: LeaseSettings,
        *,
        changed: Callable[[bool], None] = lambda _: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._changed = changed
        self._sleep = sleep
        self._clock = clock
        self._now = now
        self._uniform = (rng or random).uniform
        self._held_until = float("-inf")
        self._seen: LeaseSpec | None = None
        self._seen_at = float("-inf")
        self._reported = False
        self._acquired: str | None = None  # when, as this process wrote it: tells it from its predecessor
        self._problem = ""  # of the last attempt; reported once, however often it repeats

    @property
    def leading(self) -> bool:
        """Whether we hold the lease now; to be asked right before each act that needs it."""
        return self._clock() < self._held_until

    @property
    def holder(self) -> str:
        """Who held the lease when last seen; empty when nobody or unknown."""
        return (self._seen.holder_identity or "") if self._seen is not None else ""

    @property
    def lapsed(self) -> bool:
        """Whether the lease was ours when last seen, but could not be renewed in time."""
        return self.holder == self._settings.identity and not self.leading

    async def confirm(self) -> bool:
        """Whether the API server says now that nobody has led since we do. Raises `KubeError`."""
        lease = await self._client.get(LEASES, self._settings.name, self._settings.namespace)
        self._observe(lease.spec)
        ours = self._is_ours(lease.spec)
        if not ours:
            self._held_until = float("-inf")
            self._report()
        return ours

    async def run(self) -> None:
        """Acquire and renew until cancelled, then give up the lease so that another can start at once."""
        try:
            while True:
                self._report()  # a lapse is reported even if the next attempt regains the lease
                await self._attempt()
                self._report()
                await self._sleep(self._settings.retry_s * self._uniform(1, 1.2))
        finally:
            await asyncio.shield(self._release())

    async def _attempt(self) -> None:
        """One attempt. An error does not lose the lease: only time does."""
        began = self._clock()
        try:
            async with asyncio.timeout(self._settings.renew_deadline_s):
                ours = await self._acquire_or_renew()
            self._held_until = began + self._settings.renew_deadline_s if ours else float("-inf")
            problem = ""
        except (KubeError, TimeoutError) as error:
            problem = str(error) or f"no answer within {self._settings.renew_deadline_s:g} s"
        if problem and problem != self._problem:
            _log.warning(
                "lease not renewed, will retry", extra={"lease": self._settings.name, "error": problem}
            )
        elif self._problem and not problem:
            _log.info("lease can be renewed again", extra={"lease": self._settings.name})
        self._problem = problem

    def _report(self) -> None:
        if self.leading != self._reported:
            self._reported = self.leading
            _log.info("leading" if self._reported else "not leading", extra={"lease": self._settings.name})
            self._changed(self._reported)

    async def _acquire_or_renew(self) -> bool:
        try:
            lease = await self._client.get(LEASES, self._settings.name, self._settings.namespace)
        except NotFoundError:
            metadata = Metadata(name=self._settings.name, namespace=self._settings.namespace)
            try:
                created = await self._client.create(
                    LEASES, Lease(metadata=metadata, spec=self._spec(LeaseSpec()))
                )
            except AlreadyExistsError:
                return False
            self._observe(created.spec)
            return True
        self._observe(lease.spec)
        duration_s = lease.spec.lease_duration_seconds or self._settings.duration_s
        expired = self._clock() - self._seen_at >= duration_s
        if lease.spec.holder_identity not in ("", None, self._settings.identity) and not expired:
            return False
        return await self._take(lease)

    def _observe(self, spec: LeaseSpec) -> None:
        if spec != self._seen:
            self._seen, self._seen_at = spec, self._clock()

    async def _take(self, lease: Lease) -> bool:
        """Write our name into the lease as it was read; False if somebody has changed it meanwhile."""
        taken = msgspec.structs.replace(lease, spec=self._spec(lease.spec))
        try:
            written = await self._client.replace(LEASES, taken)
        except ConflictError:
            return False
        self._observe(written.spec)
        return True

    def _spec(self, before: LeaseSpec) -> LeaseSpec:
        now = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        again = before.holder_identity == self._settings.identity
        if not self._is_ours(before):
            self._acquired = now
        return LeaseSpec(
            holder_identity=self._settings.identity,
            lease_duration_seconds=round(self._settings.duration_s),
            acquire_time=self._acquired,
            renew_time=now,
            lease_transitions=(before.lease_transitions or 0) + (0 if again or before == LeaseSpec() else 1),
        )

    def _is_ours(self, spec: LeaseSpec) -> bool:
        return (spec.holder_identity, spec.acquire_time) == (self._settings.identity, self._acquired)

    async def _release(self) -> None:
        """Best effort: without it the next leader only has to wait for the lease to expire."""
        if not self.leading:
            return
        self._held_until = float("-inf")
        self._report()
        try:
            lease = await self._client.get(LEASES, self._settings.name, self._settings.namespace)
            if lease.spec.holder_identity == self._settings.identity:
                spec = msgspec.structs.replace(lease.spec, holder_identity="", lease_duration_seconds=1)
                await self._client.replace(LEASES, msgspec.structs.replace(lease, spec=spec))
        except KubeError as error:
            _log.warning("lease not released", extra={"lease": self._settings.name, "error": str(error)})
