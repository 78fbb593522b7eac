"""Whether this machine's dynamic loader would put a library into a program: by the file's first bytes."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

_HEAD = struct.Struct("<16xHHIQQQIHHH")  # Elf64_Ehdr up to e_phnum
_INTERPRETER = 3  # PT_INTERP
_MOST_BYTES = 4096  # program headers stand right behind the head


def why_not_held(path: Path) -> str:
    """What kind of program it is if the preload library cannot be in it; "" if it can, or for all we know."""
    try:
        with path.open("rb") as file:
            begin = file.read(_MOST_BYTES)
    except OSError:
        return ""
    if sys.byteorder != "little" or begin[:4] != b"\x7fELF" or len(begin) < _HEAD.size:
        return ""  # a script, say: its interpreter counts
    if begin[4] != 2:
        return "a 32-bit program"
    _, _, _, _, headers_at, _, _, _, size, count = _HEAD.unpack_from(begin)
    kinds = [
        struct.unpack_from("<I", begin, at)[0]
        for at in range(headers_at, headers_at + size * count, size or 1)
        if at + 4 <= len(begin)
    ]
    return "" if _INTERPRETER in kinds or len(kinds) < count else "linked statically"
