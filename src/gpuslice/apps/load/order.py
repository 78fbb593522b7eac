"""What a command line of ``gpuslice load`` requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from gpuslice.apps.command_line import FiniteRange
from gpuslice.apps.load.fields import BETWEEN_CARDS, WORKS, Work
from gpuslice.apps.load.judge import Who

LENGTH, STEP = FiniteRange(min=0), FiniteRange(min=0.1)
PERCENT = FiniteRange(min=0)
LONGEST_CARD = 5
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Order:
    """What the command line requests."""

    works: tuple[Work, ...]
    cards: tuple[int, ...]
    duration_s: float
    report_s: float
    level: float
    hold_bytes: int
    grow_bytes: int
    url: str
    who: Who
    tolerance: float
    as_json: bool

    def say(self, line: str = "") -> None:
        if not self.as_json:
            click.echo(line)


def order_of(given: dict[str, Any]) -> Order:
    """The command line's options as values. Raises `click.BadParameter`."""
    environ = os.environ
    if not 0 <= given["level"] <= 100:
        raise click.BadParameter(f"level is {given['level']}, must be 0 to 100")
    who = Who(
        "",
        given["namespace"] or environ.get("POD_NAMESPACE", ""),
        given["pod"] or environ.get("POD_NAME", ""),
        given["container"],
    )
    text = given["cards"]
    parts = [part.strip() for part in text.split(",")]
    numbers = all(part.isdecimal() and len(part) < LONGEST_CARD for part in parts)
    if not numbers or len(set(parts)) != len(parts) or len(parts) > 2:
        raise click.BadParameter(f'cards are "{text}", must be one number, or two for copies between cards')
    cards = tuple(int(part) for part in parts)
    works = tuple(works_of(given["fields"].strip(), between_cards=len(cards) > 1))
    if not works and not given["hold"] and not given["grow"]:
        works = (WORKS[1001],)
    return Order(
        works=works,
        cards=cards,
        duration_s=given["duration"],
        report_s=given["report"],
        level=1.0 if given["target_max_value"] else given["level"] / 100,
        hold_bytes=size_bytes(given["hold"]),
        grow_bytes=size_bytes(given["grow"]),
        url=given["url"],
        who=who,
        tolerance=given["tolerance"] / 100,
        as_json=given["output"] == "json",
    )


def works_of(text: str, *, between_cards: bool) -> Iterator[Work]:
    """The kinds of work for field ids, or for "all". Raises `click.BadParameter`."""
    if text == "all":
        yield from (work for work in WORKS.values() if between_cards or work.kind not in BETWEEN_CARDS)
        return
    by_id = {str(number): work for number, work in WORKS.items()}
    for part in filter(None, (each.strip() for each in text.split(","))):
        if part not in by_id:
            raise click.BadParameter(
                f'field id is "{part}", must be one of {min(WORKS)} to {max(WORKS)}, or all'
            )
        yield by_id[part]


def size_bytes(text: str) -> int:
    """``4GiB``, ``512M`` or plain bytes; 0 for an empty text."""
    if not text:
        return 0
    number = text.rstrip("iBKMGb ")
    unit = text[len(number) :].strip().upper().removesuffix("B").removesuffix("I")
    try:
        found = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        found = 0
    if found <= 0:
        raise click.BadParameter(f'size is "{text}", must be e.g. 4GiB or 512MiB')
    return found
