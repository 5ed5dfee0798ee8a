"""What calls cost over shim and session, against the bare way in the same run (design 03, section 3.7)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figure import line
from tests.dataplane import shim

BULK_BYTES = 256 << 20
LAUNCH_NS = 1000
LIMIT_S = 900.0  # of one program, which takes 10 s on a machine of its own: on a busy one too the figures come


@dataclass(frozen=True, slots=True)
class Way:
    """A transport, the bare things it is compared with, and its goals."""

    name: str
    call: str  # what a call is compared with
    call_goal: float
    bulk: str  # what a copy of page-locked memory is compared with
    bulk_goal: float


WAYS = (
    Way("unix", "unix_call", 1.5, "unix_bulk", 0.85),
    Way("tcp", "tcp_call", 1.5, "tcp_bulk", 0.85),
    Way("shm", "futex_call", 2.0, "memcpy", 0.90),
)


def run() -> bool:
    """Print the figures; whether each goal is met. A stub stands for the card: this measures the way."""
    met = []
    with _host("count") as host:
        for way in WAYS:
            met += _way(host, way)
    with _host("move") as host:
        figures = _measured(host, "copies")
    parts = ", ".join(f"{kind} {figures['memcpy'] / figures[kind]:.0%}" for kind in ("bulk_in", "bulk_out"))
    print(f"-- shm, a stub that copies as it goes: {parts} of memcpy ({BULK_BYTES / figures['memcpy']:.2f} GB/s)")
    return all(met)


def _pinned() -> dict[str, str]:
    return {"BENCH_PIN": "1"} if (os.cpu_count() or 1) > 1 else {}


@contextmanager
def _host(copies: str) -> Iterator[shim.Host]:
    with (
        tempfile.TemporaryDirectory() as name,
        shim.host(Path(name), "plain", memory=512 << 20, STUB_COUNT="/dev/null", STUB_COPIES=copies) as host,
    ):
        if _pinned():
            os.sched_setaffinity(host.process.pid, {1})
        host.limit_s = LIMIT_S
        yield host


def _measured(host: shim.Host, *arguments: str, **settings: str) -> shim.Run:
    figures = host.run(*arguments, program="bench-guest", **settings, **_pinned())
    if figures.code:
        raise RuntimeError(f"bench-guest ended with {figures.code}: {figures.lines}")
    return figures


def _way(host: shim.Host, way: Way) -> list[bool]:
    endpoint = f"tcp:127.0.0.1:{(host.folder / 's.tcp').read_text()}" if way.name == "tcp" else f"unix:{host.folder}/s"
    settings = {"KVMPOOL_ENDPOINT": endpoint, "KVMPOOL_SHM": "1" if way.name == "shm" else "0"}
    figures = _measured(host, **settings)
    nothing, one, thousand = (
        host.run("batch", *numbers, **settings) for numbers in (("0", "0"), ("1", "1"), ("1000", "1"))
    )
    assert one.stats["round_trips"] == thousand.stats["round_trips"]
    trips = thousand.stats["round_trips"] - nothing.stats["round_trips"]
    call, bare = figures["call"], figures[way.call]
    floors = ", ".join(f"{name} {figures[f'{name}_call'] / 1e3:.1f} us" for name in ("unix", "tcp", "futex"))
    streams = ", ".join(
        f"{name} {BULK_BYTES / figures[key]:.2f} GB/s"
        for name, key in (("unix", "unix_bulk"), ("tcp", "tcp_bulk"), ("memcpy", "memcpy"))
    )
    print(f"-- {way.name} (medians); bare, in turn with it: {floors}; {streams}")
    print(f"   alloc and free: {figures['alloc_free'] / 1e3:.1f} us, one round trip")
    for kind in ("plain_in", "plain_out"):
        print(f"   copy of 256 MiB of ordinary memory, {kind}: {BULK_BYTES / figures[kind]:.2f} GB/s")
    times = f"{call / 1e3:.1f} us, {call / bare:.2f} x {way.call}"
    return [
        line("waiting call", times, f"<= {way.call_goal} x", call <= way.call_goal * bare),
        line("launch in a burst", f"{figures['launch']} ns", f"<= {LAUNCH_NS} ns", figures["launch"] <= LAUNCH_NS),
        line("round trips of 1,000 launches and a synchronise", str(trips), "1", trips == 1),
        *_copies(figures, way),
    ]


def _copies(figures: shim.Run, way: Way) -> list[bool]:
    met = []
    for kind in ("bulk_in", "bulk_out"):
        part = figures[way.bulk] / figures[kind]
        rate = f"{BULK_BYTES / figures[kind]:.2f} GB/s"
        text = f"{rate}, {part:.0%} of {way.bulk}" if part < 10 else f"{figures[kind] / 1e3:.0f} us, no byte moves"
        goal = f">= {way.bulk_goal:.0%}"
        met.append(line(f"copy of 256 MiB of page-locked memory, {kind}", text, goal, part >= way.bulk_goal))
    return met
