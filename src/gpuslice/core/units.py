"""Memory units and the limit formula.

A unit is one step of ``aliyun.com/gpu-mem``: a GiB of the card, rounded down, or a MiB where the node is
configured so. What rounding down loses is distributed over the units, so `limit_mib` of all units is the
whole card: 16130 MiB are 15 units, and 4 of them are 4301 MiB.
"""

MIB = 1 << 20
UNIT_MIB = {"GiB": 1024, "MiB": 1}
MOST_GIB = 1000  # no card has so many GiB
MOST_UNITS = 1_000_000_000
"""For a card or a pod. "4Gi" and 10^12 are mistakes, not amounts; and all sums fit into 32 bits."""


def card_units(total_mib: int, unit: str = "GiB") -> int:
    """How many whole units a card of `total_mib` MiB has; `unit` is "GiB" or "MiB"."""
    return total_mib // UNIT_MIB[unit]


def limit_mib(total_mib: int, request_units: int, units: int) -> int:
    """The memory limit in MiB of `request_units` on a card of `total_mib` MiB cut into `units` units.

    Proven on all seven published points of the vendor's documents. Raises ValueError for a card without
    units or a request outside 0…units.
    """
    if units <= 0:
        raise ValueError(f"a card of {total_mib} MiB with {units} units cannot be divided")
    if not 0 <= request_units <= units:
        raise ValueError(f"{request_units} units are not within a card of {units}")
    return total_mib * request_units // units


def worth_mib(total_mib: int, units: int, card_units: int) -> int:
    """What `units` of a card are shown as, in MiB. On a card of unknown size a unit is a GiB, or a MiB where
    it has more of them than any card has GiB.
    """
    if total_mib:
        return limit_mib(total_mib, units, card_units)
    return units * (UNIT_MIB["MiB"] if card_units >= MOST_GIB else UNIT_MIB["GiB"])


def limit_bytes(total_mib: int, request_units: int, units: int) -> int:
    """`limit_mib` in bytes: always a whole number of MiB, as the vendor's tools print it."""
    return limit_mib(total_mib, request_units, units) * MIB
