"""A guest's device of shared memory, as a file: who gets which part of it, and that a foreign device is never used.

The shim takes the folder `pci` beside it for its machine's PCI devices; all else is as on a host. With a real device:
tests/e2e/test_shared_memory.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dataplane import shim
from tests.dataplane.plane import status
from tests.dataplane.remote import Remote, remote
from tests.dataplane.waiting import wait_until

pytestmark = pytest.mark.native

MIB = 1 << 20
MAGIC = b"kvmpool window 1"
TOKEN = "0123456789abcdef0123456789abcdef"
ARENA_AT = 4 * MIB


@dataclass
class Machine:
    """A host whose one domain has such a device, and the domain's processes."""

    folder: Path
    host: Remote
    file: Path

    def device(self, file: Path, slot: str = "05", vendor: str = "0x1af4", device: str = "0x1110") -> None:
        folder = self.folder / "pci" / f"0000:00:{slot}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
        (folder / "resource2").symlink_to(file)

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        built = shim.build("device")
        environment = self.host.environment() | {"LD_LIBRARY_PATH": str(built / "shim"), "KVMPOOL_TOKEN": TOKEN} | more
        return subprocess.Popen(
            [built / "guest", *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def waiting(self, **more: str) -> subprocess.Popen[str]:
        """A process that has page-locked memory and waits for a line."""
        guest = self.start("pinned_lost", **more)
        assert guest.stdout is not None
        assert guest.stdout.readline() == "ready=1\n", self.log
        return guest

    def run(self, *arguments: str, **more: str) -> dict[str, int]:
        guest = self.start(*arguments, **more)
        out, _ = guest.communicate(timeout=60)
        assert guest.returncode == 0, out + self.log
        return {name: int(value) for name, _, value in (line.partition("=") for line in out.splitlines())}

    @property
    def processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = status(self.host.plane.worker_socket())["processes"]
        return found

    @property
    def transports(self) -> list[str]:
        return sorted(each["transport"] for each in self.processes)

    @property
    def log(self) -> str:
        return (self.folder / "guest.log").read_text()


@contextmanager
def machine(folder: Path, mib: int) -> Iterator[Machine]:
    file = folder / "kvmpool-device"
    file.touch()
    os.truncate(file, mib * MIB)
    (folder / "token").write_text(TOKEN)
    options = ("--window", str(file), "--token-file", str(folder / "token"))
    with remote(folder, 256, 1024, relay=options, endpoint="tcp:127.0.0.1:0") as host:
        yield Machine(folder, host, file)


def end(*guests: subprocess.Popen[str]) -> None:
    for guest in guests:
        guest.kill()
        guest.communicate()


def test_copies_through_the_device_are_right_and_their_bytes_do_not_travel(tmp_path: Path) -> None:
    with machine(tmp_path, 128) as vm:
        vm.device(vm.file)
        for size in ("100", "4096", "5000001"):
            ran = vm.run("pinned", size)
            right = ("apart", "async", "sync", "unified", "plain", "inside", "rows", "small_untouched", "again")
            assert {name: ran[name] for name in right} == dict.fromkeys(right, 1)
        assert "over shared memory" in vm.log
        guest = vm.waiting()
        assert vm.transports == ["shm"]
        end(guest)


def test_without_the_device_the_socket_serves_and_is_shown(tmp_path: Path) -> None:
    with machine(tmp_path, 8) as vm:
        guests = [vm.waiting()]
        assert vm.transports == ["tcp"]
        vm.device(vm.file)
        guests.append(vm.waiting(KVMPOOL_SHM="0"))
        assert vm.transports == ["tcp", "tcp"]
        guests.append(vm.waiting())
        assert vm.transports == ["shm", "tcp", "tcp"]
        end(*guests)


def test_a_foreign_device_is_neither_used_nor_written_to(tmp_path: Path) -> None:
    with machine(tmp_path, 64) as vm:
        foreign = {"04": b"somebody else's ", "06": MAGIC + bytes(16), "07": b""}
        before = {}
        for slot, head in foreign.items():
            file = tmp_path / f"foreign-{slot}"
            file.write_bytes(head + bytes((64 * MIB if head else 16) - len(head)))
            before[file] = file.read_bytes()
            vm.device(file, slot)
        guest = vm.waiting()
        assert vm.transports == ["tcp"], "the one that looks like ours has another id"
        end(guest)
        vm.device(vm.file, "08")
        guest = vm.waiting()
        assert vm.transports == ["shm"]
        end(guest)
        for file, bytes_before in before.items():
            assert file.read_bytes() == bytes_before


def test_a_device_of_another_vendor_is_not_opened(tmp_path: Path) -> None:
    with machine(tmp_path, 64) as vm:
        vm.device(vm.file, "05", vendor="0x10de")
        vm.device(vm.file, "06", device="0x1111")
        guest = vm.waiting()
        assert vm.transports == ["tcp"]
        end(guest)


def test_each_process_has_a_window_of_its_own_and_who_comes_late_a_socket(tmp_path: Path) -> None:
    with machine(tmp_path, 128) as vm:
        vm.device(vm.file)
        guests = [vm.waiting(), vm.waiting(), vm.waiting()]
        assert vm.transports == ["shm", "shm", "tcp"], "128 MiB are two windows"
        for guest in guests:
            os.kill(guest.pid, signal.SIGKILL)
        end(*guests)
        wait_until(lambda: vm.processes == [], 10.0, "the sessions of killed processes are gone")
        guests = [vm.waiting(), vm.waiting()]
        assert vm.transports == ["shm", "shm"], "their windows are free again"
        end(*guests)


def test_a_process_that_lost_its_worker_keeps_its_memory_and_the_next_one_gets_another_window(tmp_path: Path) -> None:
    with machine(tmp_path, 128) as vm:
        vm.device(vm.file)
        old = vm.waiting()
        (session,) = vm.processes
        os.kill(session["pid"], signal.SIGKILL)
        wait_until(lambda: vm.processes == [], 10.0, "the session is gone")
        ran = [vm.run("pinned", "4096") for _ in range(4)]
        assert all(each["async"] == each["sync"] == 1 for each in ran)
        guest = vm.waiting()
        assert vm.transports == ["shm"]
        out, _ = old.communicate("\n", timeout=60)
        said = dict(line.split("=") for line in out.splitlines())
        assert (said["synchronise"], said["equal"]) == ("46", "1"), "what it had page-locked is as it left it"
        end(guest)


def test_a_window_s_rings_begin_anew_whoever_had_it_before(tmp_path: Path) -> None:
    with machine(tmp_path, 8) as vm:
        vm.device(vm.file)
        assert vm.run("pinned", "4096")["async"] == 1
        with vm.file.open("r+b") as file:
            assert file.read(16) == MAGIC
            file.seek(MIB + ARENA_AT)
            assert file.read(4096).strip(b"\0"), "it was in the arena"
            file.seek(0)
            file.write(bytes(32))  # a guest may do that to itself
            file.seek(MIB)
            file.write(b"\xff" * 4096)  # and leave words that no ring can have
        wait_until(lambda: vm.processes == [], 10.0, "the session is gone")
        (vm.folder / "guest.log").unlink()
        assert vm.run("init")["init"] == 0
        assert "over its socket" in vm.log, "no head, no device"
        with vm.file.open("r+b") as file:
            file.write(MAGIC + bytes(16))
        (vm.folder / "guest.log").unlink()
        assert vm.run("init")["init"] == 0
        assert "over shared memory" in vm.log, "the relay writes the head anew each time"


def test_a_file_that_is_no_device_is_told_and_its_guests_go_by_their_sockets(tmp_path: Path) -> None:
    with machine(tmp_path, 9) as vm:
        vm.device(vm.file)
        assert vm.run("init")["init"] == 0
        assert "over its socket" in vm.log
        relay = vm.host.plane.processes[-1]
        assert f"shared memory: {vm.file}: Invalid argument" in vm.host.plane.log(relay)


def test_the_file_goes_with_the_relay(tmp_path: Path) -> None:
    with machine(tmp_path, 8) as vm:
        vm.host.plane.processes[-1].terminate()
        wait_until(lambda: not vm.file.exists(), 10.0, "the relay has ended")
