"""Program: makes the namespaces of one lab host and stays in them as pid 1, reaping orphans until it is told to end.

Run as `python3 -I -S pid1.py HOSTDIR HOSTNAME ADDRESS MAC SOURCE:TARGET...` (standard library only: starts in 20 ms).
It waits for the line `go` on stdin before it changes anything: whoever starts it has then recorded its pid, and a
starter that dies first leaves nothing. Each SOURCE is bound to TARGET, in the given order, in the host's own mount
namespace.

The process that was started (the keeper) stays outside the pid namespace and has one child, the host's pid 1. The
death of either ends everything in the host: the kernel kills a pid namespace with its first process, and pid 1 dies
with its keeper. A libvirtd whose QEMU is reaped by nobody waits 40 s for it: pid 1 reaps whatever it is given.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 1 << 26, 1 << 27, 1 << 29, 1 << 30
MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x1, 0x1000, 0x4000, 0x40000, 0x2
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> None:
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), options.encode() or None)


def main(argv: list[str]) -> int:
    if sys.stdin.readline() != "go\n":
        return 0
    hostdir, hostname, address, mac, *binds = argv
    _call("unshare", CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC)
    keeper = os.pidfd_open(os.getpid())
    child = os.fork()
    if child:
        return _keep(child)
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([keeper], [], [], 0)[0]:  # it died before prctl: nobody would end this host
        return 1
    folder = os.open(hostdir, os.O_RDONLY)  # its path may soon be hidden below the host's own /run
    _settle(hostdir, hostname, address, mac, binds)
    os.close(os.open("ready", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    _reap()
    return 0


def _keep(child: int) -> int:
    """Wait for the host's end; SIGTERM here ends the host."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    while True:
        pid, status = os.waitpid(child, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status) & 0x7F


def _settle(hostdir: str, hostname: str, address: str, mac: str, binds: list[str]) -> None:
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", 0)
    _libc.umount2(b"/sys", MNT_DETACH)  # the sysfs that shows the outer network namespace
    _mount("sysfs", "/sys", "sysfs", 0)
    for parent in ("etc", "var/lib"):  # mount points that the machine may lack, without creating them on the machine
        skeleton = os.path.join(hostdir, "skeleton", parent)
        _mount("overlay", "/" + parent, "overlay", MS_RDONLY, f"lowerdir={skeleton}:/{parent}")
    # A guest's shared memory is named after its uuid, which is the same in every lab.
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777")
    for bind in binds:
        source, target = bind.split(":")
        _mount(source, target, None, MS_BIND)
    socket.sethostname(hostname)
    for line in (
        "link set lo up",
        # Pinned: a bridge takes the lowest MAC of its ports, and a tap's is the same on both ends of a migration.
        f"link add br0 address {mac} type bridge",
        f"addr add {address} dev br0",
        "link set br0 up",
    ):
        subprocess.run(["ip", *line.split()], check=True, timeout=10)


def _reap() -> None:
    """Take zombies away until SIGTERM. Both signals are blocked: none is lost between a look and the next wait."""
    expected = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, expected)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if signal.sigwait(expected) == signal.SIGTERM:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
