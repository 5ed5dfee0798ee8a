"""The bytes of a soft card's state file, as src/state.h lays them out (a test compares the two).

This module only names fields; state.py reads, creates and injects.
"""

from __future__ import annotations

import ctypes

MAGIC = 0x55504753
VERSION = 1
MAX_CARDS = 16
SLOTS = 256
EVENTS = 64
LOCK_EVENTS = 0xFFFFF
LOCK_SLOT = 0x100000
EVENT_XID = 8

_u32 = ctypes.c_uint32
_u64 = ctypes.c_uint64


class EventBytes(ctypes.Structure):
    """struct sg_event."""

    _fields_ = [
        ("seq", _u64),
        ("type", _u64),
        ("data", _u64),
        ("boottime_ns", _u64),
        ("pid", _u32),
        ("pad", _u32),
        ("name", ctypes.c_char * 24),
    ]


class SlotBytes(ctypes.Structure):
    """struct sg_slot."""

    _fields_ = [
        ("pid", _u32),
        ("contexts", _u32),
        ("start_ticks", _u64),
        ("memory_bytes", _u64),
        ("busy_ns", _u64),
        ("launches", _u64),
        ("copied_bytes", _u64),
        ("name", ctypes.c_char * 64),
        ("pad", _u64 * 2),
    ]


class CardBytes(ctypes.Structure):
    """struct sg_card."""

    _fields_ = [
        ("magic", _u32),
        ("version", _u32),
        ("size", _u32),
        ("index", _u32),
        ("memory_bytes", _u64),
        ("pci_domain", _u32),
        ("pci_bus", _u32),
        ("pci_device", _u32),
        ("pci_ids", _u32),
        ("pci_subsystem", _u32),
        ("numa_node", ctypes.c_int32),
        ("sm_count", _u32),
        ("clock_khz", _u32),
        ("memory_clock_khz", _u32),
        ("bus_width_bits", _u32),
        ("power_limit_mw", _u32),
        ("compute_major", _u32),
        ("compute_minor", _u32),
        ("pad0", _u32),
        ("uuid_raw", ctypes.c_uint8 * 16),
        ("uuid", ctypes.c_char * 48),
        ("pci_address", ctypes.c_char * 32),
        ("model", ctypes.c_char * 96),
        ("driver_version", ctypes.c_char * 32),
        ("serial", ctypes.c_char * 32),
        ("pad1", ctypes.c_uint8 * 688),
        ("lost", _u32),
        ("ecc", _u32),
        ("hang", _u32),
        ("slow", _u32),
        ("fatal_serial", _u32),
        ("fatal_error", _u32),
        ("recovery_action", _u32),
        ("last_xid", _u32),
        ("ecc_uncorrected", _u64),
        ("ecc_corrected", _u64),
        ("fault_serial", _u32),
        ("pad2", ctypes.c_uint8 * 972),
        ("busy_ns", _u64),
        ("launches", _u64),
        ("event_seq", _u64),
        ("pad3", ctypes.c_uint8 * 2024),
        ("events", EventBytes * EVENTS),
        ("slots", SlotBytes * SLOTS),
    ]
