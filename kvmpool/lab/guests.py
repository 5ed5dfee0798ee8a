"""The lab's guests: their domain XML as an admin would write it, and a way to run a program in one.

This module does not start them: `virsh define` and `virsh start` do, as everywhere.
"""

from __future__ import annotations

import base64
import re
import secrets
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from kvmpool.errors import DeadlinePassed, Unreachable
from kvmpool.lab import process, sockets

CLAIMS_URI = "urn:kvmpool:domain:1"
# For uuid5: the same name has the same uuid in every lab.
_NAMESPACE = uuid.UUID("2b1b0b7e-6f5e-4d0c-9a43-6b766d706f6f")
# cryptomgr.notests and the rest save 1-2 s of boot under TCG; panic=-1: a dead guest ends instead of hanging
COMMAND_LINE = "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off nokaslr random.trust_cpu=on cryptomgr.notests"
# Without the global, QEMU's ACPI hot plug would own the slots, which only an operating system answers.
_NATIVE_HOTPLUG = (
    "<qemu:commandline><qemu:arg value='-global'/>"
    "<qemu:arg value='ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off'/></qemu:commandline>"
)


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """A guest. `number` (1-99) gives its address; `claims` are the attributes of each `<claim>`, as XML text."""

    name: str
    number: int
    claims: tuple[str, ...] = ()
    memory_mib: int = 256
    cards: tuple[tuple[str, int], ...] = ()  # passed through: the host's PCI address, and the guest's bus for it (2-6)
    vsock: bool = False
    shared_mib: int = 0  # of its device of shared memory; 0: it has none
    kept: tuple[str, ...] = ()  # claims for whose cards a root port is kept: the guest's bus 7 and on, in this order
    ports: int = 6  # root ports, those that are kept left out: its own devices take the first

    @property
    def uuid(self) -> str:
        return str(uuid.uuid5(_NAMESPACE, self.name))

    @property
    def address(self) -> str:
        return f"10.77.0.{100 + self.number}/24"

    @property
    def channel(self) -> str:
        """The host's end of the command channel, inside the host."""
        return f"/run/kvmpool-lab/{self.name}.channel"

    @property
    def console(self) -> str:
        """What the guest prints on ttyS0, inside the host."""
        return f"/run/kvmpool-lab/{self.name}.console"


def linux_xml(spec: GuestSpec, kernel: Path, initrd: str) -> str:
    """A Linux guest, 128 MiB and more, that runs kvmpool's shim; `kernel` and `initrd` as the host sees them."""
    boot = f"""<kernel>{kernel}</kernel><initrd>{initrd}</initrd>
    <cmdline>{COMMAND_LINE} kvmpool.address={spec.address}</cmdline>"""
    devices = f"""<channel type='unix'>
      <source mode='bind' path='{spec.channel}'/><target type='virtio' name='org.kvmpool.lab'/>
    </channel>"""
    if spec.shared_mib:
        devices += f"""
    <shmem name='kvmpool-{spec.uuid}' role='master'>
      <model type='ivshmem-plain'/><size unit='M'>{spec.shared_mib}</size>
    </shmem>"""
    return _domain(spec, boot, devices)


def firmware_xml(spec: GuestSpec, firmware: Path) -> str:
    """A guest without an operating system: ready 20 ms after its start, for tests that need no process in the guest."""
    boot = f"<loader readonly='yes' type='rom'>{firmware}</loader>"
    return _domain(spec, boot, "", _NATIVE_HOTPLUG)


def deaf_xml(spec: GuestSpec) -> str:
    """A guest that stays in QEMU's own SeaBIOS, without anything to boot: it never answers a removal request.

    Its slots are ACPI's, as in an ordinary domain: there a reset completes a removal that nobody has answered.
    """
    return _domain(spec, "", "")


def hostdev_xml(address: str, bus: int) -> str:
    """A card for a guest, at slot 0 function 0 of the guest's `bus`; `address` is the host's, "0000:01:00.0"."""
    domain, host_bus, slot, function = re.split("[:.]", address)
    source = f"domain='0x{domain}' bus='0x{host_bus}' slot='0x{slot}' function='0x{function}'"
    return f"""<hostdev mode='subsystem' type='pci' managed='no'>
      <source><address {source}/></source>
      <rom bar='off'/>
      <address type='pci' domain='0x0000' bus='0x{bus:02x}' slot='0x00' function='0x0'/>
    </hostdev>"""


def _domain(spec: GuestSpec, boot: str, devices: str, extra: str = "") -> str:
    ports = "<controller type='pci' model='pcie-root-port'/>" * spec.ports  # two in use, the others for cards
    for index, claim in enumerate(spec.kept, spec.ports + 1):
        alias = f"<alias name='ua-kvmpool-{claim}-port'/>"
        ports += f"<controller type='pci' index='{index}' model='pcie-root-port'>{alias}</controller>"
    devices += "".join(hostdev_xml(address, bus) for address, bus in spec.cards)
    devices += "<vsock model='virtio'><cid auto='yes'/></vsock>" if spec.vsock else ""
    return f"""<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{spec.name}</name>
  <uuid>{spec.uuid}</uuid>
  <memory unit='MiB'>{spec.memory_mib}</memory>
  <vcpu>1</vcpu>
  {_metadata(spec)}
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    {boot}
  </os>
  {_firmware_config(spec)}
  <features><acpi/><apic/></features>
  <cpu mode='custom' match='exact'><model>qemu64</model></cpu>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <controller type='pci' model='pcie-root'/>
    {ports}
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <interface type='bridge'><source bridge='br0'/><model type='virtio'/><rom enabled='no'/></interface>
    <serial type='file'><source path='{spec.console}'/></serial>
    {devices}
  </devices>
  {extra}
</domain>
"""


def _metadata(spec: GuestSpec) -> str:
    if not spec.claims:
        return ""
    claims = "".join(f"<kvmpool:claim {attributes}/>" for attributes in spec.claims)
    return f"<metadata><kvmpool:claims xmlns:kvmpool='{CLAIMS_URI}'>{claims}</kvmpool:claims></metadata>"


def _firmware_config(spec: GuestSpec) -> str:
    """Where a claimed guest finds its endpoint and token: files that kvmpoold writes before the domain starts."""
    if spec.vsock or all('mode="passthrough"' in claim for claim in spec.claims):
        return ""  # over vsock its CID says who it is; a card that is passed through has no endpoint
    folder = f"/run/kvmpool/guests/{spec.uuid}"
    names = ("endpoint", "token")
    entries = [f"<entry name='opt/org.kvmpool/{name}' file={quoteattr(f'{folder}/{name}')}/>" for name in names]
    return f"<sysinfo type='fwcfg'>{''.join(entries)}</sysinfo>"


def wait_for(console: Path, marker: bytes, timeout_s: float) -> None:
    """Return when the guest has printed `marker`. Raises DeadlinePassed with the console's last line."""
    if process.holds_within(lambda: console.exists() and marker in console.read_bytes(), timeout_s, 0.05):
        return
    lines = console.read_text(errors="replace").splitlines() if console.exists() else []
    said = lines[-1].strip() if lines else "nothing"
    raise DeadlinePassed(f"{console.stem}: no {marker.decode()} after {timeout_s:g} s, it printed last: {said}")


# --- a program in the guest -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that ran in a guest: what it printed (both streams) and its exit code."""

    output: str
    code: int
    seconds: float


def run(channel: Path, script: str, timeout_s: float = 60.0) -> Ran:
    """Run a shell script in the guest behind `channel` (the socket's path on this side) and wait for its end.

    One caller at a time: a second one waits until the first has its answer. Raises Unreachable when the guest has no
    channel (not running), DeadlinePassed when no answer came; the script then goes on in the guest.
    """
    began = time.monotonic()
    mark = secrets.token_hex(8)
    request = f"{mark} {base64.b64encode(script.encode()).decode()}\n".encode()
    with closing(_connected(channel)) as connection:
        connection.sendall(request)
        answer = _answer(connection, mark.encode(), began + timeout_s, str(channel))
    return Ran(answer[1], answer[0], time.monotonic() - began)


def _connected(channel: Path) -> socket.socket:
    try:
        return sockets.connected(channel)
    except OSError as error:
        why = f"{channel.stem}: no such guest is running here ({error.strerror})"
        raise Unreachable(f"{why}. Next: kvmpool lab status") from error


def _answer(connection: socket.socket, mark: bytes, deadline: float, name: str) -> tuple[int, str]:
    """The answer that starts with `mark`; the rest of an older one, whose caller has gone, may come before it."""
    received = b""
    while True:
        _, found, tail = received.partition(mark + b" ")
        header, newline, body = tail.partition(b"\n")
        if found and newline:
            code, length = (int(word) for word in header.split())
            if len(body) >= length:
                return code, body[:length].decode(errors="replace")
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed(f"{name}: the guest did not answer in time. Next: see its .console file there")
        connection.settimeout(left)
        try:
            piece = connection.recv(65536)
        except TimeoutError:
            continue
        if not piece:
            raise Unreachable(f"{name}: the guest ended before it answered")
        received += piece


def command(words: Sequence[str]) -> str:
    """A shell script that runs exactly these words."""
    return "exec " + " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
