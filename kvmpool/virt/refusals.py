"""What libvirt and QEMU say of a card that cannot be plugged or started with: its class, and what a person does next.

Their error code says nothing of it ("internal error", "operation failed"), so it is known by its text (design 04 §4.4).
What is in no row is told as libvirt's code has it. Source: libvirt 9.0, src/hypervisor/virhostdev.c, src/util/virpci.c,
src/conf/domain_addr.c; QEMU 7.2, hw/vfio/common.c, hw/vfio/pci.c, hw/pci/pcie.c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvmpool.errors import CardBusy, CardLost, DeadlinePassed, KvmpoolError, Refused

_SHOWN_CHARS = 300  # of libvirt's text


@dataclass(frozen=True, slots=True)
class Known:
    """`text`: a pattern in libvirt's message. `then`: what a person does next; "": nothing, it is tried again."""

    text: re.Pattern[str]
    kind: type[KvmpoolError]
    then: str


def _known(text: str, kind: type[KvmpoolError], then: str) -> Known:
    return Known(re.compile(text), kind, then)


KNOWN = (
    _known(
        "No more available PCI slots",
        Refused,
        "virsh edit {domain}, add <controller type='pci' model='pcie-root-port'/>, and start it anew",
    ),
    _known("Unknown PCI header type '127'", CardLost, "kvmpool card show {address}"),
    _known("from D3cold to D0, device inaccessible", CardLost, "kvmpool card show {address}"),
    _known("is in use by driver [^,]+, domain ", CardBusy, "kvmpool binding list"),
    _known("failed to open /dev/vfio/.*: Device or resource busy", CardBusy, "fuser -v /dev/vfio/*"),
    _known("group [0-9]+ is not viable", Refused, "kvmpool card mode {address} passthrough --dry-run"),
    _known("VFIO_MAP_DMA failed: Cannot allocate memory", Refused, "virsh edit {domain}, take <hard_limit> out"),
    _known(r"= -14 \(Bad address\)", Refused, "kvmpool doctor; two devices of {domain} claim one address range"),
    _known("unable to map backing store for guest RAM", Refused, "kvmpool doctor; free hugepages are missing"),
    _known("host doesn't support passthrough of host PCI devices", Refused, "kvmpool doctor"),
    _known("must be (manually detached|bound to)|is not bound to", Refused, "kvmpool card mode {address} passthrough"),
    _known("guest is busy", DeadlinePassed, ""),
    _known("cannot hot unplug hostdev device with multifunction", Refused, "virsh edit {domain}, one function a port"),
)


def told(message: str, domain: str, address: str) -> KvmpoolError | None:
    """Ours for libvirt's message about a card of a domain, one line; None for one that is not known."""
    text = " ".join(message.split())[:_SHOWN_CHARS]
    for known in KNOWN:
        if known.text.search(text):
            then = known.then.format(domain=domain, address=address or "CARD")
            return known.kind(f"libvirt: {text}" + (f". Next: {then}" if then else ""))
    return None
