"""Whose a container's folder is, and what was promised there: the file ``owner.json`` in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gpuslice.adapters.region.plain import read_plain
from gpuslice.adapters.region.reader import Counts

CLAIM_PREFIX = "claim-"
FILE = "owner.json"
MOST_BYTES = 1 << 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Owner(msgspec.Struct, frozen=True):
    """Whose folder it is. All but `ids` are "" while unknown. `boot`: the run of the machine.

    `earlier`: by card, what the same container counted before it was restarted. The rest is what the folder
    must contain: the `limits` file, the version of the `library`, and the `cards` with a claim beside it.
    `preloaded`: the container was given the library; `hooked`: its runtime has the driver's limits set.
    """

    ids: list[str]
    uid: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    boot: str = ""
    earlier: dict[str, Counts] = {}
    limits: str = ""
    library: str = ""
    cards: list[str] = []
    preloaded: bool = True
    hooked: bool = False

    def is_of(self, other: Owner) -> bool:
        """Whether both are the same container of the same pod, as far as is known."""
        return bool(self.uid) and (self.uid, self.container) == (other.uid, other.container)


def token(ids: Iterable[str]) -> str:
    """The folder name of a set of device ids; the same for any order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()[:32]


def read_owner(folder: Path) -> Owner | None:
    """None if it cannot be read, or is another folder's."""
    try:
        found = msgspec.json.decode(read_plain(folder / FILE, MOST_BYTES), type=Owner)
    except (OSError, ValueError):
        return None
    mine = folder.name.startswith(CLAIM_PREFIX) or token(found.ids) == folder.name.partition("-")[0]
    return found if mine else None


def boot_id() -> str:
    """Identifies one run of the machine; "" if the kernel does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def number_of(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if "-" in name and number.isdecimal() else 1
