"""Creates soft cards, reads what processes did to them and injects faults into them.

A softgpu folder has `cards/<index>.card` (one mapped struct a card: layout.py, src/state.h), `kmsg`, `sys/`, `cache/`.
This module does not know how CUDA or NVML answer: that is the C side, which looks at the same files.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import struct
import time
import uuid as uuids
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmpool.errors import NotFound, Refused
from kvmpool.softgpu import layout, sysfs
from kvmpool.softgpu.faults import Effect, Fault, Kind, effect_of, xid_line, xid_of

DEFAULT_ROOT = Path("/run/kvmpool-softgpu")
DRIVER_VERSION = "580.65.06"
_ADDRESS = re.compile(r"([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\.0")


@dataclass(frozen=True, slots=True)
class CardSpec:
    """A soft card to create. `uuid` is "GPU-8-4-4-4-12" in lower case, `pci_address` "0000:41:00.0"."""

    index: int
    uuid: str
    pci_address: str
    model: str
    memory_mib: int
    numa_node: int = 0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A living process with a context on the card; `pid` is that of its own pid namespace."""

    pid: int
    name: str
    memory_bytes: int
    busy_ns: int
    launches: int


@dataclass(frozen=True, slots=True)
class CardState:
    """A soft card at one look."""

    spec: CardSpec
    lost: bool
    ecc: bool
    hang: bool
    slow: bool
    recovery_action: int
    last_xid: int
    busy_ns: int
    processes: tuple[ProcessState, ...]

    @property
    def used_bytes(self) -> int:
        return sum(process.memory_bytes for process in self.processes)


def root_from_environment() -> Path:
    """The folder that KVMPOOL_SOFTGPU names, or the default one."""
    return Path(os.environ.get("KVMPOOL_SOFTGPU") or DEFAULT_ROOT)


def create(root: Path, specs: Sequence[CardSpec]) -> None:
    """Make the softgpu folder with these healthy cards. A card that exists is replaced: its processes keep the old."""
    for spec in specs:
        _check(spec)
    for name in ("cards", "cache", "sys"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "cards").chmod(0o755)
    kmsg = root / "kmsg"
    kmsg.touch()
    kmsg.chmod(0o666)
    for spec in specs:
        sysfs.create_device(root, spec.pci_address, spec.numa_node, iommu_group=spec.index + 41)
        path = root / f"cards/{spec.index}.card"
        temporary = path.with_suffix(".new")
        temporary.write_bytes(bytes(_fresh(spec)))
        temporary.chmod(0o666)  # every user's CUDA program writes its own slot
        temporary.rename(path)


def read(root: Path) -> tuple[CardState, ...]:
    """All cards, by index. Raises NotFound where `root` has none."""
    states = []
    for path in _card_files(root):
        with _mapped(path) as (card, fd):
            states.append(_state_of(card, fd))
    return tuple(states)


def inject(root: Path, card: int | str, fault: Fault) -> None:
    """Let `fault` happen to the card with this index, uuid or PCI address, as one moment for all who look.

    An XID raises its NVML event and appends its line to kmsg. Raises NotFound, Refused.
    """
    path = _find(root, card)
    with _mapped(path) as (bytes_, fd), _locked(fd):
        address = bytes_.pci_address.decode()
        if fault.kind is Kind.HEAL:
            bytes_.lost = bytes_.ecc = bytes_.hang = bytes_.slow = bytes_.recovery_action = 0
            sysfs.find_device(root, address)
        elif fault.kind is Kind.HANG:
            bytes_.hang = 1
        elif fault.kind is Kind.SLOW:
            bytes_.slow = 10
        else:
            _strike(root, bytes_, fd, fault)
        bytes_.fault_serial += 1


def _strike(root: Path, card: layout.CardBytes, fd: int, fault: Fault) -> None:
    effect, xid, address = effect_of(fault), xid_of(fault), card.pci_address.decode()
    _apply(card, effect, xid)
    if effect.lost:
        sysfs.lose_device(root, address)
    victim = next(iter(_processes(card, fd)), None)
    pid, name = (victim.pid, victim.name) if victim else (0, "")
    seq = card.event_seq + 1
    event = card.events[(seq - 1) % layout.EVENTS]
    event.seq = 0
    event.type, event.data, event.pid = layout.EVENT_XID, xid, pid
    event.name = name.encode()[:23]
    event.boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    event.seq = seq
    card.event_seq = seq
    _log(root, xid_line(address, xid, effect.recovery_action, pid, name))


def _apply(card: layout.CardBytes, effect: Effect, xid: int) -> None:
    card.last_xid = xid
    card.ecc_uncorrected += effect.uncorrected
    if effect.recovery_action or xid == 154:
        card.recovery_action = effect.recovery_action
    if effect.ecc:
        card.ecc = xid
    if effect.lost:
        card.lost = 1
    if effect.fatal_error:
        card.fatal_error = effect.fatal_error
        card.fatal_serial += 1


def _log(root: Path, text: str) -> None:
    """Append one record in the format of /dev/kmsg."""
    with (root / "kmsg").open("r+b", buffering=0) as file, _locked(file.fileno()):
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 2048))
        lines = file.read().splitlines()
        last = re.match(rb"\d+,(\d+),", lines[-1]) if lines else None
        seq = int(last[1]) + 1 if last else 0
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        file.seek(0, os.SEEK_END)
        file.write(f"3,{seq},{usec},-;{text}\n".encode())


def _check(spec: CardSpec) -> None:
    if not 0 <= spec.index < layout.MAX_CARDS:
        raise Refused(f"card index {spec.index} is not in 0..{layout.MAX_CARDS - 1}. Next: choose another index")
    if not _ADDRESS.fullmatch(spec.pci_address):
        raise Refused(f"card {spec.index}: {spec.pci_address!r} is no PCI address like 0000:41:00.0. Next: correct it")
    if not spec.uuid.startswith("GPU-") or str(_uuid(spec.uuid)) != spec.uuid[4:]:
        raise Refused(f"card {spec.index}: {spec.uuid!r} is no lower-case GPU-8-4-4-4-12. Next: correct it")
    if not 0 < spec.memory_mib <= 1 << 20:
        raise Refused(f"card {spec.index}: {spec.memory_mib} MiB is not in 1..1048576. Next: choose another size")


def _uuid(text: str) -> uuids.UUID | None:
    try:
        return uuids.UUID(text.removeprefix("GPU-"))
    except ValueError:
        return None


def _fresh(spec: CardSpec) -> layout.CardBytes:
    match = _ADDRESS.fullmatch(spec.pci_address)
    raw = _uuid(spec.uuid)
    assert match
    assert raw
    card = layout.CardBytes()
    card.magic, card.version, card.size = layout.MAGIC, layout.VERSION, ctypes.sizeof(card)
    card.index, card.memory_bytes, card.numa_node = spec.index, spec.memory_mib << 20, spec.numa_node
    card.pci_domain, card.pci_bus, card.pci_device = (int(part, 16) for part in match.groups())
    card.pci_ids = sysfs.DEVICE << 16 | sysfs.VENDOR
    card.pci_subsystem = sysfs.SUBSYSTEM_DEVICE << 16 | sysfs.VENDOR
    card.sm_count, card.clock_khz, card.memory_clock_khz, card.bus_width_bits = 132, 1_980_000, 2_619_000, 5120
    card.power_limit_mw, card.compute_major, card.compute_minor = 700_000, 9, 0
    card.uuid_raw[:] = raw.bytes
    card.uuid, card.pci_address = spec.uuid.encode(), spec.pci_address.encode()
    card.model, card.driver_version = spec.model.encode()[:95], DRIVER_VERSION.encode()
    card.serial = f"16{spec.index:011d}".encode()
    return card


def _card_files(root: Path) -> list[Path]:
    files = sorted((root / "cards").glob("*.card"), key=lambda path: int(path.stem) if path.stem.isdigit() else 1 << 30)
    if not files:
        raise NotFound(f"{root}/cards has no soft cards. Next: kvmpool lab up, or set KVMPOOL_SOFTGPU")
    return files


def _find(root: Path, wanted: int | str) -> Path:
    known = []
    for path in _card_files(root):
        with _mapped(path) as (card, _fd):
            names = (str(card.index), card.uuid.decode(), card.pci_address.decode())
        if str(wanted).lower() in (name.lower() for name in names):
            return path
        known.append(names[1])
    raise NotFound(f"no soft card {wanted} in {root}. Next: use one of 0..{len(known) - 1} or {', '.join(known)}")


@contextmanager
def _mapped(path: Path) -> Iterator[tuple[layout.CardBytes, int]]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < ctypes.sizeof(layout.CardBytes):
            raise Refused(f"{path} is not a soft card. Next: create the cards again")
        card = layout.CardBytes.from_buffer(mmap.mmap(fd, ctypes.sizeof(layout.CardBytes)))  # unmapped with it
        if card.magic != layout.MAGIC or card.version != layout.VERSION:
            raise Refused(f"{path} is no soft card of version {layout.VERSION}. Next: create it again")
        yield card, fd
    finally:
        os.close(fd)


def _lock_bytes(kind: int, offset: int) -> bytes:
    """struct flock on x86-64 and arm64 Linux; pid must be 0 for open-file-description locks."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, 1, 0)


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _lock_bytes(fcntl.F_WRLCK, layout.LOCK_EVENTS))
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock_bytes(fcntl.F_UNLCK, layout.LOCK_EVENTS))


def _slot_alive(fd: int, index: int) -> bool:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock_bytes(fcntl.F_WRLCK, layout.LOCK_SLOT + index))
    kind: int = struct.unpack_from("h", answer)[0]
    return kind != fcntl.F_UNLCK


def _processes(card: layout.CardBytes, fd: int) -> Iterator[ProcessState]:
    for index, slot in enumerate(card.slots):
        if slot.pid and _slot_alive(fd, index):
            name = slot.name.decode(errors="replace")
            yield ProcessState(slot.pid, name, slot.memory_bytes, slot.busy_ns, slot.launches)


def _state_of(card: layout.CardBytes, fd: int) -> CardState:
    spec = CardSpec(
        index=card.index,
        uuid=card.uuid.decode(),
        pci_address=card.pci_address.decode(),
        model=card.model.decode(),
        memory_mib=card.memory_bytes >> 20,
        numa_node=card.numa_node,
    )
    return CardState(
        spec=spec,
        lost=bool(card.lost),
        ecc=bool(card.ecc),
        hang=bool(card.hang),
        slow=card.slow > 1,
        recovery_action=card.recovery_action,
        last_xid=card.last_xid,
        busy_ns=card.busy_ns,
        processes=tuple(_processes(card, fd)),
    )
