"""The limits file: what is written is read back, and Python and C accept and refuse the same texts."""

from __future__ import annotations

import ctypes
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.region import layout
from gpuslice.adapters.region.limits import (
    LimitsEntry,
    LimitsError,
    format_limits,
    parse_limits,
    read_limits,
    write_limits,
)

PARTS = Path(__file__).resolve().parents[2] / "native/build/tests/libparts.so"
UUID = "GPU-5f3a0c1e-77aa-4b1c-9d5e-0f6f2f1f9a01"
GOOD = (
    f"gpuslice 1\n{UUID} memory=4509925376 share=30 request=1073741824 shown=request\n"
    "MIG-GPU-5f3a/3/0 memory=- share=-\nend 2\n"
)


class Limit(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * layout.UUID_BYTES),
        ("memory_bytes", ctypes.c_uint64),
        ("request_bytes", ctypes.c_uint64),
        ("shown_bytes", ctypes.c_uint64),
        ("compute_percent", ctypes.c_uint32),
        ("cap_percent", ctypes.c_uint32),
        ("interactive", ctypes.c_bool),
    )


class Limits(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint32), ("cards", Limit * layout.CARDS))


@pytest.fixture(scope="module")
def parts() -> ctypes.CDLL:
    if not PARTS.exists():
        pytest.skip("native/build/tests is not built: make native")
    library = ctypes.CDLL(str(PARTS))
    library.gs_limits_parse.restype = ctypes.c_bool
    library.gs_limits_parse.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(Limits))
    return library


def by_c(parts: ctypes.CDLL, text: bytes) -> tuple[LimitsEntry, ...] | None:
    limits = Limits()
    if not parts.gs_limits_parse(text, len(text), ctypes.byref(limits)):
        return None
    return tuple(
        LimitsEntry(
            card.uuid.decode(),
            None if card.memory_bytes == layout.NO_LIMIT else card.memory_bytes,
            card.compute_percent or None,
            card.cap_percent if card.cap_percent != card.compute_percent else None,
            card.interactive,
            None if card.request_bytes == card.memory_bytes else card.request_bytes,
            card.shown_bytes == card.request_bytes < card.memory_bytes,
        )
        for card in limits.cards[: limits.count]
    )


def by_python(text: bytes) -> tuple[LimitsEntry, ...] | None:
    try:
        return tuple(map(effective, parse_limits(text.decode("latin-1"))))
    except LimitsError:
        return None


def effective(limit: LimitsEntry) -> LimitsEntry:
    """A request that is the whole limit is none, and there is nothing less to show."""
    own, most = limit.request_bytes, limit.memory_bytes
    if own is None or most is None or own == most:
        return replace(limit, request_bytes=None, shows_request=False)
    return replace(limit, shows_request=limit.shows_request and own < most)


def lent(limit: LimitsEntry, own: int | None, shown: bool) -> LimitsEntry:
    if limit.memory_bytes is None or own is None:
        return limit
    return effective(replace(limit, request_bytes=own, shows_request=shown))


UUIDS = st.builds("{}-{}".format, st.sampled_from(["GPU", "MIG"]), st.uuids().map(str))
MEMORY = st.none() | st.integers(0, 2**63 - 1)
LENDING = st.integers(1, 99).flatmap(
    lambda share: st.builds(
        LimitsEntry, UUIDS, MEMORY, st.just(share), st.none() | st.integers(share + 1, 100), st.booleans()
    )
)
PLAIN = st.builds(LimitsEntry, UUIDS, MEMORY, st.none() | st.integers(1, 100))
CARDS = st.builds(lent, PLAIN | LENDING, MEMORY, st.booleans())
LISTS = st.lists(CARDS, max_size=layout.CARDS, unique_by=lambda card: card.uuid)


@given(limits=LISTS)
def test_what_is_written_is_read_back_by_both(parts: ctypes.CDLL, limits: list[LimitsEntry]) -> None:
    text = format_limits(limits)
    assert parse_limits(text) == tuple(limits) == by_c(parts, text.encode())


PIECES = st.sampled_from(
    b"0 00 - +1 \n \r\n end~1\n end~2\n gpuslice~1\n GPU- \0 101 9223372036854775807 9223372036854775808"
    b" 99999999999999999999999 memory= request= shown=request \xff / _ ~".replace(b"\n", b"|").split()
).map(lambda piece: piece.replace(b"~", b" ").replace(b"|", b"\n"))


@given(at=st.integers(0, len(GOOD)), cut=st.integers(0, 12), piece=PIECES | st.binary(max_size=4))
def test_a_changed_file_is_the_same_to_both(parts: ctypes.CDLL, at: int, cut: int, piece: bytes) -> None:
    text = GOOD.encode()[:at] + piece + GOOD.encode()[at + cut :]
    assert by_c(parts, text) == by_python(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpuslice 1\n",
        "gpuslice 2\nend 0\n",
        "gpuslice 1\nend 0",
        "gpuslice 1\nend 1\n",
        GOOD + "\n",
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("share=30", "share=0"),
        GOOD.replace("share=30", "share=101"),
        GOOD.replace("share=30", "share=030"),
        GOOD.replace("4509925376", "4509925376.5"),
        GOOD.replace("4509925376", "-1"),
        GOOD.replace("4509925376", "9223372036854775808"),
        GOOD.replace("MIG-GPU-5f3a/3/0", UUID),
        GOOD.replace("GPU-5f3a0c1e", "gpu-5f3a0c1e"),
        GOOD.replace(UUID, "GPU-" + "a" * 100),
    ],
)
def test_what_is_no_limits_file_is_refused_by_both(parts: ctypes.CDLL, text: str) -> None:
    assert by_python(text.encode()) is None
    assert by_c(parts, text.encode()) is None


def test_seventeen_cards_are_too_many(parts: ctypes.CDLL) -> None:
    limits = [LimitsEntry(f"GPU-{number:04}", 1) for number in range(layout.CARDS + 1)]
    with pytest.raises(LimitsError):
        format_limits(limits)
    lines = "".join(f"GPU-{number:04} memory=1 share=-\n" for number in range(layout.CARDS + 1))
    assert by_c(parts, f"gpuslice 1\n{lines}end {layout.CARDS + 1}\n".encode()) is None


def test_the_file_is_put_in_place_whole_and_everybody_can_read_it(tmp_path: Path) -> None:
    limits = [LimitsEntry(UUID, 1 << 30, 25)]
    write_limits(tmp_path / "limits", limits)
    write_limits(tmp_path / "limits", limits)
    assert read_limits(tmp_path / "limits") == tuple(limits)
    assert stat.S_IMODE((tmp_path / "limits").stat().st_mode) == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation", "limits"]


def test_everybody_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_limits(tmp_path / "limits", [LimitsEntry(UUID, 1 << 30)])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "limits").stat().st_mode) == 0o644


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "limits").mkdir()
    with pytest.raises(IsADirectoryError):
        write_limits(tmp_path / "limits", [LimitsEntry(UUID, 1 << 30)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation", "limits"]


def test_no_file_means_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path / "limits") is None


def test_limits_that_could_not_be_read_back_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(LimitsError):
        write_limits(tmp_path / "limits", [LimitsEntry("Tesla", 1 << 30)])
    assert list(tmp_path.iterdir()) == []
