"""Program: stands for QEMU in a lab host without VFIO; each vfio-pci device becomes QEMU's own `edu` card.

Installed over /usr/bin/qemu-system-x86_64 by hostdev.py, which puts the lines REAL and FAULTS above this text (standard
library only). It becomes the real QEMU, with the words of libvirt but for the devices; a child of it sits between
libvirt and QEMU's monitor, where devices are plugged later. libvirt, its checks of the host and its records know
nothing of all this.

A file in FAULTS, named as a command of the monitor, is what QEMU answers to it instead of doing it: its text is the
error. An empty `device_del` is a guest that is asked and rejects it (QEMU's event DEVICE_UNPLUG_GUEST_ERROR).
"""

import contextlib
import json
import os
import re
import select
import socket
import sys
import time

REAL = globals().get("REAL", "/run/kvmpool-lab/qemu")
FAULTS = globals().get("FAULTS", "/run/kvmpool-lab/faults")
_KEPT = ("id", "bus", "addr", "multifunction")  # of a vfio-pci device's properties
_MAX_FDS = 16
_MONITOR = re.compile(r"socket,id=charmonitor,fd=(\d+),(.*)")


def swapped(device: dict[str, object]) -> dict[str, object]:
    """The card that stands for a vfio-pci device; any other device as it is."""
    if device.get("driver") != "vfio-pci":
        return device
    return {"driver": "edu", **{key: value for key, value in device.items() if key in _KEPT}}


def main(words: list[str]) -> None:
    for at, word in enumerate(words):
        if at and words[at - 1] == "-device" and word.startswith("{"):
            words[at] = json.dumps(swapped(json.loads(word)))
        if at and words[at - 1] == "-chardev" and (monitor := _MONITOR.fullmatch(word)):
            words[at] = f"socket,id=charmonitor,fd={_between(int(monitor[1]))},{monitor[2]}"
    os.execv(REAL, [REAL, *words])


def _between(libvirt_fd: int) -> int:
    """Start the child at libvirt's listening socket; the socket at which QEMU is to listen instead."""
    inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    inner.bind("")  # an abstract name that the kernel chooses, in this host's network namespace
    inner.listen(1)
    qemu = os.pidfd_open(os.getpid())
    if os.fork():
        inner.set_inheritable(True)
        return inner.detach()
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    name = inner.getsockname()
    for text in os.listdir("/proc/self/fd"):
        if int(text) not in (0, 1, 2, libvirt_fd, qemu):
            with contextlib.suppress(OSError):
                os.close(int(text))
    inner.detach()
    outer = socket.socket(fileno=libvirt_fd)
    while select.select([qemu, outer.fileno()], [], [])[0] != [qemu]:
        _serve(outer.accept()[0], name, qemu)
    os._exit(0)


def _serve(libvirt: socket.socket, name: bytes, qemu: int) -> None:
    """One connection of libvirt's, to its end or QEMU's."""
    with libvirt, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as monitor:
        while monitor.connect_ex(name) != 0:
            if select.select([qemu], [], [], 0.01)[0]:
                return
        rests = {libvirt: b"", monitor: b""}
        while True:
            for ready in select.select([libvirt, monitor], [], [])[0]:
                try:
                    data, fds, _, _ = socket.recv_fds(ready, 1 << 16, _MAX_FDS)
                except OSError:
                    return
                if not data:
                    return
                *lines, rests[ready] = (rests[ready] + data).split(b"\n")
                if ready is monitor:
                    _pass(lines, libvirt, fds)
                else:
                    _pass([_rewritten(line) for line in lines if not _answered(line, libvirt)], monitor, fds)


def _pass(lines: list[bytes], other: socket.socket, fds: list[int]) -> None:
    """`fds` go with the first of them: libvirt sends one with the command that is about it."""
    if lines:
        socket.send_fds(other, [b"".join(line + b"\n" for line in lines)], fds)
    for fd in fds:
        os.close(fd)


def _rewritten(line: bytes) -> bytes:
    if b'"vfio-pci"' not in line:
        return line
    command = json.loads(line)
    command["arguments"] = swapped(command["arguments"])
    return json.dumps(command).encode()


def _answered(line: bytes, libvirt: socket.socket) -> bool:
    """Has a fault answered this command in QEMU's place?"""
    command = json.loads(line) if b'"device_' in line else {}
    name, device = command.get("execute", ""), command.get("arguments", {})
    if not name.startswith("device_") or (name == "device_add" and device.get("driver") != "vfio-pci"):
        return False
    try:
        with open(os.path.join(FAULTS, name), encoding="utf-8") as file:
            text = file.read().strip()
    except OSError:
        return False
    answers: list[object] = [{"id": command["id"], "error": {"class": "GenericError", "desc": text}}]
    if not text:
        now = {"seconds": int(time.time()), "microseconds": 0}
        told = {"device": device["id"], "path": f"/machine/peripheral/{device['id']}"}
        event = {"timestamp": now, "event": "DEVICE_UNPLUG_GUEST_ERROR", "data": told}
        answers = [{"id": command["id"], "return": {}}, event]
    libvirt.sendall(b"".join(json.dumps(each).encode() + b"\r\n" for each in answers))
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
