"""What a check answers, and what it may look at: a movable root, a program runner with a deadline, the environment."""

from __future__ import annotations

import ctypes
import grp
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PROGRAM_DEADLINE_S = 10.0  # virsh waits for a libvirtd that starts by socket activation


class Level(Enum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor. `remedy` is a command or one sentence; "" only for PASS."""

    area: str
    title: str
    level: Level
    detail: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.level is Level.PASS, f"{self.title}: a person needs to know what to do"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the checks look. `root` "/" on a host, a folder in tests."""

    root: Path = Path("/")
    socket: Path = Path("/run/kvmpool/kvmpoold.sock")
    libvirt_uri: str = "qemu:///system"
    path: str | None = None  # where programs are looked for; None: as a shell would
    libraries: Path | None = None  # where shared libraries are looked for; None: as the loader does

    def at(self, name: str) -> Path:
        """`name` (absolute) below the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """The text of a file, "" where it cannot be read."""
        try:
            return self.at(name).read_text(errors="replace")
        except OSError:
            return ""

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Exit code and output of a program; 127 where it is missing, 124 where it does not end."""
        program = shutil.which(command[0], path=self.path)
        if program is None:
            return 127, ""
        words = [program, *command[1:]]
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=PROGRAM_DEADLINE_S,
                check=False,
            )
        except OSError as error:
            return 126, str(error.strerror)
        except subprocess.TimeoutExpired:
            return 124, f"no answer in {PROGRAM_DEADLINE_S:.0f} s"
        return done.returncode, (done.stdout + done.stderr).strip()

    def load(self, library: str) -> ctypes.CDLL:
        """The shared library of that soname. Raises OSError."""
        return ctypes.CDLL(str(self.libraries / library) if self.libraries else library)

    def members(self, group: str) -> list[str] | None:
        """Of a group; None where there is none."""
        if self.root == Path("/"):
            try:
                return grp.getgrnam(group).gr_mem
            except KeyError:
                return None
        for line in self.read("/etc/group").splitlines():
            name, _, _, members = (line.split(":") + [""] * 4)[:4]
            if name == group:
                return [member for member in members.split(",") if member]
        return None
