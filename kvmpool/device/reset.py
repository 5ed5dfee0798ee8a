"""Resets a card through the kernel: each of its own functions that can be, then a look whether it answers.

The kernel chooses the method (the function's own, power management, its bus); where a bus would take others along, it
offers none. A reset waits for the card, up to a minute a function; one that never ends leaves a child that hangs in
the kernel, which no daemon can end. Nothing is written down before: whoever is killed here resets it once more.
Source: kernel, ABI/testing/sysfs-bus-pci (reset, reset_method), drivers/pci/pci.c (pci_dev_wait: 65535 ms).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvmpool.device.child_write import WriteRefused, child_write
from kvmpool.device.holders import told
from kvmpool.device.pci import BusState, bus_state
from kvmpool.device.preflight import Situation
from kvmpool.device.sysroot import Sysroot
from kvmpool.device.topology import DEVICES, is_vfio
from kvmpool.errors import CardBusy, CardLost, CardWedged, DeadlinePassed, NoReset, Refused

RESET_DEADLINE_S = 150.0  # the kernel gives up after 65.5 s, twice where it tries a second method
ANSWER_S = 5.0
_POLL_S = 0.05


def functions_to_reset(sysroot: Sysroot, situation: Situation) -> tuple[str, ...]:
    """The card's own function and those beside it in its slot that have a reset.

    Raises CardBusy, Refused, NoReset, CardLost: what stands against it, before anything is done.
    """
    unit = situation.unit
    address = unit.address
    if situation.holders:
        raise CardBusy(f"{address} is in use by {told(situation.holders)}")
    driver = next((each.driver for each in unit.functions if each.address == address), "")
    if not is_vfio(driver):
        raise Refused(f"{address} is on {driver or 'no driver'}, and only a card on vfio-pci is reset")
    if situation.state is not BusState.ANSWERS:
        raise CardLost(f"{address} cannot be reset: {situation.state.value}")
    slot = address.rpartition(".")[0]
    mine = [each.address for each in unit.functions if each.address.rpartition(".")[0] == slot]
    can = tuple(each for each in mine if sysroot.exists(f"{DEVICES}/{each}/reset"))
    if address not in can:
        raise NoReset(f"no working reset: the kernel has none for {address}. Next: reboot the host, or change the card")
    return can


async def reset(sysroot: Sysroot, address: str, functions: Sequence[str], deadline_s: float = RESET_DEADLINE_S) -> None:
    """Reset them. Raises CardLost where the card is not well after it, CardWedged where the kernel does not return."""
    was = _ids(sysroot, address)
    for function in functions:
        path = f"{DEVICES}/{function}/reset"
        try:
            await child_write(sysroot.root / path, "1", deadline_s)
        except WriteRefused as error:
            raise CardLost(
                f"no working reset: {function}: {error} (the kernel log may say"
                ' "not ready 65535ms after FLR; giving up")'
            ) from error
        except DeadlinePassed as error:
            raise CardWedged(f"{function}: its reset does not end ({error}). Next: reboot the host") from error
    await _answers(sysroot, address, was)


async def _answers(sysroot: Sysroot, address: str, was: bytes) -> None:
    """Raises CardLost. Right after a reset a card may read all ones for a moment."""
    loop = asyncio.get_running_loop()
    until = loop.time() + ANSWER_S
    while (state := bus_state(sysroot, address)) is not BusState.ANSWERS:
        if loop.time() >= until:
            raise CardLost(f"after the reset of {address}: {state.value}")
        await asyncio.sleep(_POLL_S)
    if (now := _ids(sysroot, address)) != was:
        raise CardLost(f"after the reset {address} is another device: {now.hex()}, was {was.hex()}")


def _ids(sysroot: Sysroot, address: str) -> bytes:
    """Vendor and device as the card itself tells them."""
    return (sysroot.bytes_of(f"{DEVICES}/{address}/config", 4) or b"")[:4]
