"""What calls cost over shim and session, against the bare socket in the same run (design 03, section 3.7)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.bench.figure import line
from tests.dataplane import shim

BULK_BYTES = 64 << 20
CALL_OVER_SOCKET = 1.5
LAUNCH_NS = 1000
BULK_OF_SOCKET = 0.85


def run() -> bool:
    """Print the figures; whether each goal is met. A stub stands for the card: this measures the way, not the work."""
    with (
        tempfile.TemporaryDirectory() as name,
        shim.host(Path(name), "plain", memory=256 << 20, STUB_COUNT="/dev/null") as host,
    ):
        figures = host.run(program="bench-guest")
        one, thousand = host.run("batch", "1", "1"), host.run("batch", "1000", "1")
        nothing = host.run("batch", "0", "0")
    if figures.code:
        raise RuntimeError(f"bench-guest ended with {figures.code}: {figures.lines}")
    trips = thousand.stats["round_trips"] - nothing.stats["round_trips"]
    assert one.stats["round_trips"] == thousand.stats["round_trips"]
    call, raw, stream = figures["call"], figures["socket_call"], figures["socket_bulk"]
    print(f"bare socket: {raw / 1e3:.1f} us a message and back, {BULK_BYTES / stream:.2f} GB/s (medians)")
    print(f"alloc and free: {figures['alloc_free'] / 1e3:.1f} us, one round trip")
    met = [
        line(
            "waiting call",
            f"{call / 1e3:.1f} us, {call / raw:.2f} x socket",
            "<= 1.5 x",
            call <= CALL_OVER_SOCKET * raw,
        ),
        line("launch in a burst", f"{figures['launch']} ns", f"<= {LAUNCH_NS} ns", figures["launch"] <= LAUNCH_NS),
        line("round trips of 1,000 launches and a synchronise", str(trips), "1", trips == 1),
    ]
    for name in ("bulk_in", "bulk_out"):
        part = stream / figures[name]
        text = f"{BULK_BYTES / figures[name]:.2f} GB/s, {part:.0%} of socket"
        met.append(line(f"copy of 64 MiB, {name}", text, ">= 85 %", part >= BULK_OF_SOCKET))
    return all(met)
