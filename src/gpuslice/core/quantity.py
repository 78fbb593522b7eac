"""Kubernetes quantities that must be whole numbers: "4", "4k", 4 and "4000m" are, "4.5" and "abc" are not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

_NUMBER = r"[+-]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})"
_SUFFIX = r"[numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,2}"
_QUANTITY = re.compile(f"({_NUMBER})({_SUFFIX})?", re.ASCII)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def whole_number(value: object) -> int | None:
    """The whole number that a quantity of the API stands for, None when it stands for none.

    The rules are those of apimachinery's ``resource.Quantity``; a bool or a structure is no quantity.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if not isinstance(value, str):
        return None
    if len(value) < 16 and value.isascii() and value.isdecimal():  # nearly every quantity we meet
        return int(value)
    number = _number(value)
    return int(number) if number is not None and number.denominator == 1 else None


def scaled(value: object, factor: int) -> int | None:
    """`factor` times a quantity, rounded down; None when the value is no quantity."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        from fractions import Fraction

        return int(Fraction(value) * factor)  # a product of floats may be beyond them
    number = _number(value) if isinstance(value, str) else None
    return None if number is None else int(number * factor)


def _number(text: str) -> Fraction | None:
    from fractions import Fraction  # not for whole numbers, which nearly all are

    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, suffix = Fraction(match[1]), match[2] or ""
    if suffix in _BINARY:
        return number * Fraction(2) ** _BINARY[suffix]
    if suffix in _DECIMAL:
        return number * Fraction(10) ** _DECIMAL[suffix]
    return number * Fraction(10) ** int(suffix[1:]) if suffix else number
