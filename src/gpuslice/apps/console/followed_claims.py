"""Follows claims, the cards that they concern and their templates, once a node or pod uses any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.resources import RESOURCE_CLAIM_TEMPLATES, RESOURCE_CLAIMS, RESOURCE_SLICES
from gpuslice.adapters.kube.watch import Change, Reflector
from gpuslice.core.contract import CLAIM_DRIVER
from gpuslice.diagnosis.claims import Claims, claims_of

GATHER_S = 0.2
REST = 4
"""The pause between two passes over all claims, as a multiple of the time that a pass took."""


class FollowedClaims:
    """An API server before 1.34 knows no claims, so it is asked for them only if something names one."""

    def __init__(self, client: KubeClient, namespace: str = "") -> None:
        self._wanted = asyncio.Event()
        self._stale = asyncio.Event()
        self._claims = Reflector(client, RESOURCE_CLAIMS, self._changed, namespace=namespace)
        self._templates = Reflector(client, RESOURCE_CLAIM_TEMPLATES, self._changed, namespace=namespace)
        fields = f"spec.driver={CLAIM_DRIVER}"
        self._slices = Reflector(client, RESOURCE_SLICES, self._changed, fields=fields)

    @property
    def synced(self) -> bool:
        return self._claims.synced.is_set() and self._slices.synced.is_set()

    def follow(self) -> None:
        """A node or pod that uses claims came, changed or went."""
        self._wanted.set()
        self._stale.set()

    def _changed(self, _: Change[Any]) -> None:
        self._stale.set()

    async def run(self, renew: Callable[[], Awaitable[None]]) -> None:
        """Run until cancelled; `renew` is called after changes."""
        await self._wanted.wait()
        async with asyncio.TaskGroup() as tasks:
            for reflector in (self._claims, self._templates, self._slices):
                tasks.create_task(reflector.run())
            while True:
                await self._stale.wait()
                await asyncio.sleep(GATHER_S)
                self._stale.clear()
                began_s = time.monotonic()
                await renew()
                await asyncio.sleep(REST * (time.monotonic() - began_s))

    async def known(self, nodes: Iterable[objects.Node], pods: Iterable[objects.Pod]) -> Claims:
        """What all of them say together, computed outside the event loop; `pods`: those that have claims."""
        templates = list(self._templates.objects.values()) if self._templates.synced.is_set() else None
        claims, slices = list(self._claims.objects.values()), list(self._slices.objects.values())
        return await asyncio.to_thread(claims_of, list(nodes), list(pods), claims, slices, templates)
