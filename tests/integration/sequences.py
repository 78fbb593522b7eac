"""Sequences of what processes of a container do with memory, and after every step the question whether the
library's account and the simulated driver's accounts are the same.

A step is a name and three small numbers, so that Hypothesis can make and shrink sequences, and a plain
random number generator can make very long ones:

    make sequences ARGS="--steps 1000000 --seed 7"
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from gpuslice.adapters.region.reader import read_region
from simcluster import gpu

from .isolation_rig import BUILD, MIB, OUT_OF_MEMORY, Container, Worker, make_container, make_machine
from .sequence_players import CLOCK, KINDS, NAMESPACE, WHOLE, Descriptor, Player, Thing, first_child

CARDS: Final = 2
LIMIT_MIB: Final = 1500
PAGE: Final = 2 * MIB
PATIENCE_S: Final = 5.0
"""Bounds a hang; what settles does so within milliseconds."""
SIZES: Final = (1, 4096, MIB, PAGE, 3 * MIB, 9 * MIB, 33 * MIB, 120 * MIB, 400 * MIB)


class Difference(AssertionError):
    """The account and the driver's do not agree."""


class Story:
    """Four processes on two cards with a limit on each; where namespaces are asked for one is in a PID
    namespace of its own, and one in a time namespace.

    The first one's end is believed a second after it was seen, so sequences with it take longer.
    """

    def __init__(self, folder: Path, *, namespaces: bool = False, kinds: Sequence[str] = KINDS) -> None:
        self.box: Container = make_container(
            folder / "container",
            make_machine(folder, cards=CARDS),
            memory_mib=LIMIT_MIB,
            cards=CARDS,
        )
        self._cards = gpu.Machine(self.box.machine.state)
        self._players: list[Player | None] = [None] * 4
        self._descriptors: list[Descriptor] = []
        self._handles: list[tuple[Player, str, int]] = []
        self._namespaces = namespaces
        self._kinds = kinds
        self._pending = False
        self._orphans = False
        """Somebody died who had given memory to others: it stays counted until nothing that others gave is
        open."""
        self.steps = 0
        self.told: deque[str] = deque(maxlen=40)
        """What happened last, in words."""
        self.counts: Counter[str] = Counter()
        self.largest_provisional = {"over": 0, "under": 0}

    # ---- steps

    def step(self, name: str, a: int, b: int, c: int) -> None:
        """One step; a name that can do nothing now does nothing."""
        self.steps += 1
        self.told.append(name)
        done, provisional = STEPS[name]
        if done(self, a, b, c):
            self.counts[name] += 1
        self._compare(provisional)

    def _tell(self, player: Player, what: str) -> None:
        self.told.append(f"{player.worker.pid}: {what}")

    def _player(self, a: int) -> Player | None:
        present = [player for player in self._players if player]
        return present[a % len(present)] if present else None

    def start(self, a: int, b: int, c: int) -> bool:
        place = a % len(self._players)
        if self._players[place]:
            return False
        inside, forked = place == 3 and self._namespaces, place >= 2 and self._namespaces
        start = NAMESPACE if inside else CLOCK if forked else ()
        worker = Worker([*start, str(BUILD / "tests/worker"), "proc2", "12020"], self.box.environ())
        self._players[place] = Player(worker, b % CARDS, inside, forked)
        answer = worker.ask(f"start {b % CARDS}")
        self.told.append(f"{worker.pid}: starts on {b % CARDS}{' inside' * inside}")
        if answer == OUT_OF_MEMORY:
            self._end(place)
        else:
            assert answer == "ok", answer
        return True

    def alloc(self, a: int, b: int, c: int) -> bool:
        player = self._player(a)
        if not player:
            return False
        kind, size = self._kinds[b % len(self._kinds)], SIZES[c % len(SIZES)]
        if kind in ("physical", "mapped", "group", "tile"):
            size = (size + PAGE - 1) // PAGE * PAGE
        if kind in ("array", "array3d", "mipmap"):  # of whole blocks
            size = max(size, 8 * MIB)
        number, before = player.number(), self._accounts()[player.card]
        self._tell(player, f"alloc {number} {kind} {size} on {player.card}")
        answer = player.worker.ask(f"alloc {number} {kind} {size}")
        if answer == "ok":
            player.held[number] = Thing(kind, player.card, size)
            return True
        assert answer == OUT_OF_MEMORY, f"alloc {kind} {size}: {answer}"
        pages = (size + PAGE - 1) // PAGE * PAGE
        if kind in WHOLE and before + pages <= LIMIT_MIB * MIB:
            self._settle()
            if self._accounts()[player.card] + pages <= LIMIT_MIB * MIB:
                answer = player.worker.ask(f"alloc {number} {kind} {size}")
                assert answer == "ok", (
                    f"{kind} of {size} bytes is refused though {before} of the limit are used"
                )
                player.held[number] = Thing(kind, player.card, size)
        return True

    def free(self, a: int, b: int, c: int) -> bool:
        player = self._player(a)
        if not player or not player.held:
            return False
        number = sorted(player.held)[b % len(player.held)]
        thing = player.held.pop(number)
        self._tell(player, f"free {number} {thing.kind} on {thing.card}, current {player.card}")
        if (
            thing.card != player.card
        ):  # some calls want the card current, which may have no room for a context
            player.worker.ask(f"current {thing.card}")
        player.worker.ok(f"free {number}")
        if thing.card != player.card:
            player.worker.ask(f"current {player.card}")
        return True

    def _one(self, player: Player, b: int, *kinds: str) -> int | None:
        numbers = [number for number, thing in sorted(player.held.items()) if thing.kind in kinds]
        return numbers[b % len(numbers)] if numbers else None

    def share(self, a: int, b: int, c: int) -> bool:
        """An exported descriptor of physical memory."""
        player = self._player(a)
        number = self._one(player, b, "physical") if player else None
        if not player or number is None:
            return False
        pid, file = player.worker.ok(f"share {number}")
        player.has_shared = True
        self._tell(player, f"share {number} as {file}")
        if not player.inside:
            self._descriptors.append(Descriptor(player, pid, file, player.held[number].card))
        else:
            player.worker.ok(f"shut {file}")
        return True

    def _anothers_descriptor(self, a: int, b: int) -> Descriptor | None:
        """One that this player can take from another; in a PID namespace of its own it can take none."""
        if not (player := self._player(a)) or player.inside or not self._descriptors:
            return None
        descriptor = self._descriptors[b % len(self._descriptors)]
        return None if descriptor.player is player else descriptor

    def receive(self, a: int, b: int, c: int) -> bool:
        player, descriptor = self._player(a), self._anothers_descriptor(a, b)
        if not player or not descriptor:
            return False
        number = player.number()
        self._tell(player, f"receive {number} from {descriptor}")
        answer = player.worker.ask(f"receive {number} {descriptor.pid} {descriptor.file}")
        assert answer in ("ok", OUT_OF_MEMORY), f"receive: {answer}"
        if answer == "ok":
            player.held[number] = Thing("received", descriptor.card)
        return True

    def take(self, a: int, b: int, c: int) -> bool:
        """A copy of a descriptor, which may outlive everybody who has a handle; nobody imports it."""
        player, descriptor = self._player(a), self._anothers_descriptor(a, b)
        if not player or not descriptor:
            return False
        pid, file = player.worker.ok(f"take {descriptor.pid} {descriptor.file}")
        self._tell(player, f"take {file} from {descriptor}")
        self._descriptors.append(Descriptor(player, pid, file, descriptor.card))
        return True

    def shut(self, a: int, b: int, c: int) -> bool:
        if not self._descriptors:
            return False
        descriptor = self._descriptors.pop(a % len(self._descriptors))
        self._tell(descriptor.player, f"shut {descriptor.file}")
        descriptor.player.worker.ok(f"shut {descriptor.file}")
        return True

    def export(self, a: int, b: int, c: int) -> bool:
        """An IPC handle, which keeps nothing alive."""
        player = self._player(a)
        number = self._one(player, b, "plain") if player else None
        if not player or number is None or player.held[number].bytes < PAGE:
            # smaller ones share a page with others, which the library does not follow to other processes
            return False
        player.has_shared = True
        self._handles.append(
            (player, player.worker.ask(f"export {number}").split()[1], player.held[number].card)
        )
        return True

    def open(self, a: int, b: int, c: int) -> bool:
        """On whatever card is current; a handle whose memory is gone is refused."""
        player = self._player(a)
        if not player or not self._handles:
            return False
        maker, handle, card = self._handles.pop(b % len(self._handles))
        if maker is player:
            return False
        number = player.number()
        self._tell(player, f"open {number} of {maker.worker.pid} on {card}, current {player.card}")
        answer = player.worker.ask(f"import {number} {handle}")
        assert answer in ("ok", "error 1", OUT_OF_MEMORY), f"import: {answer}"
        if answer == "ok" and not any(thing.kind == f"import {handle}" for thing in player.held.values()):
            player.held[number] = Thing("import", card)
        return True

    def lend(self, a: int, b: int, c: int) -> bool:
        """A block of a pool, opened by another process with that pool. Either may be let go first."""
        maker, opener = self._player(a), self._player(b)
        number = self._one(maker, c, "pool") if maker else None
        if not maker or not opener or opener is maker or maker.inside or number is None:
            return False
        pid, file = maker.worker.ok("share-pool")
        block = maker.worker.ask(f"share-block {number}").split()[1]
        maker.has_shared = True
        pool, card = opener.number(), maker.held[number].card
        self._tell(opener, f"open block {number} of {maker.worker.pid} on {card} by pool {pool}")
        opener.worker.ok(f"receive-pool {pool} {pid} {file}")
        opener.held[pool] = Thing("their pool", card)
        maker.worker.ok(f"shut {file}")
        opened = opener.number()
        opener.worker.ok(f"receive-block {opened} {pool} {block}")
        opener.held[opened] = Thing("their block", card)
        return True

    def current(self, a: int, b: int, c: int) -> bool:
        player = self._player(a)
        if not player:
            return False
        answer = player.worker.ask(f"current {b % CARDS}")
        assert answer in ("ok", OUT_OF_MEMORY), answer
        if answer == "ok":
            player.card = b % CARDS
        self._tell(player, f"current {b % CARDS}: {answer}")
        return True

    def threads(self, a: int, b: int, c: int) -> bool:
        """Threads that allocate, free and end."""
        player = self._player(a)
        if not player:
            return False
        kind = ("plain", "async")[b % 2]
        _granted, _refused, odd = player.worker.ok(f"threads {1 + b % 3} 4 {SIZES[c % 7]} {kind}")[:3]
        assert odd == 0
        return True

    def fork(self, a: int, b: int, c: int) -> bool:
        """A child of a process that uses the driver cannot use it, and takes nothing away when it ends."""
        player = self._player(a)
        if not player or player.headless:
            return False
        assert player.worker.ok("fork") == [3]
        return True

    def leave_first_thread(self, a: int, b: int, c: int) -> bool:
        player = self._player(a)
        if not player or player.headless or player.inside:
            return False
        player.worker.ok("leave-first-thread")
        player.headless = True
        return True

    def kill(self, a: int, b: int, c: int) -> bool:
        place = a % len(self._players)
        player = self._players[place]
        if not player:
            return False
        self._tell(player, "dies")
        self._end(place)
        return True

    def sync(self, a: int, b: int, c: int) -> bool:
        player = self._player(a)
        if not player:
            return False
        player.worker.ok("sync")
        player.worker.ok("trim")
        return True

    def info(self, a: int, b: int, c: int) -> bool:
        player = self._player(a)
        if not player:
            return False
        player.worker.ok("info")
        return True

    def _end(self, place: int) -> None:
        player = self._players[place]
        assert player
        inner = first_child(player.worker.pid) if player.forked else None
        player.worker.kill()
        while inner and Path(f"/proc/{inner}").exists():
            time.sleep(0.001)
        self._players[place] = None
        shared = any(descriptor.player is player for descriptor in self._descriptors)
        self._orphans |= shared or any(handle[0] is player for handle in self._handles) or player.has_shared
        self._descriptors = [each for each in self._descriptors if each.player is not player]
        self._handles = [each for each in self._handles if each[0] is not player]

    # ---- the comparison

    def _accounts(self) -> list[int]:
        reading = read_region(self.box.region_path)
        by_uuid = {card.uuid: card.used_bytes for card in reading.cards} if reading else {}
        return [by_uuid.get(limit.uuid, 0) for limit in self.box.limits]

    def _driver_bytes(self) -> list[int]:
        return [card.used_bytes for card in self._cards.cards()]

    def _settle(self) -> None:
        for player in filter(None, self._players):
            player.worker.ok("sync")
            player.worker.ok("info")

    def _compare(self, provisional: bool) -> None:
        held_bytes, accounts = self._driver_bytes(), self._accounts()
        assert all(amount <= LIMIT_MIB * MIB for amount in held_bytes), f"past the limit: {held_bytes}"
        if held_bytes == accounts:
            self._pending = False
            return
        if not provisional and not self._pending and not self._shares():
            raise Difference(f"the account says {accounts}, the driver {held_bytes}")
        for said, held in zip(accounts, held_bytes, strict=True):
            side = "over" if said > held else "under"
            self.largest_provisional[side] = max(self.largest_provisional[side], abs(said - held))
        self.counts["provisional"] += 1
        if not any(self._players):
            self._pending = True  # nobody is there to look for the dead
            return
        deadline = time.monotonic() + PATIENCE_S
        while self._driver_bytes() != self._accounts():
            self._settle()
            over = all(
                said >= held for said, held in zip(self._accounts(), self._driver_bytes(), strict=True)
            )
            if over and self._shares():
                return
            if time.monotonic() > deadline:
                raise Difference(
                    f"settled, the account says {self._accounts()}, the driver {self._driver_bytes()}"
                )
        self._pending = False
        self._orphans &= any(self._players)

    def _shares(self) -> bool:
        """Whether memory is open to several, which may then be counted for longer than the driver keeps
        it, never shorter."""
        present = [player for player in self._players if player]
        opened = any(
            thing.kind in ("received", "import", "their pool", "their block")
            for player in present
            for thing in player.held.values()
        )
        return opened or bool(self._descriptors) or self._orphans

    def abandon(self) -> None:
        """Everybody ends, and nobody looks."""
        for place, player in enumerate(self._players):
            if player:
                self._end(place)
        self._cards.close()

    def close(self) -> None:
        """Everybody ends, and a newcomer finds nothing of anybody."""
        self.told.append("everybody ends")
        for place, player in enumerate(self._players):
            if player:
                self._end(place)
        self._orphans = False
        self._descriptors, self._handles = [], []
        self.step("start", 0, 0, 0)
        self._settle()
        self._compare(provisional=True)
        self._end(0)
        self._cards.close()


Step = Callable[[Story, int, int, int], bool]
STEPS: Final[dict[str, tuple[Step, bool]]] = {
    # name: what it does; whether the account may lag behind it until somebody synchronises or looks
    "start": (Story.start, True),
    "alloc": (Story.alloc, True),
    "free": (Story.free, True),
    "share": (Story.share, False),
    "receive": (Story.receive, False),
    "take": (Story.take, False),
    "shut": (Story.shut, True),
    "export": (Story.export, False),
    "open": (Story.open, False),
    "lend": (Story.lend, False),
    "current": (Story.current, True),
    "threads": (Story.threads, True),
    "fork": (Story.fork, False),
    "leave first thread": (Story.leave_first_thread, False),
    "kill": (Story.kill, True),
    "sync": (Story.sync, True),
    "info": (Story.info, True),
}
WEIGHTS: Final = (6, 40, 25, 6, 8, 4, 5, 5, 5, 4, 5, 1, 1, 1, 2, 2, 2)
