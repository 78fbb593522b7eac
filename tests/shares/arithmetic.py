"""share.c, as the library is built for tests."""

from __future__ import annotations

import ctypes

from gpuslice.adapters.region import layout


class Sample(ctypes.Structure):
    _fields_ = (
        ("until_us", ctypes.c_uint64),
        ("own_percent", ctypes.c_int32),
        ("others_percent", ctypes.c_int32),
        ("listed", ctypes.c_uint32),
    )


class Past(ctypes.Structure):
    """How far the account was at 256 moments."""

    _fields_ = (
        ("moments", ctypes.c_uint64 * 3 * 256),
        ("count", ctypes.c_uint32),
        ("settled", ctypes.c_uint64 * 3),
    )


class Arithmetic:
    """share.c."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        card, u64, u32 = ctypes.POINTER(layout.Card), ctypes.c_uint64, ctypes.c_uint32
        self.headroom = library.gs_share_headroom
        self.headroom.argtypes, self.headroom.restype = (card, u32, u64, u64), ctypes.c_int64
        self.wait = library.gs_share_wait_ns
        self.wait.argtypes, self.wait.restype = (u32, ctypes.c_int64), u64
        self.charge = library.gs_share_charge
        self.charge.argtypes, self.charge.restype = (card, u64, u64), u64
        self.spend = library.gs_share_spend
        self.spend.argtypes, self.spend.restype = (card, u64), None
        self.is_divided = library.gs_share_is_divided
        self.is_divided.argtypes, self.is_divided.restype = (card,), ctypes.c_bool
        self.ask = library.gs_share_ask
        self.ask.argtypes, self.ask.restype = (card, u64, u64), ctypes.c_int
        self.note = library.gs_share_note
        self.note.argtypes, self.note.restype = (ctypes.POINTER(Past), card, u64), None
        self.learn = library.gs_share_learn
        sample, past = ctypes.POINTER(Sample), ctypes.POINTER(Past)
        self.learn.argtypes = (card, u32, u64, u64, past, sample, u64, ctypes.c_int)
        self.learn.restype = None
