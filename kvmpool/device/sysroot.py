"""The kernel's file tree under a root that can be moved: all of it can be proved on a tree of plain files.

What is read is foreign text: limited, without control characters, or None. Nothing here raises for a file that is
missing, vanishes while it is read, or holds garbage.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

TEXT_BYTES = 4096  # what sysfs shows at most of one attribute (a page)


@dataclass(frozen=True, slots=True)
class Sysroot:
    """`root` is "/" on a real host."""

    root: Path = Path("/")

    def _at(self, path: str) -> str:
        """A look at the bus reads some hundred files a second: as text, a path costs a tenth of what a Path does."""
        return os.path.join(self.root, path)

    def bytes_of(self, path: str, limit: int = TEXT_BYTES) -> bytes | None:
        """The first `limit` bytes of a regular file; a FIFO or device in its place is not opened to be read."""
        try:
            fd = os.open(self._at(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return None
        try:
            return os.read(fd, limit) if stat.S_ISREG(os.fstat(fd).st_mode) else None
        except OSError:
            return None
        finally:
            os.close(fd)

    def text(self, path: str) -> str | None:
        """One line, stripped; None for what is no plain text."""
        raw = self.bytes_of(path)
        if raw is None:
            return None
        try:
            text = raw.decode("ascii").strip()
        except UnicodeDecodeError:
            return None
        return text if text.isprintable() else None

    def number(self, path: str, base: int = 0) -> int | None:
        """With a base of 0, "0x10de" and "-1" are numbers too."""
        try:
            return int(self.text(path) or "", base)
        except ValueError:
            return None

    def link_name(self, path: str) -> str | None:
        """The last part of what a symbolic link points at: the name of a driver, the number of an IOMMU group."""
        try:
            return os.path.basename(os.readlink(self._at(path)))
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...] | None:
        """What is in a folder, sorted; None where it cannot be read."""
        try:
            return tuple(sorted(os.listdir(self._at(path))))
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._at(path))
