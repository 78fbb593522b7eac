"""Whether this machine's dynamic loader would load a library into a program, from the files' headers."""

from __future__ import annotations

import platform
import struct
import sys
from pathlib import Path

from gpuslice.core.errors import words_of

_HEAD = struct.Struct("<16xHHIQQQIHHH")  # Elf64_Ehdr up to e_phnum
_INTERPRETER = 3  # PT_INTERP
_SHARED = 3  # ET_DYN
_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine
_MOST_BYTES = 4096  # program headers follow directly after the ELF header


def why_not_held(path: Path) -> str:
    """What kind of program it is if the preload library cannot be loaded into it; "" if it can, or if
    unknown.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(_MOST_BYTES)
    except OSError:
        return ""
    if sys.byteorder != "little" or begin[:4] != b"\x7fELF" or len(begin) < _HEAD.size:
        return ""  # for example a script: its interpreter counts
    if begin[4] != 2:
        return "a 32-bit program"
    _, _, _, _, headers_at, _, _, _, size, count = _HEAD.unpack_from(begin)
    kinds = [
        struct.unpack_from("<I", begin, at)[0]
        for at in range(headers_at, headers_at + size * count, size or 1)
        if at + 4 <= len(begin)
    ]
    return "" if _INTERPRETER in kinds or len(kinds) < count else "linked statically"


def why_not_loaded(library: Path) -> str:
    """Why the loader would skip `library` and start programs without it; "" if it would load it."""
    try:
        with library.open("rb") as file:
            begin = file.read(_HEAD.size)
    except OSError as error:
        return f"it cannot be read: {words_of(error)}"
    if begin[:4] != b"\x7fELF" or len(begin) < _HEAD.size or _HEAD.unpack(begin)[0] != _SHARED:
        return "it is no shared library"
    machine = _HEAD.unpack(begin)[1]
    if machine != _MACHINES.get(platform.machine(), machine):
        return "it is made for another kind of processor"
    return ""
