"""What the processes of a container launch."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.shares.card import EPOCH, MS, US, Card, Process
from tests.shares.throttle import Steps, Throttle

Program = Callable[[Throttle, Process, Card, random.Random], Steps]


def queued(own_ns: float, ahead: int = 64) -> Program:
    """Launches without waiting, up to so many ahead of the card."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            for _ in range(ahead):
                yield from throttle.launch(own_ns)
            while process.queue:
                yield 100 * US

    return run


def one_by_one(own_ns: float, host_ns: int = 20 * US) -> Program:
    """Waits for each kernel, and computes for so long itself."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            yield from throttle.launch(own_ns)
            yield None
            yield host_ns

    return run


def mixed(least_ns: float, most_ns: float) -> Program:
    """Kernels of any length in between, in iterations of fifty with a pause behind each."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            for _ in range(50):
                size = chance.randrange(16)
                yield from throttle.launch(least_ns * (most_ns / least_ns) ** (size / 15), size)
            yield None
            yield MS

    return run


def on_and_off(inner_ns: float, on_ns: int, off_ns: int) -> Program:
    """Queued kernels for a while, then nothing for a while."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            until = card.now + on_ns
            while card.now < until:
                for _ in range(8):
                    yield from throttle.launch(inner_ns)
                yield None
            yield off_ns

    return run


def slower(own_ns: float, at_ns: int, factor: float) -> Program:
    """One by one; from some time on the card's clock is lower."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            yield from throttle.launch(own_ns * (factor if card.now - EPOCH >= at_ns else 1))
            yield None
            yield 20 * US

    return run


def killed(program: Program, at_ns: int) -> Program:
    """Killed with work under way; the others of its container find out a tenth of a second later."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        for step in program(throttle, process, card, chance):
            if card.now - EPOCH >= at_ns:
                break
            yield step if step is None else min(step, int(EPOCH + at_ns - card.now) + 1)
        process.queue.clear()
        yield 100 * MS
        process.in_flight = 0

    return run


def between(program: Program, from_ns: int, to_ns: int) -> Program:
    """Only in this part of the run."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        yield from_ns + 1
        for step in program(throttle, process, card, chance):
            if card.now - EPOCH >= to_ns:
                return
            yield step

    return run
