"""A process that holds a whole cluster never holds its objects as they came, but a page of them at most."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.resources import PODS
from gpuslice.apps.console.cluster_state import ClusterState
from gpuslice.apps.console.observed_client import ObservedClient
from gpuslice.apps.console.rows import Rows
from gpuslice.apps.extender.main import Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from tests.builders import api_pod
from tests.unit.kube_wire import page

PAGES, PODS_A_PAGE, NOTE_BYTES = 20, 50, 20_000
PAGE_BYTES = PODS_A_PAGE * NOTE_BYTES


class LargeCluster:
    """A wire to an API server with very many pods, each with a long annotation. Nothing ever changes."""

    async def request(self, request: ApiRequest) -> ApiResponse:
        number = int(request.query.get("continue") or 0)
        if request.path != PODS.path():
            return page("9")
        pods = [
            api_pod(
                f"p{number}-{each}",
                memory=4 if each % 10 == 0 else None,
                node="n",
                version="7",
                phase="Running",
                annotations={"note": f"{number} {each}".ljust(NOTE_BYTES, ".")},
            )
            for each in range(PODS_A_PAGE)
        ]
        return page("9", *pods, more=str(number + 1) if number + 1 < PAGES else "")

    async def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        await asyncio.Event().wait()
        yield b""


async def followed_by_an_extender() -> int:
    extender = Extender(ExtenderSettings(), KubeClient(LargeCluster()))
    async with asyncio.timeout(60):
        following = asyncio.create_task(extender.watch.run())
        await extender.watch.until_synced()
    following.cancel()
    return len(extender.watch.pods.objects)


async def read_again_by_a_new_leader() -> int:
    extender = Extender(ExtenderSettings(), KubeClient(LargeCluster()))
    await extender.watch.reread_pods()
    return len(extender.ledger.pods) * 10


async def followed_by_a_console() -> int:
    state = ClusterState(ObservedClient(LargeCluster(), manager="test"), Rows())
    following = asyncio.create_task(state.run())
    async with asyncio.timeout(60):
        await state._pods.synced.wait()
    following.cancel()
    return len(state.pods) * 10


@pytest.mark.parametrize("read", [followed_by_an_extender, read_again_by_a_new_leader, followed_by_a_console])
async def test_a_list_takes_the_memory_of_its_pages_not_of_all_its_objects(
    read: Callable[[], Awaitable[int]],
) -> None:
    assert await read() == PAGES * PODS_A_PAGE  # and what is loaded once is loaded now
    tracemalloc.start()
    try:
        await read()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # the page's text, its parts while it is made, and its objects: all objects would be twenty pages
    assert most_bytes < 8 * PAGE_BYTES
