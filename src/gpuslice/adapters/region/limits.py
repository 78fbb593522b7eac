"""The limits file: what the agent allows one container, read by libgpuslice and not writable by the tenant.

    gpuslice 1
    GPU-5f3a0c1e-77aa-4b1c-9d5e-0f6f2f1f9a01 memory=4509925376 share=30 cap=100
    end 1

One line per card: its UUID as in NVML, bytes of device memory ("-" for no limit) and percent of compute ("-"
for no limit). The rest is optional: the most compute it may use if others leave some (``cap=``; the share if
omitted), precedence over others (``class=interactive``), the bytes that are its own where memory is lent
(``request=``), and whether programs see no more than those (``shown=request``). The last line has the number
of cards, so that a truncated file is recognized. The parser in `native/src/policy/limits.c` is authoritative;
this one accepts and refuses the same texts.
"""

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuslice.core.errors import shown

from .layout import CARDS
from .plain import open_in_place, read_plain

MOST_MEMORY_BYTES: Final = 2**63 - 1
LARGEST_FILE_BYTES: Final = 8191
_CARD: Final = re.compile(
    r"(?P<uuid>(?:GPU-|MIG-)[0-9A-Za-z/-]{1,91})"
    r" memory=(?P<memory>-|0|[1-9][0-9]{0,18}) share=(?:-|(?P<share>[1-9][0-9]?|100)"
    r"(?: cap=(?P<cap>[1-9][0-9]?|100))?(?P<interactive> class=interactive)?)"
    r"(?: request=(?P<request>0|[1-9][0-9]{0,18})(?P<shown> shown=request)?)?"
)


class LimitsError(ValueError):
    """A limits file, or limits, that the library would not accept: it would refuse every allocation."""


@dataclass(frozen=True, slots=True)
class LimitsEntry:
    """One card of a container. None means no limit."""

    uuid: str
    memory_bytes: int | None
    compute_percent: int | None = None
    """Of the card's compute, 1 to 100: what it is entitled to while others want the rest."""
    cap_percent: int | None = None
    """The most it may use, including what others leave idle; None if that is its own share."""
    interactive: bool = False
    """Small work that somebody waits for: it precedes others' work. Only with a share of compute."""
    request_bytes: int | None = None
    """What is its own, where it may borrow or others may borrow from it; None if all of it is."""
    shows_request: bool = False
    """Programs see no more than its own."""


def format_limits(limits: Sequence[LimitsEntry]) -> str:
    """The file's text. Raises LimitsError for limits that could not be read back."""
    lines = [
        f"{limit.uuid} memory={_text(limit.memory_bytes)} share={_text(limit.compute_percent)}"
        + (f" cap={limit.cap_percent}" if limit.cap_percent is not None else "")
        + (" class=interactive" if limit.interactive else "")
        + (f" request={limit.request_bytes}" if limit.request_bytes is not None else "")
        + (" shown=request" if limit.shows_request else "")
        for limit in limits
    ]
    text = "\n".join(["gpuslice 1", *lines, f"end {len(limits)}", ""])
    if parse_limits(text) != tuple(limits):
        raise LimitsError(f"not the limits of a container: {list(limits)}")
    return text


def parse_limits(text: str) -> tuple[LimitsEntry, ...]:
    """The limits in the text. Raises LimitsError, naming the line that is wrong."""
    lines = text.split("\n")
    if len(text) > LARGEST_FILE_BYTES:
        raise LimitsError(f"the file has {len(text)} bytes, at most {LARGEST_FILE_BYTES} are read")
    if lines[0] != "gpuslice 1" or len(lines) < 3 or lines[-1]:
        raise LimitsError('the file must begin with a line "gpuslice 1" and end with a line "end COUNT"')
    limits = []
    for number, line in enumerate(lines[1:-2], 2):
        found = _CARD.fullmatch(line)
        if not found:
            raise LimitsError(f'line {number} is "{shown(line)}", must be "UUID memory=BYTES share=PERCENT"')
        memory = None if found["memory"] == "-" else int(found["memory"])
        share, cap = (int(found[name]) if found[name] else None for name in ("share", "cap"))
        own = int(found["request"]) if found["request"] else None
        if max(memory or 0, own or 0) > MOST_MEMORY_BYTES:
            raise LimitsError(f"line {number}: {max(memory or 0, own or 0)} bytes are more than any card has")
        if own is not None and memory is None:
            raise LimitsError(f"line {number}: a request without a limit")
        if cap is not None and share is not None and cap < share:
            raise LimitsError(f"line {number}: cap={cap} is less than share={share}")
        cap = None if cap == share else cap
        interactive, shows_request = bool(found["interactive"]), bool(found["shown"])
        limits.append(LimitsEntry(found["uuid"], memory, share, cap, interactive, own, shows_request))
    if lines[-2] != f"end {len(limits)}":
        raise LimitsError(f'the last line is "{shown(lines[-2])}", must be "end {len(limits)}"')
    if len(limits) > CARDS:
        raise LimitsError(f"{len(limits)} cards, at most {CARDS} fit")
    if len({limit.uuid for limit in limits}) < len(limits):
        raise LimitsError("a card is named twice")
    return tuple(limits)


def write_limits(path: Path | str, limits: Sequence[LimitsEntry]) -> None:
    """Replace the file atomically; readable by everybody and writable by its owner alone.

    The number in `generation` beside it, which processes of the container have mapped, is odd while the file
    is replaced: when this returns, no process allocates by the limits from before.
    """
    place = Path(path)
    text = format_limits(limits)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    generation = open_in_place(place.with_name("generation"))
    try:
        changed = (int.from_bytes(os.pread(generation, 8, 0), sys.byteorder) | 1) % 2**63
        os.pwrite(generation, changed.to_bytes(8, sys.byteorder), 0)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with os.fdopen(file, "w") as out:
            os.fchmod(file, 0o644)
            out.write(text)
        temporary.rename(place)
        os.pwrite(generation, (changed + 1).to_bytes(8, sys.byteorder), 0)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(generation)


def write_pressure(path: Path, excesses: Mapping[str, int]) -> None:
    """Ask programs to give back so many bytes of cards: ``GPU-… release=BYTES``, a line for each. OSError."""
    text, before = "".join(f"{uuid} release={each}\n" for uuid, each in sorted(excesses.items()) if each), ""
    with contextlib.suppress(FileNotFoundError):
        before = read_plain(path, LARGEST_FILE_BYTES).decode()
    if text != before:  # who waits for a change of it is not woken for nothing
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.chmod(0o644)
        temporary.rename(path)


def read_limits(path: Path | str) -> tuple[LimitsEntry, ...] | None:
    """The limits in a file; None if there is no file, which means no limits. Raises LimitsError, OSError."""
    try:
        return parse_limits(read_plain(path, LARGEST_FILE_BYTES + 1).decode("latin-1"))
    except FileNotFoundError:
        return None


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)
