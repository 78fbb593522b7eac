"""Text in columns, laid out as by Go's ``text/tabwriter`` with the settings (0, 0, 2, ' ', 0).

The tools whose output ours must equal byte for byte, including trailing spaces, print with it. The rules,
from the package's documentation: a tab *ends* a cell; consecutive cells in a column form a block with one
width, the widest plus two; text after the last tab of a line is not part of a column.
"""

from __future__ import annotations

_PADDING = 2


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
