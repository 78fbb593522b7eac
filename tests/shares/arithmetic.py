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
        self.ask = library.gs_share_ask
        self.ask.argtypes, self.ask.restype = (card, u64, u64, ctypes.c_bool), ctypes.c_int
        self.learn = library.gs_share_learn
        self.learn.argtypes = (card, u32, u64, u64, ctypes.POINTER(Sample), ctypes.c_int)
        self.learn.restype = None
