"""Builds shim, session and a stub driver, and runs guest programs of tests/native/guest.c against them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.dataplane.waiting import built_once, gone, state, wait_until

ROOT = Path(__file__).parents[2]
DATAPLANE = ROOT / "kvmpool" / "dataplane"
SOURCES = DATAPLANE / "src"
NATIVE = ROOT / "tests" / "native"
GUEST = ("guest.c", "guest_async.c", "guest_calls.c", "guest_crowd.c", "guest_life.c", "guest_pinned.c")
WARNINGS = ("-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}")
FLAVOURS = {
    "plain": ("-O2",),
    "races": ("-O1", "-fsanitize=thread", "-DKP_VA_BASE=0x1000000000ull"),  # where its checker leaves room
    "checked": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    # its PCI devices are those below the folder it runs in
    "device": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", '-DKP_PCI_DEVICES="pci"'),
}
MEMORY = 64 << 20
WAYS = ("plain", "checked", "checked socket")  # a flavour, over shared memory unless it says "socket"


def build(flavour: str) -> Path:
    """A folder with guest, session_host, shim/libcuda.so.1 and stub/libcuda.so.1; built once per source."""
    emitters = ("emit_roundtrip.py", "emit_session.py", "emit_shim.py")
    generators = [DATAPLANE / name for name in ("calls.toml", "calltable.py", *emitters)]
    ours = [file for file in SOURCES.glob("*.[ch]") if not file.stem.startswith(("relay", "worker", "acceptor"))]
    others = ("guest.h", "bench_guest.c", "failing_driver.c", "session_host.c", "stub_driver.c")
    natives = [NATIVE / name for name in (*GUEST, *others)]
    digest = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted([*generators, *ours, *natives, Path(__file__)]))
    ).hexdigest()
    folder = ROOT / "build" / "tests-native" / f"shim-{flavour}-{digest[:16]}"
    return built_once(folder, lambda made: _compile(made, FLAVOURS[flavour]))


def generated(folder: Path) -> Path:
    """The generated C, made by the same program that the build runs."""
    out = folder / "generated"
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, DATAPLANE / "generate.py", DATAPLANE / "calls.toml", out], check=True)
    return out


def _compile(folder: Path, flags: tuple[str, ...]) -> None:
    made = generated(folder)
    (folder / "shim").mkdir(exist_ok=True)
    (folder / "stub").mkdir(exist_ok=True)
    shared = [SOURCES / f"{name}.c" for name in ("blake2b", "frame", "handles", "ring", "slots", "window")]
    plain = ("-shared", "-fPIC", "-fvisibility=hidden")
    library = (*plain, "-Wl,-soname,libcuda.so.1")
    guest_half = [*SOURCES.glob("shim_*.c"), *made.glob("shim_*.c")]
    session = [*SOURCES.glob("session_*.c"), *made.glob("session_*.c"), SOURCES / "account.c", SOURCES / "turns.c"]
    session += [SOURCES / "cache.c"]
    guest = [NATIVE / name for name in GUEST]
    jobs: list[list[str | Path]] = [
        [*flags, *library, *guest_half, *shared, "-o", folder / "shim/libcuda.so.1"],
        [*flags, *session, *shared, NATIVE / "session_host.c", "-o", folder / "session_host"],
        ["-O1", *library, NATIVE / "stub_driver.c", "-o", folder / "stub/libcuda.so.1"],
        ["-O1", *plain, "-Wl,-soname,libstub.so", NATIVE / "stub_driver.c", "-o", folder / "stub/libstub.so"],
        [*flags, *guest, "-o", folder / "guest"],
        ["-O1", "-static", *guest, "-o", folder / "guest-static"],
        ["-O1", NATIVE / "bench_guest.c", "-o", folder / "bench-guest"],
    ]
    for job in jobs:
        subprocess.run(["gcc", *WARNINGS, f"-I{made}", *job, "-lpthread", "-ldl"], check=True)


def failing(built: Path, function: str) -> Path:
    """A folder with a driver in which that function fails when it is told to (failing_driver.c)."""

    def make(folder: Path) -> None:
        folder.mkdir()
        flags = ["-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-DFAILING={function}", "-Wl,-soname,libcuda.so.1"]
        source, stub = NATIVE / "failing_driver.c", built / "stub"
        command = ["gcc", *WARNINGS, *flags, source, f"-L{stub}", "-Wl,--no-as-needed", "-lstub", "-ldl"]
        subprocess.run([*map(str, command), "-o", str(folder / "libcuda.so.1")], check=True)

    return built_once(built / f"failing-{function}", make)


@dataclass
class Run:
    """What a guest program printed and what its shim counted."""

    code: int
    lines: list[str]
    stats: dict[str, int]
    log: str

    def __getitem__(self, name: str) -> int:
        return self.all(name)[0]

    def all(self, name: str) -> list[int]:
        return [int(line.split("=", 1)[1]) for line in self.lines if line.startswith(f"{name}=")]


@dataclass
class Host:
    """A running session_host with its folder; guests dial its socket."""

    folder: Path
    built: Path
    process: subprocess.Popen[bytes]
    shared_memory: bool = True
    limit_s: float = 60.0  # of a guest program

    def environment(self, **extra: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVMPOOL_")}
        return clean | {
            "KVMPOOL_ENDPOINT": f"unix:{self.folder}/s",
            "KVMPOOL_NO_VSOCK": "1",
            "KVMPOOL_SHM": "1" if self.shared_memory else "0",
            "KVMPOOL_LOG": str(self.folder / "log"),
            "KVMPOOL_STATS": str(self.folder / "stats"),
            "LD_LIBRARY_PATH": str(self.built / "shim"),
            **extra,
        }

    def start(self, *arguments: str, program: str = "guest", **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.built / program, *arguments],
            env=self.environment(**extra),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def finish(self, guest: subprocess.Popen[str], line: str = "") -> Run:
        out, _ = guest.communicate(line, timeout=self.limit_s)
        stats = self.folder / "stats"
        log = self.folder / "log"
        return Run(
            guest.returncode,
            out.splitlines(),
            json.loads(stats.read_text()) if stats.exists() else {},
            log.read_text() if log.exists() else "",
        )

    def run(self, *arguments: str, program: str = "guest", **extra: str) -> Run:
        for name in ("stats", "log"):
            (self.folder / name).unlink(missing_ok=True)
        return self.finish(self.start(*arguments, program=program, **extra))

    def sessions(self) -> list[int]:
        """Pids of the sessions that run now."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if not gone(int(pid))]

    def settled(self) -> bool:
        """Whether all sessions have ended and what they held is free again: the host sleeps, and has no child."""
        pid = self.process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text() == "" and state(pid) == "S"

    def driver_calls(self) -> list[str]:
        counted = self.folder / "driver"
        return counted.read_text().split() if counted.exists() else []


@contextmanager
def host(folder: Path, flavour: str, *arguments: str, memory: int = MEMORY, **extra: str) -> Iterator[Host]:
    """Serves until the block ends; fails where a session wrote what a sanitizer writes. `flavour`: one of WAYS too."""
    flavour, _, way = flavour.partition(" ")
    built = build(flavour)
    socket = folder / "s"
    errors = folder / "host.log"
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(built / "stub"),
        "STUB_GATE": str(folder / "gate"),
        "STUB_COUNT": str(folder / "driver"),
        "ASAN_OPTIONS": "detect_leaks=0",  # a session never gives its memory back: its process ends with it
        **extra,
    }
    with errors.open("wb") as log:
        process = subprocess.Popen(
            [built / "session_host", socket, str(memory), *arguments], env=environment, stderr=log
        )
    try:
        wait_until(socket.exists, 10.0, "the session host listens")
        yield Host(folder, built, process, way != "socket")
    finally:
        process.kill()
        process.wait()
    written = errors.read_text(errors="replace")
    assert "Sanitizer" not in written, written
    assert "runtime error" not in written, written
