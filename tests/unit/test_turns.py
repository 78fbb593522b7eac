"""Whose made-up tokens wait, and for whom: counted in reviews that end before somebody's begins."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from gpuslice.adapters.limits import LIMITS
from gpuslice.adapters.turns import Asker, TooManyError, Turns


class Reviews:
    """Each goes on until it is told to end; `begun` names them in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = Turns(LIMITS, lambda: self.now_s)
        self.begun: list[str] = []
        self.refused: list[str] = []
        self._ends: deque[asyncio.Event] = deque()
        self._tasks: list[asyncio.Task[None]] = []

    def ask(self, name: str, asker: Asker) -> None:
        async def review() -> None:
            try:
                async with self.turns.turn(asker):
                    self.begun.append(name)
                    end = asyncio.Event()
                    self._ends.append(end)
                    await end.wait()
                    if name.startswith("made up"):
                        self.turns.was_wrong(asker)
            except TooManyError:
                self.refused.append(name)

        self._tasks.append(asyncio.create_task(review()))

    async def end_one(self) -> None:
        if self._ends:
            self._ends.popleft().set()
        await settled()

    async def end_all(self) -> None:
        while not all(task.done() for task in self._tasks):
            await self.end_one()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("strangers", "known"),
    [
        (Asker("10.0.0.1", first=True), Asker("10.0.0.2", first=True)),
        (Asker("10.0.0.1", first=False), Asker("10.0.0.1", first=True)),
    ],
    ids=["from another address", "on a connection of his own"],
)
@pytest.mark.parametrize("rate", [1, 50])
async def test_a_flood_that_goes_on_waits_behind_itself(strangers: Asker, known: Asker, rate: int) -> None:
    """Whoever is refused asks again at once, newer than he who waits."""
    reviews = Reviews()

    async def more(number: int) -> None:
        for _ in range(number):
            reviews.ask(f"made up {len(reviews.begun)}", strangers)
        await settled()

    await more(100)
    for _ in range(3):
        await reviews.end_one()
        await more(rate)
    reviews.ask("good", known)
    ended = 0
    while "good" not in reviews.begun:
        await more(rate)
        await reviews.end_one()
        ended += 1
    assert ended <= LIMITS.reviews_at_once
    assert "good" not in reviews.refused
    await reviews.end_all()


async def test_an_address_is_no_suspect_for_ever() -> None:
    reviews = Reviews()
    once, never = Asker("10.0.0.1"), Asker("10.0.0.2")
    reviews.ask("made up", once)
    await settled()
    await reviews.end_all()
    for name in ("one", "two"):
        reviews.ask(name, never)
    await settled()
    reviews.now_s += LIMITS.suspect_s + 1
    reviews.ask("older", never)
    reviews.ask("newer", once)
    await settled()
    await reviews.end_one()
    assert reviews.begun[-1] == "newer"
    await reviews.end_all()


async def test_who_leaves_while_he_waits_takes_no_turn() -> None:
    reviews = Reviews()
    for number in range(LIMITS.reviews_at_once):
        reviews.ask(str(number), Asker())
    await settled()
    reviews.ask("leaves", Asker())
    await settled()
    reviews._tasks.pop().cancel()
    await settled()
    reviews.ask("stays", Asker())
    await settled()
    await reviews.end_one()
    assert reviews.begun[-1] == "stays"
    await reviews.end_all()
