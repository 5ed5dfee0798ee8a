"""libvirt's and QEMU's texts about cards: each known one has a class and a next step, all others are left alone."""

from __future__ import annotations

import pytest

from kvmpool.errors import CardBusy, CardLost, DeadlinePassed, KvmpoolError, Refused
from kvmpool.virt.refusals import KNOWN, told

# As they were read from libvirt 9.0 and QEMU 7.2
TEXTS: list[tuple[str, type[KvmpoolError]]] = [
    ("internal error: No more available PCI slots", Refused),
    ("internal error: Unknown PCI header type '127' for device '0000:41:00.0'", CardLost),
    ("Unable to change power state from D3cold to D0, device inaccessible", CardLost),
    ("Requested operation is not valid: PCI device 0000:41:00.0 is in use by driver QEMU, domain vm1", CardBusy),
    (
        "internal error: unable to execute QEMU command 'device_add': vfio 0000:41:00.0: failed to open /dev/vfio/41: "
        "Device or resource busy",
        CardBusy,
    ),
    ("vfio 0000:01:00.0: group 1 is not viable", Refused),
    ("VFIO_MAP_DMA failed: Cannot allocate memory", Refused),
    ("vfio_dma_map(0x5, 0xc0000000, 0x4000, 0x7f) = -14 (Bad address)", Refused),
    ("unable to map backing store for guest RAM: Cannot allocate memory", Refused),
    ("unsupported configuration: host doesn't support passthrough of host PCI devices", Refused),
    ("Unmanaged PCI device 0000:41:00.0 must be manually detached from the host", Refused),
    ("Hot-unplug failed: guest is busy (power indicator blinking)", DeadlinePassed),
    ("cannot hot unplug hostdev device with multifunction PCI guest address: 0000:02:00.0", Refused),
]


@pytest.mark.parametrize(("text", "kind"), TEXTS)
def test_a_known_text_has_its_class_and_is_one_line_with_the_next_step(text: str, kind: type[KvmpoolError]) -> None:
    error = told(f"{text}\n", "vm0", "0000:41:00.0")
    assert type(error) is kind
    assert str(error).startswith(f"libvirt: {text}")
    assert "\n" not in str(error)
    assert ("Next: " in str(error)) is (kind is not DeadlinePassed)
    assert "{" not in str(error)


def test_every_row_is_reached_by_a_text() -> None:
    reached = {next(known for known in KNOWN if known.text.search(text)) for text, _ in TEXTS}
    assert reached == set(KNOWN)


def test_what_is_not_known_is_left_to_libvirt_s_code() -> None:
    assert told("internal error: client socket is closed", "vm0", "") is None
