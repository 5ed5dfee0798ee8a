"""Reads what the kernel log says of cards, from now on: the XIDs of NVIDIA's driver, and cards that do not come back.

    NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
    NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, name=python3, Contained: SM (0x1). RST: No, D-RST: No
    NVRM: GPU 0000:41:00.0: GPU has fallen off the bus.
    vfio-pci 0000:41:00.0: not ready 65535ms after FLR; giving up
    vfio-pci 0000:41:00.0: Unable to change power state from D3cold to D0, device inaccessible

The text holds names that any user may choose; so a message counts only where the kernel itself wrote it (facility 0,
which the kernel does not let user space claim) and only by how it begins. Record format: kernel, ABI/testing/dev-kmsg.
A plain file of the same format can stand in for /dev/kmsg; it is polled.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kvmpool.device.pci import normal_address
from kvmpool.errors import Unreachable

RECORD_BYTES = 8192  # the kernel's PRINTKRB of one record, prefix and dictionary included
POLL_S = 0.03  # a plain file: two looks within the 100 ms that a lost card may stay unnoticed
TEXT_CHARS = 400
FALLEN_OFF_XID = 79

_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}"
_RECORD = re.compile(r"(\d{1,10}),\d+,\d+,[^;]*;(.*)", re.DOTALL)
_XID = re.compile(rf"NVRM: Xid \(PCI:({_PCI})(?:\.[0-7])?(?: GPU-I:[0-9a-fA-F]{{1,4}})?\): ([0-9]{{1,4}})(?:, (.*)|$)")
_FALLEN = re.compile(rf"NVRM: GPU (?:at PCI:)?({_PCI})(?:\.[0-7])?: GPU has fallen off the bus")
# kernel, drivers/pci/pci.c: pci_dev_wait, pci_power_up; the driver's name stands before the address.
_DEAD = re.compile(
    rf"[a-zA-Z0-9_-]{{1,32}} ({_PCI}\.[0-7]): (not ready [0-9]{{1,9}}ms after .{{1,64}}; giving up"
    r"|Unable to change power state from D3cold to D0, device inaccessible)"
)
_KERNEL_FACILITY = 8  # priorities below it: facility 0


@dataclass(frozen=True, slots=True)
class KernelXid:
    """The kernel named this XID for the card at `address`. `text`: what follows the number, printable."""

    address: str
    xid: int
    text: str


@dataclass(frozen=True, slots=True)
class KernelDead:
    """The device at `address` does not come back from a reset or from sleep."""

    address: str
    text: str


def parse(record: str) -> KernelXid | KernelDead | None:
    """One record of the kernel log (its first line); None for everything that says nothing of a card."""
    found = _RECORD.match(record)
    if not found or int(found[1]) >= _KERNEL_FACILITY:
        return None
    message = found[2].partition("\n")[0]
    xid = _XID.match(message)
    if xid:
        address = normal_address(xid[1])
        return KernelXid(address, int(xid[2]), _printable(xid[3] or "")) if address else None
    fallen = _FALLEN.match(message)
    if fallen:
        address = normal_address(fallen[1])
        return KernelXid(address, FALLEN_OFF_XID, "GPU has fallen off the bus.") if address else None
    dead = _DEAD.match(message)
    address = normal_address(dead[1]) if dead else None
    return KernelDead(address, _printable(dead[2])) if dead and address else None


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:TEXT_CHARS]).strip()


async def follow(path: Path, *, whole: bool = False) -> AsyncIterator[KernelXid | KernelDead]:
    """What is logged of cards from now on; of a plain file the `whole` is read when it was not there before.

    Raises Unreachable where the log cannot be opened or read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        plain = stat.S_ISREG(os.fstat(fd).st_mode)
        os.lseek(fd, 0, os.SEEK_SET if plain and whole else os.SEEK_END)
    except OSError as error:
        raise Unreachable(f"{path}: {error.strerror}. Next: run as root, or set device.kmsg") from error
    records = _plain_records(path, fd) if plain else _device_records(path, fd)
    async for record in records:
        found = parse(record)
        if found is not None:
            yield found


async def _device_records(path: Path, fd: int) -> AsyncIterator[str]:
    """/dev/kmsg gives one record a read, and EPIPE where records were overwritten before we read them."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(fd, readable.set)
    except OSError as error:  # epoll knows no folders and no plain files
        os.close(fd)
        raise Unreachable(f"{path}: is no kernel log. Next: set device.kmsg") from error
    try:
        while True:
            try:
                raw = os.read(fd, RECORD_BYTES)
            except BlockingIOError:
                readable.clear()
                await readable.wait()
                continue
            except BrokenPipeError:
                continue
            except OSError as error:
                raise Unreachable(f"{path}: {error.strerror}") from error
            yield raw.decode("utf-8", "replace")
            await asyncio.sleep(0)  # a flood of records must not hold the loop
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _plain_records(path: Path, fd: int) -> AsyncIterator[str]:
    """A file that grows; one that was cut or replaced is read from its start."""
    rest = b""
    try:
        while True:
            try:
                raw = os.read(fd, 1 << 16)
                if not raw:
                    new = _reopened(path, fd)
                    if new != fd:
                        os.close(fd)
                        fd, rest = new, b""
                        continue
            except OSError as error:
                raise Unreachable(f"{path}: {error.strerror}") from error
            if not raw:
                await asyncio.sleep(POLL_S)
                continue
            *lines, rest = (rest + raw).split(b"\n")
            rest = rest if len(rest) <= RECORD_BYTES else b""
            for line in lines:
                yield line.decode("utf-8", "replace")
    finally:
        os.close(fd)


def _reopened(path: Path, fd: int) -> int:
    """`fd`, at its start where the file was cut; another descriptor where another file is there now."""
    have = os.fstat(fd)
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return fd
    if (now.st_dev, now.st_ino) != (have.st_dev, have.st_ino):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if have.st_size < os.lseek(fd, 0, os.SEEK_CUR):
        os.lseek(fd, 0, os.SEEK_SET)
    return fd
