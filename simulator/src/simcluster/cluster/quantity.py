"""Quantities of resources (``4``, ``500m``, ``1Gi``): parsed to exact numbers, written in canonical form."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache

_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_PATTERN = re.compile(r"^([+-]?(?:\d+(?:\.\d*)?|\.\d+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$", re.ASCII)

FORMAT_ERROR = (
    r"quantities must match the regular expression "
    r"'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
)


def _split(text: str) -> tuple[Decimal, str]:
    match = _PATTERN.match(text)
    if match is None:
        raise ValueError(FORMAT_ERROR)
    number, suffix = match.groups()
    try:
        return Decimal(number), suffix or ""
    except InvalidOperation as error:  # pragma: no cover - the pattern admits only numbers
        raise ValueError(FORMAT_ERROR) from error


def parse_quantity(text: str) -> Decimal:
    """The exact value in base units; ValueError with the API server's sentence if it is no quantity."""
    number, suffix = _split(text)
    if suffix in _BINARY:
        return number * Decimal(1024) ** _BINARY[suffix]
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    return number.scaleb(int(suffix[1:]))


@lru_cache(maxsize=4096)
def canonical_quantity(text: str) -> str:
    """As the API server writes it back: the largest suffix that leaves a whole number."""
    _, suffix = _split(text)
    value = parse_quantity(text)
    if suffix in _BINARY and abs(value) >= 1024:
        return _canonical_binary(value)
    if suffix[:1] in ("e", "E") and suffix not in _DECIMAL:
        whole, exponent = _reduce(value)
        return f"{whole}e{exponent}" if exponent else str(whole)
    return _canonical_decimal(value)


def _canonical_binary(value: Decimal) -> str:
    if value != value.to_integral_value():
        return _canonical_decimal(value)
    whole = int(value)
    for suffix, power in reversed(_BINARY.items()):
        if whole and whole % 1024**power == 0:
            return f"{whole // 1024**power}{suffix}"
    return str(whole)


def _reduce(value: Decimal) -> tuple[int, int]:
    """The value as a whole number times ten to a multiple of three; rounded up below a billionth."""
    exponent = -9
    whole = int(value.scaleb(9).to_integral_value("ROUND_CEILING"))
    while whole and whole % 1000 == 0 and exponent < 18:
        whole //= 1000
        exponent += 3
    return whole, exponent if whole else 0


def _canonical_decimal(value: Decimal) -> str:
    whole, exponent = _reduce(value)
    suffixes = {power: suffix for suffix, power in _DECIMAL.items()}
    return f"{whole}{suffixes[exponent]}"
