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
            while process.has_work():
                yield 100 * US

    return run


def in_blocks(own_ns: float, count: int) -> Program:
    """So many kernels, then it waits for all of them: a step of training, say."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            for _ in range(count):
                yield from throttle.launch(own_ns)
            yield None

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
    """Killed with work under way; the others of its container find out when they look for it."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        for step in program(throttle, process, card, chance):
            if card.now - EPOCH >= at_ns:
                break
            yield step if step is None else min(step, int(EPOCH + at_ns - card.now) + 1)
        throttle.die()

    return run


def stopped(program: Program, from_ns: int, to_ns: int) -> Program:
    """As by SIGSTOP and SIGCONT, where it waits for its turn, the card or itself; not within a launch."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        for step in program(throttle, process, card, chance):
            if from_ns <= card.now - EPOCH < to_ns and (step is None or step > 4 * US):
                yield int(EPOCH + to_ns - card.now) + 1
            yield step

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


def on_streams(own_ns: float, count: int, ahead: int = 8) -> Program:
    """Kernels on several streams in turn."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            for number in range(ahead * count):
                yield from throttle.launch(own_ns, stream=number % count)
            while process.has_work():
                yield 100 * US

    return run


def in_threads(own_ns: float, count: int, ahead: int = 8) -> tuple[Program, ...]:
    """So many threads of one process, each with kernels on a stream of its own."""
    begun: list[tuple[Throttle, Process]] = []

    def thread(stream: int) -> Program:
        def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
            begun.append((throttle, process))
            yield 0
            throttle, process = begun[0]
            while True:
                for _ in range(ahead):
                    yield from throttle.launch(own_ns, stream, stream)
                while process.has_work_on(stream):
                    yield 50 * US

        return run

    return tuple(thread(stream) for stream in range(count))


def long_beside_short(long_ns: float, short_ns: float) -> Program:
    """A long kernel on one stream; meanwhile short ones on another, one by one. `done[1]` counts these."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            yield from throttle.launch(long_ns, key=1, stream=1)
            while process.has_work_on(1):
                yield from throttle.launch(short_ns, key=2, stream=2)
                process.done_on[2] = process.done_on.get(2, 0) + 1
                while process.has_work_on(2):
                    yield 20 * US

    return run


def grids(own_ns: float, count: int) -> Program:
    """So many different kernels at once, then one after another for good."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        for key in range(count):
            yield from throttle.launch(own_ns, key=key)
        while True:
            began = card.now
            yield from throttle.launch(own_ns, key=count)
            process.delays.append(card.now - began)
            yield None

    return run


def requests(own_ns: float, every_ns: int) -> Program:
    """Somebody asks every so often, and waits for one kernel. `delays`: beyond what it takes by itself."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            yield int(every_ns * chance.uniform(0.5, 1.5))
            began = card.now
            yield from throttle.launch(own_ns)
            yield None
            process.delays.append(card.now - began - own_ns)

    return run
