"""What the end-to-end tests do with a lab, in their words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvmpool.api.client import Client
from kvmpool.lab import process
from kvmpool.lab.guests import GuestSpec, Ran
from kvmpool.lab.hosts import Host
from kvmpool.lab.pool import CARDS, SOFTGPU, Lab
from kvmpool.softgpu import state as softgpu

T = TypeVar("T")

_LOGS = ("/run/kvmpoold.log", "/var/log/libvirt/libvirtd.log")

CLAIM = 'name="gpu0" mode="vgpu" memory="1024"'


def vm(name: str = "vm0", number: int = 1, *claims: str, memory_mib: int = 256) -> GuestSpec:
    """A guest with one ordinary claim, or with these."""
    return GuestSpec(name, number, claims or (CLAIM,), memory_mib)


@dataclass(frozen=True, slots=True)
class Pool:
    lab: Lab
    host: Host

    # --- back to the beginning ----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Daemons up, no domains, no bindings, cards healed and healthy."""
        if self.host.daemon_pid("libvirtd") is None:
            self.host.start_libvirt()
        if self.host.daemon_pid("kvmpoold") is None:
            self.lab.start_kvmpoold(self.host)
        self.end_domains()
        until(lambda: not self.bindings(), 15.0, "bindings are left")
        if not self.all_healthy():
            self._renew_cards()

    def end_domains(self) -> None:
        for name in self.host.virsh("list", "--name").split():
            self.host.virsh("destroy", name)
        for name in self.host.virsh("list", "--all", "--name").split():
            self.host.virsh("undefine", name)

    def forget_everything(self) -> None:
        """End kvmpoold, and make new cards and no store: a card that failed is rightly not trusted for a long time."""
        self.host.end_daemon("kvmpoold")
        for file in self.host.outside("/var/lib/kvmpool").iterdir():
            file.unlink()
        softgpu.create(self.host.outside(SOFTGPU), CARDS)

    def _renew_cards(self) -> None:
        self.forget_everything()
        self.lab.start_kvmpoold(self.host)
        until(self.all_healthy, 15.0, "a new card is not healthy")

    def all_healthy(self) -> bool:
        cards = self.cards()
        good = [card for card in cards if card["verdict"] == "healthy" and not card["cordoned"]]
        return len(good) == len(cards) == len(CARDS)

    def forget_logs(self) -> None:
        """Start kvmpoold's log and libvirtd's anew."""
        for name in _LOGS:
            file = self.host.outside(name)
            if file.exists():
                os.truncate(file, 0)

    def logs(self) -> list[tuple[str, str]]:
        """What they said since."""
        files = [(name, self.host.outside(name)) for name in _LOGS]
        return [(name, file.read_text(errors="replace")[-20000:]) for name, file in files if file.exists()]

    # --- what people see ----------------------------------------------------------------------------------------------

    @property
    def api(self) -> Client:
        return self.lab.client(self.host)

    def cards(self) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = self.api.get("/cards")
        return cards

    def bindings(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.api.get("/bindings")
        return rows

    def binding(self, claim: str = "vm0/gpu0") -> dict[str, Any] | None:
        """The newest ready binding of a claim to which its relay points."""
        rows = [row for row in self.bindings() if row["label"].startswith(claim + "#")]
        ready = [row for row in rows if row["phase"] == "ready" and row["pointed"]]
        return max(ready, key=lambda row: int(row["generation"]), default=None)

    def ready_binding(self, claim: str = "vm0/gpu0") -> dict[str, Any]:
        return until(lambda: self.binding(claim), 10.0, f"no ready binding of {claim}")

    # --- guests -------------------------------------------------------------------------------------------------------

    def start(self, spec: GuestSpec, *, firmware: bool = False) -> None:
        """Define and start it, and wait until it has booted."""
        self.lab.define(self.host, spec, firmware=firmware)
        self.host.virsh("start", spec.name)
        self.lab.wait_for_guest(self.host, spec)

    def run(self, script: str, name: str = "vm0", timeout_s: float = 60.0) -> Ran:
        return self.lab.run(name, script, timeout_s)

    def refusal(self, spec: GuestSpec, *, firmware: bool = True) -> tuple[str, float]:
        """What `virsh start` says of a domain that it must not start, and after how many seconds."""
        self.lab.define(self.host, spec, firmware=firmware)
        began = time.monotonic()
        done = self.host.run("virsh", "-q", "start", spec.name, check=False)
        assert done.returncode != 0, f"{spec.name} was started"
        return done.stderr, time.monotonic() - began

    # --- processes in the host ----------------------------------------------------------------------------------------

    def processes(self, program: str) -> list[int]:
        """Outer pids of the host's living processes of this program (its file's name)."""
        return [found.pid for found in self._inside() if _program(found.pid) == program]

    def _inside(self) -> Iterator[process.ProcessId]:
        pid1 = process.children(self.host.keeper)[0]
        mark = Path(f"/proc/{pid1}/ns/pid").readlink()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _link(folder / "ns/pid") == mark:
                found = process.identify(int(folder.name))
                if found is not None:
                    yield found

    @contextmanager
    def without_kvmpoold(self) -> Iterator[None]:
        """kill -9 it, and start it again afterwards."""
        self.kill("kvmpoold")
        try:
            yield
        finally:
            self.lab.start_kvmpoold(self.host)

    def kill(self, daemon: str) -> None:
        self.host.end_daemon(daemon, signal.SIGKILL)


def _program(pid: int) -> str:
    name = (_link(Path(f"/proc/{pid}/exe")) or Path()).name
    return name.removesuffix(" (deleted)")  # built anew meanwhile


def _link(path: Path) -> Path | None:
    try:
        return path.readlink()
    except OSError:
        return None


def until(look: Callable[[], T | None], seconds: float, wrong: str) -> T:
    """What `look` gives once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"{wrong} after {seconds:g} s"
        time.sleep(0.02)
    return value
