"""Program: appends the kernel's events of PCI and VFIO devices to a file, a line each. For a host without udevd.

Source: kernel, lib/kobject_uevent.c: NUL-separated `ACTION@DEVPATH`, then `KEY=value`; netlink(7), multicast group 1.
"""

import socket
import sys

NETLINK_KOBJECT_UEVENT = 15
KERNEL_GROUP = 1
SUBSYSTEMS = {"pci", "vfio"}


def main(path: str) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_KOBJECT_UEVENT) as events, open(path, "a") as file:
        events.bind((0, KERNEL_GROUP))
        while True:
            head, *rest = events.recv(65536).decode(errors="replace").split("\0")
            values = dict(word.split("=", 1) for word in rest if "=" in word)
            if values.get("SUBSYSTEM") in SUBSYSTEMS:
                action, _, device = head.partition("@")
                name = values.get("PCI_SLOT_NAME") or device.rpartition("/")[2]
                print(action, values["SUBSYSTEM"], name, values.get("ERROR_EVENT", ""), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
