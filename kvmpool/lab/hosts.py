"""A lab host: a machine of its own made of namespaces, with its own libvirtd, virtlogd, network and private folders.

Nothing of it is on the machine outside: its mounts, its bridge and its processes live in namespaces that end with its
pid 1 (pid1.py), its files in the lab's folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kvmpool.errors import Unreachable
from kvmpool.lab import process
from kvmpool.lab.folder import cache_folder
from kvmpool.lab.process import Done, ProcessId

# folder of the host -> where it appears inside; /run last, because the lab's own folder may be below /run
_PRIVATE = {
    "etc-libvirt": "/etc/libvirt",
    "etc-kvmpool": "/etc/kvmpool",
    "lib-libvirt": "/var/lib/libvirt",
    "lib-kvmpool": "/var/lib/kvmpool",
    "log-libvirt": "/var/log/libvirt",
    "cache-libvirt": "/var/cache/libvirt",
    "run": "/run",
}
_CAPABILITIES = Path("cache-libvirt/qemu/capabilities")
_SETTLE_S = 10.0  # namespaces and a bridge: 0.1 s on an idle machine
_LIBVIRTD_S = 30.0  # 0.5 s, plus the first probe of QEMU's capabilities
_END_S = 10.0  # a daemon that was asked to end
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL")  # of our environment; nothing else reaches a host's daemons


@dataclass(frozen=True, slots=True)
class HostSpec:
    """What makes one host differ from the next. `number` is 1-9."""

    name: str
    number: int

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def mac(self) -> str:
        return f"02:77:00:00:01:{self.number:02x}"


@dataclass(frozen=True, slots=True)
class Host:
    """A host whose namespaces exist (or existed: every method raises Unreachable once its pid 1 is gone)."""

    spec: HostSpec
    folder: Path
    keeper: ProcessId
    environment: dict[str, str] = field(default_factory=dict, hash=False)  # for every program started in it

    def outside(self, inside: str) -> Path:
        """Where a private file of the host, named as the host sees it, is on the machine."""
        path = PurePosixPath(inside)
        for name, target in _PRIVATE.items():
            if path.is_relative_to(target):
                return self.folder / name / path.relative_to(target)
        raise ValueError(f"{inside} is not private to a lab host")

    def alive(self) -> bool:
        return process.alive(self.keeper) and bool(process.children(self.keeper))

    def command(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """The words that run `argv` inside the host, in its root folder, with only _PASSED_ON of our environment."""
        if not (inner := process.children(self.keeper)):
            raise Unreachable(f"lab host {self.spec.name} is not running. Next: kvmpool lab down, then kvmpool lab up")
        ours = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        chosen = ours | self.environment | dict(environment or {})
        words = ["nsenter", "-t", str(inner[0]), "-m", "-u", "-n", "-p", "-i", "--", "env", "-i"]
        return words + [f"{name}={value}" for name, value in chosen.items()] + list(argv)

    def run(self, *argv: str, timeout_s: float = 30.0, check: bool = True, stdin: str = "") -> Done:
        """Run a program inside to its end. Raises as process.run does."""
        return process.run(self.command(argv), timeout_s=timeout_s, check=check, stdin=stdin)

    def virsh(self, *words: str, timeout_s: float = 60.0, check: bool = True) -> str:
        """What `virsh` prints. Raises Unreachable with virsh's own error."""
        return self.run("virsh", "-q", *words, timeout_s=timeout_s, check=check).stdout

    # --- daemons inside -----------------------------------------------------------------------------------------------

    def start_daemon(self, name: str, *argv: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a program that stays, as a child of pid 1; its pid is in /run/NAME.pid, its output in /run/NAME.log."""
        script = 'echo $$ >"/run/$0.pid"; exec "$@" >>"/run/$0.log" 2>&1 </dev/null'
        words = ["setsid", "--fork", "sh", "-c", script, name, *argv]
        self.outside(f"/run/{name}.pid").unlink(missing_ok=True)
        process.run(self.command(words, environment), timeout_s=10)
        if not process.holds_within(lambda: self.daemon_pid(name) is not None, 5.0):
            raise self.silent(name, "did not start")

    def daemon_pid(self, name: str) -> int | None:
        """The pid, inside, of a daemon that was started and is alive."""
        try:
            pid = int(self.outside(f"/run/{name}.pid").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None
        return pid if self.run("test", "-d", f"/proc/{pid}", check=False).returncode == 0 else None

    def end_daemon(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal it and wait until it is gone; then SIGKILL. Nothing happens where it does not run."""
        for chosen in (number, signal.SIGKILL):
            if (pid := self.daemon_pid(name)) is None:
                return
            self.run("kill", f"-{int(chosen)}", str(pid), check=False)
            if process.holds_within(lambda: self.daemon_pid(name) is None, _END_S):
                return
        raise Unreachable(f"host {self.spec.name}: {name} does not end after SIGKILL")

    def start_libvirt(self, environment: Mapping[str, str] | None = None) -> None:
        """Start virtlogd and libvirtd and return when libvirtd answers."""
        if self.daemon_pid("virtlogd") is None:
            self.start_daemon("virtlogd", "virtlogd")
        self.start_daemon("libvirtd", "libvirtd", "--listen", environment=environment)
        self.wait_for_libvirt()

    def wait_for_libvirt(self) -> None:
        socket = self.outside("/run/libvirt/libvirt-sock")

        def answers() -> bool:
            return socket.exists() and self.run("virsh", "-q", "uri", check=False).returncode == 0

        if not process.holds_within(answers, _LIBVIRTD_S, 0.05):
            raise self.silent("libvirtd", "does not answer")

    def silent(self, daemon: str, what: str) -> Unreachable:
        """The error to raise about a daemon, with the last line of its log."""
        return Unreachable(f"host {self.spec.name}: {daemon} {what}: {_last_line(self.outside(f'/run/{daemon}.log'))}")

    def keep_capabilities(self) -> None:
        """Let libvirt probe QEMU (1.5 s, once a machine) and save what it learnt for the next lab."""
        kept = cache_folder() / "capabilities"
        if not kept.is_dir():
            self.virsh("domcapabilities", "--virttype", "qemu")
            shutil.copytree(self.folder / _CAPABILITIES, kept, dirs_exist_ok=True)


def end(keeper: ProcessId) -> None:
    """End a host: everything in it is gone when this returns. Idempotent."""
    inside = [process.identify(pid) for pid in process.children(keeper)]
    process.end(keeper)
    for pid1 in inside:
        if pid1 is not None:
            process.end(pid1)  # gone already, unless the keeper itself had to be killed


def boot(spec: HostSpec, folder: Path, record: Callable[[ProcessId], None], environment: Mapping[str, str]) -> Host:
    """Make a host. `record` is called with its keeper before that has any effect; libvirt is not started yet."""
    _write_folders(spec, folder)
    argv = [sys.executable, "-I", "-S", str(Path(__file__).with_name("pid1.py"))]
    argv += [str(folder), spec.name, f"{spec.address}/24", spec.mac]
    argv += [f"{folder / name}:{target}" for name, target in _PRIVATE.items()]
    with (folder / "pid1.log").open("ab") as log:
        started = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, cwd="/")
    keeper = process.identify(started.pid)
    if keeper is None or started.stdin is None:
        raise Unreachable(f"host {spec.name}: its first process ended at once: {_last_line(folder / 'pid1.log')}")
    record(keeper)
    started.stdin.write(b"go\n")
    started.stdin.close()
    ready = folder / "ready"
    process.holds_within(lambda: ready.exists() or not process.alive(keeper), _SETTLE_S)
    if not ready.exists():
        raise Unreachable(f"host {spec.name}: no namespaces: {_last_line(folder / 'pid1.log')}")
    return Host(spec, folder, keeper, dict(environment))


def _write_folders(spec: HostSpec, folder: Path) -> None:
    for name in (*_PRIVATE, "skeleton/etc/kvmpool", "skeleton/var/lib/kvmpool", "etc-libvirt/hooks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "etc-libvirt/libvirtd.conf").write_text(_LIBVIRTD_CONF.format(spec=spec), encoding="utf-8")
    (folder / "etc-libvirt/qemu.conf").write_text(_QEMU_CONF.format(spec=spec), encoding="utf-8")
    if (kept := cache_folder() / "capabilities").is_dir():  # a stale entry is harmless: libvirt compares QEMU's ctime
        shutil.copytree(kept, folder / _CAPABILITIES, dirs_exist_ok=True)


# Without host_uuid libvirt takes the machine's, the same for every lab host, and refuses migrations between them.
_LIBVIRTD_CONF = """\
host_uuid = "0000000{spec.number}-1111-4222-8333-444444444444"
auth_unix_rw = "none"
listen_tls = 0
listen_tcp = 1
auth_tcp = "none"
listen_addr = "{spec.address}"
log_outputs = "3:file:/var/log/libvirt/libvirtd.log"
"""
_QEMU_CONF = """\
user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
migration_host = "{spec.address}"
"""


def _last_line(log: Path) -> str:
    """For an error message; says where to look when there is nothing to quote."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return f"{lines[-1].strip() if lines else 'it said nothing'} (see {log})"
