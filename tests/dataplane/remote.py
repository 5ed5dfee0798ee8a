"""Runs one program twice: on softgpu's own driver, and as a guest of shim, relay and worker before the same softgpu."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvmpool.errors import NotFound
from kvmpool.native import native
from kvmpool.softgpu import state
from tests.dataplane.plane import CARD, Plane

MEMORY_MIB = 512


def built(name: str) -> Path:
    """A program or library of the build. Skips where nothing is built."""
    try:
        return native(name)
    except NotFound as error:
        pytest.skip(str(error))


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    errors: str
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@dataclass
class Remote:
    """A card, a worker for one claim of it and the domain's relay."""

    folder: Path
    plane: Plane

    def direct(self, command: Sequence[str | Path], timeout_s: float = 120, **more: str) -> Done:
        """On the card's own driver, as on the host."""
        library = {"LD_LIBRARY_PATH": str(built("softgpu-cuda").parent), "KVMPOOL_SOFTGPU": str(self.folder / "card")}
        return _run(command, {**_clean(), **library, "CUDA_VISIBLE_DEVICES": CARD, **more}, timeout_s)

    def guest(self, command: Sequence[str | Path], timeout_s: float = 120, **more: str) -> Done:
        """As a process of the guest: it has the shim and the endpoint, and nothing of softgpu."""
        stats = self.folder / "stats"
        stats.unlink(missing_ok=True)
        done = _run(command, {**self.environment(), "KVMPOOL_STATS": str(stats), **more}, timeout_s)
        return Done(done.code, done.out, done.errors, json.loads(stats.read_text()) if stats.exists() else {})

    def environment(self) -> dict[str, str]:
        """Of a process of the guest."""
        return _clean() | {
            "LD_LIBRARY_PATH": str(built("shim").parent),
            "KVMPOOL_ENDPOINT": self.plane.endpoint,
            "KVMPOOL_NO_VSOCK": "1",
            "KVMPOOL_LOG": str(self.folder / "guest.log"),
        }


def _clean() -> dict[str, str]:
    dropped = ("KVMPOOL_", "CUDA_", "LD_PRELOAD", "LD_LIBRARY_PATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def _run(command: Sequence[str | Path], environment: dict[str, str], timeout_s: float) -> Done:
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_s
    )
    return Done(done.returncode, done.stdout, done.stderr)


@functools.cache
def kernel_cache() -> Path:
    """Compiled kernels, kept for the whole test run."""
    folder = Path(tempfile.mkdtemp(prefix="softgpu-remote-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def remote(
    folder: Path,
    memory_mib: int = MEMORY_MIB,
    pinned_mib: int = 0,
    claims: tuple[str, ...] = ("gpu0",),
    relay: tuple[str, ...] = (),
    endpoint: str = "",
) -> Iterator[Remote]:
    """`relay`: more of its options."""
    card = folder / "card"
    card.mkdir()
    (card / "cache").symlink_to(kernel_cache())
    state.create(card, (state.CardSpec(0, CARD, "0000:41:00.0", "SoftGPU 0", 2048),))
    programs = built("worker").parent
    library = str(built("softgpu-cuda").parent)
    plane = Plane(folder, programs, {"LD_LIBRARY_PATH": library, "KVMPOOL_SOFTGPU": str(card)})
    try:
        for claim in claims:
            plane.worker(claim=claim, memory_mib=memory_mib, pinned_mib=pinned_mib)
        plane.relay(*relay, endpoint=endpoint, claims=claims)
        for claim in claims:
            assert plane.point(claim=claim) == "OK", "the relay takes the worker"
        yield Remote(folder, plane)
    finally:
        plane.end()
