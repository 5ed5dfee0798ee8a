"""The running host of the VFIO lab: commands, files and daemons in it, faults of its cards, its reboot.

What is done here is done from outside, through QEMU; the host itself knows nothing of the lab.
"""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvmpool
from kvmpool.errors import Unreachable
from kvmpool.lab import process, qmp, vfio_cards, vfio_channel, vfio_machine
from kvmpool.lab.process import Done, ProcessId
from kvmpool.lab.vfio_cards import Fault, LabCard

_BOOT_S = 180.0  # 8-10 s on an idle machine
_LIBVIRTD_S = 240.0  # 7-11 s; a first probe of QEMU's capabilities takes up to 100 s
_END_S = 30.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class VfioHost:
    """The host in the lab's `folder`; `keeper` is its QEMU. Every method raises Unreachable once that has ended."""

    folder: Path
    keeper: ProcessId

    def alive(self) -> bool:
        return process.alive(self.keeper)

    # --- commands and files -------------------------------------------------------------------------------------------

    def run(
        self,
        *argv: str,
        timeout_s: float = 120.0,
        check: bool = True,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a program inside to its end. Raises as process.run does."""
        chosen = _environment() | dict(environment or {})
        return vfio_channel.run(self.folder, argv, chosen, timeout_s=timeout_s, check=check, stdin=stdin)

    def sh(self, script: str, *words: str, timeout_s: float = 120.0, check: bool = True, stdin: str = "") -> Done:
        """Run a shell script inside; `words` are its $1, $2 and so on."""
        return self.run("sh", "-c", script, "sh", *words, timeout_s=timeout_s, check=check, stdin=stdin)

    def virsh(self, *words: str, timeout_s: float = 120.0, check: bool = True) -> str:
        """What `virsh` prints. Raises Unreachable with virsh's own error."""
        return self.run("virsh", "-q", *words, timeout_s=timeout_s, check=check).stdout

    def read(self, path: str) -> str:
        """A file inside; "" where it is missing."""
        return self.sh('[ ! -e "$1" ] || cat "$1"', path).stdout

    def write(self, path: str, text: str) -> None:
        self.sh('mkdir -p "${1%/*}" && cat >"$1"', path, stdin=text)

    def copy(self, source: Path, path: str) -> None:
        """A file of any bytes from outside."""
        packed = base64.b64encode(source.read_bytes()).decode()
        self.sh('base64 -d >"$1"', path, stdin=packed)

    # --- daemons ------------------------------------------------------------------------------------------------------

    def start_daemon(self, name: str, *argv: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a program that stays; its pid is in /run/NAME.pid, its output in /run/NAME.log."""
        inner = 'echo $$ >"/run/$0.pid"; exec "$@" >>"/run/$0.log" 2>&1 </dev/null'
        script = (
            'name=$1; inner=$2; shift 2; rm -f "/run/$name.pid"; setsid --fork sh -c "$inner" "$name" "$@"'
            ' >"/run/$name.log" 2>&1; until [ -s "/run/$name.pid" ]; do sleep 0.05; done'
        )
        words = ["sh", "-c", script, "sh", name, inner, *argv]
        self.run(*words, environment=environment)

    def daemon_pid(self, name: str) -> int | None:
        """The pid, inside, of a daemon that was started and is alive."""
        said = self.sh('pid=$(cat "/run/$1.pid") && [ -d "/proc/$pid" ] && echo "$pid"', name, check=False).stdout
        return int(said) if said.strip() else None

    def end_daemon(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal it and wait until it is gone; then SIGKILL. Nothing happens where it does not run."""
        for chosen in (number, signal.SIGKILL):
            script = (
                '[ -e "/run/$1.pid" ] && pid=$(cat "/run/$1.pid") && kill -"$2" "$pid" || exit 0;'
                ' for _ in $(seq "$3"); do [ -d "/proc/$pid" ] || exit 0; sleep 0.1; done; exit 1'
            )
            if self.sh(script, name, str(int(chosen)), str(int(_END_S * 10)), check=False).returncode == 0:
                return
        raise Unreachable(f"host {vfio_machine.HOSTNAME}: {name} does not end after SIGKILL")

    def start_libvirt(self) -> None:
        """Start virtlogd and libvirtd and return when libvirtd answers."""
        if self.daemon_pid("virtlogd") is None:
            self.start_daemon("virtlogd", "virtlogd")
        self.start_daemon("libvirtd", "libvirtd")
        wait = "until virsh -q uri >/dev/null 2>&1; do sleep 0.2; done"
        if self.sh(wait, timeout_s=_LIBVIRTD_S, check=False).returncode != 0:
            raise self.silent("libvirtd", "does not answer")

    def silent(self, daemon: str, what: str) -> Unreachable:
        """The error to raise about a daemon, with the last line of its log."""
        lines = [line for line in self.read(f"/run/{daemon}.log").splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "it said nothing"
        return Unreachable(f"host {vfio_machine.HOSTNAME}: {daemon} {what}: {said} (see /run/{daemon}.log in it)")

    # --- cards --------------------------------------------------------------------------------------------------------

    def driver(self, address: str) -> str:
        """Of the PCI device at `address`; "" where it has none or is not there."""
        link = f"/sys/bus/pci/devices/{address}/driver"
        return Path(self.run("readlink", link, check=False).stdout.strip()).name

    def give(self, address: str, driver: str = "vfio-pci") -> None:
        """Bind every endpoint of its IOMMU group to this driver, by hand as an administrator would."""
        self.sh(_GIVE, address, driver)

    # --- from outside -------------------------------------------------------------------------------------------------

    def inject(self, chosen: LabCard, fault: Fault) -> None:
        """Let it happen. Raises Refused with QEMU's words."""
        with qmp.monitor(self.folder, vfio_machine.MONITOR) as monitor:
            vfio_cards.inject(monitor, chosen, fault)


# The order of Linux, Documentation/ABI/testing/sysfs-bus-pci, driver_override: name it, unbind, ask for a new match.
_GIVE = """
set -e
modprobe "$2"
for device in "/sys/bus/pci/devices/$1/iommu_group/devices"/*; do
	address=${device##*/}
	echo "$2" >"$device/driver_override"
	[ ! -e "$device/driver" ] || echo "$address" >"$device/driver/unbind"
	echo "$address" >/sys/bus/pci/drivers_probe
	[ "$(readlink -f "$device/driver")" = "/sys/bus/pci/drivers/$2" ]
done
"""


def _environment() -> dict[str, str]:
    """Of every program in the host: this kvmpool and its Python, both on the root that it shares with us."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{_PATH}",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(Path(kvmpool.__file__).parents[1]),
    }


def boot(folder: Path, image: Path, record: Callable[[ProcessId], None]) -> VfioHost:
    """Start QEMU and return when the host takes commands. `record` is called with it before it has any effect.

    Raises Unreachable with the last words of its console when it ends, or is not up in time.
    """
    console = folder / vfio_machine.CONSOLE
    console.unlink(missing_ok=True)
    keeper = _start(folder, vfio_machine.command(image), record)

    def over() -> bool:
        return not process.alive(keeper) or _said(console, "READY")

    process.holds_within(over, _BOOT_S, 0.1)
    if not process.alive(keeper) or not _said(console, "READY"):
        raise Unreachable(f"the VFIO lab's host did not come up: {_last_words(folder)}")
    if wrong := [line for line in _lines(console) if line.startswith(("MODULE FAILED", "NO "))]:
        raise Unreachable(f"the VFIO lab's host came up without a part: {wrong[0]}")
    return VfioHost(folder, keeper)


def _start(folder: Path, words: Sequence[str], record: Callable[[ProcessId], None]) -> ProcessId:
    """The process waits for a line on stdin before it becomes QEMU: its starter has then recorded its pid."""
    waiting = ["sh", "-c", 'read -r line && [ "$line" = go ] && exec "$@" </dev/null', "sh", *words]
    with (folder / "qemu.log").open("ab") as log:
        started = subprocess.Popen(
            waiting, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    keeper = process.identify(started.pid)
    if keeper is None or started.stdin is None:
        raise Unreachable(f"the VFIO lab's host ended at once: {_last_words(folder)}")
    record(keeper)
    started.stdin.write(b"go\n")
    started.stdin.close()
    return keeper


def _said(console: Path, marker: str) -> bool:
    return marker in _lines(console)


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text(errors="replace").splitlines()] if file.exists() else []


def _last_words(folder: Path) -> str:
    for name in ("qemu.log", vfio_machine.CONSOLE):
        if lines := [line for line in _lines(folder / name) if line]:
            panics = [line for line in lines if "Kernel panic" in line]
            return (panics or lines)[-1]
    return "it said nothing"


def power_off(keeper: ProcessId) -> None:
    """As a mains failure does: at once, whatever was not on the disk is lost. Idempotent."""
    process.end(keeper, signal_first=signal.SIGKILL)
