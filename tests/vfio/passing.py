"""What the tests of passthrough claims do with a kvmpoold in the VFIO lab's host."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.process import Done
from kvmpool.lab.vfio_cards import Fault, LabCard
from tests.vfio.conftest import Bench, until

BUS = 3  # the guest's, that a claim's card always has
LONG_S = 300.0  # of a command that starts Python, or a QEMU, in the host
_FORGET = 'echo 1 >"/sys/bus/pci/devices/$1/remove"; echo 1 >/sys/bus/pci/rescan'
_OUT = ("failed", "quarantined", "dead", "lemon")


def spec(name: str, number: int, claim: str) -> GuestSpec:
    """A firmware guest with a claim gpu0; `claim`: its attributes but the name."""
    claims = (f'name="gpu0" {claim}',)
    return GuestSpec(name, number, claims, memory_mib=16, vsock=True, kept=("gpu0",), ports=BUS - 1)


@dataclass(frozen=True, slots=True)
class Passing:
    """The lab with its kvmpoold."""

    bench: Bench

    def get(self, path: str) -> Any:
        return self.bench.lab.client().get(path)

    def kvmpool(self, *words: str) -> Done:
        """The command line, in the host."""
        return self.bench.host.run(sys.executable, "-m", "kvmpool.cli.main", *words, timeout_s=LONG_S)

    def card(self, card: LabCard) -> dict[str, Any]:
        found: dict[str, Any] = {row["address"]: row for row in self.get("/cards")}.get(card.address, {})
        return found

    def verdict(self, card: LabCard) -> str:
        return str(self.card(card).get("verdict", ""))

    def binding(self, label: str) -> dict[str, Any]:
        """{} where there is none."""
        found: dict[str, Any] = {row["label"]: row for row in self.get("/bindings")}.get(label, {})
        return found

    def switch(self, card: LabCard, mode: str) -> None:
        """By the API; `ready` waits for it."""
        self.bench.lab.client().post(f"/cards/l1/{card.address}/mode", {"mode": mode, "dry_run": False})

    def ready(self, cards: Sequence[LabCard]) -> None:
        """No domain, and these cards passthrough and healthy, whatever an earlier test has done to them."""
        host = self.bench.host
        host.sh(_END_DOMAINS, timeout_s=LONG_S)
        until(lambda: not self.get("/bindings"), "bindings are left")
        for card in cards:
            if self.bench.header(card.address).startswith("ffff"):
                host.inject(card, Fault.COMES_BACK)
                host.sh(_FORGET, card.address)
        for card in cards:
            if self.verdict(card) in _OUT:
                self.bench.lab.client().post(f"/cards/l1/{card.address}/restore", {"reason": "a test"})
        for card in cards:
            until(lambda card=card: self.verdict(card) == "healthy", f"{card.name} is not healthy")  # type: ignore[misc]
            assert self.card(card)["mode"] == "passthrough"
        self.bench.forget_events()

    def start(self, guest: GuestSpec) -> str:
        """Define and start it; what it has printed once its card is in its slot."""
        self.bench.lab.define(guest)
        self.bench.host.virsh("start", guest.name, timeout_s=LONG_S)
        return self.plugged(guest)

    def plugged(self, guest: GuestSpec, times: int = 1) -> str:
        """What it has printed once a card has come into its slot for the n-th time."""
        said = ""

        def came() -> bool:
            nonlocal said
            said = self.bench.host.read(guest.console).replace("\r", "")
            return said.count(f"PLUGGED {BUS:02x}\n") >= times + said.count(f"UNPLUGGED {BUS:02x}\n")

        until(came, f"no card came into {guest.name}'s slot; it said {said[-500:]!r}", LONG_S)
        return said

    def devices(self, name: str) -> list[tuple[str, str, str]]:
        """Alias, the host's address and the guest's bus of each card in a running domain."""
        found = []
        for text in re.findall(r"<hostdev .*?</hostdev>", self.bench.host.virsh("dumpxml", name), re.DOTALL):
            source, _, target = text.partition("</source>")
            where = re.search(r"domain='0x(\w+)' bus='0x(\w+)' slot='0x(\w+)' function='0x(\w+)'", source)
            alias, bus = re.search(r"alias name='([^']+)'", text), re.search(r"bus='0x(\w+)'", target)
            assert where
            assert alias
            assert bus
            found.append((alias[1], "{}:{}:{}.{}".format(*where.groups()), bus[1]))
        return found

    def events(self) -> list[tuple[str, str, str]]:
        """Subject, kind, reason; oldest first."""
        return [(row["subject"], row["kind"], row["reason"]) for row in self.get("/events")]

    def event_at(self, subject: str, kind: str, after: float = 0.0) -> float:
        """When (the host's clock) such an event was written, not before `after`; 0.0: it was not."""
        times = [row["at"] for row in self.get("/events") if (row["subject"], row["kind"]) == (subject, kind)]
        return next((float(at) for at in times if at >= after), 0.0)

    def clock(self) -> float:
        """The host's, which its events are told by."""
        return float(self.bench.host.run("date", "+%s.%N").stdout)


_END_DOMAINS = """
for name in $(virsh -q list --name); do virsh -q destroy "$name" || exit 1; done
for name in $(virsh -q list --all --name); do virsh -q undefine "$name" || exit 1; done
rm -f /run/kvmpool-lab/*.console
"""
