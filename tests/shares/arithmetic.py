"""share.c, fairness.c and card_queue.c, as the library is built for tests."""

from __future__ import annotations

import ctypes
from typing import Final

from gpuslice.adapters.region import layout

MOST_NEIGHBOURS: Final = 32
U64, U32, I64, BOOL, DOUBLE = (
    ctypes.c_uint64,
    ctypes.c_uint32,
    ctypes.c_int64,
    ctypes.c_bool,
    ctypes.c_double,
)


class Share(ctypes.Structure):
    _fields_ = (("weight", U32), ("cap", U32), ("interactive", BOOL))


class Sample(ctypes.Structure):
    _fields_ = (
        ("until_us", U64),
        ("own_percent", ctypes.c_int32),
        ("others_percent", ctypes.c_int32),
        ("listed", U32),
    )


class Past(ctypes.Structure):
    """How far the account was at 256 moments."""

    _fields_ = (("moments", U64 * 3 * 256), ("count", U32), ("settled", U64 * 3))


class Claim(ctypes.Structure):
    _fields_ = tuple(
        (name, U64)
        for name in (
            "magic",
            "check",
            "virtual_ns",
            "busy_ns",
            "busy_at_ns",
            "wants_until_ns",
            "under_way",
            "weight",
            "interactive",
        )
    )


class Neighbour(ctypes.Structure):
    _fields_ = (
        ("virtual_ns", U64),
        ("busy_ns", U64),
        ("weight", U32),
        ("interactive", BOOL),
        ("wants", BOOL),
    )


class Neighbourhood(ctypes.Structure):
    _fields_ = (
        ("others", Neighbour * MOST_NEIGHBOURS),
        ("count", U32),
        ("read_ns", U64),
        ("had_work", DOUBLE * (MOST_NEIGHBOURS + 1)),
        ("container_busy_ns", U64),
        ("own_busy_ns", U64),
    )


class UnderWay(ctypes.Structure):
    _fields_ = (("ns", U64), ("unknown", U64))


class Stream(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("own", BOOL))


STREAM = ctypes.POINTER(Stream)
CREATE = ctypes.CFUNCTYPE(ctypes.c_void_p)
RECORD = ctypes.CFUNCTYPE(BOOL, ctypes.c_void_p, STREAM)
QUERY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
ELAPSED = ctypes.CFUNCTYPE(BOOL, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(U64))


class Events(ctypes.Structure):
    _fields_ = (("create", CREATE), ("record", RECORD), ("query", QUERY), ("elapsed", ELAPSED))


class Queue(ctypes.Structure):
    """What stands before the batches, and room for them."""

    _fields_ = (
        ("batches_ever", U64),
        ("in_flight_ns", U64),
        ("covered_ns", U64),
        ("finished_ns", U64),
        ("count", U32),
        ("unknown", U32),
        ("rest", ctypes.c_char * 65536),
    )


class Contention(ctypes.Structure):
    _fields_ = (
        ("now_ns", U64),
        ("waited_ns", U64),
        ("in_flight_ns", U64),
        ("unknown", U64),
        ("beside", ctypes.POINTER(Neighbourhood)),
    )


class Arithmetic:
    """The functions, by the words behind their prefix."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        card, share = ctypes.POINTER(layout.RegionCard), ctypes.POINTER(Share)
        beside, claim = ctypes.POINTER(Neighbourhood), ctypes.POINTER(Claim)
        sample, past = ctypes.POINTER(Sample), ctypes.POINTER(Past)
        queue, events, batch = ctypes.POINTER(Queue), ctypes.POINTER(Events), ctypes.c_void_p
        self.headroom = self._function("gs_share_headroom", I64, card, share, U64, U64)
        self.is_owed = self._function("gs_share_is_owed", BOOL, card, share, U64, U64)
        self.share_wait = self._function("gs_share_wait_ns", U64, share, I64)
        self.charge = self._function("gs_share_charge", U64, card, share, U64, DOUBLE)
        self.spend = self._function("gs_share_spend", None, card, share, U64)
        self.is_divided = self._function("gs_share_is_divided", BOOL, card)
        self.ask = self._function("gs_share_ask", ctypes.c_int, card, U64, U64)
        self.note = self._function("gs_share_note", None, past, card, U64)
        self.learn = self._function(
            "gs_share_learn", None, card, share, U64, U64, past, sample, U64, ctypes.c_int
        )
        self.claim = self._function("gs_claim", Claim, card, share, beside, U64, UnderWay, U64, BOOL)
        self.told = self._function("gs_told", Neighbour, claim, U64)
        self.update = self._function(
            "gs_neighbourhood_update", None, beside, card, U64, ctypes.POINTER(Neighbour), U32
        )
        self.lead = self._function("gs_lead_ns", I64, card, share, U64, beside)
        self.wake = self._function("gs_wake", None, card, U64, beside)
        self.stay = self._function("gs_stay", None, card, U64)
        self.own_part = self._function("gs_own_part", DOUBLE, card, U64, beside)
        self.begin = self._function("gs_queue_begin", batch, queue, events, STREAM, U64, U64)
        self.end = self._function("gs_queue_end", None, batch, events, BOOL)
        self.estimate = self._function("gs_queue_estimate_ns", U64, queue, U64)
        self.look = self._function("gs_queue_look", U64, queue, events, U64, BOOL, DOUBLE)
        contention = ctypes.POINTER(Contention)
        self.wait = self._function("gs_queue_wait_ns", U64, queue, card, share, contention, STREAM, U64)

    def _function(self, name: str, result, *arguments):  # type: ignore[no-untyped-def]
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, result
        return function
