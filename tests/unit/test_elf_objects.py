"""What the library reads of the objects that are loaded in its process."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

PARTS = Path(__file__).resolve().parents[2] / "native/build/tests/libparts.so"
DT_SYMTAB = 6
LOADED = 0x7F25_FA2B_5000
VDSO_LINKED = 0xFFFF_FFFF_FF70_0000  # gVisor's, and that of old x86-64 kernels


class Dyn(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int64), ("value", ctypes.c_uint64))


@pytest.mark.parametrize(
    ("linked", "written"),
    [(0, LOADED + 0x114), (0, 0x114), (VDSO_LINKED, VDSO_LINKED + 0x114)],
    ids=["relocated", "relative", "linked in the kernel's half"],
)
def test_an_address_in_the_dynamic_section_leads_into_the_object(linked: int, written: int) -> None:
    """A wrong one would end every program of the container at its start."""
    if not PARTS.exists():
        pytest.skip("the native parts are not built: make native")
    pointer = ctypes.CDLL(str(PARTS)).gs_elf_pointer
    pointer.restype, pointer.argtypes = ctypes.c_uint64, (ctypes.c_uint64, ctypes.POINTER(Dyn))
    base = (LOADED - linked) % (1 << 64)
    assert pointer(base, ctypes.byref(Dyn(DT_SYMTAB, written))) == LOADED + 0x114
