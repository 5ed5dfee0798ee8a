"""The folder in which everything of one lab lives, and its state file, written before each effect.

After a kill -9 at any moment the state file names every process that may exist; mounts and namespaces exist only as
long as those processes do. So ending the processes and removing the folder is a complete clean-up.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from kvmpool.errors import NotFound, Refused
from kvmpool.lab import process
from kvmpool.lab.process import ProcessId

_STATE, _LOCK = "state.json", "lock"
_OURS = {_STATE, _STATE + ".new", _LOCK}  # what a folder holds before the first host
_HOME = "kvmpool-lab"
_VERSION = 1
_LOCK_S = 0.5  # a killed `up` may leave a child between its fork and its exec, with the lock still open


def default_folder(name: str) -> Path:
    """$XDG_RUNTIME_DIR/kvmpool-lab/NAME, else /run/kvmpool-lab/NAME."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/run") / _HOME / name


def cache_folder() -> Path:
    """Where downloads and built images are kept between labs: $KVMPOOL_CACHE, else ~/.cache/kvmpool."""
    chosen = os.environ.get("KVMPOOL_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvmpool"
    base.mkdir(parents=True, exist_ok=True)
    return base


@dataclass(frozen=True, slots=True)
class State:
    """What may exist. A host is named before its keeper is started; `keepers[host]` is None until the pid is known."""

    keepers: dict[str, ProcessId | None] = field(default_factory=dict)
    up: bool = False  # the last `up` came to its end
    vfio: bool = False  # its host is a machine with an IOMMU (vfio_pool.py), not namespaces

    def with_keeper(self, host: str, keeper: ProcessId | None) -> State:
        return replace(self, keepers={**self.keepers, host: keeper})


@dataclass(frozen=True, slots=True)
class Folder:
    """A lab's folder. Making the value touches nothing."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @contextmanager
    def created(self) -> Iterator[None]:
        """Make it with an empty state, and be alone in it. Raises Refused where something is in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_unless_empty()
        with self._locked():
            self._refuse_unless_empty()  # another `up` may have come between
            self.write(State())
            yield

    def _refuse_unless_empty(self) -> None:
        if any(entry.name not in _OURS for entry in self.path.iterdir()):
            raise Refused(f"{self.path} is not empty. Next: kvmpool lab down --dir {self.path}, or another --dir")

    @contextmanager
    def opened(self) -> Iterator[State]:
        """Be alone in an existing lab's folder. Raises NotFound where no lab is."""
        self.read()
        with self._locked():
            yield self.read()

    def exists(self) -> bool:
        return self.path.is_dir()

    def read(self) -> State:
        """Raises NotFound where no lab is. A folder whose `create` was cut off is an empty lab."""
        try:
            document = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self.path.is_dir() and all(entry.name in _OURS for entry in self.path.iterdir()):
                return State()
            raise NotFound(f"no lab in {self.path}. Next: kvmpool lab up") from None
        if document.get("v") != _VERSION:
            raise Refused(f"{self.path / _STATE}: version {document.get('v')}, this kvmpool reads {_VERSION}")
        keepers = {host: ProcessId(*ids) if ids else None for host, ids in document["keepers"].items()}
        return State(keepers, document["up"], document.get("vfio", False))

    def write(self, state: State) -> None:
        """On disk when it returns, whole or not at all."""
        keepers = {host: [keeper.pid, keeper.start] if keeper else None for host, keeper in state.keepers.items()}
        beside = self.path / (_STATE + ".new")
        with beside.open("w", encoding="utf-8") as file:
            json.dump({"v": _VERSION, "keepers": keepers, "up": state.up, "vfio": state.vfio}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(self.path / _STATE)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.path / _LOCK).open("w") as file:
            if not process.holds_within(lambda: _taken(file), _LOCK_S):
                raise Refused(f"{self.path}: another `kvmpool lab` is at work there. Next: wait for it")
            yield

    def remove(self) -> None:
        """Delete everything in it, the state last, so that a cut removal can be repeated."""
        for entry in self.path.iterdir():
            if entry.name in _OURS:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for name in sorted(_OURS, reverse=True):
            (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()
        if self.path.parent.name == _HOME:
            with suppress(OSError):  # another lab is in it
                self.path.parent.rmdir()


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
