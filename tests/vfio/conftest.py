"""One VFIO lab for all tests here: a host in QEMU with an IOMMU, real vfio-pci, libvirtd and emulated PCI cards."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvmpool.lab import vfio_cards
from kvmpool.lab.folder import Folder
from kvmpool.lab.guests import GuestSpec
from kvmpool.lab.vfio_cards import Fault
from kvmpool.lab.vfio_host import VfioHost
from kvmpool.lab.vfio_pool import VfioLab

T = TypeVar("T")

_BENCH = pytest.StashKey["Bench"]()
_PROGRAMS = ("qemu-system-x86_64", "busybox", "gcc", "libvirtd", "virsh", "mke2fs", "depmod")
_UEVENTS, _LIBVIRT_EVENTS = "/run/uevents", "/run/virsh-events.log"
PATIENCE_S = 240.0  # of what takes a second or two on an idle machine


@dataclass(frozen=True, slots=True)
class Bench:
    """What the tests do with the lab, in their words."""

    lab: VfioLab

    @property
    def host(self) -> VfioHost:
        return self.lab.host()

    def reset(self) -> None:
        """No domain, every card in its slot, answering, without driver and override; both listeners run."""
        host = self.host
        if host.daemon_pid("libvirtd") is None:
            host.start_libvirt()
        left = host.sh(_RESET, *_LISTENERS, timeout_s=240).stdout.split()
        for name in left:
            host.start_daemon(name, *_LISTENERS[name])
        seen = host.sh(_HEADERS, *(card.address for card in vfio_cards.CARDS)).stdout.split()
        for card, header in zip(vfio_cards.CARDS, seen, strict=True):
            assert header != "ffff", f"an earlier test has left {card.name} dead"
            if header == "gone":
                host.inject(card, Fault.PLUG)
                until(partial(self.on_bus, card.address), f"{card.name} is not seen in its slot")
        self.forget_events()

    def forget_events(self) -> None:
        self.host.sh('for file; do : >"$file"; done', _UEVENTS, _LIBVIRT_EVENTS)

    def header(self, address: str) -> str:
        """The first 64 bytes of its config space, in hex; "" where it is not on the bus."""
        config = f"/sys/bus/pci/devices/{address}/config"
        return self.host.sh('[ ! -e "$1" ] || head -c 64 "$1" | od -An -v -tx1 | tr -d " \\n"', config).stdout

    def on_bus(self, address: str) -> bool:
        return self.header(address) != ""

    def uevents(self, address: str) -> list[str]:
        """`action subsystem [ERROR_EVENT]` of one device, in the order of their coming."""
        lines = [line.split() for line in self.host.read(_UEVENTS).splitlines()]
        return [" ".join((words[0], words[1], *words[3:])) for words in lines if words[2] == address]

    def libvirt_events(self) -> str:
        return self.host.read(_LIBVIRT_EVENTS)

    def start(self, spec: GuestSpec, *, deaf: bool = False) -> str:
        """Give its cards to vfio-pci by hand, define and start it; what it has printed when it is ready.

        Events are counted from then on.
        """
        for address, _ in spec.cards:
            self.host.give(address)
        self.lab.define(spec, deaf=deaf)
        self.host.virsh("start", spec.name, timeout_s=PATIENCE_S)
        said = "" if deaf else self.lab.wait_for_guest(spec)
        self.forget_events()
        return said

    def refusal(self, *words: str) -> str:
        """What virsh says when it must not succeed."""
        done = self.host.run("virsh", "-q", *words, check=False)
        assert done.returncode != 0, f"virsh {' '.join(words)} succeeded"
        return done.stderr

    def state(self, name: str) -> str:
        return self.host.virsh("domstate", name, "--reason").strip()


# What holds cards is ended, and what holds no card of them goes on. Says which of the listeners $@ do not run.
_RESET = """
for name in $(virsh -q list --name); do virsh -q destroy "$name" || exit 1; done
for name in $(virsh -q list --all --name); do virsh -q undefine "$name" || exit 1; done
for device in /sys/bus/pci/drivers/vfio-pci/0000:*; do
    [ -e "$device" ] || continue
    echo >"$device/driver_override" && echo "${device##*/}" >"$device/driver/unbind"
done
rm -f /run/kvmpool-lab/*.console
for name; do
    pid=$(cat "/run/$name.pid" 2>/dev/null) && [ -d "/proc/$pid" ] || echo "$name"
done
"""
_HEADERS = """
for address; do
    config=/sys/bus/pci/devices/$address/config
    if [ -e "$config" ]; then head -c 2 "$config" | od -An -tx1 | tr -d ' '; else echo gone; fi
done
"""
_LISTENERS = {
    "uevents": ("/usr/bin/python3", "-I", "-S", str(Path(__file__).with_name("uevents.py")), _UEVENTS),
    "virsh-events": ("stdbuf", "-oL", "virsh", "event", "--all", "--loop"),
}


def until(look: Callable[[], T | None], wrong: str, seconds: float = PATIENCE_S) -> T:
    """What `look` gives once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"{wrong} after {seconds:g} s"
        time.sleep(0.2)
    return value


def _missing() -> str:
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(absent)}" if absent else ""


@pytest.fixture(scope="package")
def _bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if missing := _missing():
        pytest.skip(missing)
    parent = Path(tempfile.mkdtemp(prefix="kv-"))
    bench = Bench(VfioLab(Folder(parent / "lab")))
    try:
        bench.lab.up(kvmpoold=False)
        request.config.stash[_BENCH] = bench
        yield bench
    finally:
        bench.lab.down()
        left = _mentions(parent)
        shutil.rmtree(parent)
    assert left == [], "the lab left something behind"


def _mentions(folder: Path) -> list[str]:
    """Processes that name the folder or work in it, mounts of it, and files in it."""
    found = [f"file {path}" for path in folder.iterdir()]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            cwd, words, mounts = (
                (entry / "cwd").readlink(),
                (entry / "cmdline").read_text(),
                (entry / "mountinfo").read_text(),
            )
        except OSError:
            continue
        if cwd.is_relative_to(folder) or str(folder) in words or str(folder) in mounts:
            found.append(f"process {entry.name}: {words[:200]}")
    return found


@pytest.fixture
def bench(_bench: Bench) -> Bench:
    """The lab as a test may expect it: no domain, every card in its slot and without a driver."""
    _bench.reset()
    return _bench


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure shows what the host saw during the test."""
    report = yield
    bench = item.config.stash.get(_BENCH, None)
    if report.failed and bench is not None and bench.lab.folder.exists() and bench.host.alive():
        report.sections.append(("kernel", bench.host.sh("dmesg | tail -n 60", check=False).stdout))
        for path in (_UEVENTS, _LIBVIRT_EVENTS, "/var/log/libvirt/libvirtd.log", "/run/kvmpoold.log"):
            report.sections.append((path, bench.host.read(path)[-8000:]))
    return report
