"""A whole VFIO lab: up, down, reboot. One host (a machine of its own, QEMU under TCG) with an IOMMU and five cards.

As in the other lab, whatever `up` makes is in the lab's folder or ends with the process that the folder's state names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvmpool.api.client import Client
from kvmpool.errors import KvmpoolError, NotFound, Unreachable
from kvmpool.lab import guests, images, process, vfio_cards, vfio_host, vfio_machine
from kvmpool.lab.folder import Folder, State, cache_folder
from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.pool import Lab
from kvmpool.lab.vfio_cards import LabCard
from kvmpool.lab.vfio_client import HostClient
from kvmpool.lab.vfio_host import VfioHost
from kvmpool.native import native

_FILES = "/run/kvmpool-lab"
_CAPABILITIES = "/var/cache/libvirt/qemu/capabilities"
_KVMPOOLD = (sys.executable, "-m", "kvmpool.kvmpoold")
_KVMPOOLD_S = 300.0
_HOOK_S = 90.0  # everything is twenty times slower under TCG
_SOFTGPU = "/run/kvmpool-softgpu"
_LIBVIRTD_CONF = """\
host_uuid = "0000000a-1111-4222-8333-444444444444"
auth_unix_rw = "none"
log_outputs = "3:file:/var/log/libvirt/libvirtd.log"
"""
_QEMU_CONF = """\
user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
"""
_KVMPOOLD_CONF = f"""\
[host]
name = "{vfio_machine.HOSTNAME}"

[api]
group = "root"

[device]
udev = "kernel"
look_deadline_s = 60
inventory_interval_s = 5

[cards]
match = [{", ".join(f'"{ids}"' for ids in vfio_cards.MATCH)}]

[dataplane]
listen = "vsock"

[hook]
deadline_s = {_HOOK_S}

[plug]
answer_s = 20
tries = 2

[health]
probe_deadline_s = 60
suspect_probe_s = 3
suspect_deadline_s = 60
probation_s = 5
"""

# libvirtd looks for hooks when it starts, and on SIGHUP
_SEE_HOOKS = '[ ! -e /run/libvirtd.pid ] || kill -HUP "$(cat /run/libvirtd.pid)"'

_SOFT_CARDS = """
import sys
from pathlib import Path
from kvmpool.softgpu import state
specs = []
for index, word in enumerate(sys.argv[2:]):
    address, name = word.split("=")
    uuid = f"GPU-5f0f0001-0000-4000-8000-00000000000{index}"
    specs.append(state.CardSpec(index, uuid, address, f"Soft GPU on {name}", 4096))
state.create(Path(sys.argv[1]), specs)
"""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Status:
    """A VFIO lab at one look. `drivers`: of each card's address, "" where it has none; `domains`: name and state."""

    alive: bool
    daemons: dict[str, bool]
    drivers: dict[str, str]
    domains: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class VfioLab:
    """The VFIO lab in `folder`, running or not."""

    folder: Folder

    def up(self, progress: Progress = lambda _: None, *, kvmpoold: bool = True) -> VfioHost:
        """Make it. On a failure everything is taken down again and the failure raised."""
        with self.folder.created():
            try:
                return self._build(progress, kvmpoold)
            except BaseException:
                Lab(self.folder).tear_down(self.folder.read())
                raise

    def _build(self, progress: Progress, kvmpoold: bool) -> VfioHost:
        self.folder.write(State(vfio=True).with_keeper(vfio_machine.HOSTNAME, None))
        kept = cache_folder() / "capabilities-vfio"
        vfio_machine.write_disk(
            self.folder.path,
            {
                "etc-libvirt/libvirtd.conf": _LIBVIRTD_CONF.encode(),
                "etc-libvirt/qemu.conf": _QEMU_CONF.encode(),
                "etc-kvmpool/kvmpoold.toml": _KVMPOOLD_CONF.encode(),
            },
            {"cache-libvirt/qemu/capabilities": kept} if kept.is_dir() else {},
        )
        host = self._boot()
        cards = ", ".join(f"{card.name} {card.address}" for card in vfio_cards.CARDS)
        progress(f"host {vfio_machine.HOSTNAME} is up, with an IOMMU and {cards}")
        host.start_libvirt()
        _keep_capabilities(host, kept)
        progress(f"host {vfio_machine.HOSTNAME} runs libvirtd")
        if kvmpoold:
            self.join()
            self.start_kvmpoold()
            progress(f"host {vfio_machine.HOSTNAME} runs kvmpoold")
        self.folder.write(replace(self.folder.read(), up=True))
        return host

    def _boot(self) -> VfioHost:
        image = vfio_machine.write_image(self.folder.path)

        def record(keeper: process.ProcessId) -> None:
            self.folder.write(self.folder.read().with_keeper(vfio_machine.HOSTNAME, keeper))

        return vfio_host.boot(self.folder.path, image, record)

    def reboot(self) -> VfioHost:
        """Take the power away and boot again, in a new QEMU; only what is on the disk is still there. No libvirtd."""
        with self.folder.opened() as state:
            if (keeper := state.keepers.get(vfio_machine.HOSTNAME)) is not None:
                vfio_host.power_off(keeper)
            return self._boot()

    def down(self) -> bool:
        """Remove all of it; False where there was nothing."""
        return Lab(self.folder).down()

    def host(self) -> VfioHost:
        """Its host. Raises NotFound where no lab is, Unreachable where its host is dead."""
        keeper = self.folder.read().keepers.get(vfio_machine.HOSTNAME)
        if keeper is None:
            raise NotFound(f"no VFIO lab in {self.folder.path}. Next: kvmpool lab up --vfio")
        host = VfioHost(self.folder.path, keeper)
        if not host.alive():
            raise Unreachable(
                f"the lab in {self.folder.path} is dead. Next: kvmpool lab down, then kvmpool lab up --vfio"
            )
        return host

    # --- what runs in it ----------------------------------------------------------------------------------------------

    def define(self, spec: GuestSpec, *, deaf: bool = False) -> None:
        """`virsh define` a guest that is only firmware; a `deaf` one never answers a removal request."""
        host = self.host()
        rom = f"{_FILES}/firmware.bin"
        if not deaf:
            host.copy(images.firmware(), rom)
        xml = guests.deaf_xml(spec) if deaf else guests.firmware_xml(spec, Path(rom))
        host.write(f"{_FILES}/{spec.name}.xml", xml)
        host.virsh("define", "--validate", f"{_FILES}/{spec.name}.xml")

    def join(self, *more: str) -> None:
        """Install the hook, as `kvmpool host join` does on any host, and tell a libvirtd that runs of it."""
        words = ("host", "join", "--no-units", "--deadline", f"{_HOOK_S:g}", *more)
        self.host().run(sys.executable, "-m", "kvmpool.cli.main", *words, timeout_s=_KVMPOOLD_S)
        self.host().sh(_SEE_HOOKS)

    def lend_to_soft_driver(self, *cards: LabCard) -> None:
        """Let the soft NVML list these cards, at their addresses: to kvmpoold they are cards with a driver for vGPUs.

        On the bus they are with pci-stub, a driver that lets go of a card at once.
        """
        host = self.host()
        for card in cards:
            host.give(card.address, "pci-stub")
        words = [f"{card.address}={card.name}" for card in cards]
        host.run(sys.executable, "-c", _SOFT_CARDS, _SOFTGPU, *words)

    def start_kvmpoold(self) -> None:
        """Start it and return when its API answers."""
        host = self.host()
        libraries = {"LD_LIBRARY_PATH": str(native("softgpu-cuda").parent), "KVMPOOL_SOFTGPU": _SOFTGPU}
        host.start_daemon("kvmpoold", *_KVMPOOLD, environment=libraries)
        if not process.holds_within(self._answers, _KVMPOOLD_S, 0.5):
            raise host.silent("kvmpoold", "does not answer")

    def _answers(self) -> bool:
        try:
            self.client().get("/status")
        except KvmpoolError:
            return False
        return True

    def client(self) -> Client:
        """kvmpoold's API, from outside the host."""
        return HostClient(self.folder.path)

    def wait_for_guest(self, spec: GuestSpec, marker: str = "READY", timeout_s: float = 120.0) -> str:
        """What the guest has printed, once `marker` is in it. Raises DeadlinePassed."""
        script = 'until grep -aqsF -e "$1" "$2"; do sleep 0.1; done; cat "$2"'
        return self.host().sh(script, marker, spec.console, timeout_s=timeout_s).stdout.replace("\r", "")

    def status(self) -> Status:
        """Raises NotFound where no lab is."""
        keeper = self.folder.read().keepers.get(vfio_machine.HOSTNAME)
        if keeper is None or not (host := VfioHost(self.folder.path, keeper)).alive():
            return Status(False, {}, {}, ())
        daemons = {name: host.daemon_pid(name) is not None for name in ("virtlogd", "libvirtd", "kvmpoold")}
        rows = host.virsh("list", "--all", check=False).splitlines() if daemons["libvirtd"] else []
        domains = tuple((words[1], words[2]) for row in rows if len(words := row.split(None, 2)) == 3)
        return Status(True, daemons, {card.address: host.driver(card.address) for card in vfio_cards.CARDS}, domains)


def _keep_capabilities(host: VfioHost, kept: Path) -> None:
    """Save what libvirt learnt of QEMU (13-100 s) for the next lab."""
    if kept.is_dir():
        return
    host.virsh("domcapabilities", "--virttype", "qemu", timeout_s=300)
    packed = host.sh('tar -C "$1" -c . | base64', _CAPABILITIES).stdout
    beside = kept.with_name(f".new-{kept.name}-{host.keeper.pid}")
    beside.mkdir()
    process.run(["sh", "-c", 'base64 -d | tar -C "$1" -x', "sh", beside], timeout_s=30, stdin=packed)
    beside.rename(kept)
