"""The region as Python reads it is the one that C writes, and nothing in it can hurt the reader."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.region import layout
from gpuslice.adapters.region.living import of_the_living
from gpuslice.adapters.region.reader import (
    MOST_BYTES,
    MOST_COUNTED,
    CardUsage,
    Counts,
    RegionError,
    RegionFile,
    RegionReading,
    parse_region,
    prepare_region,
    read_region,
    with_region,
)

BUILD = Path(__file__).resolve().parents[2] / "native/build/tests"
STRUCTURES = {
    "gpuslice_card": layout.RegionCard,
    "gpuslice_usage": layout.RegionUsage,
    "gpuslice_slot": layout.RegionSlot,
    "gpuslice_driver_file": layout.DriverFile,
    "gpuslice_figure": layout.FigureEntry,
    "gpuslice_figures": layout.FiguresHead,
}


class Accounts(ctypes.Structure):
    """struct gs_accounts, of which only its size is known here."""

    _fields_ = (("opaque", ctypes.c_uint64 * 4096),)


@pytest.fixture(scope="module")
def parts() -> ctypes.CDLL:
    if not (BUILD / "libparts.so").exists():
        pytest.skip("native/build/tests is not built: make native")
    library = ctypes.CDLL(str(BUILD / "libparts.so"))
    accounts, card, amount = ctypes.POINTER(Accounts), ctypes.c_uint32, ctypes.c_uint64
    library.gs_accounts_open.argtypes = (accounts, ctypes.c_char_p)
    library.gs_accounts_open.restype = ctypes.c_bool
    library.gs_accounts_card.argtypes = (accounts, ctypes.c_char_p)
    library.gs_accounts_reserve.argtypes = (accounts, card, amount, amount)
    library.gs_accounts_reserve.restype = ctypes.c_bool
    library.gs_accounts_return.argtypes = (accounts, card, amount)
    library.gs_accounts_return.restype = None
    library.gs_accounts_used.argtypes = (accounts, card)
    library.gs_accounts_used.restype = amount
    return library


def test_every_field_is_where_c_has_it() -> None:
    if not (BUILD / "region_layout").exists():
        pytest.skip("native/build/tests is not built: make native")
    printed = subprocess.run([BUILD / "region_layout"], capture_output=True, text=True, check=True).stdout
    *fields, constants = printed.splitlines()
    for line in fields:
        structure, name, offset, size = line.split()
        mirror = STRUCTURES.get(structure)
        if name == "of":
            assert ctypes.sizeof(layout.FiguresHead) == int(offset)
        elif mirror is not None:
            field = getattr(mirror, name)
            assert (field.offset, field.size) == (int(offset), int(size)), f"{structure}.{name}"
        elif name == "slots":
            assert ctypes.sizeof(layout.RegionHead) == int(offset)
        else:
            assert getattr(layout.RegionHead, name).offset == int(offset)
    here = (layout.MAGIC, layout.VERSION, layout.CARDS, layout.SLOTS, layout.REGION_BYTES)
    assert tuple(map(int, constants.split()[1:])) == here


def test_what_c_reserves_python_reads(parts: ctypes.CDLL, tmp_path: Path) -> None:
    path = tmp_path / "region"
    prepare_region(path)
    assert read_region(path) is None
    accounts = Accounts()
    assert parts.gs_accounts_open(ctypes.byref(accounts), str(path).encode())
    card = parts.gs_accounts_card(ctypes.byref(accounts), b"GPU-1")
    assert parts.gs_accounts_reserve(ctypes.byref(accounts), card, 600, 1000)
    assert not parts.gs_accounts_reserve(ctypes.byref(accounts), card, 401, 1000)
    assert parts.gs_accounts_reserve(ctypes.byref(accounts), card, 400, 1000)
    parts.gs_accounts_return(ctypes.byref(accounts), card, 300)
    usage = only_card(path)
    assert (usage.uuid, usage.used_bytes, usage.peak_bytes) == ("GPU-1", 700, 1000)
    assert [process.used_bytes for process in usage.processes] == [700]


def only_card(path: Path) -> CardUsage:
    reading = read_region(path)
    assert reading is not None
    (card,) = reading.cards
    return card


def test_giving_back_more_than_there_is_leaves_nothing_not_a_vast_number(
    parts: ctypes.CDLL, tmp_path: Path
) -> None:
    accounts = Accounts()
    assert parts.gs_accounts_open(ctypes.byref(accounts), str(tmp_path / "region").encode())
    card = parts.gs_accounts_card(ctypes.byref(accounts), b"GPU-1")
    assert parts.gs_accounts_reserve(ctypes.byref(accounts), card, 10, 1000)
    parts.gs_accounts_return(ctypes.byref(accounts), card, 5000)
    assert parts.gs_accounts_used(ctypes.byref(accounts), card) == 0


def test_a_slot_of_a_process_that_reuses_a_pid_is_emptied(parts: ctypes.CDLL, tmp_path: Path) -> None:
    """The pid is alive, ours even, but the start time says that the slot is another's."""
    path = tmp_path / "region"
    accounts = Accounts()
    assert parts.gs_accounts_open(ctypes.byref(accounts), str(path).encode())
    card = parts.gs_accounts_card(ctypes.byref(accounts), b"GPU-1")
    assert parts.gs_accounts_reserve(ctypes.byref(accounts), card, 1, 1000)
    data = bytearray(path.read_bytes())
    start, size = ctypes.sizeof(layout.RegionHead), ctypes.sizeof(layout.RegionSlot)
    mine = layout.RegionSlot.from_buffer_copy(data, start)
    ghost = layout.RegionSlot.from_buffer_copy(bytes(size))
    ghost.owner = mine.owner ^ (1 << layout.PID_BITS)  # the same pid and namespace, another start time
    ghost.start_time = mine.start_time ^ 1
    ghost.usage[card].used_bytes = 900
    with path.open("r+b") as file:
        file.seek(start + size)
        file.write(bytes(ghost))
        file.seek(layout.RegionHead.slots_high.offset)
        file.write((2).to_bytes(8, "little"))
    assert parts.gs_accounts_used(ctypes.byref(accounts), card) == 901
    assert parts.gs_accounts_reserve(ctypes.byref(accounts), card, 999, 1000)
    assert parts.gs_accounts_used(ctypes.byref(accounts), card) == 1000


def test_a_region_of_another_layout_grants_nothing(parts: ctypes.CDLL, tmp_path: Path) -> None:
    path = tmp_path / "region"
    newer = layout.MAGIC | (layout.VERSION + 1)
    path.write_bytes(newer.to_bytes(8, "little") + bytes(layout.REGION_BYTES))
    accounts = Accounts()
    assert not parts.gs_accounts_open(ctypes.byref(accounts), str(path).encode())
    assert not parts.gs_accounts_reserve(ctypes.byref(accounts), 0, 1, 1000)
    with pytest.raises(RegionError):
        read_region(path)


@pytest.mark.parametrize("seed", range(20))
def test_garbage_neither_hurts_the_reader_nor_stays(parts: ctypes.CDLL, tmp_path: Path, seed: int) -> None:
    """Whatever somebody wrote over the region: who next needs room finds slots without owners."""
    path = tmp_path / "region"
    dice = random.Random(seed)
    data = bytearray(dice.randbytes(layout.REGION_BYTES))
    path.write_bytes(data)
    with pytest.raises(RegionError):
        read_region(path)
    accounts = Accounts()
    assert parts.gs_accounts_open(ctypes.byref(accounts), str(path).encode())
    read_region(path)
    card = parts.gs_accounts_card(ctypes.byref(accounts), b"GPU-1")
    assert card == 0  # what stood there is the key of no uuid
    assert parts.gs_accounts_reserve(ctypes.byref(accounts), card, 100, 1000)
    assert not parts.gs_accounts_reserve(ctypes.byref(accounts), card, 1000, 1000)
    assert parts.gs_accounts_used(ctypes.byref(accounts), card) == 100


@pytest.mark.parametrize("keep", [0, 1, 4096, layout.REGION_BYTES - 1])
def test_a_region_cut_short_is_refused_by_the_reader_and_grown_by_the_next_process(
    parts: ctypes.CDLL, tmp_path: Path, keep: int
) -> None:
    path = tmp_path / "region"
    prepare_region(path)
    with path.open("r+b") as file:
        file.truncate(keep)
    with pytest.raises(RegionError):
        read_region(path)
    accounts = Accounts()
    assert parts.gs_accounts_open(ctypes.byref(accounts), str(path).encode())
    assert path.stat().st_size >= layout.REGION_BYTES


def test_no_region_is_no_reading(tmp_path: Path) -> None:
    assert read_region(tmp_path / "region") is None


def test_too_few_bytes_are_named() -> None:
    with pytest.raises(RegionError, match=str(layout.REGION_BYTES)):
        parse_region(b"short")


def test_a_fresh_region_does_not_touch_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "region"
    prepare_region(path)
    with path.open("r+b") as old:
        old.write(b"still mine")
        prepare_region(path)
        old.seek(0)
        assert old.read(10) == b"still mine"
    assert path.read_bytes()[:10] == bytes(10)
    assert path.stat().st_mode & 0o777 == 0o666


HEAD_BYTES = ctypes.sizeof(layout.RegionHead)


def a_good_region(slots: int) -> bytearray:
    data = bytearray(layout.REGION_BYTES)
    head = layout.RegionHead.from_buffer(data)
    head.magic, head.slots_high = layout.MAGIC | layout.VERSION, slots
    for index in range(3):
        card = head.cards[index]
        card.key, card.uuid, card.limit_bytes = index + 1, f"GPU-{index}".encode(), 1 << 30
    for number in range(slots):
        slot = layout.RegionSlot.from_buffer(data, HEAD_BYTES + number * ctypes.sizeof(layout.RegionSlot))
        slot.owner, slot.pid, slot.start_time = number + 1, number + 1, 5
        slot.usage[number % 3].used_bytes = 1 << 20
    return data


# Where words count: the heads of cards and slots. Anywhere else is left to chance.
PLACES = st.one_of(
    st.integers(0, HEAD_BYTES // 8 - 1),
    st.integers(0, (HEAD_BYTES + 4 * ctypes.sizeof(layout.RegionSlot)) // 8 - 1),
)
WORDS = st.one_of(st.sampled_from([0, 1, 2**63, 2**64 - 1, 2**50, 2**50 + 1]), st.integers(0, 2**64 - 1))


@given(
    st.lists(st.tuples(PLACES, WORDS), max_size=40), st.integers(0, 4), st.sampled_from([0, 7, 9000, None])
)
def test_no_word_that_somebody_writes_hurts_the_reader(
    tmp_path_factory: pytest.TempPathFactory, words: list[tuple[int, int]], slots: int, keep: int | None
) -> None:
    """It is read, or named as what it is; and read in pieces it says the same."""
    data = a_good_region(slots)
    for place, word in words:
        data[place * 8 : place * 8 + 8] = word.to_bytes(8, "little")
    path = tmp_path_factory.getbasetemp() / "region-of-words"
    path.write_bytes(data[:keep])
    with closing(RegionFile(path)) as file:
        whole, pieces = cards_or_error(lambda: read_region(path)), cards_or_error(file.cards)
    assert isinstance(whole, RegionError) == isinstance(pieces, RegionError) or keep == 9000
    for card in () if isinstance(whole, RegionError) else whole:
        assert card.uuid.startswith(("GPU-", "MIG-"))
        assert 0 <= card.used_bytes <= (layout.SLOTS + 1) * MOST_BYTES
        assert 0 <= card.peak_bytes <= MOST_BYTES
        assert of_the_living(card).used_bytes <= card.used_bytes


def test_a_region_that_names_cards_without_end_costs_no_more_than_one_of_its_cards() -> None:
    """The agent reads each region twice a second: all slots on all sixteen entries were 30 ms of its loop."""
    data = a_good_region(layout.SLOTS)
    head = layout.RegionHead.from_buffer(data)
    for index, card in enumerate(head.cards):
        card.key, card.uuid = index + 1, b"GPU-0" if index % 2 else f"GPU-{index}".encode()
    for number in range(layout.SLOTS):
        slot = layout.RegionSlot.from_buffer(data, HEAD_BYTES + number * ctypes.sizeof(layout.RegionSlot))
        for usage in slot.usage:
            usage.used_bytes = 1 << 20
    reading = parse_region(bytes(data), {"GPU-0"})
    assert reading is not None
    assert [(card.uuid, len(card.processes)) for card in reading.cards] == [("GPU-0", layout.SLOTS)]


def test_counts_of_cards_that_are_not_the_containers_are_not_kept(tmp_path: Path) -> None:
    """With each of its starts a tenant could name sixteen more."""
    data = a_good_region(0)
    for card in layout.RegionHead.from_buffer(data).cards[:3]:
        card.refused = 2**64 - 1
    (tmp_path / "region").write_bytes(data)
    earlier = {"GPU-2": Counts(1, 7), "GPU-7": Counts(1, 1)}
    found = with_region(earlier, tmp_path / "region", ["GPU-2", "GPU-5"])
    assert found == {"GPU-2": Counts(MOST_COUNTED, 7)}


def cards_or_error(
    read: Callable[[], RegionReading | tuple[CardUsage, ...] | None],
) -> tuple[CardUsage, ...] | RegionError:
    try:
        found = read()
    except RegionError as error:
        return error
    return () if found is None else found.cards if isinstance(found, RegionReading) else found


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "endless"])
def test_what_a_tenant_puts_in_the_place_of_its_region_neither_holds_the_reader_up_nor_leads_it_away(
    kind: str, tmp_path: Path
) -> None:
    place = tmp_path / "region"
    neighbour = tmp_path / "neighbour"
    prepare_region(neighbour)
    neighbour.write_bytes(
        bytes(head_of_one_card()) + neighbour.read_bytes()[ctypes.sizeof(layout.RegionHead) :]
    )
    assert read_region(neighbour) is not None
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(neighbour)
    elif kind == "folder":
        place.mkdir()
    else:
        prepare_region(place)
        os.truncate(place, 1 << 40)
        assert read_region(place) is None  # zeros: nobody has used it
        return
    with pytest.raises((RegionError, OSError)):
        read_region(place)
    with closing(RegionFile(place)) as reader, pytest.raises((RegionError, OSError)):
        reader.cards()


def head_of_one_card() -> layout.RegionHead:
    head = layout.RegionHead(magic=layout.MAGIC | layout.VERSION)
    head.cards[0].key, head.cards[0].uuid = 1, b"GPU-1"
    return head
