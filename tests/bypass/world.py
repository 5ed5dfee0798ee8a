"""One card, two claims of it: a neighbour that computes and an attacker; what each may have, and whether that held."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvmpool.softgpu import state
from tests.dataplane.plane import NATIVE, SOURCES, WARNINGS, Plane, status, wait_until
from tests.dataplane.remote import built, kernel_cache

CARD = "GPU-00000001-aaaa-4bbb-8ccc-dddddddddddd"
CARD_MIB, CLAIM_MIB = 512, 64
PAGE_MIB = 2
CONTEXT_MIB = 9  # what the soft card takes for a context: charged to the claim too
LEFT_MIB = (CLAIM_MIB - CONTEXT_MIB) // PAGE_MIB * PAGE_MIB  # to a process with one context


@dataclass
class Claim:
    """A claim of the card, in a folder of its own: its worker, its relay and the processes of its guest."""

    plane: Plane
    guests: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(built("shim").parent),
            "KVMPOOL_NO_VSOCK": "1",
            "KVMPOOL_ENDPOINT": self.plane.endpoint,
        }

    def start(
        self, program: Path, *words: str, stdout: IO[str] | int = subprocess.PIPE, extra: Mapping[str, str] = {}
    ) -> subprocess.Popen[str]:
        command, pipe = [str(program), *words], subprocess.PIPE
        made = subprocess.Popen(
            command, env={**self.environment(), **extra}, stdin=pipe, stdout=stdout, stderr=pipe, text=True
        )
        self.guests.append(made)
        return made

    def sessions(self) -> set[int]:
        return {int(each["pid"]) for each in status(self.plane.worker_socket())["processes"]}

    def used(self) -> int:
        """Bytes, as the worker counts."""
        return int(status(self.plane.worker_socket())["memory_used"])

    def end(self) -> None:
        for guest in self.guests:
            guest.kill()
            guest.communicate()
        self.plane.end()


@dataclass
class World:
    folder: Path
    programs: Path  # of the host
    program: Path  # bypass_guest
    static: Path
    preload: Path
    attacker: Claim
    neighbour: Claim

    def on_card(self) -> dict[int, int]:
        """Bytes that each session has of the card, as the card itself counts."""
        (card,) = state.read(self.folder / "card")
        return {process.pid: process.memory_bytes for process in card.processes}

    def taken_mib(self) -> int:
        """What all processes but the neighbour's have of the card."""
        innocent = self.neighbour.sessions()
        return sum(held for pid, held in self.on_card().items() if pid not in innocent) >> 20

    def hog(self, **extra: str) -> dict[str, int]:
        """A process of the attacker that takes all it gets, and is ended; what it said."""
        with self.hogs(1, extra=extra) as (said,):
            return said

    def hog_without_card(self, **extra: str) -> dict[str, int]:
        """The same where it is expected to end by itself, with what it says until then."""
        guest = self.attacker.start(self.program, "hog", extra=extra)
        words = said(guest)
        guest.communicate("\n", timeout=30)
        return words

    def busy_ms(self) -> dict[int, float]:
        """By session, as the card itself counts."""
        (card,) = state.read(self.folder / "card")
        return {process.pid: process.busy_ns / 1e6 for process in card.processes}

    @contextmanager
    def hogs(
        self, count: int, case: str = "hog", program: Path | None = None, extra: Mapping[str, str] = {}
    ) -> Iterator[list[dict[str, int]]]:
        """Processes that each took all they got, at once, and hold it."""
        guests = [self.attacker.start(program or self.program, case, extra=extra) for _ in range(count)]
        yield [said(guest) for guest in guests]
        assert self.taken_mib() <= CLAIM_MIB
        for guest in guests:
            guest.communicate("\n", timeout=30)
        wait_until(lambda: self.attacker.used() == 0, 5.0, "what they held is free")


def said(guest: subprocess.Popen[str]) -> dict[str, int]:
    """`name=number` lines up to "code", or to the end of what it says."""
    assert guest.stdout is not None
    words: dict[str, int] = {}
    for line in guest.stdout:
        name, _, number = line.strip().partition("=")
        words[name] = int(number)
        if name == "code":
            break
    return words


def compile_programs(folder: Path) -> tuple[Path, Path, Path]:
    """bypass_guest against the shim, the same linked statically, and what is preloaded."""
    shim = [f"-L{built('shim').parent}", "-Wl,--no-as-needed", "-l:libcuda.so.1"]
    flags = [*WARNINGS, "-Wno-missing-prototypes", "-O1", f"-I{SOURCES}"]
    guest, source = folder / "bypass_guest", str(NATIVE / "bypass_guest.c")
    jobs = [
        [source, *shim, "-o", str(guest)],
        [source, "-static", "-o", f"{guest}-static"],
        ["-shared", "-fPIC", str(NATIVE / "bypass_preload.c"), "-o", str(folder / "preload.so")],
    ]
    for job in jobs:
        subprocess.run(["gcc", *flags, *job, "-ldl", "-lpthread"], check=True)
    return guest, Path(f"{guest}-static"), folder / "preload.so"


def _claim(folder: Path, name: str, programs: Path, endpoint: str, options: tuple[str, ...]) -> Claim:
    """Of the world's card, a half of its compute."""
    place = folder / name
    (place / "workers").mkdir(parents=True)
    (folder / "turns").mkdir(exist_ok=True)
    (place / "workers" / "turns").symlink_to(folder / "turns")  # the claims of one host lie in one folder
    plane = Plane(place, programs, {"KVMPOOL_SOFTGPU": str(folder / "card")})
    words = plane.worker_options(memory_mib=CLAIM_MIB)
    words[words.index("--card") + 1] = CARD
    plane.spawn("kvmpool-worker", *words)
    plane.relay(*options, endpoint=endpoint)
    assert plane.point() == "OK"
    return Claim(plane)


@contextmanager
def world(folder: Path, *options: str, endpoint: str = "") -> Iterator[World]:
    """`options` are the relays', `endpoint` where they listen: a unix socket otherwise."""
    (folder / "card").mkdir()
    (folder / "card" / "cache").symlink_to(kernel_cache())
    state.create(folder / "card", (state.CardSpec(0, CARD, "0000:41:00.0", "Soft GPU", CARD_MIB),))
    programs = folder / "programs"
    programs.mkdir()
    for name in ("worker", "relay"):
        (programs / f"kvmpool-{name}").symlink_to(built(name))
    (programs / "fake").symlink_to(built("softgpu-cuda").parent)
    claims = []
    try:
        for name in ("attacker", "neighbour"):
            claims.append(_claim(folder, name, programs, endpoint, options))
        yield World(folder, programs, *compile_programs(folder), *claims)
    finally:
        for claim in claims:
            claim.end()


@contextmanager
def undisturbed(place: World) -> Iterator[None]:
    """The neighbour computes before, during and after the block: the same each time, and what the CPU says."""
    written = place.folder / "neighbour.out"
    with written.open("w") as out:
        guest = place.neighbour.start(place.program, "neighbour", stdout=out)

    def rounds() -> list[str]:
        return written.read_text().splitlines(keepends=True)

    wait_until(lambda: len(rounds()) > 1, 20.0, "the neighbour computes")
    first = rounds()[0]
    assert first.endswith(" wrong=0\n"), first
    try:
        yield
        seen = len(rounds())
        # the third began after the attack
        wait_until(lambda: len(rounds()) >= seen + 3, 20.0, "the neighbour still computes")
        _, errors = guest.communicate("\n", timeout=30)
    finally:
        guest.kill()
        guest.wait()
    assert set(rounds()) == {first}, f"its results are not bit-identical: {set(rounds())}; {errors}"
    assert (guest.returncode, errors) == (0, "")
