"""What the exporter keeps from Python's collector, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from gpuslice.apps.exporter.memory import set_aside_what_lives


class Circle:
    """As a connection and its transport: each knows the other."""

    def __init__(self) -> None:
        self.other = self


@pytest.fixture(autouse=True)
async def collector_as_before() -> AsyncIterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@contextlib.asynccontextmanager
async def setting_aside(thaw_every: int) -> AsyncIterator[None]:
    task = asyncio.create_task(set_aside_what_lives(0, 0, thaw_every))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_what_lives_is_not_looked_at_again() -> None:
    async with setting_aside(thaw_every=1000):
        await turns(3)
        assert gc.get_freeze_count() > 1000


async def test_what_dies_in_a_circle_after_it_was_set_aside_goes_with_the_next_thaw() -> None:
    circle = Circle()
    seen = weakref.ref(circle)
    async with setting_aside(thaw_every=10):
        await turns(3)
        del circle
        await turns(3)
        assert seen() is not None, "the collector does not look there"
        await turns(20)
        assert seen() is None
