"""What can go wrong with a soft card, and what the NVIDIA driver writes to the kernel log about it.

Texts follow the driver's real wording where it is known (NVIDIA "XID Errors", kernel logs in public bug reports).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvmpool.errors import Refused


class Kind(Enum):
    XID = "xid"
    LOST = "lost"  # off the bus: XID 79
    ECC = "ecc"  # an uncontained double-bit memory error: XID 48
    HANG = "hang"  # launches never end
    SLOW = "slow"  # launches take ten times as long
    HEAL = "heal"  # everything above is over; contexts that died stay dead


FORMS = "xid N [recovery=0..4] | lost | ecc | hang | slow | heal"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject. `xid` only with Kind.XID; `recovery_action` overrides NVML field 230 afterwards."""

    kind: Kind
    xid: int = 0
    recovery_action: int | None = None

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From the words of a command line, e.g. "xid 79". Raises Refused."""
        words = text.split()
        try:
            kind = Kind(words[0].lower())
            if kind is not Kind.XID:
                if len(words) > 1:
                    raise ValueError
                return cls(kind)
            recovery = None
            if len(words) == 3:
                name, _, value = words[2].partition("=")
                recovery = int(value) if name == "recovery" and value in "01234" else -1
            if len(words) not in (2, 3) or recovery == -1 or not 0 < int(words[1]) < 1000:
                raise ValueError
            return cls(kind, int(words[1]), recovery)
        except (ValueError, IndexError):
            raise Refused(f"no fault {text!r}. Next: use {FORMS}") from None


@dataclass(frozen=True, slots=True)
class Effect:
    """What a fault does to the shared state besides its event and log line."""

    fatal_error: int = 0  # CUresult that every living context gets from now on, 0: contexts live on
    lost: bool = False
    ecc: bool = False  # new contexts fail with 214 until healed
    uncorrected: int = 0  # ECC errors to count
    recovery_action: int = 0


_ECC_UNCORRECTABLE = 214
_LAUNCH_FAILED = 719
_UNKNOWN = 999

# XIDs after which a real card's contexts are dead; all other numbers only raise the event and the line
_EFFECTS = {
    79: Effect(fatal_error=_UNKNOWN, lost=True, recovery_action=2),
    48: Effect(fatal_error=_ECC_UNCORRECTABLE, ecc=True, uncorrected=1, recovery_action=1),
    95: Effect(fatal_error=_ECC_UNCORRECTABLE, ecc=True, uncorrected=1, recovery_action=1),
    94: Effect(fatal_error=_ECC_UNCORRECTABLE, uncorrected=1, recovery_action=4),  # contained: new contexts work
    64: Effect(recovery_action=1),
    **{xid: Effect(fatal_error=_LAUNCH_FAILED, recovery_action=1) for xid in (46, 62, 110, 119, 120, 136, 140, 143)},
}

_RECOVERY_NAMES = ("None", "GPU Reset Required", "Node Reboot Required", "Drain P2P", "Drain and Reset")


def effect_of(fault: Fault) -> Effect:
    """Of an XID, LOST or ECC fault."""
    effect = _EFFECTS.get(xid_of(fault), Effect())
    if fault.recovery_action is not None:
        return Effect(effect.fatal_error, effect.lost, effect.ecc, effect.uncorrected, fault.recovery_action)
    if fault.xid == 154:
        return Effect(recovery_action=1)
    return effect


def xid_of(fault: Fault) -> int:
    """The number its event and line carry; 0: it raises none."""
    return {Kind.XID: fault.xid, Kind.LOST: 79, Kind.ECC: 48}.get(fault.kind, 0)


_NOBODY = "pid='<unknown>', name=<unknown>, "
_CHANNEL = "pid={pid}, name={name}, Ch 00000008"

_LINES = {
    13: "pid={pid}, name={name}, Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Illegal Instruction Encoding",
    31: _CHANNEL + ", intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f12_34560000."
    " Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: _CHANNEL,
    45: _CHANNEL,
    46: _NOBODY + "GPU stopped processing",
    48: _NOBODY + "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 0,"
    " subpartition 0.",
    63: _NOBODY + "Row Remapper: New row (0x0000000000a3f1c0) marked for remapping, reset gpu to activate.",
    64: _NOBODY + "Row Remapper: All reserved rows for bank are remapped.",
    74: _NOBODY + "NVLink: fatal error detected on link 2(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
    79: _NOBODY + "GPU has fallen off the bus.",
    92: _NOBODY + "High single-bit ECC error rate",
    94: "pid={pid}, name={name}, Contained: SM (0x1). RST: No, D-RST: No",
    95: _NOBODY + "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    109: _CHANNEL + ", errorString CTX SWITCH TIMEOUT, Info 0x3c046",
    119: _NOBODY + "Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL)"
    " (0x20800a4c 0x4).",
    120: _NOBODY + "GSP task timeout @ pc:0x1b0d9a8, task: 1",
}


def xid_line(address: str, xid: int, recovery_action: int, pid: int, name: str) -> str:
    """The kernel log's line for `xid` of the card at `address`: "NVRM: Xid (PCI:0000:41:00): 79, pid=..."."""
    where = f"NVRM: Xid (PCI:{address.rsplit('.', 1)[0]}): {xid}, "
    if xid == 154:
        what = _RECOVERY_NAMES[recovery_action]
        return where + f"GPU recovery action changed from 0x0 (None) to 0x{recovery_action:x} ({what})"
    text = _LINES.get(xid, _CHANNEL)
    if not pid:
        text = text.replace("pid={pid}, name={name}, ", _NOBODY)
    return where + text.format(pid=pid, name=name)
