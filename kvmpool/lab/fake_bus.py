"""Plays the kernel's part of binding drivers on a sysfs of plain files: what is written to bind files takes effect.

    python -m kvmpool.lab.fake_bus ROOT        until it is ended

Under ROOT are sys/, proc/ and dev/. `unbind` of each driver, `drivers_probe` and each `reset` are FIFOs that this
process reads; the driver links, the vfio nodes and cleared overrides follow, as in the kernel. Wrong behaviour is made
by what stands at a file's place: see `hang`, `ignore` and `refuse`. Source: kernel, drivers/base/bus.c,
drivers/base/dd.c, drivers/pci/pci-driver.c, drivers/pci/pci-sysfs.c.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VFIO = "vfio-pci"
_TICK_S = 0.01
_NONE = "(null)\n"


@dataclass(frozen=True, slots=True)
class FakeFunction:
    """A function as it is made. `driver`: the one whose id table names it; "": none."""

    address: str
    vendor: str = "10de"
    device: str = "2330"
    class_code: str = "030200"
    group: str = ""  # "": no IOMMU
    driver: str = "nvidia"
    bound: bool = True
    ports: tuple[str, ...] = ()  # addresses of the ports above it, the root's first


def make(root: Path, functions: Iterable[FakeFunction]) -> None:
    """The tree. May be called again for functions that come later."""
    for name in ("sys/bus/pci/devices", "proc", "dev/vfio", "sys/kernel/iommu_groups"):
        (root / name).mkdir(parents=True, exist_ok=True)
    _fifo(root / "sys/bus/pci/drivers_probe")
    for each in functions:
        _make_function(root, each)
    make_driver(root, VFIO)


def make_driver(root: Path, driver: str) -> None:
    """It is loaded."""
    folder = root / "sys/bus/pci/drivers" / driver
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("bind", "unbind"):
        _fifo(folder / name)
    (folder / "new_id").touch()


def adopt(root: Path) -> None:
    """Make a tree of soft cards, which shows how cards are bound, one in which that can be changed."""
    for name in ("proc", "dev/vfio"):
        (root / name).mkdir(parents=True, exist_ok=True)
    bus = root / "sys/bus/pci"
    files = (bus / "drivers_probe", *bus.glob("drivers/*/unbind"), *bus.glob("drivers/*/bind"))
    for path in (*files, *bus.glob("devices/*/reset")):
        if not path.is_fifo():
            path.unlink()
            os.mkfifo(path)
    for folder in bus.glob("devices/*"):
        link = folder / "driver"
        (folder / ".driver").write_text(Path(os.readlink(link)).name if link.is_symlink() else "")


def make_process(root: Path, pid: int, comm: str, holds: str, *, cmdline: str = "", cgroup: str = "") -> None:
    """A process with one device node open."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True, exist_ok=True)
    os.symlink(holds, folder / "fd/3")
    (folder / "comm").write_text(comm + "\n")
    (folder / "cmdline").write_text(cmdline.replace(" ", "\0"))
    (folder / "cgroup").write_text(f"0::{cgroup or '/user.slice'}\n")
    (folder / "maps").write_text("")


# --- what may go wrong ------------------------------------------------------------------------------------------------


def hang(root: Path, file: str) -> None:
    """Who writes to this file of sys/bus/pci waits for ever: nobody reads it."""
    _replace(root / "sys/bus/pci" / file, fifo=True, name="unread")


def ignore(root: Path, file: str) -> None:
    """What is written to this file is taken, and nothing happens."""
    path = root / "sys/bus/pci" / file
    path.unlink()
    path.touch()


def refuse(root: Path, file: str, by: str = "/proc/self/oom_score_adj") -> None:
    """Who writes to this file gets the error of `by`, one of the real kernel; this takes only numbers: EINVAL."""
    path = root / "sys/bus/pci" / file
    path.unlink()
    path.symlink_to(by)


class FakeBus:
    """The kernel's part, in a thread: as a context."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bus = root / "sys/bus/pci"
        self.log: list[str] = []  # "unbind nvidia 0000:41:00.0", "reset 0000:41:00.0", in order
        self.wakes_as: dict[str, bytes] = {}  # address -> its config space after a reset; others wake as they were
        self._fds: dict[int, Path] = {}
        self._turns = 0
        self._quiet = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self.run, name="fake bus", daemon=True)

    def __enter__(self) -> FakeBus:
        self._open()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(10)
        for fd in self._fds:
            os.close(fd)

    def settle(self) -> None:
        """Return when all that was written before has taken effect."""
        calm = 0
        while calm < 2:
            before = self._turns
            while self._turns < before + 2 and self._thread.is_alive():
                time.sleep(_TICK_S / 10)
            calm = calm + 1 if self._quiet else 0

    def run(self) -> None:
        while not self._ends.is_set():
            self._turns += 1
            self._open()
            ready = select.select(list(self._fds), [], [], _TICK_S)[0]
            self._quiet = not ready
            for fd in ready:
                for line in os.read(fd, 65536).decode().splitlines():
                    self._written(self._fds[fd], line.strip())
            self._normalise()

    def _open(self) -> None:
        """Every FIFO there is, both ends of it: so a writer never waits."""
        found = {*self.bus.glob("drivers/*/unbind"), *self.bus.glob("drivers/*/bind"), self.bus / "drivers_probe"}
        found |= set(self.bus.glob("devices/*/reset"))
        for path in found - set(self._fds.values()):
            if path.is_fifo() and not path.with_name(path.name + ".unread").exists():
                self._fds[os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)] = path
        for fd, path in list(self._fds.items()):
            if not _is_same(fd, path):
                os.close(fd)
                del self._fds[fd]

    def _written(self, path: Path, address: str) -> None:
        if path.name == "reset":
            self.log.append(f"reset {path.parent.name}")
            if path.parent.name in self.wakes_as:
                path.with_name("config").write_bytes(self.wakes_as[path.parent.name])
        elif path.name == "drivers_probe":
            self.log.append(f"probe {address}")
            self._probe(address)
        elif path.name == "unbind":
            self.log.append(f"unbind {path.parent.name} {address}")
            self._unbind(path.parent.name, address)

    def _unbind(self, driver: str, address: str) -> None:
        link = self.bus / "devices" / address / "driver"
        if not link.is_symlink() or Path(os.readlink(link)).name != driver:
            return
        (self.bus / "drivers" / driver / address).unlink(missing_ok=True)
        group = self._group(address)
        others = [each for each in self._members(group) if each != address] if group else []
        if driver == VFIO and group and not any(self._driver(each) == VFIO for each in others):
            (self.root / "dev/vfio" / group).unlink(missing_ok=True)
        link.unlink()  # last: who sees it gone may believe the rest

    def _probe(self, address: str) -> None:
        folder = self.bus / "devices" / address
        if not folder.exists() or (folder / "driver").is_symlink():
            return
        override = (folder / "driver_override").read_text().strip()
        own = (folder / ".driver").read_text()
        driver = override if override not in ("", "(null)") else own
        if not driver or not (self.bus / "drivers" / driver).is_dir():
            return
        if driver not in (VFIO, own):
            return  # its probe does not know the device
        group = self._group(address)
        if driver == VFIO and not group:
            return  # vfio-pci: -EINVAL without an IOMMU
        if driver == VFIO:
            (self.root / "dev/vfio" / group).touch()
        with suppress(FileNotFoundError):  # it has left the bus meanwhile
            bind(self.root, address, driver)

    def _driver(self, address: str) -> str:
        link = self.bus / "devices" / address / "driver"
        return Path(os.readlink(link)).name if link.is_symlink() else ""

    def _group(self, address: str) -> str:
        link = self.bus / "devices" / address / "iommu_group"
        return Path(os.readlink(link)).name if link.is_symlink() else ""

    def _members(self, group: str) -> list[str]:
        return sorted(os.listdir(self.root / "sys/kernel/iommu_groups" / group / "devices"))

    def _normalise(self) -> None:
        """The kernel shows "(null)" for an override that was cleared by an empty line."""
        for path in self.bus.glob("devices/*/driver_override"):
            with suppress(OSError):
                if path.read_text() == "\n":
                    path.write_text(_NONE)


def bind(root: Path, address: str, driver: str) -> None:
    """The links of a bound device."""
    entry = root / "sys/bus/pci/drivers" / driver / address
    if not entry.is_symlink():
        os.symlink(f"../../devices/{address}", entry)
    os.symlink(f"../../drivers/{driver}", root / "sys/bus/pci/devices" / address / "driver")


def _make_function(root: Path, each: FakeFunction) -> None:
    way = [f"pci{(each.ports[0] if each.ports else each.address)[:7]}", *each.ports, each.address]
    real = root / "sys/devices" / "/".join(way)
    real.mkdir(parents=True, exist_ok=True)
    folder = root / "sys/bus/pci/devices" / each.address
    os.symlink(os.path.relpath(real, folder.parent), folder)
    texts = {
        "vendor": f"0x{each.vendor}\n",
        "device": f"0x{each.device}\n",
        "class": f"0x{each.class_code}\n",
        "subsystem_vendor": f"0x{each.vendor}\n",
        "subsystem_device": "0x16c1\n",
        "numa_node": "0\n",
        "driver_override": _NONE,
        "d3cold_allowed": "1\n",
        "reset_method": "flr bus\n",
        "boot_vga": "0\n",
        "resource": "0x00000000e0000000 0x00000000efffffff 0x0000000000040200\n",
        "aer_dev_fatal": "Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 0\n",
        "aer_dev_nonfatal": "Undefined 0\nTLP 0\nTOTAL_ERR_NONFATAL 0\n",
        "current_link_width": "16\n",
        "max_link_width": "16\n",
        ".driver": each.driver,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    _fifo(folder / "reset")
    (folder / "config").write_bytes(bytes.fromhex(each.vendor)[::-1] + bytes.fromhex(each.device)[::-1] + bytes(252))
    if each.group:
        members = root / "sys/kernel/iommu_groups" / each.group / "devices"
        members.mkdir(parents=True, exist_ok=True)
        os.symlink(os.path.relpath(members.parent, real), folder / "iommu_group")
        os.symlink(os.path.relpath(real, members), members / each.address)
    if each.driver:
        make_driver(root, each.driver)
        if each.bound:
            bind(root, each.address, each.driver)


def _fifo(path: Path) -> None:
    if not path.exists():
        os.mkfifo(path)


def _replace(path: Path, *, fifo: bool, name: str) -> None:
    path.unlink()
    if fifo:
        path.with_name(f"{path.name}.{name}").touch()
        os.mkfifo(path)


def _is_same(fd: int, path: Path) -> bool:
    try:
        now = os.stat(path)
    except OSError:
        return False
    have = os.fstat(fd)
    return (have.st_dev, have.st_ino) == (now.st_dev, now.st_ino)


if __name__ == "__main__":
    FakeBus(Path(sys.argv[1])).run()
