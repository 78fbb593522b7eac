"""Which cards of a workstation a wish is given, without a driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.adapters.gpu.source import DriverCard
from gpuslice.adapters.region.budget import Budget, BudgetError
from gpuslice.adapters.region.limits import LimitsEntry
from gpuslice.apps.cli.machine import chosen_cards, memory_bytes, named_cards, numbered
from gpuslice.core.units import MIB

CARDS = tuple(DriverCard(index, f"GPU-{letter * 8}", 16130) for index, letter in enumerate("abc"))


def budget(letter: str, memory_mib: int) -> Budget:
    limit = LimitsEntry(f"GPU-{letter * 8}", memory_mib * MIB)
    return Budget("other", Path("/nowhere"), (limit,), {}, ())


def test_cards_are_numbered_as_nvidia_smi_does_whatever_their_device_files_are() -> None:
    late = DriverCard(0, "GPU-late", 16130, pci_bus_id="00000000:81:00.0")
    early = DriverCard(3, "GPU-early", 16130, pci_bus_id="00000000:03:00.0")
    assert [(card.index, card.uuid) for card in numbered((late, early))] == [
        (0, "GPU-early"),
        (1, "GPU-late"),
    ]


def test_several_cards_are_those_with_the_most_room_in_the_machines_order() -> None:
    running = (budget("a", 8602), budget("c", 4301))
    assert [card.index for card in chosen_cards("", 2, "4", CARDS, running)] == [1, 2]
    assert [card.index for card in chosen_cards("", None, "4", CARDS, running)] == [1]
    assert [card.index for card in chosen_cards("2,0", None, "4", CARDS, running)] == [2, 0]


def test_each_of_several_cards_must_have_the_room() -> None:
    with pytest.raises(
        BudgetError, match="4301 MiB are asked for and 3226 MiB are the most that is left on card 2"
    ):
        chosen_cards("0,2", None, "4", CARDS, (budget("c", 16130 - 3226),))


def test_a_card_is_named_by_number_or_by_a_beginning_that_is_its_own() -> None:
    assert [card.index for card in named_cards("GPU-b, 0", "--gpu", CARDS)] == [1, 0]
    with pytest.raises(BudgetError, match='there is no card "GPU-"'):
        named_cards("GPU-", "--gpu", CARDS)


def test_bare_numbers_are_units_of_the_card_and_amounts_are_taken_as_they_are() -> None:
    card = CARDS[0]
    assert memory_bytes("4", card) == 4301 * MIB
    assert (
        memory_bytes("1GiB", card) == memory_bytes("1024MiB", card) == memory_bytes("1Gi", card) == 1024 * MIB
    )
    assert memory_bytes("512MiB", card) == memory_bytes("512Mi", card) == 512 * MIB
    assert memory_bytes("16", card) == 16384 * MIB  # more than it has: refused for want of room
    for same in ("1g", "1G", "1GB", "1gib", "1 GiB", "1024m"):
        assert memory_bytes(same, card) == 1024 * MIB
    for wrong in ("4.5", "0", "-1", "4T", "4iB", "G", "", "9" * 5000):
        with pytest.raises(BudgetError, match="must be a whole number of units"):
            memory_bytes(wrong, card)
