"""What a command of the story should print, with marks for what varies with time and chance."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

MARKS = {
    "time": r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}",
    "age": r"\d+[smhd]\w*",
    "ago": r"\d+[smhd]\w* ago",
    "id": r"[a-z0-9-]+",
    "n": r"\d+",
    "idle": r"(?:\d+ (?:s|min)|-)",
    "address": r"[0-9.]+",
    "any": r".*",
}
_MARK = re.compile(r"«(\w+)»")


@dataclass(frozen=True, slots=True)
class Expected:
    """`text` with marks like «age». `part`: the output may have more text before and after it.

    Trailing blanks and repeated empty lines do not count, since publishing lost them. `columns`: the number
    of blanks between words does not count either, because the value of a mark has another width.
    """

    text: str
    columns: bool = False
    part: bool = False

    def fits(self, output: str) -> bool:
        search = re.search if self.part else re.fullmatch
        parts = _MARK.split(self._shape(self.text))
        return (
            search(
                "".join(re.escape(one) if n % 2 == 0 else MARKS[one] for n, one in enumerate(parts)),
                self._shape(output),
                re.MULTILINE,
            )
            is not None
        )

    def difference(self, output: str) -> str:
        """What differs, line by line, for people to read."""
        wanted, got = self._shape(self.text).splitlines(), self._shape(output).splitlines()
        return "\n".join(difflib.unified_diff(wanted, got, "documented", "printed", lineterm="", n=30))

    def _shape(self, text: str) -> str:
        lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
        if self.columns:
            lines = [re.sub(r" +", " ", line).strip() for line in lines]
        return re.sub(r"\n\n+", "\n\n", "\n".join(lines)).strip("\n")


def exactly(text: str) -> Expected:
    return Expected(text)


def columns(text: str) -> Expected:
    return Expected(text, columns=True)


def containing(text: str) -> Expected:
    return Expected(text, part=True)
