"""A domain's device of shared memory, `<shmem name='kvmpool-UUID'>`: read out of its XML, and written there.

Through it a guest's processes and the sessions that serve them on the same host exchange what else crosses a socket.
libvirt names the file behind it after the device: /dev/shm/kvmpool-UUID. Who makes that file: dataplane/windows.py.
This module does not know libvirt.
"""

from __future__ import annotations

import re

from lxml import etree

from kvmpool.core.model import DomainUuid
from kvmpool.virt.claim_attributes import mib_of, refusal, shown

PREFIX = "kvmpool-"
MIN_MIB, MAX_MIB = 8, 65536  # as dataplane/src/slots.h; QEMU's BARs are powers of two
ALLOWED = f"a power of two from {MIN_MIB}MiB to {MAX_MIB // 1024}GiB"

_UNIT_BYTES = {"": 1, "B": 1, "BYTES": 1, "K": 1024, "KIB": 1024, "M": 1 << 20, "MIB": 1 << 20, "G": 1 << 30}
_UNIT_BYTES |= {"GIB": 1 << 30}


def shared_mib_in(root: etree._Element, uuid: DomainUuid, domain: str) -> int:
    """How much the domain shares with its sessions; 0 where it has no such device. Raises ClaimInvalid."""
    ours = [each for each in root.iterfind("devices/shmem") if (each.get("name") or "").startswith(PREFIX)]
    if not ours:
        return 0
    name, model = ours[0].get("name") or "", ours[0].find("model")
    if len(ours) > 1:
        raise refusal(domain, f"it has {len(ours)} <shmem name='{PREFIX}...'>. Allowed: one")
    if name != PREFIX + uuid:  # else it would see another guest's memory
        raise refusal(domain, f"<shmem name={shown(name)}> is not its own. Allowed: {PREFIX}{uuid}")
    if model is None or model.get("type") != "ivshmem-plain":
        raise refusal(domain, f"<shmem name={shown(name)}> has another model. Allowed: ivshmem-plain")
    size = ours[0].find("size")
    mib = 0 if size is None else _bytes_of(size.text or "", size.get("unit") or "") >> 20
    if not _allowed(mib):
        raise refusal(domain, f"<shmem name={shown(name)}> has a size that kvmpool does not use. Allowed: {ALLOWED}")
    return mib


def wanted_mib(domain: str, text: str) -> int:
    """What a person asked for, "256MiB"; "0" is none. Raises ClaimInvalid."""
    mib = mib_of(text) if re.fullmatch("[0-9]{1,6} ?(MiB|GiB)?", text) else -1
    if mib and not _allowed(mib):
        raise refusal(domain, f"shared memory of {shown(text)}. Allowed: {ALLOWED}, or 0 for none")
    return mib


def _allowed(mib: int) -> bool:
    return MIN_MIB <= mib <= MAX_MIB and mib & (mib - 1) == 0


def _bytes_of(text: str, unit: str) -> int:
    number = int(text) if re.fullmatch("[0-9]{1,15}", text.strip()) else 0
    return number * _UNIT_BYTES.get(unit.upper(), 0)


def put_shared(root: etree._Element, uuid: DomainUuid, mib: int) -> bool:
    """The device of that size instead of the one it had, or none where `mib` is 0; whether that changed anything.

    role='master': a guest that was saved may be restored; what is in the device then is void and found to be so.
    """
    devices = root.find("devices")
    if devices is None:
        devices = etree.SubElement(root, "devices")
    name = PREFIX + uuid
    before = [each for each in devices.iterfind("shmem") if each.get("name") == name]
    sizes = [each.find("size") for each in before]
    if [_bytes_of(s.text or "", s.get("unit") or "") >> 20 for s in sizes if s is not None] == [mib][: bool(mib)]:
        return False
    for each in before:
        devices.remove(each)
    if mib:
        shmem = etree.SubElement(devices, "shmem", name=name, role="master")
        etree.SubElement(shmem, "model", type="ivshmem-plain")
        etree.SubElement(shmem, "size", unit="M").text = str(mib)
    return True
