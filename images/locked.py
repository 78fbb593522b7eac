"""Prints the part of a lock that some packages need, with its hashes: ``python locked.py LOCK [NAME ...]``.

Without names that is what the package itself needs when it runs: what development adds stays out of the
image. Who needs what is read from the lock's own comments (``# via``).
"""

from __future__ import annotations

import re
import sys

ROOT = "gpuslice (pyproject.toml)"  # with every extra, without the groups, which are "…toml:dev"
_ENTRY = re.compile(r"^(?P<name>[a-z0-9][a-z0-9._-]*)==", re.MULTILINE)


def entries(lock: str) -> dict[str, str]:
    """Each package's lines by its name; of one with several versions all of them."""
    found: dict[str, str] = {}
    starts = [*_ENTRY.finditer(lock)]
    for entry, end in zip(starts, [*(each.start() for each in starts[1:]), len(lock)], strict=True):
        name = entry["name"]
        found[name] = found.get(name, "") + lock[entry.start() : end]
    return found


def needed(lock: str, names: list[str]) -> dict[str, str]:
    """Of the lock's packages those that `names` are or need; without names the package itself."""
    packages = entries(lock)
    via = {
        name: set(re.findall(r"^ +#(?: via|  ) (\S.*)$", text, re.MULTILINE))
        for name, text in packages.items()
    }
    wanted = set(names) or {name for name, by in via.items() if ROOT in by}
    if unknown := wanted - packages.keys():
        raise SystemExit(f"the lock has no {', '.join(sorted(unknown))}")
    while more := {name for name, by in via.items() if by & wanted} - wanted:
        wanted |= more
    return {name: packages[name] for name in sorted(wanted)}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write("".join(needed(file.read(), sys.argv[2:]).values()))
