"""The files behind the domains' devices of shared memory: /dev/shm/kvmpool-UUID, where libvirt's QEMU looks for them.

One is there before QEMU starts, ours, readable and writable by QEMU's group and by nobody else: QEMU would take a file
that any user of the host had put there. The relay opens it too, cuts it into windows (src/slots.h) and removes it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from kvmpool.core.model import DomainUuid
from kvmpool.errors import Unreachable

FOLDER = Path("/dev/shm")
_PREFIX = "kvmpool-"


class Windows:
    """`group`: QEMU's; "" leaves our own."""

    def __init__(self, group: str, folder: Path = FOLDER) -> None:
        self._group = group
        self._folder = folder

    def prepare(self, domain: DomainUuid, mib: int, *, new: bool) -> Path:
        """The file, of that size. `new`: a new life of the domain, nobody has it open; else it may be in use and stays.

        Raises Unreachable.
        """
        path = self._path(domain)
        try:
            if not new and path.stat(follow_symlinks=False).st_size == mib << 20:
                return path
        except FileNotFoundError:
            pass
        try:
            self._make(path, mib)
        except (OSError, LookupError) as error:
            raise Unreachable(f"domain {domain}: its shared memory {path} cannot be made: {error}") from error
        return path

    def remove(self, domain: DomainUuid) -> None:
        with suppress(FileNotFoundError):
            self._path(domain).unlink()

    def _path(self, domain: DomainUuid) -> Path:
        return self._folder / (_PREFIX + domain)

    def _make(self, path: Path, mib: int) -> None:
        """Whole under its name, or not at all; what was there is nobody's any more."""
        with suppress(FileNotFoundError):
            path.unlink()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, mib << 20)
            if self._group:
                shutil.chown(path, group=self._group)
            os.fchmod(descriptor, 0o660)
        finally:
            os.close(descriptor)
