"""share.c and fairness.c, as the library is built for tests, and the models of native/tests beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from gpuslice.adapters.region import layout

MOST_NEIGHBOURS: Final = 32
MOST_PROCESSES: Final = 16
"""What there is room for in native/tests/card_model.h."""
U64, U32, I64, INT, BOOL, DOUBLE = (
    ctypes.c_uint64,
    ctypes.c_uint32,
    ctypes.c_int64,
    ctypes.c_int,
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
            "pause_ns",
            "ran_from_ns",
            "ran_to_ns",
        )
    )


class Run(ctypes.Structure):
    """When the process had work on the card."""

    _fields_ = (("from_ns", U64), ("to_ns", U64))


class Report(ctypes.Structure):
    _fields_ = (
        ("at_ns", U64),
        ("work_ns", U64),
        ("busy_ns", U64),
        ("wants_until_ns", U64),
        ("ran", Run),
        ("has_turn", BOOL),
        ("unknown", BOOL),
    )


class Neighbour(ctypes.Structure):
    _fields_ = (
        ("name", U64),
        ("virtual_ns", U64),
        ("busy_ns", U64),
        ("weight", U32),
        ("interactive", BOOL),
        ("wants", BOOL),
        ("overdrawn", BOOL),
        ("ends_ns", U64),
        ("pause_ns", U64),
        ("report", Report),
    )


class Bill(ctypes.Structure):
    _fields_ = (
        ("name", U64),
        ("virtual_ns", U64),
        ("done_ns", U64),
        ("turn_virtual_ns", U64),
        ("turn_left_ns", U64),
        ("in_turn", BOOL),
    )


class Neighbourhood(ctypes.Structure):
    _fields_ = (
        ("others", Neighbour * MOST_NEIGHBOURS),
        ("count", U32),
        ("bills", Bill * MOST_NEIGHBOURS),
        ("billed_ns", U64),
        ("read_ns", U64),
        ("busy_ns", U64),
        ("rest_at_work", DOUBLE),
        ("container_busy_ns", U64),
        ("own_busy_ns", U64),
    )


class OwnPart(ctypes.Structure):
    _fields_ = (("part", DOUBLE), ("turn_ns", U64), ("others_ns", U64))


class Busy(ctypes.Structure):
    _fields_ = (("ns", U64), ("own_ns", U64))


class CardModel:
    """The functions of native/tests/card_model.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        card, process, stream = ctypes.c_void_p, U32, U32
        self.new = _function(library.card_new, ctypes.c_void_p, U64, U64, U64)
        self.free = _function(library.card_free, None, card)
        self.add_process = _function(library.card_add_process, U32, card)
        self.launch = _function(library.card_launch, None, card, process, DOUBLE, stream)
        self.has_work = _function(library.card_has_work, BOOL, card, process)
        self.has_work_on = _function(library.card_has_work_on, BOOL, card, process, stream)
        self.kill = _function(library.card_kill, None, card, process)
        self.watch = _function(library.card_watch, None, card, process)
        self.advance = _function(library.card_advance, INT, card, DOUBLE)
        self.sample = _function(library.card_sample, U64, card, ctypes.c_int32 * MOST_PROCESSES)
        self.done = _function(library.card_done, DOUBLE, card, process)
        steps = ctypes.POINTER(ctypes.c_size_t)
        self.series = _function(library.card_series, ctypes.POINTER(DOUBLE), card, process, steps)


class ThrottleModel:
    """The functions of native/tests/virtual_process.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        box, process, call = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        self.container_new = _function(library.container_new, ctypes.c_void_p, U32, U32, BOOL)
        self.container_free = _function(library.container_free, None, box)
        self.container_meet = _function(library.container_meet, None, box, box)
        self.container_entry = _function(library.container_entry, ctypes.c_void_p, box)
        self.container_under_way_ns = _function(library.container_under_way_ns, U64, box)
        self.new = _function(library.process_new, ctypes.c_void_p, box, ctypes.c_void_p, U32, BOOL)
        self.die = _function(library.process_die, None, process)
        self.claim = _function(library.process_claim, None, process, U64, BOOL, U64, U64)
        self.call = _function(
            library.process_call, ctypes.c_void_p, process, ctypes.c_char_p, U64, U32, DOUBLE
        )
        self.resume = _function(library.call_resume, INT, call, ctypes.POINTER(U64))
        self.free = _function(library.call_free, None, call)
        self.answer = _function(library.call_answer, None, call, ctypes.c_int32, ctypes.c_int32, U32)
        self.timed = _function(library.call_timed, BOOL, call)
        self.cleared = _function(library.call_cleared, BOOL, call)


def _function(function: Callable[..., Any], result: Any, *arguments: Any) -> Callable[..., Any]:
    function.argtypes, function.restype = arguments, result  # type: ignore[attr-defined]
    return function


class Arithmetic:
    """The library's functions, by the words behind their prefix, and the models."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self.card, self.throttle = CardModel(library), ThrottleModel(library)
        card, share = ctypes.POINTER(layout.RegionCard), ctypes.POINTER(Share)
        beside, claim = ctypes.POINTER(Neighbourhood), ctypes.POINTER(Claim)
        sample, past = ctypes.POINTER(Sample), ctypes.POINTER(Past)
        self.headroom = _function(library.gs_share_headroom, I64, card, share, U64, U64, BOOL)
        self.owed = _function(library.gs_share_owed_ns, I64, card, share, U64, U64, BOOL)
        self.share_wait = _function(library.gs_share_wait_ns, U64, share, I64)
        self.charge = _function(library.gs_share_charge, None, card, share, Busy)
        self.ask = _function(library.gs_share_ask, INT, card, U64, U64)
        self.note = _function(library.gs_share_note, None, past, card, U64)
        self.learn = _function(library.gs_share_learn, None, card, share, U64, U64, past, sample, U64, INT)
        self.heard = _function(library.gs_heard, Neighbour, claim, U64)
        self.update = _function(
            library.gs_neighbourhood_update, None, beside, card, U64, ctypes.POINTER(Neighbour), U32, Run
        )
        self.divide = _function(library.gs_neighbourhood_divide, None, beside, U64, Run)
        self.lead = _function(library.gs_lead_ns, I64, card, share, U64, beside, U64, U64)
        self.wake = _function(library.gs_wake, None, card, U64, U64, beside)
        self.own_part = _function(library.gs_own_part, OwnPart, card, U64, beside)
