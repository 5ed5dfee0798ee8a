"""The root of the lab's Linux guest as one cpio: busybox, modules, glibc, kvmpool's guest libraries, example programs.

It is not compressed: under TCG unpacking costs more than reading. The same inputs give the same bytes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmpool.errors import NotFound
from kvmpool.lab import process
from kvmpool.lab.kernel import Kernel, module_bytes, modules

_MODULES = ("virtio_pci", "virtio_net", "virtio_console", "qemu_fw_cfg", "vmw_vsock_virtio_transport")
_FOLDERS = ("bin", "dev", "proc", "sys", "tmp", "run/kvmpool", "etc/kvmpool", "modules", "usr/local/bin")
_DIRECTORY, _FILE, _LINK = 0o040755, 0o100755, 0o120777
_LIBRARIES = "usr/lib/x86_64-linux-gnu"  # on the default path of Debian's loader


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the archive; `path` without a leading slash."""

    path: str
    mode: int
    data: bytes = b""


def build(kernel: Kernel, libraries: Sequence[Path], programs: Iterable[Path]) -> bytes:
    """The archive. `libraries` keep their names, on the loader's path; `programs` and data go to /usr/local/bin."""
    entries = [Entry(folder, _DIRECTORY) for folder in _FOLDERS]
    entries += [Entry("init", _FILE, Path(__file__).with_name("guest").joinpath("init").read_bytes())]
    entries += busybox()
    entries += module_entries(kernel, _MODULES)
    binaries = list(programs)
    entries += [Entry(f"usr/local/bin/{path.name}", _FILE, path.read_bytes()) for path in binaries]
    entries += [Entry(f"{_LIBRARIES}/{path.name}", _FILE, path.read_bytes()) for path in libraries]
    binaries += libraries
    if binaries:
        entries += _loader_and_libraries(binaries)
    return cpio(with_parents(entries))


def busybox() -> list[Entry]:
    """The machine's own, with a link for each of its commands."""
    found = shutil.which("busybox")
    if found is None:
        raise NotFound("busybox is missing. Next: apt-get install busybox-static")
    names = process.run([found, "--list"], timeout_s=10).stdout.split()
    links = [Entry(f"bin/{name}", _LINK, b"busybox") for name in names if name != "busybox"]
    return [Entry("bin/busybox", _FILE, Path(found).read_bytes()), *links]


def module_entries(kernel: Kernel, wanted: Iterable[str]) -> list[Entry]:
    """The `wanted` modules and what they need, and modules/order: in which insmod takes them."""
    files = modules(kernel.tree, wanted)
    names = [path.name.removesuffix(".xz") for path in files]
    entries = [Entry(f"modules/{name}", _FILE, module_bytes(path)) for name, path in zip(names, files, strict=True)]
    return [*entries, Entry("modules/order", _FILE, "\n".join(names).encode() + b"\n")]


def _loader_and_libraries(binaries: list[Path]) -> list[Entry]:
    """The machine's own loader and whatever the dynamic binaries need of its libraries, except a libcuda."""
    needed: dict[str, bytes] = {}
    for binary in binaries:
        listing = process.run(["ldd", binary], timeout_s=10, check=False).stdout  # nothing for a static one or data
        for name, path in re.findall(r"^\s*(\S+)(?: => (/\S+))? \(0x", listing, re.MULTILINE):
            if name.startswith(("linux-vdso", "libcuda.so")):
                continue
            place = name.lstrip("/") if name.startswith("/") else f"{_LIBRARIES}/{name}"
            needed[place] = Path(path or name).read_bytes()
    entries = [Entry(place, _FILE, data) for place, data in sorted(needed.items())]
    # A library that a static program opens asks for the loader by its soname, as any other library.
    loaders = [place for place in needed if "ld-linux" in place]
    return entries + [Entry(f"{_LIBRARIES}/{Path(place).name}", _LINK, f"/{place}".encode()) for place in loaders]


def with_parents(entries: list[Entry]) -> list[Entry]:
    """Each file after its folders, each path once."""
    ordered: dict[str, Entry] = {}
    for entry in entries:
        parts = entry.path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            ordered.setdefault(parent, Entry(parent, _DIRECTORY))
        ordered[entry.path] = entry
    return list(ordered.values())


def cpio(entries: Iterable[Entry]) -> bytes:
    """A "newc" archive (Linux, Documentation/driver-api/early-userspace/buffer-format.rst): owner 0, time 0."""
    blocks: list[bytes] = []
    for number, entry in enumerate([*entries, Entry("TRAILER!!!", 0)], start=1):
        name = entry.path.encode() + b"\0"
        links = 2 if entry.mode == _DIRECTORY else 1
        fields = (number, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + b"".join(b"%08X" % value for value in fields)
        blocks += [_padded(header + name), _padded(entry.data)]
    return b"".join(blocks)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
