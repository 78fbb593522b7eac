"""The interposer's shared memory, field by field as native/include/region.h has it; a test compares them."""

import ctypes
from typing import Final

MAGIC: Final = 0x4C53555047000000
VERSION: Final = 4
CARDS: Final = 16
SLOTS: Final = 1024
UUID_BYTES: Final = 96
DRIVER_PATH_BYTES: Final = 232
NO_LIMIT: Final = 2**64 - 1
PID_BITS: Final = 22


class Credit(ctypes.Structure):
    """Device time that accrues at some rate and is used up by work."""

    _fields_ = (
        ("ns", ctypes.c_int64),
        ("at_ns", ctypes.c_uint64),
        ("padding", ctypes.c_uint64 * 6),
    )


class RegionCard(ctypes.Structure):
    """One card of the container."""

    _fields_ = (
        ("key", ctypes.c_uint64),
        ("uuid", ctypes.c_char * UUID_BYTES),
        ("limit_bytes", ctypes.c_uint64),
        ("compute_percent", ctypes.c_uint64),
        ("peak_bytes", ctypes.c_uint64),
        ("refused", ctypes.c_uint64),
        ("throttled_ns", ctypes.c_uint64),
        ("orphaned_bytes", ctypes.c_uint64),
        ("context_bytes", ctypes.c_uint64),
        ("asked_at_ns", ctypes.c_uint64),
        ("sampled_us", ctypes.c_uint64),
        ("unsettled_ns", ctypes.c_uint64),
        ("wanted_bytes", ctypes.c_uint64),
        ("cap", Credit),
        ("due", Credit),
        ("virtual_ns", ctypes.c_uint64),
        ("active_at_ns", ctypes.c_uint64),
        ("finished_at_ns", ctypes.c_uint64),
        ("charged_ns", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("billed_ns", ctypes.c_uint64),
        ("recent_busy_ns", ctypes.c_uint64),
        ("recent_own_ns", ctypes.c_uint64),
        ("learned_at_ns", ctypes.c_uint64),
        ("padding", ctypes.c_uint64 * 7),
    )


class RegionUsage(ctypes.Structure):
    """What one process holds of one card."""

    _fields_ = (
        ("used_bytes", ctypes.c_uint64),
        ("pending_bytes", ctypes.c_uint64),
        ("own_bytes", ctypes.c_uint64),
        ("exported_bytes", ctypes.c_uint64),
        ("imports", ctypes.c_uint64),
        ("in_flight_ns", ctypes.c_uint64),
        ("unknown", ctypes.c_uint64),
        ("changed_ns", ctypes.c_uint64),
    )


class RegionSlot(ctypes.Structure):
    """One process."""

    _fields_ = (
        ("owner", ctypes.c_uint64),
        ("start_time", ctypes.c_uint64),
        ("start_stack", ctypes.c_uint64),
        ("pid_namespace", ctypes.c_uint64),
        ("pid", ctypes.c_uint64),
        ("host_pid", ctypes.c_uint64),
        ("locked", ctypes.c_uint64),
        ("unlocked_ns", ctypes.c_uint64),
        ("provisional", ctypes.c_uint64),
        ("in_flight", ctypes.c_uint16 * CARDS),
        ("padding", ctypes.c_uint64 * 3),
        ("usage", RegionUsage * CARDS),
    )


class DriverFile(ctypes.Structure):
    """The driver's file that exported descriptors refer to."""

    _fields_ = (
        ("inode", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("check", ctypes.c_uint64),
        ("path", ctypes.c_char * DRIVER_PATH_BYTES),
    )


class RegionHead(ctypes.Structure):
    """What precedes the slots."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("slots_high", ctypes.c_uint64),
        ("swept", ctypes.c_uint64),
        ("swept_ns", ctypes.c_uint64),
        ("padding", ctypes.c_uint64 * 4),
        ("driver_file", DriverFile),
        ("cards", RegionCard * CARDS),
    )


class FigureEntry(ctypes.Structure):
    """What one process holds of one card, as the driver reports it."""

    _fields_ = (
        ("card", ctypes.c_uint64),
        ("pid", ctypes.c_uint64),
        ("start_time", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    )


class FiguresHead(ctypes.Structure):
    """What precedes the entries of the figures file."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("check", ctypes.c_uint64),
        ("at_ns", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )


REGION_BYTES: Final = ctypes.sizeof(RegionHead) + SLOTS * ctypes.sizeof(RegionSlot)
