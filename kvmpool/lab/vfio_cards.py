"""The cards of the VFIO lab: QEMU's stock PCI devices, each behind a root port of its own, and what L0 can do to them.

    gpu0  edu     conventional PCI, a live register in its BAR, bus reset only; an audio function shares its IOMMU group
    gpu1  nvme    PCIe with FLR and MSI-X: what AER errors need
    gpu2  nvme    its twin
    gpu3  ati     a display controller (class 0300), as a GPU is one
    gpu4  edu     gpu0's twin, without audio

No device's ids can be changed, and QEMU is not patched: kvmpoold is told in `[cards] match` what counts as a card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvmpool.errors import NotFound, Refused
from kvmpool.lab.qmp import Monitor

Device = dict[str, Any]  # as in QMP's device_add


@dataclass(frozen=True, slots=True)
class LabCard:
    """A card: `name` is QEMU's id of its function 0; `number` that of its root port, and of its bus in the host."""

    name: str
    number: int
    ids: str  # vendor:device, as the host sees it
    functions: tuple[Device, ...]  # without id, bus and addr; function 0 first

    @property
    def address(self) -> str:
        return f"0000:{self.number:02x}:00.0"

    @property
    def port(self) -> str:
        return f"rp{self.number}"

    def devices(self) -> tuple[Device, ...]:
        """What device_add takes; function 0 last, because its arrival powers the slot."""
        many = {"multifunction": True} if len(self.functions) > 1 else {}
        made = [
            {**device, "id": self.name + ("" if number == 0 else f"-{number}"), "bus": self.port, "addr": f"0.{number}"}
            for number, device in enumerate(self.functions)
        ]
        made[0] |= many
        return tuple(reversed(made))


_EDU: Device = {"driver": "edu"}
_NVME: Device = {"driver": "nvme", "use-intel-id": True}

CARDS = (
    LabCard("gpu0", 1, "1234:11e8", (_EDU, {"driver": "intel-hda"})),
    LabCard("gpu1", 2, "8086:5845", ({**_NVME, "serial": "gpu1"},)),
    LabCard("gpu2", 3, "8086:5845", ({**_NVME, "serial": "gpu2"},)),
    LabCard("gpu3", 4, "1002:5159", ({"driver": "ati-vga", "model": "rv100"},)),
    LabCard("gpu4", 5, "1234:11e8", (_EDU,)),
)
MATCH = tuple(sorted({card.ids for card in CARDS}))


def root_ports() -> tuple[Device, ...]:
    """One a card, in the order of their numbers: so the firmware numbers the buses behind them."""
    return tuple(
        {"driver": "pcie-root-port", "id": card.port, "bus": "pcie.0", "chassis": card.number, "slot": card.number}
        for card in CARDS
    )


def card(text: str) -> LabCard:
    """By its name or PCI address. Raises NotFound."""
    for each in CARDS:
        if text in (each.name, each.address, each.address.removeprefix("0000:")):
            return each
    known = ", ".join(f"{each.name} ({each.address})" for each in CARDS)
    raise NotFound(f"no card {text!r} in the VFIO lab. Next: one of {known}")


# --- faults -----------------------------------------------------------------------------------------------------------


class Fault(Enum):
    """The words of `kvmpool lab fault CARD ...`."""

    FALLS_OFF = "falls-off"  # without a word: its config space reads all ones, sysfs still shows it
    COMES_BACK = "comes-back"  # after falls-off: it answers again, as new
    REMOVE = "remove"  # its removal is requested, as by the slot's button: it goes when nobody holds it
    PLUG = "plug"  # after remove: put back into its slot
    AER_FATAL = "aer fatal"  # its root port reports a data link protocol error
    AER_NONFATAL = "aer nonfatal"  # its root port reports a poisoned TLP

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises Refused."""
        try:
            return cls(" ".join(text.split()).lower())
        except ValueError:
            raise Refused(f"no fault {text!r}. Next: use {FORMS}") from None


FORMS = " | ".join(fault.value for fault in Fault)


def inject(monitor: Monitor, chosen: LabCard, fault: Fault) -> None:
    """Raises Refused with QEMU's words, e.g. where the card is not in its slot."""
    _EFFECTS[fault](monitor, chosen)


def _realize(value: bool) -> Callable[[Monitor, LabCard], None]:
    def effect(monitor: Monitor, chosen: LabCard) -> None:
        path = f"/machine/peripheral/{chosen.name}"
        monitor.execute("qom-set", path=path, property="realized", value=value)

    return effect


def _remove(monitor: Monitor, chosen: LabCard) -> None:
    monitor.execute("device_del", id=chosen.name)


def _plug(monitor: Monitor, chosen: LabCard) -> None:
    for device in chosen.devices():
        monitor.execute("device_add", **device)


def _aer(error: str) -> Callable[[Monitor, LabCard], None]:
    def effect(monitor: Monitor, chosen: LabCard) -> None:
        said = monitor.hmp(f"pcie_aer_inject_error {chosen.port} {error}")
        if not said.startswith("OK "):
            raise Refused(f"QEMU refused the error at {chosen.port}: {said.strip()}")

    return effect


_EFFECTS: dict[Fault, Callable[[Monitor, LabCard], None]] = {
    Fault.FALLS_OFF: _realize(False),
    Fault.COMES_BACK: _realize(True),
    Fault.REMOVE: _remove,
    Fault.PLUG: _plug,
    Fault.AER_FATAL: _aer("DLP"),
    Fault.AER_NONFATAL: _aer("POISON_TLP"),
}
