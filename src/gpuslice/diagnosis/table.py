"""Text in columns, laid out as by Go's ``text/tabwriter`` with the settings (0, 0, 2, ' ', 0).

The tools whose output ours must equal byte for byte, including trailing spaces, print with it. The rules,
from the package's documentation: a tab *ends* a cell; consecutive cells in a column form a block with one
width, the widest plus two; text after the last tab of a line is not part of a column.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
_PADDING = 2
COMFORTABLE, LEAST, PROSE = 24, 10, 44
"""Width of a column of names below which other columns are left out; the least width; what a last column of
sentences is left.
"""


def aligned(text: str) -> str:
    """`text` with its tabs replaced by the spaces that align it."""
    lines = [line.split("\t") for line in text.split("\n")]
    widths: list[list[int]] = [[] for _ in lines]
    for column in range(max(map(len, lines)) - 1):
        block: list[int] = []  # consecutive lines that have this column: it has the same width in all of them
        for number in range(len(lines) + 1):
            if number < len(lines) and column < len(lines[number]) - 1:
                block.append(number)
                continue
            width = max((len(lines[member][column]) for member in block), default=0) + _PADDING
            for member in block:
                widths[member].append(width)
            block = []
    return "\n".join(
        "".join(cell.ljust(width) for cell, width in zip(line, [*wide, 0], strict=True))
        for line, wide in zip(lines, widths, strict=True)
    )


def fitted(
    rows: Sequence[Sequence[str]],
    cut: Sequence[int],
    drop: Sequence[int] = (),
    width: int | None = None,
    *,
    prose: bool = False,
) -> str:
    """Rows in columns that fit `width`, which is the terminal's unless given; a pipe has none.

    The columns `drop` are left out, the first of them first, where names would have less than `COMFORTABLE`
    characters, and the names in `cut` are shortened. `prose`: the last column is sentences, which end where
    the room does.
    """
    if not rows:
        return ""
    widths = {column: max(len(each[column]) for each in rows) for column in range(len(rows[0]))}
    if width is None and sys.stdout.isatty():
        import shutil  # not for who writes into a pipe

        width = shutil.get_terminal_size().columns
    last = len(rows[0]) - 1
    if width is not None and prose:
        sentences = widths.pop(last)
        left = width - min(PROSE, sentences) - _PADDING
        widths = widths_within(left, widths, cut, dict.fromkeys(drop, COMFORTABLE))
        widths[last] = min(sentences, max(LEAST, width - sum(widths.values()) - _PADDING * len(widths)))
    elif width is not None:
        widths = widths_within(width, widths, cut, dict.fromkeys(drop, COMFORTABLE))
    cutters = {last: begun} if prose else {}
    lines = [
        [cutters.get(column, shortened)(each[column], wide) for column, wide in widths.items()]
        for each in rows
    ]
    return "\n".join(line.rstrip() for line in aligned("".join(row(*line) for line in lines)).split("\n"))


def widths_within(
    room: int, widths: Mapping[T, int], cut: Collection[T], drop: Mapping[T, int]
) -> dict[T, int]:
    """The columns that fit `room`, with their widths: first those of `drop` are left out, where the columns
    in `cut` would be narrower than that, and then these are cut.
    """
    shown = dict(widths)

    def total(longest: int) -> int:
        wide = sum(min(wide, longest) if each in cut else wide for each, wide in shown.items())
        return wide + _PADDING * (len(shown) - 1)

    for column, least in drop.items():
        if total(least) > room:
            shown.pop(column, None)
    longest = max(shown.values())
    while total(longest) > room and longest > LEAST:
        longest -= 1
    return {each: min(wide, longest) if each in cut else wide for each, wide in shown.items()}


def shortened(name: str, width: int) -> str:
    """Keeps its beginning and its end, which distinguish replicas and nodes."""
    if len(name) <= width:
        return name
    tail = width // 3
    return f"{name[: width - tail - 1]}…{name[len(name) - tail :]}"


def begun(sentence: str, width: int) -> str:
    """Its beginning, which says what it is about."""
    return sentence if len(sentence) <= width else f"{sentence[: width - 1].rstrip()}…"


def row(*cells: object) -> str:
    """One line of cells; the last one is not part of a column."""
    return "\t".join(map(str, cells)) + "\n"


def closed_row(*cells: object) -> str:
    """One line of cells, each terminated by a tab."""
    return "".join(f"{cell}\t" for cell in cells) + "\n"


def dashes(count: int) -> str:
    return "-" * count + "\n"


def size(text: str) -> int:
    """The length in bytes, which the original tools use for their rulers."""
    return len(text.encode())
