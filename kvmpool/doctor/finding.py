"""What a check answers, and what it may look at: a movable root, a program runner with a deadline, the environment."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    run_programs: bool = True
    path: str | None = field(default=None)

    def at(self, name: str) -> Path:
        """`name` (absolute) below the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """The text of a file, "" where it cannot be read."""
        try:
            return self.at(name).read_text(errors="replace")
        except OSError:
            return ""

    def which(self, program: str) -> str | None:
        return shutil.which(program, path=self.path)

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Exit code and output of a program; 127 where it is missing, 124 where it does not end."""
        if not self.run_programs:
            return 127, ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_DEADLINE_S, check=False)
        except FileNotFoundError:
            return 127, ""
        except subprocess.TimeoutExpired:
            return 124, f"no answer in {PROGRAM_DEADLINE_S:.0f} s"
        return done.returncode, (done.stdout + done.stderr).strip()
