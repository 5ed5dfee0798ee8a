"""What the tests of passthrough do with a lab host whose libvirt passes soft cards through, in their words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote

from kvmpool.core.model import DomainUuid
from kvmpool.core.plug import alias_of
from kvmpool.lab import guests, hostdev
from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.pool import CARDS, SOFTGPU
from kvmpool.softgpu import sysfs
from kvmpool.virt.connection import Libvirt
from kvmpool.virt.plugs import ANSWER_S
from tests.e2e.pool import Pool, until

T = TypeVar("T")

A, B = (spec.pci_address for spec in CARDS)
ALIAS = alias_of("gpu0")
KEPT = "07:00.0"  # where the guest finds the card of the first claim of `kept`, after 6 ports
FILES = "/run/kvmpool-lab"


def guest(
    name: str = "vm0", number: int = 1, *claims: str, kept: tuple[str, ...] = ("gpu0",), ports: int = 6
) -> GuestSpec:
    return GuestSpec(name, number, claims, memory_mib=16, kept=kept, ports=ports)


def passthrough(**attributes: str) -> str:
    """A claim's attributes."""
    return " ".join(f'{key}="{value}"' for key, value in {"name": "gpu0", "mode": "passthrough", **attributes}.items())


class Bench(Pool):
    """Two soft cards on vfio-pci; every domain is a firmware guest unless it is deaf."""

    def clean(self) -> None:
        """No domains, no bindings, no faults; both cards healthy on vfio-pci."""
        hostdev.heal(self.host)
        if self.host.daemon_pid("libvirtd") is None:
            self.host.start_libvirt(hostdev.environment())
        if self.host.daemon_pid("kvmpoold") is None:
            self.lab.start_kvmpoold(self.host)
        for address in (A, B):
            sysfs.find_device(self.host.outside(SOFTGPU), address)
        self.end_domains()
        until(lambda: not self.bindings(), 15.0, "bindings are left")
        for card in self.cards():
            if card["mode"] != "passthrough":
                self.api.post(f"/cards/{card['address']}/mode", {"mode": "passthrough"})
        until(self.all_passthrough, 30.0, "the cards are not healthy and on vfio-pci")

    def all_passthrough(self) -> bool:
        return self.all_healthy() and all(card["mode"] == "passthrough" for card in self.cards())

    def define(self, spec: GuestSpec, *, deaf: bool = False) -> None:
        if deaf:
            self.host.outside(f"{FILES}/deaf.xml").write_text(guests.deaf_xml(spec), encoding="utf-8")
            self.host.virsh("define", "--validate", f"{FILES}/deaf.xml")
        else:
            self.lab.define(self.host, spec, firmware=True)

    def up(self, spec: GuestSpec, *, deaf: bool = False) -> None:
        """Define and start it; returns when it has booted, as far as it does."""
        self.define(spec, deaf=deaf)
        self.host.virsh("start", spec.name)
        if not deaf:
            self.lab.wait_for_guest(self.host, spec)

    def said(self, spec: GuestSpec) -> str:
        return self.host.outside(spec.console).read_text(errors="replace")

    def until_said(self, spec: GuestSpec, words: str) -> str:
        guests.wait_for(self.host.outside(spec.console), words.encode(), 20.0)
        return self.said(spec)

    def dumped(self, name: str, *options: str) -> str:
        return self.host.virsh("dumpxml", name, *options)

    def devices(self, name: str = "vm0") -> str:
        return self.dumped(name).partition("<devices>")[2]

    def libvirt(self, act: Callable[[Libvirt], Awaitable[T]], answer_s: float = ANSWER_S) -> T:
        """What `act` gives with a libvirt of its own, listening to events."""

        async def run() -> T:
            socket = quote(str(self.host.outside("/run/libvirt/libvirt-sock")))
            libvirt = Libvirt(f"qemu+unix:///system?socket={socket}", answer_s=answer_s)
            events = libvirt.wakeups()
            try:
                assert await anext(events) == "libvirt connected"
                return await act(libvirt)
            finally:
                await events.aclose()  # type: ignore[attr-defined]
                await libvirt.close()

        return asyncio.run(run())

    def attach(self, spec: GuestSpec, address: str = A, alias: str = ALIAS) -> None:
        self.libvirt(lambda libvirt: libvirt.attach(DomainUuid(spec.uuid), alias, address))

    def detach(self, spec: GuestSpec, alias: str = ALIAS, answer_s: float = ANSWER_S) -> None:
        self.libvirt(lambda libvirt: libvirt.detach(DomainUuid(spec.uuid), alias), answer_s)
