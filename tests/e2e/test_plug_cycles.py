"""Cards that come and go, by kvmpoold and libvirt's own hostdev code: nothing of them is left."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import pytest

from kvmpool.lab.guests import GuestSpec
from kvmpool.virt.device_xml import hostdevs_of
from tests.e2e.hostdev import A, B, Bench, guest, passthrough
from tests.e2e.pool import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

CYCLES = int(os.environ.get("KVMPOOL_PLUG_CYCLES", "15"))
WARM_UP = 3  # the first ones fill caches
PATIENCE_S = 60.0
# A leak of a card's row, of a thread's stack or of a connection, a cycle, is above it; the allocator's jitter is below.
KIB_A_CYCLE = 64
JITTER_KIB = 4096


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of kvmpoold and of the store."""

    descriptors: int
    threads: int
    resident_kib: int
    bindings: int
    claims: int


def _footprint(bench: Bench) -> Footprint:
    script = 'cd "/proc/$1" && ls fd | wc -l && awk "/^VmRSS|^Threads/ { print \\$2 }" status'
    pid = bench.host.daemon_pid("kvmpoold")
    said = bench.host.run("sh", "-c", script, "sh", str(pid)).stdout
    descriptors, resident, threads = (int(word) for word in said.split())
    return Footprint(descriptors, threads, resident, len(bench.bindings()), len(bench.api.get("/claims")))


def _card_in(bench: Bench) -> list[str]:
    return [device.address for device in hostdevs_of(bench.dumped("vm0"))]


def _cycle(bench: Bench) -> None:
    """The card in use is drained: it leaves the running guest, and the other one comes to its place."""
    [old] = _card_in(bench)
    new = B if old == A else A
    label = _label(bench, old)
    bench.api.post(f"/cards/{label}/drain", {"reason": "the next one"})
    until(lambda: _card_in(bench) == [new], PATIENCE_S, "the other card does not come")
    bench.api.post(f"/cards/{label}/uncordon")
    until(lambda: _settled(bench.bindings()), PATIENCE_S, "the old binding's row stays")
    until(lambda: _card(bench, old)["verdict"] == "healthy", PATIENCE_S, "the drained card is not healthy")


def _card(bench: Bench, address: str) -> dict[str, Any]:
    return next(card for card in bench.cards() if card["address"] == address)


def _label(bench: Bench, address: str) -> str:
    return str(_card(bench, address)["label"])


def _settled(bindings: list[dict[str, Any]]) -> bool:
    return len(bindings) == 1 and bool(bindings[0]["pointed"])


def test_cards_that_come_and_go_leave_no_descriptor_row_or_memory(bench: Bench) -> None:
    vm: GuestSpec = guest("vm0", 1, passthrough())
    bench.up(vm)
    until(lambda: _settled(bench.bindings()), PATIENCE_S, "the claim is not served")
    for _ in range(WARM_UP):
        _cycle(bench)
    before, began = _footprint(bench), time.monotonic()
    for _ in range(CYCLES):
        _cycle(bench)
    after, each_s = _footprint(bench), (time.monotonic() - began) / CYCLES
    print(f"{CYCLES} cycles of {each_s:.2f} s: {before} -> {after}")
    words = bench.said(vm).split("\n")
    assert (words.count("PLUGGED 07"), words.count("UNPLUGGED 07")) == (CYCLES + WARM_UP + 1, CYCLES + WARM_UP)
    assert (after.bindings, after.claims) == (before.bindings, before.claims) == (1, 1)
    assert after.descriptors <= before.descriptors + 2
    assert after.threads <= before.threads + 2
    assert after.resident_kib <= before.resident_kib + JITTER_KIB + KIB_A_CYCLE * CYCLES
    bench.host.virsh("destroy", "vm0")
    until(lambda: not bench.bindings(), PATIENCE_S, "the binding's row stays after the domain's end")
