"""A whole lab: up, down, status, faults. One host, two soft cards, a kvmpoold, guests that virsh defines and starts.

Whatever `up` makes is in the lab's folder or ends with the processes that the folder's state names, so `down` removes
all of it after a kill -9 at any moment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import kvmpool
from kvmpool.api.client import Client
from kvmpool.errors import KvmpoolError, NotFound, Unreachable
from kvmpool.lab import guests, hostdev, hosts, images, process
from kvmpool.lab.folder import Folder, State
from kvmpool.lab.guests import GuestSpec, Ran
from kvmpool.lab.hosts import Host, HostSpec
from kvmpool.native import native
from kvmpool.softgpu import state as softgpu
from kvmpool.softgpu.faults import Fault

HOST = HostSpec("h0", 1)
CARDS = tuple(
    softgpu.CardSpec(index, f"GPU-5f0f0000-0000-4000-8000-00000000000{index}", f"0000:4{index + 1}:00.0", model, 16384)
    for index, model in enumerate(["Soft GPU 16 GiB"] * 2)
)
SOFTGPU = "/run/kvmpool-softgpu"  # inside the host
SOCKET = "/run/kvmpool/kvmpoold.sock"
_FILES = "/run/kvmpool-lab"  # channels, consoles, XML and the guest's initramfs, inside the host
_INITRD = f"{_FILES}/guest.cpio"
_KVMPOOLD = (sys.executable, "-m", "kvmpool.kvmpoold")
_KVMPOOLD_S = 20.0  # 1-2 s on an idle machine: Python's imports

_CONFIG = f"""\
[host]
name = "{HOST.name}"

[api]
group = "root"

[device]
kmsg = "{SOFTGPU}/kmsg"
sysroot = "{SOFTGPU}"

[dataplane]
listen = "tcp:{HOST.address}:0"
"""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Status:
    """A lab at one look. `domains`: name and libvirt's word for its state."""

    folder: Path
    host_alive: bool
    daemons: dict[str, bool]
    cards: tuple[softgpu.CardState, ...]
    domains: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Lab:
    """The lab in `folder`, running or not."""

    folder: Folder

    # --- up and down --------------------------------------------------------------------------------------------------

    def up(
        self,
        progress: Progress = lambda _: None,
        *,
        kvmpoold: bool = True,
        programs: Sequence[Path] = (),
        passthrough: bool = False,
    ) -> Host:
        """Make it; `programs` are put beside the example programs in its guests.

        With `passthrough` its cards can be given to domains (hostdev.py). On a failure everything is taken down again
        and the failure raised.
        """
        with self.folder.created():
            try:
                return self._build(progress, kvmpoold, images.linux(programs), passthrough)
            except BaseException:
                self.tear_down(self.folder.read())
                raise

    def _build(self, progress: Progress, kvmpoold: bool, image: images.LinuxImage, passthrough: bool) -> Host:
        self.folder.write(State().with_keeper(HOST.name, None))

        def record(keeper: process.ProcessId) -> None:
            self.folder.write(State().with_keeper(HOST.name, keeper))

        host = hosts.boot(HOST, self.folder.path / HOST.name, record, self._environment())
        softgpu.create(host.outside(SOFTGPU), CARDS)
        host.outside(_FILES).mkdir()
        host.outside(_INITRD).write_bytes(image.initrd)
        host.outside("/etc/kvmpool/kvmpoold.toml").write_text(_CONFIG, encoding="utf-8")
        progress(f"host {HOST.name} has its namespaces and {len(CARDS)} soft cards")
        if kvmpoold:
            self.join(host)
        if passthrough:
            hostdev.prepare(host, SOFTGPU)
            host.start_libvirt(hostdev.environment())
        else:
            host.start_libvirt()
            host.keep_capabilities()
        progress(f"host {HOST.name} runs libvirtd")
        if kvmpoold:
            self.start_kvmpoold(host)
            progress(f"host {HOST.name} runs kvmpoold")
        self.folder.write(replace(self.folder.read(), up=True))
        return host

    def down(self) -> bool:
        """Remove all of it; False where there was nothing."""
        if not self.folder.exists():
            return False
        with self.folder.opened() as state:
            self.tear_down(state)
        return True

    def tear_down(self, state: State) -> None:
        """What `down` does, for one who is alone in the folder already."""
        for keeper in state.keepers.values():
            if keeper is not None:
                hosts.end(keeper)
        self.folder.remove()

    def _environment(self) -> dict[str, str]:
        """Of every program in the host: this kvmpool, and the soft cards' libraries where NVIDIA's would be found."""
        return {
            "PYTHONPATH": str(Path(kvmpool.__file__).parents[1]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "KVMPOOL_SOFTGPU": SOFTGPU,
        }

    # --- what runs in it ----------------------------------------------------------------------------------------------

    def host(self) -> Host:
        """Its host. Raises NotFound where no lab is, Unreachable where its host is dead."""
        keeper = self.folder.read().keepers.get(HOST.name)
        if keeper is None:
            raise NotFound(f"no lab in {self.folder.path}. Next: kvmpool lab up")
        host = Host(HOST, self.folder.path / HOST.name, keeper, self._environment())
        if not host.alive():
            raise Unreachable(f"the lab in {self.folder.path} is dead. Next: kvmpool lab down, then kvmpool lab up")
        return host

    def join(self, host: Host) -> None:
        """Install the hook, as `kvmpool host join` does on any host."""
        host.run(sys.executable, "-m", "kvmpool.cli.main", "host", "join", "--no-units")

    def start_kvmpoold(self, host: Host, command: Sequence[str] = _KVMPOOLD, *, wait: bool = True) -> None:
        """Start it (or what stands in for it) and return when its API answers."""
        libraries = {"LD_LIBRARY_PATH": str(native("softgpu-cuda").parent)}
        host.start_daemon("kvmpoold", *command, environment=libraries)
        if wait and not process.holds_within(lambda: self._answers(host), _KVMPOOLD_S, 0.05):
            raise host.silent("kvmpoold", "does not answer")

    def _answers(self, host: Host) -> bool:
        try:
            self.client(host).get("/status")
        except KvmpoolError:
            return False
        return True

    def client(self, host: Host) -> Client:
        """kvmpoold's API, from outside the host."""
        return Client(host.outside(SOCKET))

    def define(self, host: Host, spec: GuestSpec, *, firmware: bool = False) -> None:
        """`virsh define` a guest; a Linux one, or the one whose firmware is all it has."""
        if firmware:
            rom = host.outside(f"{_FILES}/firmware.bin")
            rom.write_bytes(images.firmware().read_bytes())
            xml = guests.firmware_xml(spec, Path(f"{_FILES}/firmware.bin"))
        else:
            xml = guests.linux_xml(spec, images.linux_kernel(), _INITRD)
        host.outside(f"{_FILES}/{spec.name}.xml").write_text(xml, encoding="utf-8")
        host.virsh("define", "--validate", f"{_FILES}/{spec.name}.xml")

    def wait_for_guest(self, host: Host, spec: GuestSpec, timeout_s: float = 60.0) -> None:
        """Return when the guest has printed READY. Raises DeadlinePassed."""
        console = host.outside(spec.console)
        guests.wait_for(console, b"READY", timeout_s)

    def run(self, name: str, script: str, timeout_s: float = 60.0) -> Ran:
        """Run a shell script in a guest. Raises as guests.run does."""
        host = self.host()
        return guests.run(host.outside(GuestSpec(name, 0).channel), script, timeout_s)

    def fault(self, card: str, words: str) -> Fault:
        """Let a fault happen to a card (index, uuid or PCI address); `words` as in faults.FORMS."""
        fault = Fault.parse(words)
        softgpu.inject(self.host().outside(SOFTGPU), card, fault)
        return fault

    def status(self) -> Status:
        """Raises NotFound where no lab is."""
        keeper = self.folder.read().keepers.get(HOST.name)
        if keeper is None:
            return Status(self.folder.path, False, {}, (), ())
        host = Host(HOST, self.folder.path / HOST.name, keeper, self._environment())
        if not host.alive():
            return Status(self.folder.path, False, {}, (), ())
        names = ("virtlogd", "libvirtd", "kvmpoold")
        daemons = {name: host.daemon_pid(name) is not None for name in names}
        rows = host.virsh("list", "--all", check=False).splitlines() if daemons["libvirtd"] else []
        domains = tuple((words[1], words[2]) for row in rows if len(words := row.split(None, 2)) == 3)
        return Status(self.folder.path, True, daemons, softgpu.read(host.outside(SOFTGPU)), domains)
